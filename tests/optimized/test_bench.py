"""The benchmark, as far as it goes without a GPU: floors against the specification's tables, every case at tiny sizes,
records that refuse contradictions, files, the command. Times are given by a clock that does not measure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import typer
from hypothesis import given as drawn
from hypothesis import strategies as st
from kernel_checks import DEVICE
from typer.testing import CliRunner

from optimized.bench import case as case_module
from optimized.bench import slices
from optimized.bench.case import AbsentPeer, Case, Inputs, Peer, Problem, Sizes, checked_rows
from optimized.bench.catalogue import QUICK, all_cases, chosen_cases
from optimized.bench.ceilings import read_all
from optimized.bench.engine_steps import CHAINED, EngineSteps
from optimized.bench.floors import Ceilings, Work, causal_pairs, distinct_experts, floor
from optimized.bench.json_file import from_json, read_json, to_json, write_json, write_text
from optimized.bench.judge import Agreement, Triple, judge, relative_error
from optimized.bench.machine import obstacle, this_machine
from optimized.bench.measure import measure
from optimized.bench.paged import paged_rows
from optimized.bench.records import BenchError, BenchReport, Machine, OpRow, PeerTime, StepRow
from optimized.bench.run import run_case, run_cases
from optimized.bench.tables import microseconds, report_lines, table, verdict_line
from optimized.bench.text_floors import BF16, FP8, decode_floors, prefill_floors
from optimized.device import Choice, Ops
from optimized.errors import NotSupportedError
from parity.cli import _Commands
from parity.cli_bench import bench
from parity.roofline import roofline
from reference.config import released, tiny

# Performance specification, section 1.
CEILINGS = Ceilings(copy_tb_s=4.27, read_tb_s=4.62, write_tb_s=3.37, bf16_tflops=790, fp8_tflops=1430)

# Section 2, microseconds: batch, context, full projections, indexer, full core, sliding projections, sliding core,
# dense, moe, slice, head.
DECODE_BF16 = """
1 4096 62.4 0.2 0.7 39.3 0.3 91.9 93.1 577 337
1 32768 62.4 1.8 0.7 39.3 0.3 91.9 93.1 580 337
1 131072 62.4 7.3 0.7 39.3 0.3 91.9 93.1 591 337
16 4096 62.4 3.6 11.6 39.3 4.8 91.9 1053 3493 337
16 32768 62.4 29.1 11.6 39.3 4.8 91.9 1053 3544 337
16 131072 62.4 116 11.6 39.3 4.8 91.9 1053 3719 337
64 4096 62.4 14.5 46.2 39.3 19.2 91.9 2283 7305 337
64 32768 62.4 116 46.2 39.3 19.2 91.9 2283 7508 337
64 131072 62.4 465 46.2 39.3 19.2 91.9 2283 8205 337
256 4096 93.4 58.1 185 58.9 76.8 138 2630 8972 505
256 32768 93.4 465 185 58.9 76.8 138 2630 9786 505
256 131072 93.4 1859 185 58.9 76.8 138 2630 12575 505
"""
DECODE_FP8 = """
1 4096 31.2 0.1 0.7 19.7 0.3 46.0 47.1 291 337
1 131072 31.2 3.7 0.7 19.7 0.3 46.0 47.1 298 337
16 4096 31.2 1.9 11.6 19.7 4.8 46.0 527 1765 337
16 32768 31.2 15.0 11.6 19.7 4.8 46.0 527 1791 337
16 131072 31.2 59.9 11.6 19.7 4.8 46.0 527 1881 337
64 4096 31.2 7.5 46.2 19.7 19.2 46.0 1142 3720 337
64 32768 31.2 59.9 46.2 19.7 19.2 46.0 1142 3825 337
64 131072 31.2 240 46.2 19.7 19.2 46.0 1142 4184 337
256 4096 51.6 30.0 185 32.5 76.8 76.0 1317 4777 505
256 32768 51.6 240 185 32.5 76.8 76.0 1317 5196 505
256 131072 51.6 959 185 32.5 76.8 76.0 1317 6635 505
"""
# Milliseconds, as above without the context and the head; the full core is the cheaper one.
PREFILL_BF16 = """
4096 1.49 0.17 0.87 0.94 0.12 2.20 2.86 18.0
16384 5.98 2.78 11.1 3.77 0.52 8.81 8.81 83.5
"""
PREFILL_FP8 = """
4096 0.83 0.10 0.87 0.52 0.12 1.22 1.44 10.4
16384 3.30 1.54 11.1 2.08 0.52 4.87 4.87 56.5
"""


def assert_as_printed(value: float, printed: str) -> None:
    """Within one unit of the last digit that is printed: the table's own inputs were rounded."""
    decimals = len(printed.partition(".")[2])
    assert abs(value - float(printed)) <= 10.0**-decimals, (value, printed)


def lines_of(block: str) -> list[list[str]]:
    return [line.split() for line in block.strip().splitlines()]


@pytest.mark.parametrize(("block", "storage"), [(DECODE_BF16, BF16), (DECODE_FP8, FP8)], ids=["bf16", "fp8"])
def test_decode_floors_are_the_specifications_table(block, storage):
    for batch, context, *printed in lines_of(block):
        found = decode_floors(released().text, int(batch), int(context), CEILINGS, storage)
        attention = (found.full_projections, found.indexer, found.full_core)
        attention += (found.sliding_projections, found.sliding_core)
        for value, text in zip((*attention, found.dense, found.moe, found.slice, found.head), printed, strict=True):
            assert_as_printed(value, text)


@pytest.mark.parametrize(("block", "storage"), [(PREFILL_BF16, BF16), (PREFILL_FP8, FP8)], ids=["bf16", "fp8"])
def test_prefill_floors_are_the_specifications_table(block, storage):
    for tokens, *printed in lines_of(block):
        found = prefill_floors(released().text, int(tokens), CEILINGS, storage)
        attention = (found.full_projections, found.indexer, found.full_core)
        attention += (found.sliding_projections, found.sliding_core)
        for value, text in zip((*attention, found.dense, found.moe, found.slice), printed, strict=True):
            assert_as_printed(value / 1e3, text)


def test_weights_of_the_released_layers_are_the_specifications():
    from optimized.bench.text_floors import projection_parameters, projection_widths

    config = released().text
    assert projection_widths(config, config.full) == (1920, 32768)
    assert projection_widths(config, config.sliding) == (2176, 16384)
    assert_as_printed(2 * projection_parameters(config, config.full) / 1e6, "288")
    assert_as_printed(2 * projection_parameters(config, config.sliding) / 1e6, "182")


def test_even_routing_reads_so_many_experts():
    assert [round(distinct_experts(tokens, 256, 8)) for tokens in (1, 16, 64, 256)] == [8, 102, 222, 256]


@drawn(st.integers(0, 200), st.none() | st.integers(1, 60))
def test_causal_pairs_counts_the_pairs(tokens, most):
    assert causal_pairs(tokens, most) == sum(min(t + 1, most or tokens) for t in range(tokens))


def test_the_slower_of_bytes_and_operations_is_the_floor():
    assert floor(Work(4.62e6, 1), CEILINGS).bound == "bytes"
    assert floor(Work(4.62e6, 1), CEILINGS).us == pytest.approx(1.0)
    by_math = floor(Work(1, 790e6), CEILINGS)
    assert (by_math.bound, by_math.us) == ("math", pytest.approx(1.0))
    assert floor(Work(1, 1430e6, "fp8"), CEILINGS).us == pytest.approx(1.0)
    assert replace(CEILINGS, fp8_tflops=None).tflops("fp8") == 2 * 790


# Sizes at which every case runs in seconds on a CPU, and contexts that fill no whole page.
TINY_SIZES = Sizes(batches=(1, 3), contexts=(40, 70), prompts=(45,), page_size=4)
TINY_CASES = all_cases(tiny().text, TINY_SIZES)


def inputs(dtype: torch.dtype = torch.bfloat16) -> Inputs:
    return Inputs(tiny().text, torch.device("cpu"), backend="torch", dtype=dtype)


class StoppedClock:
    """Runs what it is given once, and always says `us`."""

    def __init__(self, us: float = 3.0):
        self.us, self.calls = us, 0

    def __call__(self, call: Callable[[], Any], timing: str) -> float:
        call()
        self.calls += 1
        return self.us


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("case", TINY_CASES, ids=lambda case: f"{case.op} {case.shape}".replace(" ", "-"))
def test_every_case_builds_checks_and_compares_its_peers(case, dtype):
    row = run_case(case, inputs(dtype), CEILINGS, StoppedClock())
    assert row.why == ""
    assert row.agreement is not None
    assert row.agreement.is_green
    assert row.floor_us > 0
    for peer in row.peers:
        assert peer.us is not None or peer.why in ("not installed", "needs CUDA"), peer


def test_the_catalogue_has_every_row_of_the_plan():
    found = {(case.op, case.tokens) for case in all_cases(released().text, Sizes())}
    batches, prompts = (1, 16, 64, 256), (4096, 16384)
    for op in ("add_rms_norm", "a_projection.full", "o_projection.sliding", "write_latents.full", "route", "experts"):
        assert {(op, tokens) for tokens in batches + prompts} <= found
    for op in ("absorb_queries.full", "unabsorb_gate.sliding", "sparse_attention.decode", "ring_attention", "head"):
        assert {(op, tokens) for tokens in batches} <= found
    for op in ("expanded_attention.full.selected", "expanded_attention.sliding", "sparse_attention.prefill"):
        assert {(op, tokens) for tokens in prompts} <= found
    contexts = {case.shape.split()[1] for case in all_cases(released().text, Sizes()) if case.op == "indexer"}
    assert contexts == {"4096", "32768", "131072"}


def test_rows_are_chosen_by_glob_and_batch():
    config = released().text
    assert {case.op for case in chosen_cases(config, QUICK, ["ring*", "head"])} == {"ring_attention", "head"}
    assert {case.tokens for case in chosen_cases(config, Sizes(), ["route"], [16])} == {16}
    with pytest.raises(BenchError, match="no op matches 'rung'"):
        chosen_cases(config, QUICK, ["rung"])
    with pytest.raises(BenchError, match="no row has 3 tokens"):
        chosen_cases(config, QUICK, batches=[3])
    with pytest.raises(BenchError, match="no row of head has 4096 tokens"):
        chosen_cases(config, QUICK, ["head"], [4096])


def case_of(problem: Callable[[Inputs], Problem]) -> Case:
    return Case("made_up", "T=4", 4, Work(4.62e6, 1), "graph", problem)


def problem_of(out: torch.Tensor, peers: list[Peer | AbsentPeer] | None = None) -> Case:
    """Its truth is 1, 2, 3, 4."""
    truth = torch.arange(1.0, 5.0, dtype=torch.float64)
    return case_of(lambda _: Problem(lambda: out, lambda got: [Triple(got, truth.float(), truth)], peers or []))


def test_a_row_says_whether_an_optional_package_takes_part(monkeypatch):
    def chosen(device, backend=None, packages=False):
        op = "sparse_attention"
        return Ops({op: Choice(op, "package" if packages else "triton", "of this test")})

    monkeypatch.setattr(case_module, "choose", chosen)
    case = replace(problem_of(torch.arange(1.0, 5.0)), uses=("sparse_attention",))
    rows = [run_case(each, inputs(), CEILINGS, StoppedClock()) for each in (case, replace(case, packages=True))]
    assert [row.backend for row in rows] == ["triton", "package"]
    assert {case.op for case in all_cases(tiny().text, Sizes()) if case.packages} == {
        "layer.full.dense", "layer.full.experts", "layer.sliding.experts",
    }  # fmt: skip


def test_a_red_case_has_no_time_and_is_never_timed():
    clock = StoppedClock()
    row = run_case(problem_of(torch.tensor([1.0, 2.0, 3.0, 4.1])), inputs(), CEILINGS, clock)
    assert row.is_red
    assert row.us is None
    assert "check is red: largest error 1.00e-01" in row.why
    assert clock.calls == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_red(bad):
    row = run_case(problem_of(torch.tensor([1.0, 2.0, 3.0, bad])), inputs(), CEILINGS, StoppedClock())
    assert row.is_red


def test_what_cannot_run_says_why_and_the_others_go_on():
    def broken(_: Inputs) -> Problem:
        raise ValueError("no such tile\nsecond line")

    good = problem_of(torch.arange(1.0, 5.0))
    rows = run_cases([case_of(broken), good], inputs(), CEILINGS, StoppedClock())
    assert [row.why for row in rows] == ["ValueError: no such tile", ""]
    assert not rows[0].is_red
    assert rows[1].us == 3.0


def test_a_peer_is_timed_only_if_it_computes_the_same():
    truth = torch.arange(1.0, 5.0)

    def failing() -> torch.Tensor:
        raise RuntimeError("unsupported head size")

    peers = [
        Peer("right", lambda: truth, lambda out: out),
        Peer("wrong", lambda: truth * 1.1, lambda out: out),
        Peer("nan", lambda: truth * math.nan, lambda out: out),
        Peer("fails", failing, lambda out: out),
        AbsentPeer("absent", "not installed"),
    ]
    row = run_case(problem_of(truth, peers), inputs(), CEILINGS, StoppedClock())
    right, wrong, nan, fails, absent = row.peers
    assert (right.us, right.error) == (3.0, 0.0)
    assert wrong.why == "not trusted: error 1.0e-01, limit 1e-02"
    assert nan.us is None
    assert fails.why == "RuntimeError: unsupported head size"
    assert absent.why == "not installed"
    assert row.best_peer == right
    assert row.peer_of_ours == 1.0


def test_a_call_that_no_graph_holds_is_timed_between_events():
    def clock(call: Callable[[], Any], timing: str) -> float:
        if timing == "graph":
            raise RuntimeError("operation not permitted when stream is capturing")
        return 5.0

    row = run_case(problem_of(torch.arange(1.0, 5.0)), inputs(), CEILINGS, clock)
    assert (row.us, row.timing) == (5.0, "events")


def test_a_peer_that_waits_is_timed_between_events():
    taken = []

    def clock(call: Callable[[], Any], timing: str) -> float:
        taken.append(timing)
        return 5.0

    truth = torch.arange(1.0, 5.0)
    peers = [Peer(str(waits), lambda: truth, lambda out: out, waits=waits) for waits in (False, True)]
    row = run_case(problem_of(truth, peers), inputs(), CEILINGS, clock)
    assert taken == ["graph", "graph", "events"] == [row.timing, *(peer.timing for peer in row.peers)]


def test_judge_prints_error_and_noise_and_compares_integers_exactly():
    truth = torch.linspace(1, 2, 100, dtype=torch.float64)
    same = judge([Triple(truth.bfloat16(), truth.bfloat16(), truth)])
    assert same.is_green
    assert same.error == same.noise > 0
    ids = torch.tensor([1, 2, 3])
    assert judge([Triple(ids, ids, ids)]).is_green
    off = judge([Triple(ids + torch.tensor([0, 0, 1]), ids, ids)])
    assert (off.is_green, off.why) == (False, "1 of 3 entries differ")
    shape = judge([Triple(truth[:3].float(), truth[:4].float(), truth[:4])])
    assert (shape.is_green, shape.why) == (False, "expected (4,) torch.float32, found (3,) torch.float32")
    assert relative_error(torch.tensor([2.0]), torch.tensor([1.0])) == 1.0


def test_checked_rows_hold_both_ends():
    assert checked_rows(3) == [0, 1, 2]
    rows = checked_rows(4096)
    assert (rows[0], rows[-1], len(rows)) == (0, 4095, 8)


def test_the_pages_of_a_few_requests_hold_their_rows():
    rows = paged_rows(inputs(), 5, 11, 3, 4)
    assert rows.pool.shape == (15, 4, 3)
    few = rows.of_requests([4, 1])
    assert torch.equal(few.by_position(11), rows.by_position(11)[[4, 1]])
    positions = torch.tensor([[10, 0, 7]])
    flat = rows.flat_rows(positions, torch.tensor([2]))
    assert torch.equal(rows.pool.flatten(0, 1)[flat[0]], rows.by_position(11)[2, positions[0]])


def test_records_refuse_contradictions():
    row = {"op": "a", "shape": "s", "backend": "torch", "bytes": 1, "flops": 1, "floor_us": 1.0, "bound": "bytes"}
    with pytest.raises(BenchError, match="not green"):
        OpRow(**row, us=1.0)
    with pytest.raises(BenchError, match="not green"):
        OpRow(**row, us=1.0, agreement=Agreement(1, 1, False, "red"))
    with pytest.raises(BenchError, match="a time or a reason"):
        OpRow(**row)
    with pytest.raises(BenchError, match="a time or a reason"):
        PeerTime("p", us=1.0, why="absent")
    with pytest.raises(BenchError, match="a time or a reason"):
        StepRow("decode 1 x 4096", 900.0)


def report_of(*rows: OpRow, steps: tuple[StepRow, ...] = ()) -> BenchReport:
    machine = Machine("NVIDIA H200", "580.1", "3.12.3", "2.11.0", "3.6.0", {"fa3-fwd": "0.0.3"}, ("vllm",))
    return BenchReport(machine, CEILINGS, "2026-11-29T20:00:00+00:00", "note-parity bench --quick", rows, steps)


TIMED = OpRow(
    "route",
    "T=64",
    "triton",
    2.6e6,
    1.7e8,
    1.1,
    "bytes",
    us=8.0,
    timing="graph",
    agreement=Agreement(1.5e-7, 1e-7, True),
    peers=(PeerTime("torch", 24.0, 1e-3, "events"), PeerTime("other", why="not installed")),
)
RED = OpRow(
    "experts", "T=1", "triton", 1.0, 1.0, 93.0, "bytes", agreement=Agreement(math.nan, 1e-3, False, "x"), why="red"
)
STEP = StepRow("decode 1 x 4096", 914.0, 1250.0, 1340.0, 90.0, 68, (("_swiglu_kernel", 200.0),))


def test_json_is_read_back_to_an_equal_report(tmp_path):
    report = report_of(TIMED, RED, steps=(STEP,))
    path = tmp_path / "bench.json"
    write_json(path, report)
    again = read_json(path)
    assert again.rows[0] == report.rows[0]
    assert math.isnan(again.rows[1].agreement.error)
    assert (again.steps, again.machine, again.ceilings) == (report.steps, report.machine, report.ceilings)
    record = json.loads(path.read_text())
    assert record["rows"][0]["of_floor"] == pytest.approx(8.0 / 1.1)
    assert record["rows"][0]["peer_of_ours"] == 3.0
    assert record["backends"] == {"route": "triton", "experts": "triton"}
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


def test_files_that_are_no_reports_are_refused(tmp_path):
    with pytest.raises(BenchError, match="cannot be read"):
        read_json(tmp_path / "missing.json")
    with pytest.raises(BenchError, match="expected report_version 1, found 7"):
        from_json({**to_json(report_of(TIMED)), "report_version": 7})
    with pytest.raises(BenchError, match="not a report"):
        from_json({"report_version": 1, "machine": {}})
    with pytest.raises(BenchError, match="cannot be written"):
        write_text(tmp_path / "no folder" / "x.md", "text")


def test_the_table_has_the_columns_of_the_specification():
    lines = report_lines(report_of(TIMED, RED, steps=(STEP,)))
    assert lines[0].startswith("NVIDIA H200, driver 580.1, torch 2.11.0, triton 3.6.0")
    assert "optional packages: fa3-fwd 0.0.3; not installed: vllm" in lines[0]
    assert lines[1] == "backends: triton: route, experts"
    (heading,) = (line for line in lines if line.startswith("| op"))
    names = [cell.strip() for cell in heading.strip("|").split("|")]
    wanted = ["op", "shape", "ours us", "floor us", "bound", "peer", "peer us", "ours/floor", "peer/ours", "error"]
    assert names[: len(wanted)] == wanted
    (row,) = (line for line in lines if line.startswith("| route"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "route", "T=64", "8.0", "1.1", "bytes", "torch", "24.0*", "7.27", "3.00", "1.50e-07", "1.50x",
    ]  # fmt: skip
    (red,) = (line for line in lines if line.startswith("| experts"))
    assert [cell.strip() for cell in red.strip("|").split("|")][2] == "-"
    assert "no time: experts T=1: red" in lines
    assert "peer other: not installed" in lines
    assert any(line.startswith("| decode 1 x 4096 |  1,250") for line in lines)
    assert verdict_line(report_of(TIMED)) == "AGREES  1 of 1 rows timed, none red"
    assert verdict_line(report_of(TIMED, RED)).startswith("DIFFERENT  1 of 2 rows; the first: experts T=1")


def test_numbers_and_columns():
    printed = [microseconds(value) for value in (None, 0.034, 3.26, 99.91, 12345.6)]
    assert printed == ["-", "0.03", "3.3", "99.9", "12,346"]
    assert table(("op", "us"), [("a", "1.0"), ("bcd", "12.0")]) == [
        "| op  |   us |",
        "| --- | ---: |",
        "| a   |  1.0 |",
        "| bcd | 12.0 |",
    ]


def test_the_slice_has_every_kind_of_layer():
    text = slices.slice_config(released()).text
    kinds = [(text.is_full(layer), text.is_moe(layer)) for layer in range(text.num_hidden_layers)]
    assert kinds == [(True, False), (True, True), (False, True), (False, True)]


def test_floors_of_whole_steps_are_slice_and_head():
    config = released().text
    assert slices.StepShape(1, 4096).floor_us(config, CEILINGS) == pytest.approx(914, abs=1)
    assert slices.StepShape(64, 32768).floor_us(config, CEILINGS) == pytest.approx(7845, abs=1)
    assert slices.StepShape(0, 4096).floor_us(config, CEILINGS) == pytest.approx(18000 + 337, rel=0.005)
    assert slices.StepShape(0, 4096).name == "prefill 4096"


def test_a_step_that_cannot_run_says_why():
    def make_step(shape: slices.StepShape) -> slices.Steps:
        raise NotSupportedError(f"no memory for {shape.name}")

    (row,) = slices.measure_steps(make_step, released().text, CEILINGS, [slices.StepShape(1, 4096)])
    assert row.why == "NotSupportedError: no memory for decode 1 x 4096"
    assert row.gpu_us is None


@pytest.mark.parametrize(
    "shape", [slices.StepShape(2, 20), slices.StepShape(2, 20, eager=True), slices.StepShape(0, 9)]
)
def test_every_run_of_steps_does_the_same_work(shape: slices.StepShape):
    steps = EngineSteps(tiny(), device="cpu", backend="torch")(shape)
    assert steps.count == (CHAINED if shape.batch and not shape.eager else 1)
    for _ in range(2):
        found = steps.run()
        steps.reset()
        assert [len(rows) for rows in found.values()] == [steps.count] * max(1, shape.batch)


def test_the_slowest_kernels_are_added_up_by_name():
    kernels = [("a", 2.0), ("b", 5.0), ("a", 4.0), ("c", 1.0)]
    assert slices.slowest(kernels, steps=2, most=2) == (("a", 3.0), ("b", 2.5))


def test_the_roofline_shows_every_op_that_computes():
    svg = roofline(report_of(TIMED, replace(TIMED, op="add_rms_norm", flops=0)))
    assert svg.startswith("<svg")
    assert svg == roofline(report_of(TIMED, replace(TIMED, op="add_rms_norm", flops=0)))
    with pytest.raises(BenchError, match="nothing to draw"):
        roofline(report_of(RED))


app = typer.Typer(cls=_Commands)
app.command("bench")(bench)
app.command("other")(lambda: None)


def test_the_command_shows_an_earlier_run(tmp_path):
    path = tmp_path / "bench.json"
    write_json(path, report_of(TIMED))
    wanted = ["--markdown", str(tmp_path / "b.md"), "--plot", str(tmp_path / "b.svg")]
    result = CliRunner().invoke(app, ["bench", "--from", str(path), *wanted])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("AGREES  1 of 1 rows timed")
    assert (tmp_path / "b.md").read_text().splitlines()[0] == result.output.splitlines()[0]
    assert (tmp_path / "b.svg").read_text().startswith("<svg")
    write_json(path, report_of(TIMED, RED))
    assert CliRunner().invoke(app, ["bench", "--from", str(path)]).exit_code == 1
    write_json(path, report_of())
    assert CliRunner().invoke(app, ["bench", "--from", str(path)]).exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without CUDA")
def test_without_a_gpu_the_command_says_why_and_exits_with_3():
    result = CliRunner().invoke(app, ["bench", "--quick"])
    assert result.exit_code == 3
    assert "bench: cannot run here: torch finds no CUDA device" in result.stderr
    assert CliRunner().invoke(app, ["bench", "--ops", "no_such_op"]).exit_code == 2
    assert obstacle() is not None
    with pytest.raises(NotSupportedError, match="the benchmark needs a GPU"):
        measure(tiny().text, [], "note-parity bench")


def test_the_reading_kernel_reads_every_element():
    x = torch.randint(-1000, 1000, (20_003,), dtype=torch.int32, device=DEVICE)
    assert int(read_all(x).sum()) == int(x.sum())


def test_this_machine_names_what_is_installed_and_what_is_not():
    machine = this_machine()
    assert machine.torch == torch.__version__
    assert set(machine.packages).isdisjoint(machine.missing)
    assert len(machine.packages) + len(machine.missing) == 6


def test_a_package_that_does_not_load_costs_no_report(monkeypatch):
    def broken(name: str) -> None:
        raise ImportError(f"{name}: built for another torch")

    monkeypatch.setattr("optimized.bench.machine._version", lambda name: "1.2")
    monkeypatch.setattr("optimized.bench.machine.import_module", broken)
    assert this_machine().packages["transformers"] == "1.2"
