"""Queries: RoPE on their rotated lanes, and the form that multiplies latents directly.

rotate_queries_:  pairs (2j, 2j+1) of the last R lanes of a head, and of the first R of an index head, by the token's
                  angle; in place, one program for each token and block of heads
absorb_queries:   q[t, h] = [ q_nope[t, h] W_UK[h] | q_rope[t, h] ]      so that q · [kv_latent | k_rope] is the score

Absorbing is one product a head: a program makes a [BLOCK_T, BLOCK_C] tile of one head, so that a decode step reads W_UK
once, from all processors. The copy of the rope lanes, and on demand their rotation, rides along, as does the rotation
of the index queries, in further programs: a decode step rotates without a launch of its own. Sums are float32, one
rounding. Tokens and heads may lie apart (any strides), lanes are dense.

H200, bfloat16, inside a CUDA graph, weights cold, absorb_queries with rotation at T = 1 / 16 / 64 / 256: full layers
6.5 / 6.9 / 8.8 / 27 µs, sliding 8.6 / 8.8 / 11 / 30 µs. At 256 tokens the output (38 MB) is most of the traffic.
Source: text_model specification, sections 5.3 and 6; DeepSeek-V2 report, section 2.1.2 (absorption).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, dot, overlap, round_to, tile, tl, triton, wait_for_inputs, widen

# T tokens  H heads  N nope dim  R rope dim  X = N + R  C kv latent  L = C + R  I index heads  J index head dim
# P = R/2 pairs


@triton.jit
def rotated(x, cos, sin, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Each pair of neighbouring lanes of x [ROWS, 2 PAIRS] by the angles of cos, sin [ROWS or 1, PAIRS]; float32."""
    even, odd = tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (ROWS, 2 * PAIRS))


@triton.jit
def angle_parts(cos_sin_row_pointers, pairs, is_pair):
    """cos and sin of a row's pairs, float32: a row is [cos P | sin P]. Lanes that are no pair get the angle 0."""
    cos = tl.load(cos_sin_row_pointers, mask=is_pair, other=1)
    return cos, tl.load(cos_sin_row_pointers + pairs, mask=is_pair, other=0)


@triton.jit
def _rotate_heads(pointer, head_stride, head_blocks, heads, cos_sin, R, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):
    """Rotate R lanes from `pointer` in a block of the heads of one token; `cos_sin` points to the token's row."""
    head_H = head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    lane_R = tl.arange(0, BLOCK_R)
    pair_P = tl.arange(0, BLOCK_R // 2)
    cos_P, sin_P = angle_parts(cos_sin + pair_P, R // 2, pair_P < R // 2)
    pointers_HR = pointer + head_H.to(tl.int64)[:, None] * head_stride + lane_R[None, :]
    inside_HR = (head_H < heads)[:, None] & (lane_R < R)[None, :]
    x_HR = tl.load(pointers_HR, mask=inside_HR, other=0).to(tl.float32)
    x_HR = rotated(x_HR, cos_P[None, :], sin_P[None, :], BLOCK_H, BLOCK_R // 2)
    tl.store(pointers_HR, round_to(x_HR, pointer), mask=inside_HR)


@triton.jit
def _rotate_queries_kernel(
    q, index_query, cos_sin, N, R, heads, index_heads, q_token, q_head, index_token, index_head, cos_sin_row,
    QUERY_BLOCKS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos_sin += token * cos_sin_row
    if block < QUERY_BLOCKS:
        _rotate_heads(q + token * q_token + N, q_head, block, heads, cos_sin, R, BLOCK_H, BLOCK_R)
    elif index_query is not None:
        block -= QUERY_BLOCKS
        _rotate_heads(index_query + token * index_token, index_head, block, index_heads, cos_sin, R, BLOCK_H, BLOCK_R)


@triton.jit
def _rotated_tokens(
    pointer, token_stride, cos_sin, cos_sin_row, token_T, T, R, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr
):
    """The R lanes from `pointer` in a block of tokens, each by its token's angles; float32 [BLOCK_T, BLOCK_R]."""
    is_token_T1 = (token_T < T)[:, None]
    lane_1R = tl.arange(0, BLOCK_R)[None, :]
    x_TR = tl.load(pointer + token_T[:, None] * token_stride + lane_1R, mask=is_token_T1 & (lane_1R < R), other=0)
    x_TR = x_TR.to(tl.float32)
    if cos_sin is not None:
        pair_1P = tl.arange(0, BLOCK_R // 2)[None, :]
        pointers_TP = cos_sin + token_T[:, None] * cos_sin_row + pair_1P
        cos_TP, sin_TP = angle_parts(pointers_TP, R // 2, is_token_T1 & (pair_1P < R // 2))
        x_TR = rotated(x_TR, cos_TP, sin_TP, BLOCK_T, BLOCK_R // 2)
    return x_TR


@triton.jit
def _absorb_head(
    q, weight, cos_sin, out, token_T, T, N, C, R, q_token, weight_row, cos_sin_row, out_token,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A block of tokens and latent lanes of the head that `q`, `weight` and `out` point to."""
    lane_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_token_T1 = (token_T < T)[:, None]
    q_T1 = q + token_T[:, None] * q_token
    out_T1 = out + token_T[:, None] * out_token

    sums_TC = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for start in range(0, N, BLOCK_N):
        lane_N = start + tl.arange(0, BLOCK_N)
        q_TN = tl.load(q_T1 + lane_N[None, :], mask=is_token_T1 & (lane_N < N)[None, :], other=0)
        weight_NC = tl.load(
            weight + lane_N.to(tl.int64)[:, None] * weight_row + lane_C[None, :],
            mask=(lane_N < N)[:, None] & (lane_C < C)[None, :],
            other=0,
        )
        sums_TC = dot(q_TN, weight_NC, sums_TC, WIDEN)
    tl.store(out_T1 + lane_C[None, :], round_to(sums_TC, out), mask=is_token_T1 & (lane_C < C)[None, :])

    if tl.program_id(1) == 0:
        rope_TR = _rotated_tokens(q + N, q_token, cos_sin, cos_sin_row, token_T, T, R, BLOCK_T, BLOCK_R)
        lane_1R = tl.arange(0, BLOCK_R)[None, :]
        tl.store(out_T1 + C + lane_1R, round_to(rope_TR, out), mask=is_token_T1 & (lane_1R < R))


@triton.jit
def _absorb_kernel(
    q, weight, cos_sin, out, index_query, T, H, N, C, R, index_heads, q_token, q_head, weight_head, weight_row,
    cos_sin_row, out_token, out_head, index_token, index_head,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, WIDEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    head = tl.program_id(2).to(tl.int64)
    token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    if head < H:
        _absorb_head(
            q + head * q_head, weight + head * weight_head, cos_sin, out + head * out_head, token_T, T, N, C, R,
            q_token, weight_row, cos_sin_row, out_token, BLOCK_T, BLOCK_C, BLOCK_N, BLOCK_R, WIDEN,
        )  # fmt: skip
    elif index_query is not None:
        rotated_head = (head - H) * tl.num_programs(1) + tl.program_id(1)
        # A program behind the last head has no tokens.
        tokens = tl.where(rotated_head < index_heads, T, 0)
        index_query += rotated_head * index_head
        x_TR = _rotated_tokens(index_query, index_token, cos_sin, cos_sin_row, token_T, tokens, R, BLOCK_T, BLOCK_R)
        lane_1R = tl.arange(0, BLOCK_R)[None, :]
        pointers_TR = index_query + token_T[:, None] * index_token + lane_1R
        tl.store(pointers_TR, round_to(x_TR, index_query), mask=(token_T < tokens)[:, None] & (lane_1R < R))


class AbsorbTiles(NamedTuple):
    """Block sizes of a launch, from the shapes alone."""

    tokens: int
    latents: int
    nope: int
    warps: int
    stages: int


def absorb_tiles(T: int, N: int, C: int, is_wide: bool) -> AbsorbTiles:
    """Few tokens: small tiles, to read the weight from all processors. Many: 64 rows for wgmma.

    A product has two or three steps of N: two stages, since more programs hide more latency than a deeper pipeline.
    """
    tokens = tile(T, largest=64)
    return AbsorbTiles(tokens, tile(C, largest=2 * max(32, tokens)), tile(N, largest=32 if is_wide else 64), 4, 2)


def rotate_torch(x: Tensor, cos_sin_TR: Tensor) -> Tensor:
    """Pairs (2j, 2j+1) of the last dim of x [T, ..., R] rotated by the token's angles, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (
        part.reshape(len(x), *(1,) * (x.dim() - 2), x.shape[-1] // 2) for part in cos_sin_TR.to(wide).chunk(2, dim=-1)
    )
    even, odd = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def rotate_queries_torch_(q_THX: Tensor, cos_sin_TR: Tensor, index_query_TIJ: Tensor | None = None) -> None:
    R = cos_sin_TR.shape[1]
    q_THX[..., -R:] = rotate_torch(q_THX[..., -R:], cos_sin_TR)
    if index_query_TIJ is not None:
        index_query_TIJ[..., :R] = rotate_torch(index_query_TIJ[..., :R], cos_sin_TR)


def rotate_queries_triton_(q_THX: Tensor, cos_sin_TR: Tensor, index_query_TIJ: Tensor | None = None) -> None:
    """Rotate in place: the last R lanes of each head, the first R of each index head.

    q_THX, index_query_TIJ: one dtype, float32 or bfloat16; cos_sin_TR float32, [cos R/2 | sin R/2] of the angles.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    T, R = _check_queries(q_THX, cos_sin_TR)
    _, H, X = q_THX.shape
    index_heads, index_token, index_head = _check_index_queries(index_query_TIJ, T, R, q_THX.dtype)
    block = tile(H, largest=32)
    query_blocks = triton.cdiv(H, block)
    _rotate_queries_kernel[(T, query_blocks + triton.cdiv(index_heads, block))](
        q_THX, index_query_TIJ, cos_sin_TR, X - R, R, H, index_heads, *q_THX.stride()[:2],
        index_token, index_head, cos_sin_TR.stride(0),
        QUERY_BLOCKS=query_blocks, BLOCK_H=block, BLOCK_R=tile(R), num_warps=4,
    )  # fmt: skip


def absorb_queries_torch(
    q_THX: Tensor, w_uk_HNC: Tensor, cos_sin_TR: Tensor | None = None, index_query_TIJ: Tensor | None = None
) -> Tensor:
    if index_query_TIJ is not None and cos_sin_TR is not None:
        R = cos_sin_TR.shape[1]
        index_query_TIJ[..., :R] = rotate_torch(index_query_TIJ[..., :R], cos_sin_TR)
    wide = torch.promote_types(q_THX.dtype, torch.float32)
    N = w_uk_HNC.shape[1]
    latent_THC = torch.einsum("thn,hnc->thc", q_THX[..., :N].to(wide), w_uk_HNC.to(wide)).to(q_THX.dtype)
    rope_THR = q_THX[..., N:]
    return torch.cat((latent_THC, rope_THR if cos_sin_TR is None else rotate_torch(rope_THR, cos_sin_TR)), dim=-1)


def absorb_queries_triton(
    q_THX: Tensor, w_uk_HNC: Tensor, cos_sin_TR: Tensor | None = None, index_query_TIJ: Tensor | None = None
) -> Tensor:
    """Queries that meet latents: [q_nope W_UK | q_rope].

    q_THX: [nope N | rope R] a head, float32 or bfloat16, only read; w_uk_HNC: the same dtype.
    cos_sin_TR: float32, [cos R/2 | sin R/2]: the rope lanes are rotated on the way. None: they are rotated already.
    index_query_TIJ: the same dtype, only with cos_sin: the first R lanes of its heads are rotated too, in place.
    Returns q_THL in that dtype, dense, L = C + R.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    T, R = _check_queries(q_THX, cos_sin_TR, w_uk_HNC.shape[1])
    _, H, X = q_THX.shape
    N, C = X - R, w_uk_HNC.shape[-1]
    check_tensor("w_uk", w_uk_HNC, (H, N, C), q_THX.dtype)
    out_THL = torch.empty(T, H, C + R, dtype=q_THX.dtype, device=q_THX.device)
    tiles = absorb_tiles(T, N, C, widen(q_THX.dtype))
    latent_blocks = triton.cdiv(C, tiles.latents)
    if index_query_TIJ is not None and cos_sin_TR is None:
        raise KernelInputError("expected cos_sin with index_query, which is rotated by it, found none")
    index_heads, index_token, index_head = _check_index_queries(index_query_TIJ, T, R, q_THX.dtype)
    _absorb_kernel[(triton.cdiv(T, tiles.tokens), latent_blocks, H + triton.cdiv(index_heads, latent_blocks))](
        q_THX, w_uk_HNC, cos_sin_TR, out_THL, index_query_TIJ, T, H, N, C, R, index_heads,
        *q_THX.stride()[:2], *w_uk_HNC.stride()[:2],
        0 if cos_sin_TR is None else cos_sin_TR.stride(0), *out_THL.stride()[:2], index_token, index_head,
        BLOCK_T=tiles.tokens, BLOCK_C=tiles.latents, BLOCK_N=tiles.nope, BLOCK_R=tile(R), WIDEN=widen(q_THX.dtype),
        num_warps=tiles.warps, num_stages=tiles.stages, **overlap(q_THX.device),
    )  # fmt: skip
    return out_THL


def _check_queries(q_THX: Tensor, cos_sin_TR: Tensor | None, nope: int = 0) -> tuple[int, int]:
    """T and R. R is the width of cos_sin; without it, what `nope` leaves of a head."""
    check_tensor("q", q_THX, (None, None, None), torch.float32, torch.bfloat16)
    T, _, X = q_THX.shape
    R = X - nope
    if cos_sin_TR is not None:
        check_tensor("cos_sin", cos_sin_TR, (T, R if nope else None), torch.float32)
        R = cos_sin_TR.shape[1]
    if R % 2 or not 0 < R <= X:
        raise KernelInputError(f"expected q with an even number of rope lanes, found {R} of the {X} lanes of a head")
    return T, R


def _check_index_queries(index_query_TIJ: Tensor | None, T: int, R: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Heads, and the strides of tokens and heads; zeros without index queries."""
    if index_query_TIJ is None:
        return 0, 0, 0
    check_tensor("index_query", index_query_TIJ, (T, None, None), dtype)
    _, index_heads, J = index_query_TIJ.shape
    if R > J:
        raise KernelInputError(f"expected index_query with at least the {R} lanes of cos_sin, found {J}")
    return index_heads, index_query_TIJ.stride(0), index_query_TIJ.stride(1)
