"""The frame of the command: exit codes, messages instead of tracebacks, and a fast start."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import parity.cli
import parity.inspect_model
from parity.cli import EXIT_COULD_NOT_RUN, EXIT_UNUSABLE, app, main
from parity.runners import NotSupportedHere, RunnerUnavailable
from reference.errors import CheckpointError, MissingPackageError, NoteError


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"note-parity {version('note-parity')}\n")


def test_help_states_the_exit_codes() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "0 agrees, 1 disagrees, 2 wrong use" in result.stdout


@pytest.mark.parametrize(
    "arguments", [[], ["inspect"], ["no-such-command"], ["inspect", "tiny", "--no-such-option"], ["inspect", "a", "b"]]
)
def test_wrong_use_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == EXIT_UNUSABLE


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_wrong_values_exit_with_2(value: str) -> None:
    assert CliRunner().invoke(app, ["inspect", "tiny", "--context", value]).exit_code == EXIT_UNUSABLE


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (NoteError("refused"), EXIT_UNUSABLE),
        (CheckpointError("folder: 2 problems\n  one\n  two"), EXIT_UNUSABLE),
        (RunnerUnavailable("transformers is not installed"), EXIT_COULD_NOT_RUN),
        (NotSupportedHere("no draft layer"), EXIT_COULD_NOT_RUN),
        (MissingPackageError("Pillow is needed"), EXIT_COULD_NOT_RUN),
    ],
)
def test_refusals_are_one_message(monkeypatch: pytest.MonkeyPatch, error: NoteError, exit_code: int) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(parity.inspect_model, "inspect_model", refuse)
    result = CliRunner().invoke(app, ["inspect", "tiny"])
    assert result.exit_code == exit_code
    assert (result.stdout, result.stderr) == ("", f"error: {error}\n")


def test_a_bug_is_not_a_disagreement(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(**_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(parity.cli, "app", broken)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == EXIT_UNUSABLE
    assert "ZeroDivisionError: a bug" in capsys.readouterr().err


def test_runs_as_a_module_anywhere(tmp_path: Path) -> None:
    result = python("-m", "parity.cli", "inspect", "tiny", "--json", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["total_tensors"] == 341
    (tmp_path / "config.json").write_text("[")
    result = python("-m", "parity.cli", "inspect", "config.json", folder=tmp_path)
    assert result.returncode == EXIT_UNUSABLE
    assert result.stderr.startswith("error: config.json: is not valid JSON")


def test_starts_without_torch(tmp_path: Path) -> None:
    result = python("-c", "import sys, parity.cli; print(sorted({'torch', 'rich'} & {*sys.modules}))", folder=tmp_path)
    assert result.stdout.strip() == "[]", result.stderr


def test_c65_one_command_cuts_a_slice_that_loads(tmp_path: Path) -> None:
    """Written, cut, and read back: three layers of six, five experts of fourteen, and too few experts."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert CliRunner().invoke(app, ["synthetic", str(whole)]).exit_code == 0
    layers = ["--layer", "0", "--layer", "1", "--layer", "2"]
    assert CliRunner().invoke(app, ["slice", str(whole), str(part), *layers, "--experts", "5"]).exit_code == 0
    assert CliRunner().invoke(app, ["inspect", str(part)]).exit_code == 0
    refused = CliRunner().invoke(app, ["slice", str(whole), str(tmp_path / "no"), "--layer", "1", "--experts", "2"])
    assert refused.exit_code == 2
    assert "num_experts_per_tok" in refused.output
