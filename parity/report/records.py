"""A report as flat records: one a fact. Every format is written from these and computes nothing.

`from_findings` builds them from a check, a comparison or a diagnosis. A tensor whose values are not all there has a
`Partial` in place of a `Row`; the best that can be said of it is *partial*. Errors, noise and limits: `evidence`.

A report whose totals do not add up, or whose verdict does not follow from its rows, cannot be built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from parity.detail import Detail
from parity.errors import ParityError
from parity.report.evidence import Choice, Partial, Row
from parity.schema import dataflow_key

Command = Literal["check", "compare", "diagnose"]
ReportVerdict = Literal["agrees", "different", "partial", "nothing compared"]
TriedVerdict = Literal["explains", "helps", "does not help"]


class ReportError(ParityError):
    """The records of a report contradict each other, or a report cannot be written where it was asked to be."""


@dataclass(frozen=True)
class Totals:
    """Counted where the findings were made. `missing` tensors are no part of `tensors` and `elements`.

    `partial`: tensors of single steps of which numbers were compared; `partial_different` of them differ.
    """

    workloads: int
    tensors: int
    elements: int
    bitwise_equal: int
    different: int
    missing: int
    choice_rows: int
    ties: int
    near_ties: int
    flips: int
    partial: int = 0
    partial_different: int = 0


@dataclass(frozen=True)
class LevelRow:
    """What the rows of one level amount to."""

    level: str
    verdict: ReportVerdict
    tensors: int
    bitwise_equal: int
    worst: Row | None
    ties: int
    near_ties: int
    flips: int

    @property
    def bitwise_percent(self) -> float:
        return 100.0 * self.bitwise_equal / max(1, self.tensors)


@dataclass(frozen=True)
class LayerRow:
    """One layer at one level: its worst tensor over all workloads and views, and the error of its output in two views
    of one workload, the one with the largest error in cascade.

    `arrives`: cascade, the error behind the layer when both run freely. `added`: isolated, the error behind the layer
    when the expected side starts it from the same input. None: not compared in that view.
    """

    level: str
    layer: str
    kind: str
    worst: Row
    arrives: Row | None
    added: Row | None
    different: int


@dataclass(frozen=True)
class Tried:
    """A hypothesis: faults, what they do wrong, and what is left of the difference with them.

    `residual` is the worst error in units of its limit, at most 1 if nothing is left. `blamed` counts the tensors and
    choices, by name, that are still outside the noise.
    """

    faults: tuple[str, ...]
    says: tuple[str, ...]
    verdict: TriedVerdict
    residual: float
    blamed: int

    @property
    def name(self) -> str:
        return " + ".join(self.faults)


@dataclass(frozen=True)
class FaultFinding:
    """The answer of a diagnosis. `explanations` leave nothing, best first; `closest` leave the least of the others.

    `equivalents` cannot be told apart from the first explanation by this workload. `…_before`: without any fault.
    `has_no_consequences`: what explains it changes intermediate tensors and nothing behind them. `blind_spots`: what
    this workload could not have shown, one sentence each.
    """

    verdict: Literal["agrees", "explained", "unknown"]
    coverage: str
    residual_before: float
    blamed_before: int
    explanations: tuple[Tried, ...]
    equivalents: tuple[tuple[str, ...], ...]
    closest: tuple[Tried, ...]
    tried: int
    has_no_consequences: bool = False
    blind_spots: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """`again` repeats the run, `next` is the command to run after it ("" where there is none).

    `kinds` names the kind of each layer where the model is known: {"0": "full, dense"}. `notes`: what a reader has to
    know of the two sides, one line each. Raises: ReportError.
    """

    command: Command
    expected: str
    actual: str
    verdict: ReportVerdict
    first: Row | Choice | Partial | None
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]
    skipped: tuple[str, ...]
    totals: Totals
    again: str
    next: str = ""
    kinds: dict[str, str] = field(default_factory=dict)
    fault: FaultFinding | None = None
    detail: Detail = field(default_factory=Detail)
    partials: tuple[Partial, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, stated, counted in _sums(self):
            if stated != counted:
                raise ReportError(f"report: {what}: the totals say {stated}, the records add up to {counted}")
        owed = _owed_verdict(self.rows, self.choices, self.partials)
        if self.verdict != owed:
            raise ReportError(f"report: the verdict is {self.verdict!r}, its records make it {owed!r}")
        if (self.first is not None) != (owed == "different") or (self.first and not self.first.is_different):
            raise ReportError(f"report: {owed}, but the first difference is {self.first}")
        if self.fault and (self.fault.verdict == "agrees") != (owed != "different"):
            raise ReportError(f"report: {owed}, but the diagnosis says {self.fault.verdict!r}")

    @property
    def headline(self) -> str:
        """The verdict and the number that decided it, in one line."""
        if self.verdict == "nothing compared":
            return "NOTHING COMPARED  no row has the same name, request and position on both sides"
        if self.first is not None:
            return f"DIFFERENT  {self.first.tensor}  {self.first.phrase}{_where(self.first)}"
        totals, worst = self.totals, self.worst
        if worst is None:
            return (
                f"PARTIAL  {self.actual} with {self.expected}: nothing differs in the sums and samples of "
                f"{totals.partial:,} tensors of single steps; their values are not there"
            )
        also = f"; of {totals.partial:,} more only sums and samples" if totals.partial else ""
        return (
            f"AGREES  {self.actual} with {self.expected}: {totals.tensors:,} tensor{'s' * (totals.tensors != 1)}, "
            f"{totals.elements:,} elements, {totals.workloads} workload{'s' * (totals.workloads != 1)}; "
            f"worst {worst.amount} at {worst.tensor}{also}"
        )

    @cached_property
    def worst(self) -> Row | None:
        """The row that comes closest to its limit, or goes furthest beyond it."""
        return max(self.compared, key=lambda row: row.excess, default=None)

    @cached_property
    def compared(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict != "missing")

    @cached_property
    def partly_compared(self) -> tuple[Partial, ...]:
        """Those that differ first, then those that come closest to a limit."""
        found = [partial for partial in self.partials if partial.worst is not None]
        return tuple(sorted(found, key=lambda one: (not one.is_different, -one.worst.excess if one.worst else 0.0)))

    @cached_property
    def blamed(self) -> tuple[Row, ...]:
        """Rows outside the noise in the level and view of the first difference, in dataflow order."""
        rows = [row for row in self.rows if row.is_different and self.first and _is_blamed_with(row, self.first)]
        return tuple(sorted(rows, key=lambda row: dataflow_key(row.tensor)))

    @cached_property
    def levels(self) -> tuple[LevelRow, ...]:
        return tuple(self._level(level) for level in dict.fromkeys(row.level for row in self.rows))

    @cached_property
    def layers(self) -> tuple[LayerRow, ...]:
        """By level, then in dataflow order."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for level in self.levels:
            rows = [row for row in self.compared if row.level == level.level]
            for row in sorted(rows, key=lambda row: dataflow_key(row.tensor)):
                groups.setdefault((level.level, row.layer), []).append(row)
        return tuple(self._layer(level, layer, rows) for (level, layer), rows in groups.items())

    @cached_property
    def tensors(self) -> tuple[Row, ...]:
        """The worst row of each tensor, by level and view, in dataflow order."""
        worst: dict[tuple[str, str, str], Row] = {}
        for row in self.compared:
            key = row.level, row.view, row.tensor
            if key not in worst or row.excess > worst[key].excess:
                worst[key] = row
        levels = [level.level for level in self.levels]
        return tuple(
            sorted(worst.values(), key=lambda row: (levels.index(row.level), dataflow_key(row.tensor), row.view))
        )

    def layer_title(self, layer: str) -> str:
        return f"{layer:>2} {self.kinds[layer]}" if layer in self.kinds else f"{layer:>2}"

    def _level(self, level: str) -> LevelRow:
        rows = [row for row in self.compared if row.level == level]
        choices = [choice for choice in self.choices if choice.level == level]
        verdicts = Counter(choice.verdict for choice in choices)
        return LevelRow(
            level,
            _owed_verdict(rows, choices, ()),
            len(rows),
            sum(row.verdict == "bitwise equal" for row in rows),
            max(rows, key=lambda row: row.excess, default=None),
            verdicts["tie"],
            verdicts["near tie"],
            verdicts["flip"],
        )

    def _layer(self, level: str, layer: str, rows: list[Row]) -> LayerRow:
        outputs = [row for row in rows if row.tensor in (f"layers.{layer}.output", layer)]
        arrives = max((row for row in outputs if row.view == "cascade"), key=lambda row: row.error, default=None)
        # Of the same run: side by side, two numbers of different workloads would say nothing.
        alone = [row for row in outputs if row.view == "isolated" and (arrives is None or _is_same_run(row, arrives))]
        added = max(alone, key=lambda row: row.error, default=None)
        worst = max(rows, key=lambda row: row.excess)
        return LayerRow(
            level, layer, self.kinds.get(layer, ""), worst, arrives, added, sum(row.is_different for row in rows)
        )


def _where(first: Row | Choice | Partial) -> str:
    if isinstance(first, Choice):
        return f"  at {first.place}"
    if isinstance(first, Partial):
        return f"  in request {first.request}, step {first.action}"
    return f"  bad from {first.first_bad}" if first.first_bad else ""


def _is_blamed_with(row: Row, first: Row | Choice | Partial) -> bool:
    return row.view == first.view and _is_same_run(row, first)


def _is_same_run(row: Row, other: Row | Choice | Partial) -> bool:
    return (row.level, row.workload, row.seed) == (other.level, other.workload, other.seed)


def _owed_verdict(rows: Iterable[Row], choices: Iterable[Choice], partials: Iterable[Partial]) -> ReportVerdict:
    verdicts = {row.verdict for row in rows} - {"missing"}
    in_part = {partial.verdict for partial in partials} - {"missing"}
    if "different" in verdicts | in_part or any(choice.is_different for choice in choices):
        return "different"
    if verdicts:
        return "agrees"
    return "partial" if in_part else "nothing compared"


def _sums(report: Report) -> Iterable[tuple[str, int, int]]:
    """What the totals state beside what the records add up to."""
    totals = report.totals
    compared = report.compared
    verdicts = Counter(row.verdict for row in report.rows)
    choices = Counter(choice.verdict for choice in report.choices)
    yield "tensors", totals.tensors, len(compared)
    yield "elements", totals.elements, sum(row.elements for row in compared)
    yield "bitwise equal", totals.bitwise_equal, verdicts["bitwise equal"]
    yield "different", totals.different, verdicts["different"]
    yield "missing", totals.missing, verdicts["missing"]
    runs: list[Row | Partial] = [*report.rows, *report.partials]
    yield "workloads", totals.workloads, len({(one.workload, one.seed) for one in runs})
    in_part = Counter(partial.verdict for partial in report.partials)
    yield "partial", totals.partial, len(report.partials) - in_part["missing"]
    yield "partial, different", totals.partial_different, in_part["different"]
    yield "ties", totals.ties, choices["tie"]
    yield "near ties", totals.near_ties, choices["near tie"]
    yield "flips", totals.flips, choices["flip"]
    yield "choices", totals.ties + totals.near_ties + totals.flips, len(report.choices)
    exchanged = len({(c.level, c.workload, c.seed, c.tensor, c.place) for c in report.choices})
    yield "rows of choices that differ", min(totals.choice_rows, exchanged), exchanged
