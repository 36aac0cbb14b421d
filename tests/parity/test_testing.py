"""The gate for other projects' tests: what it accepts, what it says, and what importing it brings along."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity.errors import GoldenError, ParityError
from parity.faults.catalogue import CATALOGUE
from parity.golden_file import Golden
from parity.plain_steps import plain_steps
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.sweep import boundary_workloads
from parity.testing import assert_parity, steps
from parity.trace import Trace, TraceRecorder
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.probe import listening
from reference.session import StepItem

EXAMPLE = Path(__file__).parents[2] / "examples" / "test_gate.py"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return dict(synthetic_tensors(tiny(), 0))


@pytest.fixture(scope="module")
def eager(weights) -> Trace:
    return traced(ReferenceRunner(tiny(), weights), Golden.open("tiny").workload)


def rows_of_all_steps(trace: Trace, *names: str) -> dict[str, torch.Tensor]:
    """As a mapping wants them: the steps of all requests one after the other."""
    by_step = {name: [entry for entry in trace.entries() if entry.name == name] for name in names}
    order = {name: sorted(entries, key=lambda entry: entry.action) for name, entries in by_step.items()}
    return {name: torch.cat([entry.source.load() for entry in entries]) for name, entries in order.items()}


def recomputing(runner: ReferenceRunner, *names: str):
    """A candidate without a cache: every step runs its whole history again."""

    def rows_of(step):
        if step.kind == "draft":
            return {}
        recorder = TraceRecorder(names)
        with listening(recorder):
            runner.step([StepItem("x", step.history + step.token_ids, "prefill")])
        runner.free("x")
        return {entry.name: entry.source.load()[-len(step.token_ids) :] for entry in recorder.trace().entries()}

    return rows_of


def test_importing_it_loads_neither_the_reference_nor_its_peers():
    code = "import sys, parity.testing; print(sorted({name.split('.')[0] for name in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(eval(result.stdout))
    assert "parity" in loaded
    assert not loaded & {"reference", "optimized", "transformers", "triton", "typer", "hypothesis"}


def test_a_gate_runs_where_a_foreign_reference_shadows_ours(tmp_path):
    """Another project may well have a package of that name."""
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "__init__.py").write_text("raise RuntimeError('not to be imported')")
    code = "from parity.testing import steps; print(len(steps()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, "9"), result.stderr


def test_steps_are_plain_token_ids_and_positions():
    given = steps()
    assert [step.kind for step in given].count("draft") == 2
    assert {step.request for step in given} == {"a", "b"}
    for step in given:
        assert all(type(token) is int for token in step.history + step.token_ids)
        if step.kind != "draft":
            start = len(step.history)
            assert step.positions == tuple(range(start, start + len(step.token_ids)))


@pytest.mark.parametrize("number", range(6))
def test_plain_steps_have_the_rows_that_the_reference_computes(weights, number):
    """Every name, through chunks, drafts, truncation, forks and freed requests."""
    workload = boundary_workloads(tiny().text)[number]
    trace = traced(ReferenceRunner(tiny(), weights, torch.float32), workload)
    for name in ("embeddings", "layers.3.attn.core", "logits", "mtp.0.fused", "mtp.1.logits", "mtp.3.normed"):
        if name not in trace.names():
            continue
        for request in trace.requests(name):
            expected = [position for position, _ in trace.table(name, request).keys]
            given = [
                position
                for step in plain_steps(workload, tiny().text.vocab_size)
                if step.request == request
                for position in step.positions_of(name)
            ]
            assert given == expected, (name, request)


def test_a_mapping_of_everything_agrees(eager):
    names = [name for name in eager.names() if not name.startswith("cache.")]
    # Scores and choices grow from step to step; they are given step by step.
    names = [name for name in names if ".index.s" not in name]
    comparison = assert_parity(rows_of_all_steps(eager, *names))
    assert comparison.compared == len([name for name in names if not name.endswith("expert_ids")])
    assert comparison.choice_rows == 24 * 5


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"step 0 \(prefill, request a\): expected names and their rows, found NoneType"),
        ({"logits": "x"}, r"'logits': expected a tensor, found str"),
        ({"logits": None}, r"'logits': expected a tensor, found NoneType"),
    ],
)
def test_a_candidate_that_returns_something_else_is_told_so(returned, message):
    with pytest.raises(GoldenError, match=message):
        assert_parity(lambda step: returned)


def test_a_step_that_does_not_compute_a_name_is_told():
    def candidate(step):
        return {"logits": torch.zeros(len(step.token_ids), tiny().text.vocab_size)}

    with pytest.raises(GoldenError, match=r"logits, step 5 \(draft, request a\): such a step does not compute it"):
        assert_parity(candidate)
    with pytest.raises(GoldenError, match="the candidate: expected names and their rows, found list"):
        assert_parity([])


def test_a_candidate_without_a_cache_agrees(weights):
    runner = ReferenceRunner(tiny(), weights)
    names = ("layers.?.output", "layers.?.attn.index.*", "logits")
    comparison = assert_parity(recomputing(runner, *names), names=["logits", "layers.?.output"])
    assert comparison.compared == 7
    assert comparison.choice_rows == 3 * 24


def test_flattened_rows_and_other_containers_are_read(eager):
    rows = rows_of_all_steps(eager, "layers.2.attn.q_nope", "logits")
    assert_parity(
        {"layers.2.attn.q_nope": rows["layers.2.attn.q_nope"].flatten(1), "logits": rows["logits"].float().numpy()}
    )


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("indexer_rope_neox", "layers.0.attn.index.query"),
        ("neox_rope", "layers.0.attn.q_rope"),
        ("window_512", "layers.2.attn.core"),
        ("softmax_scoring", "layers.1.ffn.router.scores"),
    ],
)
def test_a_fault_fails_with_verdict_first_place_and_numbers(weights, fault, first):
    runner = ReferenceRunner(tiny(), weights, faults=[CATALOGUE[fault]])
    with pytest.raises(AssertionError) as failure:
        assert_parity(recomputing(runner, "layers.*", "logits"))
    lines = str(failure.value).splitlines()
    assert lines[0].startswith(f"DIFFERENT  {first}  error ")
    assert "x noise (limit " in lines[0]
    assert "first bad position" in lines[0]
    assert lines[-1].startswith("golden: tiny, bfloat16, workload p:a9")
    assert len(lines) < 40


def test_a_flip_is_named_with_its_margin(eager):
    rows = rows_of_all_steps(eager, "layers.1.ffn.router.expert_ids", "logits")
    rows["layers.1.ffn.router.expert_ids"][3] = torch.tensor([0, 1, 2])
    with pytest.raises(AssertionError, match=r"DIFFERENT  layers\.1\.ffn\.router\.expert_ids .* position 3: .* a tie"):
        assert_parity(rows)


def test_green_only_if_what_was_asked_for_was_compared(eager):
    """C68."""
    logits = rows_of_all_steps(eager, "logits")
    assert_parity(logits, names=["logits"])
    with pytest.raises(AssertionError, match="NOTHING COMPARED"):
        assert_parity({})
    with pytest.raises(AssertionError, match="NOTHING COMPARED"):
        assert_parity(lambda step: {})
    with pytest.raises(
        AssertionError, match=r"INCOMPLETE  6 of 7 names were not returned, the first is layers.0.output"
    ):
        assert_parity(logits, names=["logits", "layers.?.output"])
    with pytest.raises(GoldenError, match=r"'layers\.9\.output' matches none"):
        assert_parity(logits, names=["logits", "layers.9.output"])


def test_a_run_that_stopped_half_way_is_incomplete(weights):
    whole = recomputing(ReferenceRunner(tiny(), weights), "logits")
    with pytest.raises(AssertionError, match="INCOMPLETE  logits: 4 rows were not returned"):
        assert_parity(lambda step: whole(step) if len(step.history) < 16 else {})


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ({"logit": torch.zeros(24, 193)}, "'logit', request a: cannot be compared; the golden has"),
        ({"cache.0.kv_latent": torch.zeros(24, 16)}, "of a cache, compare the rows when they are computed"),
        ({"logits": torch.zeros(23, 193)}, r"logits: expected 24 rows, those of 7 steps, found \(23, 193\)"),
        (
            {"logits": torch.zeros(24, 192)},
            r"logits, step 0 \(prefill, request a\): expected \(9, 193\), found \(9, 192\)",
        ),
        ({"logits": torch.zeros(())}, "logits: expected 24 rows"),
        (lambda step: {"logits": torch.zeros(1, 193)}, r"logits, step 0 .* expected \(9, 193\), found \(1, 193\)"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(candidate, message):
    with pytest.raises(GoldenError, match=message):
        assert_parity(candidate)


def test_non_finite_rows_differ(eager):
    rows = rows_of_all_steps(eager, "logits")
    rows["logits"][5, 7] = float("nan")
    with pytest.raises(AssertionError, match=r"DIFFERENT  logits  error infx noise .* position 5"):
        assert_parity(rows)


def test_its_errors_are_parity_errors_and_the_command_knows_them(monkeypatch):
    from typer.testing import CliRunner

    import parity.inspect_model
    from parity.cli import EXIT_UNUSABLE, app

    def refuse(*_):
        raise GoldenError("golden: nothing there")

    monkeypatch.setattr(parity.inspect_model, "inspect_model", refuse)
    result = CliRunner().invoke(app, ["inspect", "tiny"])
    assert issubclass(GoldenError, ParityError)
    assert (result.exit_code, result.stdout, result.stderr) == (EXIT_UNUSABLE, "", "error: golden: nothing there\n")


def test_the_example_gates_transformers(tmp_path):
    spec = importlib.util.spec_from_file_location("example_gate", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.test_transformers_agrees_with_note(tmp_path)
