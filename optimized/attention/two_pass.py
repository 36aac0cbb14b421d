"""Absorbed attention in two kernels: first the weights of all keys, then the sums of the latents with them.

score[h, s] = scale · <q[h], row[s]>        out[h] = Σ_s softmax_s(score)[h, s] · (first C lanes of row[s])

Each is a matrix product with tiles that suit the tensor cores; the output of all heads at once would not fit the
registers of one program, and each row would be read by several programs in one pass as well. First, one program a
token and tile of keys: finds the rows, writes 2^(score - e), with e the tile's maximum rounded up to a whole number,
and the sum of these weights. Second, one program a token, block of lanes and part of the keys: the sum over tiles of
2^(e - e_part) · (weights · latents). Whole exponents make this scaling exact, and each weight is rounded once, to the
value's dtype. Few tokens are split over the keys, and the parts merged by `combine`. Sums are float32.

Runs for every size and dtype, on every GPU, and interpreted. Source: text_model specification, section 14.

H200, bfloat16, released geometry, replay of a CUDA graph with a cold cache (4.0 µs for one empty kernel), µs at B = 1,
16, 64, 256: 2048 selected rows 17, 51, 159, 557 (floor 0.7, 12, 46, 185); window of 513 rows 14, 26, 65, 244 (floor
0.3, 5, 19, 77). Bound by chains of dependent loads at B = 1; above, by the reads of rows and weights by both kernels:
at B = 256, 298 and 265 for the selected rows, 131 and 120 for the window. No other tiling of either was faster there.
"""

import math

import torch
from torch import Tensor

from optimized.attention.combine import merge_parts_triton
from optimized.kernels.common import (
    dot,
    next_power_of_2,
    overlap,
    round_to,
    tile,
    tl,
    triton,
    wait_for_inputs,
    widen,
)

# T query tokens  H heads  C kv latent  R rope dim  L row [C | R]  K keys of a token  B requests  P pages of a request

LOG2_E = math.log2(math.e)
MULTIPROCESSORS = 132


@triton.jit
def _weights_kernel(
    q,
    pool,
    position,
    block_table,
    group,
    offsets,
    weights,
    exponents,
    sums,
    scale_log2,
    H,
    K,
    L,
    tiles,
    rows_of_block,
    q_token,
    q_head,
    pool_block,
    pool_row,
    position_token,
    table_request,
    IS_PAGED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Writes offsets of rows [T, tiles * BLOCK_K], weights [T, H, tiles * BLOCK_K], exponents and sums [T, H, tiles].

    Offsets are in units of UNIT elements, -1 for no key. `group` is the request of a token in the paged pool, its ring
    in the other; a block is a page or a ring.
    """
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < H
    slot = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    first_block = tl.load(group + token).to(tl.int64)
    if IS_PAGED:
        key = tl.load(position + token * position_token + slot, mask=slot < K, other=-1)
        is_live = key >= 0
        page = tl.load(block_table + first_block * table_request + key // rows_of_block, mask=is_live, other=0)
        offset = page.to(tl.int64) * pool_block + (key % rows_of_block).to(tl.int64) * pool_row
    else:
        last = tl.load(position + token * position_token)
        key = tl.maximum(0, last - K + 1) + slot
        is_live = (key <= last) & (slot < K)
        offset = first_block * pool_block + (key % rows_of_block).to(tl.int64) * pool_row
    if tl.program_id(2) == 0:
        tl.store(offsets + token * (tiles * BLOCK_K) + slot, tl.where(is_live, offset // UNIT, -1))

    exponent_H = tl.full([BLOCK_H], float("-inf"), tl.float32)
    weight_HK = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
    if tl.max(is_live.to(tl.int32)) > 0:
        q_rows = q + token * q_token + head.to(tl.int64) * q_head
        rows = pool + offset
        score_HK = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
        for start in range(0, L, BLOCK_L):
            lane = start + tl.arange(0, BLOCK_L)
            q_HL = tl.load(q_rows[:, None] + lane[None, :], mask=is_head[:, None] & (lane < L)[None, :], other=0.0)
            row_KL = tl.load(rows[:, None] + lane[None, :], mask=is_live[:, None] & (lane < L)[None, :], other=0.0)
            score_HK = dot(q_HL, tl.trans(row_KL), score_HK, WIDEN)
        score_HK = tl.where(is_live[None, :], score_HK * scale_log2, float("-inf"))
        exponent_H = tl.ceil(tl.max(score_HK, axis=1))
        # Rounded before they are summed: the weights of a row, as they are used, then add up to one.
        weight_HK = round_to(tl.exp2(score_HK - exponent_H[:, None]), weights).to(tl.float32)
    row = token * H + head
    tl.store(weights + row[:, None] * (tiles * BLOCK_K) + slot[None, :], weight_HK, mask=is_head[:, None])
    tl.store(exponents + row * tiles + tl.program_id(1), exponent_H, mask=is_head)
    tl.store(sums + row * tiles + tl.program_id(1), tl.sum(weight_HK, axis=1), mask=is_head)


@triton.jit
def _values_kernel(
    offsets,
    weights,
    exponents,
    sums,
    pool,
    out,
    lse,
    T,
    H,
    C,
    tiles,
    tiles_of_part,
    head_blocks,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    UNIT: tl.constexpr,
    IS_PART: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [T, H, C]; with IS_PART that of each part [parts, T, H, C] and lse [parts, T, H], natural."""
    wait_for_inputs(OVERLAPS)
    # Tokens in reverse: the rows that the first kernel read last are still in the cache.
    token = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    lane = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.program_id(2) // head_blocks
    head = (tl.program_id(2) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < H
    row = token * H + head
    first_tile = part * tiles_of_part

    tile_T = tl.arange(0, BLOCK_TILES)
    is_tile = (tile_T < tiles_of_part) & (first_tile + tile_T < tiles)
    places = row[:, None] * tiles + (first_tile + tile_T)[None, :]
    exponent_HT = tl.load(exponents + places, mask=is_head[:, None] & is_tile[None, :], other=float("-inf"))
    sum_HT = tl.load(sums + places, mask=is_head[:, None] & is_tile[None, :], other=0.0)
    exponent_H = tl.max(exponent_HT, axis=1)
    # Without a live tile the maximum is -inf, and -inf - -inf would be NaN.
    exponent_H = tl.where(exponent_H > float("-inf"), exponent_H, 0.0)
    total_H = tl.sum(sum_HT * tl.exp2(exponent_HT - exponent_H[:, None]), axis=1)
    live_tiles = tl.max(tl.max(tl.where(exponent_HT > float("-inf"), tile_T[None, :] + 1, 0), axis=1))

    first_slot = token * (tiles * BLOCK_K) + first_tile * BLOCK_K + tl.arange(0, BLOCK_S)
    weight_rows = weights + row * (tiles * BLOCK_K) + first_tile * BLOCK_K
    next_exponent_H = tl.load(exponents + row * tiles + tl.minimum(first_tile, tiles - 1), mask=is_head, other=0.0)
    out_HC = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for start in range(0, live_tiles * BLOCK_K, BLOCK_S):
        offset = tl.load(offsets + first_slot + start)
        weight_HS = tl.load(
            weight_rows[:, None] + (start + tl.arange(0, BLOCK_S))[None, :], mask=is_head[:, None], other=0.0
        )
        # Rows of no key are zeros, not only weightless: 0 x NaN is NaN.
        latent_SC = tl.load(
            pool + (offset * UNIT)[:, None] + lane[None, :],
            mask=(offset >= 0)[:, None] & (lane < C)[None, :],
            other=0.0,
        )
        tile_HC = dot(weight_HS, latent_SC, tl.zeros([BLOCK_H, BLOCK_C], tl.float32), WIDEN)
        out_HC += tile_HC * tl.exp2(next_exponent_H - exponent_H)[:, None]
        # Loaded ahead of its use: the pipeline covers only what the products read.
        next_tile = tl.minimum(first_tile + (start + BLOCK_S) // BLOCK_K, tiles - 1)
        next_exponent_H = tl.load(exponents + row * tiles + next_tile, mask=is_head, other=0.0)

    has_keys = total_H > 0.0
    out_HC = out_HC / tl.where(has_keys, total_H, 1.0)[:, None]
    out_row = part.to(tl.int64) * T * H + row
    tl.store(
        out + out_row[:, None] * C + lane[None, :], round_to(out_HC, out), mask=is_head[:, None] & (lane < C)[None, :]
    )
    if IS_PART and tl.program_id(0) == 0:
        lse_H = tl.where(has_keys, exponent_H + tl.log2(tl.where(has_keys, total_H, 1.0)), float("-inf"))
        # From base 2 to the natural logarithm.
        tl.store(lse + out_row, lse_H * 0.6931471805599453, mask=is_head)


def weights_tiling(T: int, H: int, K: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Heads, keys and lanes of a tile, warps and pipeline stages of the first kernel.

    Few tokens: small tiles on many multiprocessors, with long pipelines; many: large tiles, that read q less often.
    """
    if dtype == torch.float32:
        return tile(H, largest=16), tile(K, largest=32), 32, 4, 2
    block_H = tile(H, largest=64 if T <= 4 else 128)
    if block_H == 128:
        block_K, stages = (128, 6) if T <= 32 else (256, 4)
        return block_H, tile(K, largest=block_K), 64, 8, stages
    if T > 32:
        return block_H, tile(K), 64, 4, 3
    if K > 1024:
        return block_H, tile(K, largest=64), 64, 4, 8
    if T <= 4:
        # Less of q to read for each multiprocessor: it is longer than the rows of a tile.
        return tile(H, largest=16), tile(K, largest=32), 128, 4, 4
    return block_H, tile(K, largest=64), 64, 4, 6


def values_tiling(T: int, C: int, block_H: int, block_K: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Keys (a part of the first kernel's) and lanes of a tile, warps and pipeline stages of the second kernel."""
    if dtype == torch.float32:
        return min(block_K, 32), tile(C, largest=64), 4, 2
    if block_H == 16:
        # So few tokens that lanes and heads alone occupy the multiprocessors: no parts to merge.
        return min(block_K, 64), tile(C, largest=32), 4, 7
    block_C = tile(C, largest=64 if T <= 32 else 128)
    if block_H == 128:
        return min(block_K, 64), block_C, 8, 7
    return min(block_K, 64), block_C, 4, 7 if T <= 32 else 5


def parts_of(programs: int, tiles: int) -> int:
    """Into how many parts to split `tiles` tiles of keys, from shapes only: enough to give each multiprocessor one."""
    return max(1, min(MULTIPROCESSORS // programs, tiles // 2))


def attend_in_two_passes(
    q_THL: Tensor,
    pool: Tensor,
    position: Tensor,
    block_table: Tensor | None,
    group_T: Tensor,
    out_THC: Tensor,
    K: int,
    scale: float,
    splits: int | None,
) -> None:
    """Launches both kernels, and the merge of parts, for at most MOST_TOKENS tokens."""
    T, H, L = q_THL.shape
    C = out_THC.shape[-1]
    block_H, block_K, block_L, warps, stages = weights_tiling(T, H, K, q_THL.dtype)
    head_blocks, tiles = triton.cdiv(H, block_H), triton.cdiv(K, block_K)

    def workspace(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q_THL.device)

    # Offsets are kept in units, so that the second kernel knows by how much each is divisible.
    unit = math.gcd(pool.stride(0), pool.stride(1), 16)
    offset_TK = workspace(T, tiles * block_K, dtype=torch.int64)
    weight_THK = workspace(T, H, tiles * block_K, dtype=torch.float32 if widen(q_THL.dtype) else q_THL.dtype)
    exponents, sums = workspace(T, H, tiles), workspace(T, H, tiles)
    _weights_kernel[(T, tiles, head_blocks)](
        q_THL,
        pool,
        position,
        block_table,
        group_T,
        offset_TK,
        weight_THK,
        exponents,
        sums,
        scale * LOG2_E,
        H,
        K,
        L,
        tiles,
        pool.shape[1],
        q_THL.stride(0),
        q_THL.stride(1),
        pool.stride(0),
        pool.stride(1),
        position.stride(0),
        0 if block_table is None else block_table.stride(0),
        IS_PAGED=block_table is not None,
        UNIT=unit,
        BLOCK_H=block_H,
        BLOCK_K=block_K,
        BLOCK_L=block_L,
        WIDEN=widen(q_THL.dtype),
        num_warps=warps,
        num_stages=stages,
        **overlap(q_THL.device),
    )
    block_S, block_C, warps, stages = values_tiling(T, C, block_H, block_K, q_THL.dtype)
    lane_blocks = triton.cdiv(C, block_C)
    parts = splits or parts_of(T * head_blocks * lane_blocks, tiles)
    tiles_of_part = triton.cdiv(tiles, parts)
    out, lse_PTH = out_THC, None
    if parts > 1:
        out, lse_PTH = workspace(parts, T, H, C), workspace(parts, T, H)
    _values_kernel[(lane_blocks, T, parts * head_blocks)](
        offset_TK,
        weight_THK,
        exponents,
        sums,
        pool,
        out,
        lse_PTH,
        T,
        H,
        C,
        tiles,
        tiles_of_part,
        head_blocks,
        BLOCK_H=block_H,
        BLOCK_K=block_K,
        BLOCK_S=block_S,
        BLOCK_C=block_C,
        BLOCK_TILES=next_power_of_2(tiles_of_part),
        UNIT=unit,
        IS_PART=parts > 1,
        WIDEN=widen(q_THL.dtype),
        num_warps=warps,
        num_stages=stages,
        **overlap(q_THL.device),
    )
    if lse_PTH is not None:
        merge_parts_triton(out, lse_PTH, out=out_THC)
