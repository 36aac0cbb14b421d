"""Drafts beyond the argmax of one request: sampled, of more requests than a step holds, refused ids, what is shown."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from optimized.cache_export import export_request, import_request
from optimized.engine import Engine, EngineOptions
from optimized.plan_spans import StepLimits
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.errors import CacheError, TokenIdError
from reference.probe import Recorder, listening
from reference.sampling import Sampling
from reference.session import DraftItem, Session, StepItem
from reference.text import TextModel

CONFIG = tiny().text
WEIGHTS = {name: tensor.double() for name, tensor in synthetic_tensors(tiny())}
OPTIONS = EngineOptions(
    pages=96, page_size=4, requests=12, limits=StepLimits(10_000, 2**26, 2**22), poison=True, disjoint_numbers=True
)


def engine(options: EngineOptions = OPTIONS) -> Engine:
    return Engine.from_state(CONFIG, WEIGHTS, torch.float64, "cpu", "torch", options)


def test_sampled_drafts_take_the_noise_of_their_positions() -> None:
    model = TextModel(CONFIG)
    model.load_state_dict(WEIGHTS)
    ours, session = engine(), Session(model.double().requires_grad_(False))
    for one in (ours, session):
        one.step([StepItem("a", (1, 2, 3), "prefill"), StepItem("b", (4,), "prefill")])
    for seed in range(4):
        # So hot that each position draws another token; one request stays greedy.
        items = [DraftItem("a", 5, 4, sampling=Sampling(50.0, 1.0, seed)), DraftItem("b", 5, 3)]
        found, expected = ours.drafts(items), session.drafts(items)
        for request, logits in expected.items():
            torch.testing.assert_close(found[request], logits, rtol=1e-10, atol=1e-10)


def test_more_requests_draft_than_a_step_holds() -> None:
    whole, parts = engine(), engine(dataclasses.replace(OPTIONS, limits=StepLimits(9, 2**26, 2**22)))
    names = [f"request {n}" for n in range(11)]
    for one in (whole, parts):
        one.step([StepItem(name, (n, n + 1), "prefill") for n, name in enumerate(names)])
    items = [DraftItem(name, 7, 3) for name in names]
    found, expected = parts.drafts(items), whole.drafts(items)
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


def test_no_id_outside_the_vocabulary_is_drafted_or_adopted() -> None:
    one, outside = engine(), CONFIG.vocab_size
    one.step([StepItem("a", (1, 2), "prefill")])
    for next_token, forced in ((outside, ()), (-1, ()), (1, (2, outside))):
        with pytest.raises(TokenIdError):
            one.draft("a", next_token, 2, forced)
    import_request(one.pools, "b", export_request(one.pools, "a"))
    with pytest.raises(TokenIdError):
        one.adopt("b", (1, outside))
    one.adopt("b", (1, 2))


def test_rows_are_shown_as_drafts_and_cached_rows_only_of_the_step() -> None:
    one, recorder = engine(), Recorder(("mtp.*", "cache.*"))
    one.step([StepItem("a", tuple(range(5)), "prefill")])
    with listening(recorder):
        one.step([StepItem("a", (5,), "decode")])
        one.draft("a", 7, 2)
    shown = {(seen.name.split(".")[0], seen.rows.kind) for seen in recorder.observations if seen.rows}
    assert shown == {("cache", "decode"), ("mtp", "draft")}
    cached = [seen for seen in recorder.observations if seen.name.startswith("cache.")]
    assert all(seen.rows is not None and seen.rows.positions.tolist() == [5] for seen in cached)


def test_hidden_states_are_kept_for_what_can_be_taken_back_and_no_more() -> None:
    one, most = engine(), OPTIONS.max_draft_tokens + 2
    one.step([StepItem("a", tuple(range(40)), "prefill")])
    one.draft("a", 7, 1)
    assert len(one._requests["a"].hidden) == most
    for token in range(3):
        one.draft("a", token, 1)
        one.step([StepItem("a", (token,), "decode")])
        assert len(one._requests["a"].hidden) == most


def test_an_emptied_request_has_nothing_to_draft_from() -> None:
    one = engine()
    one.step([StepItem("a", (1, 2), "prefill")])
    one.truncate("a", 0)
    with pytest.raises(CacheError, match="with 0 tokens"):
        one.draft("a", 1, 1)


def test_a_request_given_twice_is_refused() -> None:
    one = engine()
    one.step([StepItem("a", (1, 2), "prefill")])
    with pytest.raises(CacheError, match=r"each request once; found \['a', 'a'\]"):
        one.drafts([DraftItem("a", 5, 1), DraftItem("a", 6, 2)])
    assert one.pools.slots("a").draft_length == 0
