"""Feeds recorded values of the vision tower back into a run of the reference, at its probes.

As `parity.replay` does for the text model: choices of experts are replayed, and each that differs is kept with its
score gap; in the isolated views recorded values take the place of computed ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parity.findings import View
from parity.replay import Exchange, score_gap
from parity.runners.reference_vision import Values
from parity.schema_vision import vision_decided_by, vision_pattern_of, vision_probe_of
from reference.probe import Rows

_BLOCK_BOUNDARIES = {
    "vision.patches",
    "vision.blocks.{i}.input",
    "vision.blocks.{i}.output",
    "vision.trunk",
}
# Which recorded values take the place of computed ones.
IS_GIVEN: dict[View, Callable[[str], bool]] = {
    "cascade": lambda name: False,
    "isolated": lambda name: vision_pattern_of(name) in _BLOCK_BOUNDARIES,
    "pinpoint": lambda name: True,
}


class VisionReplay:
    """Replaces every choice of experts by the candidate's, and records the rows in which they differ."""

    def __init__(self, candidate: Values):
        self._candidate = candidate
        self._scores: dict[str, Tensor] = {}
        self.exchanges: list[Exchange] = []
        self.compared_rows = 0

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        probe = vision_probe_of(name)
        if probe is None or rows is None:
            return value
        if name.endswith("router.choice"):
            self._scores[name] = value
        if probe.kind != "choice" or name not in self._candidate:
            return value
        theirs = self._candidate[name][rows.positions].to(value.device)
        self.compared_rows += len(theirs)
        scores = self._scores[str(vision_decided_by(name))]
        self._judge(name, rows, scores, value, theirs)
        is_possible = theirs.shape == value.shape and bool(((theirs >= 0) & (theirs < scores.shape[-1])).all())
        return theirs.to(value.dtype) if is_possible else value

    def _judge(self, name: str, rows: Rows, scores_TE: Tensor, ours_TK: Tensor, theirs_TK: Tensor) -> None:
        for row, (ours, theirs) in enumerate(zip(ours_TK.tolist(), theirs_TK.tolist(), strict=True)):
            lost, won = sorted({*ours} - {*theirs}), sorted({*theirs} - {*ours})
            if not lost and not won and len(ours) == len(theirs):
                continue
            scores = scores_TE[row].to(torch.float64)
            best = float(scores[lost].max()) if lost else float("nan")
            gap, scale = score_gap(scores, lost, won), float(scores.norm())
            position = int(rows.positions[row])
            self.exchanges.append(Exchange(name, rows.request, position, 0, tuple(lost), tuple(won), gap, scale, best))


class VisionGiven:
    """Puts the candidate's rows in the place of computed ones, for names that the view gives; never choices."""

    def __init__(self, candidate: Values, view: View):
        self._candidate, self._is_given = candidate, IS_GIVEN[view]

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        probe = vision_probe_of(name)
        if probe is None or rows is None or probe.kind == "choice" or name not in self._candidate:
            return value
        if not self._is_given(name) or self._candidate[name].shape[1:] != value.shape[1:]:
            return value
        return self._candidate[name][rows.positions].to(device=value.device, dtype=value.dtype)
