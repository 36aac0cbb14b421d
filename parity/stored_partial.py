"""Holds sums and samples of a candidate against the rows that are stored of the expected run.

Which rows they are is said by their positions and by how often the request had run them before, as for whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from parity.findings import Place
from parity.schema import dataflow_key, spec_of
from parity.statistics import PartialResult, RowNoise, Statistics, judged, missing
from parity.trace import RowKey, Trace

if TYPE_CHECKING:
    from parity.golden_causes import Cause
    from parity.stored import Stored


class SummarisedRows(Protocol):
    """The numbers of some rows; a manifest's `StatisticsEntry` is one."""

    @property
    def name(self) -> str: ...
    @property
    def request(self) -> str: ...
    @property
    def action(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def statistics(self) -> Statistics: ...
    def rows(self) -> Sequence[int]: ...


def partial_results(
    stored: Stored,
    candidate: Trace,
    statistics: Sequence[SummarisedRows],
    allowed: Callable[[float], float],
    cause_of: Callable[[str, Place], Cause | None],
) -> Iterator[PartialResult]:
    """In dataflow order. `allowed(spread)` is the largest error that counts as noise, in units of it.

    `cause_of` names what keeps a row from being judged. One table is in memory at a time.
    """
    keyed = keys_of_rows(candidate, statistics)
    for entry, keys in sorted(keyed, key=lambda pair: (dataflow_key(pair[0].name), pair[0].action)):
        yield _result(stored, entry, keys, allowed, cause_of, len(statistics))


def keys_of_rows(
    candidate: Trace, statistics: Iterable[SummarisedRows]
) -> list[tuple[SummarisedRows, tuple[RowKey, ...]]]:
    """Each entry with the keys of its rows. Steps that kept the whole tensor count as runs of their positions too."""
    groups: dict[tuple[str, str], list[SummarisedRows]] = {}
    for entry in statistics:
        groups.setdefault((entry.name, entry.request), []).append(entry)
    keyed = []
    for (name, request), entries in groups.items():
        whole = [(other.action, other.positions, None) for other in candidate.of(name, request)]
        steps = [*whole, *((entry.action, entry.rows(), entry) for entry in entries)]
        seen: dict[int, int] = {}
        for _, positions, known in sorted(steps, key=lambda step: step[0]):
            keys = []
            for position in positions:
                occurrence = seen[position] = seen.get(position, -1) + 1
                keys.append((position, occurrence))
            if known is not None:
                keyed.append((known, tuple(keys)))
    return keyed


def _result(
    stored: Stored,
    entry: SummarisedRows,
    keys: Sequence[RowKey],
    allowed: Callable[[float], float],
    cause_of: Callable[[str, Place], Cause | None],
    comparisons: int,
) -> PartialResult:
    name, request = entry.name, entry.request
    spec = spec_of(name)
    if not stored.has(name, request):
        return missing(entry, "the expected side has no such tensor")
    if spec is None or spec.kind == "choice" or name.endswith("router.weights"):
        return missing(entry, "sums say nothing of a choice, or of what is in the order of one")
    row_of = {key: row for row, key in enumerate(stored.keys(name, request))}
    if any(key not in row_of for key in keys):
        return missing(entry, "rows that the expected side does not have")
    causes = (cause_of(name, Place(request, *key)) for key in keys)
    if cause := next((cause for cause in causes if cause), None):
        return missing(entry, f"not judged, behind the {cause}")
    table = stored.values(name, request)
    rows = torch.tensor([row_of[key] for key in keys], dtype=torch.long)
    values, noise = table.truth[rows], table.floor.noise[rows]
    if not len(rows):
        return missing(entry, "no rows")
    limits = table.floor.limits(allowed(table.floor.spread))[rows]
    row_noise = RowNoise(float(noise.max()), float((noise * limits).max()))
    return judged(entry, in_width_of(entry, values), entry.statistics, row_noise, comparisons)


def in_width_of(entry: SummarisedRows, values: Tensor) -> Tensor:
    """Scores of a table are as wide as its last step, which has more keys than those before."""
    spec = spec_of(entry.name)
    return values[..., : entry.shape[-1]] if spec and spec.kind == "scores" else values
