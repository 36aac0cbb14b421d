"""RMSNorm, alone and behind the addition to the residual stream.

rms_norm:            y = x / sqrt(mean(x²) + eps) · weight
add_rms_norm:        s = round(residual + delta),  y = rms_norm(s)
add_parts_rms_norm:  delta = round(Σ parts), then the same; or, of a token's expert outputs,
                     delta = round(Σ_k weight_k part_k + Σ further parts), the chosen experts and the shared ones

One program a row: the row is read once, kept in registers as float32, and every output is rounded once. The sum is
rounded before its norm, since the rounded sum is what the residual stream carries on. Rows may lie apart (any row
stride); a row has to fit the registers of one program. Source: text_model specification, sections 5.1, 11.2 and 12.

H200, bfloat16, D = 5120, inside a CUDA graph, memory cold: add_rms_norm 1.9 / 2.1 / 3.1 / 4.9 / 42.6 µs at T = 1 / 16 /
64 / 256 / 4096. The last is 85 % of the memory's rate; the first are a launch and one trip to memory. The eight sums
and norms of a decode step of the four-layer slice, three of which combine experts, take 25 / 33 / 35 / 48 µs at T = 1 /
16 / 64 / 256; apart, at T = 1, eight norms, five sums of the library's parts and three combinations took 31.
"""

import torch
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, next_power_of_2, overlap, round_to, tl, triton, wait_for_inputs
from optimized.kernels.parts import sum_of_parts, weighted_parts

# T tokens  D width  S parts  K parts with a weight


@triton.jit
def normalized(x, width, eps):
    """x / sqrt(mean(x²) + eps) of one row in float32, whose lanes past `width` are zero."""
    return x * tl.rsqrt(tl.sum(x * x) / width + eps)


@triton.jit
def _rms_norm_kernel(x, weight, out, x_row, width, eps, BLOCK_D: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    lane_D = tl.arange(0, BLOCK_D)
    inside = lane_D < width
    x_D = tl.load(x + row * x_row + lane_D, mask=inside, other=0).to(tl.float32)
    weight_D = tl.load(weight + lane_D, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * width + lane_D, round_to(normalized(x_D, width, eps) * weight_D, out), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    residual, parts, part_weights, weight, total, out, residual_row, part_stride, part_row, width, eps,
    S: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    lane_D = tl.arange(0, BLOCK_D)
    inside = lane_D < width
    weight_D = tl.load(weight + lane_D, mask=inside, other=0).to(tl.float32)
    parts_D = parts + row * part_row + lane_D
    if part_weights is None:
        total_D = sum_of_parts(parts_D, part_stride, inside, total, S)
    else:
        weighted_D, others_D = weighted_parts(parts_D, part_stride, part_weights + row * K, inside, S, K)
        total_D = round_to(weighted_D + others_D, total).to(tl.float32)
    if residual is not None:
        residual_D = tl.load(residual + row * residual_row + lane_D, mask=inside, other=0).to(tl.float32)
        total_D = round_to(residual_D + total_D, total).to(tl.float32)
    tl.store(total + row * width + lane_D, total_D, mask=inside)
    tl.store(out + row * width + lane_D, round_to(normalized(total_D, width, eps) * weight_D, out), mask=inside)


def row_warps(width: int) -> int:
    """Warps of a program that holds one row: 16 lanes a thread, so that a load takes two vectors."""
    return max(1, min(16, next_power_of_2(width) // 512))


def rms_norm_torch(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    x = x_TD.to(wide)
    normed = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return (normed * weight_D.to(wide)).to(x_TD.dtype)


def rms_norm_triton(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of each row; float32 inside, one rounding.

    x_TD: float32 or bfloat16; weight_D: the same dtype. Returns [T, D] in that dtype, dense.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("x", x_TD, (None, None), torch.float32, torch.bfloat16)
    T, D = x_TD.shape
    check_tensor("weight", weight_D, (D,), x_TD.dtype)
    out_TD = torch.empty(T, D, dtype=x_TD.dtype, device=x_TD.device)
    _rms_norm_kernel[(T,)](
        x_TD, weight_D, out_TD, x_TD.stride(0), D, eps,
        BLOCK_D=next_power_of_2(D), num_warps=row_warps(D), **overlap(x_TD.device),
    )  # fmt: skip
    return out_TD


def add_rms_norm_torch(residual_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_TD = residual_TD + delta_TD
    return sum_TD, rms_norm_torch(sum_TD, weight_D, eps)


def add_rms_norm_triton(residual_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What a sublayer adds to the residual stream, and the norm that the next one reads.

    residual_TD, delta_TD: float32 or bfloat16; weight_D: the same dtype.
    Returns: sum_TD, rounded, and normed_TD, the norm of the rounded sum; both dense, in that dtype.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("delta", delta_TD, (None, None), residual_TD.dtype)
    return add_parts_rms_norm_triton(residual_TD, delta_TD[None], weight_D, eps)


def add_parts_rms_norm_torch(
    residual_TD: Tensor | None,
    parts_STD: Tensor,
    weight_D: Tensor,
    eps: float,
    part_weights_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    wide, dtype = torch.promote_types(parts_STD.dtype, torch.float32), weight_D.dtype
    parts_STD = parts_STD.to(wide)
    if part_weights_TK is not None:
        K = part_weights_TK.shape[1]
        parts_STD = torch.cat((parts_STD[:K] * part_weights_TK.T[..., None], parts_STD[K:]))
    delta_TD = parts_STD.sum(0).to(dtype)
    sum_TD = delta_TD if residual_TD is None else residual_TD + delta_TD
    return sum_TD, rms_norm_torch(sum_TD, weight_D, eps)


def add_parts_rms_norm_triton(
    residual_TD: Tensor | None,
    parts_STD: Tensor,
    weight_D: Tensor,
    eps: float,
    part_weights_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of a delta in parts: of a cut product, or, with weights for the first K, of expert outputs.

    parts_STD: float32 or bfloat16, any part and row stride; weight_D: float32 or bfloat16, the dtype of what is
    returned, and of residual_TD, which None stands for zeros; part_weights_TK: float32, K ≤ S.
    Returns: as `add_rms_norm`. Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("delta", parts_STD, (None, None, None), torch.float32, torch.bfloat16)
    S, T, D = parts_STD.shape
    check_tensor("weight", weight_D, (D,), torch.float32, torch.bfloat16)
    dtype = weight_D.dtype
    if residual_TD is not None:
        check_tensor("residual", residual_TD, (T, D), dtype)
    K = 0
    if part_weights_TK is not None:
        check_tensor("part weights", part_weights_TK, (T, None), torch.float32)
        K = part_weights_TK.shape[1]
        part_weights_TK = part_weights_TK.contiguous()
    if not K <= S or not S:
        raise KernelInputError(f"expected at least one part, and one for each of {K} weights of a token, found {S}")
    sum_TD, normed_TD = torch.empty(2, T, D, dtype=dtype, device=parts_STD.device)
    _add_rms_norm_kernel[(T,)](
        residual_TD, parts_STD, part_weights_TK, weight_D, sum_TD, normed_TD,
        0 if residual_TD is None else residual_TD.stride(0), *parts_STD.stride()[:2], D, eps,
        S=S, K=K, BLOCK_D=next_power_of_2(D), num_warps=row_warps(D), **overlap(parts_STD.device),
    )  # fmt: skip
    return sum_TD, normed_TD
