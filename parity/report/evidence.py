"""What was found of one tensor, one choice or one number: the smallest records of a report, and how they are worded.

Errors are relative (norm of the difference over norm of the true row, worst row); `noise` is the floor of that row,
`ratio` = error / noise, and `limit` is the largest ratio that counts as noise. Without rounding (level `exact`) the
noise is the constant limit and `limit` is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from parity.schema import layer_of


@dataclass(frozen=True)
class Place:
    """A row: request, absolute position, and how often that position had run before."""

    request: str
    position: int
    occurrence: int

    def __str__(self) -> str:
        again = f", run {self.occurrence + 1}" if self.occurrence else ""
        return f"request {self.request} position {self.position}{again}"


@dataclass(frozen=True)
class Step:
    """The rows of a tensor that one step of the workload computed, judged by the worst of them; `bad` are outside the
    noise. `action`: index of the step in the workload, `word`: the step itself, such as `p:a9`, where it is known."""

    action: int
    word: str
    rows: int
    bad: int
    error: float
    noise: float
    ratio: float
    limit: float
    place: Place

    @property
    def excess(self) -> float:
        return self.ratio / self.limit if self.limit else 0.0


@dataclass(frozen=True)
class Row:
    """One tensor of one workload in one view at one level; `rows` and `elements` were compared.

    `layer`: `0`, `1`, … or the part outside the layers, such as `logits`. `largest`: absolute difference. `steps`: the
    same rows by the step that computed them, where that is known. `factor`: the different rows are the expected ones
    times this constant, but for noise. `score_factor`: they are what attention scores times this constant give.
    `remark`: why an error is infinite.
    """

    level: str
    view: str
    workload: str
    seed: int
    layer: str
    tensor: str
    verdict: str
    error: float
    noise: float
    ratio: float
    limit: float
    largest: float
    rows: int
    elements: int
    missing_rows: int
    place: Place | None
    first_bad: Place | None
    steps: tuple[Step, ...] = ()
    factor: float | None = None
    score_factor: float | None = None
    remark: str = ""

    @property
    def excess(self) -> float:
        """Error in units of what is allowed: above 1 is different."""
        return self.ratio / self.limit if self.limit else 0.0

    @property
    def is_different(self) -> bool:
        return self.verdict == "different"

    @property
    def is_exact(self) -> bool:
        """Judged without rounding, against a constant."""
        return self.limit == 1.0

    @property
    def amount(self) -> str:
        """The error beside its limit, in units of noise or, without rounding, as they are."""
        if self.verdict == "missing":
            return "missing"
        if self.is_exact:
            return f"{number(self.error)} of {self.noise:.0e}"
        return f"{times(self.ratio)} of {times(self.limit)}"

    @property
    def phrase(self) -> str:
        """The same in words, for a sentence."""
        if self.is_exact:
            return f"{self.view} error {number(self.error)} (limit {self.noise:.0e})"
        return f"{self.view} error {times(self.ratio)} noise (limit {times(self.limit)})"


@dataclass(frozen=True)
class Choice:
    """A row in which the two sides choose differently. `gap` and `noise` are in units of the scores.

    `gap_ulps`: the gap in steps of the level's dtype at the score, where both are known. `action`: the step that chose,
    where it is known. An infinite gap: no exchange of scores, or scores are not there.
    """

    level: str
    view: str
    workload: str
    seed: int
    layer: str
    tensor: str
    verdict: str
    place: Place
    only_expected: tuple[int, ...]
    only_actual: tuple[int, ...]
    gap: float
    noise: float
    action: int | None = None
    gap_ulps: float | None = None

    @property
    def is_different(self) -> bool:
        return self.verdict == "flip"

    @property
    def phrase(self) -> str:
        ulps = f" ({self.gap_ulps:.3g} ulps of {self.level})" if self.gap_ulps is not None else ""
        return (
            f"chooses {_ids(self.only_actual)} in place of {_ids(self.only_expected)}: "
            f"score gap {number(self.gap)}{ulps}, noise {number(self.noise)}"
        )


@dataclass(frozen=True)
class Number:
    """One number of both sides; `limit`: how far apart noise can bring them. `what`: `sum`, `mean`, `element 7`, …"""

    what: str
    expected: float
    actual: float
    limit: float
    excess: float


@dataclass(frozen=True)
class Partial:
    """A tensor of one step of which only numbers are known: sums, sizes, samples.

    *partial*: `numbers` of them were compared and agree; *different*: `worst` does not; *missing*: `reason` says why.
    """

    level: str
    workload: str
    seed: int
    layer: str
    tensor: str
    request: str
    action: int
    verdict: str
    reason: str
    numbers: int
    worst: Number | None
    view: str = "cascade"

    @property
    def is_different(self) -> bool:
        return self.verdict == "different"

    @property
    def amount(self) -> str:
        """The number that comes closest to its limit, beside that limit."""
        if self.worst is None:
            return "missing"
        distance = abs(self.worst.actual - self.worst.expected)
        return f"{self.worst.what} off by {number(distance)} of {self._limit}" if distance else "all numbers are equal"

    @property
    def phrase(self) -> str:
        if self.worst is None:
            return self.reason
        worst = self.worst
        return f"{worst.what} is {worst.actual:.6g}, expected {worst.expected:.6g} within {self._limit}"

    @property
    def _limit(self) -> str:
        return number(self.worst.limit) if self.worst else ""


def layer_group(tensor: str) -> str:
    """`layers.3.attn.gate` belongs to `3`, what is outside the layers to the first part of its name."""
    layer = layer_of(tensor)
    return tensor.partition(".")[0] if layer is None else str(layer)


def number(value: float) -> str:
    """Three digits; an exact zero is `0`."""
    return "0" if value == 0 else f"{value:.2e}"


def times(value: float) -> str:
    """`1.3x`; three digits below 1000, `1.23e+04x` above; an exact zero is `0x`."""
    if value == 0:
        return "0x"
    return f"{value:.1f}x" if 0.05 <= value < 1000 else f"{value:.2g}x" if value < 0.05 else f"{value:.2e}x"


def _ids(ids: tuple[int, ...]) -> str:
    """A long list is cut, and says how long it was."""
    shown = ", ".join(str(one) for one in ids[:6])
    return f"[{shown}]" if len(ids) <= 6 else f"[{shown}, … {len(ids)} in all]"
