"""The faults of the audio side, from the file to the embeddings, and changes that are none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parity.faults.audio_layers import ATTENTION_FAULTS, LAYER_FAULTS
from parity.faults.audio_mel import MEL_FAULTS
from parity.faults.audio_sound import SOUND_FAULTS
from parity.faults.audio_stem import STEM_FAULTS
from parity.faults.controls import CONTROLS
from parity.faults.fault import Fault, Patch
from reference.layers.norm import RMSNorm
from reference.numerics import at_least_float32

AUDIO_FAULTS = SOUND_FAULTS + MEL_FAULTS + STEM_FAULTS + ATTENTION_FAULTS + LAYER_FAULTS


def _in_halves(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """x Wᵀ + b as the sum of two products over halves of the inner dim and the bias, added in float32."""

    def forward(module: nn.Linear, x: Tensor) -> Tensor:
        half, wide = x.shape[-1] // 2, at_least_float32(x.dtype)
        weight, x_wide = module.weight.to(wide), x.to(wide)
        total = x_wide[..., :half] @ weight[:, :half].mT + x_wide[..., half:] @ weight[:, half:].mT
        return (total if module.bias is None else total + module.bias.to(wide)).to(x.dtype)

    return forward


def _norm_rounding_each_op(norm: RMSNorm, x: Tensor) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    return norm.weight * (x * torch.rsqrt(mean + norm.eps))


# Other places of rounding and other orders of sums: not different in float64, within the noise in bfloat16.
AUDIO_CONTROLS = (
    *(control for control in CONTROLS if control.id in ("transformers_rounding", "norm_backwards")),
    Fault(
        "audio_linear_in_halves",
        says="adds products of two halves",
        visibility="I",
        first=(),
        visible_when="never in exact arithmetic",
        source="analysis",
        patches=(Patch(nn.Linear, "forward", _in_halves),),
    ),
    Fault(
        "norm_each_op",
        says="the norms of the encoder round every operation to the activation dtype",
        visibility="I",
        first=(),
        visible_when="never in exact arithmetic",
        source="vLLM, SGLang",
        patches=(Patch(RMSNorm, "forward", lambda original: _norm_rounding_each_op),),
    ),
)
