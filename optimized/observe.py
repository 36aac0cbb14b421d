"""Shows tensors of a ragged batch to the probes, one request at a time, under the reference's names.

A probe row is keyed by request and absolute position; a batch holds the rows of many requests behind each other. With
nobody listening nothing is sliced and no kernel is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.errors import NotSupportedError
from reference.probe import is_observed, probe, rows


@dataclass(frozen=True)
class Segment:
    """Rows `start` to `stop` of the batch are those of `request` at `positions_T`, int64 on the tensors' device."""

    request: str
    kind: str
    start: int
    stop: int
    positions_T: Tensor


class BatchObserver:
    """`observer("attn.core", core_THV)` is `probe` for a whole batch: returns it, or what listeners put there."""

    def __init__(self, segments: Sequence[Segment]):
        self._segments = tuple(segments)

    def __call__(
        self,
        name: str,
        value: Tensor,
        of_segment: Callable[[Tensor, Segment], Tensor] = lambda piece, segment: piece,
    ) -> Tensor:
        """`of_segment` brings a request's rows into their canonical form; what it changes cannot be replaced."""
        if not is_observed():
            return value
        pieces, is_replaced = [], False
        for segment in self._segments:
            piece = value[segment.start : segment.stop]
            canonical = of_segment(piece, segment)
            with rows(segment.request, segment.positions_T, segment.kind):
                shown = probe(name, canonical)
            if shown is not canonical:
                piece, is_replaced = shown, True
            pieces.append(piece)
        return torch.cat(pieces) if is_replaced else value

    def only(
        self,
        name: str,
        value: Tensor,
        of_segment: Callable[[Tensor, Segment], Tensor] = lambda piece, segment: piece,
    ) -> None:
        """Show what is used inside a kernel only. Raises: NotSupportedError if a listener wants to replace it."""
        if self(name, value, of_segment) is not value:
            raise NotSupportedError(
                f"{name!r} stays inside a kernel and cannot be replaced here; replace it in the reference"
            )
