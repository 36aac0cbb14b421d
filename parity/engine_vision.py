"""The optimized vision tower, run on cases and checked against the reference as transformers' is.

exact       torch twins in float64: the logic of packing, batching and cutting. Limit 1e-10.
float32,    the backend that is asked for, or the best one here. Limit: the measured floor, under the default numerics.
bfloat16
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from optimized.device import Backend
from optimized.errors import NotSupportedError
from optimized.vision import VisionOptions, VisionTower
from parity.runners import NotSupportedHere, RunnerUnavailable
from reference.checkpoint.expected_towers import VISION
from reference.config import NoteConfig
from reference.layers.vision_grid import Grid


class VisionOptimizedRunner:
    """One tower. `weights` have their full names, as in the checkpoint; others than the tower's are ignored.

    Raises: NotSupportedHere for a config without a vision tower, RunnerUnavailable if the device or the backend that is
    asked for is not there.
    """

    name = "optimized"

    def __init__(
        self,
        config: NoteConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        backend: Backend | None = None,
        options: VisionOptions | None = None,
    ):
        if config.vision is None:
            raise NotSupportedHere("the config has no vision tower: vision_config is missing")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise RunnerUnavailable("the optimized vision tower on CUDA: torch finds no CUDA device here")
        self.vision, self.dtype = config.vision, dtype
        try:
            self.tower = VisionTower.from_state(config.vision, _cast(weights, dtype), dtype, device, backend, options)
        except NotSupportedError as obstacle:
            raise RunnerUnavailable(str(obstacle)) from obstacle

    def embed(self, pixels_NX: Tensor, grids: Sequence[Grid]) -> Tensor:
        return self.tower(pixels_NX.to(torch.promote_types(torch.float32, self.dtype)), grids)


def _cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """As the reference casts its modules: router biases stay at least float32."""
    for name, tensor in weights.items():
        if name.startswith(VISION):
            wide = torch.promote_types(dtype, torch.float32) if name.endswith("router_bias") else dtype
            yield name.removeprefix(VISION), tensor.to(wide)
