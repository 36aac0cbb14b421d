"""The whole optimized model as a side of the multimodal check: its own towers, scatter and engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from optimized.device import Backend
from optimized.engine import EngineOptions
from optimized.errors import NotSupportedError
from optimized.model import NoteEngine
from optimized.plan_spans import StepLimits
from parity.runners import NotSupportedHere, RunnerUnavailable
from parity.runners.note_sides import Placed, Placements, generated
from reference.config import NoteConfig
from reference.generate import Generation
from reference.layers.indexer import RopeLayout
from reference.session import StepItem

# Room for prompts with videos; poison wherever nothing was written.
OPTIONS = EngineOptions(
    pages=4096, page_size=4, requests=12, limits=StepLimits(4096, 2**27, 2**24), poison=True, disjoint_numbers=True
)


class OptimizedNoteSide:
    """One engine with both towers. Arguments and errors as in `OptimizedRunner`; NotSupportedHere for a folder that
    lacks a tower."""

    name = "optimized"

    def __init__(
        self,
        config: NoteConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        backend: Backend | None = None,
        options: EngineOptions = OPTIONS,
        indexer_rope_layout: RopeLayout = "leading",
    ):
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise RunnerUnavailable("the optimized implementation on CUDA: torch finds no CUDA device here")
        if config.vision is None or config.audio is None:
            raise NotSupportedHere("the multimodal check needs both towers, and the config lacks one")
        self.config, self.dtype = config, dtype
        try:
            self.note = NoteEngine.from_state(
                config,
                _cast(weights, dtype),
                dtype,
                device,
                backend,
                options,
                indexer_rope_layout=indexer_rope_layout,
            )
        except NotSupportedError as obstacle:
            raise RunnerUnavailable(str(obstacle)) from obstacle
        self.placed: Mapping[str, Placed] = {}
        self._placements = Placements(self.note, self.note)

    def step(self, items: Sequence[StepItem]) -> dict[str, Tensor]:
        for item in items:
            self._placements.begin(item.request, self.placed)
        return self.note.step(items)

    def draft(self, request: str, next_token: int, depth: int, forced: Sequence[int] = ()) -> Tensor:
        return self.note.draft(request, next_token, depth, forced)

    def truncate(self, request: str, length: int) -> None:
        self.note.truncate(request, length)

    def fork(self, request: str, new: str) -> None:
        self.note.fork(request, new)

    def free(self, request: str) -> None:
        self.note.free(request)
        self._placements.free(request)

    def generate(self, max_new_tokens: int, draft_depth: int = 0) -> Generation:
        for request in self.placed:
            self._placements.begin(request, self.placed)
        return generated(self.note, self, max_new_tokens, draft_depth)


def _cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """As the reference casts its modules: correction biases of routers stay at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: tensor.to(wide if _is_router_bias(name) else dtype) for name, tensor in weights.items()}


def _is_router_bias(name: str) -> bool:
    return name.endswith(("e_score_correction_bias", "router_bias"))
