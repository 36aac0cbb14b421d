"""The hidden states that the draft layer has not used yet: rows of one request, from a first position on."""

from __future__ import annotations

import torch
from torch import Tensor

# T rows  D model


class HiddenRows:
    """Rows `first`, `first + 1`, … in pieces as the steps made them; joined only when they are taken."""

    def __init__(self, first: int = 0, pieces: tuple[Tensor, ...] = ()):
        self.first = first
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    @property
    def stop(self) -> int:
        return self.first + len(self)

    def appended(self, rows_TD: Tensor) -> HiddenRows:
        return HiddenRows(self.first, (*self._pieces, rows_TD))

    def between(self, first: int, stop: int) -> HiddenRows:
        """The rows from `first` to before `stop` that are here."""
        kept, position = [], self.first
        for piece in self._pieces:
            inside = piece[max(0, first - position) : max(0, stop - position)]
            if len(inside):
                kept.append(inside)
            position += len(piece)
        return HiddenRows(max(self.first, min(first, stop)), tuple(kept))

    def joined(self) -> Tensor:
        return self._pieces[0] if len(self._pieces) == 1 else torch.cat(self._pieces)
