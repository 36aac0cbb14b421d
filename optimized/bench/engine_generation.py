"""Greedy text from the engine, for `generation` to measure: prompts, then rounds, plain or with drafts.

Only what `Engine` offers: `step` and `drafts` for the prompts, `decode` and `decode_with_drafts` for the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from optimized.bench.generation import Counted, GenerationShape
from optimized.engine import DecodeItem, Engine
from reference.session import DraftItem, StepItem


class EngineGeneration:
    """`prompts` are token ids by request; see `generation.Generation` for what the methods do."""

    def __init__(self, engine: Engine, prompts: Mapping[str, Sequence[int]], shape: GenerationShape):
        self._engine, self._shape, self._prompts = engine, shape, prompts
        self._newest: dict[str, int] = {}

    def prompt(self) -> None:
        """Through the draft layer too, where there will be drafts."""
        items = [StepItem(name, tuple(ids), "prefill") for name, ids in self._prompts.items()]
        self._newest = best_tokens(self._engine.step(items, last_only=True))
        if self._shape.drafts:
            best_tokens(self._engine.drafts([DraftItem(name, token, 1) for name, token in self._newest.items()]))

    def rounds(self) -> Counted:
        items, count = [DecodeItem(name, token) for name, token in self._newest.items()], self._shape.tokens
        if not self._shape.drafts:
            found = self._engine.decode(items, count)
            return Counted(count, sum(map(len, found.values())))
        texts = self._engine.decode_with_drafts(items, count, self._shape.drafts).values()
        return Counted(max(len(text.kept) for text in texts), sum(len(text.tokens) for text in texts))

    def free(self) -> None:
        for name in self._prompts:
            self._engine.free(name)


def best_tokens(logits: Mapping[str, Tensor]) -> dict[str, int]:
    """The token with the largest logit in the row [1, W] of each request; waits once."""
    return dict(zip(logits, torch.cat([*logits.values()]).argmax(-1).tolist(), strict=True))
