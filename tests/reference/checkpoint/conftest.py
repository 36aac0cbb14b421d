"""A tiny checkpoint that holds every bucket, once for all tests, and copies of it to damage."""

import shutil
from pathlib import Path

import pytest
from checkpoint_folders import tiny_with_towers

from reference.checkpoint import write_synthetic
from reference.config import NoteConfig


@pytest.fixture(scope="session")
def towers_config() -> NoteConfig:
    return tiny_with_towers()


@pytest.fixture(scope="session")
def intact(tmp_path_factory: pytest.TempPathFactory, towers_config: NoteConfig) -> Path:
    """Synthetic weights in three text shards and two tower files. Not to be written to."""
    folder = tmp_path_factory.mktemp("checkpoint") / "intact"
    write_synthetic(folder, towers_config, shards=3)
    return folder


@pytest.fixture
def damaged(intact: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(intact, tmp_path / "damaged"))
