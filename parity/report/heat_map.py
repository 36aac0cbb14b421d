"""Where in depth and time two sides differ, as a table of numbers: layers against the steps of a workload, or against
the workloads of a check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parity.report.records import Report, Row, layer_group


@dataclass(frozen=True)
class HeatMap:
    """`values[layer][column]`; None where nothing was compared. `limit`: above it is different; None: not judged."""

    title: str
    unit: str
    layers: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    limit: float | None


def heat_maps(report: Report) -> tuple[HeatMap, ...]:
    """By step where the report has that detail; by workload for every level of a check with several workloads."""
    maps = [by_step] if (by_step := _by_step(report)) else []
    return (*maps, *_by_workload(report))


def _by_step(report: Report) -> HeatMap | None:
    errors = {(layer_group(step.tensor), step.action): step.error for step in report.detail.by_step}
    if not errors:
        return None
    layers = tuple(dict.fromkeys(layer for layer, _ in errors))
    actions = sorted({action for _, action in errors})
    words = report.rows[0].workload.split() if report.rows else []
    columns = tuple(f"{action}  {words[action]}" if action < len(words) else f"{action}" for action in actions)
    values = tuple(tuple(errors.get((layer, action)) for action in actions) for layer in layers)
    return HeatMap("Error by layer and step", "relative error of the layer's output", layers, columns, values, None)


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
        yield HeatMap(title, "worst error, in units of its limit", layers, columns, values, 1.0)
