"""Fills a vision tower from a checkpoint folder. Source: vision specification, section 8."""

import os

import torch

from reference.checkpoint.expected_towers import VISION
from reference.checkpoint.folder import CheckpointFolder
from reference.checkpoint.load import load_into
from reference.config import VisionConfig
from reference.errors import CheckpointError
from reference.numerics import Numerics
from reference.vision import VisionTower
from reference.vision_numerics import VisionNumerics


def empty_vision_tower(config: VisionConfig, numerics: VisionNumerics | None = None) -> VisionTower:
    """A tower without weights, on the meta device: the released one has 13.7 GB of them."""
    with torch.device("meta"):
        return VisionTower(config, numerics)


def load_vision_tower(
    path: str | os.PathLike[str],
    numerics: VisionNumerics | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    device: str | torch.device = "cpu",
    scan_non_finite: bool = False,
) -> VisionTower:
    """Open a folder and build its vision tower; the other parts are verified and left alone.

    `dtype` is what the weights are converted to (None: as stored); router biases stay at least float32.
    Raises: ConfigError, CheckpointError, also for a folder whose config has no vision tower.
    """
    # Which lanes of an index head are rotated matters to the text model alone.
    folder = CheckpointFolder.open(path, Numerics(missing_indexer_rope_layout="leading"), ("vision",))
    if folder.config.vision is None:
        raise CheckpointError(f"{folder.path}: has no vision tower: its config.json lacks vision_config")
    tower = empty_vision_tower(folder.config.vision, numerics)
    load_into(tower, folder, VISION, dtype, device, scan_non_finite)
    return tower
