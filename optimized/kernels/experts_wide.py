"""The two products of `experts` for prompts: the first of stretched tiles, the second of tiles of 128 rows and more.

act[row, f] = silu(gate[f] · x[row]) (up[f] · x[row])          out[slot of the row, d] = down[d] · act[row]

At about 4096 tokens an expert has 128 rows and a few more, or a few less. A tile for those few would fetch all its
weights again. So a tile has MAIN rows and, where it is stretched, REST rows behind them, each with sums of its own, and
a block of weights is fetched once for both. Of the REST rows the weights are the left operand: that comes in steps of
64 rows on tensor cores, the right one in steps of 8, so that 32 rows cost a quarter of what 128 cost.

In the second product, rows lie one behind the other and come through the copy engine as the weights do; rows of another
expert at the end of a tile are computed and not stored. Without a rest (prompts with several tiles an expert, where
stretching gains nothing), a tile that is at most half full is computed as one of half the rows.

Sums are float32. Compared on an H200, rows have the same bytes in tiles of either kind.

H200, bfloat16, released sizes, medians of replays in turn with tiles of 128 fetched by pointers, us, at 4096 / 8192 /
16384 tokens: first product 2687 / 4900 / 9324 stretched, 2792 / 4789 / 8507 not; second product 1363 / 2411 / 4424
stretched, 1444 / 2445 / 4466 not, 1473 / 2583 / 4862 by pointers. The processor slows down under such loads: single
runs differ by a tenth. Without gain in the first product: gate and up rows as one operand of 256 rows (2771 / 4725 /
8691), rows gathered beforehand for the copy engine (2537 / 4635 where pointers took 2449 / 4219, and 162 / 362 to
gather), a rest of 64 (2812 / 4942) or 16 rows (2610 / 4512), depth 128 (3148 / 5582), two programs of four warps a
processor (2629 / 4669).
Source: text_model specification, sections 11.2 and 11.4.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from optimized.kernels.common import dot, next_power_of_2, round_to, tl, triton, wait_for_inputs
from optimized.kernels.router import add_product, sigmoid
from optimized.kernels.weight_tiles import tile_of_rows, weight_rows, weight_tile

# R rows  D model  F ffn width

# The rows of a tile from which on these kernels are taken, and those of a stretched one.
WIDE_TILE_ROWS = 128
STRETCHED_TILE_ROWS = 160


def main_rows(tile_rows: int) -> int:
    """The rows of a tile that are always computed, a power of two; the rest only where it is needed."""
    return next_power_of_2(tile_rows + 1) // 2


def row_blocks(act_RF: Tensor, tile_rows: int, block_f: int) -> tuple[Any, Any, bool]:
    """The rows in blocks of MAIN, and in blocks of REST, or of half of MAIN if there is no rest; as `weight_rows`."""
    main = main_rows(tile_rows)
    act, is_described = weight_rows("activated rows", act_RF, main, block_f)
    other, _ = weight_rows("activated rows", act_RF, tile_rows - main or main // 2, block_f)
    return act, other, is_described


@triton.jit
def add_to(a, b, sums, WIDEN: tl.constexpr):
    """sums + a b; rounding of the sums shows in a float32 output only."""
    if WIDEN:
        return add_product(a, b, sums, WIDEN)
    else:
        return dot(a, b, sums, WIDEN)


@triton.jit
def _columns(source, row_R, in_tile_R, row_stride, start, depth, BLOCK: tl.constexpr):
    """Lanes start… of some rows, each row a column: [BLOCK, R]; zeros past the depth and where not in the tile."""
    lane = start + tl.arange(0, BLOCK)
    pointers = source + row_R.to(tl.int64)[:, None] * row_stride + lane[None, :]
    return tl.load(pointers, mask=in_tile_R[:, None] & (lane < depth)[None, :], other=0.0).T


@triton.jit(do_not_specialize=["tiles"])
def wide_swiglu_kernel(
    x, gate_up, act, slot_of_row, tile_map, tiles, D, F, slots, x_stride, weight_stride,
    DESCRIBED: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One tile of rows and BLOCK_F lanes of act."""
    wait_for_inputs(OVERLAPS)
    expert, first, end, block = tile_of_rows(tile_map, tiles, tl.cdiv(F, BLOCK_F))
    if expert < 0:
        return
    f = block * BLOCK_F
    if end - first > MAIN:
        _swiglu_tile(
            x, gate_up, act, slot_of_row, expert, first, end, f, D, F, slots, x_stride, weight_stride,
            DESCRIBED, MAIN, REST, BLOCK_F, BLOCK_D, WIDEN,
        )  # fmt: skip
    else:
        _swiglu_tile(
            x, gate_up, act, slot_of_row, expert, first, end, f, D, F, slots, x_stride, weight_stride,
            DESCRIBED, MAIN, 0, BLOCK_F, BLOCK_D, WIDEN,
        )  # fmt: skip


@triton.jit
def _swiglu_tile(
    x, gate_up, act, slot_of_row, expert, first, end, first_f, D, F, slots, x_stride, weight_stride,
    DESCRIBED: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    row_R = first + tl.arange(0, MAIN)
    in_tile_R = row_R < end
    token_R = tl.load(slot_of_row + row_R, mask=in_tile_R, other=0) // slots
    gate_FR = tl.zeros([BLOCK_F, MAIN], tl.float32)
    up_FR = tl.zeros([BLOCK_F, MAIN], tl.float32)
    if REST > 0:
        rest_row_R = first + MAIN + tl.arange(0, REST)
        in_rest_R = rest_row_R < end
        rest_token_R = tl.load(slot_of_row + rest_row_R, mask=in_rest_R, other=0) // slots
        rest_gate_FR = tl.zeros([BLOCK_F, REST], tl.float32)
        rest_up_FR = tl.zeros([BLOCK_F, REST], tl.float32)
    gate_row = expert * 2 * F
    up_row = gate_row + F
    for start in range(0, D, BLOCK_D):
        x_DR = _columns(x, token_R, in_tile_R, x_stride, start, D, BLOCK_D)
        gate_FD = weight_tile(
            gate_up, weight_stride, gate_row + first_f, up_row, start, D, BLOCK_F, BLOCK_D, DESCRIBED
        ).T
        up_FD = weight_tile(
            gate_up, weight_stride, up_row + first_f, up_row + F, start, D, BLOCK_F, BLOCK_D, DESCRIBED
        ).T
        gate_FR = add_to(gate_FD, x_DR, gate_FR, WIDEN)
        up_FR = add_to(up_FD, x_DR, up_FR, WIDEN)
        if REST > 0:
            x_DR = _columns(x, rest_token_R, in_rest_R, x_stride, start, D, BLOCK_D)
            rest_gate_FR = add_to(gate_FD, x_DR, rest_gate_FR, WIDEN)
            rest_up_FR = add_to(up_FD, x_DR, rest_up_FR, WIDEN)
    f = first_f + tl.arange(0, BLOCK_F)
    _store_columns(act, gate_FR * sigmoid(gate_FR) * up_FR, row_R, in_tile_R, f, F)
    if REST > 0:
        _store_columns(act, rest_gate_FR * sigmoid(rest_gate_FR) * rest_up_FR, rest_row_R, in_rest_R, f, F)


@triton.jit(do_not_specialize=["tiles", "R"])
def wide_down_kernel(
    act, other_act, down, out, slot_of_row, tile_map, tiles, R, D, F, act_stride, weight_stride,
    DESCRIBED_ROWS: tl.constexpr, DESCRIBED: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, WIDEN: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One tile of rows and BLOCK_D lanes of out. `act`, `other_act`: see `row_blocks`."""
    wait_for_inputs(OVERLAPS)
    expert, first, end, block = tile_of_rows(tile_map, tiles, tl.cdiv(D, BLOCK_D))
    if expert < 0:
        return
    d = block * BLOCK_D
    if REST > 0:
        if end - first > MAIN:
            _down_tile(
                act, other_act, down, out, slot_of_row, expert, first, end, d, R, D, F, act_stride, weight_stride,
                DESCRIBED_ROWS, DESCRIBED, MAIN, REST, BLOCK_D, BLOCK_F, WIDEN,
            )  # fmt: skip
        else:
            _down_tile(
                act, other_act, down, out, slot_of_row, expert, first, end, d, R, D, F, act_stride, weight_stride,
                DESCRIBED_ROWS, DESCRIBED, MAIN, 0, BLOCK_D, BLOCK_F, WIDEN,
            )  # fmt: skip
    elif end - first > MAIN // 2:
        _down_tile(
            act, other_act, down, out, slot_of_row, expert, first, end, d, R, D, F, act_stride, weight_stride,
            DESCRIBED_ROWS, DESCRIBED, MAIN, 0, BLOCK_D, BLOCK_F, WIDEN,
        )  # fmt: skip
    else:
        _down_tile(
            other_act, other_act, down, out, slot_of_row, expert, first, end, d, R, D, F, act_stride, weight_stride,
            DESCRIBED_ROWS, DESCRIBED, MAIN // 2, 0, BLOCK_D, BLOCK_F, WIDEN,
        )  # fmt: skip


@triton.jit
def _down_tile(
    act, rest_act, down, out, slot_of_row, expert, first, end, first_d, R, D, F, act_stride, weight_stride,
    DESCRIBED_ROWS: tl.constexpr, DESCRIBED: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    # Which rows are stored is found before the loop: behind it, ptxas gives up on overlapping the products.
    row_R = first + tl.arange(0, MAIN)
    in_tile_R = row_R < end
    sums_RD = tl.zeros([MAIN, BLOCK_D], tl.float32)
    if REST > 0:
        rest_row_R = first + MAIN + tl.arange(0, REST)
        in_rest_R = rest_row_R < end
        rest_DR = tl.zeros([BLOCK_D, REST], tl.float32)
    for start in range(0, F, BLOCK_F):
        act_FR = weight_tile(act, act_stride, first, R, start, F, MAIN, BLOCK_F, DESCRIBED_ROWS)
        down_FD = weight_tile(
            down, weight_stride, expert * D + first_d, (expert + 1) * D, start, F, BLOCK_D, BLOCK_F, DESCRIBED
        )
        sums_RD = add_to(act_FR.T, down_FD, sums_RD, WIDEN)
        if REST > 0:
            act_FR = weight_tile(rest_act, act_stride, first + MAIN, R, start, F, REST, BLOCK_F, DESCRIBED_ROWS)
            rest_DR = add_to(down_FD.T, act_FR, rest_DR, WIDEN)
    d = first_d + tl.arange(0, BLOCK_D)
    slot_R = tl.load(slot_of_row + row_R, mask=in_tile_R, other=0)
    out_RD = out + slot_R.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out_RD, round_to(sums_RD, out), mask=in_tile_R[:, None] & (d < D)[None, :])
    if REST > 0:
        slot_R = tl.load(slot_of_row + rest_row_R, mask=in_rest_R, other=0)
        _store_columns(out, rest_DR, slot_R, in_rest_R, d, D)


@triton.jit
def _store_columns(out, values_XR, row_R, in_tile_R, lane_X, width):
    """Column r becomes lanes of row row_R[r], rounded once."""
    pointers = out + row_R.to(tl.int64)[None, :] * width + lane_X[:, None]
    tl.store(pointers, round_to(values_XR, out), mask=in_tile_R[None, :] & (lane_X < width)[:, None])
