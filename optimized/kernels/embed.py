"""The start of a step: the embeddings, their first norm, and the rotations of all layers, in one launch.

hidden[t] = table[id[t]]          normed[t] = rms(hidden[t]; weight)          angles: see `rotation`

Two programs a token: one looks up and norms, one makes the cosines and sines. The embedding is copied, not rounded; the
norm is float32 inside with one rounding, the same bytes as `rms_norm`. An id outside the table is clamped into it, so
that no id can read out of bounds; refusing such ids is the caller's business.
Source: text_model specification, sections 5.1, 5.3 and 12.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from optimized.kernels.common import check_tensor, next_power_of_2, overlap, round_to, tl, triton, wait_for_inputs
from optimized.kernels.norm import normalized, rms_norm_torch, row_warps
from optimized.kernels.rotation import RotationLanes, check_rotation, rotation_row, rotation_table_torch

# T tokens  W rows of the table  D model  X lanes of the rotation


class Embedded(NamedTuple):
    """hidden_TD and normed_TD in the table's dtype; rotation_TX at least float32."""

    hidden_TD: Tensor
    normed_TD: Tensor
    rotation_TX: Tensor


@triton.jit
def clamped_row(table, token_id, rows, table_row):
    """Where the row of an id begins, whatever the id."""
    token_id = tl.minimum(tl.maximum(tl.load(token_id).to(tl.int64), 0), rows - 1)
    return table + token_id * table_row


@triton.jit
def _embed_kernel(
    table, token_ids, weight, positions, frequency, is_cosine, hidden, normed, rotation, rows, table_row, width, eps, X,
    BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        lane_D = tl.arange(0, BLOCK_D)
        inside = lane_D < width
        x_D = tl.load(clamped_row(table, token_ids + token, rows, table_row) + lane_D, mask=inside, other=0)
        tl.store(hidden + token * width + lane_D, x_D, mask=inside)
        weight_D = tl.load(weight + lane_D, mask=inside, other=0).to(tl.float32)
        normed_D = normalized(x_D.to(tl.float32), width, eps) * weight_D
        tl.store(normed + token * width + lane_D, round_to(normed_D, normed), mask=inside)
    else:
        rotation_row(positions + token, frequency, is_cosine, rotation + token * X, X, BLOCK_X)


def embed_torch(
    table_WD: Tensor, token_ids_T: Tensor, weight_D: Tensor, eps: float, positions_T: Tensor, lanes: RotationLanes
) -> Embedded:
    hidden_TD = table_WD[token_ids_T.long().clamp(0, len(table_WD) - 1)]
    rotation_TX = rotation_table_torch(positions_T, lanes, table_WD.dtype)
    return Embedded(hidden_TD, rms_norm_torch(hidden_TD, weight_D, eps), rotation_TX)


def embed_triton(
    table_WD: Tensor, token_ids_T: Tensor, weight_D: Tensor, eps: float, positions_T: Tensor, lanes: RotationLanes
) -> Embedded:
    """Embeddings, normed for the first layer, and the rotations of their positions.

    table_WD, weight_D: one dtype, float32 or bfloat16; token_ids_T: int32 or int64.
    positions_T: int32, below 2^24, where float32 is exact; of padding rows also -1.
    Returns: `Embedded`, dense. Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("table", table_WD, (None, None), torch.float32, torch.bfloat16)
    check_tensor("token_ids", token_ids_T, (None,), torch.int32, torch.int64)
    T, (W, D) = len(token_ids_T), table_WD.shape
    check_tensor("weight", weight_D, (D,), table_WD.dtype)
    check_rotation(positions_T, lanes, T)
    X = len(lanes.frequency_X)
    hidden_TD, normed_TD = torch.empty(2, T, D, dtype=table_WD.dtype, device=table_WD.device)
    rotation_TX = torch.empty(T, X, dtype=torch.float32, device=table_WD.device)
    _embed_kernel[(T, 2)](
        table_WD, token_ids_T, weight_D, positions_T, *lanes, hidden_TD, normed_TD, rotation_TX,
        W, table_WD.stride(0), D, eps, X,
        BLOCK_D=next_power_of_2(D), BLOCK_X=next_power_of_2(X), num_warps=row_warps(D), **overlap(table_WD.device),
    )  # fmt: skip
    return Embedded(hidden_TD, normed_TD, rotation_TX)
