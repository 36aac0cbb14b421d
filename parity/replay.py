"""Feeds the values of a trace back into a run of the reference, at its probes.

`ChoiceReplay` replays discrete choices (experts, selected keys), so that one exchanged key does not turn every later
tensor red, and keeps a record of each exchange with its score gap. `Given` puts recorded values in place of computed
ones, so that what follows is computed from the trace's own inputs: that isolates a layer, or a single operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parity.schema import decided_by, pattern_of, spec_of
from parity.trace import Entry, RowKey, Trace

if TYPE_CHECKING:
    from reference.probe import Rows


class _RowsOf:
    """Finds the rows of a trace that belong to what is being observed, in the order of observation."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self._seen: dict[tuple[str, str], dict[int, int]] = {}
        self._places: dict[tuple[str, str], dict[RowKey, tuple[Entry, int]]] = {}

    def find(self, name: str, rows: Rows) -> tuple[list[RowKey], Tensor, Tensor] | None:
        """Keys of the observed rows, which of them the trace has (indices), and its values for those."""
        if not self._trace.has(name, rows.request):
            return None
        seen = self._seen.setdefault((name, rows.request), {})
        keys = []
        for position in rows.positions.tolist():
            seen[position] = seen.get(position, -1) + 1
            keys.append((position, seen[position]))
        places = self._places_of(name, rows.request)
        found = [row for row, key in enumerate(keys) if key in places]
        values = _loaded([places[keys[row]] for row in found])
        return None if values is None else (keys, torch.tensor(found, dtype=torch.long), values)

    def _places_of(self, name: str, request: str) -> dict[RowKey, tuple[Entry, int]]:
        """Entry and row in it of every key. Only where the rows are is kept, not their values."""
        if (name, request) not in self._places:
            entries = self._trace.of(name, request)
            places = ((entry, row) for entry in entries for row in range(len(entry.positions)))
            self._places[name, request] = dict(zip(self._trace.keys(name, request), places, strict=True))
        return self._places[name, request]


def _loaded(places: Sequence[tuple[Entry, int]]) -> Tensor | None:
    """These rows, each entry read once in a run of its rows; keys grow from step to step, so they are padded."""
    parts = []
    for _, group in groupby(places, key=lambda place: id(place[0])):
        run = list(group)
        values, rows = run[0][0].source.load(), [row for _, row in run]
        is_whole = rows == list(range(len(values)))
        parts.append(values if is_whole else values[torch.tensor(rows, dtype=torch.long)])
    width = max((part.shape[-1] for part in parts), default=0)
    return torch.cat([_padded(part, width) for part in parts]) if parts else None


def _padded(values: Tensor, width: int) -> Tensor:
    """The last dim filled up to `width`: with -inf for scores, -1 for choices."""
    if values.shape[-1] == width:
        return values
    fill = float("-inf") if values.is_floating_point() else -1
    return torch.nn.functional.pad(values, (0, width - values.shape[-1]), value=fill)


def _fitted(values: Tensor, like: Tensor) -> Tensor:
    """Crop or pad the last dim (keys) to the width of `like`, and take its dtype."""
    width = like.shape[-1]
    return _padded(values[..., :width], width).to(device=like.device, dtype=like.dtype)


class Given:
    """Replaces every observed tensor for which `is_given(name)` holds by the rows of the trace, where it has them."""

    def __init__(self, trace: Trace, is_given: Callable[[str], bool]):
        self._rows = _RowsOf(trace)
        self._is_given = is_given

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        spec = spec_of(name)
        if rows is None or spec is None or spec.kind == "choice" or not self._is_given(name):
            return value
        found = self._rows.find(name, rows)
        if found is None:
            return value
        _, indices, values = found
        return value.index_copy(0, indices.to(value.device), _fitted(values, value))


_LAYER_BOUNDARIES = {
    "embeddings",
    "layers.{i}.input",
    "layers.{i}.output",
    "final_norm",
    "mtp.{s}.fused",
    "mtp.{s}.output",
    "mtp.{s}.normed",
}


def is_layer_boundary(name: str) -> bool:
    """The tensors between layers: given these, every layer runs from its own input, and its own input's history."""
    return pattern_of(name) in _LAYER_BOUNDARIES


@dataclass(frozen=True)
class Exchange:
    """One row whose choice differs. `gap` is how far the worst exchange is from a tie, in units of the scores.

    0: an exact tie. Infinite: a key that is not visible, or another number of choices. `score`: of the best that only
    the expected side chose, NaN where that is not known.
    """

    name: str
    request: str
    position: int
    occurrence: int
    only_expected: tuple[int, ...]
    only_actual: tuple[int, ...]
    gap: float
    scale: float  # norm of the row of scores, the unit of its relative noise
    score: float = float("nan")

    def gap_in_ulps(self, dtype: torch.dtype) -> float:
        """The gap in steps of `dtype` at the score: below 1, that dtype cannot hold the two scores apart.

        NaN where the score is not known, or 0 and so without a step.
        """
        if not self.score or not math.isfinite(self.score):
            return math.nan
        return self.gap / (torch.finfo(dtype).eps * 2.0 ** (math.frexp(self.score)[1] - 1))


class ChoiceReplay:
    """Replaces every choice by the one in the trace, and records the rows in which they differ."""

    def __init__(self, trace: Trace):
        self._rows = _RowsOf(trace)
        self._scores: dict[str, Tensor] = {}
        self.exchanges: list[Exchange] = []
        self.compared_rows: dict[str, int] = {}

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        spec = spec_of(name)
        if rows is None or spec is None:
            return value
        if spec.kind == "scores" or pattern_of(name).endswith("router.choice"):
            self._scores[name] = value
        if spec.kind != "choice":
            return value
        found = self._rows.find(name, rows)
        if found is None:
            return value
        keys, indices, values = found
        width = max(value.shape[-1], values.shape[-1])
        ours, theirs = _padded(value, width), _padded(values, width).to(value.device)
        self.compared_rows[name] = self.compared_rows.get(name, 0) + len(indices)
        self._judge(name, rows.request, [keys[row] for row in indices.tolist()], ours[indices], theirs, indices)
        if not self._is_replayable(name, value, theirs):
            return value
        return ours.index_copy(0, indices.to(value.device), theirs)

    def _is_replayable(self, name: str, ours: Tensor, theirs: Tensor) -> bool:
        """Experts: as many as the model chooses. Keys: any number, -1 for none. Both: none that does not exist."""
        count = self._scores[str(decided_by(name))].shape[-1]
        lowest = 0 if name.endswith("expert_ids") else -1
        has_right_number = lowest == -1 or theirs.shape[-1] == ours.shape[-1]
        return has_right_number and bool(((theirs >= lowest) & (theirs < count)).all())

    def _judge(
        self, name: str, request: str, keys: list[RowKey], ours: Tensor, theirs: Tensor, indices: Tensor
    ) -> None:
        different = (ours.sort(-1).values != theirs.sort(-1).values).any(-1)
        scores_name = decided_by(name)
        assert scores_name is not None
        for row in different.nonzero().flatten().tolist():
            scores = self._scores[scores_name][indices[row]].to(torch.float64)
            self.exchanges.append(
                exchange_of(name, request, keys[row], ours[row].tolist(), theirs[row].tolist(), scores)
            )


def exchange_of(
    name: str, request: str, key: RowKey, expected: Iterable[int], actual: Iterable[int], scores_S: Tensor | None
) -> Exchange:
    """One row's choices, -1 for none. `scores_S`: those of the expected side, None if they are not known."""
    ours, theirs = set(expected) - {-1}, set(actual) - {-1}
    lost, won = sorted(ours - theirs), sorted(theirs - ours)
    gap, scale, score = math.inf, 0.0, math.nan  # without scores nothing says that the two were close
    if scores_S is not None:
        scores_S = scores_S.to(torch.float64)
        gap, scale = score_gap(scores_S, lost, won), float(scores_S[scores_S.isfinite()].norm())
        score = float(scores_S[lost].max()) if _exist(lost, scores_S) else math.nan
    return Exchange(name, request, *key, tuple(lost), tuple(won), gap, scale, score)


def score_gap(scores: Tensor, lost: list[int], won: list[int]) -> float:
    """How far the worst exchange of `lost` for `won` is from a tie; infinite for other numbers or unknown keys."""
    if len(lost) != len(won) or not _exist(lost, scores) or not _exist(won, scores):
        return math.inf
    return float(scores[lost].max() - scores[won].min())


def _exist(ids: Sequence[int], scores: Tensor) -> bool:
    """Whether there are any, and each has a score; a dump may say -7."""
    return bool(ids) and min(ids) >= 0 and max(ids) < len(scores)
