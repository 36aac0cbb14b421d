"""Rotary position embedding: each pair of lanes is rotated by position × frequency.

frequency f_j = theta^(-2j/R) for j = 0 .. R/2-1;  angle a = float32(position) · f_j

NOTE pairs neighbouring lanes (2j, 2j+1), and the rotated pair stays in place. Related models pair lane j with lane
j + R/2; the two differ from position 1 on. The angle is the float32 product at every dtype: a constant of the model.
Source: text_model specification, section 5.3.
"""

import torch
from torch import Tensor

from reference.numerics import RopeDtype, at_least_float32

# P pairs of lanes, R = 2P rotated lanes.


def frequencies(theta: float, rotated_width: int, device: torch.device) -> Tensor:
    """f_j, float32 [P]: from 1 down to almost 1/theta."""
    exponents_P = torch.arange(0, rotated_width, 2, dtype=torch.float32, device=device) / rotated_width
    return 1.0 / (theta**exponents_P)


def angles(positions_T: Tensor, theta: float, rotated_width: int) -> Tensor:
    """Radians, float32 [T, P]. At position 524287 this rounding reaches 0.03 rad, so it has to be the same one."""
    return positions_T.to(torch.float32)[:, None] * frequencies(theta, rotated_width, positions_T.device)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2j, 2j+1) of the last dim, in place order."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (j, j + P) of the last dim: the other convention, for configs that ask for it."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RotaryEmbedding:
    """Rotates the last dim of [T, …, R] tensors. `rounding` says what is rounded before the result is."""

    def __init__(self, theta: float, rounding: RopeDtype, interleave: bool = True):
        self.theta = theta
        self.rounding = rounding
        self._rotate = rotate_neighbours if interleave else rotate_halves

    def __call__(self, x: Tensor, positions_T: Tensor) -> Tensor:
        """Rotated `x` in its own dtype."""
        return self.unrounded(x, positions_T).to(x.dtype)

    def unrounded(self, x: Tensor, positions_T: Tensor) -> Tensor:
        """Rotated `x` in the dtype of the arithmetic: at least float32, or the dtype of `x` under `activation`."""
        wide = at_least_float32(x.dtype)
        angles_TP = angles(positions_T, self.theta, x.shape[-1]).to(wide)
        # One angle for each token: broadcast over whatever lies between tokens and lanes (heads or nothing).
        angles_TP = angles_TP.reshape(len(positions_T), *(1,) * (x.dim() - 2), -1)
        cos, sin = angles_TP.cos(), angles_TP.sin()
        if self.rounding != "float32":
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        arithmetic = x.dtype if self.rounding == "activation" else wide
        return self._rotate(x.to(arithmetic), cos.to(arithmetic), sin.to(arithmetic))
