"""Generation for many requests: prompts first, then a round after the other, with drafts or without.

A round steps the newest token of each request. With drafts it steps 1 + d tokens at once: the draft layer proposes d,
the model says for each place which token it would have chosen there, the drafts up to the first other one are kept,
and the rest is taken back. What the model chooses at a place is a function of its logits there (`sampling`), so the
text is the text without drafts, token for token, also when it is sampled; its distribution is the model's for the same
reason.
The draft layer draws with the same noise, which is why it is often right.

Every token comes with its margin over the second best. Two runs of the same model in other dtypes, batches or kernels
may part where a margin is within their rounding, and only there: `first_parting` finds the place.
Source: text_model specification, section 17; design, "Determinism across machines".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from torch import Tensor

from reference.errors import ConfigError
from reference.sampling import GREEDY, Sampling, choose, choose_with_margins
from reference.session import DraftItem, StepItem


class Generator(Protocol):
    """What generation needs of a session or an engine."""

    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict[str, Tensor]: ...

    def drafts(self, items: Sequence[DraftItem]) -> dict[str, Tensor]: ...

    def truncate(self, request: str, length: int) -> None: ...

    def length(self, request: str) -> int: ...


@dataclass(frozen=True)
class Generation:
    """The new tokens of each request, and how often the draft at each place was tried and kept.

    A draft counts as tried only if all before it in its round were kept. `margins`: of each token, by how much it won
    over the second best, in logits (for sampled ones in logits over temperature, with noise). They are no part of what
    makes two generations equal: rounding changes them.
    """

    tokens: dict[str, list[int]]
    tried: tuple[int, ...]
    accepted: tuple[int, ...]
    margins: dict[str, list[float]] = field(default_factory=dict, compare=False)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By place; 0 where nothing was tried."""
        return tuple(kept / count if count else 0.0 for kept, count in zip(self.accepted, self.tried, strict=True))

    @property
    def closest(self) -> Closest | None:
        """The token that won by least; None where nothing was generated."""
        places = [
            Closest(request, index, margin)
            for request, margins in self.margins.items()
            for index, margin in enumerate(margins)
        ]
        return min(places, key=lambda place: place.margin, default=None)


@dataclass(frozen=True)
class Closest:
    """New token `index` of a request, from 0, and its margin."""

    request: str
    index: int
    margin: float


@dataclass(frozen=True)
class Parting:
    """Where two generations of a request are first different: new token `index`, from 0.

    None for a side that had ended. `margin`: the smaller of both sides'. The tokens behind it have nothing to do with
    each other.
    """

    request: str
    index: int
    expected: int | None
    actual: int | None
    margin: float


def first_parting(expected: Generation, actual: Generation, request: str) -> Parting | None:
    """None where both have the same tokens."""
    ours, theirs = expected.tokens[request], actual.tokens[request]
    for index in range(max(len(ours), len(theirs))):
        left, right = (tokens[index] if index < len(tokens) else None for tokens in (ours, theirs))
        if left != right:
            known = [side.margins[request][index : index + 1] for side in (expected, actual)]
            return Parting(request, index, left, right, min((value for one in known for value in one), default=inf))
    return None


def generate(
    session: Generator,
    prompts: Mapping[str, Sequence[int]],
    max_new_tokens: int,
    draft_depth: int = 0,
    stop_ids: Collection[int] = (),
    sampling: Mapping[str, Sampling] | Sampling = GREEDY,
) -> Generation:
    """Up to `max_new_tokens` behind each prompt; a stop id ends its request and is part of its tokens.

    `sampling` is one for all requests, or one for each. The requests stay open, all but their last token stepped.
    Raises: ConfigError for fewer than one new token or a draft depth below 0, and what the session raises.
    """
    if max_new_tokens < 1 or draft_depth < 0:
        raise ConfigError(
            f"generate: max_new_tokens must be at least 1 and draft_depth at least 0, found {max_new_tokens} and "
            f"{draft_depth}"
        )
    rounds = _Rounds(session, sampling, max_new_tokens, draft_depth, stop_ids)
    rounds.prefill(prompts)
    while rounds.live():
        rounds.run()
    return Generation(rounds.tokens, tuple(rounds.tried), tuple(rounds.accepted), rounds.margins)


class _Rounds:
    def __init__(
        self,
        session: Generator,
        sampling: Mapping[str, Sampling] | Sampling,
        max_new_tokens: int,
        draft_depth: int,
        stop_ids: Collection[int],
    ):
        self.session, self.sampling = session, sampling
        self.max_new_tokens, self.draft_depth, self.stop_ids = max_new_tokens, draft_depth, frozenset(stop_ids)
        self.tokens: dict[str, list[int]] = {}
        self.margins: dict[str, list[float]] = {}
        self.tried, self.accepted = [0] * draft_depth, [0] * draft_depth

    def prefill(self, prompts: Mapping[str, Sequence[int]]) -> None:
        items = [StepItem(name, tuple(ids), "prefill") for name, ids in prompts.items()]
        logits = self.session.step(items, last_only=True)
        for name, ids in prompts.items():
            self.tokens[name], self.margins[name] = choose_with_margins(logits[name], [len(ids)], self._of(name))

    def live(self) -> list[str]:
        return [
            name
            for name, found in self.tokens.items()
            if len(found) < self.max_new_tokens and found[-1] not in self.stop_ids
        ]

    def run(self) -> None:
        live = self.live()
        drafts = self._drafts(live)
        items = [
            StepItem(name, (self.tokens[name][-1], *drafts[name]), "verify" if drafts[name] else "decode")
            for name in live
        ]
        logits = self.session.step(items)
        for name in live:
            self._keep(name, drafts[name], logits[name])

    def _drafts(self, live: Sequence[str]) -> dict[str, list[int]]:
        # No deeper than what may be kept: a round yields one token more than it accepts.
        depths = {name: min(self.draft_depth, self.max_new_tokens - len(self.tokens[name]) - 1) for name in live}
        items = [
            DraftItem(name, self.tokens[name][-1], depth, sampling=self._of(name))
            for name, depth in depths.items()
            if depth > 0
        ]
        drafts: dict[str, list[int]] = {name: [] for name in live}
        for item, logits_TW in zip(items, self.session.drafts(items).values(), strict=True):
            first = self.session.length(item.request) + 1
            drafts[item.request] = choose(logits_TW, range(first, first + item.depth), item.sampling)
        return drafts

    def _keep(self, name: str, drafts: list[int], logits_TW: Tensor) -> None:
        """The drafts that the model chooses too, and the token it chooses behind them."""
        end = self.session.length(name)
        chosen, margins = choose_with_margins(logits_TW, range(end - len(drafts), end + 1), self._of(name))
        kept = accepted(drafts, chosen)
        for place in range(min(kept + 1, len(drafts))):
            self.tried[place] += 1
            self.accepted[place] += place < kept
        new = chosen[: kept + 1]
        stops = [place for place, token in enumerate(new) if token in self.stop_ids]
        new = new[: stops[0] + 1] if stops else new
        self.tokens[name] += new
        self.margins[name] += margins[: len(new)]
        # The newest token is not stepped yet; drafts behind it go back.
        if surplus := len(drafts) + 1 - len(new):
            self.session.truncate(name, end - surplus)

    def _of(self, name: str) -> Sampling:
        return self.sampling if isinstance(self.sampling, Sampling) else self.sampling.get(name, GREEDY)


def accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many drafts stand before the first that the model does not choose in its place."""
    kept = 0
    while kept < len(drafts) and drafts[kept] == chosen[kept]:
        kept += 1
    return kept
