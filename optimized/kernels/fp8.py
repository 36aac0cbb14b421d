"""Quantization to 8-bit floats (e4m3) with float32 scales: activations by row and group, weights by block.

activations   a = max(largest |x| of 128 columns of a row, 1e-10),  scale = a · (1/448),  q = e4m3(x / scale)
weights       a = max(largest |w| of a 128 x 128 block, 1e-4),      scale = a / 448,      q = e4m3(w · (1 / scale))

Widths are filled up with zeros to multiples of 128, which have no part in a scale. Scales are not rounded to powers of
two. e4m3 has 3 bits of mantissa: a relative half step of 1/16. Source: vision specification, section 9.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.kernels.common import TRUNCATES, check_tensor, next_power_of_2, tl, triton

# T rows  D columns  X = D filled up to a multiple of 128  G = X/128 groups

GROUP = 128
LARGEST = 448.0
SMALLEST_ROW, SMALLEST_BLOCK = 1e-10, 1e-4


@triton.jit
def quantized(x, largest):
    """Rows of `x`, float32, in units of their scales, and the scales; `largest` is max |x| of each row."""
    scale = tl.maximum(largest, 1e-10) * (1.0 / 448.0)
    ratio = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
    return tl.minimum(tl.maximum(ratio, -448.0), 448.0), scale


@triton.jit
def to_e4m3(x):
    """float32 within ±448 as e4m3, to nearest even."""
    if TRUNCATES:
        # The interpreter does not round to nearest. Three bits of mantissa are kept; below 2^-6 a step is 2^-9, to
        # which a sum with a large number rounds.
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, bits.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def _quantize_rows_kernel(x, q, scales, row_stride, D, G, BLOCK_G: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group_G = tl.arange(0, BLOCK_G)
    column_GX = group_G[:, None] * 128 + tl.arange(0, 128)[None, :]
    is_group = group_G < G
    x_GX = tl.load(x + row * row_stride + column_GX, mask=column_GX < D, other=0.0).to(tl.float32)
    ratio_GX, scale_G = quantized(x_GX, tl.max(tl.abs(x_GX), axis=1))
    tl.store(q + row * (G * 128) + column_GX, to_e4m3(ratio_GX), mask=is_group[:, None])
    tl.store(scales + row * G + group_G, scale_G, mask=is_group)


def quantize_rows_torch(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    x_TGX = _filled(x_TD.to(wide), dims=1).unflatten(-1, (-1, GROUP))
    largest_TG = x_TGX.abs().amax(-1).float().clamp(min=SMALLEST_ROW)
    scale_TG = largest_TG * torch.tensor(1.0 / LARGEST, dtype=torch.float32, device=x_TD.device)
    q_TGX = (x_TGX / scale_TG[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return q_TGX.flatten(-2), scale_TG


def quantize_rows_triton(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row in groups of 128 columns.

    x_TD bfloat16 or float32, rows at any stride. Returns q_TX (float8_e4m3fn, X = D filled up with zeros to a multiple
    of 128) and scale_TG (float32). Raises: KernelInputError for another shape or dtype.
    """
    check_tensor("x", x_TD, (None, None), torch.float32, torch.bfloat16)
    T, D = x_TD.shape
    G = triton.cdiv(D, GROUP)
    q_TX = torch.empty(T, G * GROUP, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scale_TG = torch.empty(T, G, dtype=torch.float32, device=x_TD.device)
    if T:
        _quantize_rows_kernel[(T,)](x_TD, q_TX, scale_TG, x_TD.stride(0), D, G, BLOCK_G=next_power_of_2(G), num_warps=4)
    return q_TX, scale_TG


def quantize_blocks(w_RD: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in blocks of 128 x 128: float8_e4m3fn, both sides filled up to multiples of 128; float32 scales."""
    w_RGCX = _filled(w_RD.float(), dims=2).unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    scale_RC = w_RGCX.abs().amax(dim=(1, 3)).clamp(min=SMALLEST_BLOCK) / LARGEST
    q_RGCX = (w_RGCX * (1.0 / scale_RC)[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return q_RGCX.flatten(2).flatten(0, 1), scale_RC


def _filled(x: Tensor, dims: int) -> Tensor:
    """The last `dims` dims filled up with zeros to multiples of 128."""
    padding = [amount for size in reversed(x.shape[-dims:]) for amount in (0, -size % GROUP)]
    return F.pad(x, padding)
