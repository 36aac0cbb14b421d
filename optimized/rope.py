"""The cosines and sines of a step's positions, once for all layers.

angle[t, j] = float32(position_t) · theta^(-2j/R), j = 0 .. R/2-1

The float32 product is a constant of the model at every dtype. Both bases are computed together, in few launches.
Source: text_model specification, section 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.config import MlaGeometry, TextConfig

# T tokens  R rope dim  X lanes of both tables


@dataclass(frozen=True)
class Rotation:
    """[cos R/2 | sin R/2] of each token, for full and for sliding layers, at least float32."""

    full_TR: Tensor
    sliding_TR: Tensor


class RopeTables:
    """Frequencies of both layer kinds on one device, for activations of `dtype`."""

    def __init__(self, config: TextConfig, device: torch.device, dtype: torch.dtype):
        kinds = (config.full, config.sliding)
        self._widths = [geometry.qk_rope_head_dim for geometry in kinds]
        self._frequency_X = torch.cat([_frequencies(geometry, device).repeat(2) for geometry in kinds])
        lane_X = torch.cat([torch.arange(width, device=device) * 2 // width for width in self._widths])
        self._is_cosine_X = lane_X == 0
        self._wide = torch.promote_types(dtype, torch.float32)

    def of(self, positions_T: Tensor) -> Rotation:
        """positions_T: whole numbers of any dtype, below 2^24, where float32 is exact; of padding rows also -1."""
        angle_TX = (positions_T.to(torch.float32)[:, None] * self._frequency_X).to(self._wide)
        table_TX = torch.where(self._is_cosine_X, angle_TX.cos(), angle_TX.sin())
        return Rotation(*table_TX.split(self._widths, dim=-1))


def _frequencies(geometry: MlaGeometry, device: torch.device) -> Tensor:
    width = geometry.qk_rope_head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    return 1.0 / geometry.rope_theta**exponents
