"""Turns what was found (a check, a comparison, a diagnosis) into a `Report`.

The totals come from the finder's own counts, the rows from its results: where they differ, no report can be built.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, isfinite
from typing import TYPE_CHECKING

import torch

from parity.detail import Detail
from parity.findings import ChoiceResult, Comparison, ProbeResult, StepResult
from parity.findings import Place as FoundPlace
from parity.replay import Exchange
from parity.report.evidence import Choice, Number, Partial, Place, Row, Step, layer_group
from parity.report.records import FaultFinding, Report, ReportVerdict, Totals, Tried, TriedVerdict
from parity.schema import dataflow_key
from parity.statistics import PartialResult
from parity.workload import Case, Workload

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
        again = f"{command} --level {different.level} --workload {workload} --workload-seed {different.workload.seed}"
    detailed = [
        replace(run.comparison.detail, level=run.level, workload=run.workload.text())
        for run in report.runs
        if run.comparison.detail.is_known
    ]
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
        "different" if different else "agrees" if report.compared else "nothing compared",
        first,
        tuple(rows),
        tuple(choices),
        report.skipped,
        totals,
        again,
        f"{again} --verbose" if first else "",
        dict(kinds or {}),
        # The level that rounds most comes last: there it shows what rounding does to the text.
        detail=detailed[-1] if detailed else NO_DETAIL,
    )


def report_of_comparison(
    comparison: Comparison,
    workload: Workload | None,
    level: str,
    expected: str,
    actual: str,
    kinds: Mapping[str, str] | None = None,
    detail: Detail | None = None,
    options: str = "",
    notes: tuple[str, ...] = (),
    can_be_diagnosed: bool = True,
    weights: str = "",
) -> Report:
    """`level` is the dtype that was judged; `expected` and `actual` as typed: folders or names of implementations.

    `options`: what else was typed that a command has to repeat, such as ` --mapping sglang`. `workload`: None where the
    dumps do not say it. `can_be_diagnosed`: the expected side is a golden, with a reference to apply faults to;
    `weights` is what a diagnosis has to be told of them, such as ` --checkpoint FOLDER`.
    """
    paths = f"{shlex.quote(expected)} {shlex.quote(actual)}{options}"
    run, first = _Run(level, workload), _first(comparison)
    again = f"note-parity compare {paths}"
    # A diagnosis applies faults to a reference, and computes from recorded values.
    has_values = can_be_diagnosed and comparison.compared > 0
    follow_up = f"note-parity diagnose {paths}{weights}" if has_values else f"{again} --verbose"
    return Report(
        "compare",
        expected,
        actual,
        _verdict(comparison),
        run.record(first) if first else None,
        tuple(run.row(probe) for probe in comparison.probes),
        tuple(run.choice(choice) for choice in comparison.choices),
        comparison.skipped,
        _totals(comparison),
        again,
        follow_up if first else "",
        dict(kinds or {}),
        detail=detail or comparison.detail,
        partials=tuple(run.partial(partial) for partial in comparison.partials),
        notes=notes,
    )


def report_of_diagnosis(
    diagnosis: Diagnosis,
    workload: Workload,
    level: str,
    expected: str,
    actual: str,
    catalogue: Mapping[str, Fault],
    kinds: Mapping[str, str] | None = None,
    detail: Detail | None = None,
    options: str = "",
    notes: tuple[str, ...] = (),
    weights: str = "",
) -> Report:
    """As `report_of_comparison`, of the difference before any fault; `catalogue` says what each fault does."""
    paths = f"{shlex.quote(expected)} {shlex.quote(actual)}{options}"
    best = diagnosis.explanations[0].faults if diagnosis.explanations else ()
    follow_up = {
        "agrees": "",
        "explained": f"note-parity faults {' '.join(best)}",
        "unknown": f"note-parity compare {paths} --verbose",
    }
    before = report_of_comparison(diagnosis.before, workload, level, expected, actual, kinds, detail, options, notes)
    return replace(
        before,
        command="diagnose",
        again=f"note-parity diagnose {paths}{weights}",
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
            diagnosis.has_no_consequences,
            diagnosis.blind_spots,
        ),
    )


class _Run:
    """Names the run that its records belong to."""

    def __init__(self, level: str, workload: Case | None):
        self._level = level
        self._workload, self._seed = (workload.text(), workload.seed) if workload else ("as recorded", 0)
        self._words = workload.text().split() if workload else []

    def record(self, result: ProbeResult | ChoiceResult | PartialResult) -> Row | Choice | Partial:
        if isinstance(result, PartialResult):
            return self.partial(result)
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
            tuple(self._step(step) for step in probe.steps),
            probe.factor,
            probe.score_factor,
            probe.remark,
        )

    def _step(self, step: StepResult) -> Step:
        return Step(
            step.action,
            self._words[step.action] if step.action < len(self._words) else "",
            step.rows,
            step.bad,
            step.error,
            step.noise,
            step.error / step.noise if step.noise else 0.0,
            step.limit,
            Place(step.place.request, step.place.position, step.place.occurrence),
        )

    def partial(self, result: PartialResult) -> Partial:
        worst = result.worst
        return Partial(
            self._level,
            self._workload,
            self._seed,
            layer_group(result.name),
            result.name,
            result.request,
            result.action,
            result.verdict,
            result.reason,
            len(result.evidence),
            Number(worst.what, worst.expected, worst.actual, worst.limit, worst.excess) if worst else None,
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
            choice.action,
            self._ulps(exchange),
        )

    def _ulps(self, exchange: Exchange) -> float | None:
        dtype = getattr(torch, self._level, None)  # without rounding, `exact`, there is no step
        ulps = exchange.gap_in_ulps(dtype) if isinstance(dtype, torch.dtype) else inf
        return ulps if isfinite(ulps) else None


def _place(place: FoundPlace | None) -> Place | None:
    return Place(place.request, place.position, place.occurrence) if place else None


def _first(comparison: Comparison) -> ProbeResult | ChoiceResult | PartialResult | None:
    """In dataflow order; where a tensor and numbers of the same name differ, the tensor."""
    found = [result for result in (comparison.first, comparison.first_partial) if result is not None]
    return min(found, key=lambda result: dataflow_key(result.name), default=None)


def _verdict(comparison: Comparison) -> ReportVerdict:
    if comparison.is_different:
        return "different"
    if comparison.compared:
        return "agrees"
    return "partial" if comparison.partly_compared else "nothing compared"


def _count(report: CheckReport, is_counted: Callable[[ProbeResult], bool]) -> int:
    return sum(is_counted(probe) for run in report.runs for probe in run.comparison.probes)


def _totals(comparison: Comparison) -> Totals:
    verdicts = [probe.verdict for probe in comparison.probes]
    choices = [choice.verdict for choice in comparison.choices]
    return Totals(
        workloads=1 if comparison.probes or comparison.partials else 0,
        tensors=comparison.compared,
        elements=sum(probe.elements for probe in comparison.probes),
        bitwise_equal=verdicts.count("bitwise equal"),
        different=verdicts.count("different"),
        missing=verdicts.count("missing"),
        choice_rows=comparison.choice_rows,
        ties=choices.count("tie"),
        near_ties=choices.count("near tie"),
        flips=choices.count("flip"),
        partial=comparison.partly_compared,
        partial_different=sum(partial.verdict == "different" for partial in comparison.partials),
    )


def _tried(hypothesis: Hypothesis, diagnosis: Diagnosis, catalogue: Mapping[str, Fault]) -> Tried:
    says = tuple(catalogue[fault].says for fault in hypothesis.faults if fault in catalogue)
    left, before = len(hypothesis.blamed), len({result.name for result in diagnosis.before.blamed})
    verdict: TriedVerdict = "explains"
    if not hypothesis.explains:
        helps = left < before or hypothesis.residual < diagnosis.residual_before
        verdict = "helps" if helps else "does not help"
    return Tried(hypothesis.faults, says, verdict, hypothesis.residual, left)
