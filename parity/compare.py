"""Compares the trace of a candidate with the reference: freely (cascade) and from its own inputs (isolated).

cascade    both run freely from the same tokens, with the candidate's discrete choices replayed: how error grows.
isolated   the reference runs each layer from the candidate's recorded input: which layer is to blame.
pinpoint   the reference runs each named operation from the candidate's recorded values: which operation is.

Each view has its own truth (the reference in float64) and its own floor (draws of the reference in the candidate's
dtype), from the same inputs. In exact mode there is no floor: the limit is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from parity.replay import ChoiceReplay, Exchange, Given, is_layer_boundary
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.schema import dataflow_key, decided_by, layer_of, pattern_of, spec_of
from parity.tolerance import (
    DRAWS,
    EXACT_LIMIT,
    FALSE_ALARM_RATE,
    Floor,
    RoundingDraw,
    RowErrors,
    element_limit,
    floor_of,
    noise_limit,
    row_errors,
)
from parity.trace import Table, Trace, common_rows
from parity.workload import Workload
from reference.probe import Listener

View = Literal["cascade", "isolated", "pinpoint"]
Verdict = Literal["bitwise equal", "within noise", "close", "different", "missing"]
ChoiceVerdict = Literal["tie", "near tie", "flip"]
Reference = Callable[[torch.dtype], ReferenceRunner]


@dataclass(frozen=True)
class Place:
    """The worst row of a comparison."""

    request: str
    position: int
    occurrence: int


@dataclass(frozen=True)
class ProbeResult:
    """One name in one view. Errors are relative: norm of the difference over norm of the true row, of the worst row."""

    name: str
    view: View
    verdict: Verdict
    rows: int
    elements: int
    missing_rows: int
    error: float
    noise: float
    limit: float
    largest: float
    place: Place | None
    first_bad: Place | None

    @property
    def ratio(self) -> float:
        """Error over noise; the limit is in the same unit. In exact mode the noise is the limit itself."""
        return self.error / self.noise if self.noise else 0.0

    @property
    def excess(self) -> float:
        """Error in units of what is allowed: above 1 is different."""
        return self.ratio / self.limit if self.limit else 0.0


@dataclass(frozen=True)
class ChoiceResult:
    """A row whose choice differs, judged by the noise of its scores. `noise` and `exchange.gap` are in score units."""

    exchange: Exchange
    noise: float
    verdict: ChoiceVerdict


@dataclass(frozen=True)
class Comparison:
    """Everything found in the views of one run, in dataflow order."""

    probes: tuple[ProbeResult, ...]
    choices: tuple[ChoiceResult, ...]
    choice_rows: int
    false_alarm_rate: float
    skipped: tuple[str, ...] = field(default=())

    @property
    def is_different(self) -> bool:
        return self.first is not None

    @property
    def compared(self) -> int:
        return sum(result.verdict != "missing" for result in self.probes)

    @property
    def first(self) -> ProbeResult | ChoiceResult | None:
        """The first place to blame: in dataflow order, in the most isolated view that shows a difference."""
        for view in ("pinpoint", "isolated", "cascade"):
            blamed: list[ProbeResult | ChoiceResult] = [
                result for result in self.probes if result.view == view and result.verdict == "different"
            ]
            if blamed or view == "cascade":
                blamed += [choice for choice in self.choices if choice.verdict == "flip"]
                return min(blamed, key=_blame_order, default=None)
        return None

    def worst_ratio(self) -> float:
        """The largest error in units of its limit."""
        return max((result.excess for result in self.probes), default=0.0)


def _blame_order(result: ProbeResult | ChoiceResult) -> tuple[int, int, int, str]:
    return dataflow_key(result.name if isinstance(result, ProbeResult) else result.exchange.name)


def compare_exact(reference: ReferenceRunner, candidate: Trace, workload: Workload) -> Comparison:
    """Both without rounding: the same logic differs by no more than reassociation of float64 sums."""
    replay = ChoiceReplay(candidate)
    view = _ViewOfRun("cascade", _run(reference, candidate, workload, "cascade", replay), [], torch.float64)
    results = [view.result(name, candidate, lambda spread: 1.0) for name in view.names(candidate)]
    choices = [_judged(exchange, EXACT_LIMIT * exchange.scale) for exchange in replay.exchanges]
    return Comparison(tuple(results), tuple(choices), sum(replay.compared_rows.values()), 0.0)


def compare(
    reference: Reference,
    candidate: Trace,
    dtype: torch.dtype,
    workload: Workload,
    views: Sequence[View] = ("cascade", "isolated"),
    draws: int = DRAWS,
    false_alarm_rate: float = FALSE_ALARM_RATE,
) -> Comparison:
    """Compare a candidate that ran `workload` in `dtype`. `reference(dtype)` builds the reference in a dtype."""
    truth_runner, eager_runner = reference(torch.float64), reference(dtype)
    results: list[ProbeResult] = []
    choices: dict[tuple[str, str, int, int], ChoiceResult] = {}
    choice_rows = 0
    for name_of_view in views:
        replay = ChoiceReplay(candidate)
        truth = _run(truth_runner, candidate, workload, name_of_view, replay)
        eager = [
            _run(eager_runner, candidate, workload, name_of_view, ChoiceReplay(candidate), draw=seed)
            for seed in range(draws)
        ]
        view = _ViewOfRun(name_of_view, truth, eager, dtype)
        names = view.names(candidate)
        comparisons = sum(len(truth.table(name, request).keys) for name in names for request in truth.requests(name))
        limit_of = partial(noise_limit, comparisons=comparisons, false_alarm_rate=false_alarm_rate)
        results += [view.result(name, candidate, limit_of) for name in names]
        # The most isolated view judges a choice: there the scores come from the candidate's own inputs.
        for exchange in replay.exchanges:
            noise = view.score_noise(exchange) * element_limit(comparisons, false_alarm_rate)
            choices[exchange.name, exchange.request, exchange.position, exchange.occurrence] = _judged(exchange, noise)
        choice_rows = sum(replay.compared_rows.values())
    return Comparison(tuple(results), tuple(choices.values()), choice_rows, false_alarm_rate)


def _run(
    runner: ReferenceRunner, candidate: Trace, workload: Workload, view: View, replay: ChoiceReplay, draw: int = 0
) -> Trace:
    """One run of the reference in a view; draw 0 is the plain one."""
    after = {
        "cascade": [],
        "isolated": [Given(candidate, is_layer_boundary)],
        "pinpoint": [Given(candidate, lambda name: True)],
    }
    # Recorded are the replayed choices, so that what depends on them is recorded in their order.
    before: list[Listener] = [RoundingDraw(draw), replay] if draw else [replay]
    return traced(runner, workload, *after[view], before=before)


class _ViewOfRun:
    """The truth of one view and the draws that give its floor."""

    def __init__(self, view: View, truth: Trace, eager: Sequence[Trace], dtype: torch.dtype):
        self.view, self.truth, self.eager, self.dtype = view, truth, eager, dtype

    def names(self, candidate: Trace) -> list[str]:
        """What the schema knows and this view can judge, in dataflow order; choices are judged by `ChoiceReplay`."""
        known = [name for name in self.truth.names() if (spec := spec_of(name)) and spec.kind != "choice"]
        recorded = set(candidate.names())
        if self.view == "isolated":
            return [name for name in known if name in recorded and has_own_input(name, recorded)]
        return [name for name in known if name in recorded]

    def result(self, name: str, candidate: Trace, limit_of: Callable[[float], float]) -> ProbeResult:
        """All requests of one name; one pair of tensors is loaded at a time."""
        parts = [self._part(name, request, candidate) for request in self.truth.requests(name)]
        rows = [row for part in parts for row in part.rows]
        missing = sum(part.missing for part in parts)
        elements = sum(part.errors.elements * len(part.rows) for part in parts)
        if not rows:
            return ProbeResult(name, self.view, "missing", 0, 0, missing, 0.0, 0.0, 0.0, 0.0, None, None)
        limits = [limit_of(part.floor.spread) for part in parts for _ in part.rows]
        error = torch.cat([part.errors.relative for part in parts])
        largest = torch.cat([part.errors.largest for part in parts])
        noise = torch.cat([part.floor.noise for part in parts])
        excess = error / (noise * torch.tensor(limits, dtype=error.dtype))
        worst = int(excess.argmax())
        bad = (excess > 1.0).nonzero().flatten().tolist()
        verdict: Verdict
        if bad:
            verdict = "different"
        elif all(part.is_bitwise_equal for part in parts):
            verdict = "bitwise equal"
        else:
            verdict = "within noise" if self.eager else "close"
        return ProbeResult(
            name,
            self.view,
            verdict,
            len(rows),
            elements,
            missing,
            float(error[worst]),
            float(noise[worst]),
            limits[worst],
            float(largest[worst]),
            rows[worst],
            rows[bad[0]] if bad else None,
        )

    def score_noise(self, exchange: Exchange) -> float:
        """Noise of the difference of two scores in the row of an exchange, in score units."""
        name = decided_by(exchange.name)
        assert name is not None
        truth, draws = self._tables(name, exchange.request)
        row = truth.keys.index((exchange.position, exchange.occurrence))
        values = truth.values[row : row + 1]
        floor = floor_of([draw[row : row + 1] for draw in draws], values, self._rounded_to(name))
        finite = values[values.isfinite()]
        # Of one element: the row's noise shared out among its elements; of a difference of two: sqrt(2) times that.
        return float(floor.noise) * float(finite.norm()) * (2.0 / max(1, finite.numel())) ** 0.5

    def _part(self, name: str, request: str, candidate: Trace) -> _Part:
        if not candidate.has(name, request):
            missing = len(self.truth.table(name, request).keys)
            empty = torch.zeros(0, dtype=torch.float64)
            return _Part([], RowErrors(empty, empty, 0), Floor(empty, 0.0), False, missing)
        truth, draws = self._tables(name, request)
        actual = _in_order_of_ids(name, request, candidate)
        expected_RX, actual_RX, keys, missing = common_rows(truth, actual)
        rows = [Place(request, position, occurrence) for position, occurrence in keys]
        errors = row_errors(actual_RX, expected_RX)
        if not draws:
            floor = Floor(torch.full_like(errors.relative, EXACT_LIMIT), 0.0)
            return _Part(rows, errors, floor, torch.equal(actual_RX, expected_RX), missing)
        row_of = {key: row for row, key in enumerate(truth.keys)}
        selected = torch.tensor([row_of[key] for key in keys], dtype=torch.long)
        floor = floor_of([draw[selected] for draw in draws], truth.values[selected], self._rounded_to(name))
        plain = draws[0][selected]
        is_equal = plain.shape == actual_RX.shape and torch.equal(plain.to(actual_RX.dtype), actual_RX)
        return _Part(rows, errors, floor, is_equal, missing)

    def _rounded_to(self, name: str) -> torch.dtype:
        """What an implementation may round this tensor to: the storage dtype, unless the schema owes it float32."""
        spec = spec_of(name)
        return torch.promote_types(self.dtype, torch.float32) if spec and spec.is_float32 else self.dtype

    def _tables(self, name: str, request: str) -> tuple[Table, list[Tensor]]:
        truth = _in_order_of_ids(name, request, self.truth)
        return truth, [_in_order_of_ids(name, request, trace).values for trace in self.eager]


@dataclass(frozen=True)
class _Part:
    """One request of one name."""

    rows: list[Place]
    errors: RowErrors
    floor: Floor
    is_bitwise_equal: bool
    missing: int


def _in_order_of_ids(name: str, request: str, trace: Trace) -> Table:
    """The table of a name; router weights in the order of ascending expert ids, in which they can be compared."""
    table = trace.table(name, request)
    ids_name = name.removesuffix("weights") + "expert_ids"
    if not name.endswith("router.weights") or not trace.has(ids_name, request):
        return table
    order = trace.table(ids_name, request).values.argsort(dim=-1)
    return Table(table.keys, table.values.gather(-1, order))


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


def _judged(exchange: Exchange, noise: float) -> ChoiceResult:
    if exchange.gap == 0.0:
        return ChoiceResult(exchange, noise, "tie")
    return ChoiceResult(exchange, noise, "near tie" if exchange.gap <= noise else "flip")
