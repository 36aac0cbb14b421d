"""The reference: drafts of depth 1 to 4 across the window's edge, accepted 0 to depth, another number in each row."""

from __future__ import annotations

import pytest
import torch
from ring_rollback import CHUNKS, DEPTHS, MOST_DRAFTS, VOCABULARY, WINDOW, in_one_step, with_rollbacks, worst_error

from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.session import Session
from reference.text import TextModel

CONFIG = tiny()
MODEL = TextModel(CONFIG.text)
MODEL.load_state_dict(dict(synthetic_tensors(CONFIG)))
MODEL = MODEL.double().requires_grad_(False)


def session() -> Session:
    return Session(MODEL, max_draft_tokens=MOST_DRAFTS)


def test_the_sizes_are_the_models() -> None:
    assert (CONFIG.text.sliding_window_size, CONFIG.text.vocab_size) == (WINDOW, VOCABULARY)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_was_taken_back_is_forgotten(depth: int) -> None:
    logits, drafts = in_one_step(session, depth)
    for chunk in CHUNKS:
        found, ends = with_rollbacks(session(), depth, chunk)
        assert worst_error(found, logits) < 1e-12, chunk
        assert worst_error(ends, drafts) < 1e-12, chunk


def test_the_comparison_sees_a_token_that_is_not_taken_back() -> None:
    class Forgetful(Session):
        def truncate(self, request: str, length: int) -> None:
            """Takes back the tokens, and of one layer's ring a row less."""
            before = self.request(request).cache.layers[2].length
            super().truncate(request, length)
            self.request(request).cache.layers[2].length = min(before, length + 1)

    logits, _ = in_one_step(session, 2)
    with torch.no_grad():
        found, _ = with_rollbacks(Forgetful(MODEL, max_draft_tokens=MOST_DRAFTS), 2, 3)
    assert not worst_error(found, logits) < 1e-3
