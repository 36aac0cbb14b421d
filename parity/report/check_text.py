"""The result of a check as text: the verdict and its number first, then two tables, then what to run next."""

from __future__ import annotations

from rich.console import Console

from parity.report.compare_text import end_to_end_lines
from parity.report.evidence import Row, number
from parity.report.records import Report
from parity.report.tables import (
    choice_lines,
    closing_lines,
    layer_levels_table,
    level_table,
    print_line,
    print_table,
    tensor_table,
)


def print_check_report(report: Report, console: Console, verbose: bool = False) -> None:
    print_line(report.headline, console)
    if isinstance(report.first, Row) and report.first.place:
        first = report.first
        print_line(
            f"level {first.level}, {first.view}: worst at {first.place}, "
            f"largest absolute difference {number(first.largest)}",
            console,
        )
    if report.compared:
        print_table(level_table(report), console)
        print_table(layer_levels_table(report), console)
        if verbose:
            print_table(tensor_table(report), console)
    for line in (*choice_lines(report), *end_to_end_lines(report.detail), *closing_lines(report, verbose)):
        print_line(line, console)
