"""What breaks off or goes far back leaves requests that go on as if it had not happened, or are refused by name."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from optimized.cache_export import export_request, import_request
from optimized.engine import DecodeItem, Engine, EngineOptions
from optimized.errors import NotSupportedError, PoolError
from optimized.hidden_rows import MOST_IDLE_ROWS, HiddenRows
from optimized.plan_spans import StepLimits
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.errors import CacheError
from reference.probe import Override, listening
from reference.session import DraftItem, StepItem

CONFIG = tiny().text
WEIGHTS = {name: tensor.double() for name, tensor in synthetic_tensors(tiny())}
OPTIONS = EngineOptions(
    pages=96, page_size=4, requests=4, limits=StepLimits(10_000, 2**26, 2**22), poison=True, disjoint_numbers=True
)
# Inside the ring of window + drafts = 11 rows, and far beyond it.
LENGTHS = (6, 40)


def engine(options: EngineOptions = OPTIONS, **lengths: int) -> Engine:
    one = Engine.from_state(CONFIG, WEIGHTS, torch.float64, "cpu", "torch", options)
    if lengths:
        one.step([StepItem(request, tuple(range(3, 3 + length)), "prefill") for request, length in lengths.items()])
    return one


def broken(layer: str) -> listening:
    """A listener that replaces what cannot be replaced: the run breaks off there."""
    return listening(Override(f"{layer}.attn.core", lambda value, rows: value + 1))


def assert_goes_on(one: Engine, expected: Engine, request: str = "a") -> None:
    assert one.tokens(request) == expected.tokens(request)
    item = [StepItem(request, (9,), "decode")]
    torch.testing.assert_close(one.step(item), expected.step(item), rtol=1e-12, atol=1e-12)
    found, wanted = (each.draft(request, 7, 3) for each in (one, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_draft_follows_the_deepest_truncation_that_is_allowed(length: int) -> None:
    one = engine(a=length)
    one.draft("a", 7, 1)
    allowed = []
    for shorter in range(length):
        try:
            copy = engine(a=length)
            copy.draft("a", 7, 1)
            copy.truncate("a", shorter)
            allowed.append(shorter)
        except CacheError:
            continue
    shortest = max(1, min(allowed))
    assert length - shortest > OPTIONS.max_draft_tokens
    one.truncate("a", shortest)
    torch.testing.assert_close(one.draft("a", 5, 2), engine(a=shortest).draft("a", 5, 2), rtol=1e-12, atol=1e-12)


def test_imported_rows_are_not_lost_to_a_step_that_was_refused() -> None:
    one = engine(a=5)
    exported = export_request(one.pools, "a")
    import_request(one.pools, "b", exported)
    with pytest.raises(PoolError, match="'b' is open already"):
        one.step([StepItem("c", (1,), "prefill"), StepItem("b", (4,), "decode")])
    assert one.pools.requests == ("a", "b")
    assert torch.equal(export_request(one.pools, "b").full_ZSL, exported.full_ZSL)


def test_an_adopted_request_steps_but_does_not_draft() -> None:
    one, expected = engine(a=12), engine(a=12)
    import_request(one.pools, "b", export_request(one.pools, "a"))
    one.adopt("b", one.tokens("a"))
    for token in (4, 5):
        with pytest.raises(CacheError, match="hidden states from row 12 on"):
            one.draft("b", token, 1)
        ours, theirs = one.step([StepItem("b", (token,), "decode")]), expected.step([StepItem("a", (token,), "decode")])
        torch.testing.assert_close(ours["b"], theirs["a"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("count", [1, 5])
def test_a_step_that_breaks_off_is_taken_back(length: int, count: int) -> None:
    one, expected = engine(a=length), engine(a=length)
    with broken("layers.3"), pytest.raises(NotSupportedError):
        one.step([StepItem("a", tuple(range(count)), "decode"), StepItem("new", (1, 2), "prefill")])
    assert one.pools.requests == ("a",)
    assert_goes_on(one, expected)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_decode_that_breaks_off_is_taken_back(graphs: bool, steps: int) -> None:
    options = dataclasses.replace(OPTIONS, graphs=graphs)
    one, expected, calls = engine(options, a=6, b=7), engine(options, a=6, b=7), itertools.count()
    replace = Override("layers.3.attn.core", lambda value, rows: value + 1 if next(calls) >= 2 * steps else value)
    with listening(replace), pytest.raises(NotSupportedError):
        one.decode([DecodeItem("a", 5), DecodeItem("b", 6)], 4)
    for request in ("a", "b"):
        assert one.pools.slots(request).length == expected.pools.slots(request).length
        assert_goes_on(one, expected, request)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("name", ["layers.3.attn.core", "mtp.0.attn.core", "mtp.1.attn.core"])
def test_a_round_of_drafts_that_breaks_off_is_taken_back_with_those_before_it(
    name: str, rounds: int, graphs: bool
) -> None:
    """In a verification, in the first draft, in the second one."""
    options = dataclasses.replace(OPTIONS, graphs=graphs)
    one, expected, calls = engine(options, a=6, b=7), engine(options, a=6, b=7), itertools.count()
    replace = Override(name, lambda value, rows: value + 1 if next(calls) >= 2 * rounds else value)
    with listening(replace), pytest.raises(NotSupportedError):
        one.decode_with_drafts([DecodeItem("a", 5), DecodeItem("b", 6)], 9, 2)
    assert next(calls) > 2 * rounds
    assert one.pools.free_pages == expected.pools.free_pages
    for request in ("a", "b"):
        assert one.pools.slots(request).length == expected.pools.slots(request).length
        assert_goes_on(one, expected, request)


def test_a_request_whose_ring_was_overwritten_by_such_a_step_is_freed() -> None:
    one = engine(a=40, b=40)
    with broken("layers.3"), pytest.raises(NotSupportedError):
        one.step([StepItem("a", tuple(range(30)), "prefill"), StepItem("b", (9,), "decode")])
    assert one.pools.requests == ("b",)
    assert_goes_on(one, engine(b=40), "b")


def test_parts_that_ran_before_a_step_broke_off_are_taken_back_too() -> None:
    in_parts = dataclasses.replace(OPTIONS, limits=StepLimits(9, 2**26, 2**22))
    one, calls = engine(in_parts, a=3), iter((False, True))
    replace = Override("layers.3.attn.core", lambda value, rows: value + 1 if next(calls) else value)
    with listening(replace), pytest.raises(NotSupportedError):
        one.step([StepItem("a", (1, 2, 3, 4, 5, 6), "prefill"), StepItem("b", tuple(range(8)), "prefill")])
    assert (one.pools.requests, one.tokens("a")) == (("a",), (3, 4, 5))
    assert_goes_on(one, engine(a=3))


def test_a_draft_that_breaks_off_is_taken_back() -> None:
    one, expected = engine(a=6), engine(a=6)
    with broken("mtp.0"), pytest.raises(NotSupportedError):
        one.draft("a", 5, 2)
    assert_goes_on(one, expected)


def test_a_draft_layer_whose_ring_was_overwritten_by_such_a_draft_is_refused() -> None:
    one = engine(a=6)
    one.draft("a", 5, 2)
    one.step([StepItem("a", tuple(range(30)), "prefill")])
    with broken("mtp.0"), pytest.raises(NotSupportedError):
        one.draft("a", 5, 2)
    with pytest.raises(CacheError, match="hidden states"):
        one.draft("a", 5, 2)


def test_a_draft_whose_history_breaks_off_between_its_parts_is_refused() -> None:
    one, calls = engine(dataclasses.replace(OPTIONS, limits=StepLimits(18, 2**26, 2**22)), a=40), iter((False, True))
    replace = Override("mtp.0.attn.core", lambda value, rows: value + 1 if next(calls) else value)
    with listening(replace), pytest.raises(NotSupportedError):
        one.draft("a", 5, 2)
    with pytest.raises(CacheError, match="hidden states from row 40 on"):
        one.draft("a", 5, 2)
    assert one.tokens("a") == engine(a=40).tokens("a")
    one.free("a")


def test_drafting_requests_together_leaves_those_that_do_not_as_they_were() -> None:
    one, expected = engine(a=6, b=12), engine(a=6, b=12)
    one.drafts([DraftItem("a", 5, 3)])
    assert_goes_on(one, expected, "b")


def test_a_few_rows_do_not_keep_a_large_step_alive() -> None:
    step_TD = torch.zeros(MOST_IDLE_ROWS + 9, 8)
    held = HiddenRows().appended(step_TD[:3]).appended(step_TD)
    assert held.joined().shape == (MOST_IDLE_ROWS + 12, 8)
    few = held.between(1, 8)
    assert (few.first, few.stop) == (1, 8)
    for piece in (*held.between(0, 3)._pieces, *few._pieces):
        assert piece.untyped_storage().nbytes() <= MOST_IDLE_ROWS * 8 * 4


def test_rows_that_stay_cost_nothing_to_keep() -> None:
    held = HiddenRows(3).appended(torch.zeros(2, 8)).appended(torch.zeros(1, 8))
    assert (held.first, held.stop) == (3, 6)
    assert held.between(0, 6) is held.between(3, 9) is held
    assert (held.between(4, 6).first, held.between(4, 5).stop) == (4, 5)


def test_an_adopted_request_that_is_emptied_drafts_again() -> None:
    one = engine(a=6)
    import_request(one.pools, "b", export_request(one.pools, "a"))
    one.adopt("b", one.tokens("a"))
    one.truncate("b", 0)
    one.step([StepItem("b", one.tokens("a"), "prefill")])
    torch.testing.assert_close(one.draft("b", 7, 2), one.draft("a", 7, 2), rtol=1e-12, atol=1e-12)
