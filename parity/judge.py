"""One view of one candidate: the truth, the floor, and the verdict on every name.

Each view has its own truth (the reference in float64) and its own floor (draws of the reference in the candidate's
dtype), all from the same inputs. A hypothesis (the reference with a fault) is judged against the same floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from parity.findings import ChoiceResult, Place, ProbeResult, Verdict, View
from parity.replay import ChoiceReplay, Exchange, Given, is_layer_boundary
from parity.rounding import RoundingDraw
from parity.router_order import in_order_of_ids
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.schema import decided_by, layer_of, pattern_of, spec_of
from parity.tolerance import (
    EXACT_LIMIT,
    Floor,
    RowErrors,
    element_limit,
    floor_of,
    noise_limit,
    row_errors,
)
from parity.trace import Trace, common_rows
from parity.workload import Workload

Reference = Callable[[torch.dtype], ReferenceRunner]


def run_in_view(
    runner: ReferenceRunner, candidate: Trace, workload: Workload, view: View, replay: ChoiceReplay, draw: int = 0
) -> Trace:
    """One run of the reference in a view; draw 0 is the plain one."""
    after = {
        "cascade": [],
        "isolated": [Given(candidate, is_layer_boundary)],
        "pinpoint": [Given(candidate, lambda name: True)],
    }
    # Recorded are the replayed choices, so that what depends on them is recorded in their order.
    with RoundingDraw(draw).drawing() if draw else nullcontext():
        return traced(runner, workload, *after[view], before=[replay])


class Judge:
    """Judges a candidate's trace. With `draws` = 0 nothing is rounded on either side, and the limit is a constant."""

    def __init__(
        self,
        reference: Reference,
        candidate: Trace,
        dtype: torch.dtype,
        workload: Workload,
        view: View,
        draws: int,
        false_alarm_rate: float,
    ):
        self.view, self.candidate, self.workload, self.dtype = view, candidate, workload, dtype
        self._replay = ChoiceReplay(candidate)
        self.truth = run_in_view(reference(torch.float64), candidate, workload, view, self._replay)
        eager = reference(dtype) if draws else None
        self._draws = [
            run_in_view(eager, candidate, workload, view, ChoiceReplay(candidate), draw)
            for draw in range(draws)
            if eager is not None
        ]
        self.names = _judged_names(self.truth, candidate, view)
        rows = sum(
            len(self.truth.table(name, request).keys) for name in self.names for request in self.truth.requests(name)
        )
        self._limit = partial(noise_limit, comparisons=rows, false_alarm_rate=false_alarm_rate)
        self._element_limit = element_limit(rows, false_alarm_rate)
        self._floors: dict[tuple[str, str], Floor] = {}

    @property
    def choice_rows(self) -> int:
        return sum(self._replay.compared_rows.values())

    def probes(self) -> list[ProbeResult]:
        return [self._result(name, self.truth) for name in self.names]

    def choices(self) -> list[ChoiceResult]:
        return [self._judged(exchange) for exchange in self._replay.exchanges]

    def against(self, hypothesis: ReferenceRunner) -> tuple[list[ProbeResult], list[ChoiceResult], Trace]:
        """The same verdicts with another truth: a float64 reference that has a fault. Also that truth itself."""
        replay = ChoiceReplay(self.candidate)
        truth = run_in_view(hypothesis, self.candidate, self.workload, self.view, replay)
        results = [self._result(name, truth) for name in self.names]
        return results, [self._judged(exchange) for exchange in replay.exchanges], truth

    def _result(self, name: str, truth: Trace) -> ProbeResult:
        """All requests of one name; one pair of tensors is loaded at a time."""
        parts = [self._part(name, request, truth) for request in self.truth.requests(name)]
        rows = [row for part in parts for row in part.rows]
        missing = sum(part.missing for part in parts)
        if not rows:
            return ProbeResult(name, self.view, "missing", 0, 0, missing, 0.0, 0.0, 0.0, 0.0, None, None)
        error = torch.cat([part.errors.relative for part in parts])
        largest = torch.cat([part.errors.largest for part in parts])
        noise = torch.cat([part.noise for part in parts])
        limits = torch.cat([part.limits for part in parts])
        excess = error / (noise * limits)
        worst = int(excess.argmax())
        bad = (excess > 1.0).nonzero().flatten().tolist()
        return ProbeResult(
            name,
            self.view,
            self._verdict(bool(bad), parts),
            len(rows),
            sum(part.errors.elements * len(part.rows) for part in parts),
            missing,
            float(error[worst]),
            float(noise[worst]),
            float(limits[worst]),
            float(largest[worst]),
            rows[worst],
            rows[bad[0]] if bad else None,
        )

    def _verdict(self, is_bad: bool, parts: Sequence[_Part]) -> Verdict:
        if is_bad:
            return "different"
        if all(part.is_bitwise_equal for part in parts):
            return "bitwise equal"
        return "within noise" if self._draws else "close"

    def _part(self, name: str, request: str, truth: Trace) -> _Part:
        sides = [trace for trace in (truth, self.candidate) if trace.has(name, request)]
        if len(sides) < 2:
            empty = torch.zeros(0, dtype=torch.float64)
            missing = sum(len(trace.table(name, request).keys) for trace in sides)
            return _Part([], RowErrors(empty, empty, 0), empty, empty, False, missing)
        expected = in_order_of_ids(name, request, truth)
        actual = in_order_of_ids(name, request, self.candidate)
        expected_RX, actual_RX, keys, missing = common_rows(expected, actual)
        rows = [Place(request, position, occurrence) for position, occurrence in keys]
        errors = row_errors(actual_RX, expected_RX)
        if not self._draws:
            noise = torch.full_like(errors.relative, EXACT_LIMIT)
            is_equal = torch.equal(actual_RX, expected_RX)
            return _Part(rows, errors, noise, torch.ones_like(noise), is_equal, missing)
        row_of = {key: row for row, key in enumerate(expected.keys)}
        selected = torch.tensor([row_of[key] for key in keys], dtype=torch.long)
        floor = self._floor(name, request)
        plain = in_order_of_ids(name, request, self._draws[0]).values[selected]
        is_equal = plain.shape == actual_RX.shape and torch.equal(plain.to(actual_RX.dtype), actual_RX)
        limits = floor.limits(self._limit(floor.spread))[selected]
        return _Part(rows, errors, floor.noise[selected], limits, is_equal, missing)

    def _floor(self, name: str, request: str) -> Floor:
        if (name, request) not in self._floors:
            truth = in_order_of_ids(name, request, self.truth)
            draws = [in_order_of_ids(name, request, draw).values for draw in self._draws]
            self._floors[name, request] = floor_of(draws, truth.values, self._rounded_to(name))
        return self._floors[name, request]

    def _rounded_to(self, name: str) -> torch.dtype:
        """What an implementation may round this tensor to: the storage dtype, unless the schema owes it float32."""
        spec = spec_of(name)
        return torch.promote_types(self.dtype, torch.float32) if spec and spec.is_float32 else self.dtype

    def _judged(self, exchange: Exchange) -> ChoiceResult:
        noise = self._score_noise(exchange)
        if exchange.gap == 0.0:
            return ChoiceResult(exchange, self.view, noise, "tie")
        return ChoiceResult(exchange, self.view, noise, "near tie" if exchange.gap <= noise else "flip")

    def _score_noise(self, exchange: Exchange) -> float:
        """How far two scores of the row of an exchange can change places by noise, in score units."""
        if not self._draws:
            return EXACT_LIMIT * exchange.scale
        name = decided_by(exchange.name)
        assert name is not None
        table = self.truth.table(name, exchange.request)
        row = table.keys.index((exchange.position, exchange.occurrence))
        elements = max(1, int(table.values[row].isfinite().sum()))
        # Of one element: the row's noise shared out among its elements; of a difference of two: sqrt(2) times that.
        relative = float(self._floor(name, exchange.request).noise[row]) * (2.0 / elements) ** 0.5
        return self._element_limit * relative * exchange.scale


@dataclass(frozen=True)
class _Part:
    """One request of one name."""

    rows: list[Place]
    errors: RowErrors
    noise: torch.Tensor
    limits: torch.Tensor
    is_bitwise_equal: bool
    missing: int


def _judged_names(truth: Trace, candidate: Trace, view: View) -> list[str]:
    """What the schema knows and the view can judge, in dataflow order; choices are judged by `ChoiceReplay`."""
    recorded = set(candidate.names())
    known = [name for name in truth.names() if name in recorded and (spec := spec_of(name)) and spec.kind != "choice"]
    return [name for name in known if view != "isolated" or has_own_input(name, recorded)]


def has_own_input(name: str, recorded: set[str]) -> bool:
    """Whether the layer that computes `name` can be run from an input that was recorded."""
    layer = layer_of(name)
    if layer is not None:
        before = f"layers.{layer - 1}.output" if layer else "embeddings"
        return before in recorded or f"layers.{layer}.input" in recorded
    if name == "final_norm":
        return any(pattern_of(other) == "layers.{i}.output" for other in recorded)
    if name == "logits":
        return "final_norm" in recorded
    step = name.removeprefix("mtp.").partition(".")[0]
    return not name.startswith("mtp.") or f"mtp.{step}.fused" in recorded
