"""What a comparison finds, as records. Nothing is computed where they are shown.

cascade    both run freely from the same tokens, with the candidate's discrete choices replayed: how error grows.
isolated   the reference runs each layer from the candidate's recorded input: which layer is to blame.
pinpoint   the reference runs each named operation from the candidate's recorded values: which operation is.

Where the candidate kept no more than sums and samples of a tensor, the cascade has a `PartialResult` of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from parity.detail import Detail
from parity.replay import Exchange
from parity.schema import dataflow_key
from parity.statistics import PartialResult

View = Literal["cascade", "isolated", "pinpoint"]
VIEWS: tuple[View, ...] = ("cascade", "isolated", "pinpoint")
Verdict = Literal["bitwise equal", "within noise", "close", "different", "missing"]
ChoiceVerdict = Literal["tie", "near tie", "flip"]


@dataclass(frozen=True)
class Place:
    """A row."""

    request: str
    position: int
    occurrence: int


@dataclass(frozen=True)
class StepResult:
    """The rows of one name that one step computed. `action` is its index in the workload; the rest as in `ProbeResult`,
    of the step's worst row. `bad` rows are outside the noise."""

    action: int
    rows: int
    bad: int
    error: float
    noise: float
    limit: float
    place: Place


def by_step(
    actions: Sequence[int],
    places: Sequence[Place],
    error: Sequence[float],
    noise: Sequence[float],
    limits: Sequence[float],
) -> tuple[StepResult, ...]:
    """Sort judged rows into their steps, ascending. All arguments have one value for each row."""
    rows: dict[int, list[int]] = {}
    for row, action in enumerate(actions):
        rows.setdefault(action, []).append(row)
    excess = [_excess(*values) for values in zip(error, noise, limits, strict=True)]
    results = []
    for action, own in sorted(rows.items()):
        worst = max(own, key=lambda row: excess[row])
        bad = sum(excess[row] > 1.0 for row in own)
        results.append(StepResult(action, len(own), bad, error[worst], noise[worst], limits[worst], places[worst]))
    return tuple(results)


def _excess(error: float, noise: float, limit: float) -> float:
    """The error in units of what is allowed; where nothing is allowed, any error is infinitely much."""
    allowed = noise * limit
    return error / allowed if allowed else inf if error else 0.0


@dataclass(frozen=True)
class ProbeResult:
    """One name in one view. Errors are relative: norm of the difference over norm of the true row, of the worst row.

    `limit` is in units of `noise`. Without rounding, `noise` is the constant limit and `limit` is 1. `steps` are the
    same rows, sorted by the step that computed them, where that is known. `factor`: the rows that are different are the
    true ones times this constant, but for noise. `score_factor`: those of an attention's core are what attention scores
    times this constant give, but for noise. `remark`: why an error is infinite.
    """

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
    steps: tuple[StepResult, ...] = ()
    factor: float | None = None
    score_factor: float | None = None
    remark: str = ""

    @property
    def ratio(self) -> float:
        return self.error / self.noise if self.noise else 0.0

    @property
    def excess(self) -> float:
        """Error in units of what is allowed: above 1 is different."""
        return self.ratio / self.limit if self.limit else 0.0


@dataclass(frozen=True)
class ChoiceResult:
    """A row whose choice differs, judged by the noise of its scores. `noise` and `exchange.gap` are in score units.

    `action`: the step that chose, where it is known.
    """

    exchange: Exchange
    view: View
    noise: float
    verdict: ChoiceVerdict
    action: int | None = None

    @property
    def name(self) -> str:
        return self.exchange.name

    @property
    def excess(self) -> float:
        """The gap in units of what noise can close: above 1 is a flip."""
        return self.exchange.gap / self.noise if self.noise else (float("inf") if self.exchange.gap else 0.0)


@dataclass(frozen=True)
class Comparison:
    """Everything found in the views of one run, in dataflow order.

    `skipped`: what was not judged, and why. `detail`: of the cascade, for pictures, where it was asked for.
    """

    probes: tuple[ProbeResult, ...]
    choices: tuple[ChoiceResult, ...]
    choice_rows: int
    false_alarm_rate: float
    skipped: tuple[str, ...] = ()
    partials: tuple[PartialResult, ...] = ()
    detail: Detail = field(default_factory=Detail)

    @property
    def is_different(self) -> bool:
        return self.first is not None or self.first_partial is not None

    @property
    def compared(self) -> int:
        """Tensors of which all values were compared."""
        return sum(result.verdict != "missing" for result in self.probes)

    @property
    def partly_compared(self) -> int:
        """Tensors of which sums and samples were compared."""
        return sum(result.verdict != "missing" for result in self.partials)

    @property
    def first(self) -> ProbeResult | ChoiceResult | None:
        """The first place to blame: in dataflow order, in the most isolated view that shows a difference."""
        return min(self.blamed, key=lambda result: dataflow_key(result.name), default=None)

    @property
    def blamed(self) -> list[ProbeResult | ChoiceResult]:
        """All differences of the most isolated view that shows any."""
        for view in reversed(VIEWS):
            blamed: list[ProbeResult | ChoiceResult] = [
                result for result in self.probes if result.view == view and result.verdict == "different"
            ]
            blamed += [choice for choice in self.choices if choice.view == view and choice.verdict == "flip"]
            if blamed:
                return blamed
        return []

    @property
    def first_partial(self) -> PartialResult | None:
        """The first tensor, in dataflow order, whose sums or samples differ."""
        different = [partial for partial in self.partials if partial.verdict == "different"]
        return min(different, key=lambda partial: (dataflow_key(partial.name), partial.action), default=None)

    def worst_excess(self) -> float:
        """The largest error in units of its limit."""
        return max((result.excess for result in self.probes), default=0.0)
