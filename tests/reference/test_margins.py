"""Margins: by how much a token won, where two generations part, and that rounding parts them at small margins only."""

from __future__ import annotations

from math import inf

import pytest
import torch

from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.generate import Closest, Generation, Parting, first_parting, generate
from reference.sampling import GREEDY, Sampling, choose, choose_with_margins
from reference.session import Session, StepItem
from reference.text import TextModel

CONFIG = tiny()
PROMPTS = {f"r{seed}": tuple(range(seed, seed + 9)) for seed in range(0, 180, 20)}


def session(dtype: torch.dtype) -> Session:
    model = TextModel(CONFIG.text)
    model.load_state_dict(dict(synthetic_tensors(CONFIG)))
    return Session(model.to(dtype).requires_grad_(False))


def test_a_margin_is_the_lead_over_the_second_best() -> None:
    logits_TW = torch.tensor([[0.5, 3.0, 2.75], [1.0, 1.0, 0.0]])
    assert choose_with_margins(logits_TW, (0, 1)) == ([1, 0], [0.25, 0.0])
    assert choose_with_margins(torch.ones(1, 1), (0,)) == ([0], [inf])


def test_outside_of_the_nucleus_there_is_no_second() -> None:
    logits_TW = torch.tensor([[9.0, 0.0, 0.0]])
    assert choose_with_margins(logits_TW, (4,), Sampling(1.0, 0.5, 1)) == ([0], [inf])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, 0.9, 5)], ids=["greedy", "sampled"])
def test_the_tokens_are_those_of_choose(sampling: Sampling) -> None:
    logits_TW = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    tokens, margins = choose_with_margins(logits_TW, range(50), sampling)
    assert tokens == choose(logits_TW, range(50), sampling)
    assert min(margins) >= 0.0


@pytest.mark.parametrize("depth", [0, 3])
def test_each_token_has_its_margin(depth: int) -> None:
    found = generate(session(torch.float64), PROMPTS, 8, depth)
    one = session(torch.float64)
    for request, prompt in PROMPTS.items():
        whole = (*prompt, *found.tokens[request])
        logits_TW = one.step([StepItem(request, whole[:-1], "prefill")])[request][len(prompt) - 1 :]
        best_T2 = logits_TW.topk(2).values
        expected_T = best_T2[:, 0] - best_T2[:, 1]
        found_T = torch.tensor(found.margins[request], dtype=torch.float64)
        torch.testing.assert_close(found_T, expected_T, rtol=1e-9, atol=1e-12)
    assert found.closest is not None
    assert found.closest.margin == min(min(margins) for margins in found.margins.values())
    assert found.closest.margin == found.margins[found.closest.request][found.closest.index]


def test_where_two_generations_part() -> None:
    def made(tokens: list[int], margins: list[float]) -> Generation:
        return Generation({"a": tokens}, (), (), {"a": margins})

    whole = made([1, 2, 3], [5.0, 0.5, 4.0])
    assert first_parting(whole, made([1, 2, 3], [1.0, 1.0, 1.0]), "a") is None
    assert first_parting(whole, made([1, 7, 3], [5.0, 0.25, 4.0]), "a") == Parting("a", 1, 2, 7, 0.25)
    assert first_parting(whole, made([1, 2], [5.0, 0.5]), "a") == Parting("a", 2, 3, None, 4.0)
    assert whole.closest == Closest("a", 1, 0.5)
    assert made([], []).closest is None
    assert whole == made([1, 2, 3], [0.0, 0.0, 0.0])


def test_bfloat16_parts_from_float64_at_near_ties_only() -> None:
    """Up to where they part both have read the same tokens, so the margin is within twice the error of a logit."""
    truth, rounded = generate(session(torch.float64), PROMPTS, 16), generate(session(torch.bfloat16), PROMPTS, 16)
    partings = [parting for request in PROMPTS if (parting := first_parting(truth, rounded, request))]
    for parting in partings:
        ids = (*PROMPTS[parting.request], *truth.tokens[parting.request][: parting.index])
        exact, eager = (
            session(dtype).step([StepItem("x", ids, "prefill")])["x"][-1].double()
            for dtype in (torch.float64, torch.bfloat16)
        )
        assert parting.margin <= 2.0 * float((eager - exact).abs().max())
    assert len(partings) > 0
