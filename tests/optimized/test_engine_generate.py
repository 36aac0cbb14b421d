"""The engine generates the reference's tokens, with drafts and without, in company and in chunks, greedy or sampled."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from optimized.engine import Engine, EngineOptions
from optimized.plan_spans import StepLimits
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.generate import generate
from reference.sampling import Sampling
from reference.session import Session, StepItem
from reference.text import TextModel

CONFIG = tiny()
WEIGHTS = {name: tensor.double() for name, tensor in synthetic_tensors(CONFIG)}
OPTIONS = EngineOptions(
    pages=64, page_size=4, requests=4, limits=StepLimits(10_000, 2**26, 2**22), poison=True, disjoint_numbers=True
)
# Across the window of 7 and the top-k of 13, and one token alone.
PROMPTS = {"a": tuple(range(40, 52)), "b": (9,), "c": tuple(range(100, 105))}
NEW_TOKENS = 14


def engine(options: EngineOptions = OPTIONS) -> Engine:
    return Engine.from_state(CONFIG.text, WEIGHTS, torch.float64, "cpu", "torch", options)


def reference_greedy(prompt: tuple[int, ...]) -> list[int]:
    model = TextModel(CONFIG.text)
    model.load_state_dict(WEIGHTS)
    session = Session(model.double())
    tokens: list[int] = []
    with torch.no_grad():
        logits = session.step([StepItem("x", prompt, "prefill")])["x"]
        for _ in range(NEW_TOKENS):
            tokens.append(int(logits[-1].argmax()))
            logits = session.step([StepItem("x", (tokens[-1],), "decode")])["x"]
    return tokens


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {request: reference_greedy(prompt) for request, prompt in PROMPTS.items()}


@pytest.mark.parametrize("depth", [0, 1, 3, 4])
def test_drafts_change_no_token(depth: int, expected: dict[str, list[int]]) -> None:
    found = generate(engine(), PROMPTS, NEW_TOKENS, depth)
    assert found.tokens == expected
    assert len(found.tried) == len(found.acceptance) == depth
    assert all(hit <= count for hit, count in zip(found.accepted, found.tried, strict=True))


@pytest.mark.parametrize("depth", [0, 3])
def test_sampled_tokens_are_the_references(depth: int) -> None:
    sampling = {"a": Sampling(1.0, 0.9, 1), "b": Sampling(0.7, 1.0, 2)}
    model = TextModel(CONFIG.text)
    model.load_state_dict(WEIGHTS)
    session = Session(model.double().requires_grad_(False))
    expected = generate(session, PROMPTS, NEW_TOKENS, depth, sampling=sampling)
    found = generate(engine(), PROMPTS, NEW_TOKENS, depth, sampling=sampling)
    assert found == expected


def test_a_request_alone_and_in_chunks_has_the_same_tokens(expected: dict[str, list[int]]) -> None:
    chunked = dataclasses.replace(OPTIONS, limits=StepLimits(9, 2**26, 2**22))
    for request, prompt in PROMPTS.items():
        assert generate(engine(chunked), {request: prompt}, NEW_TOKENS, 2).tokens == {request: expected[request]}


def test_a_perfect_draft_layer_is_always_accepted(monkeypatch: pytest.MonkeyPatch, expected: dict) -> None:
    """Drafts that are the model's own next tokens: every round keeps all of them."""
    one = engine()

    def drafts(items):
        found = {}
        for item in items:
            done = one.length(item.request) - len(PROMPTS[item.request]) + 1
            future = expected[item.request][done : done + item.depth]
            found[item.request] = torch.nn.functional.one_hot(torch.tensor(future), CONFIG.text.vocab_size).double()
        return found

    monkeypatch.setattr(one, "drafts", drafts)
    found = generate(one, PROMPTS, NEW_TOKENS, 3)
    assert found.tokens == expected
    assert found.acceptance == (1.0, 1.0, 1.0)


def test_a_stop_id_ends_its_request_alone(expected: dict[str, list[int]]) -> None:
    stop = expected["a"][4]
    found = generate(engine(), PROMPTS, NEW_TOKENS, 3, stop_ids={stop}).tokens
    for request, tokens in expected.items():
        cut = tokens.index(stop) + 1 if stop in tokens else NEW_TOKENS
        assert found[request] == tokens[:cut]
