"""The engine: drafts of depth 1 to 4 across the window's edge, accepted 0 to depth, another number in each row.

In float64 exact; and in float32 and bfloat16 greedy text parts from the text without drafts, or from the reference's,
at near ties only.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ring_rollback import CHUNKS, DEPTHS, MOST_DRAFTS, in_one_step, with_rollbacks, worst_error

from optimized.engine import Engine, EngineOptions
from optimized.plan_spans import StepLimits
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.generate import Generation, Parting, first_parting, generate
from reference.session import Session, StepItem
from reference.text import TextModel

CONFIG = tiny()
WEIGHTS = dict(synthetic_tensors(CONFIG))
OPTIONS = EngineOptions(
    pages=96,
    page_size=4,
    requests=12,
    max_draft_tokens=MOST_DRAFTS,
    limits=StepLimits(10_000, 2**26, 2**22),
    poison=True,
    disjoint_numbers=True,
)
PROMPTS = {f"r{seed}": tuple(range(seed, seed + 9)) for seed in range(0, 180, 20)}
NEW_TOKENS = 16


def engine(dtype: torch.dtype = torch.float64, options: EngineOptions = OPTIONS) -> Engine:
    bias = torch.promote_types(dtype, torch.float32)
    weights = {
        name: tensor.to(bias if name.endswith("e_score_correction_bias") else dtype) for name, tensor in WEIGHTS.items()
    }
    return Engine.from_state(CONFIG.text, weights, dtype, "cpu", "torch", options)


def session(dtype: torch.dtype = torch.float64) -> Session:
    model = TextModel(CONFIG.text)
    model.load_state_dict(WEIGHTS)
    return Session(model.to(dtype).requires_grad_(False), MOST_DRAFTS)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_was_taken_back_is_forgotten(depth: int) -> None:
    logits, drafts = in_one_step(session, depth)
    for chunk in CHUNKS:
        found, ends = with_rollbacks(engine(), depth, chunk)
        assert worst_error(found, logits) < 1e-10, chunk
        assert worst_error(ends, drafts) < 1e-10, chunk


def test_the_same_where_a_step_holds_few_tokens() -> None:
    """Every step is cut into several."""
    small = dataclasses.replace(OPTIONS, limits=StepLimits(9, 2**26, 2**22))
    logits, drafts = in_one_step(session, 3)
    found, ends = with_rollbacks(engine(options=small), 3, 5)
    assert worst_error(found, logits) < 1e-10
    assert worst_error(ends, drafts) < 1e-10


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def test_rounding_parts_texts_at_near_ties_only(dtype: torch.dtype) -> None:
    expected = generate(session(dtype), PROMPTS, NEW_TOKENS)
    made = {
        "reference, drafts": generate(session(dtype), PROMPTS, NEW_TOKENS, 3),
        **{f"engine, depth {depth}": generate(engine(dtype), PROMPTS, NEW_TOKENS, depth) for depth in (0, 1, 2, 3, 4)},
    }
    partings = [
        (name, parting)
        for name, found in made.items()
        for request in PROMPTS
        if (parting := first_parting(expected, found, request))
    ]
    for name, parting in partings:
        assert parting.margin <= noise(parting, expected, dtype), (name, parting)
    # What lies behind a parting is not compared; most tokens lie before one.
    everything = len(made) * len(PROMPTS) * NEW_TOKENS
    assert everything - sum(NEW_TOKENS - parting.index for _, parting in partings) > everything / 2


def noise(parting: Parting, expected: Generation, dtype: torch.dtype) -> float:
    """How far apart rounding may move two logits: twice four times what the eager reference errs at that place."""
    ids = (*PROMPTS[parting.request], *expected.tokens[parting.request][: parting.index])
    eager_W, exact_W = (
        session(one).step([StepItem("x", ids, "prefill")])["x"][-1].double() for one in (dtype, torch.float64)
    )
    return 2.0 * 4.0 * float((eager_W - exact_W).square().mean().sqrt())
