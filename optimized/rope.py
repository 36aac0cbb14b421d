"""The cosines and sines of a step, once for all layers of a kind.

angle[t, j] = float32(position_t) · theta^(-2j/R), j = 0 .. R/2-1

The float32 product is a constant of the model at every dtype. Source: text_model specification, section 5.3.
"""

import torch
from torch import Tensor

# T tokens  R rope dim


def cos_sin(positions_T: Tensor, theta: float, rope_dim: int, dtype: torch.dtype) -> Tensor:
    """[cos R/2 | sin R/2] of each token, [T, R], at least float32 for activations of `dtype`."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32, device=positions_T.device) / rope_dim
    angles = positions_T.to(torch.float32)[:, None] * (1.0 / theta**exponents)
    angles = angles.to(torch.promote_types(dtype, torch.float32))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
