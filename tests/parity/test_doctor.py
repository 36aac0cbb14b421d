"""`note-parity doctor`: every op and every package is on the screen, and nothing is cut off."""

import pytest
import torch
from typer.testing import CliRunner

from optimized import device
from optimized.device import HOPPER_OPS, OPS, choose
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


@pytest.mark.parametrize("has_them", [False, True])
def test_which_of_two_attention_kernels_there_is(monkeypatch: pytest.MonkeyPatch, has_them: bool):
    monkeypatch.setattr(device, "triton_obstacle", lambda _: None)
    monkeypatch.setattr(device, "has_hopper_kernels", lambda _: has_them)
    reasons = {op: choice.reason for op, choice in choose(torch.device("cpu")).choices.items()}
    for op, otherwise in HOPPER_OPS.items():
        assert (otherwise in reasons[op], "none for Hopper" in reasons[op]) == (has_them, not has_them)
    assert {reasons[op] for op in OPS if op not in HOPPER_OPS} == {"interpreted"}
    # Of what is asked for by name, too.
    assert ("Hopper: one pass" in choose("cpu", "triton").choices["ring_attention"].reason) == has_them
    assert choose("cpu", "torch").choices["ring_attention"].reason == "asked for"
