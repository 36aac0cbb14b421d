"""Which tiles of keys a tile of queries has to visit.

By position: with queries from `lowest` to `highest`, keys from max(0, lowest - window + 1) to `highest`; a tile is
whole if each of the queries sees each of its keys, that is between highest - window + 1 and `lowest`. Tiles are aligned
to absolute positions, so that the words of a selection never straddle two.

By selection: tiles with a bit set for any of the queries. One program a tile of queries lists them, and copies their
words so that those of 128 queries lie side by side; every head of the attention kernel then reads the copy.
"""

import torch
from torch import Tensor

from optimized.kernels.common import tile, tl, triton

# T query tokens  B requests  W words of 32 selection bits


@triton.jit
def key_tiles(
    positions, first_query, end_query, first_position, keys, window, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Tiles of keys that a tile of queries sees, as (first, first whole, end of the whole ones, end).

    A whole tile is seen by each of the queries.
    """
    query = first_query + tl.arange(0, BLOCK_T)
    is_query = query < end_query
    highest = tl.max(tl.load(positions + query, mask=is_query, other=-1))
    lowest = tl.min(tl.load(positions + query, mask=is_query, other=2147483647))
    last_key = first_position + keys - 1
    seen_from = tl.maximum(first_position, lowest - window + 1)
    whole_from = tl.maximum(first_position, highest - window + 1)
    first = seen_from // BLOCK_S
    end = tl.maximum(first, tl.cdiv(tl.minimum(highest, last_key) + 1, BLOCK_S))
    first_whole = tl.minimum(tl.cdiv(whole_from, BLOCK_S), end)
    end_whole = tl.minimum(tl.maximum((tl.minimum(lowest, last_key) + 1) // BLOCK_S, first_whole), end)
    return first, first_whole, end_whole, end


@triton.jit
def _selected_tiles_kernel(
    selection,
    positions,
    query_start,
    key_start,
    first_key,
    tiles,
    selected_words,
    counts,
    window,
    words,
    most_tiles,
    selection_query,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """See `list_selected_tiles`."""
    request = tl.program_id(1)
    first_query = tl.load(query_start + request) + tl.program_id(0) * BLOCK_T
    end_query = tl.minimum(tl.load(query_start + request + 1), first_query + BLOCK_T)
    if first_query < end_query:
        key_begin = tl.load(key_start + request)
        keys = tl.load(key_start + request + 1) - key_begin
        first, first_whole, end_whole, end = key_tiles(
            positions, first_query, end_query, tl.load(first_key + request), keys, window, BLOCK_T, BLOCK_S
        )
        WORDS: tl.constexpr = BLOCK_S // 32
        line = (request * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        before_whole, before_end, count = 0, 0, 0
        for start in range(first, end, BLOCK_TILES):
            word = start * WORDS + tl.arange(0, BLOCK_TILES * WORDS)
            any_W = tl.zeros([BLOCK_TILES * WORDS], tl.int32)
            all_W = tl.full([BLOCK_TILES * WORDS], 1, tl.int32)
            for row in range(first_query, end_query, BLOCK_ROWS):
                query = row + tl.arange(0, BLOCK_ROWS)
                is_query = (query < end_query)[:, None]
                bits = tl.load(
                    selection + query.to(tl.int64)[:, None] * selection_query + word[None, :],
                    mask=is_query & (word < words)[None, :],
                    other=0,
                )
                any_W = tl.maximum(any_W, tl.max((bits != 0).to(tl.int32), axis=0))
                all_W = tl.minimum(all_W, tl.min(tl.where(is_query, (bits == -1).to(tl.int32), 1), axis=0))
            tile_index = start + tl.arange(0, BLOCK_TILES)
            live = tl.max(tl.reshape(any_W, [BLOCK_TILES, WORDS]), axis=1)
            live = tl.where(tile_index < end, live, 0)
            is_all = tl.min(tl.reshape(all_W, [BLOCK_TILES, WORDS]), axis=1)
            place = count + tl.cumsum(live, axis=0) - 1
            tl.store(tiles + line * most_tiles + place, tile_index * 2 + is_all, mask=live > 0)
            # One line of queries for each word of a listed tile.
            word_line = (line * most_tiles + place)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
            word_line = tl.reshape(word_line, [BLOCK_TILES * WORDS])
            is_listed = tl.reshape(tl.broadcast_to((live > 0)[:, None], [BLOCK_TILES, WORDS]), [BLOCK_TILES * WORDS])
            for row in range(0, BLOCK_T, BLOCK_ROWS):
                lane = row + tl.arange(0, BLOCK_ROWS)
                query = first_query + lane
                bits = tl.load(
                    selection + query.to(tl.int64)[:, None] * selection_query + word[None, :],
                    mask=(query < end_query)[:, None] & (word < words)[None, :],
                    other=0,
                )
                tl.store(selected_words + word_line[None, :] * BLOCK_T + lane[:, None], bits, mask=is_listed[None, :])
            before_whole += tl.sum(tl.where(tile_index < first_whole, live, 0))
            before_end += tl.sum(tl.where(tile_index < end_whole, live, 0))
            count += tl.sum(live)
        tl.store(counts + line * 3, before_whole)
        tl.store(counts + line * 3 + 1, before_end)
        tl.store(counts + line * 3 + 2, count)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """What the attention kernel reads of a selection, for each of `query_tiles` tiles of each request; all int32.

    Returns: tiles [B * query_tiles, most], ascending, each 2 · index + (1 if all of its keys are selected by all
    queries); their words [B * query_tiles, most, block_S / 32, block_T]; and counts [B * query_tiles, 3]: tiles before
    the first whole one, before the end of the whole ones, and in all.
    """
    B, W = len(first_key_B), selection_TW.shape[1]
    most_tiles = triton.cdiv(W * 32, block_S)

    def workspace(*shape: int) -> Tensor:
        return torch.empty(B * query_tiles, *shape, dtype=torch.int32, device=selection_TW.device)

    tiles, counts = workspace(most_tiles), workspace(3)
    selected_words = workspace(most_tiles, block_S // 32, block_T)
    _selected_tiles_kernel[(query_tiles, B)](
        selection_TW,
        positions_T,
        query_start_B1,
        key_start_B1,
        first_key_B,
        tiles,
        selected_words,
        counts,
        window,
        W,
        most_tiles,
        selection_TW.stride(0),
        BLOCK_T=block_T,
        BLOCK_S=block_S,
        BLOCK_TILES=tile(most_tiles, smallest=1, largest=64),
        BLOCK_ROWS=min(32, block_T),
    )
    return tiles, selected_words, counts
