"""Lengths at which something begins: a key leaves the window, a key is pruned, the ring wraps, a draft is taken back.

All in float64. Positions are 0-based, so a window of W keys drops its first key at position W, that is with T = W + 1
tokens. Source: text_model specification, sections 7.2, 9, 13, 15 and 21.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import text_configs
from torch import Tensor
from weights import (
    FLOAT64_BOUND,
    drawn_ids,
    error,
    in_chunks,
    one_layer,
    one_shot,
    probes,
    random_model,
    small,
)

from reference.config import MlaGeometry, TextConfig
from reference.session import Session, StepItem
from reference.text import TextModel

WINDOW = 7
TOPK = 5
# Released window and top-k, on the smallest layer that has them.
NARROW = {
    "hidden_size": 12,
    "vocab_size": 31,
    "intermediate_size": 8,
    "full": MlaGeometry(2, 6, 4, 3, 2, 3, 2.0e4, "headwise"),
    "sliding": MlaGeometry(2, 6, 4, 3, 2, 3, 2.0e2, "headwise"),
    "index_n_heads": 8,
    "index_head_dim": 4,
    "num_nextn_predict_layers": 0,
}


def without_first_token(model: TextModel, ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The last row's logits, and the same after the first token was changed."""
    changed = ((ids[0] + 1) % model.config.vocab_size, *ids[1:])
    return one_shot(model, ids)[-1], one_shot(model, changed)[-1]


@pytest.mark.parametrize(
    ("window", "length"),
    [(WINDOW, WINDOW - 1), (WINDOW, WINDOW), (WINDOW, WINDOW + 1), (513, 512), (513, 513), (513, 514)],
)
def test_window_drops_the_first_key_at_one_more_token_than_it_holds(window, length):
    """Owes bytes: the last row of one sliding layer depends on token 0 exactly while the window reaches it."""
    model = random_model(one_layer("sliding", sliding_window_size=window, **NARROW))
    row, changed_row = without_first_token(model, drawn_ids(model.config, length))
    assert torch.equal(row, changed_row) == (length > window)


@pytest.mark.parametrize("window", [WINDOW, 513])
def test_decode_drops_the_first_key_at_the_same_token(window):
    model = random_model(one_layer("sliding", sliding_window_size=window, **NARROW))
    ids = drawn_ids(model.config, window + 2)
    rows = in_chunks(model, ids, [window - 1, 1, 1, 1])
    assert error(rows, one_shot(model, ids)) <= FLOAT64_BOUND
    changed = in_chunks(model, ((ids[0] + 1) % model.config.vocab_size, *ids[1:]), [window - 1, 1, 1, 1])
    is_same = [torch.equal(row, changed_row) for row, changed_row in zip(rows, changed, strict=True)]
    assert is_same == [False] * window + [True, True]


@pytest.mark.parametrize("topk", [TOPK, 2048])
def test_top_k_keeps_everything_up_to_k_and_prunes_the_smallest_score_at_one_more(topk):
    """Owes exact sets. The pruned key is the smallest score; among equal ones the largest position."""
    model = random_model(one_layer("full", index_topk=topk, **NARROW))
    ids = drawn_ids(model.config, topk + 1)
    at_topk, one_more = probes(model, ids[:topk]), probes(model, ids)
    selected, scores = "layers.0.attn.index.selected", "layers.0.attn.index.scores"
    positions_K = torch.arange(topk)
    all_TK = positions_K.expand(topk, -1).masked_fill(positions_K > positions_K[:, None], -1)
    assert torch.equal(at_topk[selected], all_TK)
    assert torch.equal(one_more[selected][:topk], all_TK)
    last = one_more[scores][topk].tolist()
    pruned = max(range(topk + 1), key=lambda position: (-last[position], position))
    assert one_more[selected][topk].tolist() == [position for position in range(topk + 1) if position != pruned]


@pytest.mark.parametrize("start", [1, 3, 2 * WINDOW])
def test_decode_after_the_ring_has_wrapped(start):
    """Owes a bound. The ring has window + drafts rows; the run overwrites each of them at least twice."""
    model = random_model(small(sliding_window_size=WINDOW, index_topk=TOPK))
    ids = drawn_ids(model.config, 3 * (WINDOW + 4))
    assert error(in_chunks(model, ids, [start, *[1] * (len(ids) - start)]), one_shot(model, ids)) <= FLOAT64_BOUND


@given(
    config=text_configs(),
    length=st.integers(1, 26),
    taken_back=st.integers(0, 4),
    other_length=st.integers(1, 6),
    ring=st.integers(0, 4),
)
@example(config=small(sliding_window_size=7), length=11, taken_back=4, other_length=5, ring=4)
@example(config=small(sliding_window_size=7), length=12, taken_back=4, other_length=1, ring=4)
@example(config=small(sliding_window_size=1), length=5, taken_back=4, other_length=2, ring=4)
def test_truncation_across_the_wrap_forgets_the_rest(config, length, taken_back, other_length, ring):
    """Owes a bound: tokens taken back and replaced by others leave no trace, wherever the ring's end lies.

    The draft layer had seen the tokens taken back, and forgets them too.
    """
    taken_back = min(taken_back, ring, length - 1)
    model = random_model(config)
    ids, other = drawn_ids(config, length, seed=1), drawn_ids(config, other_length, seed=2)
    can_draft = ring > 0 and config.num_nextn_predict_layers > 0
    session, fresh = Session(model, max_draft_tokens=ring), Session(model, max_draft_tokens=ring)
    with torch.no_grad():
        for token_id in ids:
            session.step([StepItem("a", (token_id,), "decode")])
        if can_draft:
            session.draft("a", 1, ring)
        session.truncate("a", length - taken_back)
        rows = session.step([StepItem("a", other, "prefill")])["a"]
        expected = fresh.step([StepItem("a", ids[: length - taken_back] + other, "prefill")])["a"]
        assert error(rows, expected[-other_length:]) <= FLOAT64_BOUND
        if can_draft:
            assert error(session.draft("a", 0, ring), fresh.draft("a", 0, ring)) <= FLOAT64_BOUND


def compositions(total: int) -> Iterator[list[int]]:
    """All ordered ways to write `total` as a sum of positive parts: 2^(total - 1) of them."""
    for cuts in itertools.product((False, True), repeat=total - 1):
        edges = [0, *(index + 1 for index, is_cut in enumerate(cuts) if is_cut), total]
        yield [end - start for start, end in itertools.pairwise(edges)]


def test_every_chunk_split_of_a_short_sequence_gives_the_same_rows():
    """Owes a bound. Window 3 and top-k 4 are both crossed by seven tokens."""
    model = random_model(small(sliding_window_size=3, index_topk=4))
    ids = drawn_ids(model.config, 7)
    expected = one_shot(model, ids)
    errors = [error(in_chunks(model, ids, split), expected) for split in compositions(len(ids))]
    assert len(errors) == 64
    assert max(errors) <= FLOAT64_BOUND


@given(config=text_configs(), split=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_drawn_chunk_splits_give_the_same_rows(config, split, seed):
    """Owes a bound."""
    model, ids = random_model(config, seed), drawn_ids(config, sum(split), seed)
    assert error(in_chunks(model, ids, split), one_shot(model, ids)) <= FLOAT64_BOUND


def draft_and_verify(session: Session, next_token: int, depth: int, accepted: int) -> Tensor:
    """One round: draft `depth` tokens, verify them, keep `accepted`, whatever the target says of them.

    Returns the verified rows that are kept.
    """
    length = session.length("a")
    drafted = session.draft("a", next_token, depth).argmax(-1).tolist()
    rows = session.step([StepItem("a", (next_token, *drafted), "verify")])["a"]
    session.truncate("a", length + 1 + accepted)
    return rows[: 1 + accepted]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_drafts_accepted_and_rolled_back_across_the_window_edge_equal_the_run_without(depth):
    """Owes a bound, for every number of accepted drafts, at every length around the window and around the wrap.

    Both the target's rows and the drafts that follow a rollback equal those of a request that never drafted.
    """
    config = small(sliding_window_size=WINDOW, index_topk=TOPK)
    model = random_model(config)
    prompt, next_tokens = drawn_ids(config, WINDOW - 3, seed=5), drawn_ids(config, 24, seed=6)
    for accepted in range(depth + 1):
        session, plain = Session(model, max_draft_tokens=4), Session(model, max_draft_tokens=4)
        with torch.no_grad():
            for run in (session, plain):
                run.step([StepItem("a", prompt, "prefill")])
            for next_token in next_tokens[: 1 + 16 // (1 + accepted)]:
                rows = draft_and_verify(session, next_token, depth, accepted)
                kept = tuple(session.request("a").token_ids[plain.length("a") :])
                expected = plain.step([StepItem("a", kept, "prefill")])["a"]
                assert error(rows, expected) <= FLOAT64_BOUND
            undrafted = Session(model, max_draft_tokens=4)
            undrafted.step([StepItem("a", tuple(session.request("a").token_ids), "prefill")])
            assert error(session.draft("a", 3, depth), undrafted.draft("a", 3, depth)) <= FLOAT64_BOUND


def test_a_draft_from_the_first_token_and_one_past_the_ring_agree_with_a_fresh_request():
    """The draft layer catches up over any number of rows that it has not seen."""
    config: TextConfig = dataclasses.replace(small(), sliding_window_size=WINDOW)
    model, ids = random_model(config), drawn_ids(small(), 30)
    caught_up, late = Session(model, max_draft_tokens=2), Session(model, max_draft_tokens=2)
    with torch.no_grad():
        for count, token_id in enumerate(ids, start=1):
            caught_up.step([StepItem("a", (token_id,), "decode")])
            next_token = ids[count] if count < len(ids) else 0
            every_token = caught_up.draft("a", next_token, 2)
        late.step([StepItem("a", ids, "prefill")])
        assert error(every_token, late.draft("a", 0, 2)) <= FLOAT64_BOUND
