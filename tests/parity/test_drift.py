"""Drift: how rounding grows over depth, length and dtype on the tiny model."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from parity.drift import DTYPES, LENGTHS, Drift, DriftError, drift
from parity.report.drift_text import print_drift, write_drift
from parity.report.plots import drift_pictures
from parity.runners.reference import ReferenceRunner
from reference.checkpoint import synthetic_tensors
from reference.config import tiny

CONFIG = tiny()
WEIGHTS = dict(synthetic_tensors(CONFIG))


def reference(dtype: torch.dtype) -> ReferenceRunner:
    return ReferenceRunner(CONFIG, WEIGHTS, dtype)


@pytest.fixture(scope="module")
def measured() -> Drift:
    return drift(reference)


def test_every_layer_at_every_length_and_dtype(measured: Drift) -> None:
    layers = [*range(CONFIG.text.num_hidden_layers), None]
    found = [(row.dtype, row.length, row.layer) for row in measured.rows]
    assert found == [(dtype, length, layer) for dtype in DTYPES for length in LENGTHS for layer in layers]
    assert 0 < measured.exchanged < measured.choice_rows


def test_errors_are_those_of_the_dtype(measured: Drift) -> None:
    """A few roundings at least, and far less than everything."""
    for row in measured.rows:
        eps = torch.finfo(getattr(torch, row.dtype)).eps
        assert 0.2 * eps < row.isolated < 16 * eps
        assert 0.2 * eps < row.cascade < 64 * eps


def test_the_first_layer_has_nothing_to_receive_and_the_last_receives_most(measured: Drift) -> None:
    first = [row for row in measured.rows if row.layer == 0]
    assert all(row.cascade == row.isolated == row.growth for row in first)
    last = [row for row in measured.rows if row.layer == CONFIG.text.num_hidden_layers - 1 and row.length > 4]
    assert all(row.cascade > 2 * row.isolated for row in last)


def test_growth_adds_up_to_what_arrives(measured: Drift) -> None:
    rows = [row for row in measured.rows if (row.dtype, row.length) == ("bfloat16", LENGTHS[-1])]
    assert sum(row.growth for row in rows) == pytest.approx(rows[-1].cascade)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtypes": ["int8"]}, "one of bfloat16, float16, float32, found int8"),
        ({"lengths": [4, 0]}, "at least one token"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(DriftError, match=message):
        drift(reference, **arguments)


def test_text_and_files(measured: Drift, tmp_path: Path) -> None:
    console = Console(width=100, highlight=False, markup=False)
    with console.capture() as capture:
        print_drift(measured, console)
    lines = capture.get().splitlines()
    assert lines[0].startswith("DRIFT  relative error of the logits at 256 tokens: bfloat16 ")
    assert max(len(line.rstrip()) for line in lines[1:-1]) <= 100
    write_drift(measured, "the tiny model", tmp_path / "drift.json", tmp_path / "drift.html")
    records = [json.loads(line) for line in (tmp_path / "drift.json").read_text().splitlines()]
    assert len(records) == records[-1]["rows"] + 2 == len(measured.rows) + 2
    page = (tmp_path / "drift.html").read_text(encoding="utf-8")
    assert page.count("<img") == len(drift_pictures(measured)) == len(DTYPES) + 1
    assert "<script" not in page
