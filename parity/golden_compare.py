"""Compares a candidate with a golden: with truths in float64, measured floors and measured margins. Runs no model."""

from __future__ import annotations

from collections.abc import Sequence

from parity.findings import Comparison
from parity.golden_causes import families_of
from parity.golden_file import Golden
from parity.golden_trace import golden_trace
from parity.stored import CLEAR_MARGIN, Expected, StoredJudge
from parity.stored_partial import SummarisedRows
from parity.tolerance import FALSE_ALARM_RATE
from parity.trace import Trace

__all__ = ["CLEAR_MARGIN", "compare_to_golden"]


def compare_to_golden(
    golden: Golden,
    candidate: Trace,
    false_alarm_rate: float = FALSE_ALARM_RATE,
    statistics: Sequence[SummarisedRows] = (),
) -> Comparison:
    """Judge every name that both have; what is not judged, and why, is in `skipped`.

    `statistics`: tensors of which the candidate kept sums and samples only. One table of each side is in memory at a
    time. Nothing in common is not an agreement: see `Comparison.compared`.
    """
    expected = Expected(golden, golden_trace(golden), families_of(golden.workload), "within noise")
    return StoredJudge(expected, candidate, statistics, false_alarm_rate).comparison()
