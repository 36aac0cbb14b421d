"""What people report of engines: stale weights after a reload, an answer that depends on its company."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from optimized.engine import Engine, EngineOptions
from optimized.plan_spans import StepLimits
from optimized.weights import loaded_into
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.session import StepItem

CONFIG = tiny().text
OPTIONS = EngineOptions(
    pages=96, page_size=4, requests=9, limits=StepLimits(10_000, 2**26, 2**22), poison=True, disjoint_numbers=True
)
PROMPT = tuple(range(20, 40))


def state(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in synthetic_tensors(tiny(), seed)}


def engine(seed: int) -> Engine:
    return Engine.from_state(CONFIG, state(seed), torch.float64, "cpu", "torch", OPTIONS)


def answer(one: Engine, request: str = "a") -> torch.Tensor:
    """Prefill, two decodes and a draft, in one tensor."""
    first = one.step([StepItem(request, PROMPT, "prefill")])[request]
    more = [one.step([StepItem(request, (token,), "decode")])[request] for token in (7, 8)]
    drafted = one.draft(request, 9, 3)
    one.free(request)
    return torch.cat((first, *more, drafted))


def test_c24_a_second_model_in_the_same_process_is_that_of_a_fresh_one() -> None:
    fresh = answer(engine(1))
    old = engine(0)
    assert not torch.equal(answer(old), fresh)
    del old
    assert torch.equal(answer(engine(1)), fresh)


def test_c25_the_same_weights_again_change_nothing_and_others_make_another_model() -> None:
    one = engine(0)
    before = answer(one)
    loaded_into(one.text.weights, state(0))
    assert torch.equal(answer(one), before)
    loaded_into(one.text.weights, state(1))
    assert torch.equal(answer(one), answer(engine(1)))


@pytest.mark.parametrize("company", [1, 3, 7])
def test_c72_company_changes_no_answer_without_rounding(company: int) -> None:
    """Alone, among others from the start, and joined by one more on the way."""
    alone, together = engine(0), engine(0)
    others = {f"other {n}": tuple(range(n + 1, 3 * n + 4)) for n in range(company)}
    expected = alone.step([StepItem("a", PROMPT, "prefill")])["a"]
    items = [StepItem(name, ids, "prefill") for name, ids in others.items()]
    items.insert(len(items) // 2, StepItem("a", PROMPT, "prefill"))
    torch.testing.assert_close(together.step(items)["a"], expected, rtol=1e-12, atol=1e-12)
    for number, token in enumerate((7, 8, 9)):
        expected = alone.step([StepItem("a", (token,), "decode")])["a"]
        items = [StepItem(name, (token,), "decode") for name in (*others, "a")]
        if number == 1:
            items.append(StepItem("late", PROMPT[:15], "prefill"))
        torch.testing.assert_close(together.step(items)["a"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [(32,), (8, 8, 8, 8), (31, 1), (1, 31)])
def test_c36_every_split_of_a_prompt_gives_the_same_logits(lengths: tuple[int, ...]) -> None:
    prompt = tuple(range(100, 132))
    whole = engine(0).step([StepItem("a", prompt, "prefill")])["a"]
    one, rows, start = engine(0), [], 0
    for length in lengths:
        rows.append(one.step([StepItem("a", prompt[start : start + length], "prefill")])["a"])
        start += length
    torch.testing.assert_close(torch.cat(rows), whole, rtol=1e-12, atol=1e-12)


def test_c19_pages_and_rings_of_a_freed_request_serve_others() -> None:
    """A pool of eight pages: the second request is admitted into what the first gave back, which is poisoned."""
    small = dataclasses.replace(OPTIONS, pages=8, requests=2)
    one = Engine.from_state(CONFIG, state(0), torch.float64, "cpu", "torch", small)
    expected = answer(engine(0), "b")
    one.step([StepItem("a", PROMPT, "prefill")])
    one.truncate("a", len(PROMPT) - 4)
    one.free("a")
    assert torch.equal(answer(one, "b"), expected)
