"""From the packed a-projection of a layer to latents, rope key and index key, and into the cache.

a[t]        = [ q_a Q | kv_a C | rope key R | gate H | index key J | index head weights I ]     (J, I: full layers only)
q_latent    = rms(q_a; w) · q_scale
kv_latent   = rms(kv_a; w) · kv_scale
k_rope      = rope(round(rms(rope key; w)))
index key   = [ rope(first R lanes) | rest ] of round(layernorm(index key; w, b)), its eps 1e-6
head weight = index head weight · I^-½, float32

write_latents is one kernel a layer: a program for each token and each of q_latent, [kv_latent | k_rope], the index
lanes and the gate, so that a decode step of one token still uses several processors. It takes the projection in parts
(see `parts`): a product that was cut along its depth is added up here. Everything is float32 inside and rounded once;
the scales join the norms' weights in float32. The gate's lanes are passed on: added up if they are in parts, or else
unread, as a view. Cache rows are addressed by flat row; a
slot of -1 writes nothing. Two tokens of a launch must not share a slot.
Source: text_model specification, sections 5 to 7.

store_rows and gather_rows copy rows into a pool, and out of a pool or of the step's own tokens.

H200, bfloat16, released widths, inside a CUDA graph, memory cold, write_latents at T = 1 / 16 / 64 / 256 / 4096:
2.1 / 2.2 / 2.3 / 4.0 / 17 µs on full layers, 2.1 / 2.2 / 2.2 / 4.1 / 15 µs on sliding ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, next_power_of_2, overlap, round_to, tile, tl, triton, wait_for_inputs
from optimized.kernels.norm import normalized, rms_norm_torch
from optimized.kernels.parts import sum_of_parts, whole
from optimized.kernels.queries import angle_parts, rotate_torch, rotated

# T tokens  Q query latent  C kv latent  R rope dim  H heads  I index heads  J index head dim  L = C + R
# X width of the a-projection  S parts of it, or gathered rows

INDEX_KEY_EPS = 1e-6
COPIED_ROWS = 4


@dataclass(frozen=True)
class AProjection:
    """Widths of the packed a-projection, in the order of its lanes; sliding layers have no index lanes."""

    query: int
    latent: int
    rope: int
    gate: int
    index_key: int = 0
    index_heads: int = 0

    @property
    def latent_at(self) -> int:
        return self.query

    @property
    def rope_at(self) -> int:
        return self.latent_at + self.latent

    @property
    def gate_at(self) -> int:
        return self.rope_at + self.rope

    @property
    def index_key_at(self) -> int:
        return self.gate_at + self.gate

    @property
    def index_heads_at(self) -> int:
        return self.index_key_at + self.index_key

    @property
    def width(self) -> int:
        return self.index_heads_at + self.index_heads

    @property
    def row(self) -> int:
        """L, the width of a cached latent row."""
        return self.latent + self.rope

    def gate_of(self, a_TX: Tensor) -> Tensor:
        """gate_TH, the gate's logits: a view."""
        return a_TX[:, self.gate_at : self.gate_at + self.gate]


class LatentWeights(NamedTuple):
    """Norm weights in the activation dtype; the scales are sqrt(D/Q) and sqrt(D/C), or 1 without the rescale."""

    query_norm_Q: Tensor
    latent_norm_C: Tensor
    rope_norm_R: Tensor
    query_scale: float
    latent_scale: float
    index_norm_J: Tensor | None = None
    index_bias_J: Tensor | None = None


class NewLatents(NamedTuple):
    """Of the step's tokens; `index_*` only on full layers, `k_rope_unrotated_TR` only when observed.

    All dense but for `gate_TH`, the gate's logits, which may be a view of the projection.
    """

    q_latent_TQ: Tensor
    latent_TL: Tensor
    index_key_TJ: Tensor | None
    head_weights_TI: Tensor | None
    k_rope_unrotated_TR: Tensor | None
    gate_TH: Tensor


@triton.jit
def _query_part(a, part_stride, weight, out, scale, eps, S: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr):
    lane_Q = tl.arange(0, BLOCK_Q)
    inside = lane_Q < Q
    x_Q = sum_of_parts(a + lane_Q, part_stride, inside, out, S)
    weight_Q = tl.load(weight + lane_Q, mask=inside, other=0).to(tl.float32) * scale
    tl.store(out + lane_Q, round_to(normalized(x_Q, Q, eps) * weight_Q, out), mask=inside)


@triton.jit
def _latent_part(
    a, part_stride, latent_weight, rope_weight, cos_sin, out, unrotated, pool, slot, pool_row, scale, eps,
    S: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    lane_C = tl.arange(0, BLOCK_C)
    inside = lane_C < C
    x_C = sum_of_parts(a + lane_C, part_stride, inside, out, S)
    weight_C = tl.load(latent_weight + lane_C, mask=inside, other=0).to(tl.float32) * scale
    latent_C = round_to(normalized(x_C, C, eps) * weight_C, out)
    tl.store(out + lane_C, latent_C, mask=inside)

    lane_1R = tl.arange(0, BLOCK_R)[None, :]
    inside_1R = lane_1R < R
    x_1R = sum_of_parts(a + C + lane_1R, part_stride, inside_1R, out, S)
    weight_1R = tl.load(rope_weight + lane_1R, mask=inside_1R, other=0).to(tl.float32)
    # Rounded before it is rotated: the unrotated key is a value of the model, observed as such.
    key_1R = round_to(normalized(x_1R, R, eps) * weight_1R, out)
    if unrotated is not None:
        tl.store(unrotated + lane_1R, key_1R, mask=inside_1R)
    pair_1P = tl.arange(0, BLOCK_R // 2)[None, :]
    cos_1P, sin_1P = angle_parts(cos_sin + pair_1P, R // 2, pair_1P < R // 2)
    key_1R = round_to(rotated(key_1R.to(tl.float32), cos_1P, sin_1P, 1, BLOCK_R // 2), out)
    tl.store(out + C + lane_1R, key_1R, mask=inside_1R)
    if slot >= 0:
        pool += slot * pool_row
        tl.store(pool + lane_C, latent_C, mask=inside)
        tl.store(pool + C + lane_1R, key_1R, mask=inside_1R)


@triton.jit
def _index_part(
    a, part_stride, weight, bias, cos_sin, out, head_weights, pool, slot, pool_row, head_scale, eps,
    S: tl.constexpr, R: tl.constexpr, J: tl.constexpr, INDEX_HEADS: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    lane_1J = tl.arange(0, BLOCK_J)[None, :]
    inside_1J = lane_1J < J
    x_1J = sum_of_parts(a + lane_1J, part_stride, inside_1J, out, S)
    weight_1J = tl.load(weight + lane_1J, mask=inside_1J, other=0).to(tl.float32)
    bias_1J = tl.load(bias + lane_1J, mask=inside_1J, other=0).to(tl.float32)
    centred_1J = tl.where(inside_1J, x_1J - tl.sum(x_1J) / J, 0)
    # Rounded before it is rotated, as the definition's two steps are.
    key_1J = round_to(normalized(centred_1J, J, eps) * weight_1J + bias_1J, out).to(tl.float32)
    pair_1P = tl.arange(0, BLOCK_J // 2)[None, :]
    cos_1P, sin_1P = angle_parts(cos_sin + pair_1P, R // 2, pair_1P < R // 2)
    rotated_1J = rotated(key_1J, cos_1P, sin_1P, 1, BLOCK_J // 2)
    key_1J = round_to(tl.where(lane_1J < R, rotated_1J, key_1J), out)
    tl.store(out + lane_1J, key_1J, mask=inside_1J)
    if slot >= 0:
        tl.store(pool + slot * pool_row + lane_1J, key_1J, mask=inside_1J)

    lane_I = tl.arange(0, BLOCK_I)
    weight_I = sum_of_parts(a + J + lane_I, part_stride, lane_I < INDEX_HEADS, out, S)
    tl.store(head_weights + lane_I, weight_I * head_scale, mask=lane_I < INDEX_HEADS)


@triton.jit
def _write_latents_kernel(
    a, query_weight, latent_weight, rope_weight, index_weight, index_bias, cos_sin,
    q_latent, latent, index_key, head_weights, unrotated, gate, latent_pool, latent_slot, index_pool, index_slot,
    query_scale, latent_scale, head_scale, eps, index_eps, part_stride, a_row, cos_sin_row, latent_pool_row,
    index_pool_row,
    S: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, R: tl.constexpr, J: tl.constexpr, INDEX_HEADS: tl.constexpr,
    HEADS: tl.constexpr, LATENT_AT: tl.constexpr, GATE_AT: tl.constexpr, INDEX_AT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    a += token * a_row
    cos_sin += token * cos_sin_row
    if part == 0:
        _query_part(a, part_stride, query_weight, q_latent + token * Q, query_scale, eps, S, Q, BLOCK_Q)
    elif part == 1:
        if unrotated is not None:
            unrotated += token * R
        slot = tl.load(latent_slot + token)
        _latent_part(
            a + LATENT_AT, part_stride, latent_weight, rope_weight, cos_sin, latent + token * (C + R), unrotated,
            latent_pool, slot, latent_pool_row, latent_scale, eps, S, C, R, BLOCK_C, BLOCK_R,
        )  # fmt: skip
    elif part == 2:
        if J > 0:
            slot = tl.load(index_slot + token)
            _index_part(
                a + INDEX_AT, part_stride, index_weight, index_bias, cos_sin, index_key + token * J,
                head_weights + token * INDEX_HEADS, index_pool, slot, index_pool_row, head_scale, index_eps,
                S, R, J, INDEX_HEADS, BLOCK_J, BLOCK_I,
            )  # fmt: skip
    elif gate is not None:
        head = tl.arange(0, BLOCK_H)
        logit_H = sum_of_parts(a + GATE_AT + head, part_stride, head < HEADS, gate, S)
        tl.store(gate + token * HEADS + head, round_to(logit_H, gate), mask=head < HEADS)


@triton.jit
def _store_rows_kernel(rows, pool, slot, T, width, rows_row, pool_row, ROWS: tl.constexpr, BLOCK_L: tl.constexpr):
    token_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane_L = tl.arange(0, BLOCK_L)
    slot_T = tl.load(slot + token_T, mask=token_T < T, other=-1)
    inside_TL = (slot_T >= 0)[:, None] & (lane_L < width)[None, :]
    rows_TL = tl.load(rows + token_T[:, None] * rows_row + lane_L[None, :], mask=inside_TL, other=0)
    tl.store(pool + slot_T[:, None] * pool_row + lane_L[None, :], rows_TL, mask=inside_TL)


@triton.jit
def _gather_rows_kernel(
    pool, fresh, source, out, S, width, pool_row, fresh_row, ROWS: tl.constexpr, BLOCK_L: tl.constexpr
):
    row_S = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane_L = tl.arange(0, BLOCK_L)
    inside_SL = (row_S < S)[:, None] & (lane_L < width)[None, :]
    source_S1 = tl.load(source + row_S, mask=row_S < S, other=0)[:, None]
    from_pool_SL = tl.load(pool + source_S1 * pool_row + lane_L[None, :], mask=inside_SL & (source_S1 >= 0), other=0)
    from_fresh_SL = tl.load(
        fresh + (-source_S1 - 1) * fresh_row + lane_L[None, :], mask=inside_SL & (source_S1 < 0), other=0
    )
    rows_SL = tl.where(source_S1 >= 0, from_pool_SL, from_fresh_SL)
    tl.store(out + row_S[:, None] * width + lane_L[None, :], rows_SL, mask=inside_SL)


def pool_rows(name: str, pool: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """A pool of any number of leading dims as [rows, width]: a view.

    Raises: KernelInputError for another width or dtype, or rows that are not equally far apart.
    """
    check_tensor(name, pool, (*(None,) * (pool.dim() - 1), width), dtype)
    try:
        return pool.view(-1, width)
    except RuntimeError:
        raise KernelInputError(f"expected {name} with rows equally far apart, found strides {pool.stride()}") from None


def write_latents_torch(
    a_STX: Tensor,
    layout: AProjection,
    weights: LatentWeights,
    eps: float,
    cos_sin_TR: Tensor,
    latent_pool: Tensor,
    latent_slot_T: Tensor,
    index_pool: Tensor | None = None,
    index_slot_T: Tensor | None = None,
    observe: bool = False,
) -> NewLatents:
    a_TX = whole(a_STX, weights.query_norm_Q.dtype)
    wide = torch.promote_types(a_TX.dtype, torch.float32)
    query_TQ, latent_TC, rope_TR, gate_TH, index_key_TJ, head_weights_TI = a_TX.split(
        (layout.query, layout.latent, layout.rope, layout.gate, layout.index_key, layout.index_heads), dim=-1
    )
    q_latent_TQ = _rescaled_rms_norm(query_TQ, weights.query_norm_Q, weights.query_scale, eps)
    latent_TC = _rescaled_rms_norm(latent_TC, weights.latent_norm_C, weights.latent_scale, eps)
    unrotated_TR = rms_norm_torch(rope_TR, weights.rope_norm_R, eps)
    latent_TL = torch.cat((latent_TC, rotate_torch(unrotated_TR, cos_sin_TR)), dim=-1)
    store_rows_torch(latent_TL, latent_pool, latent_slot_T)
    observed_TR = unrotated_TR if observe else None
    if weights.index_norm_J is None or weights.index_bias_J is None or index_pool is None or index_slot_T is None:
        return NewLatents(q_latent_TQ, latent_TL, None, None, observed_TR, gate_TH)

    norm_J, bias_J = weights.index_norm_J.to(wide), weights.index_bias_J.to(wide)
    index_key_TJ = F.layer_norm(index_key_TJ.to(wide), (layout.index_key,), norm_J, bias_J, INDEX_KEY_EPS)
    rotated_TR, rest = index_key_TJ.to(a_TX.dtype).tensor_split((layout.rope,), dim=-1)
    index_key_TJ = torch.cat((rotate_torch(rotated_TR, cos_sin_TR), rest), dim=-1)
    store_rows_torch(index_key_TJ, index_pool, index_slot_T)
    head_weights_TI = head_weights_TI.to(wide) * layout.index_heads**-0.5
    return NewLatents(q_latent_TQ, latent_TL, index_key_TJ, head_weights_TI, observed_TR, gate_TH)


def _rescaled_rms_norm(x: Tensor, weight: Tensor, scale: float, eps: float) -> Tensor:
    # The factor joins the weight in float32: rounding the product to bfloat16 would change the weight.
    wide_weight = weight.to(torch.promote_types(x.dtype, torch.float32)) * scale
    return rms_norm_torch(x, wide_weight, eps)


def write_latents_triton(
    a_STX: Tensor,
    layout: AProjection,
    weights: LatentWeights,
    eps: float,
    cos_sin_TR: Tensor,
    latent_pool: Tensor,
    latent_slot_T: Tensor,
    index_pool: Tensor | None = None,
    index_slot_T: Tensor | None = None,
    observe: bool = False,
) -> NewLatents:
    """Norm, rescale, rotate and cache the step's tokens.

    a_STX: the projection in parts, lanes as `layout` says, float32 or bfloat16; eps: of the RMS norms.
    Norm weights and pools: one dtype, float32 or bfloat16, which the sum of the parts is rounded to.
    cos_sin_TR: float32, [cos R/2 | sin R/2] of each token's angles.
    latent_pool [..., L], index_pool [..., J]: written at the flat rows latent_slot_T and index_slot_T, int64; -1: not.
    The index tensors are given on full layers, and only there.
    Returns: `NewLatents`; head_weights_TI is float32, all else the dtype of the norm weights.
    Raises: KernelInputError for another shape, dtype or stride, or index tensors that do not fit the layout.
    """
    check_tensor("a", a_STX, (None, None, layout.width), torch.float32, torch.bfloat16)
    (S, T, _), dtype = a_STX.shape, weights.query_norm_Q.dtype
    Q, C, R, J, heads = layout.query, layout.latent, layout.rope, layout.index_key, layout.index_heads
    check_tensor("cos_sin", cos_sin_TR, (T, R), torch.float32)
    check_tensor("query norm", weights.query_norm_Q, (Q,), torch.float32, torch.bfloat16)
    check_tensor("latent norm", weights.latent_norm_C, (C,), dtype)
    check_tensor("rope norm", weights.rope_norm_R, (R,), dtype)
    check_tensor("latent slot", latent_slot_T, (T,), torch.int64)
    latent_rows = pool_rows("latent pool", latent_pool, C + R, dtype)
    index_rows, index_row = None, 0
    given = [value is not None for value in (weights.index_norm_J, weights.index_bias_J, index_pool, index_slot_T)]
    if any(given) != (J > 0) or any(given) != all(given):
        raise KernelInputError(f"expected index norm, bias, pool and slots {'all' if J else 'absent'}, found {given}")
    if weights.index_norm_J is not None and weights.index_bias_J is not None:
        assert index_pool is not None
        assert index_slot_T is not None
        check_tensor("index norm", weights.index_norm_J, (J,), dtype)
        check_tensor("index bias", weights.index_bias_J, (J,), dtype)
        check_tensor("index slot", index_slot_T, (T,), torch.int64)
        index_rows = pool_rows("index pool", index_pool, J, dtype)
        index_row = index_rows.stride(0)

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=of, device=a_STX.device)

    is_whole = S == 1 and a_STX.dtype == dtype
    new = NewLatents(
        empty(T, Q),
        empty(T, C + R),
        empty(T, J) if J else None,
        empty(T, heads, of=torch.float32) if J else None,
        empty(T, R) if observe else None,
        layout.gate_of(a_STX[0]) if is_whole else empty(T, layout.gate),
    )
    parts = 4 if not is_whole else 3 if J else 2
    _write_latents_kernel[(T, parts)](
        a_STX, weights.query_norm_Q, weights.latent_norm_C, weights.rope_norm_R, weights.index_norm_J,
        weights.index_bias_J, cos_sin_TR, *new[:-1], None if is_whole else new.gate_TH,
        latent_rows, latent_slot_T, index_rows, index_slot_T,
        weights.query_scale, weights.latent_scale, heads**-0.5 if heads else 0.0, eps, INDEX_KEY_EPS,
        *a_STX.stride()[:2], cos_sin_TR.stride(0), latent_rows.stride(0), index_row,
        S=S, Q=Q, C=C, R=R, J=J, INDEX_HEADS=heads, HEADS=layout.gate,
        LATENT_AT=layout.latent_at, GATE_AT=layout.gate_at, INDEX_AT=layout.index_key_at,
        BLOCK_Q=next_power_of_2(Q), BLOCK_C=next_power_of_2(C), BLOCK_R=tile(R), BLOCK_J=next_power_of_2(max(2, J)),
        BLOCK_I=next_power_of_2(heads), BLOCK_H=next_power_of_2(layout.gate), num_warps=4, **overlap(a_STX.device),
    )  # fmt: skip
    return new


def store_rows_torch(rows_TL: Tensor, pool: Tensor, slot_T: Tensor) -> None:
    is_stored_T = slot_T >= 0
    pool_rows("pool", pool, rows_TL.shape[1], rows_TL.dtype)[slot_T[is_stored_T]] = rows_TL[is_stored_T]


def store_rows_triton(rows_TL: Tensor, pool: Tensor, slot_T: Tensor) -> None:
    """Write row t to the flat row slot_T[t] (int64; -1: nowhere) of a pool [..., L] of the same dtype.

    Two tokens must not share a slot. Raises: KernelInputError for another shape, dtype or stride.
    """
    check_tensor("rows", rows_TL, (None, None))
    T, L = rows_TL.shape
    check_tensor("slot", slot_T, (T,), torch.int64)
    pool_RL = pool_rows("pool", pool, L, rows_TL.dtype)
    _store_rows_kernel[(triton.cdiv(T, COPIED_ROWS),)](
        rows_TL, pool_RL, slot_T, T, L, rows_TL.stride(0), pool_RL.stride(0),
        ROWS=COPIED_ROWS, BLOCK_L=next_power_of_2(L), num_warps=4,
    )  # fmt: skip


def gather_rows_torch(pool: Tensor, fresh_TL: Tensor, source_S: Tensor) -> Tensor:
    rows_SL = fresh_TL.new_empty(len(source_S), fresh_TL.shape[1])
    is_pool_S = source_S >= 0
    rows_SL[is_pool_S] = pool_rows("pool", pool, fresh_TL.shape[1], fresh_TL.dtype)[source_S[is_pool_S]]
    rows_SL[~is_pool_S] = fresh_TL[-source_S[~is_pool_S] - 1]
    return rows_SL


def gather_rows_triton(pool: Tensor, fresh_TL: Tensor, source_S: Tensor) -> Tensor:
    """Rows from a pool [..., L] and from the step's own tokens, in the order of `source_S`; dense, [S, L].

    source_S: int64; at least 0: that flat row of the pool; below: row -source - 1 of fresh_TL, of the same dtype.
    Raises: KernelInputError for another shape, dtype or stride.
    """
    check_tensor("fresh", fresh_TL, (None, None))
    L = fresh_TL.shape[1]
    check_tensor("source", source_S, (None,), torch.int64)
    pool_RL = pool_rows("pool", pool, L, fresh_TL.dtype)
    S = len(source_S)
    rows_SL = torch.empty(S, L, dtype=fresh_TL.dtype, device=fresh_TL.device)
    _gather_rows_kernel[(triton.cdiv(S, COPIED_ROWS),)](
        pool_RL, fresh_TL, source_S, rows_SL, S, L, pool_RL.stride(0), fresh_TL.stride(0),
        ROWS=COPIED_ROWS, BLOCK_L=next_power_of_2(L), num_warps=4,
    )  # fmt: skip
    return rows_SL
