"""What a program of a grouped product works on: its tile of rows, and tiles of a weight.

Weights come through the copy engine where their rows allow that, or else by pointers.

The copy engine (TMA) brings a tile to shared memory without registers or address arithmetic, and fills what lies past
the end with zeros. It reads rows that begin at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import tl, triton

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # the torch twins need no triton
    TensorDescriptor = None


def weight_rows(name: str, weights: Tensor, block_rows: int, block_depth: int) -> tuple[Any, bool]:
    """A matrix [X, Y], or a stack [E, X, Y] as one: described to the copy engine (True), or as it is (False).

    Raises: KernelInputError for a stack whose rows are not evenly spaced.
    """
    *stack, X, Y = weights.shape
    row = weights.stride(-2)
    if stack and stack[0] > 1 and weights.stride(0) != X * row:
        raise KernelInputError(f"expected {name} with evenly spaced rows, found strides {weights.stride()}")
    if weights.data_ptr() % 16 or row * weights.element_size() % 16:
        return weights, False
    rows = weights.as_strided((weights.numel() // Y, Y), (row, 1))
    return TensorDescriptor.from_tensor(rows, [block_rows, block_depth]), True


@triton.jit
def weight_tile(
    weights, stride, first, end, start, depth,
    BLOCK_ROWS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Rows first… of a matrix from column `start` on, transposed; zero past `depth`, anything from row `end` on."""
    if DESCRIBED:
        return weights.load([first, start]).T
    else:
        row = first + tl.arange(0, BLOCK_ROWS)
        column = start + tl.arange(0, BLOCK_DEPTH)
        mask = (column < depth)[:, None] & (row < end)[None, :]
        return tl.load(weights + row.to(tl.int64)[None, :] * stride + column[:, None], mask=mask, other=0.0)


@triton.jit
def tile_of_rows(tile_map, tiles, blocks):
    """This program's tile, as `experts.ExpertPlan` has it: expert (-1: no tile), first row, end; and its block."""
    tile = tl.program_id(0) // blocks
    expert, first = tl.load(tile_map + tile), tl.load(tile_map + tiles + tile)
    return expert, first, tl.load(tile_map + 2 * tiles + tile), tl.program_id(0) % blocks
