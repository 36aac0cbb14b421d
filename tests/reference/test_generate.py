"""Drafts change no token, greedy or sampled, across the window, whatever is accepted; nor does company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.errors import ConfigError
from reference.generate import generate
from reference.sampling import GREEDY, Sampling, choose
from reference.session import Session, StepItem
from reference.text import TextModel

CONFIG = tiny()
MODEL = TextModel(CONFIG.text)
MODEL.load_state_dict(dict(synthetic_tensors(CONFIG)))
MODEL = MODEL.double().requires_grad_(False)
# Window 7, top-k 13.
PROMPTS = {"a": tuple(range(40, 46)), "b": (9,), "c": tuple(range(100, 113))}
SAMPLED = {"a": Sampling(1.0, 0.9, 1), "b": Sampling(0.7, 1.0, 2), "c": GREEDY}
NEW_TOKENS = 12


def session() -> Session:
    return Session(MODEL, max_draft_tokens=4)


def plain(prompt: tuple[int, ...], sampling: Sampling, count: int = NEW_TOKENS) -> list[int]:
    """A token a step, written out."""
    one, tokens = session(), list(prompt)
    logits = one.step([StepItem("x", prompt, "prefill")])["x"]
    for _ in range(count):
        tokens += choose(logits[-1:], [len(tokens)], sampling)
        logits = one.step([StepItem("x", (tokens[-1],), "decode")])["x"]
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_and_company_change_no_token(depth: int, sampling: dict[str, Sampling] | Sampling) -> None:
    found = generate(session(), PROMPTS, NEW_TOKENS, depth, sampling=sampling)
    for name, prompt in PROMPTS.items():
        own = sampling if isinstance(sampling, Sampling) else sampling[name]
        assert found.tokens[name] == plain(prompt, own), name
    assert len(found.acceptance) == depth


class Guessing:
    """A session whose draft layer proposes the true next tokens up to `right` places, then wrong ones."""

    def __init__(self, future: list[int], right: list[int]):
        self._session, self._future, self._right = session(), future, right
        self.step, self.truncate, self.length = self._session.step, self._session.truncate, self._session.length
        self.start = 0

    def drafts(self, items):
        if not items:
            return {}
        (item,) = items
        done = self.length(item.request) - self.start + 1
        right = self._right.pop(0) if self._right else item.depth
        tokens = [self._future[done + s] for s in range(item.depth)]
        tokens = [token if s < right else (token + 1) % CONFIG.text.vocab_size for s, token in enumerate(tokens)]
        return {item.request: torch.nn.functional.one_hot(torch.tensor(tokens), CONFIG.text.vocab_size).double()}


FUTURE = plain(PROMPTS["a"], GREEDY, 40)


@settings(max_examples=15)
@given(depth=st.integers(1, 4), right=st.lists(st.integers(0, 4), max_size=12))
def test_any_number_accepted_gives_the_same_text(depth: int, right: list[int]) -> None:
    """Rollback of 0 to 4 tokens again and again, over the edge of the window."""
    guessing = Guessing(FUTURE, list(right))
    guessing.start = len(PROMPTS["a"])
    found = generate(guessing, {"a": PROMPTS["a"]}, 20, depth)
    assert found.tokens["a"] == FUTURE[:20]
    if not right:
        assert set(found.acceptance) == {1.0}


def test_a_stop_id_ends_a_request_and_takes_back_what_was_drafted_behind_it() -> None:
    stop = FUTURE[3]
    one = session()
    found = generate(one, {"a": PROMPTS["a"]}, NEW_TOKENS, 4, stop_ids={stop}).tokens["a"]
    assert found == FUTURE[: FUTURE.index(stop) + 1]
    assert one.length("a") == len(PROMPTS["a"]) + len(found) - 1


def test_nothing_to_generate_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens"):
        generate(session(), PROMPTS, 0)
