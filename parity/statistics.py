"""What is known of a tensor whose values were not kept: count, sum, mean, size, and a few samples.

Some engines print or store no more than this. Such a tensor can be found *different*; it can never be found equal, so
the best verdict is *partial*.

With x the tensor and e the relative noise of its rows (norm of the error over norm of the row), an error of that size
can move the sum by at most e · rms(x) · n (Cauchy and Schwarz, all errors of one sign), the mean and the rms by
e · rms(x), and a single element by a few e · rms(x). These are the limits; what printed digits cut off comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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


def statistics_of(tensor: Tensor, samples: int = SAMPLES) -> Statistics:
    """Statistics in float64, with samples spread evenly over the elements. Any shape and dtype."""
    flat = tensor.detach().cpu().to(torch.float64).flatten()
    finite = flat[flat.isfinite()]
    positions = sorted({int(i) for i in torch.linspace(0, len(flat) - 1, min(samples, len(flat))).tolist()})
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


@dataclass(frozen=True)
class PartialResult:
    """*partial*: every number that is known agrees. *missing*: nothing to hold it against, `reason` says why."""

    name: str
    request: str
    action: int
    verdict: Literal["partial", "different", "missing"]
    reason: str
    evidence: tuple[Evidence, ...]


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
        if source is None:
            results.append(_missing(entry, "the other side has no such tensor"))
        else:
            results.append(_judged(entry, source.load(), noise(entry.name), len(entries)))
    return results


def _missing(entry: Summarised, reason: str) -> PartialResult:
    return PartialResult(entry.name, entry.request, entry.action, "missing", reason, ())


def _judged(entry: Summarised, tensor: Tensor, noise: float, comparisons: int) -> PartialResult:
    found = entry.statistics
    flat = tensor.detach().cpu().to(torch.float64).flatten()
    if found.count != len(flat):
        return _missing(entry, f"{found.count} elements, expected {len(flat)}")
    evidence = _evidence(found, flat, noise, comparisons)
    if not evidence:
        return _missing(entry, "no number that could be compared")
    bad = [item for item in evidence if item.is_different]
    if bad:
        worst = max(bad, key=lambda item: abs(item.expected - item.actual) / item.limit if item.limit else math.inf)
        reason = f"{worst.what}: {worst.actual:.6g}, expected {worst.expected:.6g} ± {worst.limit:.3g}"
        return PartialResult(entry.name, entry.request, entry.action, "different", reason, tuple(evidence))
    return PartialResult(entry.name, entry.request, entry.action, "partial", "", tuple(evidence))


def _evidence(found: Statistics, flat: Tensor, noise: float, comparisons: int) -> Sequence[Evidence]:
    own = statistics_of(flat, samples=0)
    evidence = []
    if found.nan_count is not None and own.nan_count is not None:
        evidence.append(Evidence("NaN", float(own.nan_count), float(found.nan_count), 0.0))
    if own.rms is None or own.sum is None or own.mean is None or own.absmax is None:
        return evidence
    # Two implementations may each be off by the noise.
    unit = STRUCTURE * noise * own.rms
    element = element_limit(max(1, comparisons * len(found.samples))) * noise * own.rms
    for what, mine, theirs, limit in (
        ("sum", own.sum, found.sum, unit * found.count + found.resolution),
        ("mean", own.mean, found.mean, unit),
        ("rms", own.rms, found.rms, unit),
        # The largest of many: the same limit as for any single element.
        ("absmax", own.absmax, found.absmax, element_limit(max(1, comparisons * found.count)) * noise * own.rms),
    ):
        if theirs is not None:
            evidence.append(Evidence(what, mine, theirs, limit))
    for sample in found.samples:
        if sample.index < len(flat) and math.isfinite(mine := float(flat[sample.index])):
            evidence.append(Evidence(f"element {sample.index}", mine, sample.value, element + found.resolution))
    return evidence
