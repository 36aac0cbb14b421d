"""What some engines do to index queries and keys before they score them. None of it is in the weights.

fp8:  one power-of-two scale for the J lanes of a head, values rounded to e4m3:
      scale = 2^ceil(log2(max(amax, floor) / 448));  x ≈ e4m3(x / scale) · scale
hadamard_fp8:  the same after an orthonormal Walsh-Hadamard rotation of the lanes, which spreads outliers. Applied to
      query and key alike it changes no score in exact arithmetic.

Source: text_model specification, section 7.3.
"""

import torch
from torch import Tensor

from reference.errors import ConfigError
from reference.numerics import Numerics, at_least_float32

E4M3_MAX = 448.0


def fp8_round_trip(x: Tensor, amax_floor: float) -> Tensor:
    """Quantize and dequantize the last dim in one block. Returns float32 (or wider): what the scores are made from."""
    wide = x.to(at_least_float32(x.dtype))
    amax = wide.abs().amax(-1, keepdim=True).clamp(min=amax_floor)
    scale = torch.exp2(torch.ceil(torch.log2(amax / E4M3_MAX)))
    rounded = (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return rounded.to(wide.dtype) * scale


def hadamard_matrix(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal Walsh-Hadamard matrix [J, J]. Raises: ConfigError unless `width` is a power of two."""
    if width & (width - 1):
        raise ConfigError(f"hadamard_fp8 needs an index_head_dim that is a power of two, found {width}")
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * width**-0.5


def quantized(x: Tensor, numerics: Numerics) -> Tensor:
    """`x` [..., J] as the indexer of `numerics` sees it; unchanged without quantization."""
    if numerics.index_quantization == "none":
        return x
    if numerics.index_quantization == "hadamard_fp8":
        wide = x.to(at_least_float32(x.dtype))
        x = (wide @ hadamard_matrix(x.shape[-1], wide.dtype, x.device)).to(x.dtype)
    return fp8_round_trip(x, numerics.index_amax_floor)
