"""A diagnosis as text: where the difference starts, which fault explains it and how well, what it cannot be told apart
from, what else was tried, and the commands to go on. That nothing explains it is an answer too, with the localisation.

Residuals are in units of the limit: above 1x something is left that rounding does not explain.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from parity.report.compare_text import end_to_end_lines, where_lines
from parity.report.evidence import times
from parity.report.records import FaultFinding, Report
from parity.report.tables import (
    choice_lines,
    closing_lines,
    evidence_table,
    plain_table,
    print_line,
    print_table,
    tensor_table,
)

_HIDDEN = {
    "all probes": "",
    "layer outputs": "only the outputs of layers were recorded: the fault is inside that layer, or in what it reads",
    "some probes": "only some tensors were recorded: the fault is where the first that differs is computed, or before",
    "logits only": "only logits were recorded: the fault can be anywhere before them",
}


def print_diagnosis(report: Report, console: Console, verbose: bool = False) -> None:
    """`verbose` lists every tensor. The report is one of `report_of_diagnosis`."""
    print_line(report.headline, console)
    for line in (*where_lines(report), *finding_lines(report)):
        print_line(line, console)
    fault = report.fault
    if report.blamed:
        print_table(evidence_table(report.blamed, "outside the noise before any fault is assumed"), console)
    if fault and (fault.explanations or fault.closest):
        _print_tried(fault, console)
    if report.compared and verbose:
        print_table(tensor_table(report), console)
    for line in (*end_to_end_lines(report.detail), *choice_lines(report), *closing_lines(report, verbose)):
        print_line(line, console)


def finding_lines(report: Report) -> Iterator[str]:
    """The answer in words: one line that a reader can quote, and what qualifies it."""
    fault = report.fault
    if fault is None:
        return
    if fault.verdict == "agrees":
        yield from fault.blind_spots
        return
    if fault.verdict == "explained":
        best = fault.explanations[0]
        yield (
            f"fault: {best.name} explains it: {times(fault.residual_before)} -> {times(best.residual)} of the limit "
            f"when applied to the reference"
        )
        yield from (f"  {says}" for says in best.says if says)
        if fault.equivalents:
            same = "; ".join(" + ".join(ids) for ids in fault.equivalents)
            yield f"  cannot be told apart from: {same} (the same values in float64 on this workload)"
        if fault.has_no_consequences:
            yield "  it changes intermediate tensors only: no output depends on it"
        yield from _others(fault)
    else:
        yield f"fault: unknown. {fault.tried:,} hypotheses were applied to the reference; none explains the difference"
        if report.first is not None and fault.coverage == "all probes":
            yield f"  what is known: {report.first.tensor}, computed from recorded inputs, is the first that differs"
        elif report.first is not None:
            yield f"  what is known: of what was recorded, {report.first.tensor} is the first that differs"
    if hidden := _HIDDEN.get(fault.coverage, ""):
        yield f"  {hidden}"
    yield from (f"  {unseen}" for unseen in fault.blind_spots)


def _others(fault: FaultFinding) -> Iterator[str]:
    same = {fault.explanations[0].faults, *fault.equivalents}
    also = [tried.name for tried in fault.explanations if tried.faults not in same]
    others = fault.tried - len(fault.explanations)
    if also:
        yield f"  also within the noise, with other values: {', '.join(also)}"
    if others:
        yield f"  {others:,} other hypotheses were tried; none explains it"


def _print_tried(fault: FaultFinding, console: Console) -> None:
    """Residual of each hypothesis, beside what there was before."""
    table = plain_table(
        "hypotheses, applied to the reference", ("fault", "verdict"), ("residual\nof limit", "outside\nnoise")
    )
    table.add_row("(none)", "as found", times(fault.residual_before), f"{fault.blamed_before:,}")
    for tried in (*fault.explanations, *fault.closest):
        table.add_row(tried.name, tried.verdict, times(tried.residual), f"{tried.blamed:,}")
    print_table(table, console)
