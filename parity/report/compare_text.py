"""A comparison as text: verdict and number, the first tensors outside the noise, error by layer, what it means for the
text that the model writes, and the commands to repeat it and to go on."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from parity.detail import Detail
from parity.report.evidence import Row, number
from parity.report.records import Report
from parity.report.tables import (
    choice_lines,
    closing_lines,
    evidence_table,
    layer_table,
    partial_table,
    print_line,
    print_table,
    tensor_table,
)


def print_comparison(report: Report, console: Console, verbose: bool = False) -> None:
    """`verbose` lists every tensor."""
    print_line(report.headline, console)
    for line in where_lines(report):
        print_line(line, console)
    if report.blamed:
        print_table(evidence_table(report.blamed, "outside the noise, in the order of computation"), console)
    if report.compared:
        print_table(layer_table(report), console)
        if verbose:
            print_table(tensor_table(report), console)
    if report.partly_compared:
        print_table(partial_table(report), console)
    for line in (*end_to_end_lines(report.detail), *choice_lines(report), *closing_lines(report, verbose)):
        print_line(line, console)


def where_lines(report: Report) -> Iterator[str]:
    """Between which sides, and the worst row of the first tensor."""
    if report.verdict == "different":
        yield f"{report.actual} (actual) from {report.expected} (expected)"
    if isinstance(report.first, Row) and report.first.place:
        first = report.first
        yield f"worst at {first.place}: relative {number(first.error)}, absolute {number(first.largest)}"
        if first.remark:
            yield f"{first.tensor}: {first.remark}"
        if first.factor is not None:
            yield f"{first.tensor} is the expected one times {first.factor:.4g}, but for noise"
        if first.score_factor is not None:
            yield f"{first.tensor} is what attention scores times {first.score_factor:.4g} give, but for noise"


def end_to_end_lines(detail: Detail) -> Iterator[str]:
    """What the difference means for the text, where both sides have logits."""
    found = detail.end_to_end
    if found is None:
        return
    of = f" ({detail.level}, {detail.workload})" if detail.level else ""
    yield (
        f"{found.name}{of}: the same best token in {found.agreeing_rows:,} of {found.rows:,} rows; "
        f"KL divergence {number(found.mean_kl)} nats on average, {number(found.largest_kl)} at most"
    )
    if found.rows_without_distribution:
        yield f"{found.name}: {found.rows_without_distribution:,} rows hold NaN or +inf"
    token = found.first_different
    if token is not None:
        yield (
            f"first other token: request {token.request} position {token.position}: {token.actual} in place of "
            f"{token.expected}, which leads it by {number(token.margin)} in the expected logits"
        )
