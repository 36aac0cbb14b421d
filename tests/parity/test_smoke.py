"""Case C73: every build of the model in one go, prefill of three tokens and two of decode, on a CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parity.cli import app
from parity.exit_codes import EXIT_AGREES
from reference.checkpoint import write_synthetic
from reference.config import NoteConfig, tiny
from reference.model_tiny import tiny_note


def without_drafts() -> NoteConfig:
    config = tiny()
    return dataclasses.replace(config, text=dataclasses.replace(config.text, num_nextn_predict_layers=0))


@pytest.mark.parametrize("config", [tiny, without_drafts, tiny_note], ids=["drafts", "no drafts", "towers"])
@pytest.mark.parametrize("graphs", [[], ["--graphs"]], ids=["eager", "recorded"])
def test_c73_every_build_agrees(tmp_path: Path, config, graphs: list[str]) -> None:
    made = config()
    write_synthetic(tmp_path / "model", made)
    drafts = " m:a2" if made.text.num_nextn_predict_layers else ""
    options = ["--candidate", "optimized", *graphs, "--level", "exact", "--workload", f"p:a3 d:a d:a{drafts}"]
    result = CliRunner().invoke(app, ["check", str(tmp_path / "model"), *options])
    assert result.exit_code == EXIT_AGREES, result.output
    assert "skipped" not in result.output
    if made.vision is None:
        return
    options[-1] = "t3 i56x56 s1281"
    result = CliRunner().invoke(app, ["check", str(tmp_path / "model"), "--multimodal", *options])
    assert result.exit_code == EXIT_AGREES, result.output
