"""The decode core over the last positions of a ring in one kernel, for Hopper.

e = max over tiles seen of ceil(max score)    out = Σ_tiles 2^(e_tile - e) · (2^(score - e_tile) · latents) / Σ weights

A cluster of two programs takes 64 heads of a token and one part of its keys, 64 keys at a time. The output of all 1024
lanes would not fit the registers of one multiprocessor, so each program has half of the lanes: of the queries, of the
rows, of the output. It sums half of each score, adds the half of the other program (`hopper_pair`), and both have the
same weights. Each row is read by one program only. Tensors are those of the cluster: their first dim is [half, head] or
[half, key], and each program holds one half.

The rows of the next tile are fetched while this one is worked on. A window of 513 is 8 tiles and the token's own key:
that is a tile of its own, the first one, small enough to be done while the rows of the second arrive. Scores are in
base 2; whole exponents make the rescaling exact, and each weight is rounded once, to bfloat16, before it is summed.
Sums are float32. A token's result depends on the number of parts alone.

Assumes C 1024, R 64, heads in multiples of 64, rows aligned to 16 bytes. Fills 226 kB of shared memory: one program a
multiprocessor. Source: text_model specification, sections 9, 14 and 16.

H200, window of 513, replay of a CUDA graph with a cold cache, µs at B = 16, 32, 64, 128, 256: 27, 35, 43, 79, 149
(floor 5, 10, 19, 38, 77; 64 and 256 before and after `arrive` was put behind the barrier, the others before). One
program for all lanes of 32 heads, where two programs read each row, took 51 and 167 at 64 and 256 a run before; the two
kernels of `two_pass` 26 at 16. A tile takes 3.3 µs: by count its products need 1.5, and its bytes 2.0 at the memory's
bandwidth; the start and end of a program take 6. Slower: fetching the next rows behind the products of scores, not in
front of them (50, 168 at B = 64, 256), or behind the barrier of this tile's rows (44, 152). No faster: the own key from
plain multiplications beside the first fetch (43, 148).
"""

from optimized.attention.hopper import (
    LN_2,
    LOWEST,
    WARPS,
    async_copy,
    barrier,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from optimized.attention.hopper_pair import add_other_program, arrive, leave
from optimized.kernels.common import HAS_TRITON

# H heads  C kv latent  R rope dim  K keys of a tile

BLOCK_H = 64
BLOCK_K = 64

# How the halves of a tensor are dealt to the programs: by its first dim; or both programs have one of their own.
HALVES, OWN = [[1, 0]], [[0, 0]]
if HAS_TRITON:
    SCORING = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 32, 16], HALVES))
    SUMMING = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 256, 16], HALVES))
    WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0], HALVES))
    NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0], HALVES))
    LATENT_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2, cga_layout=HALVES))
    OWN_LATENT_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2, cga_layout=OWN))
    ROPE_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2, cga_layout=HALVES))
    OWN_ROPE_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2, cga_layout=OWN))
    WEIGHT_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0], HALVES))
    # Triton 3.9; 3.6 calls it `_reinterpret`.
    HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def own_half(tile, layout: gl.constexpr):
    """[half, key] rows of the cluster as what each program has of them: the same keys, lanes of its own."""
    K: gl.constexpr = tile.shape[0] // 2
    if HAS_REINTERPRET:
        return tile.reinterpret(gl.bfloat16, [K, tile.shape[1]], layout)
    else:
        return tile._reinterpret(gl.bfloat16, [K, tile.shape[1]], layout)


@gluon.jit
def _fetch(tile, ring, first_row, first, end, first_lane, ring_rows, pool_row, copying: gl.constexpr):
    """Starts to copy both halves of some lanes of a tile of rows; slots from `end` on become zeros."""
    K: gl.constexpr = tile.shape[0] // 2
    LANES: gl.constexpr = tile.shape[1]
    half_key = gl.arange(0, 2 * K, layout=gl.SliceLayout(1, copying))
    slot = first + half_key % K
    row = first_row + slot
    row = gl.where(row >= ring_rows, row - ring_rows, row)
    place = row * pool_row + half_key // K * LANES
    lane = first_lane + gl.arange(0, LANES, layout=gl.SliceLayout(0, copying))
    copy_async(tile, ring + place[:, None] + lane[None, :], mask=(slot < end)[:, None])


@gluon.jit
def _places(heads, q_head, first_lane, half_lanes, LANES: gl.constexpr, BLOCK_H: gl.constexpr, layout: gl.constexpr):
    """Where some lanes of both halves of the heads lie."""
    half_head = gl.arange(0, 2 * BLOCK_H, layout=gl.SliceLayout(1, layout))
    lane = first_lane + gl.arange(0, LANES, layout=gl.SliceLayout(0, layout))
    return heads + (half_head % BLOCK_H * q_head + half_head // BLOCK_H * half_lanes)[:, None] + lane[None, :]


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
    HALF_C: gl.constexpr,
    HALF_R: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """out [T, H, C]; with IS_PART that of each part [parts, T, H, C] in float32, and lse [parts, T, H], natural."""
    C: gl.constexpr = 2 * HALF_C
    of_heads: gl.constexpr = gl.SliceLayout(1, SCORING)
    arrive()

    blocks = H // BLOCK_H
    first_head = gl.program_id(0) % blocks * BLOCK_H
    part = gl.program_id(0) // blocks % parts
    token = (gl.program_id(0) // blocks // parts).to(gl.int64)

    latents = gl.allocate_shared_memory(gl.bfloat16, [2, 2 * BLOCK_K, HALF_C], LATENT_TILE)
    rope = gl.allocate_shared_memory(gl.bfloat16, [2 * BLOCK_K, HALF_R], ROPE_TILE)
    q_HC = gl.allocate_shared_memory(gl.bfloat16, [2 * BLOCK_H, HALF_C], LATENT_TILE)
    q_HR = gl.allocate_shared_memory(gl.bfloat16, [2 * BLOCK_H, HALF_R], ROPE_TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2 * BLOCK_H, BLOCK_K], WEIGHT_TILE)

    heads = q + token * q_token + first_head.to(gl.int64) * q_head
    copy_async(q_HC, _places(heads, q_head, 0, HALF_C, HALF_C, BLOCK_H, WIDE))
    copy_async(q_HR, _places(heads, q_head, C, HALF_R, HALF_R, BLOCK_H, NARROW))

    # Slots are the keys of the window, from its first one; the last one is the token's own.
    last = gl.load(position + token)
    rows = pool + gl.load(ring + token).to(gl.int64) * pool_ring
    first_row = gl.maximum(0, last - window + 1) % ring_rows
    own_slot = gl.minimum(last, window - 1)
    begin = part * keys_of_part
    end = gl.minimum(begin + keys_of_part, own_slot)
    own_tiles = gl.where((last >= 0) & (part == 0), 1, 0)
    first = gl.where(own_tiles > 0, own_slot, begin)
    tile_end = gl.where(own_tiles > 0, own_slot + 1, end)
    _fetch(latents.index(0), rows, first_row, first, tile_end, 0, ring_rows, pool_row, WIDE)
    _fetch(rope, rows, first_row, first, tile_end, C, ring_rows, pool_row, NARROW)
    async_copy.commit_group()

    exponent_H = gl.full([2 * BLOCK_H], LOWEST, gl.float32, layout=of_heads)
    # Summed over keys at the end, once.
    sum_HK = gl.zeros([2 * BLOCK_H, BLOCK_K], gl.float32, layout=SCORING)
    out_HC = gl.zeros([2 * BLOCK_H, HALF_C], gl.float32, layout=SUMMING)
    zero_HK = gl.zeros([2 * BLOCK_H, BLOCK_K], gl.float32, layout=SCORING)
    after = begin + (1 - own_tiles) * BLOCK_K
    for tile in range(own_tiles + gl.maximum(0, gl.cdiv(end - begin, BLOCK_K))):
        latent_KC = own_half(latents.index(tile % 2), OWN_LATENT_TILE)
        rope_KR = own_half(rope, OWN_ROPE_TILE)
        # All warps are past the sums that read the other tile.
        barrier()
        _fetch(latents.index((tile + 1) % 2), rows, first_row, after, end, 0, ring_rows, pool_row, WIDE)
        async_copy.commit_group()
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()
        score = warpgroup_mma(q_HC, latent_KC.permute((1, 0)), zero_HK, use_acc=False, is_async=True)
        score = warpgroup_mma(q_HR, rope_KR.permute((1, 0)), score, is_async=True)
        score_HK = add_other_program(warpgroup_mma_wait(num_outstanding=0, deps=[score]), tile)
        # There is one tile of rope lanes, and now all warps have read it, and what the other program sent.
        barrier()
        arrive()
        _fetch(rope, rows, first_row, after, end, C, ring_rows, pool_row, NARROW)
        async_copy.commit_group()
        slot_K = first + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, SCORING))
        score_HK = gl.where((slot_K < tile_end)[None, :], score_HK * scale_log2, float("-inf"))
        raised_H = gl.maximum(exponent_H, gl.ceil(gl.max(score_HK, axis=1)))
        # Rounded before they are summed: the weights of a row, as they are used, then add up to one.
        weight_HK = gl.exp2(score_HK - raised_H[:, None]).to(gl.bfloat16)
        weights.store(weight_HK)
        factor_H = gl.exp2(exponent_H - raised_H)
        sum_HK = sum_HK * factor_H[:, None] + weight_HK.to(gl.float32)
        out_HC = out_HC * gl.convert_layout(factor_H, gl.SliceLayout(1, SUMMING))[:, None]
        exponent_H = raised_H
        operand_HK = weights.load(gl.DotOperandLayout(0, SUMMING, 2))
        product = warpgroup_mma(operand_HK, latent_KC, out_HC, is_async=True)
        out_HC = warpgroup_mma_wait(num_outstanding=0, deps=[product])
        first, tile_end = after, end
        after = after + BLOCK_K
    async_copy.wait_group(0)

    sum_H = gl.sum(sum_HK, axis=1)
    has_keys_H = sum_H > 0.0
    sum_H = gl.where(has_keys_H, sum_H, 1.0)
    out_HC = out_HC / gl.convert_layout(sum_H, gl.SliceLayout(1, SUMMING))[:, None]
    row = (part.to(gl.int64) * T + token) * H + first_head
    if IS_PART:
        gl.store(_places(out + row * C, C, 0, HALF_C, HALF_C, BLOCK_H, SUMMING), out_HC)
        lse_H = gl.where(has_keys_H, (exponent_H + gl.log2(sum_H)) * LN_2, float("-inf"))
        half_head = gl.arange(0, 2 * BLOCK_H, layout=of_heads)
        gl.store(lse + row + half_head, lse_H, mask=half_head < BLOCK_H)
    else:
        values_HC = gl.convert_layout(out_HC.to(gl.bfloat16), WIDE)
        gl.store(_places(out + row * C, C, 0, HALF_C, HALF_C, BLOCK_H, WIDE), values_HC)
    leave()
