"""Draws of rounding: the reference again, with every operation rounded a little differently.

Each element that an operation computes moves by about one ulp, up or down, with probability 1/12: the variance of one
rounding. So a run under a draw is as far from the truth as an implementation that rounds once more wherever the eager
one rounds. Several draws give the floor and how much it varies; what a single run rounded luckily says little.
Source: design, "Tolerances are measured".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import reference.layers.rope
from parity.faults.fault import Patch, applied_patches

# Operations that round. Views, gathers, masks and copies do not; a cast does if it narrows.
_ROUNDING = frozenset(
    "linear matmul einsum bmm mul add sub rsub div truediv pow mean sum exp rsqrt sqrt sigmoid silu softmax layer_norm "  # noqa: SIM905
    "index_add".split()
)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PROBABILITY = 1 / 12
_POOL = 1 << 20
# Offsets into the pool drawn at a time.
_OFFSETS = 1 << 12


class RoundingDraw(TorchFunctionMode):
    """Inside, rounding is drawn from `seed`. float64 results are left alone."""

    def __init__(self, seed: int):
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(_POOL, generator=self._generator)
        ulps = (drawn < _PROBABILITY / 2).float() - (drawn > 1 - _PROBABILITY / 2).float()
        # Factors by which a product rounds to the neighbouring value: one pool, read from a random offset each time.
        self._factors = {dtype: 1 + ulps.to(dtype) * torch.finfo(dtype).eps for dtype in _DTYPES}
        self._offsets: list[int] = []
        self._is_paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        effect = _effect(func)
        if not effect or self._is_paused or not isinstance(result, Tensor) or result.dtype not in _DTYPES:
            return result
        return self._moved(result) if effect == "rounds" or _narrows(args[0].dtype, result.dtype) else result

    def _moved(self, value: Tensor) -> Tensor:
        """Each element one ulp away, or as it is. Zeros, infinities and NaN stay what they are."""
        count, factors = value.numel(), self._factors[value.dtype]
        if not self._offsets:
            self._offsets = torch.randint(_POOL, (_OFFSETS,), generator=self._generator).tolist()[::-1]
        offset = self._offsets.pop()
        if offset + count > _POOL:
            factors = factors.repeat(1 + -(-count // _POOL))
        moves = factors[offset : offset + count].view(value.shape)
        return value * (moves if value.is_cpu else moves.to(value.device))

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw for the reference, whose RoPE angles are constants of the model and not rounded values."""

        def paused(angles: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def constant(*args: Any) -> Tensor:
                self._is_paused = True
                try:
                    return angles(*args)
                finally:
                    self._is_paused = False

            return constant

        with applied_patches([Patch(reference.layers.rope, "angles", paused)]), self:
            yield


@cache
def _effect(func: Callable[..., Any]) -> Literal["rounds", "casts", ""]:
    """What an operation does to its result. Asked a million times a sweep, mostly of shapes and views."""
    name = func.__name__.strip("_")
    if name in _ROUNDING or name.removeprefix("r") in _ROUNDING:
        return "rounds"
    return "casts" if name == "to" else ""


def _narrows(before: torch.dtype, after: torch.dtype) -> bool:
    return before.is_floating_point and torch.finfo(after).bits < torch.finfo(before).bits
