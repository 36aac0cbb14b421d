"""Products of few rows with a weight, as fast as the weight can be read: y = x Wᵀ.

product         y, rounded once
product_parts   y in parts over slices of the depth (see `parts`), where that is what keeps all processors reading
product_swiglu  round(silu(g) · u) with g and u the two halves of y, both rounded, as `swiglu` of a product would be

One row: a program holds a few weight rows and multiplies lane by lane. Up to MOST_ROWS rows: a tile of the weight goes
through the tensor cores, with all rows of x beside it. Sums are float32. More rows, short depths and float32 are left
to the library. The cuts follow from shapes alone: the same input gives the same bytes, alone or in company of equal
size; a row's bytes change with the number of rows.

H200, bfloat16, inside a CUDA graph, weights cold, µs at T = 1 / 16 / 64 (library in brackets; 4.4 of each are the
replay itself): o_proj of full layers 48.8 / 52.2 / 54.0 (58 / 59 / 59, floor 36.5), of sliding ones 27.8 / 32.0 / 33.4
(35 / 35 / 37, floor 18.2), dense down 43.3 / 46.4 / 47.9 (52 / 52 / 52, floor 30.8), a-projections of full layers
11.4 / 12.5 / 13.3 (14 / 15 / 16, floor 4.3), dense gate and up 77.6 / 79.7 / 82.5 (82 / 81 / 86, floor 61.5), head
358 / 370 / 386 (380 / 385 / 396, floor 338), q_b of full layers at T = 1 23.2 (27.7, floor 14.6).
Source: text_model specification, sections 6 and 11.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, dot, overlap, round_to, tile, tl, triton, wait_for_inputs, widen
from optimized.kernels.swiglu import activated, swiglu_torch, swiglu_triton
from optimized.kernels.weight_tiles import weight_rows, weight_tile

# T rows  Y depth  X outputs, or [gate F | up F] = 2F of them  S parts

MOST_ROWS = 64
# Tiles gain over the library only where each program has several steps of depth.
SHORTEST_DEPTH = 4096
MULTIPROCESSORS = 132


class Cut(NamedTuple):
    """How a product is cut: outputs and depth of a tile, and the number of slices of the depth."""

    outputs: int
    depth: int
    slices: int
    warps: int
    stages: int


def cut_of(T: int, X: int, Y: int, slices: bool) -> Cut | None:
    """None: the library's. A tile of several rows fills a processor's shared memory, so there is one wave of slices.

    Of one row, slices double the programs where the outputs alone are few.
    """
    if T == 1:
        return Cut(8, 512, 2 if slices and X <= 8192 and Y >= 2048 else 1, 4, 3)
    if not 0 < T <= MOST_ROWS or Y < SHORTEST_DEPTH:
        return None
    steps = triton.cdiv(Y, 128)
    return Cut(128, 128, max(1, min(MULTIPROCESSORS // triton.cdiv(X, 128), steps)) if slices else 1, 4, 4)


@triton.jit
def _row_sums(x, weight_rows_X, inside_X, start, stop, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr):
    """Σ over start:stop of x[y] weight[x, y], of the rows that begin at `weight_rows_X`."""
    lane_Y = tl.arange(0, BLOCK_Y)
    sums_XY = tl.zeros((BLOCK_X, BLOCK_Y), tl.float32)
    for first in range(start, stop, BLOCK_Y):
        y = first + lane_Y
        weight_XY = tl.load(
            weight_rows_X[:, None] + y[None, :], mask=inside_X[:, None] & (y < stop)[None, :], other=0.0
        )
        x_Y = tl.load(x + y, mask=y < stop, other=0.0).to(tl.float32)
        sums_XY += weight_XY.to(tl.float32) * x_Y[None, :]
    return tl.sum(sums_XY, axis=1)


@triton.jit
def _row_kernel(
    x, weight, out, X, Y, depth, weight_stride, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, OVERLAPS: tl.constexpr
):
    """out[slice, x] of one row."""
    wait_for_inputs(OVERLAPS)
    row_X = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    start = tl.program_id(1) * depth
    rows_X = weight + row_X.to(tl.int64) * weight_stride
    sums_X = _row_sums(x, rows_X, row_X < X, start, tl.minimum(start + depth, Y), BLOCK_X, BLOCK_Y)
    tl.store(out + tl.program_id(1) * X + row_X, round_to(sums_X, out), mask=row_X < X)


@triton.jit
def _row_swiglu_kernel(
    x, weight, out, width, Y, weight_stride, BLOCK_F: tl.constexpr, BLOCK_Y: tl.constexpr, OVERLAPS: tl.constexpr
):
    """out[f] of one row; gate and up rows of a lane are neighbours in the block."""
    wait_for_inputs(OVERLAPS)
    pair_X = tl.arange(0, 2 * BLOCK_F)
    lane_X = tl.program_id(0) * BLOCK_F + pair_X // 2
    rows_X = weight + (lane_X + pair_X % 2 * width).to(tl.int64) * weight_stride
    sums_X = _row_sums(x, rows_X, lane_X < width, 0, Y, 2 * BLOCK_F, BLOCK_Y)
    gate_F, up_F = tl.split(tl.reshape(round_to(sums_X, out).to(tl.float32), (BLOCK_F, 2)))
    lane_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    tl.store(out + lane_F, round_to(activated(gate_F, up_F), out), mask=lane_F < width)


@triton.jit(do_not_specialize=["T"])
def _tile_kernel(
    x, weight, out, T, X, Y, depth, x_stride, weight_stride,
    DESCRIBED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, WIDEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[slice, t, x]."""
    wait_for_inputs(OVERLAPS)
    token_T = tl.arange(0, BLOCK_T)
    lane_Y = tl.arange(0, BLOCK_Y)
    first_x = tl.program_id(0) * BLOCK_X
    start = tl.program_id(1) * depth
    stop = tl.minimum(start + depth, Y)
    x_TY = x + token_T.to(tl.int64)[:, None] * x_stride + lane_Y[None, :]
    sums_TX = tl.zeros((BLOCK_T, BLOCK_X), tl.float32)
    for y in range(start, stop, BLOCK_Y):
        a = tl.load(x_TY + y, mask=(token_T < T)[:, None] & (y + lane_Y < stop)[None, :], other=0.0)
        b = weight_tile(weight, weight_stride, first_x, X, y, stop, BLOCK_X, BLOCK_Y, DESCRIBED)  # [BLOCK_Y, BLOCK_X]
        sums_TX = dot(a, b, sums_TX, WIDEN)
    lane_X = first_x + tl.arange(0, BLOCK_X)
    row_T = tl.program_id(1) * T + token_T
    inside_TX = (token_T < T)[:, None] & (lane_X < X)[None, :]
    tl.store(out + row_T.to(tl.int64)[:, None] * X + lane_X[None, :], round_to(sums_TX, out), mask=inside_TX)


@triton.jit(do_not_specialize=["T"])
def _tile_swiglu_kernel(
    x, weight, out, T, width, Y, x_stride, weight_stride,
    DESCRIBED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_Y: tl.constexpr, WIDEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[t, f]."""
    wait_for_inputs(OVERLAPS)
    token_T = tl.arange(0, BLOCK_T)
    lane_Y = tl.arange(0, BLOCK_Y)
    first_f = tl.program_id(0) * BLOCK_F
    x_TY = x + token_T.to(tl.int64)[:, None] * x_stride + lane_Y[None, :]
    gate_TF = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    up_TF = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for y in range(0, Y, BLOCK_Y):
        a = tl.load(x_TY + y, mask=(token_T < T)[:, None] & (y + lane_Y < Y)[None, :], other=0.0)
        b = weight_tile(weight, weight_stride, first_f, width, y, Y, BLOCK_F, BLOCK_Y, DESCRIBED)  # [BLOCK_Y, BLOCK_F]
        gate_TF = dot(a, b, gate_TF, WIDEN)
        b = weight_tile(weight, weight_stride, width + first_f, 2 * width, y, Y, BLOCK_F, BLOCK_Y, DESCRIBED)
        up_TF = dot(a, b, up_TF, WIDEN)
    gate_TF, up_TF = round_to(gate_TF, out).to(tl.float32), round_to(up_TF, out).to(tl.float32)
    lane_F = first_f + tl.arange(0, BLOCK_F)
    inside_TF = (token_T < T)[:, None] & (lane_F < width)[None, :]
    out_TF = out + token_T.to(tl.int64)[:, None] * width + lane_F[None, :]
    tl.store(out_TF, round_to(activated(gate_TF, up_TF), out), mask=inside_TF)


def product_torch(x_TY: Tensor, weight_XY: Tensor) -> Tensor:
    return F.linear(x_TY, weight_XY)


def product_triton(x_TY: Tensor, weight_XY: Tensor) -> Tensor:
    """y_TX in the dtype of x_TY and weight_XY, float32 or bfloat16, dense.

    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    T, X, Y = _check(x_TY, weight_XY)
    cut = cut_of(T, X, Y, False)
    if x_TY.dtype != torch.bfloat16 or cut is None:
        return F.linear(x_TY, weight_XY)
    return _cut_product(x_TY, weight_XY, cut)[0]


def product_parts_torch(x_TY: Tensor, weight_XY: Tensor) -> Tensor:
    return F.linear(x_TY, weight_XY)[None]


def product_parts_triton(x_TY: Tensor, weight_XY: Tensor) -> Tensor:
    """y in parts, S at least 1: float32 [S, T, X], or [1, T, X] in the dtype of x_TY. As `product` otherwise."""
    T, X, Y = _check(x_TY, weight_XY)
    cut = cut_of(T, X, Y, True)
    if x_TY.dtype != torch.bfloat16 or cut is None:
        return F.linear(x_TY, weight_XY)[None]
    return _cut_product(x_TY, weight_XY, cut)


def product_swiglu_torch(x_TY: Tensor, gate_up_XY: Tensor) -> Tensor:
    return swiglu_torch(F.linear(x_TY, gate_up_XY))


def product_swiglu_triton(x_TY: Tensor, gate_up_XY: Tensor) -> Tensor:
    """[T, F] in the dtype of x_TY, dense; rows of gate_up_XY are [gate F | up F].

    Raises: as `product`, and KernelInputError for an odd number of rows.
    """
    T, X, Y = _check(x_TY, gate_up_XY)
    if X % 2:
        raise KernelInputError(f"expected gate and up rows in equal numbers, found {X} rows")
    cut = cut_of(T, X, Y, False)
    if x_TY.dtype != torch.bfloat16 or cut is None:
        return swiglu_triton(F.linear(x_TY, gate_up_XY))
    out_TF = torch.empty(T, X // 2, dtype=x_TY.dtype, device=x_TY.device)
    width, lanes = X // 2, cut.outputs // 2
    grid = (triton.cdiv(width, lanes),)
    if T == 1:
        _row_swiglu_kernel[grid](
            x_TY, gate_up_XY, out_TF, width, Y, gate_up_XY.stride(0), BLOCK_F=lanes, BLOCK_Y=cut.depth,
            num_warps=cut.warps, num_stages=cut.stages, **overlap(x_TY.device),
        )  # fmt: skip
        return out_TF
    weight, is_described = weight_rows("gate and up weights", gate_up_XY, lanes, cut.depth)
    _tile_swiglu_kernel[grid](
        x_TY, weight, out_TF, T, width, Y, x_TY.stride(0), gate_up_XY.stride(0), DESCRIBED=is_described,
        BLOCK_T=tile(T), BLOCK_F=lanes, BLOCK_Y=cut.depth, WIDEN=widen(x_TY.dtype),
        num_warps=cut.warps, num_stages=cut.stages, **overlap(x_TY.device),
    )  # fmt: skip
    return out_TF


def _cut_product(x_TY: Tensor, weight_XY: Tensor, cut: Cut) -> Tensor:
    """[S, T, X]: float32 parts, or one in the dtype of x_TY."""
    (T, Y), X = x_TY.shape, len(weight_XY)
    depth = triton.cdiv(triton.cdiv(Y, cut.depth), cut.slices) * cut.depth
    slices = triton.cdiv(Y, depth)
    dtype = x_TY.dtype if slices == 1 else torch.float32
    out_STX = torch.empty(slices, T, X, dtype=dtype, device=x_TY.device)
    grid = (triton.cdiv(X, cut.outputs), slices)
    if T == 1:
        _row_kernel[grid](
            x_TY, weight_XY, out_STX, X, Y, depth, weight_XY.stride(0), BLOCK_X=cut.outputs, BLOCK_Y=cut.depth,
            num_warps=cut.warps, num_stages=cut.stages, **overlap(x_TY.device),
        )  # fmt: skip
        return out_STX
    weight, is_described = weight_rows("weight", weight_XY, cut.outputs, cut.depth)
    _tile_kernel[grid](
        x_TY, weight, out_STX, T, X, Y, depth, x_TY.stride(0), weight_XY.stride(0), DESCRIBED=is_described,
        BLOCK_T=tile(T), BLOCK_X=cut.outputs, BLOCK_Y=cut.depth, WIDEN=widen(x_TY.dtype),
        num_warps=cut.warps, num_stages=cut.stages, **overlap(x_TY.device),
    )  # fmt: skip
    return out_STX


def _check(x_TY: Tensor, weight_XY: Tensor) -> tuple[int, int, int]:
    check_tensor("x", x_TY, (None, None), torch.float32, torch.bfloat16)
    T, Y = x_TY.shape
    check_tensor("weight", weight_XY, (None, Y), x_TY.dtype)
    return T, len(weight_XY), Y
