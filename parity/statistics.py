"""What is known of a tensor whose values were not kept: count, sum, mean, size, and a few samples.

Some engines print or store no more than this. Such a tensor can be found *different*; it can never be found equal, so
the best verdict is *partial*.

With x the tensor and e the relative noise of its rows (norm of the error over norm of the row), an error of that size
can move the sum by at most e · rms(x) · n (Cauchy and Schwarz, all errors of one sign), the mean and the rms by
e · rms(x), and a single element by a few e · rms of its row. These are the limits; what printed digits cut off comes
on top. Both sides may be statistics; then rms(x) stands for the row's, and samples count where both have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from torch import Tensor

from parity.tolerance import STRUCTURE, element_limit
from parity.trace import Trace

MAX_ELEMENTS = 2**48
SAMPLES = 16


class Record(BaseModel):
    """What is read from disk: exact types, no unknown field, and no change afterwards."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Sample(Record):
    """One element: its index in the flattened tensor (last dim fastest), and its value."""

    index: Annotated[int, Field(ge=0, lt=MAX_ELEMENTS)]
    value: FiniteFloat


class Statistics(Record):
    """Of all elements together; sums leave out what is not finite. None: not known.

    `resolution`: half a unit of the last digit of the samples and of the sum, where they come from printed text.
    """

    count: Annotated[int, Field(ge=0, lt=MAX_ELEMENTS)]
    nan_count: Annotated[int, Field(ge=0, lt=MAX_ELEMENTS)] | None = None
    sum: FiniteFloat | None = None
    mean: FiniteFloat | None = None
    rms: Annotated[FiniteFloat, Field(ge=0)] | None = None
    absmax: Annotated[FiniteFloat, Field(ge=0)] | None = None
    samples: tuple[Sample, ...] = ()
    resolution: Annotated[FiniteFloat, Field(ge=0)] = 0.0


def statistics_of(tensor: Tensor, samples: int = SAMPLES, at: Sequence[int] | None = None) -> Statistics:
    """Statistics in float64. Any shape and dtype.

    Samples are those at the flat indices `at`, or so many, spread evenly over the elements.
    """
    flat = tensor.detach().cpu().to(torch.float64).flatten()
    finite = flat[flat.isfinite()]
    spread = torch.linspace(0, len(flat) - 1, min(samples, len(flat))).tolist()
    positions = sorted({int(i) for i in (spread if at is None else at) if i < len(flat)})
    kept = tuple(Sample(index=i, value=float(flat[i])) for i in positions if math.isfinite(float(flat[i])))
    if not len(finite):
        return Statistics(count=len(flat), nan_count=int(flat.isnan().sum()), samples=kept)
    return Statistics(
        count=len(flat),
        nan_count=int(flat.isnan().sum()),
        sum=float(finite.sum()),
        mean=float(finite.mean()),
        rms=float(finite.square().mean().sqrt()),
        absmax=float(finite.abs().max()),
        samples=kept,
    )


class Summarised(Protocol):
    """Which rows the statistics are of; a manifest's `StatisticsEntry` is one."""

    @property
    def name(self) -> str: ...
    @property
    def request(self) -> str: ...
    @property
    def action(self) -> int: ...
    @property
    def statistics(self) -> Statistics: ...


@dataclass(frozen=True)
class Evidence:
    """One number of the two sides; `limit` is how far apart noise can bring them."""

    what: str
    expected: float
    actual: float
    limit: float

    @property
    def is_different(self) -> bool:
        return not abs(self.expected - self.actual) <= self.limit

    @property
    def excess(self) -> float:
        """The distance in units of the limit: above 1 is different."""
        distance = abs(self.expected - self.actual)
        if not self.limit:
            return math.inf if distance else 0.0
        return math.inf if math.isnan(distance) else distance / self.limit


@dataclass(frozen=True)
class PartialResult:
    """*partial*: every number that is known agrees. *missing*: nothing to hold it against, `reason` says why."""

    name: str
    request: str
    action: int
    verdict: Literal["partial", "different", "missing"]
    reason: str
    evidence: tuple[Evidence, ...]

    @property
    def worst(self) -> Evidence | None:
        """The number that comes closest to its limit, or goes furthest beyond it."""
        return max(self.evidence, key=lambda item: item.excess, default=None)

    @property
    def excess(self) -> float:
        return self.worst.excess if self.worst else 0.0


@dataclass(frozen=True)
class RowNoise:
    """Relative noise of a row: the usual one, and the largest that counts as noise."""

    usual: float
    allowed: float


def compare_statistics(
    expected: Trace, actual: Iterable[Summarised], noise: Callable[[str], float]
) -> list[PartialResult]:
    """Hold statistics against the tensors of a trace, one tensor in memory at a time.

    `noise(name)` is the relative noise of a row of that name, as a floor measures it.
    """
    entries = list(actual)
    wanted = {(entry.name, entry.request, entry.action) for entry in entries}
    tensors = {
        key: other.source
        for other in expected.entries()
        if (key := (other.name, other.request, other.action)) in wanted
    }
    results = []
    for entry in entries:
        source = tensors.get((entry.name, entry.request, entry.action))
        usual = noise(entry.name)
        if source is None:
            results.append(missing(entry, "the other side has no such tensor"))
        else:
            row_noise = RowNoise(usual, STRUCTURE * usual)
            results.append(judged(entry, source.load(), entry.statistics, row_noise, len(entries)))
    return results


def missing(entry: Summarised, reason: str) -> PartialResult:
    return PartialResult(entry.name, entry.request, entry.action, "missing", reason, ())


def judged(
    entry: Summarised,
    expected: Tensor | Statistics,
    actual: Tensor | Statistics,
    noise: RowNoise,
    comparisons: int,
) -> PartialResult:
    """Compare what both sides know; `comparisons` tensors are compared so in the run."""
    counts = [side.count if isinstance(side, Statistics) else side.numel() for side in (expected, actual)]
    if counts[0] != counts[1]:
        return missing(entry, f"{counts[1]} elements, expected {counts[0]}")
    row_rms = _largest_row(expected) if isinstance(expected, Tensor) else None
    mine = expected if isinstance(expected, Statistics) else statistics_of(expected, at=_indices(actual))
    theirs = actual if isinstance(actual, Statistics) else statistics_of(actual, at=_indices(expected))
    evidence = tuple(_evidence(mine, theirs, noise, row_rms, comparisons))
    if not evidence:
        return missing(entry, "no number that could be compared")
    result = PartialResult(entry.name, entry.request, entry.action, "partial", "", evidence)
    worst = result.worst
    if worst is None or not worst.is_different:
        return result
    reason = f"{worst.what}: {worst.actual:.6g}, expected {worst.expected:.6g} ± {worst.limit:.3g}"
    return PartialResult(entry.name, entry.request, entry.action, "different", reason, evidence)


def _indices(side: Tensor | Statistics) -> list[int]:
    return [sample.index for sample in side.samples] if isinstance(side, Statistics) else []


def _largest_row(tensor: Tensor) -> float:
    """Root mean square of the row in which it is largest, of finite elements."""
    if not tensor.numel():
        return 0.0
    rows = tensor.detach().cpu().to(torch.float64).reshape(len(tensor), -1)
    return float(torch.where(rows.isfinite(), rows, 0.0).square().mean(dim=1).max().sqrt())


def _rms(side: Statistics) -> float | None:
    """As stated; where it is not, that of the samples."""
    if side.rms is not None or not side.samples:
        return side.rms
    return math.sqrt(sum(sample.value**2 for sample in side.samples) / len(side.samples))


def _evidence(
    expected: Statistics, actual: Statistics, noise: RowNoise, row_rms: float | None, comparisons: int
) -> Iterator[Evidence]:
    if expected.nan_count is not None and actual.nan_count is not None:
        yield Evidence("NaN", float(expected.nan_count), float(actual.nan_count), 0.0)
    rms = _rms(expected)
    if rms is None:
        return
    unit, count = noise.allowed * rms, actual.count
    resolution = expected.resolution + actual.resolution
    element = noise.usual * (rms if row_rms is None else row_rms)
    for what, limit in (
        ("sum", unit * count + resolution),
        ("mean", unit),
        ("rms", unit),
        # The largest of many: the same limit as for any single element.
        ("absmax", element_limit(max(1, comparisons * count)) * element),
    ):
        mine, theirs = getattr(expected, what), getattr(actual, what)
        if mine is not None and theirs is not None:
            yield Evidence(what, mine, theirs, limit)
    values: Mapping[int, float] = {sample.index: sample.value for sample in expected.samples}
    limit = element_limit(max(1, comparisons * len(actual.samples))) * element + resolution
    for sample in actual.samples:
        if sample.index in values:
            yield Evidence(f"element {sample.index}", values[sample.index], sample.value, limit)
