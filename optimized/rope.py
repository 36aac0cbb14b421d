"""Which lanes a step's rotation table has, and which of them each layer kind takes.

A row is [cos R/2 | sin R/2] for full layers, then the same for sliding ones; lane j of a half turns by theta^(-2j/R) a
position. The kernel that starts a step makes the whole table (see `kernels.rotation`), once for all layers.
Source: text_model specification, section 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.kernels.rotation import RotationLanes
from reference.config import MlaGeometry, TextConfig

# T tokens  R rope dim  X lanes of both tables


@dataclass(frozen=True)
class Rotation:
    """[cos R/2 | sin R/2] of each token, for full and for sliding layers, at least float32."""

    full_TR: Tensor
    sliding_TR: Tensor


class RopeTables:
    """The lanes of both layer kinds on one device."""

    def __init__(self, config: TextConfig, device: torch.device):
        kinds = (config.full, config.sliding)
        self._widths = [geometry.qk_rope_head_dim for geometry in kinds]
        lane_X = torch.cat([torch.arange(width, device=device) * 2 // width for width in self._widths])
        frequency_X = torch.cat([_frequencies(geometry, device).repeat(2) for geometry in kinds])
        self.lanes = RotationLanes(frequency_X, lane_X == 0)

    def of(self, table_TX: Tensor) -> Rotation:
        """Each kind's part of a step's table, [T, X]: views."""
        return Rotation(*table_TX.split(self._widths, dim=-1))


def _frequencies(geometry: MlaGeometry, device: torch.device) -> Tensor:
    width = geometry.qk_rope_head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    return 1.0 / geometry.rope_theta**exponents
