"""`note-parity doctor`: every op and every package is on the screen, and nothing is cut off."""

from typer.testing import CliRunner

from optimized.device import OPS
from parity.cli import app
from parity.doctor import DEPENDENCIES


def test_nothing_is_cut_off():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    words = {word.strip(",") for word in result.stdout.split()}
    assert {*OPS} <= words
    assert {name for name, _ in DEPENDENCIES} <= words
    assert all(len(line) <= 160 for line in result.stdout.splitlines())
