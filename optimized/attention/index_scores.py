"""The indexer's scores: how much each query would like to attend to each key before it.

score[t, s] = J^-½ Σ_i w[t, i] · relu(<q[t, i], k[s]>)        for s ≤ position of t

A program takes up to BLOCK_T queries of one request and every `splits`-th tile of its keys, read through the block
table. A tile of keys times all heads of these queries is one product; ReLU, weights and the sum over heads follow in
registers, in float32, and J^-½ > 0 is applied to the sum. So each key is read once for BLOCK_T queries. What lies
behind a query's position is neither read nor written; programs without work end at once, wherever S ends.
Measured on an H200, bfloat16, context 32768, cold cache: 9 / 48 / 153 / 538 us for 1 / 16 / 64 / 256 rows of as many
requests (the bytes alone take 2 / 29 / 116 / 465), and 263 for a prompt of 4096 (the products: 174), of which the
quarter up to position 2048 is left out where nobody looks at the scores.
Assumed: the rows of a run belong to one request; all J lanes are dense. Source: text_model specification, section 7.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, dot, next_power_of_2, tile, tl, triton, widen

# T query tokens  S key tokens  I index heads  J index head dim  B requests  P pages of a request  M = T x I of a tile

# Programs of one query that run at the same time: four for each multiprocessor, 49 KB of tiles each.
RESIDENT = 132 * 4


@triton.jit
def _index_scores_kernel(
    query, query_row, query_head, weights, weights_row, pool, page_stride, key_stride, table, table_row, requests,
    positions, run_starts, out, out_row, runs, tiles, splits, table_pages, unscored, scale,
    HEADS: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, HAS_RUNS: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0) % splits
    run = tl.program_id(0) // splits % runs
    # The last queries of a run see most keys: they start first.
    tile_of_run = tiles - 1 - tl.program_id(0) // splits // runs
    if HAS_RUNS:
        first = tl.load(run_starts + run).to(tl.int64)
        end = tl.load(run_starts + run + 1).to(tl.int64)
    else:
        first, end = run.to(tl.int64), run.to(tl.int64) + 1
    first += tile_of_run * BLOCK_T
    t_T = first + tl.arange(0, BLOCK_T)
    position_T = tl.load(positions + t_T, mask=t_T < end, other=-1)
    position_T = tl.where(position_T >= unscored, position_T, -1)
    last = tl.max(position_T)
    # What does not hang on positions is on its way together with them: a cold row waits for each load in turn.
    pages = table + tl.load(requests + first, mask=first < end, other=0).to(tl.int64) * table_row
    m_M = tl.arange(0, BLOCK_T * BLOCK_I)
    t_M, i_M = first + m_M // BLOCK_I, m_M % BLOCK_I
    is_head_M = (t_M < end) & (i_M < HEADS)
    j_J = tl.arange(0, BLOCK_J)
    is_lane_J = j_J < LANES
    query_MJ = tl.load(
        query + (t_M * query_row + i_M * query_head)[:, None] + j_J[None, :],
        mask=is_head_M[:, None] & is_lane_J[None, :],
        other=0,
    )
    weight_M = tl.load(weights + t_M * weights_row + i_M, mask=is_head_M, other=0)
    if split * BLOCK_S <= last:
        for start in range(split * BLOCK_S, last + 1, splits * BLOCK_S):
            s_S = start + tl.arange(0, BLOCK_S)
            is_key_S = s_S <= last
            page_S = tl.load(pages + s_S // PAGE, mask=s_S // PAGE < table_pages, other=0).to(tl.int64)
            key_SJ = tl.load(
                pool + (page_S * page_stride + s_S % PAGE * key_stride)[:, None] + j_J[None, :],
                mask=is_key_S[:, None] & is_lane_J[None, :],
                other=0,
            )
            dots_SM = dot(key_SJ, tl.trans(query_MJ), tl.zeros((BLOCK_S, BLOCK_T * BLOCK_I), tl.float32), WIDEN)
            terms_SM = tl.maximum(dots_SM, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight_M[None, :]
            scores_ST = tl.sum(tl.reshape(terms_SM, (BLOCK_S, BLOCK_T, BLOCK_I)), axis=2) * scale
            tl.store(out + (t_T * out_row)[None, :] + s_S[:, None], scores_ST, mask=s_S[:, None] <= position_T[None, :])


def tiling(runs: int, max_queries: int, block_I: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Queries and keys of a tile, programs that are wanted at the same time, warps and pipeline stages."""
    if dtype == torch.float32:
        return 1, 32, RESIDENT, 4, 2
    block_T = min(next_power_of_2(max_queries), max(1, 256 // block_I))
    if block_T > 1:
        # A prompt of 4096 took 263 us with two stages, 293 with four.
        return block_T, 64, RESIDENT, 8, 2
    return 1, 64, RESIDENT, 4, 5 if runs >= 64 else 4


def index_scores_torch(
    query_TIJ: Tensor,
    head_weights_TI: Tensor,
    index_pool: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    positions_T: Tensor,
    out_TS: Tensor,
    query_start_B1: Tensor | None = None,
    max_queries: int = 1,
    unscored: int = 0,
) -> Tensor:
    wide = torch.promote_types(query_TIJ.dtype, torch.float32)
    page_size, J = index_pool.shape[1:]
    for t, (request, position) in enumerate(zip(request_T.tolist(), positions_T.tolist(), strict=True)):
        count = position + 1 if position >= unscored else 0
        s_S = torch.arange(count, device=query_TIJ.device)
        key_SJ = index_pool[block_table_BP[request, s_S // page_size].long(), s_S % page_size].to(wide)
        dots_IS = query_TIJ[t].to(wide) @ key_SJ.T * J**-0.5
        out_TS[t, :count] = head_weights_TI[t].to(wide) @ F.relu(dots_IS)
    return out_TS


def index_scores_triton(
    query_TIJ: Tensor,
    head_weights_TI: Tensor,
    index_pool: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    positions_T: Tensor,
    out_TS: Tensor,
    query_start_B1: Tensor | None = None,
    max_queries: int = 1,
    unscored: int = 0,
) -> Tensor:
    """Writes the scores of every query and the keys up to its position; leaves the rest of `out_TS` as it was.

    query_TIJ: rotated, float32 or bfloat16; head_weights_TI: float32, scaled by I^-½.
    index_pool: [pages, page size, J] of the query's dtype; key s of a request lies in row s % page size of page
    block_table_BP[request, s // page size] (int32).
    request_T, positions_T: int32; a negative position is a padding row, of which nothing is computed.
    out_TS: float32, S greater than every position; rows may lie further apart than S.
    query_start_B1: int32; rows query_start[b] to query_start[b + 1] belong to one request, are at most `max_queries`,
    and share what they read. Without it every row is on its own.
    `unscored`: rows at positions below it have no scores, since they take every key that they see.
    Returns out_TS. Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("query", query_TIJ, (None, None, None), torch.float32, torch.bfloat16)
    T, heads, J = query_TIJ.shape
    check_tensor("head_weights", head_weights_TI, (T, heads), torch.float32)
    check_tensor("index_pool", index_pool, (None, None, J), query_TIJ.dtype)
    check_tensor("block_table", block_table_BP, (None, None), torch.int32)
    check_tensor("request", request_T, (T,), torch.int32)
    check_tensor("positions", positions_T, (T,), torch.int32)
    check_tensor("out", out_TS, (T, None), torch.float32)
    runs = T
    if query_start_B1 is not None:
        check_tensor("query_start", query_start_B1, (None,), torch.int32)
        runs = len(query_start_B1) - 1
    elif max_queries != 1:
        raise KernelInputError(f"max_queries={max_queries} needs query_start_B1, which says where runs of rows begin")
    S, page_size = out_TS.shape[1], index_pool.shape[1]
    if not runs or not max_queries or not S:
        return out_TS
    BLOCK_I = tile(heads)
    BLOCK_T, BLOCK_S, resident, warps, stages = tiling(runs, max_queries, BLOCK_I, query_TIJ.dtype)
    tiles = triton.cdiv(max_queries, BLOCK_T)
    splits = min(triton.cdiv(S, BLOCK_S), triton.cdiv(resident, runs * tiles))
    _index_scores_kernel[(runs * tiles * splits,)](
        query_TIJ, query_TIJ.stride(0), query_TIJ.stride(1), head_weights_TI, head_weights_TI.stride(0),
        index_pool, index_pool.stride(0), index_pool.stride(1), block_table_BP, block_table_BP.stride(0), request_T,
        positions_T, query_start_B1, out_TS, out_TS.stride(0), runs, tiles, splits, block_table_BP.shape[1], unscored,
        J**-0.5, HEADS=heads, LANES=J, PAGE=page_size, HAS_RUNS=query_start_B1 is not None,
        WIDEN=widen(query_TIJ.dtype), BLOCK_T=BLOCK_T, BLOCK_I=BLOCK_I, BLOCK_J=tile(J), BLOCK_S=BLOCK_S,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_TS
