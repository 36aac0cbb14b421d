"""A workload: what is asked of an implementation, in order, over several requests.

It is written in one line, so that a failure can be repeated by pasting it:

    p:a6+b9     prefill 6 new tokens of request a and 9 of b in one step
    d:a+b       decode one token of each
    v:a4        verify 4 tokens at once (drafts)
    t:a2        take back the newest 2 tokens of a
    m:a3        draft 3 tokens with the draft layer (teacher-forced)
    f:a>c       fork a to c
    x:b         free b

Token ids follow from (seed, request, position, number of truncations so far), so that the same text cut into other
chunks is the same text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from parity.errors import ParityError

if TYPE_CHECKING:
    from reference.session import StepKind


class WorkloadError(ParityError):
    """A workload line cannot be read, or asks for what no implementation could do."""


@dataclass(frozen=True)
class Step:
    """One call of `step`: (request, new tokens, kind) for each item."""

    items: tuple[tuple[str, int, StepKind], ...]


@dataclass(frozen=True)
class Truncate:
    request: str
    count: int


@dataclass(frozen=True)
class Draft:
    request: str
    depth: int


@dataclass(frozen=True)
class Fork:
    request: str
    new: str


@dataclass(frozen=True)
class Free:
    request: str


Action = Step | Truncate | Draft | Fork | Free
_KINDS: dict[str, StepKind] = {"p": "prefill", "d": "decode", "v": "verify"}
_ITEM = re.compile(r"(?:([pdv]):)?([a-z])(\d*)$")


class Case(Protocol):
    """What a report asks of anything that was run: a workload, images, clips. `text()` and `seed` repeat it."""

    @property
    def seed(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def text(self) -> str: ...


@dataclass(frozen=True)
class Workload:
    """`chosen` are token ids at (request, position, truncations so far) that the seed does not decide."""

    actions: tuple[Action, ...]
    seed: int = 0
    chosen: Mapping[tuple[str, int, int], int] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Workload:
        """Read the one-line form. Raises: WorkloadError, quoting the word that is wrong."""
        workload = cls(tuple(_parse_action(word) for word in text.split()), seed)
        workload.check()
        return workload

    def text(self) -> str:
        return " ".join(_action_text(action) for action in self.actions)

    def check(self) -> None:
        """Raises: WorkloadError where an action names a request that does not exist then, or takes back too much."""
        lengths: dict[str, int] = {}
        if not any(isinstance(action, Step) for action in self.actions):
            raise WorkloadError("a workload needs at least one step, such as 'p:a6'")
        for action in self.actions:
            if isinstance(action, Step):
                names = [request for request, _, _ in action.items]
                if len(set(names)) != len(names) or min(count for _, count, _ in action.items) < 1:
                    raise WorkloadError(
                        f"{_action_text(action)!r}: a step has each request once, with at least one token"
                    )
            elif action.request not in lengths:
                raise WorkloadError(f"{_action_text(action)!r}: there is no request {action.request!r} at this point")
            elif isinstance(action, Fork) and action.new in lengths:
                raise WorkloadError(f"{_action_text(action)!r}: request {action.new!r} exists already")
            act(action, lengths)
            if isinstance(action, Truncate) and lengths[action.request] < 1:
                raise WorkloadError(f"{_action_text(action)!r}: takes back more tokens than there are, or all")

    def require_fits(self, context: int) -> None:
        """Raises: WorkloadError for a request that is longer, at any time, than the `context` tokens of the model."""
        lengths: dict[str, int] = {}
        for action in self.actions:
            act(action, lengths)
            for request, length in lengths.items():
                if length > context:
                    raise WorkloadError(
                        f"{_action_text(action)!r}: request {request} has {length:,} tokens then; the model takes "
                        f"{context:,} (max_position_embeddings)"
                    )

    @property
    def tokens(self) -> int:
        return sum(count for action in self.actions if isinstance(action, Step) for _, count, _ in action.items)

    @property
    def requests(self) -> tuple[str, ...]:
        """Every request that ever exists, in the order of appearance."""
        found: dict[str, None] = {}
        for action in self.actions:
            if isinstance(action, Step):
                found |= {request: None for request, _, _ in action.items}
            elif isinstance(action, Fork):
                found[action.new] = None
        return tuple(found)

    def token_id(self, request: str, position: int, epoch: int, vocab_size: int) -> int:
        """The token of `request` at `position` after `epoch` truncations; equal on every machine."""
        if (request, position, epoch) in self.chosen:
            return self.chosen[request, position, epoch]
        digest = hashlib.blake2b(f"{self.seed}/{request}/{position}/{epoch}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % vocab_size


def _parse_action(word: str) -> Action:
    verb, _, rest = word.partition(":")
    if verb in _KINDS:
        items = []
        for item in f"{verb}:{rest}".split("+"):
            match = _ITEM.match(item)
            if not match:
                raise WorkloadError(f"{word!r}: {item!r} is not a request letter with a token count")
            kind = _KINDS[match.group(1) or verb]
            items.append((match.group(2), int(match.group(3) or 1), kind))
        return Step(tuple(items))
    match = re.fullmatch(r"([tm]):([a-z])(\d+)|(f):([a-z])>([a-z])|(x):([a-z])", word)
    if not match:
        raise WorkloadError(f"{word!r} is none of p: d: v: (steps), t: (take back), m: (draft), f: (fork), x: (free)")
    if verb == "t":
        return Truncate(match.group(2), int(match.group(3)))
    if verb == "m":
        return Draft(match.group(2), int(match.group(3)))
    if verb == "f":
        return Fork(match.group(5), match.group(6))
    return Free(match.group(8))


def _action_text(action: Action) -> str:
    if isinstance(action, Step):
        first = action.items[0][2]
        words = []
        for index, (request, count, kind) in enumerate(action.items):
            prefix = f"{kind[0]}:" if index == 0 or kind != first else ""
            words.append(f"{prefix}{request}{count if (count, kind) != (1, 'decode') else ''}")
        return "+".join(words)
    if isinstance(action, Truncate):
        return f"t:{action.request}{action.count}"
    if isinstance(action, Draft):
        return f"m:{action.request}{action.depth}"
    if isinstance(action, Fork):
        return f"f:{action.request}>{action.new}"
    return f"x:{action.request}"


def act(action: Action, lengths: dict[str, int]) -> None:
    """Bring the lengths of the requests up to date."""
    if isinstance(action, Step):
        for request, count, _ in action.items:
            lengths[request] = lengths.get(request, 0) + count
    elif isinstance(action, Truncate):
        lengths[action.request] -= action.count
    elif isinstance(action, Fork):
        lengths[action.new] = lengths[action.request]
    elif isinstance(action, Free):
        del lengths[action.request]
