"""Compares the values of a vision tower with the reference, by the rules of the text model (`judge`, `tolerance`).

Truth is the reference in float64; the floor of a row is the error of the reference in the candidate's dtype, pooled
over draws of its rounding; the limit follows from the false-alarm rate and the number of rows. Each view has its own
truth and floor, from the same inputs; the candidate's experts are replayed, in its order, and judged by their margins.
What the text model needs beyond that (steps, caches, choices that a dump hides) a tower has not: a call is one step
from pixels to rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parity.factor import constant_factor, row_factors
from parity.findings import ChoiceResult, Comparison, Place, ProbeResult, Verdict, View
from parity.replay import Exchange
from parity.rounding import RoundingDraw
from parity.runners.reference_vision import Values, VisionReferenceRunner, run_case
from parity.schema_vision import vision_dataflow_key, vision_decided_by, vision_probe_of
from parity.tolerance import (
    DRAWS,
    EXACT_LIMIT,
    FALSE_ALARM_RATE,
    Floor,
    RowErrors,
    element_limit,
    floor_of,
    noise_limit,
    row_errors,
)
from parity.vision_case import VisionCase
from parity.vision_order import OtherOrder, order_of
from parity.vision_replay import VisionGiven, VisionReplay

VisionReference = Callable[[torch.dtype], VisionReferenceRunner]


@dataclass(frozen=True)
class VisionComparison(Comparison):
    """`orders`: tensors that are different and would not be, were it not for the order of their rows."""

    orders: tuple[OtherOrder, ...] = ()

    @property
    def first(self) -> ProbeResult | ChoiceResult | None:
        """The first place to blame: in dataflow order, in the most isolated view that shows a difference."""
        return min(self.blamed, key=lambda result: vision_dataflow_key(result.name), default=None)


def compare_vision(
    reference: VisionReference,
    candidate: Values,
    dtype: torch.dtype,
    case: VisionCase,
    views: Sequence[View] = ("cascade", "isolated"),
    draws: int = DRAWS,
    false_alarm_rate: float = FALSE_ALARM_RATE,
) -> VisionComparison:
    """Compare a candidate that ran `case` in `dtype`. `reference(dtype)` builds the reference in a dtype.

    With `draws` = 0 the candidate has no rounding (exact mode, float64): every error is held against 1e-10.
    """
    judges = [_Judge(reference, candidate, dtype, case, view, draws, false_alarm_rate) for view in views]
    probes = [result for judge in judges for result in judge.probes()]
    # The most isolated view judges a choice: there the scores come from the candidate's own inputs.
    choices = {(choice.name, choice.exchange.position): choice for judge in judges for choice in judge.choices()}
    orders = {order.name: order for judge in judges for order in judge.orders}
    return VisionComparison(
        tuple(probes),
        tuple(choices.values()),
        judges[-1].choice_rows,
        false_alarm_rate,
        orders=tuple(sorted(orders.values(), key=lambda order: vision_dataflow_key(order.name))),
    )


def compare_vision_exact(reference: VisionReference, candidate: Values, case: VisionCase) -> VisionComparison:
    """Both without rounding: the same logic differs by no more than reassociation of float64 sums."""
    return compare_vision(reference, candidate, torch.float64, case, ("cascade",), draws=0)


class _Judge:
    """One view: the truth, the floor, and the verdict on every name."""

    def __init__(
        self,
        reference: VisionReference,
        candidate: Values,
        dtype: torch.dtype,
        case: VisionCase,
        view: View,
        draws: int,
        false_alarm_rate: float,
    ):
        self._candidate, self._dtype, self._view = candidate, dtype, view
        self._replay = VisionReplay(candidate)
        exact = reference(torch.float64)
        self._square = exact.vision.spatial_merge_size**2
        self._truth = _run(exact, candidate, case, view, self._replay)
        eager = reference(dtype) if draws else None
        self._draws = [
            _run(eager, candidate, case, view, VisionReplay(candidate), draw) for draw in range(draws) if eager
        ]
        self._names = [name for name in self._truth if _is_judged(name)]
        rows = sum(len(self._truth[name]) for name in self._names)
        self._limit = partial(noise_limit, comparisons=rows, false_alarm_rate=false_alarm_rate)
        self._element_limit = element_limit(rows, false_alarm_rate)
        self.orders: list[OtherOrder] = []

    @property
    def choice_rows(self) -> int:
        return self._replay.compared_rows

    def probes(self) -> list[ProbeResult]:
        """In dataflow order."""
        return [self._result(name) for name in sorted(self._names, key=vision_dataflow_key)]

    def choices(self) -> list[ChoiceResult]:
        return [self._judged(exchange) for exchange in self._replay.exchanges]

    def _result(self, name: str) -> ProbeResult:
        truth_RX = self._truth[name]
        if name not in self._candidate:
            return ProbeResult(name, self._view, "missing", 0, 0, len(truth_RX), 0.0, 0.0, 0.0, 0.0, None, None)
        actual_RX = self._candidate[name]
        common = min(len(truth_RX), len(actual_RX))
        missing = len(truth_RX) + len(actual_RX) - 2 * common
        truth_RX, actual_RX = truth_RX[:common], actual_RX[:common]
        errors = _errors(actual_RX, truth_RX)
        noise_R, limits_R = self._noise_and_limits(name, truth_RX)
        excess_R = errors.relative / (noise_R * limits_R)
        worst = int(excess_R.argmax())
        bad = (excess_R > 1.0).nonzero().flatten()
        if len(bad):
            self._note_order(name, truth_RX, actual_RX, float((noise_R * limits_R).max()))
        is_same_shape = actual_RX.shape == truth_RX.shape
        allowed_R = (noise_R * limits_R)[bad]
        return ProbeResult(
            name,
            self._view,
            self._verdict(name, bool(len(bad)), actual_RX),
            common,
            errors.elements * common,
            missing,
            float(errors.relative[worst]),
            float(noise_R[worst]),
            float(limits_R[worst]),
            float(errors.largest[worst]),
            Place("images", worst, 0),
            Place("images", int(bad[0]), 0) if len(bad) else None,
            factor=constant_factor(row_factors(actual_RX, truth_RX, bad), allowed_R)
            if len(bad) and is_same_shape
            else None,
        )

    def _verdict(self, name: str, is_bad: bool, actual_RX: Tensor) -> Verdict:
        if is_bad:
            return "different"
        plain_RX = (self._draws[0] if self._draws else self._truth)[name][: len(actual_RX)]
        if torch.equal(plain_RX.to(actual_RX.dtype), actual_RX):
            return "bitwise equal"
        return "within noise" if self._draws else "close"

    def _noise_and_limits(self, name: str, truth_RX: Tensor) -> tuple[Tensor, Tensor]:
        """Floor of each row and how many times that is allowed, [rows]."""
        if not self._draws:
            noise_R = torch.full((len(truth_RX),), EXACT_LIMIT, dtype=torch.float64)
            return noise_R, torch.ones_like(noise_R)
        floor = self._floor(name)
        return floor.noise[: len(truth_RX)], floor.limits(self._limit(floor.spread))[: len(truth_RX)]

    def _floor(self, name: str) -> Floor:
        probe = vision_probe_of(name)
        is_wide = probe is not None and probe.is_float32
        rounded_to = torch.promote_types(self._dtype, torch.float32) if is_wide else self._dtype
        draws = [draw[name] for draw in self._draws]
        return floor_of(draws, self._truth[name], rounded_to)

    def _judged(self, exchange: Exchange) -> ChoiceResult:
        noise = self._score_noise(exchange)
        if exchange.gap == 0.0:
            return ChoiceResult(exchange, self._view, noise, "tie")
        return ChoiceResult(exchange, self._view, noise, "near tie" if exchange.gap <= noise else "flip")

    def _score_noise(self, exchange: Exchange) -> float:
        """How far two scores of the row of an exchange can change places by noise, in score units."""
        if not self._draws:
            return EXACT_LIMIT * exchange.scale
        name = str(vision_decided_by(exchange.name))
        # Of one element: the row's noise shared out among its elements; of a difference of two: sqrt(2) times that.
        experts = self._truth[name].shape[-1]
        relative = float(self._floor(name).noise[exchange.position]) * (2.0 / experts) ** 0.5
        return self._element_limit * relative * exchange.scale

    def _note_order(self, name: str, truth_RX: Tensor, actual_RX: Tensor, tolerance: float) -> None:
        order = order_of(name, truth_RX, actual_RX, tolerance, self._square)
        if order is not None:
            self.orders.append(order)


def _run(
    runner: VisionReferenceRunner,
    candidate: Values,
    case: VisionCase,
    view: View,
    replay: VisionReplay,
    draw: int = 0,
) -> Values:
    """One run of the reference in a view; draw 0 is the plain one."""
    with RoundingDraw(draw).drawing() if draw else nullcontext():
        return run_case(runner, runner.vision, case, VisionGiven(candidate, view), before=[replay])


def _is_judged(name: str) -> bool:
    probe = vision_probe_of(name)
    return probe is not None and probe.kind != "choice"


def _errors(actual_RX: Tensor, truth_RX: Tensor) -> RowErrors:
    """Rows of another width are infinitely far away."""
    if actual_RX[:1].numel() == truth_RX[:1].numel():
        return row_errors(actual_RX, truth_RX)
    infinite_R = torch.full((len(truth_RX),), float("inf"), dtype=torch.float64)
    return RowErrors(infinite_R, infinite_R, truth_RX[:1].numel())
