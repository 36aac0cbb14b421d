"""The decode core over the last positions of a ring in one kernel, for Hopper.

e = max over tiles seen of ceil(max score)    out = Σ_tiles 2^(e_tile - e) · (2^(score - e_tile) · latents) / Σ weights

One program takes 32 heads of a token and one part of its keys. All 1024 lanes of the output stay in registers, lanes as
rows (one quarter of a wgmma tile would be wasted on 32 heads as rows), in four quarters; so do the lanes of the one
tile of 64 keys in shared memory. As soon as the sums of a quarter have read it, that quarter of the next tile is
fetched, and the next scores start with the quarter that came first. The token's own key, the one that makes a window of
513 exceed 8 tiles, starts the sums from plain multiplications. Scores are in base 2; whole exponents make the rescaling
exact, and each weight is rounded once, to bfloat16, before it is summed. Sums are float32. A token's result depends on
the number of parts alone.

Assumes C 1024, R 64, heads in multiples of 32, rows aligned to 16 bytes. Fills 214 kB of shared memory: one program a
multiprocessor. Source: text_model specification, sections 9, 14 and 16.

H200, window of 513, replay of a CUDA graph with a cold cache, µs at B = 32, 64, 128, 256: 42, 51, 89, 166; the two
kernels of `two_pass` in the same runs 43, 65, 124, 244 (floor 10, 19, 38, 77). A tile takes 5.4 µs; by count, reading
shared memory for its products takes 2.7 (both warpgroups read the keys, and 32 heads are half of what hides that), and
the fetches of all programs 3.3 at what the L2 cache delivers: each row goes to two programs. Asking the L2 cache for
rows two tiles ahead made it slower (52, 184 at B = 64, 256), as did waiting once for all quarters (59, 192).
"""

from optimized.attention.hopper import (
    LN_2,
    LOWEST,
    async_copy,
    barrier,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# H heads  C lanes of a quarter of the latent  R rope dim  K keys of a tile

BLOCK_H = 32
BLOCK_K = 64


@gluon.jit
def _fetch(rows, ring, first_row, first, end, first_lane, ring_rows, pool_row, copying: gl.constexpr):
    """Starts to copy some lanes of a tile of rows into shared memory; slots from `end` on become zeros."""
    BLOCK_K: gl.constexpr = rows.shape[0]
    LANES: gl.constexpr = rows.shape[1]
    slot = first + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, copying))
    row = first_row + slot
    row = gl.where(row >= ring_rows, row - ring_rows, row)
    lane = first_lane + gl.arange(0, LANES, layout=gl.SliceLayout(0, copying))
    copy_async(rows, ring + (row * pool_row)[:, None] + lane[None, :], mask=(slot < end)[:, None])


@gluon.jit
def _lanes(row, first, is_read, LANES: gl.constexpr, layout: gl.constexpr):
    """Some lanes of one row in float32, zeros where it is not to be read."""
    lane = first + gl.arange(0, LANES, layout=layout)
    return gl.load(row + lane, mask=is_read & (lane >= 0), other=0.0).to(gl.float32)


@gluon.jit
def _product(q, row, first, is_read, LANES: gl.constexpr, layout: gl.constexpr):
    """q[h, lane] · row[lane], not yet summed, of queries in shared memory."""
    return q.load(layout).to(gl.float32) * _lanes(row, first, is_read, LANES, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _store_quarter(out_CH, inverse_H, places, storing: gl.constexpr):
    values_CH = (out_CH * inverse_H[None, :]).to(places.dtype.element_ty)
    gl.store(places, gl.convert_layout(gl.permute(values_CH, (1, 0)), storing))


@gluon.jit(do_not_specialize=["T"])
def attend_ring_kernel(
    q,
    pool,
    ring,
    position,
    out,
    lse,
    scale_log2,
    T,
    H,
    window,
    keys_of_part,
    parts,
    ring_rows,
    q_token,
    q_head,
    pool_ring,
    pool_row,
    IS_PART: gl.constexpr,
    QUARTER: gl.constexpr,
    R: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """out [T, H, C]; with IS_PART that of each part [parts, T, H, C] in float32, and lse [parts, T, H], natural."""
    C: gl.constexpr = 4 * QUARTER
    scoring: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 2], instr_shape=[16, BLOCK_H // 2, 16])
    summing: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[8, 1], instr_shape=[16, BLOCK_H, 16])
    tiled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiled_weights: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK_H, element_bitwidth=16, rank=2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    of_heads: gl.constexpr = gl.SliceLayout(0, scoring)

    # Blocks of heads next to each other: they read the same rows.
    blocks = H // BLOCK_H
    first_head = gl.program_id(0) % blocks * BLOCK_H
    part = gl.program_id(0) // blocks % parts
    token = (gl.program_id(0) // blocks // parts).to(gl.int64)

    latent0 = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_K, QUARTER], tiled)
    latent1 = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_K, QUARTER], tiled)
    latent2 = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_K, QUARTER], tiled)
    latent3 = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_K, QUARTER], tiled)
    rope = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_K, R], tiled)
    q_HC = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK_H, QUARTER], tiled)
    q_HR = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, R], tiled)
    weights = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_K, BLOCK_H], tiled_weights)

    q_heads = q + token * q_token + first_head.to(gl.int64) * q_head
    head_wide = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, wide))
    lane_wide = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, wide))
    for quarter in gl.static_range(4):
        lane = quarter * QUARTER + lane_wide
        copy_async(q_HC.index(quarter), q_heads + head_wide[:, None] * q_head + lane[None, :])
    head_narrow = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, narrow))
    lane_narrow = C + gl.arange(0, R, layout=gl.SliceLayout(0, narrow))
    copy_async(q_HR, q_heads + head_narrow[:, None] * q_head + lane_narrow[None, :])
    async_copy.commit_group()

    # Slots are the keys before the token's own, from the first one that the window still holds.
    last = gl.load(position + token)
    rows = pool + gl.load(ring + token).to(gl.int64) * pool_ring
    first_row = gl.maximum(0, last - window + 1) % ring_rows
    begin = part * keys_of_part
    end = gl.minimum(begin + keys_of_part, gl.minimum(last, window - 1))
    _fetch(rope, rows, first_row, begin, end, C, ring_rows, pool_row, narrow)
    _fetch(latent0, rows, first_row, begin, end, 0, ring_rows, pool_row, wide)
    async_copy.commit_group()
    _fetch(latent1, rows, first_row, begin, end, QUARTER, ring_rows, pool_row, wide)
    async_copy.commit_group()
    _fetch(latent2, rows, first_row, begin, end, 2 * QUARTER, ring_rows, pool_row, wide)
    async_copy.commit_group()
    _fetch(latent3, rows, first_row, begin, end, 3 * QUARTER, ring_rows, pool_row, wide)
    async_copy.commit_group()

    # The token's own key, in the first part.
    own = rows + gl.maximum(last, 0) % ring_rows * pool_row
    is_own = (last >= 0) & (part == 0)
    value0_C = _lanes(own, 0, is_own, QUARTER, gl.SliceLayout(1, summing))
    value1_C = _lanes(own, QUARTER, is_own, QUARTER, gl.SliceLayout(1, summing))
    value2_C = _lanes(own, 2 * QUARTER, is_own, QUARTER, gl.SliceLayout(1, summing))
    value3_C = _lanes(own, 3 * QUARTER, is_own, QUARTER, gl.SliceLayout(1, summing))
    async_copy.wait_group(4)
    product_HC = _product(q_HC.index(0), own, 0, is_own, QUARTER, wide)
    product_HC += _product(q_HC.index(1), own, QUARTER, is_own, QUARTER, wide)
    product_HC += _product(q_HC.index(2), own, 2 * QUARTER, is_own, QUARTER, wide)
    product_HC += _product(q_HC.index(3), own, 3 * QUARTER, is_own, QUARTER, wide)
    product_HR = _product(q_HR, own, C, is_own, R, narrow)
    own_score_H = gl.convert_layout(gl.sum(product_HC, axis=1), of_heads)
    own_score_H += gl.convert_layout(gl.sum(product_HR, axis=1), of_heads)
    own_score_H = gl.where(is_own, own_score_H * scale_log2, float("-inf"))
    exponent_H = gl.maximum(gl.ceil(own_score_H), LOWEST)
    own_weight_H = gl.exp2(own_score_H - exponent_H).to(gl.bfloat16).to(gl.float32)
    # Summed over keys at the end, once.
    is_first_K = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, scoring)) == 0
    sum_KH = gl.where(is_first_K[:, None], own_weight_H[None, :], 0.0)
    own_weight_H = gl.convert_layout(own_weight_H, gl.SliceLayout(0, summing))
    out0_CH = value0_C[:, None] * own_weight_H[None, :]
    out1_CH = value1_C[:, None] * own_weight_H[None, :]
    out2_CH = value2_C[:, None] * own_weight_H[None, :]
    out3_CH = value3_C[:, None] * own_weight_H[None, :]

    zero_KH = gl.zeros([BLOCK_K, BLOCK_H], gl.float32, layout=scoring)
    for tile in range(gl.maximum(0, gl.cdiv(end - begin, BLOCK_K))):
        first = begin + tile * BLOCK_K
        async_copy.wait_group(3)
        fence_async_shared()
        score = warpgroup_mma(rope, q_HR.permute((1, 0)), zero_KH, use_acc=False, is_async=True)
        score = warpgroup_mma(latent0, q_HC.index(0).permute((1, 0)), score, is_async=True)
        async_copy.wait_group(2)
        fence_async_shared()
        score = warpgroup_mma(latent1, q_HC.index(1).permute((1, 0)), score, is_async=True)
        async_copy.wait_group(1)
        fence_async_shared()
        score = warpgroup_mma(latent2, q_HC.index(2).permute((1, 0)), score, is_async=True)
        async_copy.wait_group(0)
        fence_async_shared()
        score = warpgroup_mma(latent3, q_HC.index(3).permute((1, 0)), score, is_async=True)
        score_KH = warpgroup_mma_wait(num_outstanding=0, deps=[score])
        slot_K = first + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, scoring))
        score_KH = gl.where((slot_K < end)[:, None], score_KH * scale_log2, float("-inf"))
        raised_H = gl.maximum(exponent_H, gl.ceil(gl.max(score_KH, axis=0)))
        # Rounded before they are summed: the weights of a row, as they are used, then add up to one.
        weight_KH = gl.exp2(score_KH - raised_H[None, :]).to(gl.bfloat16)
        weights.store(weight_KH)
        fence_async_shared()
        factor_H = gl.exp2(exponent_H - raised_H)
        sum_KH = sum_KH * factor_H[None, :] + weight_KH.to(gl.float32)
        exponent_H = raised_H
        factor_H = gl.convert_layout(factor_H, gl.SliceLayout(0, summing))
        barrier()
        # A quarter is overwritten once all warps are past its product; the next product runs meanwhile.
        after = first + BLOCK_K
        product0 = warpgroup_mma(latent0.permute((1, 0)), weights, out0_CH * factor_H[None, :], is_async=True)
        product1 = warpgroup_mma(latent1.permute((1, 0)), weights, out1_CH * factor_H[None, :], is_async=True)
        out0_CH = warpgroup_mma_wait(num_outstanding=1, deps=[product0])
        barrier()
        _fetch(rope, rows, first_row, after, end, C, ring_rows, pool_row, narrow)
        _fetch(latent0, rows, first_row, after, end, 0, ring_rows, pool_row, wide)
        async_copy.commit_group()
        product2 = warpgroup_mma(latent2.permute((1, 0)), weights, out2_CH * factor_H[None, :], is_async=True)
        out1_CH = warpgroup_mma_wait(num_outstanding=1, deps=[product1])
        barrier()
        _fetch(latent1, rows, first_row, after, end, QUARTER, ring_rows, pool_row, wide)
        async_copy.commit_group()
        product3 = warpgroup_mma(latent3.permute((1, 0)), weights, out3_CH * factor_H[None, :], is_async=True)
        out2_CH = warpgroup_mma_wait(num_outstanding=1, deps=[product2])
        barrier()
        _fetch(latent2, rows, first_row, after, end, 2 * QUARTER, ring_rows, pool_row, wide)
        async_copy.commit_group()
        out3_CH = warpgroup_mma_wait(num_outstanding=0, deps=[product3])
        barrier()
        _fetch(latent3, rows, first_row, after, end, 3 * QUARTER, ring_rows, pool_row, wide)
        async_copy.commit_group()
    async_copy.wait_group(0)

    sum_H = gl.sum(sum_KH, axis=0)
    has_keys_H = sum_H > 0.0
    sum_H = gl.where(has_keys_H, sum_H, 1.0)
    inverse_H = gl.convert_layout(1.0 / sum_H, gl.SliceLayout(0, summing))
    row = (part.to(gl.int64) * T + token) * H + first_head
    places = out + (row + head_wide)[:, None] * C + lane_wide[None, :]
    _store_quarter(out0_CH, inverse_H, places, wide)
    _store_quarter(out1_CH, inverse_H, places + QUARTER, wide)
    _store_quarter(out2_CH, inverse_H, places + 2 * QUARTER, wide)
    _store_quarter(out3_CH, inverse_H, places + 3 * QUARTER, wide)
    if IS_PART:
        lse_H = gl.where(has_keys_H, (exponent_H + gl.log2(sum_H)) * LN_2, float("-inf"))
        gl.store(lse + row + gl.arange(0, BLOCK_H, layout=of_heads), lse_H)
