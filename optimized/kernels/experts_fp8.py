"""The experts of `experts` with 8-bit operands: two grouped products over rows sorted by expert, a scale a group.

h     = Σ_g (qx_g · qw_g) · scale_x[row, g] · scale_w[block, g]     groups of 128 columns, ascending; float32
act   = bfloat16(silu(bfloat16(h_gate)) · bfloat16(h_up))           then quantized: a block of lanes is a group
row   = bfloat16(weight of the slot · the same sum over groups of lanes)
y     = bfloat16(bfloat16(Σ_k row_k) / max(Σ_k weight_k, 1e-9))

A tile of rows meets 128 weight rows at a time, so that one weight scale holds for a whole tile and group, and the lanes
that the first product makes together are a group of the second: they are activated and quantized before they are
stored. The sum of one group stays inside the tensor cores, groups are added up in float32.
Assumes what `sort_rows` gives, without shared experts.

Measured on an H200 at 20,736 tokens, K = 2, D = 1536, 4 / 64 experts of 2112 lanes: 1.34 / 1.66 ms and 0.53 / 0.66 ms
for the two products, 0.12 ms to quantize; error against the scheme in float64 1.5e-2, as the twins'. In bfloat16 a
whole layer takes 1.85 / 2.10 ms: this form halves the memory, not the time. Source: vision specification, section 9.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, dot, round_to, tile, tl, triton
from optimized.kernels.common import widen as widen_dtype
from optimized.kernels.experts import ExpertPlan
from optimized.kernels.fp8 import GROUP, quantize_rows_torch, quantized, to_e4m3
from optimized.kernels.router import sigmoid
from optimized.kernels.weight_tiles import tile_of_rows

# Of a tile.
MOST_ROWS = 128
# Of the sum of weights that divides.
SMALLEST_SUM = 1e-9

# T tokens  K slots of a token  R = T · K rows by expert  E experts  X filled width of a row  G = X/128 groups
# F filled ffn width  D output width


@triton.jit
def _round_bfloat16(x):
    """float32 rounded to the nearest bfloat16, ties to even, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _group_product(a, weights, row, column, width, scale, sums, WIDEN: tl.constexpr):
    """sums + (a · 128 weight rows over one group) · scale; `weights` of `width` columns."""
    row_D = row + tl.arange(0, 128)
    column_X = column + tl.arange(0, 128)
    b_XD = tl.load(weights + row_D.to(tl.int64)[None, :] * width + column_X[:, None])
    return sums + dot(a, b_XD, tl.zeros_like(sums), WIDEN) * scale


@triton.jit(do_not_specialize=["tiles"])
def _swiglu_kernel(
    x, x_scale, weights, weight_scale, act, act_scale, slot_of_row, tile_map, tiles, G, blocks, slots,
    BLOCK_R: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of rows, 128 lanes: activated, quantized. Weight rows: `blocks` blocks of gate, then as many of up."""
    expert, first, end, block = tile_of_rows(tile_map, tiles, blocks)
    if expert < 0:
        return
    rows = first + tl.arange(0, BLOCK_R)
    in_tile = rows < end
    token = (tl.load(slot_of_row + rows, mask=in_tile, other=0) // slots).to(tl.int64)
    lane = tl.arange(0, 128)
    gate_block = expert * 2 * blocks + block
    gate = tl.zeros([BLOCK_R, 128], tl.float32)
    up = tl.zeros([BLOCK_R, 128], tl.float32)
    for g in range(G):
        a = tl.load(x + token[:, None] * (G * 128) + g * 128 + lane[None, :], mask=in_tile[:, None], other=0.0)
        scale = tl.load(x_scale + token * G + g, mask=in_tile, other=0.0)[:, None]
        of_gate = scale * tl.load(weight_scale + gate_block * G + g)
        of_up = scale * tl.load(weight_scale + (gate_block + blocks) * G + g)
        gate = _group_product(a, weights, gate_block * 128, g * 128, G * 128, of_gate, gate, WIDEN)
        up = _group_product(a, weights, (gate_block + blocks) * 128, g * 128, G * 128, of_up, up, WIDEN)
    gate = _round_bfloat16(gate)
    activated = _round_bfloat16(gate * sigmoid(gate) * _round_bfloat16(up))
    ratio, scale_R = quantized(activated, tl.max(tl.abs(activated), axis=1))
    row = rows.to(tl.int64)
    tl.store(act + row[:, None] * (blocks * 128) + block * 128 + lane[None, :], to_e4m3(ratio), mask=in_tile[:, None])
    tl.store(act_scale + row * blocks + block, scale_R, mask=in_tile)


@triton.jit(do_not_specialize=["tiles"])
def _down_kernel(
    act, act_scale, weights, weight_scale, slot_weight, out, slot_of_row, tile_map, tiles, G, blocks, D,
    BLOCK_R: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of rows, 128 outputs, each row at its slot and times the slot's weight."""
    expert, first, end, block = tile_of_rows(tile_map, tiles, blocks)
    if expert < 0:
        return
    rows = first + tl.arange(0, BLOCK_R)
    in_tile = rows < end
    row = rows.to(tl.int64)
    lane = tl.arange(0, 128)
    weight_block = expert * blocks + block
    sums = tl.zeros([BLOCK_R, 128], tl.float32)
    for g in range(G):
        a = tl.load(act + row[:, None] * (G * 128) + g * 128 + lane[None, :], mask=in_tile[:, None], other=0.0)
        scale = tl.load(act_scale + row * G + g, mask=in_tile, other=0.0)[:, None]
        scale = scale * tl.load(weight_scale + weight_block * G + g)
        sums = _group_product(a, weights, weight_block * 128, g * 128, G * 128, scale, sums, WIDEN)
    slot = tl.load(slot_of_row + rows, mask=in_tile, other=0).to(tl.int64)
    sums = sums * tl.load(slot_weight + slot, mask=in_tile, other=0.0)[:, None]
    d = block * 128 + lane
    tl.store(out + slot[:, None] * D + d[None, :], round_to(sums, out), mask=in_tile[:, None] & (d < D)[None, :])


@triton.jit
def _combine_kernel(rows, weights, out, D, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """One token: the sum of its slots over the sum of their weights."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    for k in tl.static_range(K):
        sums += tl.load(rows + (t * K + k) * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += tl.load(weights + t * K + k)
    divisor = tl.maximum(total, 1e-9) + tl.zeros([BLOCK_D], tl.float32)
    tl.store(out + t * D + d, round_to(tl.div_rn(_round_bfloat16(sums), divisor), out), mask=d < D)


def fp8_swiglu_torch(
    q_TX: Tensor, scale_TG: Tensor, weights_EYX: Tensor, weight_scale_EYG: Tensor, plan: ExpertPlan, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    x_TX = _widened_rows(q_TX, scale_TG, dtype)
    act_RF = x_TX.new_empty(len(plan.slot_R), weights_EYX.shape[1] // 2, dtype=dtype)
    for rows, weights, scales in zip(_experts(plan), weights_EYX, weight_scale_EYG, strict=True):
        x_RX = x_TX[plan.slot_R[rows].long() // plan.slots]
        h_RY = (x_RX @ _widened_blocks(weights, scales, dtype).T).to(dtype)
        gate_RF, up_RF = h_RY.to(x_TX.dtype).chunk(2, dim=-1)
        act_RF[rows] = (F.silu(gate_RF) * up_RF).to(dtype)
    return quantize_rows_torch(act_RF)


def fp8_swiglu_triton(
    q_TX: Tensor, scale_TG: Tensor, weights_EYX: Tensor, weight_scale_EYG: Tensor, plan: ExpertPlan, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """silu(gate · x) · (up · x) of each row, quantized: act_RF (float8_e4m3fn) and its scale_RG (float32).

    q_TX, scale_TG: `quantize_rows` of the tokens. weights_EYX: float8_e4m3fn, gate F then up F rows, F a multiple of
    128; weight_scale_EYG: a scale for each of its blocks. `dtype`, that of the intermediate rounding, is bfloat16.
    Raises: KernelInputError for other shapes or dtypes.
    """
    G, Y = _check(q_TX, scale_TG, weights_EYX, weight_scale_EYG, plan, dtype)
    R, blocks = len(plan.slot_R), Y // (2 * GROUP)
    if Y % (2 * GROUP) or len(q_TX) * plan.slots != R:
        raise KernelInputError(
            f"expected gate and up rows in multiples of {GROUP} each, for {R // plan.slots} tokens as planned, "
            f"found {Y} rows and {len(q_TX)} tokens"
        )
    act_RF = torch.empty(R, blocks * GROUP, dtype=torch.float8_e4m3fn, device=q_TX.device)
    scale_RG = torch.empty(R, blocks, dtype=torch.float32, device=q_TX.device)
    tiles = plan.tile_3M.shape[1]
    if R:
        _swiglu_kernel[(tiles * blocks,)](
            q_TX, scale_TG, weights_EYX, weight_scale_EYG, act_RF, scale_RG, plan.slot_R, plan.tile_3M, tiles, G,
            blocks, plan.slots, BLOCK_R=plan.tile_rows, WIDEN=widen_dtype(torch.float8_e4m3fn),
            num_warps=8 if plan.tile_rows >= 128 else 4, num_stages=3,
        )  # fmt: skip
    return act_RF, scale_RG


def fp8_down_torch(
    act_RF: Tensor,
    scale_RG: Tensor,
    weights_EDF: Tensor,
    weight_scale_EDG: Tensor,
    weights_TK: Tensor,
    plan: ExpertPlan,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    x_RF = _widened_rows(act_RF, scale_RG, dtype)
    rows_RD = x_RF.new_empty(len(act_RF), width, dtype=dtype)
    for rows, weights, scales in zip(_experts(plan), weights_EDF, weight_scale_EDG, strict=True):
        slot_R = plan.slot_R[rows].long()
        out_RD = (x_RF[rows] @ _widened_blocks(weights, scales, dtype).T)[:, :width]
        rows_RD[slot_R] = (out_RD * weights_TK.flatten()[slot_R, None]).to(dtype)
    return rows_RD.unflatten(0, (-1, plan.slots))


def fp8_down_triton(
    act_RF: Tensor,
    scale_RG: Tensor,
    weights_EDF: Tensor,
    weight_scale_EDG: Tensor,
    weights_TK: Tensor,
    plan: ExpertPlan,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    """rows_TKD: the expert outputs of each token at its slots, times the slots' weights, in bfloat16.

    act_RF, scale_RG: what `fp8_swiglu` returns. weights_EDF: float8_e4m3fn, rows filled up to a multiple of 128, of
    which `width` count; weight_scale_EDG: a scale for each block. weights_TK: float32.
    Raises: KernelInputError for other shapes or dtypes.
    """
    G, filled = _check(act_RF, scale_RG, weights_EDF, weight_scale_EDG, plan, dtype)
    R = len(act_RF)
    check_tensor("expert weights of tokens", weights_TK, (R // plan.slots, plan.slots), torch.float32)
    if len(plan.slot_R) != R or not filled - GROUP < width <= filled:
        raise KernelInputError(
            f"expected {len(plan.slot_R)} rows as planned and weight rows for {width} outputs, found {R} and {filled}"
        )
    rows_TKD = torch.empty(R // plan.slots, plan.slots, width, dtype=dtype, device=act_RF.device)
    blocks, tiles = filled // GROUP, plan.tile_3M.shape[1]
    if R:
        _down_kernel[(tiles * blocks,)](
            act_RF, scale_RG, weights_EDF, weight_scale_EDG, weights_TK.contiguous(), rows_TKD, plan.slot_R,
            plan.tile_3M, tiles, G, blocks, width, BLOCK_R=plan.tile_rows, WIDEN=widen_dtype(torch.float8_e4m3fn),
            num_warps=8 if plan.tile_rows >= 128 else 4, num_stages=3,
        )  # fmt: skip
    return rows_TKD


def fp8_combine_torch(rows_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    total_T1 = weights_TK.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
    return (rows_TKD.sum(1).to(total_T1.dtype) / total_T1).to(rows_TKD.dtype)


def fp8_combine_triton(rows_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """Add up the rows of each token, which have their weights already, and divide by the sum of these: [T, D].

    rows_TKD bfloat16, dense; weights_TK float32. Raises: KernelInputError for another shape or dtype.
    """
    check_tensor("expert outputs", rows_TKD, (None, None, None), torch.bfloat16)
    T, K, D = rows_TKD.shape
    check_tensor("expert weights of tokens", weights_TK, (T, K), torch.float32)
    out_TD = torch.empty(T, D, dtype=rows_TKD.dtype, device=rows_TKD.device)
    if T:
        block = tile(D, 16, 1024)
        _combine_kernel[(T, triton.cdiv(D, block))](
            rows_TKD.contiguous(), weights_TK.contiguous(), out_TD, D, K=K, BLOCK_D=block, num_warps=4
        )
    return out_TD


def _check(
    q: Tensor, scale: Tensor, weights: Tensor, weight_scale: Tensor, plan: ExpertPlan, dtype: torch.dtype
) -> tuple[int, int]:
    """Groups of a row, and weight rows."""
    check_tensor("quantized rows", q, (None, None), torch.float8_e4m3fn)
    rows, X = q.shape
    if X % GROUP or dtype != torch.bfloat16:
        raise KernelInputError(
            f"expected rows filled up to a multiple of {GROUP} and bfloat16 activations, found {X} columns and {dtype}"
        )
    check_tensor("scales of rows", scale, (rows, X // GROUP), torch.float32)
    check_tensor("weights", weights, (len(plan.offset_E) - 1, None, X), torch.float8_e4m3fn)
    E, Y, _ = weights.shape
    check_tensor("scales of weights", weight_scale, (E, -(-Y // GROUP), X // GROUP), torch.float32)
    if Y % GROUP or not all(tensor.is_contiguous() for tensor in (q, scale, weights, weight_scale)):
        raise KernelInputError(f"expected dense tensors and weight rows in multiples of {GROUP}, found {Y} rows")
    return X // GROUP, Y


def _widened_rows(q_TX: Tensor, scale_TG: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return q_TX.to(wide) * scale_TG.to(wide).repeat_interleave(GROUP, dim=1)


def _widened_blocks(q_YX: Tensor, scale_YG: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return q_YX.to(wide) * scale_YG.to(wide).repeat_interleave(GROUP, dim=0).repeat_interleave(GROUP, dim=1)


def _experts(plan: ExpertPlan) -> list[slice]:
    return [slice(first, end) for first, end in pairwise(plan.offset_E.tolist())]
