"""How much of a difference is rounding: measured for these inputs, with a stated rate of false alarms.

Truth is float64. The floor of a row is the error of the eager reference in the storage dtype, pooled over several draws
of its rounding. An error counts as *within noise* while

    error of a row  <=  STRUCTURE · exp(z · spread) · floor of the row

STRUCTURE = 2: another implementation may round twice as much as the eager one does (other places, other orders).
spread: standard deviation of the logarithm of a row's error between draws. n independent roundings give 1/sqrt(2n);
where one early rounding moves the whole row, it is measured to be larger.
    and  <=  OUTLIER · the largest error that any draw shows in any row

so that a floor that varies wildly (an expert that changes in some draws, where choices could not be replayed) does not
excuse everything.

z: quantile of the normal distribution for a false alarm in one of the m rows compared, alpha / m, where alpha is the
chance that a run without any fault is called different. Nothing here is tuned to an implementation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

STRUCTURE = 2.0
OUTLIER = 3.0
FALSE_ALARM_RATE = 1e-6
DRAWS = 8
# In exact mode two implementations of the same logic differ by reassociation of float64 only.
EXACT_LIMIT = 1e-10
# As many elements of a pair are in float64 at a time.
BLOCK_ELEMENTS = 2**20


def noise_limit(spread: float, comparisons: int, false_alarm_rate: float = FALSE_ALARM_RATE) -> float:
    """The largest error-to-floor ratio of a row that is called noise."""
    return STRUCTURE * math.exp(_z(comparisons, false_alarm_rate) * spread)


def element_limit(comparisons: int, false_alarm_rate: float = FALSE_ALARM_RATE) -> float:
    """The same for a single element, whose error is a normal variable and not the mean of many."""
    return STRUCTURE * _z(comparisons, false_alarm_rate)


def _z(comparisons: int, false_alarm_rate: float) -> float:
    return NormalDist().inv_cdf(1.0 - false_alarm_rate / max(1, comparisons))


def one_rounding(dtype: torch.dtype) -> float:
    """Root mean square of a single rounding to `dtype`, relative to the value: a floor is never below it."""
    return torch.finfo(dtype).eps * 0.2


@dataclass(frozen=True)
class RowErrors:
    """Distance of each row from the truth. `relative` is the norm of the difference over the norm of the true row.

    A row whose truth is (nearly) zero is measured against the typical row instead. Non-finite values that do not
    coincide with the truth's (NaN, +inf, -inf) make the row's error infinite.
    """

    relative: Tensor  # [rows], float64
    largest: Tensor  # [rows], largest absolute difference
    elements: int  # a row has this many


def row_errors(actual: Tensor, truth: Tensor) -> RowErrors:
    """Compare [rows, …] tensors in float64, a block of rows at a time."""
    rows = max(1, BLOCK_ELEMENTS * len(truth) // max(1, truth.numel()))
    blocks = [_compared(*block) for block in zip(actual.split(rows), truth.split(rows), strict=True)]
    distances, largest, norms, spoilt, finite = (torch.cat(column) for column in zip(*blocks, strict=True))
    typical = norms.square().mean().sqrt()
    scale = torch.maximum(norms, 1e-3 * typical).clamp(min=torch.finfo(torch.float64).tiny)
    relative = (distances / scale).masked_fill(spoilt, float("inf"))
    elements = int(finite.max()) if len(finite) else 0
    return RowErrors(relative, largest.masked_fill(spoilt, float("inf")), elements)


def _compared(actual: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of each row: norm of the difference, its largest, norm of the truth, whether other elements are not finite, and
    how many are."""
    actual_RX, truth_RX = (tensor.to(torch.float64).flatten(1) for tensor in (actual, truth))
    difference = (actual_RX - truth_RX).abs()
    if bool(difference.isfinite().all()):
        rows, elements = truth_RX.shape
        spoilt = torch.zeros(rows, dtype=torch.bool, device=truth_RX.device)
        finite = torch.full((rows,), elements, device=truth_RX.device)
        return difference.norm(dim=1), difference.amax(dim=1), truth_RX.norm(dim=1), spoilt, finite
    finite = truth_RX.isfinite()
    same_kind = (finite == actual_RX.isfinite()) & (finite | (actual_RX == truth_RX) | (actual_RX != actual_RX))
    difference = torch.where(finite & same_kind, actual_RX - truth_RX, 0.0).abs()
    norms = torch.where(finite, truth_RX, 0.0).norm(dim=1)
    return difference.norm(dim=1), difference.amax(dim=1), norms, ~same_kind.all(dim=1), finite.sum(dim=1)


@dataclass(frozen=True)
class Floor:
    """Noise of each row, relative as in `RowErrors`; how much it varies from draw to draw; the largest error seen."""

    noise: Tensor  # [rows], float64
    spread: float
    largest: float = math.inf

    def limits(self, limit: float) -> Tensor:
        """`limit` for each row, [rows], in units of its noise; less where it would exceed what any draw comes near."""
        return (OUTLIER * self.largest / self.noise).clamp(max=limit)


def floor_of(draws: Iterable[Tensor], truth: Tensor, rounded_to: torch.dtype) -> Floor:
    """Root mean square over the draws [rows, …]; at least half the typical row's, and one rounding to `rounded_to`.

    One draw is needed at a time.
    """
    errors = [row_errors(draw, truth) for draw in draws]
    relative_KR = torch.stack([error.relative for error in errors]).clamp(min=one_rounding(rounded_to))
    by_row = relative_KR.square().mean(dim=0).sqrt()
    typical = by_row.square().mean().sqrt()
    spread = relative_KR.log().var(dim=0).mean().sqrt() if len(errors) > 1 else torch.zeros(())
    independent = (2.0 * max(1, errors[0].elements)) ** -0.5
    noise = torch.maximum(by_row, 0.5 * typical)
    return Floor(noise, max(float(spread), independent), float(relative_KR.max()))
