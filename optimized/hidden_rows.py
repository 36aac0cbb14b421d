"""The hidden states that the draft layer has not used yet: rows of one request, from a first position on."""

from __future__ import annotations

import torch
from torch import Tensor

# T rows  D model

# Rows beside those that are kept which a piece may hold in memory: those of a decode step, which its requests share.
MOST_IDLE_ROWS = 512


class HiddenRows:
    """Rows `first`, `first + 1`, … in pieces as the steps made them; joined only when they are taken.

    A piece is a view of its step's rows, or a copy where those are so many more that they should not stay alive.
    There may be as many as there are tokens, so a step that only appends looks at none of them.
    """

    def __init__(self, first: int = 0, pieces: tuple[Tensor, ...] = (), stop: int | None = None):
        self.first = first
        self.stop = first + sum(piece.shape[0] for piece in pieces) if stop is None else stop
        self._pieces = pieces

    def __len__(self) -> int:
        return self.stop - self.first

    def appended(self, rows_TD: Tensor) -> HiddenRows:
        return HiddenRows(self.first, (*self._pieces, _released(rows_TD)), self.stop + len(rows_TD))

    def between(self, first: int, stop: int) -> HiddenRows:
        """The rows from `first` to before `stop` that are here; the next one to be appended is `stop`."""
        if first <= self.first and stop >= self.stop:
            return self
        kept, end = [], self.first
        for piece in self._pieces:
            start, end = end, end + piece.shape[0]
            if first <= start and end <= stop:
                kept.append(piece)
            elif start < stop and first < end:
                kept.append(_released(piece[max(0, first - start) : stop - start]))
        return HiddenRows(min(stop, max(self.first, first)), tuple(kept))

    def joined(self) -> Tensor:
        return self._pieces[0] if len(self._pieces) == 1 else torch.cat(self._pieces)


def _released(rows_TD: Tensor) -> Tensor:
    idle = rows_TD.untyped_storage().nbytes() - rows_TD.nbytes
    return rows_TD.clone() if idle > MOST_IDLE_ROWS * rows_TD[0].nbytes else rows_TD
