"""The prefill core for Hopper: scores of the next tile of keys while the last one's values are still being added up.

For each tile i of keys, with P the weights of the tile before:

scores(i) = Q K(i)ᵀ and core += P V(i - 1) are started; once the scores are there, their softmax runs on the vector
units beside the second product; then core is rescaled and P replaced.

One program takes 128 queries of one request and one head, two warpgroups of 64 rows each. Q stays in shared memory, two
tiles of K and V lie there: the next is fetched, by descriptors of the whole matrices, as soon as both warpgroups have
read the one before the last. P goes from the registers of the one product to those of the other.
Whole tiles come first, so that masks are looked at in the last few tiles only, or in those that are partly selected,
where each thread reads one word of dealt bits for each of its two rows (`selected_tiles`).

Assumes bfloat16, rows aligned to 16 bytes, and lanes that are powers of two: N nope, E more of them (or none), R rope,
V value. Float32 scores and sums; a weight is rounded once, to bfloat16. Gluon has no interpreter: this kernel is tested
on the GPU only. Source: text_model specification, sections 8, 9 and 15; the order of steps is FlashAttention-3's
(section 3.2 of its paper).
"""

from torch import Tensor

from optimized.attention.hopper import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from optimized.kernels.common import HAS_TRITON, triton

if HAS_TRITON:
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
else:  # the kernel can be imported, and is not called
    mbarrier = tma = TensorDescriptor = triton

# Triton 3.9 and 3.6.
copy_rows = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

# T query tokens  S keys of a tile  N nope dim  E more nope lanes  R rope dim  V value dim  H heads


# How a tile of rows lies in shared memory: as the products read it.
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def rows_of(matrix: Tensor, shape: tuple[int, int], row_stride: int, block: tuple[int, int]) -> TensorDescriptor:
    """A descriptor of blocks of rows of a bfloat16 matrix, which begins where the tensor does."""
    return TensorDescriptor(matrix, list(shape), [row_stride, 1], list(block), SHARED)


@gluon.jit
def _put_queries(shared, rows, query, end_query, row_stride, first_lane, copying: gl.constexpr):
    """Copies lanes of the queries into shared memory, zeros for rows that are no queries."""
    row = query + gl.arange(0, shared.shape[0], layout=gl.SliceLayout(1, copying))
    lane = first_lane + gl.arange(0, shared.shape[1], layout=gl.SliceLayout(0, copying))
    pointers = rows + row.to(gl.int64)[:, None] * row_stride + lane[None, :]
    shared.store(gl.load(pointers, mask=(row < end_query)[:, None] & (lane >= 0)[None, :], other=0.0))


@gluon.jit
def _tile_of(index, wholes, n, first, whole_begin, whole_end, whole, part, HAS_SELECTION: gl.constexpr):
    """The number of the tile that comes `index`-th: whole ones, then the others."""
    if HAS_SELECTION:
        key_tile = gl.load(whole + index, mask=index < wholes, other=0)
        key_tile += gl.load(part + (index - wholes), mask=(index >= wholes) & (index < n), other=0)
    else:
        edge = first + index - wholes
        edge = gl.where(edge >= whole_begin, edge + whole_end - whole_begin, edge)
        key_tile = gl.where(index < wholes, whole_begin + index, edge)
    return key_tile


@gluon.jit
def _dealt_words(dealt, part_index, BLOCK_T: gl.constexpr, layout: gl.constexpr):
    """The four words of each query for a partly selected tile; zeros before the first of them."""
    words = dealt + part_index * (4 * BLOCK_T) + gl.arange(0, BLOCK_T, layout=layout)
    is_part = (gl.zeros([BLOCK_T], gl.int32, layout=layout) + part_index) >= 0
    word0_T = gl.load(words, mask=is_part, other=0)
    word1_T = gl.load(words + BLOCK_T, mask=is_part, other=0)
    word2_T = gl.load(words + 2 * BLOCK_T, mask=is_part, other=0)
    word3_T = gl.load(words + 3 * BLOCK_T, mask=is_part, other=0)
    return word0_T, word1_T, word2_T, word3_T


@gluon.jit
def _selected_only(score_TS, word0_T, word1_T, word2_T, word3_T, layout: gl.constexpr):
    """Scores of the keys whose dealt bit is set, else -inf."""
    lane_S = gl.arange(0, score_TS.shape[1], layout=gl.SliceLayout(0, layout))
    pair_S = (lane_S >> 1) & 3
    even_TS = gl.where((pair_S == 0)[None, :], word0_T[:, None], word2_T[:, None])
    odd_TS = gl.where((pair_S == 1)[None, :], word1_T[:, None], word3_T[:, None])
    bits_TS = gl.where((pair_S & 1 == 0)[None, :], even_TS, odd_TS)
    bit_S = 1 << ((lane_S >> 3) * 2 + (lane_S & 1))
    return gl.where(bits_TS & bit_S[None, :] != 0, score_TS, float("-inf"))


@gluon.jit
def _seen_only(score_TS, key_tile, position_T, first_position, keys, window, layout: gl.constexpr):
    """Scores of the keys of the request that lie behind the query and within its window, else -inf."""
    BLOCK_S: gl.constexpr = score_TS.shape[1]
    key_S = key_tile * BLOCK_S + gl.arange(0, BLOCK_S, layout=gl.SliceLayout(0, layout))
    key_S = gl.where((key_S >= first_position) & (key_S - first_position < keys), key_S, 2147483647)
    behind_TS = position_T[:, None] - key_S[None, :]
    return gl.where((behind_TS >= 0) & (behind_TS < window), score_TS, float("-inf"))


@gluon.jit
def _weights(score_TS, highest_T, total_T, scale_log2):
    """One step of the online softmax: weights, what earlier sums are to be multiplied by, highest score, total."""
    new_highest_T = gl.maximum(highest_T, gl.max(score_TS, axis=1))
    # Before the first key that is seen the maximum is -inf, and -inf - -inf would be NaN.
    base_T = gl.where(new_highest_T == float("-inf"), 0.0, new_highest_T * scale_log2)
    weight_TS = gl.exp2(score_TS * scale_log2 - base_T[:, None])
    decay_T = gl.exp2(highest_T * scale_log2 - base_T)
    return weight_TS.to(gl.bfloat16), decay_T, new_highest_T, total_T * decay_T + gl.sum(weight_TS, axis=1)


@gluon.jit
def _fetch(rows, tiles, here, row, lane, stage):
    """Starts to copy a block of a matrix, from this row and lane on, to one of two tiles."""
    mbarrier.expect(here.index(stage), rows.block_type.nbytes)
    copy_rows(rows, [row, lane], here.index(stage), tiles.index(stage))


@gluon.jit
def _fetch_keys(n_rows, e_rows, r_rows, keys_N, keys_E, keys_R, here, row, lane, stage, HAS_MORE: gl.constexpr):
    """Starts to copy the two or three parts of a tile of keys, which one barrier waits for."""
    MORE: gl.constexpr = e_rows.block_type.nbytes if HAS_MORE else 0
    mbarrier.expect(here.index(stage), n_rows.block_type.nbytes + r_rows.block_type.nbytes + MORE)
    copy_rows(n_rows, [row, lane], here.index(stage), keys_N.index(stage))
    copy_rows(r_rows, [row, 0], here.index(stage), keys_R.index(stage))
    if HAS_MORE:
        copy_rows(e_rows, [row, lane + keys_N.shape[2]], here.index(stage), keys_E.index(stage))


@gluon.jit
def _clear_others(tile, first_row, keys, copying: gl.constexpr):
    """Zeros in the rows of a tile of values that are not the request's: 0 x NaN is NaN."""
    if (first_row < 0) | (first_row + tile.shape[0] > keys):
        row = first_row + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, copying))
        is_own = ((row >= 0) & (row < keys))[:, None]
        tile.store(gl.where(is_own, tile.load(copying), 0.0).to(gl.bfloat16))
        fence_async_shared()
        barrier()


@gluon.jit
def _scores(q_N, q_E, q_R, keys_N, keys_E, keys_R, stage, no_score_TS, HAS_MORE: gl.constexpr):
    """Starts Q Kᵀ: one product of the warpgroup for each part, and no other in between."""
    score = warpgroup_mma(q_N, keys_N.index(stage).permute((1, 0)), no_score_TS, use_acc=False, is_async=True)
    if HAS_MORE:
        score = warpgroup_mma(q_E, keys_E.index(stage).permute((1, 0)), score, is_async=True)
    return warpgroup_mma(q_R, keys_R.index(stage).permute((1, 0)), score, is_async=True)


@gluon.jit
def hopper_expanded_kernel(
    q, n_rows, e_rows, r_rows, v_rows, core_out, query_start, key_start, positions, first_key, whole, part, dealt,
    counts, scale_log2, window, H, most_tiles, q_query, q_head, kv_head,
    N: gl.constexpr, E: gl.constexpr, R: gl.constexpr, V: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_S: gl.constexpr,
    HAS_SELECTION: gl.constexpr,
):  # fmt: skip
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_S, 16])
    core_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, V, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, core_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    copying: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])

    q_N = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_T, N], shared)
    q_R = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_T, R], shared)
    keys_N = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_S, N], shared)
    keys_R = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_S, R], shared)
    values = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_S, V], shared)
    q_E, keys_E = q_R, keys_R
    if E > 0:
        q_E = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_T, E], shared)
        keys_E = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_S, E], shared)
    key_here = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    value_here = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(key_here.index(slot), count=1)
        mbarrier.init(value_here.index(slot), count=1)

    # The last tiles of a request see the most keys and start first.
    query_tile = gl.num_programs(0) - 1 - gl.program_id(0)
    head, request = gl.program_id(1), gl.program_id(2)
    first_query = gl.load(query_start + request) + query_tile * BLOCK_T
    end_query = gl.load(query_start + request + 1)
    key_begin = gl.load(key_start + request)
    keys = gl.load(key_start + request + 1) - key_begin
    first_position = gl.load(first_key + request)
    query_T = first_query + gl.arange(0, BLOCK_T, layout=row_layout)
    position_T = gl.load(positions + query_T, mask=query_T < end_query, other=-1)
    first, whole_begin, whole_end = 0, 0, 0
    if HAS_SELECTION:
        line = (request * gl.num_programs(0) + query_tile).to(gl.int64)
        whole += line * most_tiles
        part += line * most_tiles
        dealt += line * most_tiles * (4 * BLOCK_T)
        wholes = gl.load(counts + line * 2, mask=first_query < end_query, other=0)
        n = wholes + gl.load(counts + line * 2 + 1, mask=first_query < end_query, other=0)
    else:
        # As `key_tiles` does it.
        highest = gl.max(position_T, axis=0)
        lowest = gl.min(gl.where(query_T < end_query, position_T, 2147483647), axis=0)
        last_key = first_position + keys - 1
        first = gl.maximum(first_position, lowest - window + 1) // BLOCK_S
        end = gl.maximum(first, gl.cdiv(gl.minimum(highest, last_key) + 1, BLOCK_S))
        whole_from = gl.maximum(first_position, highest - window + 1)
        whole_begin = gl.minimum(gl.cdiv(whole_from, BLOCK_S), end)
        whole_end = gl.minimum(gl.maximum((gl.minimum(lowest, last_key) + 1) // BLOCK_S, whole_begin), end)
        wholes = whole_end - whole_begin
        n = gl.where(first_query < end_query, end - first, 0)

    key_lane = head * kv_head
    value_lane = key_lane + N + E
    q_rows = q + head.to(gl.int64) * q_head
    _put_queries(q_N, q_rows, first_query, end_query, q_query, 0, copying)
    _put_queries(q_R, q_rows, first_query, end_query, q_query, N + E, copying)
    if E > 0:
        _put_queries(q_E, q_rows, first_query, end_query, q_query, N, copying)
    fence_async_shared()
    barrier()

    highest_T = gl.full([BLOCK_T], float("-inf"), gl.float32, layout=row_layout)
    total_T = gl.zeros([BLOCK_T], gl.float32, layout=row_layout)
    core_TV = gl.zeros([BLOCK_T, V], gl.float32, layout=core_layout)
    no_score_TS = gl.zeros([BLOCK_T, BLOCK_S], gl.float32, layout=score_layout)
    if n > 0:
        for ahead in gl.static_range(2):
            if ahead < n:
                key_tile = _tile_of(ahead, wholes, n, first, whole_begin, whole_end, whole, part, HAS_SELECTION)
                row = key_begin + key_tile * BLOCK_S - first_position
                _fetch_keys(n_rows, e_rows, r_rows, keys_N, keys_E, keys_R, key_here, row, key_lane, ahead, E > 0)
                if ahead == 0:
                    _fetch(v_rows, values, value_here, row, value_lane, 0)
        mbarrier.wait(key_here.index(0), 0)
        score = _scores(q_N, q_E, q_R, keys_N, keys_E, keys_R, 0, no_score_TS, E > 0)
        score_TS = warpgroup_mma_wait(num_outstanding=0, deps=[score])
        barrier()
        if wholes == 0:
            if HAS_SELECTION:
                word0_T, word1_T, word2_T, word3_T = _dealt_words(dealt, 0, BLOCK_T, row_layout)
                score_TS = _selected_only(score_TS, word0_T, word1_T, word2_T, word3_T, score_layout)
            else:
                key_tile = _tile_of(0, wholes, n, first, whole_begin, whole_end, whole, part, HAS_SELECTION)
                score_TS = _seen_only(score_TS, key_tile, position_T, first_position, keys, window, score_layout)
        first_weight_TS, decay_T, highest_T, total_T = _weights(score_TS, highest_T, total_T, scale_log2)
        weight_TS = gl.convert_layout(first_weight_TS, weight_layout)
        before_tile = _tile_of(0, wholes, n, first, whole_begin, whole_end, whole, part, HAS_SELECTION)
        key_tile = _tile_of(gl.minimum(1, n - 1), wholes, n, first, whole_begin, whole_end, whole, part, HAS_SELECTION)
        for i in range(1, n):
            stage, before = i & 1, (i - 1) & 1
            mbarrier.wait(key_here.index(stage), (i >> 1) & 1)
            score = _scores(q_N, q_E, q_R, keys_N, keys_E, keys_R, stage, no_score_TS, E > 0)
            mbarrier.wait(value_here.index(before), ((i - 1) >> 1) & 1)
            _clear_others(values.index(before), before_tile * BLOCK_S - first_position, keys, copying)
            core = warpgroup_mma(weight_TS, values.index(before), core_TV, is_async=True)
            # What these tiles held has been read by the end of the round before: both warpgroups waited there.
            row = key_begin + key_tile * BLOCK_S - first_position
            _fetch(v_rows, values, value_here, row, value_lane, stage)
            following = key_tile
            if i + 1 < n:
                following = _tile_of(i + 1, wholes, n, first, whole_begin, whole_end, whole, part, HAS_SELECTION)
                row = key_begin + following * BLOCK_S - first_position
                _fetch_keys(n_rows, e_rows, r_rows, keys_N, keys_E, keys_R, key_here, row, key_lane, before, E > 0)
            if HAS_SELECTION:
                word0_T, word1_T, word2_T, word3_T = _dealt_words(dealt, i - wholes, BLOCK_T, row_layout)
            score_TS = warpgroup_mma_wait(num_outstanding=1, deps=[score])
            if i >= wholes:
                if HAS_SELECTION:
                    score_TS = _selected_only(score_TS, word0_T, word1_T, word2_T, word3_T, score_layout)
                else:
                    score_TS = _seen_only(score_TS, key_tile, position_T, first_position, keys, window, score_layout)
            next_weight_TS, decay_T, highest_T, total_T = _weights(score_TS, highest_T, total_T, scale_log2)
            core_TV = warpgroup_mma_wait(num_outstanding=0, deps=[core])
            barrier()
            core_TV = core_TV * gl.convert_layout(decay_T, gl.SliceLayout(1, core_layout))[:, None]
            weight_TS = gl.convert_layout(next_weight_TS, weight_layout)
            before_tile, key_tile = key_tile, following
        last = (n - 1) & 1
        mbarrier.wait(value_here.index(last), ((n - 1) >> 1) & 1)
        _clear_others(values.index(last), before_tile * BLOCK_S - first_position, keys, copying)
        core = warpgroup_mma(weight_TS, values.index(last), core_TV, is_async=True)
        core_TV = warpgroup_mma_wait(num_outstanding=0, deps=[core])

    total_T = gl.convert_layout(gl.where(total_T > 0.0, total_T, 1.0), gl.SliceLayout(1, core_layout))
    query_T = first_query + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, core_layout))
    lane_V = gl.arange(0, V, layout=gl.SliceLayout(0, core_layout))
    rows = core_out + (query_T.to(gl.int64) * H + head)[:, None] * V + lane_V[None, :]
    gl.store(
        rows, (core_TV / total_T[:, None]).to(gl.bfloat16), mask=(query_T < end_query)[:, None] & (lane_V >= 0)[None, :]
    )
