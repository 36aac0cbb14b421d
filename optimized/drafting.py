"""Drives the draft layer for several requests: rows that it has not seen, then its own output, row by row.

Step 0 runs every row behind those of the draft ring, with the target's hidden states and tokens shifted by one; step s
runs one row a request with the hidden state of step s - 1 and the token chosen from it. Chosen tokens stay on the
device. Source: text_model specification, section 17.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimized.cache import CachePools
from optimized.draws import choose_in_nucleus, plan_draws
from optimized.graphs import Shape, one_shape, shape_of
from optimized.hidden_rows import HiddenRows
from optimized.plan_rings import draft_track
from optimized.plan_spans import StepLimits
from optimized.planning import plan_draft, split_draft
from optimized.runner import DraftOutput, Runner
from optimized.step import PlanItem
from reference.session import DraftItem

# B requests  T rows  S draft steps  D model  W vocabulary


@dataclass
class RequestState:
    """What the engine keeps of a request: its tokens, and hidden states that the draft layer has not used yet."""

    token_ids: list[int] = field(default_factory=list)
    hidden: HiddenRows = field(default_factory=HiddenRows)


@dataclass(frozen=True)
class _Drafted:
    """The last rows of `order`'s requests: hidden states, logits, and tokens chosen from them."""

    order: list[str]
    hidden_BD: Tensor
    logits_BW: Tensor
    chosen_B: Tensor

    def rows(self, requests: Sequence[str]) -> list[int]:
        """Of some of the requests, in their order here."""
        wanted = set(requests)
        return [row for row, request in enumerate(self.order) if request in wanted]


@dataclass(frozen=True)
class Drafts:
    """Of one request: logits for each place behind its next token, and the token chosen there, int64."""

    logits_SW: Tensor
    tokens_S: Tensor


class Drafting:
    """One call of `Engine.drafts`, of items that have been checked.

    `shape`, see `draft_shape`: what every step is padded to, longer histories run one by one.
    """

    def __init__(
        self,
        items: Sequence[DraftItem],
        states: Mapping[str, RequestState],
        runner: Runner,
        limits: StepLimits,
        shape: Shape | None = None,
    ):
        self._items = {item.request: item for item in items}
        self._states, self._runner, self._limits, self._shape = states, runner, limits, shape
        self._pools: CachePools = runner.text.pools
        self._most_decoded = draft_track(self._pools).most_decoded

    def run(self) -> dict[str, Drafts]:
        """In the order of the items; nothing waits for the device."""
        depths = {request: item.depth for request, item in self._items.items()}
        steps = [self._history()]
        for number in range(1, max(depths.values())):
            live = [request for request in steps[-1].order if depths[request] > number]
            steps.append(self._further(number, live, steps[-1]))
        found: dict[str, Drafts] = {}
        for depth in set(depths.values()):
            requests = [request for request in steps[0].order if depths[request] == depth]
            rows = [(step, step.rows(requests)) for step in steps[:depth]]
            logits_BSW = torch.stack([_rows_of(step.logits_BW, some) for step, some in rows], dim=1)
            chosen_BS = torch.stack([_rows_of(step.chosen_B, some) for step, some in rows], dim=1)
            found.update(zip(requests, map(Drafts, logits_BSW, chosen_BS), strict=True))
        return {request: found[request] for request in depths}

    def _history(self) -> _Drafted:
        planned = []
        for item in self._items.values():
            first, state = self._pools.slots(item.request).draft_length, self._states[item.request]
            planned.append(PlanItem(item.request, (*state.token_ids[first + 1 :], item.next_token), "decode"))
        groups = [planned]
        if self._shape is not None:
            short = [item for item in planned if len(item.token_ids) <= self._most_decoded]
            groups = [short, *([item] for item in planned if len(item.token_ids) > self._most_decoded)]
        split = [part for group in groups if group for part in split_draft(group, self._pools, self._limits)]
        parts = []
        for part in split:
            ordered = sorted(part, key=lambda item: len(item.token_ids) > self._most_decoded)
            firsts = [self._pools.slots(item.request).draft_length for item in ordered]
            hidden = [
                self._states[item.request].hidden.between(first, first + len(item.token_ids))
                for item, first in zip(ordered, firsts, strict=True)
            ]
            hidden_TD = torch.cat([rows.joined() for rows in hidden])
            sources = [-1] * len(hidden_TD)
            parts.append(self._run(0, ordered, hidden_TD, sources))
        # Of a request that is cut, the last part has the row that counts.
        return parts[0] if len(parts) == 1 else self._gathered(parts)

    def _further(self, number: int, live: Sequence[str], before: _Drafted) -> _Drafted:
        """One row of each live request, fed with the token that was chosen for it unless one is forced."""
        rows = [row for row, request in enumerate(before.order) if request in live]
        parts = []
        for first in range(0, len(rows), self._limits.max_tokens):
            part = rows[first : first + self._limits.max_tokens]
            if first:
                self._runner.drafted_R[: len(before.chosen_B)].copy_(before.chosen_B)
            planned, sources = [], []
            for row in part:
                forced = self._items[before.order[row]].forced[number - 1 : number]
                planned.append(PlanItem(before.order[row], forced or (0,), "decode"))
                sources.append(-1 if forced else row)
            parts.append(self._run(number, planned, _rows_of(before.hidden_BD, part), sources))
        return parts[0] if len(parts) == 1 else self._gathered(parts)

    def _run(self, number: int, items: Sequence[PlanItem], hidden_TD: Tensor, sources: Sequence[int]) -> _Drafted:
        """The rows of `items`, in this order, from a recording where there is one for their shape."""
        requests = [item.request for item in items]
        samplings = [self._items[request].sampling for request in requests]
        positions = [len(self._states[request].token_ids) + number + 1 for request in requests]
        counts = [len(item.token_ids) for item in items]
        has_graphs, shape = self._runner.recorder is not None, None
        if max(counts) <= self._most_decoded:
            shape = self._shape or (shape_of(counts, self._limits.max_tokens) if has_graphs else None)
        if shape is None:
            plan = plan_draft(items, self._pools, self._limits)
            plan = dataclasses.replace(plan, draws=plan_draws(samplings, positions, sources))
            output = self._runner.draft(number, plan, hidden_TD)
        else:
            plan = plan_draft(items, self._pools, self._limits, shape.rows, shape.requests)
            draws = plan_draws(samplings, positions, sources, shape.requests, shape.rows)
            run = self._runner.recorded_draft if has_graphs else self._runner.draft
            output = _copied(run(number, dataclasses.replace(plan, draws=draws), hidden_TD), len(items))
        assert output.chosen_B is not None
        choose_in_nucleus(output.logits_BW, samplings, positions, self._runner.drafted_R)
        return _Drafted(requests, output.hidden_BD, output.logits_BW, output.chosen_B.clone())

    def _gathered(self, parts: Sequence[_Drafted]) -> _Drafted:
        """The last row of each request in one; their tokens where the next run looks for them."""
        places = {request: (part, row) for part in parts for row, request in enumerate(part.order)}
        columns = [(p.hidden_BD[row], p.logits_BW[row], p.chosen_B[row]) for p, row in places.values()]
        hidden_BD, logits_BW, chosen_B = (torch.stack(column) for column in zip(*columns, strict=True))
        self._runner.drafted_R[: len(chosen_B)].copy_(chosen_B)
        return _Drafted(list(places), hidden_BD, logits_BW, chosen_B)


def draft_shape(pools: CachePools, limits: StepLimits) -> Shape:
    """The shape that every draft step fits in. Raises: NotSupportedError as `one_shape`."""
    return one_shape(pools.ring_count, draft_track(pools).most_decoded, limits.max_tokens, 0)


def _copied(output: DraftOutput, count: int) -> DraftOutput:
    """The first `count` rows, out of the recording's memory."""
    assert output.chosen_B is not None
    return DraftOutput(output.hidden_BD[:count].clone(), output.logits_BW[:count].clone(), output.chosen_B[:count])


def _rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, ascending: the tensor itself if they are all. Not by an index, which would wait for the device."""
    return tensor if len(rows) == len(tensor) else torch.stack([tensor[row] for row in rows])
