"""A report as text: one line on the machine, the ceilings, tables of ops, of whole steps and of generated text.

Times are microseconds; `ours/floor` is 1 at the floor, `peer/ours` above 1 where the op is faster than the best peer.
`kept` are drafts that were accepted in a round of one request, `break even` how many must be to be worth their time.
"""

from __future__ import annotations

from collections.abc import Sequence

from optimized.bench.records import BenchReport, GenerationRow, Machine, OpRow, PeerTime, StepRow

OP_HEADINGS = (
    "op", "shape", "ours us", "floor us", "bound", "peer", "peer us", "ours/floor", "peer/ours", "error", "of noise",
)  # fmt: skip
STEP_HEADINGS = ("step", "GPU us", "floor us", "GPU/floor", "wall us", "host us", "kernels")
TEXT_HEADINGS = (
    "text", "prompts us", "floor us", "rounds", "round us", "floor us", "round/floor", "tokens/s", "kept", "break even",
)  # fmt: skip
# Columns of words, which are aligned to the left.
WORDS = ("op", "shape", "bound", "peer", "step", "text")


def report_lines(report: BenchReport) -> list[str]:
    """Plain text, columns aligned, which is a Markdown table as well."""
    head = (machine_line(report.machine), backend_line(report), ceiling_line(report))
    lines = [*head, f"{report.date}  {report.command}", ""]
    if report.rows:
        lines += [*table(OP_HEADINGS, [op_cells(row) for row in report.rows]), ""]
    if report.steps:
        lines += [*table(STEP_HEADINGS, [step_cells(step) for step in report.steps]), ""]
    if report.generations:
        lines += [*table(TEXT_HEADINGS, [text_cells(row) for row in report.generations]), ""]
    lines += [f"no time: {row.op} {row.shape}: {row.why}" for row in report.rows if row.why]
    lines += [f"no time: {step.name}: {step.why}" for step in report.steps if step.why]
    lines += [f"no time: {row.name}: {row.why}" for row in report.generations if row.why]
    lines += _peer_notes(report.rows)
    return lines


def verdict_line(report: BenchReport) -> str:
    if report.red:
        first = report.red[0]
        counted = f"{len(report.red)} of {len(report.rows)} rows"
        return f"DIFFERENT  {counted}; the first: {first.op} {first.shape}: {first.why}"
    return f"AGREES  {report.timed} of {report.count} rows timed, none red"


def machine_line(machine: Machine) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items()) or "none"
    missing = f"; not installed: {', '.join(machine.missing)}" if machine.missing else ""
    return (
        f"{machine.card}, driver {machine.driver}, torch {machine.torch}, triton {machine.triton}, "
        f"python {machine.python}; optional packages: {packages}{missing}"
    )


def backend_line(report: BenchReport) -> str:
    by_backend: dict[str, list[str]] = {}
    for op, backend in report.backends.items():
        by_backend.setdefault(backend, []).append(op)
    return "backends: " + ("; ".join(f"{backend}: {', '.join(ops)}" for backend, ops in by_backend.items()) or "none")


def ceiling_line(report: BenchReport) -> str:
    ceilings = report.ceilings
    node = "" if ceilings.graph_node_us is None else f", graph of one tiny node {ceilings.graph_node_us:.1f} us"
    return (
        f"ceilings: copy {ceilings.copy_tb_s:.2f}, read {ceilings.read_tb_s:.2f}, write {ceilings.write_tb_s:.2f} "
        f"TB/s; bf16 {ceilings.bf16_tflops:.0f} TFLOP/s{node}"
    )


def op_cells(row: OpRow) -> list[str]:
    peer, agreement = row.best_peer, row.agreement
    noise = f"{agreement.error / agreement.noise:.2f}x" if agreement and agreement.noise else "-"
    return [
        row.op,
        row.shape,
        microseconds(row.us) + ("*" if row.timing == "events" else ""),
        microseconds(row.floor_us),
        row.bound,
        peer.name if peer else "-",
        microseconds(peer.us if peer else None) + ("*" if peer and peer.timing == "events" else ""),
        times(row.of_floor),
        times(row.peer_of_ours),
        "-" if agreement is None else scientific(agreement.error),
        noise,
    ]


def step_cells(step: StepRow) -> list[str]:
    of_floor = step.gpu_us / step.floor_us if step.gpu_us is not None and step.floor_us else None
    numbers = [microseconds(step.gpu_us), microseconds(step.floor_us), times(of_floor)]
    kernels = "-" if step.kernels is None else str(step.kernels)
    return [step.name, *numbers, microseconds(step.wall_us), microseconds(step.host_us), kernels]


def text_cells(row: GenerationRow) -> list[str]:
    of_floor = row.round_us / row.round_floor_us if row.round_us is not None and row.round_floor_us else None
    return [
        row.name,
        microseconds(row.prompt_us),
        microseconds(row.prompt_floor_us),
        str(row.rounds),
        microseconds(row.round_us),
        microseconds(row.round_floor_us),
        times(of_floor),
        microseconds(row.tokens_s),
        times(row.accepted if row.drafts else None),
        times(row.break_even),
    ]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table with columns of one width."""
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    is_left = [heading in WORDS for heading in headings]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(cells, widths, is_left, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * width) if left else ("-" * (width - 1) + ":") for width, left in zip(widths, is_left, strict=True)]
    return [line(headings), line(rule), *(line(row) for row in rows)]


def microseconds(us: float | None) -> str:
    """Two decimals below 1, one below 100, whole microseconds above."""
    if us is None:
        return "-"
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}" if us >= 1 else f"{us:.2f}"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def scientific(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def _peer_notes(rows: Sequence[OpRow]) -> list[str]:
    """Why peers have no time, each once, and what the star means."""
    reasons = dict.fromkeys((peer.name, peer.why) for row in rows for peer in row.peers if peer.why)
    notes = [f"peer {name}: {why}" for name, why in reasons]
    timed: list[OpRow | PeerTime] = [*rows, *(peer for row in rows for peer in row.peers)]
    if any(entry.timing == "events" for entry in timed):
        notes.append("*: issued from Python, between events; all others are replays of a CUDA graph")
    return notes
