"""Compares two recorded runs, neither of which is a golden: the cascade view, from a derived bound. Runs no model.

There is no truth here and no measured floor, so an error can be called *bitwise equal*, *close* or *different*, never
within noise. The bound: a tensor behind n layers has seen about ROUNDINGS · n roundings in a row, of independent signs,
on each of the two sides. With u the root mean square of one rounding, the norm of the difference over the norm of the
row is about

    noise = u · sqrt(2 · ROUNDINGS · n)

and may be STRUCTURE · exp(z · SPREAD) times that, but at most OUTLIER · LARGEST times, as in `tolerance`. The constants
are those of the tiny model's golden: there, the floors of the layers' outputs in bfloat16 are 0.011 behind layer 0 and
0.028 behind layer 5 where this formula gives 0.012 and 0.031; they spread by 0.26 to 0.34; and in nine of ten tables
the largest error of any draw is at most 2.9 times the noise. A golden is the sharper test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from parity.findings import Comparison
from parity.golden import with_margins
from parity.golden_causes import families_of
from parity.golden_file import ChoiceTable, ValueTable
from parity.router_order import in_order_of_ids
from parity.schema import decided_by, layer_of, spec_of
from parity.statistics import PartialResult, RowNoise, judged, missing
from parity.stored import Expected, StoredJudge, has_order
from parity.stored_partial import SummarisedRows, in_width_of, keys_of_rows
from parity.tolerance import FALSE_ALARM_RATE, OUTLIER, Floor, noise_limit, one_rounding
from parity.trace import RowKey, Trace
from parity.workload import Workload

# Roundings in a row within one layer: norms, projections, rotation, scores, core, gate, residual, experts.
ROUNDINGS = 32
SPREAD = 0.3
LARGEST = 2.9
# As many as the released model has; for dumps that show no layer, and whose config is not known.
RELEASED_LAYERS = 46


def compare_dumps(
    expected: Trace,
    actual: Trace,
    dtype: torch.dtype,
    workload: Workload | None = None,
    layers: int | None = None,
    expected_statistics: Sequence[SummarisedRows] = (),
    statistics: Sequence[SummarisedRows] = (),
    false_alarm_rate: float = FALSE_ALARM_RATE,
) -> Comparison:
    """Judge every name that both have; one table of each side is in memory at a time.

    `dtype`: the coarser one of the two runs. `workload` says which requests were forked. `layers`: of the model, where
    known. `expected_statistics`, `statistics`: tensors of which that side kept sums and samples only.
    """
    shown = [layer for name in (*expected.names(), *actual.names()) if (layer := layer_of(name)) is not None]
    depth = layers or (max(shown) + 1 if shown else RELEASED_LAYERS)
    families = families_of(workload) if workload else {}
    tables = RecordedTables(expected, dtype, depth)
    side, other = _Side(expected, expected_statistics), _Side(actual, statistics)
    alone = [entry for key, entry in other.entries.items() if key not in side.entries]
    summarised = frozenset(entry.name for entry in expected_statistics)
    stored = Expected(tables, expected, families, "close", summarised)
    comparison = StoredJudge(stored, actual, alone, false_alarm_rate).comparison()
    noise = partial(derived_noise, dtype=dtype, layers=depth)
    partials = (*comparison.partials, *_partials(side, other, noise, false_alarm_rate))
    return replace(comparison, partials=partials)


def derived_noise(name: str, dtype: torch.dtype, layers: int) -> float:
    """Relative difference that rounding in `dtype` brings between two runs at this name; `layers` in the model."""
    return one_rounding(dtype) * (2.0 * max(1.0, ROUNDINGS * _layers_before(name, layers))) ** 0.5


def _layers_before(name: str, layers: int) -> int:
    """How many layers a tensor has gone through, its own included."""
    group, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    if group == "embeddings":
        return 0
    if group in ("layers", "cache"):
        return int(number) + 1
    return layers + (int(number) + 1 if group == "mtp" else 0)


class _Side:
    """One run: its tensors, and its sums and samples by name, request and keys of their rows."""

    def __init__(self, trace: Trace, statistics: Sequence[SummarisedRows]):
        self.trace = trace
        self.entries = {(entry.name, entry.request, keys): entry for entry, keys in keys_of_rows(trace, statistics)}

    def rows(self, entry: SummarisedRows, keys: Sequence[RowKey]) -> Tensor | None:
        """The values of these rows, if all of them are there."""
        name, request = entry.name, entry.request
        if not self.trace.has(name, request):
            return None
        table = self.trace.table(name, request)
        row_of = {key: row for row, key in enumerate(table.keys)}
        if any(key not in row_of for key in keys):
            return None
        values = table.values[torch.tensor([row_of[key] for key in keys], dtype=torch.long)]
        return in_width_of(entry, values)


def _partials(
    expected: _Side, actual: _Side, noise: Callable[[str], float], false_alarm_rate: float
) -> Iterator[PartialResult]:
    """What the expected side has as sums and samples, against either on the other side."""
    comparisons = max(1, len(expected.entries))
    allowed = min(noise_limit(SPREAD, comparisons, false_alarm_rate), OUTLIER * LARGEST)
    for (name, request, keys), entry in expected.entries.items():
        spec = spec_of(name)
        found = actual.entries.get((name, request, keys))
        other = found.statistics if found else actual.rows(entry, keys)
        if other is None:
            yield missing(entry, "the actual side has no such tensor")
        elif spec is None or spec.kind == "choice" or name.endswith("router.weights"):
            yield missing(entry, "sums say nothing of a choice, or of what is in the order of one")
        else:
            row_noise = RowNoise(noise(name), allowed * noise(name))
            yield judged(entry, entry.statistics, other, row_noise, comparisons)


class RecordedTables:
    """A recorded run as the expected side: its rows stand for the truth."""

    def __init__(self, trace: Trace, dtype: torch.dtype, layers: int):
        self._trace, self._dtype, self._layers = trace, dtype, layers

    def names(self) -> list[str]:
        return [name for name in self._trace.names() if spec_of(name)]

    def requests(self, name: str) -> list[str]:
        return [request for request in self._trace.requests(name) if self.has(name, request)]

    def has(self, name: str, request: str) -> bool:
        if not self._trace.has(name, request):
            return False
        return not name.endswith("router.weights") or has_order(self._trace, name, request)

    def keys(self, name: str, request: str) -> tuple[RowKey, ...]:
        return self._trace.keys(name, request)

    def values(self, name: str, request: str) -> ValueTable:
        table = in_order_of_ids(name, request, self._trace)
        noise = derived_noise(name, self._dtype, self._layers)
        floor = Floor(torch.full((len(table.keys),), noise, dtype=torch.float64), SPREAD, LARGEST * noise)
        return ValueTable(table.keys, table.values, floor)

    def choices(self, name: str, request: str) -> ChoiceTable:
        """Margins from the recorded scores; without them no choice is taken for a near tie."""
        table = self._trace.table(name, request)
        scores_name = str(decided_by(name))
        rows = len(table.keys)
        margins = torch.full((rows,), float("inf"), dtype=torch.float64)
        noises = torch.zeros(rows, dtype=torch.float64)
        if self._trace.has(scores_name, request) and self._trace.keys(scores_name, request) == table.keys:
            return with_margins(table.keys, table.values, self.values(scores_name, request))
        return ChoiceTable(table.keys, table.values, margins, noises)
