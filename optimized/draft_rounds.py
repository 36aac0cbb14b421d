"""Rounds of decoding with drafts: what one step verifies for each request, and which of it is kept.

A request with its newest token x and drafts y_1 … y_d steps 1 + d rows, x y_1 … y_d. Row s chooses the token behind it.
y_1 … y_k are kept, k the number of drafts before the first that is not what the row before it chose; the choice of row
k is the new newest token. So the text is that without drafts, sampled too: noise is a function of the position.
Source: text_model specification, section 17.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from optimized.step import PlanItem, row_spans
from reference.generate import accepted
from reference.sampling import Sampling


@dataclass(frozen=True)
class DraftedText:
    """The tokens chosen for a request; how many drafts were verified in each round, and how many of them kept."""

    tokens: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


@dataclass
class Writing:
    """One request of a call that wants `count` tokens. `newest` is chosen and not stepped yet."""

    request: str
    sampling: Sampling
    newest: int
    count: int
    text: DraftedText = field(default_factory=DraftedText)

    @property
    def left(self) -> int:
        return self.count - len(self.text.tokens)

    def depth(self, most: int) -> int:
        """Drafts of the next round: a round brings up to one token more than it has drafts, and never too many."""
        return min(most, self.left - 1)

    def take(self, drafts: Sequence[int], chosen: Sequence[int]) -> int:
        """Note the tokens of a round, from its drafts and the choice of each row; returns how many drafts are kept."""
        kept = accepted(drafts, chosen)
        self.text.tokens.extend(chosen[: kept + 1])
        self.text.tried.append(len(drafts))
        self.text.kept.append(kept)
        self.newest = chosen[kept]
        return kept


@dataclass(frozen=True)
class Verification:
    """One step that verifies drafts, which lie one behind the other in the buffer of its tokens.

    `items` have zeros for drafts, which are on the device only. `samplings` and `positions`: of the token that each row
    chooses. `sources`: where in the buffer each row's own token is, -1 for a newest one.
    """

    items: list[PlanItem]
    samplings: list[Sampling]
    positions: list[int]
    sources: list[int]

    @classmethod
    def of(cls, live: Sequence[Writing], lengths: Sequence[int], depths: Sequence[int]) -> Verification:
        """Of requests with so many tokens stepped, and so many drafts."""
        round_ = cls([], [], [], [])
        drafted = 0
        for one, length, depth in zip(live, lengths, depths, strict=True):
            token_ids = (one.newest, *(0,) * depth)
            round_.items.append(PlanItem(one.request, token_ids, "verify" if depth else "decode"))
            round_.samplings.extend([one.sampling] * (1 + depth))
            round_.positions.extend(range(length + 1, length + 2 + depth))
            round_.sources.extend([-1, *range(drafted, drafted + depth)])
            drafted += depth
        return round_

    def split(self, drafted: Sequence[int], chosen: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Of each request its drafts, and what its rows chose."""
        for number, rows in enumerate(row_spans(self.items).values()):
            # Each request before this one has a row more than it has drafts.
            yield drafted[rows.start - number : rows.stop - number - 1], chosen[rows]
