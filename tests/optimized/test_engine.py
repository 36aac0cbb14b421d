"""The engine against the reference: the same logic in float64, whatever the pages, limits and batches are.

Torch twins only: what they compute is compared with the kernels in the kernels' own tests, and the kernels in the whole
model in `test_model_kernels`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from optimized.engine import DraftItem, Engine, EngineOptions
from optimized.errors import NotSupportedError, PoolError
from optimized.plan_spans import StepLimits
from parity.compare import compare_exact
from parity.run import traced
from parity.runners.optimized import OptimizedRunner
from parity.runners.reference import ReferenceRunner
from parity.strategies import workloads
from parity.sweep import boundary_workloads
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.errors import CacheError, TokenIdError
from reference.numerics import Numerics
from reference.probe import Override, Recorder, listening
from reference.session import Session, StepItem
from reference.text import TextModel

CONFIG = tiny()
WEIGHTS = dict(synthetic_tensors(CONFIG))
AMPLE = StepLimits(max_tokens=10_000, expanded_bytes=2**26, score_bytes=2**22)
# One item of 9 tokens or a few of less; few expanded keys; scores of few rows.
TIGHT = StepLimits(max_tokens=9, expanded_bytes=24_000, score_bytes=600)
# Everything at once, but scores of a few rows: blocks end anywhere among the items.
NARROW = StepLimits(max_tokens=10_000, expanded_bytes=2**26, score_bytes=600)
OPTIONS = EngineOptions(pages=96, page_size=4, requests=6, limits=AMPLE, poison=True, disjoint_numbers=True)


def reference(dtype: torch.dtype) -> ReferenceRunner:
    return ReferenceRunner(CONFIG, WEIGHTS, dtype)


def optimized(options: EngineOptions = OPTIONS) -> OptimizedRunner:
    return OptimizedRunner(CONFIG, WEIGHTS, torch.float64, backend="torch", options=options)


def engine(options: EngineOptions = OPTIONS) -> Engine:
    return optimized(options).engine


def assert_same_logic(workload: Workload, options: EngineOptions = OPTIONS) -> None:
    comparison = compare_exact(reference, traced(optimized(options), workload), workload)
    assert comparison.compared
    assert not comparison.is_different, comparison.first


@pytest.mark.parametrize("limits", [AMPLE, TIGHT], ids=["ample", "tight"])
@pytest.mark.parametrize("workload", boundary_workloads(CONFIG.text), ids=lambda workload: f"seed {workload.seed}")
def test_every_named_tensor_is_the_references(workload: Workload, limits: StepLimits) -> None:
    assert_same_logic(workload, dataclasses.replace(OPTIONS, limits=limits))


def test_a_block_may_begin_behind_the_first_items_of_its_group() -> None:
    assert_same_logic(Workload.parse("p:a20+b15+c18 d:a+b+c"), dataclasses.replace(OPTIONS, limits=NARROW))


@settings(max_examples=12, phases=[Phase.generate])
@given(
    workload=workloads(CONFIG.text, max_actions=6, max_tokens=60),
    page_size=st.sampled_from([1, 4, 64]),
    limits=st.sampled_from([AMPLE, TIGHT, NARROW]),
)
def test_drawn_workloads_have_the_references_logic(workload: Workload, page_size: int, limits: StepLimits) -> None:
    pages = 512 // page_size
    assert_same_logic(workload, dataclasses.replace(OPTIONS, page_size=page_size, pages=pages, limits=limits))


def test_the_comparison_sees_every_probe_of_the_reference() -> None:
    workload = boundary_workloads(CONFIG.text)[3]
    names = set(traced(reference(torch.float64), workload).names())
    assert names == set(traced(optimized(), workload).names())


def test_a_run_without_probes_gives_the_same_bytes() -> None:
    recorder, items = Recorder(("logits",)), [StepItem("a", tuple(range(20)), "prefill")]
    with listening(recorder):
        seen = engine().step(items)["a"]
    assert torch.equal(torch.cat(recorder.values("logits")), seen)
    assert torch.equal(engine().step(items)["a"], seen)
    # The head's product on one row may sum in another order.
    last = engine().step(items, last_only=True)["a"]
    torch.testing.assert_close(last, seen[-1:], rtol=1e-12, atol=1e-12)
    # Watched, all rows are shown whatever is returned.
    with listening(recorder):
        assert torch.equal(engine().step(items, last_only=True)["a"], seen[-1:])
    assert torch.equal(recorder.values("logits")[1], seen)


def test_drafts_of_many_requests_are_those_of_each_alone() -> None:
    together, alone = engine(), engine()
    prompts = {"a": tuple(range(3, 23)), "b": (5,), "c": tuple(range(50, 59))}
    for one in (together, alone):
        one.step([StepItem(request, ids, "prefill") for request, ids in prompts.items()])
    depths = {"a": 3, "b": 1, "c": 4}
    found = together.drafts([DraftItem(request, 7, depth, (11,)) for request, depth in depths.items()])
    for request, depth in depths.items():
        expected = alone.draft(request, 7, depth, (11,))
        torch.testing.assert_close(found[request], expected, rtol=1e-12, atol=1e-12)


def test_drafts_follow_the_references_argmax() -> None:
    model = TextModel(CONFIG.text)
    model.load_state_dict(WEIGHTS)
    session, ours = Session(model.double()), engine()
    for one in (session, ours):
        one.step([StepItem("a", (1, 2, 3, 4, 5), "prefill")])
    with torch.no_grad():
        expected = session.draft("a", 6, 4)
    torch.testing.assert_close(ours.draft("a", 6, 4), expected, rtol=1e-10, atol=1e-10)


def test_a_refused_step_changes_nothing() -> None:
    one = engine(dataclasses.replace(OPTIONS, pages=3))
    one.step([StepItem("a", (1, 2, 3), "prefill")])
    for items, error in (
        ([StepItem("b", (1,) * 40, "prefill")], PoolError),
        ([StepItem("a", (1,), "decode"), StepItem("a", (2,), "decode")], CacheError),
        ([StepItem("a", (), "decode")], CacheError),
        ([StepItem("b", (CONFIG.text.vocab_size,), "prefill")], TokenIdError),
        ([StepItem("b", (1, 1.5), "prefill")], TokenIdError),
    ):
        with pytest.raises(error):
            one.step(items)
    assert one.pools.requests == ("a",)
    assert one.tokens("a") == (1, 2, 3)
    with pytest.raises(CacheError, match="cannot draft 5"):
        one.draft("a", 1, 5)
    with pytest.raises(CacheError, match="no request 'z'"):
        one.truncate("z", 0)


def test_what_a_kernel_keeps_inside_cannot_be_replaced() -> None:
    one = engine()
    with (
        listening(Override("layers.0.attn.core", lambda value, rows: value + 1)),
        pytest.raises(NotSupportedError, match="core"),
    ):
        one.step([StepItem("a", (1, 2), "prefill")])


def test_what_travels_between_kernels_can_be_replaced() -> None:
    plain = engine().step([StepItem("a", (1, 2), "prefill")])["a"]
    with listening(Override("layers.3.attn.output", lambda value, rows: torch.zeros_like(value))):
        changed = engine().step([StepItem("a", (1, 2), "prefill")])["a"]
    assert not torch.equal(plain, changed)


def test_no_replacement_is_ignored() -> None:
    """Of every name that is computed (what the caches give back is only shown): refused, or it changes the logits."""

    def run() -> torch.Tensor:
        one = engine()
        logits = one.step([StepItem("a", tuple(range(20)), "prefill")])["a"]
        return torch.cat((logits, one.step([StepItem("a", (5,), "decode")])["a"], one.draft("a", 7, 2)))

    recorder = Recorder(("layers.[025].*", "mtp.1.*", "embeddings", "final_norm", "logits"))
    with listening(recorder):
        plain = run()
    names = recorder.names()
    assert len(names) > 50
    refused: dict[str, str] = {}
    for name in sorted(names):
        with listening(Override(name, lambda value, rows: torch.zeros_like(value))):
            try:
                assert not torch.equal(run(), plain), name
            except NotSupportedError as refusal:
                refused[name] = str(refusal).split("'")[1]
    assert {"layers.0.input", "layers.0.attn.index.key", "layers.5.ffn.router.logits", "mtp.1.output"} <= set(refused)
    assert not {"embeddings", "layers.0.attn.index.query", "layers.5.ffn.output", "mtp.1.fused", "logits"} & set(
        refused
    )
    assert all(name.endswith(said) for name, said in refused.items())


def test_other_numerics_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="numerics"):
        Engine.from_state(CONFIG.text, WEIGHTS, device="cpu", numerics=Numerics.preset("vllm"))
