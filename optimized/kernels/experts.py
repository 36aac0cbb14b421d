"""Experts as grouped matrix products over rows sorted by expert.

expert(x) = down · (silu(gate · x) · (up · x))                         y = Σ_k weight_k expert_k(x) + Σ shared(x)

A row is a token at one of its slots: K chosen experts, then the shared ones, which are further experts (E, E+1, …) that
every token chooses with weight 1. `sort_rows` orders rows by expert and cuts each expert's rows into tiles; the two
products run over tiles of rows and blocks of weight rows, the weight blocks of a tile next to each other so that they
share its activations, the tiles of an expert next to each other so that they share its weights. SwiGLU is fused
into the first product. The second writes each row at its token and slot, and `combine` adds a token's rows.
Weights come through the copy engine where their rows allow it (multiples of 16 bytes); a tile of 128 that is at most
half full is computed as one of 64. Tiles of prompts: `experts_wide`.

Sums are float32, with one rounding each: activated values, expert outputs, the combined output. No atomics: the same
input gives the same bytes. All grids depend on shapes alone, and rows are counted on the device.
Assumes expert ids in [0, E), and weight stacks whose rows are evenly spaced.

Measured on an H200, bfloat16, 256 of 5120 x 1536 and a shared one, K = 8, in a CUDA graph: sort, both products and
combine take 120 / 1114 / 2377 / 2797 us at T = 1 / 16 / 64 / 256 (reading the weights alone: 93 / 1065 / 2311 / 2658).
Source: text_model specification, sections 11.2 and 11.4.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import (
    check_tensor,
    next_power_of_2,
    overlap,
    round_to,
    tile,
    tl,
    triton,
    wait_for_inputs,
    widen,
)
from optimized.kernels.experts_wide import (
    STRETCHED_TILE_ROWS,
    WIDE_TILE_ROWS,
    add_to,
    main_rows,
    row_blocks,
    wide_down_kernel,
    wide_swiglu_kernel,
)
from optimized.kernels.parts import weighted_parts
from optimized.kernels.router import sigmoid
from optimized.kernels.weight_tiles import tile_of_rows, weight_rows, weight_tile

# T tokens  D model  E experts with the shared ones  K chosen experts  S slots of a token  F ffn width  X = 2F
# R = T · S rows by expert


class ExpertPlan(NamedTuple):
    """Which rows each expert works on; int32, on the device.

    `slot_R`: token · slots + slot of each row, in the order of (expert, token). `offset_E`: the first row of each
    expert, and the number of rows behind them. `tile_3M`: of each tile its expert (-1: no tile), first row and end.
    `tile_rows`: the most rows of a tile, a power of two; or `STRETCHED_TILE_ROWS`, of which no more tiles of an
    expert are stretched beyond a power of two than it takes, the first ones.
    """

    slot_R: Tensor
    offset_E: Tensor
    tile_3M: Tensor
    slots: int
    tile_rows: int


class Combined(NamedTuple):
    """`output_TD`; the sums over chosen and over shared experts apart, None unless observed (or without any)."""

    output_TD: Tensor
    routed_TD: Tensor | None
    shared_TD: Tensor | None


def rows_per_tile(T: int, K: int, E: int, dtype: torch.dtype, most: int = STRETCHED_TILE_ROWS) -> int:
    """A tile that holds all rows of nearly every expert when T tokens choose evenly: mean and four deviations.

    It is stretched where many experts have a few rows more than a plain one, and few need a second: elsewhere plain
    tiles are as fast. `most`: the largest tile that there is.
    """
    if dtype == torch.float32:
        return 16
    mean = T * K / E
    if WIDE_TILE_ROWS < mean + sqrt(mean) <= STRETCHED_TILE_ROWS <= most:
        return STRETCHED_TILE_ROWS
    return tile(ceil(mean + 4 * sqrt(mean)), 16, WIDE_TILE_ROWS)


def tile_bound(T: int, K: int, E: int, shared: int, tile_rows: int) -> int:
    """The most tiles that T tokens can need, however they choose."""
    busy = min(E, T * K)
    return (T * K + busy * (tile_rows - 1)) // tile_rows + shared * -(-T // tile_rows)


def sort_rows_torch(
    expert_ids_TK: Tensor, E: int, tile_rows: int, shared: int = 0, counts_E: Tensor | None = None
) -> ExpertPlan:
    """The definition: a stable sort of rows by expert."""
    T, K = expert_ids_TK.shape
    device = expert_ids_TK.device
    shared_ids_TX = torch.arange(E, E + shared, device=device).expand(T, -1)
    ids_R = torch.cat((expert_ids_TK.long(), shared_ids_TX), dim=1).flatten()
    counts_E = torch.bincount(ids_R, minlength=E + shared)
    ends_E, tiles_E = counts_E.cumsum(0), (counts_E + tile_rows - 1) // tile_rows
    last_tile_E = tiles_E.cumsum(0)
    main = main_rows(tile_rows)
    rest = tile_rows - main
    stretched_E = (counts_E - tiles_E * main + rest - 1).clamp(min=0) // max(rest, 1)
    tile_M = torch.arange(tile_bound(T, K, E, shared, tile_rows), device=device)
    expert_M = torch.searchsorted(last_tile_E, tile_M, right=True)
    exists_M = expert_M < E + shared
    expert_M = expert_M.clamp(max=E + shared - 1)
    number_M, stretched_M = tile_M - last_tile_E[expert_M] + tiles_E[expert_M], stretched_E[expert_M]
    end_M = ends_E[expert_M]
    first_M = end_M - counts_E[expert_M] + number_M * main + torch.minimum(number_M, stretched_M) * rest
    size_M = main + (number_M < stretched_M) * rest
    tile_3M = torch.stack((expert_M, first_M, torch.minimum(first_M + size_M, end_M))).where(exists_M, -1)
    offset_E = F.pad(ends_E, (1, 0))
    return ExpertPlan(ids_R.argsort(stable=True).int(), offset_E.int(), tile_3M.int(), K + shared, tile_rows)


def sort_rows_triton(
    expert_ids_TK: Tensor, E: int, tile_rows: int, shared: int = 0, counts_E: Tensor | None = None
) -> ExpertPlan:
    """Plan the rows of `expert_ids_TK` (int32, in [0, E)) and of `shared` experts behind them.

    Each expert has a program. It needs the rows of all experts to know where its own begin: counts_E, int32, as the
    router gives them; None: counted in a launch before.
    Raises: KernelInputError for another shape or dtype.
    """
    check_tensor("expert ids", expert_ids_TK, (None, None), torch.int32)
    T, K = expert_ids_TK.shape
    device = expert_ids_TK.device
    tiles = tile_bound(T, K, E, shared, tile_rows)
    plan = ExpertPlan(
        torch.empty(T * (K + shared), dtype=torch.int32, device=device),
        torch.empty(E + shared + 1, dtype=torch.int32, device=device),
        torch.empty(3, tiles, dtype=torch.int32, device=device),
        K + shared,
        tile_rows,
    )
    ids, block = expert_ids_TK.contiguous(), tile(T * K, 16, 8192)
    warps = 1 if block <= 128 else 4 if block <= 1024 else 8
    if counts_E is None:
        counts_E = torch.empty(E, dtype=torch.int32, device=device)
        _count_rows_kernel[(E,)](ids, counts_E, T * K, BLOCK=block, num_warps=warps)
    check_tensor("counts", counts_E, (E,), torch.int32)
    _sort_rows_kernel[(E + shared,)](
        ids, counts_E, plan.slot_R, plan.offset_E, plan.tile_3M, T, E, shared, tiles, tile_rows, main_rows(tile_rows),
        K=K, BLOCK=block, BINS=next_power_of_2(E + shared + 1), num_warps=warps, **overlap(device),
    )  # fmt: skip
    return plan


def expert_swiglu_torch(x_TD: Tensor, gate_up_EXD: Tensor, plan: ExpertPlan) -> Tensor:
    """The definition, expert by expert: act_RF, silu(gate · x) · (up · x) of each row, rounded once."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    act_RF = x_TD.new_empty(len(plan.slot_R), gate_up_EXD.shape[1] // 2)
    for rows, gate_up_XD in zip(_rows_of_experts(plan), gate_up_EXD, strict=True):
        x_RD = x_TD[plan.slot_R[rows].long() // plan.slots]
        gate_RF, up_RF = (x_RD.to(wide) @ gate_up_XD.to(wide).T).chunk(2, dim=-1)
        act_RF[rows] = (F.silu(gate_RF) * up_RF).to(x_TD.dtype)
    return act_RF


def expert_swiglu_triton(x_TD: Tensor, gate_up_EXD: Tensor, plan: ExpertPlan) -> Tensor:
    """act_RF in the dtype of `x_TD` (float32 or bfloat16); weight rows are [gate F | up F]. Sums in float32.

    Raises: KernelInputError for other shapes or dtypes.
    """
    check_tensor("x", x_TD, (None, None), torch.float32, torch.bfloat16)
    T, D = x_TD.shape
    check_tensor("gate and up weights", gate_up_EXD, (len(plan.offset_E) - 1, None, D), x_TD.dtype)
    X = gate_up_EXD.shape[1]
    if X % 2 or T * plan.slots != len(plan.slot_R):
        raise KernelInputError(
            f"expected gate and up rows in equal numbers for {len(plan.slot_R) // plan.slots} tokens as planned, "
            f"found {X} rows and {T} tokens"
        )
    act_RF = torch.empty(len(plan.slot_R), X // 2, dtype=x_TD.dtype, device=x_TD.device)
    if act_RF.numel() == 0:
        return act_RF
    block_f, block_d, warps, stages = blocks(plan.tile_rows, x_TD.dtype, paired=True)
    weights, is_described = weight_rows("gate and up weights", gate_up_EXD, block_f, block_d)
    tiles, main = plan.tile_3M.shape[1], main_rows(plan.tile_rows)
    is_stretched = plan.tile_rows > main
    rows = {"MAIN": main, "REST": plan.tile_rows - main} if is_stretched else {"BLOCK_R": main}
    kernel = wide_swiglu_kernel if is_stretched else _swiglu_kernel
    kernel[(tiles * triton.cdiv(X // 2, block_f),)](
        x_TD, weights, act_RF, plan.slot_R, plan.tile_3M, tiles, D, X // 2, plan.slots,
        x_TD.stride(0), gate_up_EXD.stride(1), DESCRIBED=is_described, **rows,
        BLOCK_F=block_f, BLOCK_D=block_d, WIDEN=widen(x_TD.dtype),
        num_warps=warps, num_stages=stages, **overlap(x_TD.device),
    )  # fmt: skip
    return act_RF


def expert_down_torch(act_RF: Tensor, down_EDF: Tensor, plan: ExpertPlan) -> Tensor:
    """The definition, expert by expert: rows_TSD, the expert outputs of each token, rounded once."""
    wide = torch.promote_types(act_RF.dtype, torch.float32)
    by_slot_RD = act_RF.new_empty(len(act_RF), down_EDF.shape[1])
    for rows, down_DF in zip(_rows_of_experts(plan), down_EDF, strict=True):
        by_slot_RD[plan.slot_R[rows].long()] = (act_RF[rows].to(wide) @ down_DF.to(wide).T).to(act_RF.dtype)
    return by_slot_RD.unflatten(0, (-1, plan.slots))


def expert_down_triton(act_RF: Tensor, down_EDF: Tensor, plan: ExpertPlan) -> Tensor:
    """rows_TSD, the expert outputs of each token at its slots, in the dtype of `act_RF` (float32 or bfloat16).

    Sums in float32. Raises: KernelInputError for other shapes or dtypes.
    """
    check_tensor("activated rows", act_RF, (len(plan.slot_R), None), torch.float32, torch.bfloat16)
    R, width = act_RF.shape
    check_tensor("down weights", down_EDF, (len(plan.offset_E) - 1, None, width), act_RF.dtype)
    D = down_EDF.shape[1]
    rows_TSD = torch.empty(R // plan.slots, plan.slots, D, dtype=act_RF.dtype, device=act_RF.device)
    if R == 0:
        return rows_TSD
    block_d, block_f, warps, stages = blocks(plan.tile_rows, act_RF.dtype, paired=False)
    weights, is_described = weight_rows("down weights", down_EDF, block_d, block_f)
    tiles = plan.tile_3M.shape[1]
    grid = (tiles * triton.cdiv(D, block_d),)
    main = main_rows(plan.tile_rows)
    if plan.tile_rows > main or main >= WIDE_TILE_ROWS:
        act, other_act, is_described_rows = row_blocks(act_RF, plan.tile_rows, block_f)
        wide_down_kernel[grid](
            act, other_act, weights, rows_TSD, plan.slot_R, plan.tile_3M, tiles, R, D, width,
            act_RF.stride(0), down_EDF.stride(1), DESCRIBED_ROWS=is_described_rows, DESCRIBED=is_described,
            MAIN=main, REST=plan.tile_rows - main, BLOCK_D=block_d, BLOCK_F=block_f, WIDEN=widen(act_RF.dtype),
            num_warps=warps, num_stages=stages, **overlap(act_RF.device),
        )  # fmt: skip
        return rows_TSD
    _down_kernel[grid](
        act_RF, weights, rows_TSD, plan.slot_R, plan.tile_3M, tiles, D, width,
        act_RF.stride(0), down_EDF.stride(1), DESCRIBED=is_described,
        BLOCK_R=plan.tile_rows, BLOCK_D=block_d, BLOCK_F=block_f, WIDEN=widen(act_RF.dtype),
        num_warps=warps, num_stages=stages, **overlap(act_RF.device),
    )  # fmt: skip
    return rows_TSD


def combine_torch(rows_TSD: Tensor, weights_TK: Tensor, observe: bool = False) -> Combined:
    """The definition: Σ weight · row over the first K slots of a token, plus the rows of its other slots."""
    dtype, K = rows_TSD.dtype, weights_TK.shape[1]
    chosen_TKD, shared_TSD = rows_TSD.to(torch.promote_types(dtype, torch.float32)).tensor_split([K], dim=1)
    routed_TD, shared_TD = (chosen_TKD * weights_TK[..., None]).sum(1), shared_TSD.sum(1)
    return Combined(
        (routed_TD + shared_TD).to(dtype),
        routed_TD.to(dtype) if observe else None,
        shared_TD.to(dtype) if observe and shared_TSD.shape[1] else None,
    )


def combine_triton(rows_TSD: Tensor, weights_TK: Tensor, observe: bool = False) -> Combined:
    """Add up the expert outputs of each token, in float32 with one rounding of each tensor returned.

    rows_TSD float32 or bfloat16, weights_TK float32 with K ≤ S slots. Raises: KernelInputError.
    """
    check_tensor("expert outputs", rows_TSD, (None, None, None), torch.float32, torch.bfloat16)
    T, slots, D = rows_TSD.shape
    check_tensor("expert weights", weights_TK, (T, None), torch.float32)
    K = weights_TK.shape[1]
    if slots < K:
        raise KernelInputError(f"expected a row for each of {K} expert weights of a token, found {slots}")
    output_TD = torch.empty(T, D, dtype=rows_TSD.dtype, device=rows_TSD.device)
    routed_TD = torch.empty_like(output_TD) if observe else None
    shared_TD = torch.empty_like(output_TD) if observe and slots > K else None
    if T:
        block_d = tile(D, 16, 1024)
        _combine_kernel[(T, triton.cdiv(D, block_d))](
            rows_TSD, weights_TK.contiguous(), output_TD, routed_TD, shared_TD, D, *rows_TSD.stride()[:2],
            K=K, SLOTS=slots, OBSERVE=observe, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return Combined(output_TD, routed_TD, shared_TD)


def blocks(tile_rows: int, dtype: torch.dtype, paired: bool) -> tuple[int, int, int, int]:
    """Weight rows of a block, depth of a step, warps and stages. `paired`: each weight row is a gate and an up row.

    bfloat16: the fastest of those tried on an H200 at D = 5120, F = 1536, 256 experts; 16 to 32 rows wait for weights.
    float32: steps so short that the sums err no more than those of a library.
    """
    if dtype == torch.float32:
        return 32, 16, 4, 2
    if tile_rows <= 16:
        return (64, 256, 4, 2) if paired else (128, 128, 4, 3)
    if tile_rows <= 32:
        return (64, 128, 4, 2) if paired else (128, 128, 4, 3)
    if tile_rows <= 64:
        return (128, 64, 8, 4) if paired else (128, 64, 4, 3)
    return (128, 64, 8, 4) if paired else (256, 64, 8, 4)


def _rows_of_experts(plan: ExpertPlan) -> list[slice]:
    offsets = plan.offset_E.tolist()
    return [slice(first, end) for first, end in pairwise(offsets)]


@triton.jit(do_not_specialize=["rows"])
def _count_rows_kernel(ids, counts, rows, BLOCK: tl.constexpr):
    """How many ids name this program's expert."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found += (tl.load(ids + i, mask=i < rows, other=-1) == tl.program_id(0)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["T", "tiles"])
def _sort_rows_kernel(
    ids, counted, slot_out, offset_out, tile_out, T, E, shared, tiles, tile_rows, main,
    K: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One expert: counts the rows and tiles before its own, then writes its offset, tiles and rows in order."""
    wait_for_inputs(OVERLAPS)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lanes = tl.arange(0, BLOCK)
    counts = tl.load(counted + bins, mask=bins < E, other=0)
    counts = tl.where(bins < E, counts, tl.where(bins < E + shared, T, 0))
    tile_counts = (counts + tile_rows - 1) // tile_rows
    first_row = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(bins < expert, tile_counts, 0), axis=0)
    own_rows = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    own_tiles = tl.sum(tl.where(bins == expert, tile_counts, 0), axis=0)
    end_row = first_row + own_rows
    rest = tile_rows - main
    stretched = tl.maximum(own_rows - own_tiles * main + rest - 1, 0) // tl.maximum(rest, 1)

    tl.store(offset_out + expert, first_row)
    for start in range(0, own_tiles, BLOCK):
        i = start + lanes
        row = first_row + i * main + tl.minimum(i, stretched) * rest
        end = tl.minimum(row + main + (i < stretched).to(tl.int32) * rest, end_row)
        out = tile_out + first_tile + i
        tl.store(out, expert + tl.zeros_like(i), mask=i < own_tiles)
        tl.store(out + tiles, row, mask=i < own_tiles)
        tl.store(out + 2 * tiles, end, mask=i < own_tiles)
    if expert == E + shared - 1:
        tl.store(offset_out + expert + 1, end_row)
        for start in range(first_tile + own_tiles, tiles, BLOCK):
            i = start + lanes
            for part in tl.static_range(3):
                tl.store(tile_out + part * tiles + i, tl.full([BLOCK], -1, tl.int32), mask=i < tiles)

    if expert < E:
        placed = first_row
        for start in range(0, T * K, BLOCK):
            i = start + lanes
            is_own = (tl.load(ids + i, mask=i < T * K, other=-1) == expert).to(tl.int32)
            row = placed + tl.cumsum(is_own, axis=0) - 1
            tl.store(slot_out + row, i // K * (K + shared) + i % K, mask=is_own != 0)
            placed += tl.sum(is_own, axis=0)
    else:
        for start in range(0, T, BLOCK):
            t = start + lanes
            tl.store(slot_out + first_row + t, t * (K + shared) + K + expert - E, mask=t < T)


@triton.jit(do_not_specialize=["tiles"])
def _swiglu_kernel(
    x, gate_up, act, slot_of_row, tile_map, tiles, D, F, slots, x_stride, weight_stride,
    DESCRIBED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """act[row, f] = silu(gate[f] · x) (up[f] · x), x of the row's token."""
    wait_for_inputs(OVERLAPS)
    expert, first, end, block = tile_of_rows(tile_map, tiles, tl.cdiv(F, BLOCK_F))
    if expert < 0:
        return
    f = block * BLOCK_F
    if BLOCK_R >= 128 and end - first <= BLOCK_R // 2:
        _swiglu_tile(
            x, gate_up, act, slot_of_row, expert, first, end, f, D, F, slots, x_stride, weight_stride,
            DESCRIBED, BLOCK_R // 2, BLOCK_F, BLOCK_D, WIDEN,
        )  # fmt: skip
    else:
        _swiglu_tile(
            x, gate_up, act, slot_of_row, expert, first, end, f, D, F, slots, x_stride, weight_stride,
            DESCRIBED, BLOCK_R, BLOCK_F, BLOCK_D, WIDEN,
        )  # fmt: skip


@triton.jit
def _swiglu_tile(
    x, gate_up, act, slot_of_row, expert, first, end, first_f, D, F, slots, x_stride, weight_stride,
    DESCRIBED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    rows = first + tl.arange(0, BLOCK_R)
    in_tile = rows < end
    token = tl.load(slot_of_row + rows, mask=in_tile, other=0) // slots
    f = first_f + tl.arange(0, BLOCK_F)
    d = tl.arange(0, BLOCK_D)
    a_rows = x + token.to(tl.int64)[:, None] * x_stride + d[None, :]  # [BLOCK_R, BLOCK_D]
    gate_row = expert * 2 * F
    up_row = gate_row + F
    gate = tl.zeros([BLOCK_R, BLOCK_F], tl.float32)
    up = tl.zeros([BLOCK_R, BLOCK_F], tl.float32)
    for start in range(0, D, BLOCK_D):
        a = tl.load(a_rows + start, mask=in_tile[:, None] & (start + d < D)[None, :], other=0.0)
        b = weight_tile(
            gate_up, weight_stride, gate_row + first_f, up_row, start, D, BLOCK_F, BLOCK_D, DESCRIBED
        )  # [BLOCK_D, BLOCK_F]
        gate = add_to(a, b, gate, WIDEN)
        b = weight_tile(gate_up, weight_stride, up_row + first_f, up_row + F, start, D, BLOCK_F, BLOCK_D, DESCRIBED)
        up = add_to(a, b, up, WIDEN)
    activated = gate * sigmoid(gate) * up
    out = act + rows.to(tl.int64)[:, None] * F + f[None, :]
    tl.store(out, round_to(activated, act), mask=in_tile[:, None] & (f < F)[None, :])


@triton.jit(do_not_specialize=["tiles"])
def _down_kernel(
    act, down, out, slot_of_row, tile_map, tiles, D, F, act_stride, weight_stride,
    DESCRIBED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, WIDEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[slot of the row, d] = down[d] · act[row]."""
    wait_for_inputs(OVERLAPS)
    expert, first, end, block = tile_of_rows(tile_map, tiles, tl.cdiv(D, BLOCK_D))
    if expert < 0:
        return
    first_d = block * BLOCK_D
    rows = first + tl.arange(0, BLOCK_R)
    in_tile = rows < end
    d = first_d + tl.arange(0, BLOCK_D)
    f = tl.arange(0, BLOCK_F)
    a_rows = act + rows.to(tl.int64)[:, None] * act_stride + f[None, :]  # [BLOCK_R, BLOCK_F]
    sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(0, F, BLOCK_F):
        a = tl.load(a_rows + start, mask=in_tile[:, None] & (start + f < F)[None, :], other=0.0)
        b = weight_tile(
            down, weight_stride, expert * D + first_d, (expert + 1) * D, start, F, BLOCK_D, BLOCK_F, DESCRIBED
        )  # [BLOCK_F, BLOCK_D]
        sums = add_to(a, b, sums, WIDEN)
    slot = tl.load(slot_of_row + rows, mask=in_tile, other=0)
    out_rows = out + slot.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out_rows, round_to(sums, out), mask=in_tile[:, None] & (d < D)[None, :])


@triton.jit
def _combine_kernel(
    rows, weights, output, routed_out, shared_out, D, token_stride, slot_stride,
    K: tl.constexpr, SLOTS: tl.constexpr, OBSERVE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """output[t] = Σ weight · row over the K chosen slots + Σ row over the shared ones."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    of_token = rows + t * token_stride + d
    routed, shared = weighted_parts(of_token, slot_stride, weights + t * K, d < D, SLOTS, K)
    tl.store(output + t * D + d, round_to(routed + shared, output), mask=d < D)
    if OBSERVE:
        tl.store(routed_out + t * D + d, round_to(routed, output), mask=d < D)
        if SLOTS > K:
            tl.store(shared_out + t * D + d, round_to(shared, output), mask=d < D)
