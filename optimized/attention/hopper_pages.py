"""The decode core over selected rows of a paged pool in one kernel, for Hopper.

e = max over tiles seen of ceil(max score)    out = Σ_tiles 2^(e_tile - e) · (2^(score - e_tile) · latents) / Σ weights

One program takes 64 heads of a token and one part of its keys, 64 keys at a time; all 512 lanes of the output stay in
registers (half in each of two warpgroups). A tile of rows lies in shared memory once: transposed it is the keys, as it
is the values. The rows of the next tile are fetched from the moment this tile's scores begin. Where they lie is found
four tiles ahead: position, page and row are three loads, each of which waits for the one before.

Scores are in base 2; whole exponents make the rescaling exact, and each weight is rounded once, to bfloat16, before it
is summed. Sums are float32. A token's result depends on the number of parts alone.

Assumes C 512, R 64, heads in multiples of 64, rows aligned to 16 bytes. Live positions need not be contiguous; tiles
behind the last live one are not visited. Fills 231 kB of shared memory: one program a multiprocessor.
Source: text_model specification, section 14.

H200, 2048 selected rows, replay of a CUDA graph with a cold cache, with the merge of parts, µs at B = 1, 16, 64, 256:
17, 44, 110, 399; the two kernels of `two_pass` in the same run 17, 51, 159, 557 (floor 0.7, 12, 46, 185). A tile takes
3.2 µs, of which, by count, its products need 1.7: scores, softmax and sums wait for each other, and there is no room
for a third tile. Asking the L2 cache for the rows three tiles ahead made it slower (137, 508 at B = 64, 256).
"""

from optimized.attention.hopper import (
    LN_2,
    LOWEST,
    UNIT,
    async_copy,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# H heads  C kv latent  R rope dim  K keys of a tile

BLOCK_H = 64
BLOCK_K = 64


@gluon.jit
def _positions(positions, first, end, BLOCK_K: gl.constexpr, layout: gl.constexpr):
    slot = first + gl.arange(0, BLOCK_K, layout=layout)
    return gl.load(positions + slot, mask=slot < end, other=-1)


@gluon.jit
def _find(offsets, position, pages, pool_page, pool_row, PAGE_ROWS: gl.constexpr):
    """Where the rows of a tile of positions lie in the pool, in units of UNIT elements; -1 for no key."""
    is_live = position >= 0
    page = gl.load(pages + position // PAGE_ROWS, mask=is_live, other=0)
    offset = page.to(gl.int64) * (pool_page // UNIT) + position % PAGE_ROWS * (pool_row // UNIT)
    offsets.store(gl.where(is_live, offset, -1).to(gl.int32))


@gluon.jit
def _fetch(rows, pool, offsets, first_lane, copying: gl.constexpr):
    """Starts to copy some lanes of a tile of rows into shared memory."""
    LANES: gl.constexpr = rows.shape[1]
    offset = offsets.load(gl.SliceLayout(1, copying))
    lane = first_lane + gl.arange(0, LANES, layout=gl.SliceLayout(0, copying))
    # Rows of no key become zeros, not only weightless: 0 x NaN is NaN.
    copy_async(rows, pool + (offset.to(gl.int64) * UNIT)[:, None] + lane[None, :], mask=(offset >= 0)[:, None])


@gluon.jit(do_not_specialize=["T"])
def attend_pages_kernel(
    q,
    pool,
    selected,
    block_table,
    request,
    out,
    lse,
    scale_log2,
    T,
    H,
    K,
    keys_of_part,
    parts,
    q_token,
    q_head,
    pool_page,
    pool_row,
    selected_token,
    table_request,
    PAGE_ROWS: gl.constexpr,
    IS_PART: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_PART: gl.constexpr,
):
    """out [T, H, C]; with IS_PART that of each part [parts, T, H, C] in float32, and lse [parts, T, H], natural."""
    scoring: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 2], instr_shape=[16, BLOCK_K // 2, 16])
    summing: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 2], instr_shape=[16, C // 2, 16])
    tiled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    finding: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    listing: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])

    # Blocks of heads next to each other: they read the same rows.
    blocks = H // BLOCK_H
    first_head = gl.program_id(0) % blocks * BLOCK_H
    part = gl.program_id(0) // blocks % parts
    token = (gl.program_id(0) // blocks // parts).to(gl.int64)

    latents = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_K, C], tiled)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_K, R], tiled)
    q_HC = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, C], tiled)
    q_HR = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, R], tiled)
    offsets = gl.allocate_shared_memory(gl.int32, [4, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    weights = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_K], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))

    q_heads = q + token * q_token + first_head.to(gl.int64) * q_head
    head_wide = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, wide))
    lane_wide = gl.arange(0, C, layout=gl.SliceLayout(0, wide))
    copy_async(q_HC, q_heads + head_wide[:, None] * q_head + lane_wide[None, :])
    head_narrow = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, narrow))
    lane_narrow = C + gl.arange(0, R, layout=gl.SliceLayout(0, narrow))
    copy_async(q_HR, q_heads + head_narrow[:, None] * q_head + lane_narrow[None, :])

    pages = block_table + gl.load(request + token).to(gl.int64) * table_request
    positions = selected + token * selected_token
    begin = part * keys_of_part
    end = gl.minimum(begin + keys_of_part, K)
    position0 = _positions(positions, begin, end, BLOCK_K, finding)
    position1 = _positions(positions, begin + BLOCK_K, end, BLOCK_K, finding)
    position2 = _positions(positions, begin + 2 * BLOCK_K, end, BLOCK_K, finding)
    position3 = _positions(positions, begin + 3 * BLOCK_K, end, BLOCK_K, finding)
    _find(offsets.index(0), position0, pages, pool_page, pool_row, PAGE_ROWS)
    _fetch(latents.index(0), pool, offsets.index(0), 0, wide)
    _fetch(ropes.index(0), pool, offsets.index(0), C, narrow)
    async_copy.commit_group()
    _find(offsets.index(1), position1, pages, pool_page, pool_row, PAGE_ROWS)
    _find(offsets.index(2), position2, pages, pool_page, pool_row, PAGE_ROWS)
    _find(offsets.index(3), position3, pages, pool_page, pool_row, PAGE_ROWS)
    slot = begin + gl.arange(0, BLOCK_PART, layout=listing)
    listed = gl.load(positions + slot, mask=slot < end, other=-1)
    end = gl.max(gl.where(listed >= 0, slot + 1, begin), axis=0)

    exponent_H = gl.full([BLOCK_H], LOWEST, gl.float32, layout=gl.SliceLayout(1, scoring))
    # Summed over keys at the end, once.
    sum_HK = gl.zeros([BLOCK_H, BLOCK_K], gl.float32, layout=scoring)
    zero_HK = gl.zeros([BLOCK_H, BLOCK_K], gl.float32, layout=scoring)
    out_HC = gl.zeros([BLOCK_H, C], gl.float32, layout=summing)
    for tile in range(gl.cdiv(end - begin, BLOCK_K)):
        latent, rope = latents.index(tile % 2), ropes.index(tile % 2)
        first = begin + tile * BLOCK_K
        async_copy.wait_group(0)
        fence_async_shared()
        score = warpgroup_mma(q_HC, latent.permute((1, 0)), zero_HK, use_acc=False, is_async=True)
        score = warpgroup_mma(q_HR, rope.permute((1, 0)), score, is_async=True)
        # While the scores are made.
        if first + BLOCK_K < end:
            following = offsets.index((tile + 1) % 4)
            _fetch(latents.index((tile + 1) % 2), pool, following, 0, wide)
            _fetch(ropes.index((tile + 1) % 2), pool, following, C, narrow)
            async_copy.commit_group()
        position = _positions(positions, first + 4 * BLOCK_K, end, BLOCK_K, finding)
        is_live_K = offsets.index(tile % 4).load(gl.SliceLayout(0, scoring)) >= 0
        score_HK = warpgroup_mma_wait(num_outstanding=0, deps=[score])
        score_HK = gl.where(is_live_K[None, :], score_HK * scale_log2, float("-inf"))
        raised_H = gl.maximum(exponent_H, gl.ceil(gl.max(score_HK, axis=1)))
        # Rounded before they are summed: the weights of a row, as they are used, then add up to one.
        weight_HK = gl.exp2(score_HK - raised_H[:, None]).to(gl.bfloat16)
        weights.store(weight_HK)
        factor_H = gl.exp2(exponent_H - raised_H)
        sum_HK = sum_HK * factor_H[:, None] + weight_HK.to(gl.float32)
        out_HC = out_HC * gl.convert_layout(factor_H, gl.SliceLayout(1, summing))[:, None]
        exponent_H = raised_H
        operand_HK = weights.load(gl.DotOperandLayout(0, summing, 2))
        product = warpgroup_mma(operand_HK, latent, out_HC, is_async=True)
        _find(offsets.index(tile % 4), position, pages, pool_page, pool_row, PAGE_ROWS)
        out_HC = warpgroup_mma_wait(num_outstanding=0, deps=[product])
    async_copy.wait_group(0)

    sum_H = gl.sum(sum_HK, axis=1)
    has_keys_H = sum_H > 0.0
    sum_H = gl.where(has_keys_H, sum_H, 1.0)
    out_HC = out_HC / gl.convert_layout(sum_H, gl.SliceLayout(1, summing))[:, None]
    row = (part.to(gl.int64) * T + token) * H + first_head
    if IS_PART:
        head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, summing))
        lane = gl.arange(0, C, layout=gl.SliceLayout(0, summing))
        gl.store(out + (row + head)[:, None] * C + lane[None, :], out_HC)
        lse_H = gl.where(has_keys_H, (exponent_H + gl.log2(sum_H)) * LN_2, float("-inf"))
        gl.store(lse + row + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, scoring)), lse_H)
    else:
        values = gl.convert_layout(out_HC.to(gl.bfloat16), wide)
        gl.store(out + (row + head_wide)[:, None] * C + lane_wide[None, :], values)
