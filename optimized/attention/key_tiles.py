"""Which tiles of keys a tile of queries has to visit.

By position: with queries from `lowest` to `highest`, keys from max(0, lowest - window + 1) to `highest`; a tile is
whole if each of the queries sees each of its keys, that is between highest - window + 1 and `lowest`. Tiles are aligned
to absolute positions, so that the words of a selection never straddle two.
"""

from optimized.kernels.common import tl, triton


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
