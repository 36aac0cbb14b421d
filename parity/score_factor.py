"""By which constant are attention scores multiplied? Seen from what attention puts out.

No fused kernel keeps its scores, so no dump has them. But with the queries, the cached rows and the keys that the dump
recorded, the core is a function of one unknown c:

    core(c) = softmax(c · scores) · values

The rows of `attn.core` that are different are fitted in x = log c by the secant form of Gauss and Newton: with f the
rows at x, f' those at the point x' before, a those of the dump, and d = (f - f') / (x - x'),

    x  <-  x + <d, a - f> / <d, d>

c is an answer only if it leaves none of these rows outside the noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from math import exp, isfinite
from typing import Any

import torch
from torch import Tensor

from parity.findings import Place, ProbeResult
from parity.judge import Judge
from parity.replay import ChoiceReplay, Given
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.schema import layer_of, pattern_of
from parity.tolerance import row_errors
from reference.probe import Rows

# T query tokens  S key tokens  H heads  N nope dim  R rope dim  V value dim

CORE = "layers.{i}.attn.core"
# In log c: the step that gives the first difference, the largest one, and one below which c is as exact as it gets.
FIRST, LARGEST, SMALLEST = 0.05, 0.7, 1e-14
MAX_STEPS = 20


def score_factor(judge: Judge, runner: ReferenceRunner, result: ProbeResult) -> float | None:
    """The constant c of the layer whose core is `result`; None if it is no core, or agrees, or no c explains it.

    judge: in the pinpoint view, where each operation is computed from recorded values; `result` is one of its own.
    runner: a float64 reference without faults and without requests; it runs the workload once.
    """
    name, layer = result.name, layer_of(result.name)
    if pattern_of(name) != CORE or layer is None or result.verdict != "different":
        return None
    different = judge.different_rows(name)
    attention: Any = runner.model.get_submodule(f"model.layers.{layer}.self_attn")
    right = attention.attention
    noted = _Noted(name, right, different)
    attention.attention = noted.attend
    try:
        replay, given = ChoiceReplay(judge.candidate), Given(judge.candidate, lambda name: True)
        traced(runner, judge.workload, noted, given, before=[replay], patterns=())
    finally:
        attention.attention = right
    actual_THV = torch.stack([different[place].actual.to(torch.float64) for place in noted.places])
    factor = _fitted(noted.core, actual_THV)
    errors_T = row_errors(actual_THV, noted.core(factor)).relative
    allowed_T = torch.tensor([different[place].allowed for place in noted.places], dtype=torch.float64)
    return factor if bool((errors_T <= allowed_T).all()) else None


class _Noted:
    """A listener and an attention that note, of the rows that are different, what their core is computed from."""

    def __init__(self, name: str, attention: Callable[..., Tensor], wanted: Collection[Place]):
        self._name, self._attention, self._wanted = name, attention, wanted
        self._last: tuple[Tensor, ...] = ()
        self._seen: Counter[tuple[str, int]] = Counter()
        # Of each step that has such rows: their indices, and all arguments of the attention.
        self._steps: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self.places: list[Place] = []

    def attend(self, *arguments: Tensor) -> Tensor:
        self._last = arguments
        return self._attention(*arguments)

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        if name != self._name or rows is None:
            return value
        kept = []
        for row, position in enumerate(rows.positions.tolist()):
            place = Place(rows.request, position, self._seen[rows.request, position])
            self._seen[rows.request, position] += 1
            if place in self._wanted:
                kept.append(row)
                self.places.append(place)
        if kept:
            self._steps.append((torch.tensor(kept), self._last))
        return value

    def core(self, factor: float) -> Tensor:
        """Of the rows `places`, with scores times `factor`: [T, H, V], float64."""
        cores_THV = []
        for kept_T, (q_nope_THN, q_rope_THR, *keys, visible_TS) in self._steps:
            queries = (q_nope_THN[kept_T] * factor, q_rope_THR[kept_T] * factor)
            cores_THV.append(self._attention(*queries, *keys, visible_TS[kept_T]))
        return torch.cat(cores_THV)


def _fitted(core: Callable[[float], Tensor], actual_THV: Tensor) -> float:
    """The factor of which `core` comes closest to `actual_THV`, from 1 on downhill."""
    place, step, before_THV = 0.0, FIRST, core(1.0)
    for _ in range(MAX_STEPS):
        place += step
        rows_THV = core(exp(place))
        slope_THV = (rows_THV - before_THV) / step
        before_THV = rows_THV
        step = float((slope_THV * (actual_THV - rows_THV)).sum() / slope_THV.square().sum())
        if not isfinite(step) or abs(step) < SMALLEST:
            break
        step = max(-LARGEST, min(LARGEST, step))
    return exp(place)
