"""The result of a check as text: the verdict and its number first, then one table, then what to run next."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from parity.check import CheckReport, Level, LevelSummary, Run
from parity.findings import ChoiceResult, ProbeResult
from parity.schema import dataflow_key, layer_of
from reference.config import TextConfig


def print_check(report: CheckReport, config: TextConfig, console: Console, verbose: bool = False) -> None:
    """`config` names the layers' kinds; `verbose` lists every tensor."""
    console.print(verdict_line(report), highlight=False, soft_wrap=True)
    run = report.first_different
    if run is not None:
        for line in blame_lines(run):
            console.print(line, highlight=False, soft_wrap=True)
    if report.compared:
        console.print(_level_table(report))
        console.print(_layer_table(report, config))
        if verbose:
            console.print(_tensor_table(report))
    for line in report.skipped:
        console.print(f"skipped: {line}", highlight=False, soft_wrap=True)


def verdict_line(report: CheckReport) -> str:
    compared = (
        f"{report.compared:,} tensors, {sum(level.elements for level in report.levels):,} elements, "
        f"{len({run.workload for run in report.runs})} workloads"
    )
    if not report.compared:
        return "NOTHING COMPARED  no tensor has the same name on both sides"
    if report.first_different is None:
        return f"AGREES  {report.actual} with the {report.expected}: {compared}"
    return f"DIFFERENT  {report.actual} from the {report.expected}: {_summary(report.first_different)}"


def blame_lines(run: Run) -> Iterator[str]:
    """Where the first difference is, and how to see it again."""
    first = run.comparison.first
    if isinstance(first, ProbeResult) and first.first_bad and first.place:
        bad = first.first_bad
        yield (
            f"level {run.level}, {first.view}: first at request {bad.request} position {bad.position}; "
            f"worst at position {first.place.position}, largest absolute difference {first.largest:.2e}"
        )
    yield f"again: note-parity check --level {run.level} --workload '{run.workload.text()}' --seed {run.workload.seed}"


def _summary(run: Run) -> str:
    first = run.comparison.first
    if isinstance(first, ChoiceResult):
        exchange = first.exchange
        return (
            f"{exchange.name} chooses {list(exchange.only_actual)} in place of {list(exchange.only_expected)} at "
            f"request {exchange.request} position {exchange.position}: score gap {exchange.gap:.2e}, "
            f"noise {first.noise:.2e}"
        )
    assert first is not None
    return f"{first.name} {first.view} error {amount(first)}"


def amount(result: ProbeResult) -> str:
    """The error in the unit of its limit."""
    if result.limit == 1.0:
        return f"{result.error:.2e} (limit {result.noise:.0e})"
    return f"{result.ratio:.1f}x noise (limit {result.limit:.1f}x)"


def _level_table(report: CheckReport) -> Table:
    table = Table(title="levels", title_justify="left", box=None, pad_edge=False)
    for column in ("level", "verdict", "worst tensor", "error", "bitwise equal", "choices", "tie", "near tie", "flip"):
        table.add_column(column, justify="left" if column in ("level", "verdict", "worst tensor") else "right")
    for level in report.levels:
        table.add_row(*_level_row(level))
    return table


def _level_row(level: LevelSummary) -> tuple[str, ...]:
    return (
        level.level,
        "different" if level.is_different else "agrees",
        level.worst.name if level.worst else "-",
        amount(level.worst) if level.worst else "-",
        f"{100 * level.bitwise_equal / max(1, level.tensors):.1f} %",
        f"{level.choice_rows:,}",
        *(str(level.choices[verdict]) for verdict in ("tie", "near tie", "flip")),
    )


def _layer_table(report: CheckReport, config: TextConfig) -> Table:
    """The worst tensor of each layer at each level."""
    levels = [level.level for level in report.levels]
    table = Table(title="worst tensor of each layer", title_justify="left", box=None, pad_edge=False)
    table.add_column("layer")
    for level in levels:
        table.add_column(level)
    worst = {level: _worst_by_layer(report, level) for level in levels}
    for layer in dict.fromkeys(key for level in levels for key in worst[level]):
        cells = [_cell(worst[level].get(layer)) for level in levels]
        table.add_row(_layer_title(layer, config), *cells)
    return table


def _tensor_table(report: CheckReport) -> Table:
    """Every tensor at every level."""
    table = Table(title="worst row of each tensor", title_justify="left", box=None, pad_edge=False)
    table.add_column("tensor")
    worst = {level.level: report.worst_by_name(level.level) for level in report.levels}
    for level in worst:
        table.add_column(f"{level} error", justify="right")
    for name in sorted({name for results in worst.values() for name in results}, key=dataflow_key):
        table.add_row(name, *(amount(results[name]) if name in results else "-" for results in worst.values()))
    return table


def _worst_by_layer(report: CheckReport, level: Level) -> dict[str, ProbeResult]:
    worst: dict[str, ProbeResult] = {}
    for name, result in report.worst_by_name(level).items():
        layer = layer_of(name)
        group = name.partition(".")[0] if layer is None else f"{layer}"
        if group not in worst or result.excess > worst[group].excess:
            worst[group] = result
    return worst


def _layer_title(layer: str, config: TextConfig) -> str:
    if not layer.isdigit():
        return layer
    index = int(layer)
    attention = "full" if config.is_full(index) else "sliding"
    return f"{index:>2} {attention}, {'experts' if config.is_moe(index) else 'dense'}"


def _cell(result: ProbeResult | None) -> str:
    if result is None:
        return "-"
    local = result.name.partition(".")[2].partition(".")[2] or result.name
    value = f"{result.error:.1e}" if result.limit == 1.0 else f"{result.ratio:.1f}x"
    return f"{value} {local}"
