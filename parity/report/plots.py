"""The figures of a report as SVG, each with a text that says the same: nothing is shown by colour alone.

Error by layer, in the two views side by side: cascade is what arrives, isolated what the layer itself adds. Errors are
drawn on a logarithmic axis; an exact zero lies on its lower edge, an infinite error on its upper one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from parity.report.evidence import Row, number, times
from parity.report.heat_map import HeatMap, heat_maps
from parity.report.records import LayerRow, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from parity.drift import Drift, DriftRow

_CASCADE = {"color": "#1f4e8c", "marker": "o", "linestyle": "-", "label": "arrives (cascade)"}
_ISOLATED = {
    "color": "#b3541e",
    "marker": "s",
    "linestyle": "--",
    "markerfacecolor": "white",
    "label": "added (isolated)",
}
_LIMIT = {"color": "#666666", "linestyle": ":", "linewidth": 1.0}
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_COLOURS = ("#1f4e8c", "#b3541e", "#3c7a3c", "#7a3c78", "#555555", "#8c6d1f", "#2f7f86")
_HATCHES = ("", "///")
# A map with more cells than this has no numbers in them.
_NUMBERED_CELLS = 200
_WIDTH = 8.0


@dataclass(frozen=True)
class Picture:
    """`svg` is one complete element; `alt` says in words what it shows."""

    title: str
    alt: str
    svg: str


def pictures(report: Report) -> tuple[Picture, ...]:
    """The figures for which the report has data."""
    found = [_errors_by_layer(report), *(_heat_map(heat) for heat in heat_maps(report)), _ulps(report)]
    return tuple(picture for picture in (*found, _overlaps(report)) if picture is not None)


def drift_pictures(drift: Drift) -> tuple[Picture, ...]:
    """Error over depth for each dtype, and over length behind the last layer."""
    dtypes = tuple(dict.fromkeys(row.dtype for row in drift.rows))
    return (*(_depth(drift, dtype) for dtype in dtypes), _length(drift))


def _errors_by_layer(report: Report) -> Picture | None:
    levels = [level.level for level in report.levels]
    by_level = {
        level: [
            row for row in report.layers if row.level == level and row.layer.isdigit() and (row.arrives or row.added)
        ]
        for level in levels
    }
    by_level = {level: rows for level, rows in by_level.items() if rows}
    if not by_level:
        return None

    def draw(axes: Sequence[Axes]) -> None:
        for axis, (level, rows) in zip(axes, by_level.items(), strict=True):
            series = [([row.arrives for row in rows], _CASCADE), ([row.added for row in rows], _ISOLATED)]
            judged = [row.added or row.arrives for row in rows]
            allowed = [output.noise * output.limit if output else None for output in judged]
            errors = [output.error for outputs, _ in series for output in outputs if output]
            low, high = _log_range([*errors, *(value for value in allowed if value)])
            layers = [int(row.layer) for row in rows]
            for outputs, style in series:
                if not any(outputs):
                    continue
                _line(axis, layers, [output.error if output else None for output in outputs], low, high, style)
            _crosses(axis, rows, low, high)
            if any(allowed):
                _line(axis, layers, allowed, low, high, {**_LIMIT, "label": "limit"})
            _log_axis(axis, low, high)
            axis.set(title=level, xlabel="layer", ylabel="relative error of the layer's output")
            _whole_layers(axis, layers)
            axis.legend(fontsize=8)

    alt = "; ".join(_layers_in_words(level, rows) for level, rows in by_level.items())
    return _picture("Error by layer", f"Relative error of each layer's output. {alt}.", draw, len(by_level))


def _crosses(axis: Axes, rows: Sequence[LayerRow], low: float, high: float) -> None:
    """A cross on every point that is outside the noise."""
    bad = [
        (int(row.layer), found.error)
        for row in rows
        for found in (row.arrives, row.added)
        if found and found.verdict == "different"
    ]
    if bad:
        heights = [_drawable(error, low, high) for _, error in bad]
        axis.plot(
            [layer for layer, _ in bad], heights, "x", color="black", markersize=9, zorder=3, label="outside the noise"
        )


def _layers_in_words(level: str, rows: Sequence[LayerRow]) -> str:
    def told(name: str, found: Sequence[Row | None]) -> str:
        shown = [row for row in found if row]
        if not shown:
            return f"{name} not compared"
        worst = max(shown, key=lambda row: row.error)
        outside = sum(row.is_different for row in shown)
        return (
            f"{name} from {number(shown[0].error)} behind layer {shown[0].layer} to {number(shown[-1].error)} behind "
            f"layer {shown[-1].layer}, at most {number(worst.error)} behind layer {worst.layer}, {outside} of "
            f"{len(shown)} outside the noise"
        )

    arrives, added = [row.arrives for row in rows], [row.added for row in rows]
    return f"Level {level}: {told('cascade', arrives)}; {told('isolated', added)}"


def _heat_map(heat: HeatMap) -> Picture:
    finite = [value for row in heat.values for value in row if value is not None]
    # Judged maps have a common scale: what is well within the limit is never dark.
    low, high = _log_range(finite if heat.limit is None else [*finite, heat.limit / 10, heat.limit * 10])

    def draw(axes: Sequence[Axes]) -> None:
        axis = axes[0]
        logs = [
            [math.nan if value is None else math.log10(_drawable(value, low, high)) for value in row]
            for row in heat.values
        ]
        image = axis.imshow(logs, cmap="Greys", aspect="auto", vmin=math.log10(low), vmax=math.log10(high))
        axis.set(xlabel=heat.across, ylabel="layer", title=heat.unit)
        axis.set_yticks(range(len(heat.layers)), heat.layers, fontsize=8)
        axis.set_xticks(range(len(heat.columns)), [_short(column) for column in heat.columns], fontsize=8)
        axis.tick_params(axis="x", labelrotation=20 if len(heat.columns) > 3 else 0)
        dark = 0.4 * math.log10(low) + 0.6 * math.log10(high)
        if len(heat.layers) * len(heat.columns) <= _NUMBERED_CELLS:
            for y, row in enumerate(heat.values):
                for x, value in enumerate(row):
                    is_dark = value is not None and logs[y][x] > dark
                    axis.text(
                        x, y, _cell(value, heat), ha="center", va="center", fontsize=8, color="w" if is_dark else "k"
                    )
        bar = axis.figure.colorbar(image, ax=axis)
        bar.set_label(f"log10 of {heat.unit}", fontsize=8)

    worst = max(
        (
            (value, layer, column)
            for layer, row in zip(heat.layers, heat.values, strict=True)
            for column, value in zip(heat.columns, row, strict=True)
            if value is not None
        ),
        default=(0.0, "-", "-"),
    )
    alt = (
        f"{len(heat.layers)} layers by {len(heat.columns)} columns, {heat.unit}; the largest is "
        f"{number(worst[0])} at layer {worst[1]}, column {worst[2]}."
    )
    if heat.limit is not None:
        different = sum(value > heat.limit for value in finite)
        alt += f" {different} of {len(finite)} cells are different{', marked by a cross' if different else ''}."
    return _picture(heat.title, alt, draw, height=1.6 + 0.24 * len(heat.layers))


def _cell(value: float | None, heat: HeatMap) -> str:
    if value is None:
        return "-"
    text = number(value) if heat.limit is None else times(value)
    return f"✕ {text}" if heat.limit is not None and value > heat.limit else text


def _ulps(report: Report) -> Picture | None:
    groups: dict[str, list[tuple[str, int]]] = {}
    below = -1
    for found in report.detail.ulps:
        if found.ulps is None:
            label = f">{below}"
        else:
            label = f"{found.ulps}" if found.ulps <= below + 1 or found.ulps == 0 else f"{below + 1}-{found.ulps}"
        groups.setdefault(found.tensors, []).append((label, found.elements))
        below = -1 if found.ulps is None else found.ulps
    if not groups:
        return None

    def draw(axes: Sequence[Axes]) -> None:
        width = 0.8 / len(groups)
        for index, (name, classes) in enumerate(groups.items()):
            total = max(1, sum(count for _, count in classes))
            places = [place + index * width for place in range(len(classes))]
            heights = [100.0 * count / total for _, count in classes]
            style: dict[str, Any] = {"color": _COLOURS[index], "hatch": _HATCHES[index % 2], "edgecolor": "white"}
            axes[0].bar(places, heights, width, label=name, **style)
        labels = [label for label, _ in next(iter(groups.values()))]
        axes[0].set_xticks([place + 0.4 - width / 2 for place in range(len(labels))], labels)
        axes[0].set(xlabel="distance in ulps of the actual dtype", ylabel="elements, %")
        axes[0].legend(fontsize=8)

    told = []
    for name, classes in groups.items():
        total = max(1, sum(count for _, count in classes))
        equal, beyond = classes[0][1], classes[-1][1]
        told.append(
            f"{name}: {100 * equal / total:.1f} % of {total:,} elements equal, {100 * beyond / total:.1f} % more than "
            f"{classes[-1][0][1:]} ulps away"
        )
    return _picture("Distance in ulps", f"Distances from the expected value. {'; '.join(told)}.", draw)


def _overlaps(report: Report) -> Picture | None:
    groups: dict[str, list[Any]] = {}
    for overlap in report.detail.overlaps:
        if overlap.layer is not None:
            kind = "experts" if overlap.tensor.endswith("expert_ids") else "keys"
            groups.setdefault(kind, []).append(overlap)
    if not groups:
        return None

    def draw(axes: Sequence[Axes]) -> None:
        for index, (kind, found) in enumerate(groups.items()):
            layers = [overlap.layer for overlap in found]
            style: dict[str, Any] = {"color": _COLOURS[index], "marker": _MARKERS[index]}
            means, least = (
                [100 * share for share in shares] for shares in zip(*((o.mean, o.least) for o in found), strict=True)
            )
            axes[0].plot(layers, means, linestyle="-", label=f"{kind}: mean of rows", **style)
            axes[0].plot(layers, least, linestyle=":", markerfacecolor="white", label=f"{kind}: worst row", **style)
        axes[0].set(xlabel="layer", ylabel="chosen on both sides, %", ylim=(-3, 103))
        _whole_layers(axes[0], sorted({overlap.layer for found in groups.values() for overlap in found}))
        axes[0].legend(fontsize=8)

    told = []
    for kind, found in groups.items():
        least = min(found, key=lambda overlap: overlap.mean)
        told.append(f"{kind}: lowest mean {100 * least.mean:.1f} % at layer {least.layer}")
    return _picture("Overlap of choices", f"Share of keys and experts that both sides choose. {'; '.join(told)}.", draw)


def _depth(drift: Drift, dtype: str) -> Picture:
    rows = [row for row in drift.rows if row.dtype == dtype and row.layer is not None]
    lengths = sorted({row.length for row in rows})
    low, high = _log_range([error for row in rows for error in (row.cascade, row.isolated)])

    def draw(axes: Sequence[Axes]) -> None:
        for index, length in enumerate(lengths):
            shown = [row for row in rows if row.length == length]
            layers = [row.layer for row in shown]
            style = {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)]}
            _line(
                axes[0],
                layers,
                [row.cascade for row in shown],
                low,
                high,
                {**style, "label": f"arrives, {length} tokens"},
            )
            isolated = {**style, "linestyle": "--", "markerfacecolor": "white", "label": f"added, {length} tokens"}
            _line(axes[0], layers, [row.isolated for row in shown], low, high, isolated)
        _log_axis(axes[0], low, high)
        axes[0].set(xlabel="layer", ylabel="relative error of the layer's output")
        _whole_layers(axes[0], sorted({row.layer for row in rows if row.layer is not None}))
        axes[0].legend(fontsize=7, ncols=2)

    last = max(rows, key=lambda row: (row.length, row.layer))
    alt = (
        f"At {last.length} tokens an error of {number(last.cascade)} arrives behind layer {last.layer}; "
        f"the layer itself adds {number(last.isolated)}."
    )
    return _picture(f"Error over depth, {dtype}", alt, draw)


def _length(drift: Drift) -> Picture:
    last: dict[str, list[DriftRow]] = {}
    for row in drift.rows:
        if row.tensor == "logits":
            last.setdefault(row.dtype, []).append(row)
    low, high = _log_range([row.cascade for rows in last.values() for row in rows])

    def draw(axes: Sequence[Axes]) -> None:
        for index, (dtype, rows) in enumerate(last.items()):
            style = {
                "color": _COLOURS[index],
                "marker": _MARKERS[index],
                "linestyle": _STYLES[index % 4],
                "label": dtype,
            }
            _line(axes[0], [row.length for row in rows], [row.cascade for row in rows], low, high, style)
        _log_axis(axes[0], low, high)
        axes[0].set_xscale("log", base=2)
        lengths = sorted({row.length for rows in last.values() for row in rows})
        axes[0].set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes[0].set(xlabel="tokens", ylabel="relative error of the logits, worst row")
        axes[0].legend(fontsize=8)

    told = "; ".join(
        f"{dtype}: {number(rows[0].cascade)} at {rows[0].length} tokens, "
        f"{number(rows[-1].cascade)} at {rows[-1].length}"
        for dtype, rows in last.items()
    )
    return _picture("Error of the logits over length", f"{told}.", draw)


def _picture(
    title: str, alt: str, draw: Callable[[Sequence[Any]], None], columns: int = 1, height: float = 3.4
) -> Picture:
    """Runs `draw` on a row of axes. The same records give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": title, "svg.fonttype": "path", "font.size": 9.0, "hatch.linewidth": 0.8}):
        figure = Figure(figsize=(_WIDTH if columns < 2 else max(_WIDTH, 3.8 * columns), height), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)[0]
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
        draw(axes)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return Picture(title, alt, svg[svg.index("<svg") :])


def _line(
    axis: Any, places: Sequence[Any], values: Sequence[float | None], low: float, high: float, style: dict[str, Any]
) -> None:
    """Gaps where a value is absent."""
    heights = [math.nan if value is None else _drawable(value, low, high) for value in values]
    axis.plot(places, heights, **{"linewidth": 1.4, "markersize": 5, **style})


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    """Whole decades around the positive finite values, and one below them for exact zeros."""
    positive = [value for value in values if 0 < value < math.inf] or [1.0]
    low, high = 10.0 ** math.floor(math.log10(min(positive))), 10.0 ** math.ceil(math.log10(max(positive)))
    return low / 10 if 0 in values else low, high if high > low else 10 * low


def _drawable(value: float, low: float, high: float) -> float:
    return high if math.isnan(value) else min(max(value, low), high)


def _log_axis(axis: Any, low: float, high: float) -> None:
    axis.set_yscale("log")
    axis.set_ylim(low / 1.3, high * 1.3)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)


def _whole_layers(axis: Any, layers: Sequence[int]) -> None:
    step = max(1, math.ceil(len(layers) / 16))
    axis.set_xticks(layers[::step])


def _short(text: str, width: int = 26) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
