"""Choices that a candidate does not show: which rows can be judged all the same.

Where the margin of a hidden choice (last chosen score less first one left out) is not clear of the noise of the scores,
an implementation without any fault may have chosen otherwise. Then the same row of its layer is *unsettled* from there
on; and if the candidate does not show what that layer gives to the next, so is every row of later layers at that
position or behind it. All other rows are *settled*: rounding alone cannot have changed a choice that they depend on.

What an unsettled row may be off by is measured: `exchanged` takes the next best wherever a choice is unclear. A few
draws of rounding would not do, since all of them can happen to choose as the truth does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

import torch
from torch import Tensor

from parity.findings import View
from parity.golden import with_margins
from parity.golden_causes import families_of
from parity.golden_file import ValueTable
from parity.schema import dataflow_key, decided_by, layer_of
from parity.stored import CLEAR_MARGIN
from parity.tolerance import Floor
from parity.trace import Entry, InMemory, RowKey, Trace
from parity.workload import Workload

# (name of the choice, request, position, occurrence) of a choice that may be another one than the truth's.
Unclear = tuple[str, str, int, int]
# The floor of the scores `name` of a request: one noise for each row of the truth.
FloorOf = Callable[[str, str], Floor]


class HiddenChoices:
    """Of one candidate. A margin is clear by the rule for goldens, `CLEAR_MARGIN`."""

    def __init__(self, candidate: Trace, view: View, workload: Workload, floor_of: FloorOf):
        self._candidate, self._view, self._floor_of = candidate, view, floor_of
        self._families = families_of(workload)

    def settled(self, truth: Trace) -> SettledRows:
        """Which rows are settled if `truth` is what the candidate computes without rounding."""
        unclear = [place for name in truth.names() if decided_by(name) for place in self._unclear(truth, name)]
        return SettledRows(unclear, self._families, self._is_cut)

    def exchanged(self, truth: Trace, settled: SettledRows) -> Trace | None:
        """The tables of choices of which the candidate hides rows; in those that are unclear, the first one left out
        for the last chosen. None if all are clear.

        `truth` ran with the choices that the candidate shows: the rows that it does not hide are the candidate's.
        `settled`: what `settled` says of it.
        """
        if not settled.unclear:
            return None
        hidden = [
            (name, request)
            for name in filter(decided_by, truth.names())
            for request in truth.requests(name)
            if self._hidden_rows(truth, name, request)
        ]
        entries = []
        for name, request in hidden:
            table, scores = truth.table(name, request), truth.table(str(decided_by(name)), request).values
            choices = table.values.clone()
            for row, key in enumerate(table.keys):
                if (name, request, *key) in settled.unclear:
                    choices[row] = _next_best(choices[row], scores[row])
            positions = [position for position, _ in table.keys]
            entries.append(Entry(name, request, 0, "prefill", positions, InMemory(choices)))
        return Trace(entries)

    def _unclear(self, truth: Trace, name: str) -> Iterable[Unclear]:
        scores_name = str(decided_by(name))
        for request in truth.requests(name):
            hidden = self._hidden_rows(truth, name, request)
            if not hidden:
                continue
            scores = truth.table(scores_name, request)
            # A shorter run has computed the first rows of what the floor was measured on.
            noise = self._floor_of(scores_name, request).noise[: len(scores.keys)]
            values = ValueTable(scores.keys, scores.values.to(torch.float64), Floor(noise, 0.0))
            table = with_margins(scores.keys, truth.table(name, request).values, values)
            for row in (table.margins < CLEAR_MARGIN * table.margin_noises).nonzero().flatten().tolist():
                if scores.keys[row] in hidden:
                    yield name, request, *scores.keys[row]

    def _hidden_rows(self, truth: Trace, name: str, request: str) -> set[RowKey]:
        """A candidate may show the choices of some steps alone."""
        shown = self._candidate.keys(name, request) if self._candidate.has(name, request) else ()
        return {*truth.keys(name, request)} - {*shown}

    def _is_cut(self, layer: int, request: str) -> bool:
        """Whether what follows the layer is computed from what the candidate recorded behind it."""
        behind = (f"layers.{layer}.output", f"layers.{layer + 1}.input")
        return self._view != "cascade" and any(self._candidate.has(name, request) for name in behind)


class SettledRows:
    """`is_cut(layer, request)`: later layers are computed from recorded values, and hide no choice of this one."""

    def __init__(self, unclear: Sequence[Unclear], families: dict[str, set[str]], is_cut: Callable[[int, str], bool]):
        self.unclear = frozenset(unclear)
        self._in_layer: dict[int, list[Unclear]] = {}
        # For each request and layer, the first position at which what enters the next layer is unsettled.
        self._first: dict[str, dict[int, int]] = {}
        for place in unclear:
            name, request, position, _ = place
            layer = layer_of(name)
            assert layer is not None
            self._in_layer.setdefault(layer, []).append(place)
            if not is_cut(layer, request):
                for member in families.get(request, {request}):
                    first = self._first.setdefault(member, {})
                    first[layer] = min(position, first.get(layer, position))

    def mask(self, name: str, request: str, keys: Sequence[RowKey]) -> Tensor:
        """[rows], True for the rows of `name` that are settled."""
        layer = layer_of(name)
        in_row = {
            (position, occurrence)
            for choice, owner, position, occurrence in self._in_layer.get(-1 if layer is None else layer, ())
            if owner == request and dataflow_key(choice) < dataflow_key(name)
        }
        depth = _depth_of(name)
        first = min((at for of, at in self._first.get(request, {}).items() if of < depth), default=inf)
        is_settled = [position < first and (position, occurrence) not in in_row for position, occurrence in keys]
        return torch.tensor(is_settled, dtype=torch.bool)


def _next_best(chosen_K: Tensor, score_S: Tensor) -> Tensor:
    """The same ids (-1 for none), the best one left out in the place of the worst one chosen."""
    is_chosen_S = torch.zeros(len(score_S), dtype=torch.bool)
    is_chosen_S[chosen_K[chosen_K >= 0]] = True
    last = score_S.masked_fill(~is_chosen_S, inf).argmin()
    first_left_out = score_S.masked_fill(is_chosen_S, -inf).argmax()
    return torch.where(chosen_K == last, first_left_out, chosen_K)


def _depth_of(name: str) -> float:
    """How many layers lie before a tensor: embeddings 0, what follows the layers infinitely many."""
    group, _, rest = name.partition(".")
    if group in ("layers", "cache"):
        return int(rest.partition(".")[0])
    return 0 if group == "embeddings" else inf
