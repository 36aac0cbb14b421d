"""Is one tensor a constant times another?

A forgotten or doubled scale multiplies every row by the same number. With a the actual and e the expected row, the best
factor of a row is f = <a, e> / <e, e>. It is *constant* if what it leaves over, |a - f e| / |e|, and how far the rows'
factors lie apart are within what noise is allowed to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parity.tolerance import BLOCK_ELEMENTS


@dataclass(frozen=True)
class RowFactors:
    """Of each row, the best factor and what it leaves over; float64 [rows], NaN for rows that have no factor."""

    factors: Tensor
    left_over: Tensor


def row_factors(actual: Tensor, expected: Tensor, chosen: Tensor) -> RowFactors:
    """Of the `chosen` rows (indices) of [rows, …] tensors of one shape, a block of them at a time.

    What is not finite in the same way on both sides (-inf scores) is left out.
    """
    rows = max(1, BLOCK_ELEMENTS * len(expected) // max(1, expected.numel()))
    blocks = [_of_block(actual[block], expected[block]) for block in chosen.split(rows)]
    return RowFactors(*(torch.cat(column) for column in zip(*blocks, strict=True)))


def _of_block(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    actual_RX, expected_RX = (tensor.to(torch.float64).flatten(1) for tensor in (actual, expected))
    is_left_out_RX = ~expected_RX.isfinite() & (actual_RX == expected_RX)
    actual_RX, expected_RX = (side.masked_fill(is_left_out_RX, 0.0) for side in (actual_RX, expected_RX))
    squares_R = expected_RX.square().sum(1)
    factors_R = (actual_RX * expected_RX).sum(1) / squares_R
    return factors_R, (actual_RX - factors_R[:, None] * expected_RX).norm(dim=1) / squares_R.sqrt()


def constant_factor(rows: RowFactors, allowed_R: Tensor) -> float | None:
    """The factor that all rows have in common, or None. `allowed_R`: the relative error of a row that may be noise."""
    factor = float(rows.factors.mean())
    # A row that is multiplied has its noise multiplied.
    tolerance_R = allowed_R * abs(factor)
    fits_R = (rows.left_over <= tolerance_R) & ((rows.factors - factor).abs() <= tolerance_R)
    return factor if bool(fits_R.all()) else None
