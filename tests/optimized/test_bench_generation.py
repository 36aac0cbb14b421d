"""The benchmark's generation of text: the engine's rounds on the CPU, floors, records, files and the table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from optimized.bench.engine_generation import EngineGeneration
from optimized.bench.engine_steps import EngineSteps
from optimized.bench.floors import Ceilings
from optimized.bench.generation import (
    GENERATION_SHAPES,
    Counted,
    Generation,
    GenerationShape,
    measure_generation,
    measure_generations,
)
from optimized.bench.json_file import from_json, to_json
from optimized.bench.records import BenchError, BenchReport, GenerationRow, Machine
from optimized.bench.slices import StepShape
from optimized.bench.tables import report_lines, verdict_line
from optimized.errors import NotSupportedError
from reference.config import released, tiny

CEILINGS = Ceilings(copy_tb_s=4.27, read_tb_s=4.62, write_tb_s=3.37, bf16_tflops=790)
PLAIN = GenerationShape(2, prompt=9, tokens=5)
DRAFTED = replace(PLAIN, drafts=2)


@pytest.fixture(scope="module")
def steps() -> EngineSteps:
    return EngineSteps(tiny(), device="cpu", backend="torch")


def counted(steps: EngineSteps, shape: GenerationShape) -> tuple[Counted, dict[str, tuple[int, ...]]]:
    """And the text of each request, without its newest token."""
    engine = steps.engine_of(shape.requests, shape.prompt + shape.tokens, True, shape.drafts)
    run = EngineGeneration(engine, {"a": range(9), "b": range(3, 12)}, shape)
    run.prompt()
    found = run.rounds()
    texts = {name: engine.tokens(name) for name in engine.requests}
    run.free()
    assert not engine.requests
    return found, texts


def test_text_with_drafts_is_the_text_without(steps: EngineSteps) -> None:
    (plain, texts), (drafted, same_texts) = counted(steps, PLAIN), counted(steps, DRAFTED)
    assert plain == Counted(5, 10)
    assert same_texts == texts
    assert drafted.tokens == 10
    assert 2 <= drafted.rounds <= 5


def test_rounds_are_measured_beside_the_plain_ones(steps: EngineSteps) -> None:
    plain, drafted = measure_generations(steps.generation, tiny().text, CEILINGS, [PLAIN, DRAFTED], runs=1)
    assert (plain.rounds, plain.tokens, plain.accepted, plain.break_even) == (5, 10, 0.0, None)
    assert drafted.plain_us == plain.round_us
    assert drafted.break_even is not None
    assert drafted.accepted is not None
    assert 0 <= drafted.accepted <= 2
    assert drafted.floor_us == drafted.prompt_floor_us + drafted.rounds * drafted.round_floor_us


def test_only_timed_runs_count() -> None:
    calls: list[str] = []

    def rounds() -> Counted:
        calls.append("rounds")
        return Counted(4, 8)

    generation = Generation(lambda: calls.append("prompt"), rounds, lambda: calls.append("free"))
    row = measure_generation(PLAIN, generation, 1.0, 2.0, runs=2)
    assert calls == ["prompt", "rounds", "free"] * 3
    assert row.floor_us == 9.0


def test_what_cannot_run_says_why_and_the_others_go_on(steps: EngineSteps) -> None:
    def make(shape: GenerationShape) -> Generation:
        if shape.drafts:
            raise NotSupportedError(f"no memory for {shape.name}")
        return steps.generation(shape)

    rows = measure_generations(make, tiny().text, CEILINGS, [DRAFTED, replace(PLAIN, tokens=1)], runs=1)
    assert [row.why for row in rows] == ["NotSupportedError: no memory for 5 tokens, 2 x 9, 2 drafts", ""]


def test_floors_are_those_of_the_steps() -> None:
    config = released().text
    plain, drafted = GenerationShape(16), GenerationShape(16, drafts=2)
    assert plain.round_floor_us(config, CEILINGS) == StepShape(16, 4096 + 32).floor_us(config, CEILINGS)
    # Two runs of the head and of a dense sliding layer, and 48 rows, which choose more experts than 16.
    more = drafted.round_floor_us(config, CEILINGS) - plain.round_floor_us(config, CEILINGS)
    experts = StepShape(48, 1).floor_us(config, CEILINGS) - StepShape(16, 1).floor_us(config, CEILINGS)
    assert more == pytest.approx(experts + 2 * (337 + 39 + 92 + 23), rel=0.02)
    alone = StepShape(0, 4096).floor_us(config, CEILINGS)
    assert plain.prompt_floor_us(config, CEILINGS) == pytest.approx(16 * alone, rel=0.02)
    assert [(shape.requests, shape.drafts) for shape in GENERATION_SHAPES] == [(1, 0), (1, 2), (16, 0), (16, 2)]


ROW = GenerationRow("64 tokens, 16 x 4096", 16, 0, 290e3, 3830.0, 480e3, 64 * 4400.0, 64, 16 * 64)
DRAFTED_ROW = GenerationRow(
    "64 tokens, 16 x 4096, 2 drafts", 16, 2, 350e3, 7900.0, 500e3, 60 * 9900.0, 60, 16 * 60 + 96, plain_us=4400.0
)
FAILED = GenerationRow("64 tokens, 1 x 4096", 1, 0, 18e3, 914.0, why="OutOfMemoryError: too much")


def test_what_follows_from_a_row() -> None:
    assert ROW.tokens_s == pytest.approx(16 / 4400e-6)
    assert (DRAFTED_ROW.round_us, DRAFTED_ROW.accepted, DRAFTED_ROW.break_even) == (9900.0, pytest.approx(0.1), 1.25)
    assert (FAILED.round_us, FAILED.tokens_s, FAILED.accepted, FAILED.break_even) == (None,) * 4
    with pytest.raises(BenchError, match="expected times or a reason"):
        replace(ROW, rounds_us=None)
    with pytest.raises(BenchError, match="64 rounds of 16 requests bring 1024 to 1024 tokens, found 1025"):
        replace(ROW, tokens=1025)


def report_of(*rows: GenerationRow) -> BenchReport:
    machine = Machine("NVIDIA H200", "580.1", "3.12.3", "2.11.0", "3.6.0", {}, ())
    return BenchReport(machine, CEILINGS, "2026-11-30T04:00:00+00:00", "note-parity bench", generations=rows)


def test_files_and_tables_have_them() -> None:
    report = report_of(ROW, DRAFTED_ROW, FAILED)
    record = json.loads(json.dumps(to_json(report)))
    assert record["generations"][1]["break_even"] == 1.25
    assert from_json(record) == report
    earlier = {name: value for name, value in record.items() if name != "generations"}
    assert from_json(earlier) == replace(report, generations=())
    lines = report_lines(report)
    (drafted,) = (line for line in lines if line.startswith("| 64 tokens, 16 x 4096, 2 drafts"))
    assert [cell.strip() for cell in drafted.strip("|").split("|")][1:] == [
        "500,000", "350,000", "60", "9,900", "7,900", "1.25", "1,778", "0.10", "1.25",
    ]  # fmt: skip
    assert "no time: 64 tokens, 1 x 4096: OutOfMemoryError: too much" in lines
    assert verdict_line(report) == "AGREES  2 of 3 rows timed, none red"
