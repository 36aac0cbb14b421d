"""The input of the draft (MTP) layer: next token's embedding and last hidden state, each normed, side by side.

eh[t] = [ rms(table[id[t]]; enorm) | rms(hidden[t]; hnorm) ]        embedding first

One program for each token and half; the lookup, both norms and the concatenation are one kernel. float32 inside, one
rounding. An id outside the table is clamped into it, so that no id can read out of bounds; refusing such ids is the
caller's business. Source: text_model specification, sections 17.2 and 17.5.
"""

import torch
from torch import Tensor

from optimized.kernels.common import check_tensor, next_power_of_2, round_to, tl, triton
from optimized.kernels.norm import normalized, rms_norm_torch, row_warps

# T tokens  W rows of the table  D model


@triton.jit
def _draft_input_kernel(
    table, token_ids, hidden, enorm, hnorm, out, rows, table_row, hidden_row, width, eps, BLOCK_D: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    lane_D = tl.arange(0, BLOCK_D)
    inside = lane_D < width
    half = tl.program_id(1)
    if half == 0:
        token_id = tl.load(token_ids + token).to(tl.int64)
        token_id = tl.minimum(tl.maximum(token_id, 0), rows - 1)
        x_D = tl.load(table + token_id * table_row + lane_D, mask=inside, other=0).to(tl.float32)
        weight_D = tl.load(enorm + lane_D, mask=inside, other=0).to(tl.float32)
    else:
        x_D = tl.load(hidden + token * hidden_row + lane_D, mask=inside, other=0).to(tl.float32)
        weight_D = tl.load(hnorm + lane_D, mask=inside, other=0).to(tl.float32)
    normed_D = normalized(x_D, width, eps) * weight_D
    tl.store(out + (2 * token + half) * width + lane_D, round_to(normed_D, out), mask=inside)


def draft_input_torch(
    table_WD: Tensor, token_ids_T: Tensor, hidden_TD: Tensor, enorm_D: Tensor, hnorm_D: Tensor, eps: float
) -> Tensor:
    embedding_TD = table_WD[token_ids_T.long().clamp(0, len(table_WD) - 1)]
    return torch.cat((rms_norm_torch(embedding_TD, enorm_D, eps), rms_norm_torch(hidden_TD, hnorm_D, eps)), dim=-1)


def draft_input_triton(
    table_WD: Tensor, token_ids_T: Tensor, hidden_TD: Tensor, enorm_D: Tensor, hnorm_D: Tensor, eps: float
) -> Tensor:
    """[embedding | hidden], both normed.

    table_WD, hidden_TD, enorm_D, hnorm_D: one dtype, float32 or bfloat16; token_ids_T: int32 or int64.
    Returns [T, 2D] in that dtype, dense.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("hidden", hidden_TD, (None, None), torch.float32, torch.bfloat16)
    T, D = hidden_TD.shape
    check_tensor("table", table_WD, (None, D), hidden_TD.dtype)
    check_tensor("token_ids", token_ids_T, (T,), torch.int32, torch.int64)
    check_tensor("enorm", enorm_D, (D,), hidden_TD.dtype)
    check_tensor("hnorm", hnorm_D, (D,), hidden_TD.dtype)
    out_T2D = torch.empty(T, 2 * D, dtype=hidden_TD.dtype, device=hidden_TD.device)
    _draft_input_kernel[(T, 2)](
        table_WD,
        token_ids_T,
        hidden_TD,
        enorm_D,
        hnorm_D,
        out_T2D,
        len(table_WD),
        table_WD.stride(0),
        hidden_TD.stride(0),
        D,
        eps,
        BLOCK_D=next_power_of_2(D),
        num_warps=row_warps(D),
    )
    return out_T2D
