"""What a comparison finds, as records. Nothing is computed where they are shown.

cascade    both run freely from the same tokens, with the candidate's discrete choices replayed: how error grows.
isolated   the reference runs each layer from the candidate's recorded input: which layer is to blame.
pinpoint   the reference runs each named operation from the candidate's recorded values: which operation is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from parity.replay import Exchange
from parity.schema import dataflow_key

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
class ProbeResult:
    """One name in one view. Errors are relative: norm of the difference over norm of the true row, of the worst row.

    `limit` is in units of `noise`. Without rounding, `noise` is the constant limit and `limit` is 1.
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

    @property
    def ratio(self) -> float:
        return self.error / self.noise if self.noise else 0.0

    @property
    def excess(self) -> float:
        """Error in units of what is allowed: above 1 is different."""
        return self.ratio / self.limit if self.limit else 0.0


@dataclass(frozen=True)
class ChoiceResult:
    """A row whose choice differs, judged by the noise of its scores. `noise` and `exchange.gap` are in score units."""

    exchange: Exchange
    view: View
    noise: float
    verdict: ChoiceVerdict

    @property
    def name(self) -> str:
        return self.exchange.name

    @property
    def excess(self) -> float:
        """The gap in units of what noise can close: above 1 is a flip."""
        return self.exchange.gap / self.noise if self.noise else (float("inf") if self.exchange.gap else 0.0)


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

    def worst_excess(self) -> float:
        """The largest error in units of its limit."""
        return max((result.excess for result in self.probes), default=0.0)
