"""One view of one candidate: the truth, the floor, and the verdict on every name.

Each view has its own truth (the reference in float64) and its own floor (draws of the reference in the candidate's
dtype), all from the same inputs. A hypothesis (the reference with a fault) is judged against the same floor.

Where the candidate does not show its choices, the draws make their own. Rows that depend on no choice which rounding
can change (`hidden_choices`) have a floor of their own; the others one that holds what another expert or key changes.
Against a hypothesis only rows that are settled under it are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import torch

from parity.end_to_end import actions_of
from parity.factor import RowFactors, constant_factor, row_factors
from parity.findings import ChoiceResult, ChoiceVerdict, Place, ProbeResult, Verdict, View, by_step
from parity.hidden_choices import HiddenChoices, SettledRows
from parity.remark import remark_of
from parity.replay import ChoiceReplay, Exchange, Given, is_layer_boundary
from parity.rounding import RoundingDraw
from parity.router_order import in_order_of_ids
from parity.run import run_workload
from parity.runners.reference import ReferenceRunner
from parity.schema import dataflow_key, decided_by, layer_of, pattern_of, spec_of
from parity.tolerance import (
    EXACT_LIMIT,
    Floor,
    RowErrors,
    element_limit,
    floor_of,
    noise_limit,
    row_errors,
)
from parity.trace import Trace, TraceRecorder, common_rows
from parity.workload import Workload
from reference.probe import Rows

Reference = Callable[[torch.dtype], ReferenceRunner]


class _Observed(Exception):  # noqa: N818 - the end of a run, not an error
    pass


class _Until:
    """Ends a run as soon as a row has been observed."""

    def __init__(self, name: str, place: Place):
        self._name, self._place = name, place
        self._still = place.occurrence

    def observe(self, name: str, value: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        is_here = name == self._name and rows is not None and rows.request == self._place.request
        if is_here and rows is not None and self._place.position in rows.positions.tolist():
            if not self._still:
                raise _Observed
            self._still -= 1
        return value


def run_in_view(
    runner: ReferenceRunner,
    candidate: Trace,
    workload: Workload,
    view: View,
    replay: ChoiceReplay,
    draw: int = 0,
    until: tuple[str, Place] | None = None,
) -> Trace:
    """One run of the reference in a view; draw 0 is the plain one. It ends behind the row `until`, if that is given."""
    given = {
        "cascade": [],
        "isolated": [Given(candidate, is_layer_boundary)],
        "pinpoint": [Given(candidate, lambda name: True)],
    }
    stop = [_Until(*until)] if until else []
    recorder = TraceRecorder(producer=runner.name)
    # Recorded are the replayed choices, so that what depends on them is recorded in their order.
    with RoundingDraw(draw).drawing() if draw else nullcontext(), suppress(_Observed):
        run_workload(runner, workload, recorder, *stop, *given[view], before=[replay])
    return recorder.trace()


@dataclass(frozen=True)
class Findings:
    """Everything found against one truth. `confirmed`: how many rows and choices that differ from the reference without
    a fault were judged; if they are within the noise of this truth, that is evidence for it."""

    probes: list[ProbeResult]
    choices: list[ChoiceResult]
    truth: Trace
    confirmed: int


class Judge:
    """Judges a candidate's trace. With `draws` = 0 nothing is rounded on either side, and the limit is a constant.

    In memory: the truth in float64 and every draw, about 12 times a candidate in bfloat16 for 8 draws, 16 times where a
    hidden choice is unclear; the candidate's own tables one at a time, and beside them a few times the largest.
    """

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
        exact = reference(torch.float64)
        self.config = exact.config
        self.truth = run_in_view(exact, candidate, workload, view, self._replay)
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
        self._limits: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}
        self._hidden = HiddenChoices(candidate, view, workload, self._floor) if draws else None
        self._settled = self._hidden.settled(self.truth) if self._hidden else None
        self._exchanged = self._run_with_exchanges(exact) if self._hidden else None
        # By name and request: the action that computed each row.
        self._actions: dict[tuple[str, str], dict[tuple[int, int], int]] = {}
        # The rows that are different from the reference without a fault.
        self._bad: dict[str, set[Place]] = {}

    @property
    def choice_rows(self) -> int:
        return sum(self._replay.compared_rows.values())

    def probes(self) -> list[ProbeResult]:
        return [self._result(name, self._parts(name, self.truth, None)) for name in self.names]

    def choices(self) -> list[ChoiceResult]:
        return [self._judged(exchange) for exchange in self._replay.exchanges]

    def against(self, hypothesis: ReferenceRunner, until: tuple[str, Place] | None = None) -> Findings:
        """The same verdicts with another truth: a float64 reference that has a fault.

        With `until`, of that name alone and up to that row. The hypothesis cannot run again then.
        """
        replay = ChoiceReplay(self.candidate)
        truth = run_in_view(hypothesis, self.candidate, self.workload, self.view, replay, until=until)
        settled = self._hidden.settled(truth) if self._hidden else None
        names = [name for name in self.names if until is None or name == until[0]]
        parts = {name: self._parts(name, truth, settled) for name in names}
        # A name of which no row is settled is not judged; one that is not computed is missing.
        judged = [name for name in names if _has_rows(parts[name]) or not truth.requests(name)]
        exchanges = [exchange for exchange in replay.exchanges if until is None or exchange.name == until[0]]
        confirmed = [
            place for name in judged for part in parts[name] for place in part.rows if place in self._bad[name]
        ]
        return Findings(
            [self._result(name, parts[name]) for name in judged],
            [self._judged(exchange) for exchange in exchanges],
            truth,
            len(confirmed) + len(self._replay.exchanges),
        )

    def different_rows(self, name: str) -> dict[Place, DifferentRow]:
        """The rows of a judged name that are different from the reference without a fault."""
        found: dict[Place, DifferentRow] = {}
        for request in self.truth.requests(name):
            part = self._part(name, request, self.truth, None)
            allowed = dict(zip(part.rows, (part.noise * part.limits).tolist(), strict=True))
            if different := self._bad[name] & allowed.keys():
                table = in_order_of_ids(name, request, self.candidate)
                row_of = {Place(request, *key): row for row, key in enumerate(table.keys)}
                found |= {place: DifferentRow(table.values[row_of[place]], allowed[place]) for place in different}
        return found

    def first_of(self, blamed: Sequence[ProbeResult | ChoiceResult]) -> tuple[str, Place]:
        """The row that is different and is computed first: by the earliest action, nearest to the input."""
        places = [(result.name, _first_place(result)) for result in blamed]
        return min(places, key=lambda row: (self._action_of(*row), dataflow_key(row[0])))

    def _action_of(self, name: str, place: Place) -> int:
        """Which action computed a row; behind the last one for a row that only a hypothesis has."""
        table = (name, place.request)
        if table not in self._actions:
            self._actions[table] = actions_of(self.truth, *table)
        return self._actions[table].get((place.position, place.occurrence), len(self.workload.actions))

    def _run_with_exchanges(self, exact: ReferenceRunner) -> Trace | None:
        """The truth with every hidden choice exchanged that rounding can change; None if there is none."""
        assert self._hidden is not None
        assert self._settled is not None
        choices = self._hidden.exchanged(self.truth, self._settled)
        if choices is None:
            return None
        shown = [entry for entry in self.candidate.entries() if not choices.has(entry.name, entry.request)]
        replay = ChoiceReplay(Trace([*shown, *choices.entries()]))
        return run_in_view(exact, self.candidate, self.workload, self.view, replay)

    def _parts(self, name: str, truth: Trace, settled: SettledRows | None) -> list[_Part]:
        """All requests of one name, of the settled rows only; one pair of tensors is loaded at a time."""
        return [self._part(name, request, truth, settled) for request in self.truth.requests(name)]

    def _result(self, name: str, parts: Sequence[_Part]) -> ProbeResult:
        rows = [row for part in parts for row in part.rows]
        missing = sum(part.missing for part in parts)
        if not rows:
            return ProbeResult(name, self.view, "missing", 0, 0, missing, 0.0, 0.0, 0.0, 0.0, None, None)
        error = torch.cat([part.errors.relative for part in parts])
        largest = torch.cat([part.errors.largest for part in parts])
        noise = torch.cat([part.noise for part in parts])
        limits = torch.cat([part.limits for part in parts])
        worst = int((error / (noise * limits)).argmax())
        bad = _is_bad(error, noise, limits).nonzero().flatten().tolist()
        self._bad.setdefault(name, {rows[row] for row in bad})
        factors = RowFactors(
            torch.cat([part.factors.factors for part in parts]), torch.cat([part.factors.left_over for part in parts])
        )
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
            by_step(
                [self._action_of(name, row) for row in rows], rows, error.tolist(), noise.tolist(), limits.tolist()
            ),
            constant_factor(factors, (noise * limits)[bad]) if bad else None,
            remark=next(filter(None, (part.remark for part in parts)), ""),
        )

    def _verdict(self, is_bad: bool, parts: Sequence[_Part]) -> Verdict:
        if is_bad:
            return "different"
        if all(part.is_bitwise_equal for part in parts):
            return "bitwise equal"
        return "within noise" if self._draws else "close"

    def _part(self, name: str, request: str, truth: Trace, settled: SettledRows | None) -> _Part:
        sides = [trace for trace in (truth, self.candidate) if trace.has(name, request)]
        if len(sides) < 2:
            empty = torch.zeros(0, dtype=torch.float64)
            missing = sum(len(trace.keys(name, request)) for trace in sides)
            return _Part([], RowErrors(empty, empty, 0), RowFactors(empty, empty), empty, empty, False, missing, "")
        if self._draws:
            self._noise_and_limits(name, request)  # before the tables are loaded: it loads its own, one after another
        expected = in_order_of_ids(name, request, truth)
        actual = in_order_of_ids(name, request, self.candidate)
        expected_RX, actual_RX, keys, missing = common_rows(expected, actual)
        errors = row_errors(actual_RX, expected_RX)
        remark = remark_of(name, actual.values, expected.values, errors.relative)
        if not self._draws:
            rows = [Place(request, *key) for key in keys]
            noise = torch.full_like(errors.relative, EXACT_LIMIT)
            bad = _is_bad(errors.relative, noise, torch.ones_like(noise)).nonzero().flatten()
            factors = row_factors(actual_RX, expected_RX, bad)
            is_equal = torch.equal(actual_RX, expected_RX)
            return _Part(rows, errors, factors, noise, torch.ones_like(noise), is_equal, missing, remark)
        row_of = {key: row for row, key in enumerate(self.truth.keys(name, request))}
        kept = settled.mask(name, request, keys) if settled else torch.ones(len(keys), dtype=torch.bool)
        # Rows without a floor, which only a hypothesis has: a fault that caches more than there should be.
        kept &= torch.tensor([key in row_of for key in keys], dtype=torch.bool)
        keys = tuple(key for key, is_kept in zip(keys, kept.tolist(), strict=True) if is_kept)
        selected = torch.tensor([row_of[key] for key in keys], dtype=torch.long)
        noise, limits = (per_row[selected] for per_row in self._noise_and_limits(name, request))
        errors = RowErrors(errors.relative[kept], errors.largest[kept], errors.elements)
        bad = kept.nonzero().flatten()[_is_bad(errors.relative, noise, limits)]
        factors = row_factors(actual_RX, expected_RX, bad)
        plain = in_order_of_ids(name, request, self._draws[0]).values[selected]
        is_equal = plain.shape == actual_RX[kept].shape and torch.equal(plain.to(actual_RX.dtype), actual_RX[kept])
        rows = [Place(request, *key) for key in keys]
        return _Part(rows, errors, factors, noise, limits, is_equal, missing, remark)

    def _noise_and_limits(self, name: str, request: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Floor of each row and how many times that is allowed, [rows]. Settled rows are not pooled with others."""
        if (name, request) not in self._limits:
            floor = self._floor(name, request)
            noise, limits = floor.noise.clone(), floor.limits(self._limit(floor.spread))
            assert self._settled is not None
            settled = self._settled.mask(name, request, self.truth.keys(name, request))
            if not settled.all():
                wide = self._floor_with_exchanges(name, request)
                noise, limits = wide.noise, wide.limits(self._limit(wide.spread))
                if settled.any():
                    own = self._floor_of_rows(name, request, settled)
                    noise[settled], limits[settled] = own.noise, own.limits(self._limit(own.spread))
            self._limits[name, request] = noise, limits
        return self._limits[name, request]

    def _floor(self, name: str, request: str) -> Floor:
        if (name, request) not in self._floors:
            every = torch.ones(len(self.truth.keys(name, request)), dtype=torch.bool)
            self._floors[name, request] = self._floor_of_rows(name, request, every)
        return self._floors[name, request]

    def _floor_with_exchanges(self, name: str, request: str) -> Floor:
        """The floor, and in each row at least what the exchange of hidden choices makes of it."""
        floor = self._floor(name, request)
        if self._exchanged is None:
            return floor
        sides = (in_order_of_ids(name, request, trace).values for trace in (self._exchanged, self.truth))
        by_exchange = row_errors(*sides).relative
        largest = max(floor.largest, float(by_exchange.max()))
        return Floor(torch.maximum(floor.noise, by_exchange), floor.spread, largest)

    def _floor_of_rows(self, name: str, request: str, kept: torch.Tensor) -> Floor:
        def rows(trace: Trace) -> torch.Tensor:
            values = in_order_of_ids(name, request, trace).values
            return values if kept.all() else values[kept]

        return floor_of(map(rows, self._draws), rows(self.truth), self._rounded_to(name))

    def _rounded_to(self, name: str) -> torch.dtype:
        """What an implementation may round this tensor to: the storage dtype, unless the schema owes it float32."""
        spec = spec_of(name)
        return torch.promote_types(self.dtype, torch.float32) if spec and spec.is_float32 else self.dtype

    def _judged(self, exchange: Exchange) -> ChoiceResult:
        noise = self._score_noise(exchange)
        verdict: ChoiceVerdict = "near tie" if exchange.gap <= noise else "flip"
        place = Place(exchange.request, exchange.position, exchange.occurrence)
        action = self._action_of(exchange.name, place)
        return ChoiceResult(exchange, self.view, noise, "tie" if exchange.gap == 0.0 else verdict, action)

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
class DifferentRow:
    """What the candidate has there, and the relative error that it may have by noise."""

    actual: torch.Tensor
    allowed: float


@dataclass(frozen=True)
class _Part:
    """One request of one name. Tensors have one number for each row, `factors` for each that is outside the noise."""

    rows: list[Place]
    errors: RowErrors
    factors: RowFactors
    noise: torch.Tensor
    limits: torch.Tensor
    is_bitwise_equal: bool
    missing: int
    remark: str


def _is_bad(error: torch.Tensor, noise: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Which rows are outside the noise."""
    return error / (noise * limits) > 1.0


def _has_rows(parts: Sequence[_Part]) -> bool:
    return any(part.rows for part in parts)


def _first_place(result: ProbeResult | ChoiceResult) -> Place:
    if isinstance(result, ChoiceResult):
        return Place(result.exchange.request, result.exchange.position, result.exchange.occurrence)
    assert result.first_bad is not None
    return result.first_bad


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
