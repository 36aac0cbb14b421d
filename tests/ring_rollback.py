"""Drives a session or an engine through drafts that are accepted and taken back, across the edge of the window.

Every request has a known stream of tokens. Its prompt comes in chunks; then each round steps the next token and drafts
behind it, of which the first `accepted` are the stream's and the others are wrong and taken back. What comes out for
the stream's own tokens must be what one prefill of the whole stream gives, whatever was drafted in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from reference.session import DraftItem, StepItem

VOCABULARY = 193
MOST_DRAFTS = 4
DEPTHS = range(1, MOST_DRAFTS + 1)
WINDOW = 7
CHUNKS = range(1, WINDOW + 2)
STREAM = 27


class Drafting(Protocol):
    """A session or an engine that takes `MOST_DRAFTS` tokens back."""

    def step(self, items: list[StepItem]) -> dict[str, Tensor]: ...

    def drafts(self, items: list[DraftItem]) -> dict[str, Tensor]: ...

    def truncate(self, request: str, length: int) -> None: ...

    def length(self, request: str) -> int: ...


def streams(rows: int) -> dict[str, tuple[int, ...]]:
    """One for each row of the batch."""
    source = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, VOCABULARY, (rows, STREAM), generator=source).tolist()
    return {f"row {row}": tuple(tokens) for row, tokens in enumerate(drawn)}


def with_rollbacks(one: Drafting, depth: int, chunk: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Logits of every stream [STREAM, W], and of `depth` drafts behind each stream at its end.

    Row r starts with a prompt of WINDOW - 2 + r tokens, and accepts r + n (modulo depth + 1) drafts in round n.
    """
    found: dict[str, list[Tensor]] = {}
    known = streams(depth + 1)
    prompts = {name: WINDOW - 2 + row for row, name in enumerate(known)}
    for start in range(0, max(prompts.values()), chunk):
        items = [
            StepItem(name, known[name][start : min(start + chunk, length)], "prefill")
            for name, length in prompts.items()
            if start < length
        ]
        for name, logits_TW in one.step(items).items():
            found.setdefault(name, []).append(logits_TW)
    for number in range(STREAM):
        going = {name: one.length(name) for name in known if one.length(name) < STREAM}
        if not going:
            break
        _round(one, known, going, depth, number, found)
    ends = one.drafts([DraftItem(name, 5, depth, forced=(6, 7, 8)[: depth - 1]) for name in known])
    return {name: torch.cat(parts) for name, parts in found.items()}, ends


def _round(
    one: Drafting,
    known: dict[str, tuple[int, ...]],
    going: dict[str, int],
    depth: int,
    number: int,
    found: dict[str, list[Tensor]],
) -> None:
    # What the draft layer says is not used, but its ring runs ahead and comes back as in generation.
    one.drafts([DraftItem(name, known[name][length], depth) for name, length in going.items()])
    items, accepted = [], {}
    for row, name in enumerate(known):
        if name not in going:
            continue
        length = going[name]
        accepted[name] = min((row + number) % (depth + 1), STREAM - length - 1)
        right = known[name][length : length + 1 + accepted[name]]
        wrong = [(token + 1) % VOCABULARY for token in (*known[name], *known[name])[length + len(right) :]]
        items.append(StepItem(name, (*right, *wrong)[: depth + 1], "verify"))
    for name, logits_TW in one.step(items).items():
        found[name].append(logits_TW[: 1 + accepted[name]])
        one.truncate(name, going[name] + 1 + accepted[name])


def in_one_step(new: Callable[[], Drafting], depth: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same without any rollback: each stream prefilled whole, then drafted behind."""
    known = streams(depth + 1)
    one = new()
    logits = one.step([StepItem(name, tokens, "prefill") for name, tokens in known.items()])
    return logits, one.drafts([DraftItem(name, 5, depth, forced=(6, 7, 8)[: depth - 1]) for name in known])


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest expected value; every row of every stream is there."""
    assert {*found} == {*expected}
    errors = []
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        errors.append(float((found[name] - tensor).abs().max() / tensor.abs().max()))
    return max(errors)
