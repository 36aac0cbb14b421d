"""The start of a draft (MTP) step: next token's embedding and last hidden state, each normed, side by side.

eh[t] = [ rms(table[id[t]]; enorm) | rms(hidden[t]; hnorm) ]        embedding first; angles: see `rotation`

Three programs a token: one for each half, one for the cosines and sines of the position; lookup, both norms, the
concatenation and the rotations are one launch. float32 inside, one rounding. An id outside the table is clamped into
it, so that no id can read out of bounds; refusing such ids is the caller's business.
Source: text_model specification, sections 17.2 and 17.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.kernels.common import check_tensor, next_power_of_2, overlap, round_to, tl, triton, wait_for_inputs
from optimized.kernels.embed import clamped_row
from optimized.kernels.norm import normalized, rms_norm_torch, row_warps
from optimized.kernels.rotation import RotationLanes, check_rotation, rotation_row, rotation_table_torch

# T tokens  W rows of the table  D model  X lanes of the rotation


@triton.jit
def _draft_input_kernel(
    table, token_ids, hidden, enorm, hnorm, positions, frequency, is_cosine, out, rotation,
    rows, table_row, hidden_row, width, eps, X, BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    lane_D = tl.arange(0, BLOCK_D)
    inside = lane_D < width
    part = tl.program_id(1)
    out += (2 * token + part) * width
    if part == 0:
        x_D = tl.load(clamped_row(table, token_ids + token, rows, table_row) + lane_D, mask=inside, other=0)
        weight_D = tl.load(enorm + lane_D, mask=inside, other=0).to(tl.float32)
        normed_D = normalized(x_D.to(tl.float32), width, eps) * weight_D
        tl.store(out + lane_D, round_to(normed_D, out), mask=inside)
    elif part == 1:
        x_D = tl.load(hidden + token * hidden_row + lane_D, mask=inside, other=0)
        weight_D = tl.load(hnorm + lane_D, mask=inside, other=0).to(tl.float32)
        normed_D = normalized(x_D.to(tl.float32), width, eps) * weight_D
        tl.store(out + lane_D, round_to(normed_D, out), mask=inside)
    else:
        rotation_row(positions + token, frequency, is_cosine, rotation + token * X, X, BLOCK_X)


def draft_input_torch(
    table_WD: Tensor,
    token_ids_T: Tensor,
    hidden_TD: Tensor,
    enorm_D: Tensor,
    hnorm_D: Tensor,
    eps: float,
    positions_T: Tensor,
    lanes: RotationLanes,
) -> tuple[Tensor, Tensor]:
    embedding_TD = table_WD[token_ids_T.long().clamp(0, len(table_WD) - 1)]
    halves = rms_norm_torch(embedding_TD, enorm_D, eps), rms_norm_torch(hidden_TD, hnorm_D, eps)
    return torch.cat(halves, dim=-1), rotation_table_torch(positions_T, lanes, hidden_TD.dtype)


def draft_input_triton(
    table_WD: Tensor,
    token_ids_T: Tensor,
    hidden_TD: Tensor,
    enorm_D: Tensor,
    hnorm_D: Tensor,
    eps: float,
    positions_T: Tensor,
    lanes: RotationLanes,
) -> tuple[Tensor, Tensor]:
    """[embedding | hidden], both normed, and the rotations of the positions.

    table_WD, hidden_TD, enorm_D, hnorm_D: one dtype, float32 or bfloat16; token_ids_T: int32 or int64.
    positions_T: int32, below 2^24; of padding rows also -1.
    Returns: [T, 2D] in that dtype and [T, X] float32, dense.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("hidden", hidden_TD, (None, None), torch.float32, torch.bfloat16)
    T, D = hidden_TD.shape
    check_tensor("table", table_WD, (None, D), hidden_TD.dtype)
    check_tensor("token_ids", token_ids_T, (T,), torch.int32, torch.int64)
    check_tensor("enorm", enorm_D, (D,), hidden_TD.dtype)
    check_tensor("hnorm", hnorm_D, (D,), hidden_TD.dtype)
    check_rotation(positions_T, lanes, T)
    X = len(lanes.frequency_X)
    out_T2D = torch.empty(T, 2 * D, dtype=hidden_TD.dtype, device=hidden_TD.device)
    rotation_TX = torch.empty(T, X, dtype=torch.float32, device=hidden_TD.device)
    _draft_input_kernel[(T, 3)](
        table_WD, token_ids_T, hidden_TD, enorm_D, hnorm_D, positions_T, *lanes, out_T2D, rotation_TX, len(table_WD),
        table_WD.stride(0), hidden_TD.stride(0), D, eps, X, BLOCK_D=next_power_of_2(D), BLOCK_X=next_power_of_2(X),
        num_warps=row_warps(D), **overlap(table_WD.device),
    )  # fmt: skip
    return out_T2D, rotation_TX
