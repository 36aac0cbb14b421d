"""Same values, other order: the commonest mistake with patches, found as what it is instead of as a large error.

An implementation that keeps patches in raster order, or takes the squares of a merge column by column, has every value
right and in another place. Whether that explains a difference is decided by matching each actual row with the expected
row that it is nearest to. Source: vision specification, section 3.1; llama.cpp keeps raster order through the trunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Above, distances between all rows would take more memory than the tensors.
MAX_ROWS = 4096
SHOWN = 16


@dataclass(frozen=True)
class OtherOrder:
    """Row i of the actual tensor is row `permutation[i]` of the expected one. `unit`: what a row is."""

    name: str
    permutation: tuple[int, ...]
    unit: str = "rows"

    def __str__(self) -> str:
        shown = " ".join(map(str, self.permutation[:SHOWN])) + (" …" if len(self.permutation) > SHOWN else "")
        return f"{self.name}: same values, other order: actual {self.unit} are expected {self.unit} {shown}"


def other_order(expected: Tensor, actual: Tensor, tolerance: float) -> tuple[int, ...] | None:
    """The permutation of rows that turns `expected` into `actual`, or None: there is none, or it changes nothing.

    [rows, …] of one shape; `tolerance` is the relative error of a row that is noise.
    """
    if expected.shape != actual.shape or not 1 < len(expected) <= MAX_ROWS:
        return None
    expected_RX, actual_RX = (side.detach().cpu().to(torch.float64).flatten(1) for side in (expected, actual))
    if not (expected_RX.isfinite().all() and actual_RX.isfinite().all()):
        return None
    # The direct form: that of matrix products loses half the digits.
    distance_RR = torch.cdist(actual_RX, expected_RX, compute_mode="donot_use_mm_for_euclid_dist")
    is_same_RR = distance_RR <= tolerance * expected_RX.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    if not is_same_RR.any(dim=1).all():
        return None
    found = _matched(is_same_RR)
    return None if found is None or found == tuple(range(len(found))) else found


def _matched(is_same_RR: Tensor) -> tuple[int, ...] | None:
    """One expected row for each actual row, each taken once; its own where that fits (equal rows have several)."""
    size = len(is_same_RR)
    found = [-1] * size
    taken = set()
    for row in is_same_RR.diagonal().nonzero().flatten().tolist():
        found[row] = row
        taken.add(row)
    for row in range(size):
        if found[row] < 0:
            free = [other for other in is_same_RR[row].nonzero().flatten().tolist() if other not in taken]
            if not free:
                return None
            found[row] = free[0]
            taken.add(free[0])
    return tuple(found)


def order_of(name: str, expected: Tensor, actual: Tensor, tolerance: float, square: int) -> OtherOrder | None:
    """As `other_order`, for a tensor of the tower; merged squares are also taken apart into their `square` patches."""
    rows = other_order(expected, actual, tolerance)
    if rows is not None:
        return OtherOrder(name, rows)
    if name == "vision.merger.grouped" and expected.shape == actual.shape:
        patches = other_order(*_patches((expected, actual), square), tolerance)
        if patches is not None:
            return OtherOrder(name, patches, "patches")
    return None


def _patches(sides: Sequence[Tensor], square: int) -> tuple[Tensor, Tensor]:
    left, right = (side.reshape(square * len(side), -1) for side in sides)
    return left, right
