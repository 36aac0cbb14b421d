"""Which tiles of keys the queries of a tile have selected, and the selection as the attention kernel wants to read it.

A tile of keys is whole if every query selected every key of it, partly selected if any query selected any, else left
out. Only what a query sees by position counts: the bits of later keys, of those behind a window, and of those outside
of the request are cleared here, once for all heads, so that the attention kernel compares no positions.

The bits of a partly selected tile are dealt out again. Of a row of a product's result on tensor cores, each of four
neighbouring threads holds two keys of every eight; so word j of a query and a tile has the bits of the keys s with
s / 2 % 4 = j, in order, and a thread finds those of all its keys in one word:

word (s >> 1) & 3, bit (s >> 3) * 2 + (s & 1), for s = 0 .. BLOCK_S - 1 with BLOCK_S at most 128
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimized.attention.key_tiles import key_tiles
from optimized.kernels.common import tile, tl, triton

# T query tokens  B requests  W words of 32 selection bits


class SelectedTiles(NamedTuple):
    """Lists for each tile of queries of each request, one line each; all int32.

    whole, part: numbers of tiles of keys, ascending, [lines, most]; dealt: the words of partly selected ones,
    [lines, most, 4, block_T]; counts: how many there are of both, [lines, 2]. The rest is not written.
    """

    whole: Tensor
    part: Tensor
    dealt: Tensor
    counts: Tensor


# What a kernel takes where there is no selection.
NO_TILES = (None, None, None, None)


@triton.jit
def _seen_bits(selection, selection_query, words, query, is_query, positions, word, first_position, keys, window):
    """The words `word` of queries, without the bits of keys that they do not see: [queries, words]."""
    position = tl.load(positions + query, mask=is_query, other=-1)
    bits = tl.load(
        selection + query.to(tl.int64)[:, None] * selection_query + word[None, :],
        mask=is_query[:, None] & (word < words)[None, :],
        other=0,
    )
    seen_from = tl.maximum(first_position, position - window + 1)[:, None]
    seen_to = tl.minimum(first_position + keys, position + 1)[:, None]
    below = tl.minimum(tl.maximum(seen_from - word[None, :] * 32, 0), 32)
    upto = tl.minimum(tl.maximum(seen_to - word[None, :] * 32, 0), 32)
    # A shift by 32 is not defined.
    is_below = tl.where(below == 32, -1, (1 << (below & 31)) - 1)
    is_upto = tl.where(upto == 32, -1, (1 << (upto & 31)) - 1)
    return bits & is_upto & ~is_below


@triton.jit
def _selected_tiles_kernel(
    selection, positions, query_start, key_start, first_key, whole, part, counts, window, words, most_tiles,
    selection_query, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_TILES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """See `list_selected_tiles`."""
    request = tl.program_id(1)
    first_query = tl.load(query_start + request) + tl.program_id(0) * BLOCK_T
    end_query = tl.minimum(tl.load(query_start + request + 1), first_query + BLOCK_T)
    if first_query < end_query:
        keys = tl.load(key_start + request + 1) - tl.load(key_start + request)
        first_position = tl.load(first_key + request)
        first, _, _, end = key_tiles(positions, first_query, end_query, first_position, keys, window, BLOCK_T, BLOCK_S)
        WORDS: tl.constexpr = BLOCK_S // 32
        line = (request * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        wholes, parts = 0, 0
        for start in range(first, end, BLOCK_TILES):
            word = start * WORDS + tl.arange(0, BLOCK_TILES * WORDS)
            any_W = tl.zeros([BLOCK_TILES * WORDS], tl.int32)
            all_W = tl.full([BLOCK_TILES * WORDS], 1, tl.int32)
            for row in range(first_query, end_query, BLOCK_ROWS):
                query = row + tl.arange(0, BLOCK_ROWS)
                is_query = query < end_query
                bits = _seen_bits(
                    selection, selection_query, words, query, is_query, positions, word, first_position, keys, window
                )
                any_W = tl.maximum(any_W, tl.max((bits != 0).to(tl.int32), axis=0))
                all_W = tl.minimum(all_W, tl.min(tl.where(is_query[:, None], (bits == -1).to(tl.int32), 1), axis=0))
            tile_index = start + tl.arange(0, BLOCK_TILES)
            is_any = tl.max(tl.reshape(any_W, [BLOCK_TILES, WORDS]), axis=1)
            is_whole = tl.min(tl.reshape(all_W, [BLOCK_TILES, WORDS]), axis=1)
            is_part = is_any - is_whole
            whole_place = wholes + tl.cumsum(is_whole, axis=0) - 1
            part_place = parts + tl.cumsum(is_part, axis=0) - 1
            tl.store(whole + line * most_tiles + whole_place, tile_index, mask=is_whole > 0)
            tl.store(part + line * most_tiles + part_place, tile_index, mask=is_part > 0)
            wholes += tl.sum(is_whole)
            parts += tl.sum(is_part)
        tl.store(counts + line * 2, wholes)
        tl.store(counts + line * 2 + 1, parts)


@triton.jit
def _deal_bits_kernel(
    selection, positions, query_start, key_start, first_key, part, dealt, counts, window, words, most_tiles,
    selection_query, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program for a partly selected tile of keys of a tile of queries."""
    request = tl.program_id(2)
    line = (request * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    first_query = tl.load(query_start + request) + tl.program_id(1) * BLOCK_T
    end_query = tl.load(query_start + request + 1)
    parts = tl.load(counts + line * 2 + 1, mask=first_query < end_query, other=0)
    if tl.program_id(0) < parts:
        place = line * most_tiles + tl.program_id(0)
        key_tile = tl.load(part + place)
        keys = tl.load(key_start + request + 1) - tl.load(key_start + request)
        lane_T = tl.arange(0, BLOCK_T)
        lane_J = tl.arange(0, 4)
        query = first_query + lane_T
        dealt_TJ = tl.zeros([BLOCK_T, 4], tl.int32)
        for w in tl.static_range(BLOCK_S // 32):
            word = key_tile * (BLOCK_S // 32) + w + tl.zeros([1], tl.int32)
            bits_T1 = _seen_bits(
                selection, selection_query, words, query, query < end_query, positions, word,
                tl.load(first_key + request), keys, window,
            )  # fmt: skip
            for i in tl.static_range(4):
                dealt_TJ |= (bits_T1 >> (8 * i + 2 * lane_J)[None, :] & 3) << (8 * w + 2 * i)
        # The words of one j side by side for all queries.
        tl.store(dealt + (place * 4 + lane_J)[None, :] * BLOCK_T + lane_T[:, None], dealt_TJ)


def list_selected_tiles(
    selection_TW: Tensor,
    positions_T: Tensor,
    query_start_B1: Tensor,
    key_start_B1: Tensor,
    first_key_B: Tensor,
    window: int,
    query_tiles: int,
    block_T: int,
    block_S: int,
) -> SelectedTiles:
    """What the attention kernels read of a selection, for each of `query_tiles` tiles of each request."""
    B, W = len(first_key_B), selection_TW.shape[1]
    most = triton.cdiv(W * 32, block_S)

    def workspace(*shape: int) -> Tensor:
        return torch.empty(B * query_tiles, *shape, dtype=torch.int32, device=selection_TW.device)

    whole, part, counts, dealt = workspace(most), workspace(most), workspace(2), workspace(most, 4, block_T)
    sizes = (window, W, most, selection_TW.stride(0))
    _selected_tiles_kernel[(query_tiles, B)](
        selection_TW, positions_T, query_start_B1, key_start_B1, first_key_B, whole, part, counts, *sizes,
        BLOCK_T=block_T, BLOCK_S=block_S, BLOCK_TILES=tile(most, smallest=1, largest=64), BLOCK_ROWS=min(32, block_T),
    )  # fmt: skip
    _deal_bits_kernel[(most, query_tiles, B)](
        selection_TW, positions_T, query_start_B1, key_start_B1, first_key_B, part, dealt, counts, *sizes,
        BLOCK_T=block_T, BLOCK_S=block_S,
    )  # fmt: skip
    return SelectedTiles(whole, part, dealt, counts)
