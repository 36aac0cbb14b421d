"""The main job: does the reference agree with the oracle, on the same checkpoint, over a sweep of workloads?

Three levels, each with its own limit:

exact      every rounding in both promoted to float64: the logic. Limit 1e-10.
float32    rounding of float32. Limit: the measured floor.
bfloat16   under `Numerics.transformers`. Limit: the measured floor; how much is bitwise equal is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch

from parity.compare import compare, compare_exact
from parity.findings import ChoiceVerdict, Comparison, ProbeResult, View
from parity.judge import Reference
from parity.run import run_workload
from parity.runners import Runner
from parity.shrink import smallest_failing
from parity.trace import TraceRecorder
from parity.workload import Case, Workload

Level = Literal["exact", "float32", "bfloat16"]
LEVELS: tuple[Level, ...] = ("exact", "float32", "bfloat16")


@dataclass(frozen=True)
class Run:
    """One workload at one level."""

    level: Level
    workload: Case
    comparison: Comparison


@dataclass(frozen=True)
class LevelSummary:
    """What the runs of one level add up to."""

    level: Level
    workloads: int
    tensors: int
    elements: int
    bitwise_equal: int
    worst: ProbeResult | None
    choice_rows: int
    choices: dict[ChoiceVerdict, int]
    different: int

    @property
    def is_different(self) -> bool:
        return self.different > 0


@dataclass(frozen=True)
class CheckReport:
    """All runs of a check, `skipped`: what was asked and could not run, one line each."""

    expected: str
    actual: str
    runs: tuple[Run, ...]
    skipped: tuple[str, ...]

    @property
    def first_different(self) -> Run | None:
        """The run to look at: the shortest workload of the first level that differs."""
        different = [run for run in self.runs if run.comparison.is_different]
        return min(different, key=_size, default=None)

    @property
    def compared(self) -> int:
        return sum(run.comparison.compared for run in self.runs)

    @property
    def levels(self) -> tuple[LevelSummary, ...]:
        return tuple(
            _summary(level, runs) for level in LEVELS if (runs := [run for run in self.runs if run.level == level])
        )


def _size(run: Run) -> tuple[int, int, int, str]:
    """Of workloads with as many tokens, the one that does less with them, as one that was shrunk, comes first."""
    line = run.workload.text()
    return LEVELS.index(run.level), run.workload.tokens, len(line), line


def check(
    reference: Callable[[Level], Reference],
    candidate: Callable[[Level], Runner],
    workloads: Sequence[Workload],
    levels: Sequence[Level] = LEVELS,
    progress: Callable[[str], None] = lambda line: None,
    shrinks: bool = False,
) -> CheckReport:
    """Run every workload at every level. `reference(level)` gives the reference of that level in any dtype.

    `shrinks`: where they differ, also run smaller workloads, for as long again; the smallest that differs at the same
    tensor is the last run.
    Raises: WorkloadError for a request that is longer than the model takes; what the two raise.
    """
    runs, skipped, name = [], dict[str, None](), ""
    began = time.monotonic()
    for level in levels:
        port = candidate(level)
        for workload in workloads:
            workload.require_fits(port.config.text.max_position_embeddings)
        name = port.name
        for number, workload in enumerate(workloads, 1):
            progress(f"{level}: workload {number} of {len(workloads)}: {workload.text()}")
            recorder = TraceRecorder(producer=port.name)
            for line in run_workload(port, workload, recorder):
                skipped[line.partition(": ")[2]] = None
            # Each layer from its own input is the sharper test; how error grows over depth is shown once.
            views: tuple[View, ...] = ("cascade", "isolated") if number == 1 else ("isolated",)
            found = _compared(reference(level), recorder, level, workload, views, with_detail=number == 1)
            runs.append(Run(level, workload, found))
    report = CheckReport("reference", name, tuple(runs), tuple(skipped))
    if shrinks and (first := report.first_different) is not None:
        end = 2 * time.monotonic() - began
        smallest = _smallest(first, reference(first.level), candidate(first.level), end, progress)
        report = replace(report, runs=(*report.runs, *smallest))
    return report


def _smallest(
    run: Run, reference: Reference, port: Runner, end: float, progress: Callable[[str], None]
) -> Sequence[Run]:
    """The run of the smallest workload that differs first at the same tensor; none if there is no smaller one."""
    assert isinstance(run.workload, Workload)
    assert run.comparison.first is not None
    name, smaller = run.comparison.first.name, list[Run]()

    def differs(workload: Workload) -> bool:
        progress(f"{run.level}: a smaller workload that differs: {workload.text()}")
        recorder = TraceRecorder(producer=port.name)
        run_workload(port, workload, recorder)
        found = _compared(reference, recorder, run.level, workload, ("isolated",), with_detail=False)
        if found.first is None or found.first.name != name:
            return False
        smaller.append(Run(run.level, workload, found))
        return True

    # A port that fails otherwise on a smaller one, with whatever error, leaves what was found before.
    with suppress(Exception):
        smallest_failing(run.workload, differs, lambda: time.monotonic() < end)
    return smaller[-1:]


def _compared(
    reference: Reference,
    recorder: TraceRecorder,
    level: Level,
    workload: Workload,
    views: Sequence[View],
    with_detail: bool,
) -> Comparison:
    if level == "exact":
        return compare_exact(reference, recorder.trace(), workload, with_detail)
    return compare(reference, recorder.trace(), getattr(torch, level), workload, views, with_detail=with_detail)


def _results(runs: Iterable[Run]) -> Iterable[ProbeResult]:
    return (result for run in runs for result in run.comparison.probes if result.verdict != "missing")


def _summary(level: Level, runs: Sequence[Run]) -> LevelSummary:
    results = list(_results(runs))
    choices: dict[ChoiceVerdict, int] = {"tie": 0, "near tie": 0, "flip": 0}
    for run in runs:
        for choice in run.comparison.choices:
            choices[choice.verdict] += 1
    return LevelSummary(
        level,
        len(runs),
        len(results),
        sum(result.elements for result in results),
        sum(result.verdict == "bitwise equal" for result in results),
        max(results, key=lambda result: result.excess, default=None),
        sum(run.comparison.choice_rows for run in runs),
        choices,
        sum(run.comparison.is_different for run in runs),
    )
