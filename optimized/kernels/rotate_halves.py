"""RoPE with pairs of lanes half of the rotated width apart, the audio tower's convention, in place.

x[j], x[j + P] = x[j] · cos_j - x[j + P] · sin_j, x[j + P] · cos_j + x[j] · sin_j        for the P pairs; the rest stays

One program a token goes through all heads: queries and keys, which lie side by side in a packed projection. Float32
inside, one rounding; the table comes in the dtype of the activations. Source: audio specification, section 8.2.
"""

import torch
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, next_power_of_2, round_to, tile, tl, triton

# T tokens  H heads  X lanes of a head  R rotated lanes  P = R/2 pairs


@triton.jit
def _rotate_halves_kernel(
    x, cos_sin, x_row, x_head, cos_sin_row, heads, P, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    pair_P = tl.arange(0, BLOCK_P)
    is_pair_P = pair_P < P
    cos_sin += token * cos_sin_row
    cos_1P = tl.load(cos_sin + pair_P, mask=is_pair_P, other=1.0).to(tl.float32)[None, :]
    sin_1P = tl.load(cos_sin + P + pair_P, mask=is_pair_P, other=0.0).to(tl.float32)[None, :]
    for first_head in range(0, heads, BLOCK_H):
        head_H = first_head + tl.arange(0, BLOCK_H)
        inside_HP = (head_H < heads)[:, None] & is_pair_P[None, :]
        pointers_HP = x + token * x_row + head_H[:, None] * x_head + pair_P[None, :]
        first_HP = tl.load(pointers_HP, mask=inside_HP, other=0.0).to(tl.float32)
        second_HP = tl.load(pointers_HP + P, mask=inside_HP, other=0.0).to(tl.float32)
        tl.store(pointers_HP, round_to(first_HP * cos_1P - second_HP * sin_1P, x), mask=inside_HP)
        tl.store(pointers_HP + P, round_to(second_HP * cos_1P + first_HP * sin_1P, x), mask=inside_HP)


def rotate_halves_torch_(x_THX: Tensor, cos_sin_TR: Tensor) -> Tensor:
    wide = torch.promote_types(x_THX.dtype, torch.float32)
    cos_T1P, sin_T1P = cos_sin_TR.to(wide)[:, None].chunk(2, dim=-1)
    rotated_THR = x_THX[..., : cos_sin_TR.shape[1]]
    first_THP, second_THP = rotated_THR.to(wide).chunk(2, dim=-1)
    turned = (first_THP * cos_T1P - second_THP * sin_T1P, second_THP * cos_T1P + first_THP * sin_T1P)
    rotated_THR.copy_(torch.cat(turned, dim=-1))
    return x_THX


def rotate_halves_triton_(x_THX: Tensor, cos_sin_TR: Tensor) -> Tensor:
    """Rotate the first R lanes of every head by the angles of its token, in place.

    x_THX: float32 or bfloat16, any stride between tokens and heads; cos_sin_TR: [cos R/2 | sin R/2] of each token, in
    that dtype. Returns: `x_THX`.
    Raises: KernelInputError for another shape or dtype, an odd R, or more rotated lanes than there are.
    """
    check_tensor("x", x_THX, (None, None, None), torch.float32, torch.bfloat16)
    T, H, X = x_THX.shape
    check_tensor("cos_sin", cos_sin_TR, (T, None), x_THX.dtype)
    R = cos_sin_TR.shape[1]
    if R % 2 or R > X:
        raise KernelInputError(f"expected an even number of rotated lanes, at most {X}, found {R}")
    if x_THX.numel() and R:
        _rotate_halves_kernel[(T,)](
            x_THX,
            cos_sin_TR,
            x_THX.stride(0),
            x_THX.stride(1),
            cos_sin_TR.stride(0),
            H,
            R // 2,
            BLOCK_H=tile(H, smallest=1, largest=64),
            BLOCK_P=next_power_of_2(R // 2),
            num_warps=2,
        )
    return x_THX
