"""Compares the trace of a candidate with the reference in several views; what the views are: `findings`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parity.detail import Detail, detail
from parity.findings import ChoiceResult, Comparison, ProbeResult, View
from parity.judge import Judge, Reference
from parity.tolerance import DRAWS, FALSE_ALARM_RATE
from parity.trace import Trace
from parity.workload import Workload


def compare(
    reference: Reference,
    candidate: Trace,
    dtype: torch.dtype,
    workload: Workload,
    views: Sequence[View] = ("cascade", "isolated"),
    draws: int = DRAWS,
    false_alarm_rate: float = FALSE_ALARM_RATE,
    with_detail: bool = False,
) -> Comparison:
    """Compare a candidate that ran `workload` in `dtype`. `reference(dtype)` builds the reference in a dtype.

    With `draws` = 0 the candidate has no rounding (exact mode, float64): every error is held against 1e-10.
    `with_detail`: also what pictures show of the cascade, where the truth runs with the candidate's choices.
    """
    shown = Detail()
    probes: list[ProbeResult] = []
    choices: dict[tuple[str, str, int, int], ChoiceResult] = {}
    choice_rows = 0
    for view in views:
        judge = Judge(reference, candidate, dtype, workload, view, draws, false_alarm_rate)
        probes += judge.probes()
        if with_detail and view == "cascade":
            shown = detail(judge.truth, candidate)
        # The most isolated view judges a choice: there the scores come from the candidate's own inputs.
        for choice in judge.choices():
            exchange = choice.exchange
            choices[exchange.name, exchange.request, exchange.position, exchange.occurrence] = choice
        choice_rows = judge.choice_rows
    return Comparison(tuple(probes), tuple(choices.values()), choice_rows, false_alarm_rate, detail=shown)


def compare_exact(reference: Reference, candidate: Trace, workload: Workload, with_detail: bool = False) -> Comparison:
    """Both without rounding: the same logic differs by no more than reassociation of float64 sums."""
    return compare(reference, candidate, torch.float64, workload, views=("cascade",), draws=0, with_detail=with_detail)
