"""Greedy text from the engine, for `generation` to measure: prompts, then rounds, plain or with drafts.

Only what `Engine` offers: `step`, `decode`, `drafts`, `truncate`. Logits of all requests are looked at together, so
the host waits for the device once behind the drafts and once behind their verification.
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
        self._proposed: dict[str, list[int]] = {}

    def prompt(self) -> None:
        items = [StepItem(name, tuple(ids), "prefill") for name, ids in self._prompts.items()]
        chosen = best_tokens(self._engine.step(items, last_only=True))
        self._newest = {name: token for name, (token,) in chosen.items()}
        self._propose()

    def rounds(self) -> Counted:
        if not self._shape.drafts:
            items = [DecodeItem(name, token) for name, token in self._newest.items()]
            found = self._engine.decode(items, self._shape.tokens)
            return Counted(self._shape.tokens, sum(map(len, found.values())))
        rounds, tokens = 0, dict.fromkeys(self._prompts, 0)
        while min(tokens.values()) < self._shape.tokens:
            rounds += 1
            for name, new in self._verify().items():
                tokens[name] += new
            self._propose()
        return Counted(rounds, sum(tokens.values()))

    def free(self) -> None:
        for name in self._prompts:
            self._engine.free(name)

    def _propose(self) -> None:
        if depth := self._shape.drafts:
            items = [DraftItem(name, token, depth) for name, token in self._newest.items()]
            self._proposed = best_tokens(self._engine.drafts(items))

    def _verify(self) -> dict[str, int]:
        """Step all proposals, take back those that the model does not choose; returns how many tokens are new."""
        items = [StepItem(name, (self._newest[name], *self._proposed[name]), "verify") for name in self._prompts]
        new = {}
        for name, chosen in best_tokens(self._engine.step(items)).items():
            drafts, kept = self._proposed[name], 0
            while kept < len(drafts) and drafts[kept] == chosen[kept]:
                kept += 1
            self._newest[name], new[name] = chosen[kept], kept + 1
            if kept < len(drafts):
                self._engine.truncate(name, self._engine.length(name) - (len(drafts) - kept))
        return new


def best_tokens(logits: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The token with the largest logit in each row [T, W], of requests with as many rows each; waits once."""
    tokens_BT = torch.stack([*logits.values()]).argmax(-1).tolist()
    return dict(zip(logits, tokens_BT, strict=True))
