"""A product in parts, which its consumer adds up.

y = round(part_1 + part_2 + … + part_S)

A product with few rows is cut along its depth, so that all processors read the weight: each part is a sum over a slice,
float32. What reads y next adds the parts on its way, in their order, and rounds as the product would have: no launch of
its own, and the same bytes whoever adds. A product that was not cut is one part in the dtype of the activations.
The expert outputs of a token are parts too, the first K of them with weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from optimized.kernels.common import round_to, tl, triton

# S parts  K parts with a weight  T tokens  X lanes


@triton.jit
def sum_of_parts(pointers, part_stride, inside, like, S: tl.constexpr):
    """The sum over S parts at `pointers`, 0 where not `inside`, rounded to the dtype that `like` points to; float32."""
    total = tl.load(pointers, mask=inside, other=0).to(tl.float32)
    for s in tl.static_range(1, S):
        total += tl.load(pointers + s * part_stride, mask=inside, other=0).to(tl.float32)
    return round_to(total, like).to(tl.float32)


@triton.jit
def weighted_parts(pointers, part_stride, weights, inside, S: tl.constexpr, K: tl.constexpr):
    """Σ weight · part over the first K parts, and the sum of the others; `weights` points to K of them."""
    weighted = tl.zeros(pointers.shape, tl.float32)
    others = tl.zeros(pointers.shape, tl.float32)
    for k in tl.static_range(K):
        weighted += tl.load(pointers + k * part_stride, mask=inside, other=0).to(tl.float32) * tl.load(weights + k)
    for s in tl.static_range(K, S):
        others += tl.load(pointers + s * part_stride, mask=inside, other=0).to(tl.float32)
    return weighted, others


class Parts(NamedTuple):
    """What adds up to a value: parts_STX, and weights_TK of the first K of them, at least float32."""

    parts_STX: Tensor
    weights_TK: Tensor | None = None


def whole(parts_STX: Tensor, dtype: torch.dtype) -> Tensor:
    """y_TX in `dtype`: the bytes that a kernel makes of the parts."""
    total_TX = parts_STX[0]
    for part_TX in parts_STX[1:]:
        total_TX = total_TX + part_TX
    return total_TX.to(dtype)
