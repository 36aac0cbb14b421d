"""Any sequence of calls on the engine does what it does on the reference's session, or is refused and changes nothing.

float64 and torch twins, so that only logic is compared: models of one kind of layer and of both, with a draft layer and
without, drafts of any depth, pages of any size, pools and limits that are often too small, requests shorter than the
window, names that come back after they were freed; steps recorded or not, of one shape or of many, with listeners now
and then, some of which break a call off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from optimized.cache_export import export_request, import_request
from optimized.engine import DecodeItem, Engine, EngineOptions
from optimized.errors import NotSupportedError, PlanError, PoolError
from optimized.plan_spans import StepLimits
from reference.checkpoint import synthetic_tensors
from reference.config import LayerKind, TextConfig, tiny
from reference.errors import CacheError
from reference.probe import Rows, listening
from reference.sampling import Sampling, choose
from reference.session import DraftItem, Session, StepItem
from reference.text import TextModel

NAMES = st.sampled_from("abc")
# Values that draw nothing from Hypothesis: only structure is searched and shrunk.
SEEDS = st.integers(0, 2**32 - 1)
TOKENS = st.integers(0, tiny().text.vocab_size - 1)
# About the window of 7, the top-k of 13, what is decoded at once, and more than a ring.
COUNTS = st.one_of(st.integers(1, 5), st.sampled_from([6, 7, 8, 9, 12, 13, 14, 19, 30]))
KINDS = [("full_attention", "sliding_attention"), ("full_attention",) * 2, ("sliding_attention",) * 2]
SAMPLINGS = st.sampled_from([Sampling(), Sampling(0.8, 1.0, 7), Sampling(1.3, 0.6, 8), Sampling(9.0, 1.0, 2**63 + 5)])
# How many tensors a listener lets pass before it breaks off; None: nobody listens.
PATIENCE = st.sampled_from([None, None, None, 9999, 0, 5, 30, 100, 200])
LIMITS = [StepLimits(9999, 2**26, 2**22), StepLimits(9, 2**15, 600), StepLimits(12, 2**16, 2**22)]


@cache
def model(kinds: tuple[LayerKind, ...], drafts: int) -> tuple[TextConfig, TextModel]:
    """A tiny model of two layers, dense and with experts."""
    changes = {"num_hidden_layers": 2, "layer_types": kinds, "first_k_dense_replace": 1}
    text_config = dataclasses.replace(tiny().text, num_nextn_predict_layers=drafts, **changes)
    config = dataclasses.replace(tiny(), text=text_config)
    text = TextModel(config.text)
    text.load_state_dict(dict(synthetic_tensors(config)))
    return config.text, text.double().requires_grad_(False)


def made(config: TextConfig, text: TextModel, options: EngineOptions) -> Engine:
    return Engine.from_state(config, text.state_dict(), torch.float64, "cpu", "torch", options)


class BrokenOffError(Exception):
    pass


class Listener:
    """Changes nothing; raises BrokenOffError when it has seen `patience` tensors."""

    def __init__(self, patience: int):
        self.left = patience

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise BrokenOffError
        return value


def decoded(one: Engine | Session, items: list[DecodeItem], count: int, depth: int) -> dict[str, list[int]]:
    """`Engine.decode`, or with drafts, also of a session: step by step."""
    if isinstance(one, Engine) and depth:
        return {name: text.tokens for name, text in one.decode_with_drafts(items, count, depth).items()}
    if isinstance(one, Engine):
        return one.decode(items, count)
    tokens = {item.request: [item.next_token] for item in items}
    for _ in range(count):
        logits = one.step([StepItem(name, (known[-1],), "decode") for name, known in tokens.items()])
        for item in items:
            tokens[item.request] += choose(logits[item.request], [one.length(item.request)], item.sampling)
    return {name: known[1:] for name, known in tokens.items()}


class EngineMachine(RuleBasedStateMachine):
    """Both, call by call."""

    @initialize(
        kinds=st.sampled_from(KINDS),
        drafts=st.sampled_from([1, 1, 0]),
        depth=st.sampled_from([4, 1, 0]),
        page_size=st.sampled_from([4, 1, 64]),
        max_length=st.sampled_from([None, None, 5, 20]),
        tokens=st.sampled_from([64, 200]),
        limits=st.sampled_from(LIMITS),
        graphs=st.booleans(),
        batch_invariant=st.booleans(),
        recordings=st.sampled_from([256, 2, 1]),
    )
    def begin(
        self, kinds, drafts, depth, page_size, max_length, tokens, limits, graphs, batch_invariant, recordings
    ) -> None:
        config, text = model(kinds, drafts)
        pages = -(-tokens // page_size)
        options = EngineOptions(
            pages, page_size, 2, depth, max_length, limits, graphs, batch_invariant, recordings=recordings, poison=True,
            disjoint_numbers=True,
        )  # fmt: skip
        try:
            self.engine = made(config, text, options)
        except (NotSupportedError, PlanError):
            assert batch_invariant
            self.engine = made(config, text, dataclasses.replace(options, batch_invariant=False))
        # What the engine alone may refuse: hidden states are not exported, and lost to a draft that broke off; rows
        # of a ring are overwritten by a step that broke off.
        self.excuses: set[str] = set()
        self.session = Session(text, depth, max_length)
        self.depth = depth

    def session_requests(self) -> set[str]:
        return set(self.session._requests)

    def state(self) -> object:
        pools = self.engine.pools
        slots = {name: dataclasses.astuple(pools.slots(name)) for name in pools.requests}
        return {name: self.engine.tokens(name) for name in slots}, slots, pools.free_pages

    def both(
        self, action: Callable[[Engine | Session], object], is_whole: bool = True, patience: int | None = None
    ) -> None:
        """Compare what the engine returns, or see that it changed nothing.

        `is_whole`: what the session refuses, it refuses before it has run a part.
        """
        before = self.state()
        try:
            with nullcontext() if patience is None else listening(Listener(patience)):
                found = action(self.engine)
        except (PoolError, PlanError, CacheError) as refused:
            event(f"{action.__name__}: {type(refused).__name__}")
            assert self.state() == before
            is_excused = any(excuse in str(refused) for excuse in self.excuses)
            if isinstance(refused, CacheError) and is_whole and not is_excused:
                with pytest.raises(CacheError):
                    action(self.session)
            return
        except BrokenOffError:
            event(f"{action.__name__}: broken off")
            if "draft" in action.__name__:
                self.excuses.add("hidden states from")
            if action.__name__ != "draft":
                self.excuses.add("cannot go back")
            for name in self.session_requests() - set(self.engine.requests):
                assert action.__name__ != "draft"
                self.session.free(name)
            return
        expected = action(self.session)
        if isinstance(expected, dict):
            assert list(found) == list(expected)
            for name, logits in expected.items():
                if isinstance(logits, list):
                    assert found[name] == logits
                    continue
                torch.testing.assert_close(found[name], logits, rtol=1e-9, atol=1e-9)
        event(action.__name__)

    @rule(
        counts=st.dictionaries(NAMES, COUNTS, min_size=1),
        seed=SEEDS,
        last_only=st.booleans(),
        patience=PATIENCE,
    )
    def step(self, counts, seed, last_only, patience) -> None:
        random, vocabulary = Random(seed), self.engine.config.vocab_size
        planned = [
            StepItem(name, tuple(random.randrange(vocabulary) for _ in range(count)), "prefill")
            for name, count in counts.items()
        ]

        def step(one: Engine | Session) -> object:
            return one.step(planned, last_only)

        self.both(step, patience=patience)

    @precondition(lambda self: self.engine.pools.requests)
    @rule(data=st.data(), count=st.sampled_from([1, 2, 5, 8, 14]), patience=PATIENCE)
    def decode(self, data, count, patience) -> None:
        depth = data.draw(st.sampled_from([0, *range(self.depth + 1), self.depth + 1]))
        names = data.draw(st.lists(st.sampled_from(self.engine.pools.requests), min_size=1, unique=True))
        items = [DecodeItem(name, data.draw(TOKENS), data.draw(SAMPLINGS)) for name in names]

        def decode(one: Engine | Session) -> object:
            return decoded(one, items, count, depth)

        def decode_with_drafts(one: Engine | Session) -> object:
            return decode(one)

        self.both(decode_with_drafts if depth else decode, is_whole=False, patience=patience)

    @precondition(lambda self: self.engine.pools.requests)
    @rule(data=st.data(), patience=PATIENCE)
    def draft(self, data, patience) -> None:
        names = data.draw(st.lists(st.sampled_from(self.engine.pools.requests), min_size=1, unique=True))
        forced = st.lists(TOKENS, max_size=5).map(tuple)
        items = [
            DraftItem(
                name,
                data.draw(TOKENS),
                data.draw(st.integers(0, self.depth + 1)),
                data.draw(forced),
                data.draw(SAMPLINGS),
            )
            for name in names
        ]

        def draft(one: Engine | Session) -> object:
            return one.drafts(items)

        self.both(draft, is_whole=len(items) == 1, patience=patience)

    @precondition(lambda self: self.engine.pools.requests)
    @rule(data=st.data())
    def truncate(self, data) -> None:
        name = data.draw(st.sampled_from(self.engine.pools.requests))
        back = data.draw(st.integers(0, self.depth + 3))

        def truncate(one: Engine | Session) -> object:
            return one.truncate(name, one.length(name) - back)

        self.both(truncate)

    @rule(name=NAMES, new=NAMES)
    def fork(self, name, new) -> None:
        def fork(one: Engine | Session) -> object:
            return one.fork(name, new)

        self.both(fork)

    @rule(name=NAMES, new=NAMES)
    def adopt(self, name, new) -> None:
        if name not in self.engine.requests or new in self.engine.requests:
            return

        def adopt(one: Engine | Session) -> object:
            if isinstance(one, Session):
                return one.fork(name, new)
            import_request(one.pools, new, export_request(one.pools, name))
            self.excuses.add("hidden states from")
            return one.adopt(new, one.tokens(name))

        self.both(adopt)

    @rule(name=NAMES)
    def free(self, name) -> None:
        def free(one: Engine | Session) -> object:
            return one.free(name)

        self.both(free)

    @invariant()
    def both_hold_the_same_tokens(self) -> None:
        pools = self.engine.pools
        assert set(pools.requests) == set(self.engine.requests) == self.session_requests()
        for name in pools.requests:
            tokens = tuple(self.session.request(name).token_ids)
            assert (self.engine.tokens(name), pools.slots(name).length) == (tokens, len(tokens))


def test_every_sequence_of_calls_gives_what_it_gives_on_the_reference() -> None:
    examples = max(60, settings().max_examples)
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=examples, stateful_step_count=25))
