"""Compares a candidate's trace with a golden: the cascade view, from stored truths and floors. Runs no model.

The candidate ran freely, with its own discrete choices. A choice that differs from the truth's is judged by how far the
truth's scores are from a tie: *tie*, *near tie* within the noise of the scores, else *flip*. What follows from another
choice cannot be judged by a stored truth: later operations of the same row, and in later layers every row that can see
it. Those rows are counted as not judged, never as passed. The same holds behind a choice that the candidate does not
show and that rounding may well have changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parity.findings import ChoiceResult, ChoiceVerdict, Comparison, Place, ProbeResult, Verdict
from parity.golden_file import Golden
from parity.replay import Exchange, score_gap
from parity.router_order import ids_of_weights, in_order_of_ids
from parity.schema import dataflow_key, decided_by, layer_of, spec_of
from parity.tolerance import FALSE_ALARM_RATE, element_limit, noise_limit, row_errors
from parity.trace import Table, Trace, common_rows
from parity.workload import Fork, Workload

# Groups of names that come after all layers; the cache is filled inside of its layer.
_BEHIND_LAYERS = ("final_norm", "logits", "mtp.")
# A choice that is not shown counts as the truth's if its margin is this many deviations of its noise: 1 in 30,000.
CLEAR_MARGIN = 4.0


def compare_to_golden(golden: Golden, candidate: Trace, false_alarm_rate: float = FALSE_ALARM_RATE) -> Comparison:
    """Judge every name that both have; what is not judged, and why, is in `skipped`.

    One table of each side is in memory at a time. Nothing in common is not an agreement: see `Comparison.compared`.
    """
    return _GoldenJudge(golden, candidate, false_alarm_rate).comparison()


class _GoldenJudge:
    def __init__(self, golden: Golden, candidate: Trace, false_alarm_rate: float):
        self._golden, self._candidate, self._rate = golden, candidate, false_alarm_rate
        recorded = set(candidate.names())
        self._names = [name for name in golden.names() if name in recorded]
        rows = sum(
            len(golden.keys(name, request))
            for name in self._names
            for request in golden.requests(name)
            if candidate.has(name, request)
        )
        self._limit = partial(noise_limit, comparisons=rows, false_alarm_rate=false_alarm_rate)
        self._element_limit = element_limit(rows, false_alarm_rate)
        self._choice_rows = 0
        self._causes: list[_Cause] = []
        self._family = _families(golden.workload)
        self._skipped = [f"{name}: not in the golden" for name in candidate.names() if name not in golden.names()]

    def comparison(self) -> Comparison:
        choices = [choice for name in self._names if _is_choice(name) for choice in self._choices_of(name)]
        self._causes += [_Cause.of(choice) for choice in choices]
        self._causes += [cause for name in filter(_is_choice, self._golden.names()) for cause in self._unshown(name)]
        self._causes.sort(key=lambda cause: dataflow_key(cause.name))
        probes = [result for name in self._names if not _is_choice(name) if (result := self._probe(name))]
        return Comparison(tuple(probes), tuple(choices), self._choice_rows, self._rate, tuple(self._skipped))

    def _choices_of(self, name: str) -> Iterable[ChoiceResult]:
        for request in self._golden.requests(name):
            if self._candidate.has(name, request):
                yield from self._choices_of_request(name, request)

    def _choices_of_request(self, name: str, request: str) -> Iterable[ChoiceResult]:
        golden, scores_name = self._golden.choices(name, request), str(decided_by(name))
        expected_RK, actual_RK, keys, missing = common_rows(
            Table(golden.keys, golden.choices), self._candidate.table(name, request)
        )
        self._choice_rows += len(keys)
        if missing:
            self._skipped.append(f"{name}, request {request}: {missing} rows that only one side has")
        different = (expected_RK.sort(-1).values != actual_RK.sort(-1).values).any(-1).nonzero().flatten().tolist()
        if not different:
            return
        scores = self._golden.values(scores_name, request)
        row_of = {key: row for row, key in enumerate(golden.keys)}
        for position, occurrence in (keys[row] for row in different):
            row = row_of[position, occurrence]
            ours, theirs = (
                set(side_RK[keys.index((position, occurrence))].tolist()) - {-1} for side_RK in (expected_RK, actual_RK)
            )
            lost, won = sorted(ours - theirs), sorted(theirs - ours)
            truth_S = scores.truth[row].to(torch.float64)
            gap, scale = score_gap(truth_S, lost, won), float(truth_S[truth_S.isfinite()].norm())
            exchange = Exchange(name, request, position, occurrence, tuple(lost), tuple(won), gap, scale)
            noise = self._element_limit * float(golden.margin_noises[row])
            yield ChoiceResult(exchange, "cascade", noise, _choice_verdict(gap, noise))

    def _unshown(self, name: str) -> Iterable[_Cause]:
        for request in self._golden.requests(name):
            table = self._golden.choices(name, request)
            shown = self._candidate.table(name, request).keys if self._candidate.has(name, request) else ()
            for row in (table.margins < CLEAR_MARGIN * table.margin_noises).nonzero().flatten().tolist():
                position, occurrence = table.keys[row]
                if (position, occurrence) not in shown:
                    yield _Cause(name, request, position, occurrence, "possible near tie")

    def _probe(self, name: str) -> ProbeResult | None:
        parts = [
            self._part(name, request) for request in self._golden.requests(name) if self._is_comparable(name, request)
        ]
        missing = sum(part.missing for part in parts)
        parts = [part for part in parts if part.places]
        if not parts:
            return None
        places = [place for part in parts for place in part.places]
        error, noise, limits, largest = (
            torch.cat([getattr(part, field) for part in parts]) for field in ("error", "noise", "limits", "largest")
        )
        excess = error / (noise * limits)
        worst, bad = int(excess.argmax()), (excess > 1.0).nonzero().flatten().tolist()
        verdict: Verdict = "different" if bad else "within noise"
        return ProbeResult(
            name,
            "cascade",
            verdict,
            len(places),
            sum(part.elements for part in parts),
            missing,
            float(error[worst]),
            float(noise[worst]),
            float(limits[worst]),
            float(largest[worst]),
            places[worst],
            places[bad[0]] if bad else None,
        )

    def _is_comparable(self, name: str, request: str) -> bool:
        if not self._candidate.has(name, request):
            rows = len(self._golden.keys(name, request))
            self._skipped.append(f"{name}, request {request}: {rows} rows that only one side has")
            return False
        if name.endswith("router.weights") and not self._candidate.has(ids_of_weights(name), request):
            self._skipped.append(f"{name}, request {request}: cannot be compared without {ids_of_weights(name)}")
            return False
        return True

    def _part(self, name: str, request: str) -> _Part:
        golden = self._golden.values(name, request)
        expected_RX, actual_RX, keys, missing = common_rows(
            Table(golden.keys, golden.truth), in_order_of_ids(name, request, self._candidate)
        )
        places = [Place(request, position, occurrence) for position, occurrence in keys]
        causes = [
            next((cause for cause in self._causes if cause.reaches(name, place, self._family)), None)
            for place in places
        ]
        for cause, count in Counter(cause for cause in causes if cause).items():
            self._skipped.append(f"{name}, request {request}: {count} rows not judged, behind the {cause}")
        if missing:
            self._skipped.append(f"{name}, request {request}: {missing} rows that only one side has")
        judged = torch.tensor([row for row, cause in enumerate(causes) if not cause], dtype=torch.long)
        row_of = {key: row for row, key in enumerate(golden.keys)}
        floor_rows = torch.tensor([row_of[keys[row]] for row in judged.tolist()], dtype=torch.long)
        noise = golden.floor.noise[floor_rows]
        limits = golden.floor.limits(self._limit(golden.floor.spread))[floor_rows]
        if expected_RX.shape != actual_RX.shape:
            # Another width is no rounding. Flattened, too, it would not fit.
            infinite = torch.full((len(judged),), float("inf"), dtype=torch.float64)
            error, largest, elements = infinite, infinite, 0
        else:
            errors = row_errors(actual_RX, expected_RX)
            error, largest, elements = errors.relative[judged], errors.largest[judged], errors.elements
        kept = [places[row] for row in judged.tolist()]
        return _Part(kept, error, noise, limits, largest, elements * len(kept), missing)


@dataclass(frozen=True)
class _Cause:
    """A choice that is, or may be, another one than the truth's."""

    name: str
    request: str
    position: int
    occurrence: int
    verdict: str

    @classmethod
    def of(cls, choice: ChoiceResult) -> _Cause:
        exchange = choice.exchange
        return cls(exchange.name, exchange.request, exchange.position, exchange.occurrence, choice.verdict)

    def __str__(self) -> str:
        return f"{self.verdict} of {self.name}, request {self.request}, position {self.position}"

    def reaches(self, name: str, place: Place, family: dict[str, set[str]]) -> bool:
        """In the same layer: what comes later in the same row. In later layers: rows at or behind its position.

        That is more than attention can see where a window is short, or where the row was taken back before.
        """
        layer = layer_of(self.name)
        assert layer is not None
        if layer_of(name) == layer:
            own = (self.request, self.position, self.occurrence)
            is_same_row = own == (place.request, place.position, place.occurrence)
            return is_same_row and dataflow_key(name) > dataflow_key(self.name)
        is_later = (layer_of(name) or 0) > layer or name.startswith(_BEHIND_LAYERS)
        is_later |= name.startswith("cache.") and int(name.split(".")[1]) > layer
        return is_later and place.request in family[self.request] and place.position >= self.position


@dataclass(frozen=True)
class _Part:
    """The judged rows of one request of one name. Tensors are [rows], float64."""

    places: list[Place]
    error: Tensor
    noise: Tensor
    limits: Tensor
    largest: Tensor
    elements: int
    missing: int


def _is_choice(name: str) -> bool:
    spec = spec_of(name)
    return spec is not None and spec.kind == "choice"


def _choice_verdict(gap: float, noise: float) -> ChoiceVerdict:
    if gap == 0.0:
        return "tie"
    return "near tie" if gap <= noise else "flip"


def _families(workload: Workload) -> dict[str, set[str]]:
    """Each request with those that were forked from it, directly or not."""
    family: dict[str, set[str]] = {request: {request} for request in workload.requests}
    for action in reversed(workload.actions):
        if isinstance(action, Fork):
            family[action.request] |= family[action.new]
    return family
