"""SwiGLU's elementwise half: silu(gate) · up, between the two products of a feed-forward.

y = gate / (1 + exp(-gate)) · up,  with gate and up the two halves of the packed projection's output

One program for each row and block of lanes; float32 inside, one rounding. Source: text_model specification,
section 11.1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, round_to, tile, tl, triton

# T tokens  F ffn width  X = 2F, [gate F | up F]


@triton.jit
def activated(gate, up):
    """silu(gate) · up, float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu_kernel(gate_up, out, gate_up_row, width, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = lane_F < width
    gate_F = tl.load(gate_up + row * gate_up_row + lane_F, mask=inside, other=0).to(tl.float32)
    up_F = tl.load(gate_up + row * gate_up_row + width + lane_F, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * width + lane_F, round_to(activated(gate_F, up_F), out), mask=inside)


def swiglu_torch(gate_up_TX: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_TX.to(torch.promote_types(gate_up_TX.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate_TF) * up_TF).to(gate_up_TX.dtype)


def swiglu_triton(gate_up_TX: Tensor) -> Tensor:
    """silu(gate) · up.

    gate_up_TX: float32 or bfloat16, [gate F | up F], any row stride. Returns [T, F] in that dtype, dense.
    Raises: KernelInputError for another dtype, an odd width, or a last dim that is not dense.
    """
    check_tensor("gate_up", gate_up_TX, (None, None), torch.float32, torch.bfloat16)
    T, X = gate_up_TX.shape
    if X % 2:
        raise KernelInputError(f"expected gate_up (T, 2F), gate and up of one width, found {(T, X)}")
    out_TF = torch.empty(T, X // 2, dtype=gate_up_TX.dtype, device=gate_up_TX.device)
    block = tile(X // 2, largest=1024)
    grid = (T, triton.cdiv(X // 2, block))
    _swiglu_kernel[grid](gate_up_TX, out_TF, gate_up_TX.stride(0), X // 2, BLOCK_F=block, num_warps=4)
    return out_TF
