"""Greedy generation for many requests, with or without drafts: prompts in chunks, then one step a round for all.

With drafts each round drafts d tokens behind the newest one, verifies 1 + d tokens in one step, keeps the drafts up to
the first that the model itself would not have chosen, and takes the rest back. The tokens are those of plain greedy
decoding; only rounding at near ties can part the two. Source: text_model specification, section 17.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from optimized.engine import DraftItem, Engine
from reference.session import StepItem


@dataclass(frozen=True)
class Generation:
    """The new tokens of each request, and how often the draft at each place was tried and accepted.

    A draft counts as tried only if all before it in its round were accepted.
    """

    tokens: dict[str, list[int]]
    tried: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By place; 0 where nothing was tried."""
        return tuple(hit / count if count else 0.0 for hit, count in zip(self.accepted, self.tried, strict=True))


def generate(
    engine: Engine,
    prompts: Mapping[str, Sequence[int]],
    max_new_tokens: int,
    draft_depth: int = 0,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Append up to `max_new_tokens` to each prompt, equal logits going to the lower id; a stop id ends its request.

    The requests stay open in `engine`, each with all but the last of its tokens stepped.
    """
    tried, accepted = [0] * draft_depth, [0] * draft_depth
    prefill = [StepItem(request, tuple(ids), "prefill") for request, ids in prompts.items()]
    first = engine.step(prefill, last_only=True)
    tokens = {request: _best(logits) for request, logits in first.items()}
    live = [request for request, found in tokens.items() if not _is_done(found, max_new_tokens, stop_ids)]
    while live:
        drafts: dict[str, list[int]] = {request: [] for request in live}
        if draft_depth:
            # No deeper than what may still be kept: the round yields one token more than it accepts.
            items = [
                DraftItem(request, tokens[request][-1], depth)
                for request in live
                if (depth := min(draft_depth, max_new_tokens - len(tokens[request]) - 1)) > 0
            ]
            drafts |= {request: _best(logits) for request, logits in engine.drafts(items).items()}
        steps = [
            StepItem(request, (tokens[request][-1], *drafts[request]), "verify" if drafts[request] else "decode")
            for request in live
        ]
        logits = engine.step(steps)
        for request in live:
            chosen = _best(logits[request])
            kept = 0
            while kept < len(drafts[request]) and drafts[request][kept] == chosen[kept]:
                kept += 1
            for place in range(min(kept + 1, len(drafts[request]))):
                tried[place] += 1
                accepted[place] += place < kept
            new = _until_stop(chosen[: kept + 1], stop_ids)
            tokens[request] += new
            surplus = len(drafts[request]) + 1 - len(new)
            if surplus:
                engine.truncate(request, engine.length(request) - surplus)
        live = [request for request in live if not _is_done(tokens[request], max_new_tokens, stop_ids)]
    return Generation(tokens, tuple(tried), tuple(accepted))


def _best(logits_TW: Tensor) -> list[int]:
    return logits_TW.argmax(dim=-1).tolist()


def _until_stop(tokens: list[int], stop_ids: Collection[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: place + 1]
    return tokens


def _is_done(tokens: Sequence[int], max_new_tokens: int, stop_ids: Collection[int]) -> bool:
    return len(tokens) >= max_new_tokens or tokens[-1] in stop_ids
