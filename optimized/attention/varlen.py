"""Bidirectional attention inside each of many sequences that lie behind each other: the core of both towers.

score[t, h, s] = scale · <q[t, h], k[s, h]>                       over the keys s of the sequence that t belongs to
out[t, h]      = Σ_s softmax_s(score)[t, h, s] · v[s, h]

A sequence is a chunk of sound or a frame of a picture; nothing is seen across its ends and nothing hidden inside. One
program takes a tile of queries of one sequence and one head, and goes through the tiles of keys with an online softmax.
All tiles of keys but the last are whole and have no mask. Queries, keys and values may be views of one packed
projection, with any stride between rows and between heads.

Float32 scores and sums; a tile of probabilities is rounded to the value's dtype. Rows outside of the sequences are
neither read nor written. Source: audio specification, section 7; vision specification, section 4.

H200, bfloat16, heads of 64 lanes, events and a cold cache, TFLOP/s at 30 sequences of 750 rows with 20 heads, 16 of
4096 and one of 16384 with 24 heads: 364 / 481 / 440; torch's attention on the same rows as a padded batch 352 / 494 /
490. Bound by the exponentials, which take as long as both products.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, dot, next_power_of_2, round_to, tile, tl, triton, widen

# T tokens (as queries)  S tokens (as keys)  H heads  X lanes of a head  B sequences

LOG2_E = math.log2(math.e)
# From here on keys and values are read less often by larger tiles of queries; below, smaller ones start sooner.
MANY_ROWS = 4608


@triton.jit
def _softmax_step(
    q_TX,
    keys,
    values,
    left,
    lane_S,
    lane_X,
    k_row,
    v_row,
    width,
    highest_T,
    total_T,
    out_TX,
    scale_log2,
    IS_WHOLE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of keys more, of which `left` rows remain: maximum so far, sum of weights, weighted sum of values."""
    is_read = lane_X[None, :] < width
    if not IS_WHOLE:
        # Keys outside of the sequence are zeros, not only weightless: 0 x NaN is NaN.
        is_read = is_read & (lane_S < left)[:, None]
    k_SX = tl.load(keys + (lane_S[:, None] * k_row + lane_X[None, :]), mask=is_read, other=0.0)
    v_SX = tl.load(values + (lane_S[:, None] * v_row + lane_X[None, :]), mask=is_read, other=0.0)
    score_TS = dot(q_TX, tl.trans(k_SX), tl.zeros([q_TX.shape[0], lane_S.shape[0]], tl.float32), WIDEN)
    if not IS_WHOLE:
        score_TS = tl.where((lane_S < left)[None, :], score_TS, float("-inf"))
    new_highest_T = tl.maximum(highest_T, tl.max(score_TS, axis=1))
    base_T = new_highest_T * scale_log2
    weight_TS = tl.exp2(score_TS * scale_log2 - base_T[:, None])
    decay_T = tl.exp2(highest_T * scale_log2 - base_T)
    total_T = total_T * decay_T + tl.sum(weight_TS, axis=1)
    if not WIDEN:
        weight_TS = weight_TS.to(v_SX.dtype)
    return new_highest_T, total_T, dot(weight_TS, v_SX, out_TX * decay_T[:, None], WIDEN)


@triton.jit
def _varlen_attention_kernel(
    q,
    k,
    v,
    out,
    starts,
    scale_log2,
    H,
    width,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_X: tl.constexpr,
    WIDEN: tl.constexpr,
):
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_row = tl.load(starts + sequence)
    end_row = tl.load(starts + sequence + 1)
    first_query = first_row + tl.program_id(0) * BLOCK_T
    if first_query < end_row:
        query_T = first_query + tl.arange(0, BLOCK_T)
        lane_S, lane_X = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_X)
        is_stored = (query_T < end_row)[:, None] & (lane_X < width)[None, :]
        query_rows = query_T.to(tl.int64)[:, None]
        q_TX = tl.load(q + head * q_head + query_rows * q_row + lane_X[None, :], mask=is_stored, other=0.0)
        k += first_row.to(tl.int64) * k_row + head * k_head
        v += first_row.to(tl.int64) * v_row + head * v_head
        highest_T = tl.full([BLOCK_T], float("-inf"), tl.float32)
        total_T = tl.zeros([BLOCK_T], tl.float32)
        out_TX = tl.zeros([BLOCK_T, BLOCK_X], tl.float32)
        left = end_row - first_row
        for _ in range(left // BLOCK_S):
            highest_T, total_T, out_TX = _softmax_step(
                q_TX,
                k,
                v,
                left,
                lane_S,
                lane_X,
                k_row,
                v_row,
                width,
                highest_T,
                total_T,
                out_TX,
                scale_log2,
                True,
                WIDEN,
            )
            k += BLOCK_S * k_row
            v += BLOCK_S * v_row
        left = left % BLOCK_S
        if left > 0:
            highest_T, total_T, out_TX = _softmax_step(
                q_TX,
                k,
                v,
                left,
                lane_S,
                lane_X,
                k_row,
                v_row,
                width,
                highest_T,
                total_T,
                out_TX,
                scale_log2,
                False,
                WIDEN,
            )
        out_rows = out + (query_rows * H + head) * width + lane_X[None, :]
        tl.store(out_rows, round_to(out_TX / total_T[:, None], out), mask=is_stored)


def tiling(longest: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps and pipeline stages."""
    if dtype == torch.float32:
        return tile(longest, largest=16), 32, 4, 1
    if longest < MANY_ROWS:
        return tile(longest, largest=64), 64, 4, 3
    return 128, 64, 8, 3


def varlen_attention_torch(
    q_THX: Tensor, k_THX: Tensor, v_THX: Tensor, starts_B1: Tensor, longest: int, scale: float
) -> Tensor:
    wide = torch.promote_types(q_THX.dtype, torch.float32)
    out_THX = torch.empty(q_THX.shape, dtype=q_THX.dtype, device=q_THX.device)
    for start, end in pairwise(starts_B1.tolist()):
        q, k, v = (x_THX[start:end].to(wide) for x_THX in (q_THX, k_THX, v_THX))
        weight_HTS = (torch.einsum("thx,shx->hts", q, k) * scale).softmax(-1)
        out_THX[start:end] = torch.einsum("hts,shx->thx", weight_HTS, v).to(q_THX.dtype)
    return out_THX


def varlen_attention_triton(
    q_THX: Tensor, k_THX: Tensor, v_THX: Tensor, starts_B1: Tensor, longest: int, scale: float
) -> Tensor:
    """Every sequence attends to all of itself and to nothing else.

    q_THX, k_THX, v_THX: float32 or bfloat16, one shape and dtype; any stride between rows and heads. Sequence b has the
    rows starts_B1[b] to starts_B1[b + 1], int32, ascending; a sequence may be empty. `longest`: at least the rows of
    the longest one, known without asking the device. `scale` is positive.
    Returns: out_THX in that dtype, dense; rows of no sequence stay unwritten. Scores and sums are float32.
    Raises: KernelInputError for another shape or dtype, a last dim that is not dense, or a scale of 0 or less.
    """
    check_tensor("q", q_THX, (None, None, None), torch.float32, torch.bfloat16)
    T, H, X = q_THX.shape
    check_tensor("k", k_THX, (T, H, X), q_THX.dtype)
    check_tensor("v", v_THX, (T, H, X), q_THX.dtype)
    check_tensor("starts", starts_B1, (None,), torch.int32)
    if not scale > 0.0:
        raise KernelInputError(f"expected a positive scale, found {scale}")
    B = len(starts_B1) - 1
    out_THX = torch.empty(T, H, X, dtype=q_THX.dtype, device=q_THX.device)
    if T == 0 or B < 1 or longest < 1:
        return out_THX
    block_T, block_S, warps, stages = tiling(longest, q_THX.dtype)
    _varlen_attention_kernel[(triton.cdiv(longest, block_T), H, B)](
        q_THX,
        k_THX,
        v_THX,
        out_THX,
        starts_B1,
        scale * LOG2_E,
        H,
        X,
        q_THX.stride(0),
        q_THX.stride(1),
        k_THX.stride(0),
        k_THX.stride(1),
        v_THX.stride(0),
        v_THX.stride(1),
        BLOCK_T=block_T,
        BLOCK_S=block_S,
        BLOCK_X=next_power_of_2(max(X, 16)),
        WIDEN=widen(q_THX.dtype),
        num_warps=warps,
        num_stages=stages,
    )
    return out_THX
