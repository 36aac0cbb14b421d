"""The optimized implementation, driven through the runner protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from optimized.device import Backend
from optimized.engine import Engine, EngineOptions
from optimized.errors import NotSupportedError
from parity.runners import RunnerUnavailable
from reference.config import NoteConfig
from reference.layers.indexer import RopeLayout
from reference.session import StepItem


class OptimizedRunner:
    """One engine and its requests. Pools are poisoned, so that a row that was never written shows as NaN.

    Raises: RunnerUnavailable if the device, the backend or the layout that is asked for is not there.
    """

    name = "optimized"

    def __init__(
        self,
        config: NoteConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        backend: Backend | None = None,
        options: EngineOptions | None = None,
        indexer_rope_layout: RopeLayout = "leading",
    ):
        self.config, self.dtype = config, dtype
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise RunnerUnavailable("the optimized implementation on CUDA: torch finds no CUDA device here")
        try:
            self.engine = Engine.from_state(
                config.text,
                _cast(weights, dtype),
                dtype,
                device,
                backend,
                options or EngineOptions(poison=True),
                indexer_rope_layout=indexer_rope_layout,
            )
        except NotSupportedError as obstacle:
            raise RunnerUnavailable(str(obstacle)) from obstacle

    @torch.no_grad()
    def step(self, items: Sequence[StepItem]) -> dict[str, Tensor]:
        return self.engine.step(items)

    @torch.no_grad()
    def draft(self, request: str, next_token: int, depth: int, forced: Sequence[int] = ()) -> Tensor:
        return self.engine.draft(request, next_token, depth, forced)

    def truncate(self, request: str, length: int) -> None:
        self.engine.truncate(request, length)

    def length(self, request: str) -> int:
        return self.engine.length(request)

    def fork(self, request: str, new: str) -> None:
        self.engine.fork(request, new)

    def free(self, request: str) -> None:
        self.engine.free(request)


def _cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """As the reference casts its modules: correction biases stay at least float32."""
    for name, tensor in weights.items():
        is_bias = name.endswith("e_score_correction_bias")
        yield name, tensor.to(torch.promote_types(dtype, torch.float32) if is_bias else dtype)
