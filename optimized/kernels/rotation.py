"""The cosines and sines of a token's position, for all layers of a step.

angle[t, x] = float32(position_t) · frequency_x          table[t, x] = cos or sin of it

The float32 product is a constant of the model at every dtype. The lanes of all layer kinds stand beside each other, so
that one program a token makes them; there is no launch of its own, other kernels of a step's start take it along.
Source: text_model specification, section 5.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from optimized.kernels.common import check_tensor, tl, triton

# T tokens  X lanes of the table


class RotationLanes(NamedTuple):
    """frequency_X, float32 radians a position, and whether the lane is the cosine or the sine, bool."""

    frequency_X: Tensor
    is_cosine_X: Tensor


@triton.jit
def rotation_row(position, frequency, is_cosine, table, X, BLOCK_X: tl.constexpr):
    """One token's row of the table; all four are pointers, the first and the last to what belongs to the token."""
    lane_X = tl.arange(0, BLOCK_X)
    inside = lane_X < X
    angle_X = tl.load(position).to(tl.float32) * tl.load(frequency + lane_X, mask=inside, other=0)
    is_cosine_X = tl.load(is_cosine + lane_X, mask=inside, other=0).to(tl.int32) != 0
    tl.store(table + lane_X, tl.where(is_cosine_X, tl.cos(angle_X), tl.sin(angle_X)), mask=inside)


def rotation_table_torch(positions_T: Tensor, lanes: RotationLanes, dtype: torch.dtype) -> Tensor:
    """[T, X] for activations of `dtype`, at least float32."""
    angle_TX = (positions_T.to(torch.float32)[:, None] * lanes.frequency_X.to(torch.float32)).to(
        torch.promote_types(dtype, torch.float32)
    )
    return torch.where(lanes.is_cosine_X, angle_TX.cos(), angle_TX.sin())


def check_rotation(positions_T: Tensor, lanes: RotationLanes, T: int) -> None:
    """Raises: KernelInputError for another shape or dtype."""
    check_tensor("positions", positions_T, (T,), torch.int32)
    check_tensor("frequencies", lanes.frequency_X, (None,), torch.float32)
    check_tensor("cosine lanes", lanes.is_cosine_X, (len(lanes.frequency_X),), torch.bool)
