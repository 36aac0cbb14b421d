"""RMSNorm, RMSNorm with NOTE's latent rescale, and the indexer's LayerNorm.

RMSNorm:    y = x / sqrt(mean(x²) + eps) · weight          (weight as it is, not 1 + weight)
rescaled:   y · sqrt(D / rank), after the norm; before it, the norm would forget the factor
LayerNorm:  y = (x - mean) / sqrt(var + eps) · weight + bias, with the biased variance

Source: text_model specification, sections 5.1, 5.2 and 6.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.numerics import Numerics, at_least_float32


def _multiply_then_round(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (normed * weight).to(dtype)


def _round_then_multiply(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (normed.to(dtype) * weight).to(dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim; any float dtype in, the same out; float32 inside."""

    def __init__(self, width: int, eps: float, numerics: Numerics):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self._scaled = _multiply_then_round if numerics.rms_norm_rounding == "once" else _round_then_multiply

    def forward(self, x: Tensor) -> Tensor:
        return self._scaled(self.normalized(x), self.weight, x.dtype)

    def normalized(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + eps), not yet rounded: a mean of squares in bfloat16 would be off by a percent."""
        wide = x.to(at_least_float32(x.dtype))
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)


class RescaledRMSNorm(RMSNorm):
    """RMSNorm of a latent, times `scale` = sqrt(D / rank)."""

    def __init__(self, width: int, eps: float, scale: float, numerics: Numerics):
        super().__init__(width, eps, numerics)
        self.scale = scale
        self._rescaled = self._scale_inside if numerics.rescale_rounding == "fused" else self._scale_after

    def forward(self, x: Tensor) -> Tensor:
        return self._rescaled(x)

    def _scale_inside(self, x: Tensor) -> Tensor:
        # The factor joins the weight in float32: rounding the product to bfloat16 would change the weight.
        weight = self.weight.to(at_least_float32(x.dtype)) * self.scale
        return self._scaled(self.normalized(x), weight, x.dtype)

    def _scale_after(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class LayerNorm(nn.Module):
    """LayerNorm over the last dim, float32 inside, rounded once. Its eps is 1e-6, not the model's `rms_norm_eps`."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x.dtype)
        return F.layer_norm(x.to(wide), (x.shape[-1],), self.weight.to(wide), self.bias.to(wide), self.eps).to(x.dtype)
