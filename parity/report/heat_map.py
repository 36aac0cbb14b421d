"""Where in depth and time two sides differ, as a table of numbers: layers against the steps of a workload, or against
the workloads of a check.

By step: the worst error of any tensor of the layer in units of its limit, in the cascade, where rows were judged step
by step; else the relative error of the layer's output, from the report's detail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parity.report.evidence import Row, layer_group
from parity.report.records import Report
from parity.schema import dataflow_key


@dataclass(frozen=True)
class HeatMap:
    """`values[layer][column]`; None where nothing was compared. `limit`: above it is different; None: not judged.

    `across`: what a column is.
    """

    title: str
    unit: str
    layers: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    limit: float | None
    across: str


def heat_maps(report: Report) -> tuple[HeatMap, ...]:
    """By step where that is known; by workload for every level of a check with several workloads."""
    by_step = _judged_by_step(report) or _by_step(report)
    return (*([by_step] if by_step else []), *_by_workload(report))


def _judged_by_step(report: Report) -> HeatMap | None:
    """Of a report on a single run."""
    worst: dict[tuple[str, int], float] = {}
    words: dict[int, str] = {}
    runs = {(row.level, row.workload, row.seed) for row in report.rows}
    if len(runs) != 1:
        return None
    for row in sorted(report.compared, key=lambda row: dataflow_key(row.tensor)):
        for step in row.steps if row.view == "cascade" else ():
            key = row.layer, step.action
            worst[key] = max(step.excess, worst.get(key, 0.0))
            words[step.action] = step.word
    if not worst:
        return None
    layers, actions = tuple(dict.fromkeys(layer for layer, _ in worst)), sorted(words)
    values = tuple(tuple(worst.get((layer, action)) for action in actions) for layer in layers)
    columns = tuple(f"{action}  {words[action]}".rstrip() for action in actions)
    return HeatMap(
        "Error by layer and step", "worst error, in units of its limit", layers, columns, values, 1.0, "step"
    )


def _by_step(report: Report) -> HeatMap | None:
    errors = {(layer_group(step.tensor), step.action): step.error for step in report.detail.by_step}
    if not errors:
        return None
    layers = tuple(dict.fromkeys(layer for layer, _ in errors))
    actions = sorted({action for _, action in errors})
    workload = report.detail.workload or (report.rows[0].workload if report.rows else "")
    words = workload.split()
    columns = tuple(f"{action}  {words[action]}" if action < len(words) else f"{action}" for action in actions)
    values = tuple(tuple(errors.get((layer, action)) for action in actions) for layer in layers)
    unit = "relative error of the layer's output"
    title = f"Error by layer and step{f', level {report.detail.level}' if report.detail.level else ''}"
    return HeatMap(title, unit, layers, columns, values, None, "step")


def _by_workload(report: Report) -> Iterator[HeatMap]:
    for level in report.levels:
        rows = [row for row in report.compared if row.level == level.level]
        workloads = tuple(dict.fromkeys((row.workload, row.seed) for row in rows))
        if len(workloads) < 2:
            continue
        worst: dict[tuple[str, tuple[str, int]], Row] = {}
        for row in rows:
            key = row.layer, (row.workload, row.seed)
            if key not in worst or row.excess > worst[key].excess:
                worst[key] = row
        layers = tuple(layer.layer for layer in report.layers if layer.level == level.level)
        values = tuple(
            tuple(worst[layer, workload].excess if (layer, workload) in worst else None for workload in workloads)
            for layer in layers
        )
        columns = tuple(workload for workload, _ in workloads)
        title = f"Error by layer and workload, level {level.level}"
        yield HeatMap(title, "worst error, in units of its limit", layers, columns, values, 1.0, "workload")
