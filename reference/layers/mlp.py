"""SwiGLU: down(silu(gate(x)) · up(x)). The dense layer, each expert and the shared expert have this shape.

Source: text_model specification, section 11.1.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from reference.numerics import Numerics, at_least_float32


class Mlp(nn.Module):
    """[T, D] to [T, D] through F lanes."""

    def __init__(self, hidden_size: int, intermediate_size: int, numerics: Numerics):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self._activated = _multiply_then_round if numerics.swiglu_rounding == "once" else _round_then_multiply

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self._activated(self.gate_proj(x_TD), self.up_proj(x_TD)))


def _multiply_then_round(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    wide = at_least_float32(gate_TF.dtype)
    return (F.silu(gate_TF.to(wide)) * up_TF.to(wide)).to(gate_TF.dtype)


def _round_then_multiply(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    return F.silu(gate_TF) * up_TF
