"""What the pictures of a report show beyond verdicts, from two traces of free runs of the same workload.

by step        relative error of a layer's output, worst row of each action of the workload: where in depth and time
ulps           distance of each element of the actual side from the expected value rounded to the actual dtype, in
               steps between neighbouring numbers of that dtype: 0 is bitwise equal
overlap        share of the keys or experts that both sides choose

One block of one pair of tensors is in memory at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.end_to_end import EndToEnd, actions_of, end_to_end
from parity.schema import layer_of, pattern_of, spec_of
from parity.tolerance import row_errors
from parity.trace import Trace, row_blocks

BLOCK_BYTES = 4 * 2**20
# Upper ends of the classes of distances; what lies beyond the last one is its own class.
ULP_CLASSES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_ORDERED = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class StepError:
    """Relative error of `tensor` in the worst row of one action of the workload."""

    tensor: str
    action: int
    rows: int
    error: float


@dataclass(frozen=True)
class UlpClass:
    """`elements` of `tensors` at a distance above the class before and up to `ulps`; None: above the last one."""

    tensors: str
    ulps: int | None
    elements: int


@dataclass(frozen=True)
class Overlap:
    """Chosen on both sides, as a share of the larger choice: mean over rows, and of the worst row."""

    tensor: str
    layer: int | None
    rows: int
    mean: float
    least: float


@dataclass(frozen=True)
class Detail:
    """`level` and `workload` say which run it is of, where there are several."""

    by_step: tuple[StepError, ...] = ()
    ulps: tuple[UlpClass, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    end_to_end: EndToEnd | None = None
    level: str = ""
    workload: str = ""

    @property
    def is_known(self) -> bool:
        return bool(self.by_step or self.ulps or self.overlaps or self.end_to_end)


def detail(expected: Trace, actual: Trace) -> Detail:
    """All of it, as far as both traces have the tensors."""
    by_step: list[StepError] = []
    overlaps: list[Overlap] = []
    counts: dict[str, Counter[int | None]] = {}
    for name in expected.names():
        pattern, spec = pattern_of(name), spec_of(name)
        if pattern in ("embeddings", "layers.{i}.output", "logits"):
            by_step += _by_step(expected, actual, name)
            group = "logits" if pattern == "logits" else "layer outputs"
            if pattern != "embeddings":
                counts.setdefault(group, Counter()).update(_ulp_counts(expected, actual, name))
        if spec is not None and spec.kind == "choice":
            overlaps += _overlap(expected, actual, name)
    classes = (*ULP_CLASSES, None)
    ulps = tuple(UlpClass(group, ulp, found[ulp]) for group, found in counts.items() if found for ulp in classes)
    return Detail(tuple(by_step), ulps, tuple(overlaps), end_to_end(expected, actual))


def ulp_distance(expected: Tensor, actual: Tensor) -> Tensor:
    """Steps between neighbouring numbers of `actual.dtype`, int64; two NaNs are 0 apart, NaN and a number 2**31."""
    ordered = _ordered(actual) - _ordered(expected.to(actual.dtype))
    is_nan = actual.isnan(), expected.isnan()
    return ordered.abs().masked_fill(is_nan[0] & is_nan[1], 0).masked_fill(is_nan[0] ^ is_nan[1], 2**31)


def _ordered(values: Tensor) -> Tensor:
    """Integers in the order of the numbers, one apart for neighbours; both zeros are 0."""
    as_int = _ORDERED[values.dtype]
    bits = values.contiguous().view(as_int).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(as_int).min - bits, bits)


def _by_step(expected: Trace, actual: Trace, name: str) -> list[StepError]:
    rows: Counter[int] = Counter()
    worst: dict[int, float] = {}
    for request in expected.requests(name):
        actions = actions_of(expected, name, request)
        for left, right, keys in row_blocks(expected, actual, name, request, BLOCK_BYTES):
            for key, error in zip(keys, row_errors(right, left).relative.tolist(), strict=True):
                rows[actions[key]] += 1
                worst[actions[key]] = max(error, worst.get(actions[key], 0.0))
    return [StepError(name, action, rows[action], error) for action, error in sorted(worst.items())]


def _ulp_counts(expected: Trace, actual: Trace, name: str) -> Counter[int | None]:
    counts: Counter[int | None] = Counter()
    for request in expected.requests(name):
        for left, right, _ in row_blocks(expected, actual, name, request, BLOCK_BYTES):
            if right.dtype not in _ORDERED:
                continue
            classes = torch.bucketize(ulp_distance(left, right), torch.tensor(ULP_CLASSES))
            for index, count in enumerate(classes.flatten().bincount(minlength=len(ULP_CLASSES) + 1).tolist()):
                counts[(*ULP_CLASSES, None)[index]] += count
    return counts


def _overlap(expected: Trace, actual: Trace, name: str) -> list[Overlap]:
    shares: list[float] = []
    for request in expected.requests(name):
        for left, right, _ in row_blocks(expected, actual, name, request, BLOCK_BYTES):
            for mine, theirs in zip(left.tolist(), right.tolist(), strict=True):
                one, other = set(mine) - {-1}, set(theirs) - {-1}
                shares.append(len(one & other) / max(1, len(one), len(other)) if one or other else 1.0)
    if not shares:
        return []
    return [Overlap(name, layer_of(name), len(shares), sum(shares) / len(shares), min(shares))]
