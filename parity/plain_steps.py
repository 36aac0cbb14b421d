"""A workload spelled out for implementations that know nothing of it: token ids and positions, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parity.tokens import Tokens
from parity.workload import Draft, Fork, Free, Step, Truncate, Workload


@dataclass(frozen=True)
class PlainStep:
    """One call for one request.

    `token_ids` are new, at `positions`; `history` is what stands before them. An implementation with a cache appends
    them to the request's; where the history is shorter than the cache, the rest was taken back; where the request is
    new and has a history, it was forked (or can be computed again).

    A step of kind "draft" drives the draft layer and commits nothing. `token_ids` are the tokens behind the history
    that its draft steps s = 0, 1, … are given. `positions` are the rows that draft step 0 runs: those that it has not
    run with these tokens before, up to the last of the history; row t takes the token at t + 1 and the target's hidden
    state at t. Each further draft step runs one row, at the next position.
    """

    request: str
    kind: Literal["prefill", "decode", "verify", "draft"]
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    history: tuple[int, ...]

    def positions_of(self, name: str) -> tuple[int, ...]:
        """The rows that a tensor of this name has in this step; empty if the step does not compute it."""
        is_draft_name = name.startswith("mtp.")
        if is_draft_name != (self.kind == "draft"):
            return ()
        draft_step = int(name.split(".")[1]) if is_draft_name else 0
        if draft_step >= len(self.token_ids):
            return ()
        return (self.positions[-1] + draft_step,) if draft_step else self.positions


def plain_steps(workload: Workload, vocab_size: int) -> Iterator[PlainStep]:
    """The steps of all requests, in order; those of one batch stand one after the other."""
    tokens = Tokens(workload, vocab_size)
    texts: dict[str, tuple[int, ...]] = {}
    drafted: dict[str, int] = {}  # rows that the draft layer has run with committed tokens
    for action in workload.actions:
        if isinstance(action, Step):
            for request, count, kind in action.items:
                history, ids = texts.get(request, ()), tokens.take(request, count)
                yield PlainStep(request, kind, ids, tuple(range(len(history), len(history) + count)), history)
                texts[request] = history + ids
        elif isinstance(action, Draft):
            request, history = action.request, texts[action.request]
            rows = tuple(range(drafted.get(request, 0), len(history)))
            yield PlainStep(request, "draft", tokens.peek(request, action.depth), rows, history)
            drafted[request] = len(history) - 1
        elif isinstance(action, Truncate):
            length = tokens.truncate(action.request, action.count)
            texts[action.request] = texts[action.request][:length]
            drafted[action.request] = min(drafted.get(action.request, 0), max(0, length - 1))
        elif isinstance(action, Fork):
            tokens.fork(action.request, action.new)
            texts[action.new], drafted[action.new] = texts[action.request], drafted.get(action.request, 0)
        elif isinstance(action, Free):
            tokens.free(action.request)
            del texts[action.request]
            drafted.pop(action.request, None)
