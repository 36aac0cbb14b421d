"""Turns what was found (a check, a comparison, a diagnosis) into a `Report`.

The totals come from the finder's own counts, the rows from its results: where they differ, no report can be built.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from parity.detail import Detail
from parity.findings import ChoiceResult, Comparison, ProbeResult
from parity.findings import Place as FoundPlace
from parity.report.records import (
    Choice,
    FaultFinding,
    Place,
    Report,
    ReportVerdict,
    Row,
    Totals,
    Tried,
    TriedVerdict,
    layer_group,
)
from parity.workload import Workload

if TYPE_CHECKING:
    from parity.check import CheckReport
    from parity.diagnose import Diagnosis, Hypothesis
    from parity.faults.fault import Fault
    from reference.config import TextConfig

NO_DETAIL = Detail()


def layer_kinds(config: TextConfig) -> dict[str, str]:
    """What each layer is: {"0": "full, dense", "2": "sliding, experts"}."""
    return {
        str(layer): f"{'full' if config.is_full(layer) else 'sliding'}, "
        f"{'experts' if config.is_moe(layer) else 'dense'}"
        for layer in range(config.num_hidden_layers)
    }


def report_of_check(
    report: CheckReport, kinds: Mapping[str, str] | None = None, command: str = "note-parity check"
) -> Report:
    """`command` is what was typed, without the options that narrow a run down."""
    runs = [_Run(run.level, run.workload) for run in report.runs]
    rows = [run.row(p) for run, found in zip(runs, report.runs, strict=True) for p in found.comparison.probes]
    choices = [run.choice(c) for run, found in zip(runs, report.runs, strict=True) for c in found.comparison.choices]
    levels = report.levels
    different = report.first_different
    first, again = None, command
    if different is not None and different.comparison.first is not None:
        first = _Run(different.level, different.workload).record(different.comparison.first)
        workload = shlex.quote(different.workload.text())
        again = f"{command} --level {different.level} --workload {workload} --seed {different.workload.seed}"
    totals = Totals(
        workloads=len({(run.workload.text(), run.workload.seed) for run in report.runs if run.comparison.probes}),
        tensors=report.compared,
        elements=sum(level.elements for level in levels),
        bitwise_equal=sum(level.bitwise_equal for level in levels),
        different=_count(report, lambda probe: probe.verdict == "different"),
        missing=_count(report, lambda probe: probe.verdict == "missing"),
        choice_rows=sum(level.choice_rows for level in levels),
        ties=sum(level.choices["tie"] for level in levels),
        near_ties=sum(level.choices["near tie"] for level in levels),
        flips=sum(level.choices["flip"] for level in levels),
    )
    return Report(
        "check",
        report.expected,
        report.actual,
        _verdict(report.compared, different is not None),
        first,
        tuple(rows),
        tuple(choices),
        report.skipped,
        totals,
        again,
        f"{again} --verbose" if first else "",
        dict(kinds or {}),
    )


def report_of_comparison(
    comparison: Comparison,
    workload: Workload,
    level: str,
    expected: str,
    actual: str,
    kinds: Mapping[str, str] | None = None,
    detail: Detail = NO_DETAIL,
    again: str | None = None,
) -> Report:
    """`level` is the dtype that was judged; `expected` and `actual` as typed: folders or names of implementations."""
    paths = f"{shlex.quote(expected)} {shlex.quote(actual)}"
    run, first = _Run(level, workload), comparison.first
    return Report(
        "compare",
        expected,
        actual,
        _verdict(comparison.compared, comparison.is_different),
        run.record(first) if first else None,
        tuple(run.row(probe) for probe in comparison.probes),
        tuple(run.choice(choice) for choice in comparison.choices),
        comparison.skipped,
        _totals(comparison),
        again or f"note-parity compare {paths}",
        f"note-parity diagnose {paths}" if first else "",
        dict(kinds or {}),
        detail=detail,
    )


def report_of_diagnosis(
    diagnosis: Diagnosis,
    workload: Workload,
    level: str,
    expected: str,
    actual: str,
    catalogue: Mapping[str, Fault],
    kinds: Mapping[str, str] | None = None,
    detail: Detail = NO_DETAIL,
    again: str | None = None,
) -> Report:
    """As `report_of_comparison`, of the difference before any fault; `catalogue` says what each fault does."""
    paths = f"{shlex.quote(expected)} {shlex.quote(actual)}"
    best = diagnosis.explanations[0].faults if diagnosis.explanations else ()
    follow_up = {
        "agrees": "",
        "explained": f"note-parity faults {' '.join(best)}",
        "unknown": f"note-parity compare {paths} --verbose",
    }
    before = report_of_comparison(diagnosis.before, workload, level, expected, actual, kinds, detail)
    return replace(
        before,
        command="diagnose",
        again=again or f"note-parity diagnose {paths}",
        next=follow_up[diagnosis.verdict],
        fault=FaultFinding(
            diagnosis.verdict,
            diagnosis.coverage,
            diagnosis.residual_before,
            len({result.name for result in diagnosis.before.blamed}),
            tuple(_tried(hypothesis, diagnosis, catalogue) for hypothesis in diagnosis.explanations),
            diagnosis.equivalents,
            tuple(_tried(hypothesis, diagnosis, catalogue) for hypothesis in diagnosis.helped),
            diagnosis.tried,
        ),
    )


class _Run:
    """Names the run that its records belong to."""

    def __init__(self, level: str, workload: Workload):
        self._level, self._workload, self._seed = level, workload.text(), workload.seed

    def record(self, result: ProbeResult | ChoiceResult) -> Row | Choice:
        return self.row(result) if isinstance(result, ProbeResult) else self.choice(result)

    def row(self, probe: ProbeResult) -> Row:
        return Row(
            self._level,
            probe.view,
            self._workload,
            self._seed,
            layer_group(probe.name),
            probe.name,
            probe.verdict,
            probe.error,
            probe.noise,
            probe.ratio,
            probe.limit,
            probe.largest,
            probe.rows,
            probe.elements,
            probe.missing_rows,
            _place(probe.place),
            _place(probe.first_bad),
        )

    def choice(self, choice: ChoiceResult) -> Choice:
        exchange = choice.exchange
        return Choice(
            self._level,
            choice.view,
            self._workload,
            self._seed,
            layer_group(choice.name),
            choice.name,
            choice.verdict,
            Place(exchange.request, exchange.position, exchange.occurrence),
            exchange.only_expected,
            exchange.only_actual,
            exchange.gap,
            choice.noise,
        )


def _place(place: FoundPlace | None) -> Place | None:
    return Place(place.request, place.position, place.occurrence) if place else None


def _verdict(compared: int, is_different: bool) -> ReportVerdict:
    if is_different:
        return "different"
    return "agrees" if compared else "nothing compared"


def _count(report: CheckReport, is_counted: Callable[[ProbeResult], bool]) -> int:
    return sum(is_counted(probe) for run in report.runs for probe in run.comparison.probes)


def _totals(comparison: Comparison) -> Totals:
    verdicts = [probe.verdict for probe in comparison.probes]
    choices = [choice.verdict for choice in comparison.choices]
    return Totals(
        workloads=1 if comparison.probes else 0,
        tensors=comparison.compared,
        elements=sum(probe.elements for probe in comparison.probes),
        bitwise_equal=verdicts.count("bitwise equal"),
        different=verdicts.count("different"),
        missing=verdicts.count("missing"),
        choice_rows=comparison.choice_rows,
        ties=choices.count("tie"),
        near_ties=choices.count("near tie"),
        flips=choices.count("flip"),
    )


def _tried(hypothesis: Hypothesis, diagnosis: Diagnosis, catalogue: Mapping[str, Fault]) -> Tried:
    says = tuple(catalogue[fault].says for fault in hypothesis.faults if fault in catalogue)
    left, before = len(hypothesis.blamed), len({result.name for result in diagnosis.before.blamed})
    verdict: TriedVerdict = "explains"
    if not hypothesis.explains:
        helps = left < before or hypothesis.residual < diagnosis.residual_before
        verdict = "helps" if helps else "does not help"
    return Tried(hypothesis.faults, says, verdict, hypothesis.residual, left)
