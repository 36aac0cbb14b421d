"""The roofline of a benchmark's report as SVG: what each op reached, under what the card allows.

x: operations for each byte that the op must move; y: operations a second that it reached. An op cannot stand above
min(x · read bandwidth, rate of the tensor cores). Ops without operations have no place here.
"""

from __future__ import annotations

from io import StringIO

from optimized.bench.records import BenchError, BenchReport, OpRow

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "p")
SIZE_INCHES = (9.0, 5.5)


def roofline(report: BenchReport) -> str:
    """One complete SVG element; the same report gives the same bytes. Raises: BenchError if no op can be drawn."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    by_op: dict[str, list[OpRow]] = {}
    for row in report.rows:
        if row.us is not None and row.flops and row.bytes:
            by_op.setdefault(row.op, []).append(row)
    if not by_op:
        raise BenchError("the report has no timed op with operations and bytes: nothing to draw")
    with rc_context({"svg.hashsalt": "roofline", "svg.fonttype": "path", "font.size": 9.0}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axis = figure.subplots()
        for i, (op, rows) in enumerate(by_op.items()):
            axis.plot(
                [row.flops / row.bytes for row in rows],
                [tflops(row) for row in rows],
                MARKERS[i % len(MARKERS)],
                color=f"C{i % 10}",
                markersize=5,
                label=op,
            )
        intensities = [row.flops / row.bytes for rows in by_op.values() for row in rows]
        peak, bandwidth = report.ceilings.bf16_tflops, report.ceilings.read_tb_s
        ridge = peak / bandwidth
        low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
        axis.plot([low, ridge, high], [low * bandwidth, peak, peak], color="black", linewidth=1.2)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="operations a byte",
            ylabel="TFLOP/s",
            title=f"{report.machine.card}: {bandwidth:.2f} TB/s, {peak:.0f} TFLOP/s bf16, measured",
        )
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(fontsize=7, loc="outside right upper", frameon=False)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def tflops(row: OpRow) -> float:
    """What the op reached, 1e12 operations a second; 0 without a time."""
    return row.flops / row.us / 1e6 if row.us else 0.0
