"""Expanded attention of a ragged batch: the prefill core of both layer kinds.

score[t, h, s] = scale · (<q_nope[t, h], k_nope[s, h]> + <q_rope[t, h], k_rope[s]>)      over the keys that t sees
core[t, h]     = Σ_s softmax_s(score)[t, h, s] · v[s, h]

A query at position t sees the keys s <= t of its request, s > t - window if there is a window, and of those only the
selected ones if there is a selection: one bit for each absolute position. One program takes a tile of queries of one
request and one head, and goes through the tiles of keys (aligned to absolute positions) with an online softmax. The
range of key tiles follows from the queries' positions (`key_tiles`); tiles that every query sees whole skip the masks,
and of a selection only the tiles with a bit set are visited, whole ones first (`selected_tiles`). Keys and values are
read where the expansion left them, side by side; the rope key is shared by the heads; V is not padded to N + R.

Float32 scores and sums; a tile of probabilities is rounded to the value's dtype. Every key row of a request has been
written. Source: text_model specification, sections 8, 9 and 15.

H200, bfloat16, released geometry, one prompt, replay of a CUDA graph with a cold cache, µs: sliding layers 337 at 4096
tokens, 1331 at 16384 (floor 123, 515); full layers at 4096 tokens 1481, with a random selection of 2048 keys 1980
(floor 870). Bound by the softmax, which the products wait for: both warpgroups make their scores at the same time, and
then their weights. Without effect, 2026-11-29, full layers at 4096 tokens, dense and selected, beside 1576 and 2148 in
that run: a loop of its own for whole tiles (1654, 2149), tiles fetched by descriptors made in the kernel, of 64 keys
(1553, 2143) and of 128 with half the instructions a key (1805, 2075); for sliding layers descriptors took 500.
Where `pipelined` accepts the tensors its kernel is taken: the same steps in another order, the same places of rounding.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from optimized.attention.key_tiles import key_tiles
from optimized.attention.pipelined import attend_pipelined, pipelined_tiling, takes_pipelined
from optimized.attention.selected_tiles import NO_TILES, list_selected_tiles
from optimized.kernels.common import check_tensor, dot, next_power_of_2, round_to, tile, tl, triton, widen

# T query tokens  S key tokens  H heads  N nope dim  R rope dim  V value dim  X = N + R  Y = N + V  B requests
# W words of 32 selection bits

LOG2_E = math.log2(math.e)
NO_WINDOW = 2**31 - 1


@triton.jit
def _expanded_attention_kernel(
    q,
    kv,
    k_rope,
    core,
    query_start,
    key_start,
    positions,
    first_key,
    whole,
    part,
    dealt,
    counts,
    scale_log2,
    window,
    H,
    most_tiles,
    q_query,
    q_head,
    kv_key,
    kv_head,
    rope_key,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # The last tiles of a request see the most keys and start first.
    query_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, request = tl.program_id(1), tl.program_id(2)
    first_query = tl.load(query_start + request) + query_tile * BLOCK_T
    end_query = tl.load(query_start + request + 1)
    if first_query < end_query:
        query = first_query + tl.arange(0, BLOCK_T)
        is_query = query < end_query
        key_begin = tl.load(key_start + request)
        keys = tl.load(key_start + request + 1) - key_begin
        first_position = tl.load(first_key + request)
        position_T = tl.load(positions + query, mask=is_query, other=-1)

        lane_N = tl.arange(0, BLOCK_N)
        lane_R = tl.arange(0, BLOCK_R)
        lane_V = tl.arange(0, BLOCK_V)
        q_rows = q + query.to(tl.int64) * q_query + head.to(tl.int64) * q_head
        q_TN = tl.load(q_rows[:, None] + lane_N[None, :], mask=is_query[:, None] & (lane_N < N)[None, :], other=0.0)
        q_TR = tl.load(
            q_rows[:, None] + N - REST + lane_R[None, :],
            mask=is_query[:, None] & (lane_R < REST + R)[None, :],
            other=0.0,
        )
        kv += key_begin.to(tl.int64) * kv_key + head.to(tl.int64) * kv_head
        k_rope += key_begin.to(tl.int64) * rope_key

        first, first_whole, end_whole, end = key_tiles(
            positions, first_query, end_query, first_position, keys, window, BLOCK_T, BLOCK_S
        )
        if HAS_SELECTION:
            line = (request * tl.num_programs(0) + query_tile).to(tl.int64)
            whole += line * most_tiles
            part += line * most_tiles
            dealt += line * most_tiles * (4 * BLOCK_T)
            first, first_whole = 0, 0
            end_whole = tl.load(counts + line * 2)
            end = end_whole + tl.load(counts + line * 2 + 1)
            next_tile = tl.load(tl.where(end_whole > 0, whole, part), mask=end > 0, other=0)

        highest_T = tl.full([BLOCK_T], float("-inf"), tl.float32)
        total_T = tl.zeros([BLOCK_T], tl.float32)
        core_TV = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        lane_S = tl.arange(0, BLOCK_S)
        for index in range(first, end):
            key_tile = index
            if HAS_SELECTION:
                key_tile = next_tile
                # Loaded one round ahead: all addresses of a round hang on it.
                next_index = tl.minimum(index + 1, end - 1)
                next_tile = tl.load(tl.where(next_index < end_whole, whole + next_index, part + next_index - end_whole))
            first_of_tile = key_tile * BLOCK_S
            row = (first_of_tile - first_position + lane_S).to(tl.int64)
            # Keys outside of the request are zeros, not only weightless: 0 x NaN is NaN.
            is_key = ((row >= 0) & (row < keys))[:, None]
            kv_rows = kv + row * kv_key
            rest_lanes = (k_rope + row * rope_key)[:, None] + (lane_R - REST)[None, :]
            if REST > 0:
                rest_lanes = tl.where(
                    (lane_R < REST)[None, :], kv_rows[:, None] + (BLOCK_N + lane_R)[None, :], rest_lanes
                )
            k_SN = tl.load(kv_rows[:, None] + lane_N[None, :], mask=is_key & (lane_N < N)[None, :], other=0.0)
            k_SR = tl.load(rest_lanes, mask=is_key & (lane_R < REST + R)[None, :], other=0.0)
            v_SV = tl.load(kv_rows[:, None] + N + lane_V[None, :], mask=is_key & (lane_V < V)[None, :], other=0.0)
            score_TS = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
            score_TS = dot(q_TR, tl.trans(k_SR), dot(q_TN, tl.trans(k_SN), score_TS, WIDEN), WIDEN)
            if (index < first_whole) | (index >= end_whole):
                if HAS_SELECTION:
                    words = dealt + (index - end_whole) * (4 * BLOCK_T) + tl.arange(0, BLOCK_T)
                    pair_S = (lane_S >> 1) & 3
                    word0_T, word2_T = tl.load(words), tl.load(words + 2 * BLOCK_T)
                    word1_T, word3_T = tl.load(words + BLOCK_T), tl.load(words + 3 * BLOCK_T)
                    even_TS = tl.where((pair_S == 0)[None, :], word0_T[:, None], word2_T[:, None])
                    odd_TS = tl.where((pair_S == 1)[None, :], word1_T[:, None], word3_T[:, None])
                    bits_TS = tl.where((pair_S & 1 == 0)[None, :], even_TS, odd_TS)
                    bit_S = 1 << ((lane_S >> 3) * 2 + (lane_S & 1))
                    score_TS = tl.where(bits_TS & bit_S[None, :] != 0, score_TS, float("-inf"))
                else:
                    # One comparison for both ends: what lies ahead is negative, and so is larger than any window.
                    key_S = first_of_tile + lane_S
                    key_S = tl.where((key_S >= first_position) & (key_S - first_position < keys), key_S, 2147483647)
                    behind_TS = (position_T[:, None] - key_S[None, :]).to(tl.uint32, bitcast=True)
                    score_TS = tl.where(behind_TS < window, score_TS, float("-inf"))
            new_highest_T = tl.maximum(highest_T, tl.max(score_TS, axis=1))
            # Before the first key that is seen the maximum is -inf, and -inf - -inf would be NaN.
            base_T = tl.where(new_highest_T == float("-inf"), 0.0, new_highest_T) * scale_log2
            weight_TS = tl.exp2(score_TS * scale_log2 - base_T[:, None])
            decay_T = tl.exp2(highest_T * scale_log2 - base_T)
            total_T = total_T * decay_T + tl.sum(weight_TS, axis=1)
            if not WIDEN:
                weight_TS = weight_TS.to(v_SV.dtype)
            core_TV = dot(weight_TS, v_SV, core_TV * decay_T[:, None], WIDEN)
            highest_T = new_highest_T
        core_TV = core_TV / tl.where(total_T > 0.0, total_T, 1.0)[:, None]
        row = query.to(tl.int64) * H + head
        tl.store(
            core + row[:, None] * V + lane_V[None, :],
            round_to(core_TV, core),
            mask=is_query[:, None] & (lane_V < V)[None, :],
        )


def tiling(max_queries: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps and pipeline stages."""
    if dtype == torch.float32:
        return tile(max_queries, largest=16), 32, 4, 1
    block_T = tile(max_queries, largest=128)
    return block_T, 64, 8 if block_T == 128 else 4, 3


def key_blocks(N: int, R: int) -> tuple[int, int, int]:
    """Two powers of two that cover a key: BLOCK_N nope lanes, and BLOCK_R for the REST of them and the rope lanes.

    N = 192, R = 64 is 128 and 64 + 64. Returns BLOCK_N, BLOCK_R, REST.
    """
    whole = next_power_of_2(max(N, 16))
    half = whole // 2
    mixed = next_power_of_2(max(N - half + R, 16))
    rope = next_power_of_2(max(R, 16))
    if half >= 16 and half + mixed < whole + rope:
        return half, mixed, N - half
    return whole, rope, 0


def expanded_attention_torch(
    q_THX: Tensor,
    kv_SHY: Tensor,
    k_rope_SR: Tensor,
    query_start_B1: Tensor,
    key_start_B1: Tensor,
    positions_T: Tensor,
    first_key_B: Tensor,
    window: int | None,
    selection_TW: Tensor | None,
    scale: float,
    N: int,
    max_queries: int,
) -> Tensor:
    wide = torch.promote_types(q_THX.dtype, torch.float32)
    T, H, _ = q_THX.shape
    core_THV = torch.empty(T, H, kv_SHY.shape[-1] - N, dtype=q_THX.dtype, device=q_THX.device)
    requests = zip(
        pairwise(query_start_B1.tolist()), pairwise(key_start_B1.tolist()), first_key_B.tolist(), strict=True
    )
    for (query, end_query), (first_row, end_row), first_key in requests:
        q_nope_THN, q_rope_THR = q_THX[query:end_query].to(wide).split((N, q_THX.shape[-1] - N), dim=-1)
        k_nope_SHN, v_SHV = kv_SHY[first_row:end_row].to(wide).split((N, kv_SHY.shape[-1] - N), dim=-1)
        score_HTS = torch.einsum("thn,shn->hts", q_nope_THN, k_nope_SHN)
        score_HTS = score_HTS + torch.einsum("thr,sr->hts", q_rope_THR, k_rope_SR[first_row:end_row].to(wide))
        key_S = first_key + torch.arange(end_row - first_row, device=q_THX.device)
        position_T1 = positions_T[query:end_query, None]
        is_seen_TS = key_S <= position_T1
        if window is not None:
            is_seen_TS &= key_S > position_T1 - window
        if selection_TW is not None:
            word_S = (key_S // 32).clamp(max=selection_TW.shape[1] - 1)
            is_seen_TS &= (selection_TW[query:end_query][:, word_S] >> (key_S % 32)) & 1 == 1
        score_HTS = (score_HTS * scale).masked_fill(~is_seen_TS, float("-inf"))
        weight_HTS = score_HTS.softmax(-1).masked_fill(~is_seen_TS.any(-1, keepdim=True), 0.0)
        core_THV[query:end_query] = torch.einsum("hts,shv->thv", weight_HTS, v_SHV).to(q_THX.dtype)
    return core_THV


def expanded_attention_triton(
    q_THX: Tensor,
    kv_SHY: Tensor,
    k_rope_SR: Tensor,
    query_start_B1: Tensor,
    key_start_B1: Tensor,
    positions_T: Tensor,
    first_key_B: Tensor,
    window: int | None,
    selection_TW: Tensor | None,
    scale: float,
    N: int,
    max_queries: int,
) -> Tensor:
    """Queries of several requests against the expanded keys and values of each.

    q_THX: float32 or bfloat16, each head [nope N | rope R], rotated; kv_SHY of that dtype, each head [key N | value V];
    k_rope_SR of that dtype, rotated, any row stride. Request b has the query rows query_start_B1[b] to [b + 1] and the
    key rows key_start_B1[b] to [b + 1], of which the first has position first_key_B[b] and each next one more;
    positions_T: position of each query, all int32. `window`: how many keys a query sees, itself counted, or None.
    selection_TW: int32, bit s % 32 of word s // 32 set where the query may see position s, for all positions of the
    batch; or None for all.
    `max_queries`: at least the longest request's query rows.
    Returns: core_THV in that dtype, dense; zeros where a query sees nothing. Scores and sums are float32.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("q", q_THX, (None, None, None), torch.float32, torch.bfloat16)
    T, H, X = q_THX.shape
    check_tensor("kv", kv_SHY, (None, H, None), q_THX.dtype)
    S, _, Y = kv_SHY.shape
    R, V = X - N, Y - N
    check_tensor("k_rope", k_rope_SR, (S, R), q_THX.dtype)
    check_tensor("first_key", first_key_B, (None,), torch.int32)
    (B,) = first_key_B.shape
    check_tensor("query_start", query_start_B1, (B + 1,), torch.int32)
    check_tensor("key_start", key_start_B1, (B + 1,), torch.int32)
    check_tensor("positions", positions_T, (T,), torch.int32)
    core_THV = torch.empty(T, H, V, dtype=q_THX.dtype, device=q_THX.device)
    if T == 0 or B == 0:
        return core_THV
    if selection_TW is not None:
        check_tensor("selection", selection_TW, (T, None), torch.int32)
    farthest = NO_WINDOW if window is None else window
    is_pipelined = takes_pipelined(q_THX, kv_SHY, k_rope_SR, N, max_queries)
    block_T, block_S, warps, stages = tiling(max_queries, q_THX.dtype)
    if is_pipelined:
        block_T, block_S = pipelined_tiling(X)
    query_tiles = triton.cdiv(max_queries, block_T)
    selected = None
    if selection_TW is not None:
        selected = list_selected_tiles(
            selection_TW,
            positions_T,
            query_start_B1,
            key_start_B1,
            first_key_B,
            farthest,
            query_tiles,
            block_T,
            block_S,
        )
    ragged = (query_start_B1, key_start_B1, positions_T, first_key_B)
    if is_pipelined:
        attend_pipelined(
            q_THX, kv_SHY, k_rope_SR, core_THV, *ragged, selected, farthest, scale * LOG2_E, N, query_tiles
        )
        return core_THV
    block_N, block_R, rest = key_blocks(N, R)
    _expanded_attention_kernel[(query_tiles, H, B)](
        q_THX,
        kv_SHY,
        k_rope_SR,
        core_THV,
        *ragged,
        *(selected or NO_TILES),
        scale * LOG2_E,
        farthest,
        H,
        0 if selected is None else selected.whole.shape[1],
        q_THX.stride(0),
        q_THX.stride(1),
        kv_SHY.stride(0),
        kv_SHY.stride(1),
        k_rope_SR.stride(0),
        N=N,
        R=R,
        V=V,
        REST=rest,
        BLOCK_T=block_T,
        BLOCK_S=block_S,
        BLOCK_N=block_N,
        BLOCK_R=block_R,
        BLOCK_V=next_power_of_2(max(V, 16)),
        HAS_SELECTION=selected is not None,
        WIDEN=widen(q_THX.dtype),
        num_warps=warps,
        num_stages=stages,
    )
    return core_THV
