"""Index scores and selections as the probes want them: by request, as wide as that request's keys.

Only for observed runs: it keeps all scores of a layer, and waits for the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.attention.front import LayerContext
from optimized.observe import Segment

# T tokens  S keys  K selected keys  W words of 32 bits


class ShownSelection:
    """Collects the blocks of a layer in row order and shows them together."""

    def __init__(self, layer: LayerContext):
        self._see, self._topk = layer.see, layer.config.index_topk
        self._scores: list[Tensor] = []
        self._selected: list[Tensor] = []

    def add(self, positions_T: Tensor, scores_TS: Tensor | None, selected_TK: Tensor) -> None:
        assert scores_TS is not None
        key_S = torch.arange(scores_TS.shape[1], device=scores_TS.device)
        self._scores.append(scores_TS.masked_fill(key_S > positions_T[:, None], float("-inf")))
        self._selected.append(selected_TK.long())

    def show(self) -> None:
        def scores(piece_TS: Tensor, segment: Segment) -> Tensor:
            return piece_TS[:, : _length(segment)]

        def selected(piece_TK: Tensor, segment: Segment) -> Tensor:
            return piece_TK[:, : min(self._topk, _length(segment))]

        self._see.only("index.scores", _stacked(self._scores, float("-inf")), scores)
        self._see.only("index.selected", _stacked(self._selected, -1), selected)


def _length(segment: Segment) -> int:
    """Keys of its request after the step, whose last row is the segment's last one."""
    return int(segment.positions_T[-1]) + 1


def keys_of_bits(bits_TW: Tensor, k: int) -> Tensor:
    """int32 [T, k]: the positions of the set bits, ascending, -1 behind them."""
    shift_32 = torch.arange(32, dtype=torch.int32, device=bits_TW.device)
    is_set_TS = ((bits_TW[..., None] >> shift_32) & 1).flatten(1).bool()
    S = is_set_TS.shape[1]
    key_TS = torch.where(is_set_TS, torch.arange(S, device=bits_TW.device), S)
    ascending_TK = key_TS.sort(dim=-1).values[:, :k]
    return torch.where(ascending_TK < S, ascending_TK, -1).to(torch.int32)


def _stacked(blocks: list[Tensor], fill: float) -> Tensor:
    """The blocks one behind the other, as wide as the widest."""
    width = max(block.shape[1] for block in blocks)
    return torch.cat([F.pad(block, (0, width - block.shape[1]), value=fill) for block in blocks])
