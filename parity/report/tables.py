"""The tables of a report on a terminal: thin, a unit in every column, tensor names and amounts never cut or broken.

"1.3x of 3.3x": an error of 1.3 times the noise where 3.3 times are allowed. Without rounding: "2.10e-13 of 1e-10".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from parity.report.evidence import Row, number
from parity.report.records import LayerRow, Report

MAX_WIDTH = 400
SHOWN_ROWS = 8


def plain_table(title: str, text_columns: Sequence[str], number_columns: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in text_columns:
        table.add_column(column, no_wrap=True)
    for column in number_columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_line(line: str, console: Console) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """A table that is wider than the console stays whole: the terminal wraps its lines."""
    width = console.width
    console.width = MAX_WIDTH
    needed = Measurement.get(console, console.options, table).maximum
    console.width = max(width, needed)
    try:
        console.print(table)
    finally:
        console.width = width


def level_table(report: Report) -> Table:
    table = plain_table("levels", ("level", "verdict", "worst tensor"), ("error of limit", "tensors", "bitwise equal"))
    for level in report.levels:
        table.add_row(
            level.level,
            level.verdict,
            level.worst.tensor if level.worst else "-",
            level.worst.amount if level.worst else "-",
            f"{level.tensors:,}",
            f"{level.bitwise_percent:.1f} %",
        )
    return table


def layer_levels_table(report: Report) -> Table:
    """The worst error of each layer at each level, and the name of the tensor that comes closest to its limit."""
    levels = [level.level for level in report.levels]
    by_layer: dict[str, dict[str, LayerRow]] = {}
    for row in report.layers:
        by_layer.setdefault(row.layer, {})[row.level] = row
    table = plain_table("worst tensor of each layer, error of limit", ("layer",), levels)
    table.add_column("worst tensor", no_wrap=True)
    for layer, found in by_layer.items():
        worst = max(found.values(), key=lambda row: row.worst.excess).worst
        amounts = [found[level].worst.amount if level in found else "-" for level in levels]
        table.add_row(report.layer_title(layer), *amounts, worst.tensor)
    return table


def layer_table(report: Report) -> Table:
    """Error behind each layer: as it arrives when both run freely, and what the layer alone adds."""
    shown = [view for view in ("arrives", "added") if any(getattr(row, view) for row in report.layers)]
    titles = {"arrives": "arrives\n(cascade)", "added": "added\n(isolated)"}
    views = tuple(titles[view] for view in shown)
    table = plain_table("by layer, relative errors", ("layer",), (*views, "outside\nnoise", "worst, error\nof limit"))
    table.add_column("worst tensor", no_wrap=True)
    for row in report.layers:
        found: list[Row | None] = [getattr(row, view) for view in shown]
        outputs = [number(output.error) if output else "-" for output in found]
        outside = f"{row.different:,}" if row.different else "-"
        table.add_row(report.layer_title(row.layer), *outputs, outside, row.worst.amount, row.worst.tensor)
    return table


def evidence_table(rows: Sequence[Row], title: str, shown: int = SHOWN_ROWS) -> Table:
    """`rows` in their order, at most `shown` of them."""
    table = plain_table(title + more_than_shown(rows, shown), ("tensor", "view"), ("relative error", "error of limit"))
    table.add_column("first bad row", no_wrap=True)
    for row in rows[:shown]:
        bad = str(row.first_bad) if row.first_bad else "-"
        table.add_row(row.tensor, row.view, number(row.error), row.amount, bad)
    return table


def more_than_shown(rows: Sequence[object], shown: int = SHOWN_ROWS) -> str:
    return f" (the first {shown} of {len(rows)})" if len(rows) > shown else ""


def tensor_table(report: Report) -> Table:
    """Every tensor at every level: its worst row over the workloads."""
    levels = [level.level for level in report.levels]
    by_tensor: dict[tuple[str, str], dict[str, Row]] = {}
    for row in report.tensors:
        by_tensor.setdefault((row.tensor, row.view), {})[row.level] = row
    table = plain_table("worst row of each tensor, error of limit", ("tensor", "view"), levels)
    for (tensor, view), found in by_tensor.items():
        table.add_row(tensor, view, *(found[level].amount if level in found else "-" for level in levels))
    return table


def choice_lines(report: Report) -> list[str]:
    """Discrete choices in one line, and the first of the flips."""
    totals = report.totals
    if not totals.choice_rows:
        return []
    lines = [
        f"choices: {totals.choice_rows:,} rows; {totals.ties:,} differ in an exact tie, {totals.near_ties:,} in a near "
        f"tie (gap within the noise of the scores), {totals.flips:,} flipped"
    ]
    flips = [choice for choice in report.choices if choice.is_different]
    if flips and flips[0] != report.first:
        lines.append(f"first flip: {flips[0].tensor} at {flips[0].place} {flips[0].phrase}")
    return lines


def partial_table(report: Report) -> Table:
    """Tensors of which only sums and samples are known: those that differ, then those closest to a limit."""
    found = report.partly_compared
    title = f"by sums and samples{more_than_shown(found)}"
    table = plain_table(title, ("tensor", "request", "verdict"), ("step", "numbers"))
    table.add_column("distance of limit", no_wrap=True)
    for one in found[:SHOWN_ROWS]:
        table.add_row(one.tensor, one.request, one.verdict, f"{one.action}", f"{one.numbers}", one.amount)
    return table


def closing_lines(report: Report, verbose: bool = False) -> list[str]:
    """What was not compared, how to run it again, and what to run next."""
    return [*omission_lines(report, verbose), *command_lines(report)]


def omission_lines(report: Report, verbose: bool = False) -> Iterator[str]:
    """What a reader has to know, and what was not compared; without `verbose` the first lines of each."""
    for word, lines in (("note", list(report.notes)), ("skipped", [*report.skipped, *_untold(report)])):
        shown = lines if verbose else lines[:SHOWN_ROWS]
        yield from (f"{word}: {line}" for line in shown)
        if len(lines) > len(shown):
            yield f"{word}: {len(lines) - len(shown):,} more lines; all of them with --verbose or --json"
    missing = [row.tensor for row in report.rows if row.verdict == "missing"]
    if missing:
        yield f"missing: {len(missing)} tensors have no row in common, the first is {missing[0]}"


def _untold(report: Report) -> Iterator[str]:
    """Sums and samples that were held against nothing, by the reason."""
    untold = [one for one in report.partials if one.verdict == "missing"]
    counts = Counter(one.reason for one in untold)
    for reason, count in counts.most_common():
        first = next(one.tensor for one in untold if one.reason == reason)
        yield f"sums and samples of {count:,} tensors of single steps, the first is {first}: {reason}"


def command_lines(report: Report) -> Iterator[str]:
    if report.verdict != "agrees":
        yield f"again: {report.again}"
    if report.next:
        yield f"next:  {report.next}"
