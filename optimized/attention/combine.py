"""Merging attention over parts of the keys: each part has its output and the log-sum-exp of its scores.

lse = log Σ_p exp(lse_p)        out = Σ_p exp(lse_p - lse) · out_p

One convention at every seam: `lse_p` is the natural logarithm of Σ_s exp(scale · <q, k_s>) over the keys of part p, in
float32; a part without keys has lse_p = -inf, weighs nothing, and its output is never read. One program merges a tile
of lanes of one row over all parts at once; float32 inside, one rounding.
"""

import torch
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, next_power_of_2, overlap, round_to, tl, triton, wait_for_inputs

# P parts  T query tokens  H heads  C lanes of an output row


@triton.jit
def _merge_parts_kernel(
    parts,
    lse,
    merged,
    merged_lse,
    P,
    H,
    C,
    parts_part,
    parts_token,
    parts_head,
    lse_part,
    lse_token,
    lse_head,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    token, head = row // H, row % H
    part = tl.arange(0, BLOCK_P).to(tl.int64)
    lse_P = tl.load(lse + part * lse_part + token * lse_token + head * lse_head, mask=part < P, other=float("-inf")).to(
        tl.float32
    )
    highest = tl.max(lse_P)
    has_keys = highest > float("-inf")
    weight_P = tl.where(has_keys, tl.exp(lse_P - tl.where(has_keys, highest, 0.0)), 0.0)
    total = tl.where(has_keys, tl.sum(weight_P), 1.0)
    weight_P = weight_P / total

    lane = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    offsets = part * parts_part + token * parts_token + head * parts_head
    counts = (lse_P > float("-inf"))[:, None] & (lane < C)[None, :]
    part_PC = tl.load(parts + offsets[:, None] + lane[None, :], mask=counts, other=0.0).to(tl.float32)
    tl.store(merged + row * C + lane, round_to(tl.sum(part_PC * weight_P[:, None], axis=0), merged), mask=lane < C)
    if tl.program_id(1) == 0:
        tl.store(merged_lse + row, tl.where(has_keys, highest + tl.log(total), float("-inf")))


def merge_parts_torch(parts_PTHC: Tensor, lse_PTH: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(parts_PTHC.dtype, torch.float32)
    lse_PTH = lse_PTH.to(wide)
    lse_TH = torch.logsumexp(lse_PTH, dim=0)
    has_keys_PTH = lse_PTH > float("-inf")
    weight_PTH = torch.where(has_keys_PTH, (lse_PTH - lse_TH).exp(), 0.0)
    parts_PTHC_live = torch.where(has_keys_PTH[..., None], parts_PTHC.to(wide), 0.0)
    merged_THC = torch.einsum("pth,pthc->thc", weight_PTH, parts_PTHC_live)
    if out is None:
        return merged_THC.to(parts_PTHC.dtype), lse_TH
    return out.copy_(merged_THC), lse_TH


def merge_parts_triton(parts_PTHC: Tensor, lse_PTH: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from attention over parts of them.

    parts_PTHC: float32 or bfloat16, the output of each part; lse_PTH: float32, natural, -inf for a part without keys.
    Returns: merged_THC, written into `out` (any dtype, dense) or new in the dtype of `parts_PTHC`, zeros where no part
    has keys; lse_TH float32, so that merges can be merged.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("parts", parts_PTHC, (None, None, None, None), torch.float32, torch.bfloat16)
    P, T, H, C = parts_PTHC.shape
    check_tensor("lse", lse_PTH, (P, T, H), torch.float32, last_dim_dense=False)
    merged_THC = torch.empty(T, H, C, dtype=parts_PTHC.dtype, device=parts_PTHC.device) if out is None else out
    if not merged_THC.is_contiguous():
        raise KernelInputError(f"expected out dense, found strides {merged_THC.stride()}")
    check_tensor("out", merged_THC, (T, H, C))
    lse_TH = torch.empty(T, H, dtype=torch.float32, device=parts_PTHC.device)
    if T == 0:
        return merged_THC, lse_TH
    block_P = next_power_of_2(P)
    # All parts of a tile are in registers at once: 8192 float32 of four warps.
    block_C = min(next_power_of_2(C), max(16, 8192 // block_P))
    _merge_parts_kernel[(T * H, triton.cdiv(C, block_C))](
        parts_PTHC,
        lse_PTH,
        merged_THC,
        lse_TH,
        P,
        H,
        C,
        *parts_PTHC.stride()[:3],
        *lse_PTH.stride(),
        BLOCK_P=block_P,
        BLOCK_C=block_C,
        **overlap(parts_PTHC.device),
    )
    return merged_THC, lse_TH
