"""Decoding with drafts, fed and verified on the device: the text of plain decoding, whatever is kept."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimized import engine as engine_module
from optimized.cache_export import export_request, import_request
from optimized.draft_rounds import DraftedText
from optimized.drafting import Drafting, Drafts
from optimized.engine import DecodeItem, Engine, EngineOptions
from optimized.errors import PlanError, PoolError
from optimized.plan_spans import StepLimits
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.errors import CacheError, NoteError, TokenIdError
from reference.probe import Recorder, listening
from reference.sampling import Sampling
from reference.session import DraftItem, StepItem

CONFIG = tiny().text
WEIGHTS = {name: tensor.double() for name, tensor in synthetic_tensors(tiny())}
OPTIONS = EngineOptions(
    pages=64, page_size=4, requests=4, limits=StepLimits(10_000, 2**26, 2**22), poison=True, disjoint_numbers=True
)
# Around the window of 7 and the top-k of 13.
LENGTHS = {"a": 12, "b": 1, "c": 6}
COUNT = 14
# So hot that the noise of a position decides, which draft and model share: some drafts are kept, others are not.
HOT = Sampling(5.0, 1.0, 1)


def engine(options: EngineOptions = OPTIONS, lengths: dict[str, int] = LENGTHS) -> Engine:
    one = Engine.from_state(CONFIG, WEIGHTS, torch.float64, "cpu", "torch", options)
    for number, (name, length) in enumerate(lengths.items()):
        one.step([StepItem(name, tuple(10 + (7 * number + 3 * i) % 200 for i in range(length)), "prefill")])
    return one


def items_of(sampling: Sampling = HOT, names: str = "abc") -> list[DecodeItem]:
    return [DecodeItem(name, 31 + i, sampling) for i, name in enumerate(names)]


@cache
def plain(sampling: Sampling) -> dict[str, list[int]]:
    return engine().decode(items_of(sampling), COUNT)


def tokens(texts: dict[str, DraftedText]) -> dict[str, list[int]]:
    return {name: text.tokens for name, text in texts.items()}


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), HOT, Sampling(2.0, 0.8, 3)], ids=["greedy", "hot", "nucleus"])
@pytest.mark.parametrize("depth", [1, 4])
def test_the_text_is_that_without_drafts_and_goes_on(depth: int, sampling: Sampling, graphs: bool) -> None:
    one = engine(dataclasses.replace(OPTIONS, graphs=graphs))
    found = one.decode_with_drafts(items_of(sampling), 9, depth)
    newest = [DecodeItem(name, text.tokens[-1], sampling) for name, text in found.items()]
    rest = one.decode_with_drafts(newest, COUNT - 9, depth)
    assert {name: found[name].tokens + rest[name].tokens for name in found} == plain(sampling)
    assert all(one.length(name) == length + COUNT for name, length in LENGTHS.items())
    kept = [number for text in found.values() for number in text.kept]
    assert sum(kept) + len(kept) == 9 * len(found)
    if sampling == HOT:
        assert {0, 1} <= set(kept)


class Foreseen(Drafting):
    """Proposes what the model is going to choose, but for a wrong token behind the first `right[round]` of them."""

    texts: dict[str, list[int]]
    right: list[int]
    # How many were right in the rounds so far.
    turns: dict[str, list[int]]

    def run(self) -> dict[str, Drafts]:
        found = {}
        for name, item in self._items.items():
            done = len(self._states[name].token_ids) - LENGTHS[name]
            drafts, turns = self.texts[name][done : done + item.depth], self.turns.setdefault(name, [])
            right = min(item.depth, self.right[len(turns) % len(self.right)])
            turns.append(right)
            if right < item.depth:
                drafts[right] = (drafts[right] + 1) % CONFIG.vocab_size
            found[name] = Drafts(torch.zeros(item.depth, CONFIG.vocab_size), torch.tensor(drafts))
        return found


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, COUNT), st.integers(1, 4))
def test_whatever_is_kept_the_text_is_the_same(right: list[int], count: int, depth: int) -> None:
    expected, turns = plain(HOT), dict[str, list[int]]()
    drafting = type("Drawn", (Foreseen,), {"texts": expected, "right": right, "turns": turns})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Drafting", drafting)
        found = engine().decode_with_drafts(items_of(), count, depth)
    for name, text in found.items():
        assert text.tokens == expected[name][:count]
        # Behind the last draft, one token may be left for a round without drafts.
        assert text.kept[: len(turns.get(name, []))] == turns.get(name, [])
        assert len(text.kept) - len(turns.get(name, [])) in (0, 1)


@pytest.mark.parametrize("graphs", [False, True])
def test_listeners_see_drafts_verified_rows_and_what_is_cached_of_them(graphs: bool) -> None:
    """As of the same calls one by one."""
    one, other = (engine(dataclasses.replace(OPTIONS, graphs=graphs)) for _ in range(2))
    shown, expected = Recorder(("*",)), Recorder(("*",))
    with listening(shown):
        one.decode_with_drafts([DecodeItem("a", 31)], 3, 2)
    with listening(expected):
        drafts = other.drafts([DraftItem("a", 31, 2)])["a"].argmax(-1).tolist()
        other.step([StepItem("a", (31, *drafts), "verify")])
    first = shown.observations[: len(expected.observations)]
    for seen, wanted in zip(first, expected.observations, strict=True):
        ours, theirs = ((row.name, row.rows.kind, row.rows.positions.tolist()) for row in (seen, wanted))
        assert ours == theirs
        torch.testing.assert_close(seen.value, wanted.value, rtol=1e-12, atol=1e-12)
    kinds = {(seen.name.split(".")[0], seen.rows.kind) for seen in shown.observations}
    assert {("mtp", "draft"), ("layers", "verify"), ("cache", "verify"), ("cache", "decode")} <= kinds


def test_a_request_without_hidden_states_cannot_draft_and_nothing_changes() -> None:
    one = engine()
    import_request(one.pools, "d", export_request(one.pools, "a"))
    one.adopt("d", one.tokens("a"))
    with pytest.raises(CacheError, match="cannot draft for 'd'"):
        one.decode_with_drafts(items_of(names="ad"), 5, 2)
    assert (one.length("a"), one.pools.slots("a").draft_length) == (12, 0)


@pytest.mark.parametrize(
    ("items", "count", "depth", "error"),
    [
        (items_of(), 5, 0, CacheError),
        (items_of(), 5, 5, CacheError),
        (items_of(), 5, 2.0, CacheError),
        (items_of(), 0, 2, CacheError),
        (items_of(), 3.0, 2, CacheError),
        (items_of(), float("inf"), 2, CacheError),
        (items_of(), "5", 2, CacheError),
        (items_of(names="aa"), 5, 2, CacheError),
        (items_of(names="x"), 5, 2, CacheError),
        ([], 5, 2, CacheError),
        ([DecodeItem("a", CONFIG.vocab_size)], 5, 2, TokenIdError),
        (items_of(), 250, 2, PoolError),
    ],
)
def test_what_cannot_be_decoded_changes_nothing(
    items: list[DecodeItem], count: int, depth: int, error: type[NoteError]
) -> None:
    one = engine()
    with pytest.raises(error):
        one.decode_with_drafts(items, count, depth)
    assert {name: one.length(name) for name in one.requests} == LENGTHS
    assert tokens(one.decode_with_drafts(items_of(), COUNT, 2)) == plain(HOT)


def test_integers_of_numpy_and_items_one_by_one_will_do() -> None:
    one = engine()
    found = one.decode_with_drafts((item for item in items_of()), np.int64(9), np.uint8(4))
    assert tokens(found) == {name: text[:9] for name, text in plain(HOT).items()}
    for text in found.values():
        assert all(kept <= tried <= 4 for kept, tried in zip(text.kept, text.tried, strict=True))
        assert sum(text.kept) + len(text.kept) == 9
    newest = (DecodeItem(name, text.tokens[-1], HOT) for name, text in found.items())
    assert one.decode(newest, np.int32(COUNT - 9)) == {name: text[9:] for name, text in plain(HOT).items()}


def test_drafts_take_no_page_that_the_text_does_not() -> None:
    """Room for exactly the text: no round proposes more than there is left to write."""
    tight = dataclasses.replace(OPTIONS, pages=sum(-(-(length + COUNT) // 4) for length in LENGTHS.values()))
    one = engine(tight)
    assert tokens(one.decode_with_drafts(items_of(), COUNT, 4)) == plain(HOT)
    assert one.pools.free_pages == 0


def test_more_rows_than_a_step_holds_are_refused_before_anything_runs() -> None:
    one = engine(dataclasses.replace(OPTIONS, limits=StepLimits(9, 2**26, 2**22)))
    with pytest.raises(PlanError, match="a round of 3 requests verifies 12 tokens, and max_tokens = 9; raise it"):
        one.decode_with_drafts(items_of(), COUNT, 3)
    assert all(
        (one.length(name), one.pools.slots(name).draft_length) == (length, 0) for name, length in LENGTHS.items()
    )
    assert tokens(one.decode_with_drafts(items_of(), COUNT, 2)) == plain(HOT)
