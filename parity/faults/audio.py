"""The faults of the audio side, from the file to the embeddings, and changes that are none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.faults.audio_layers import ATTENTION_FAULTS, LAYER_FAULTS
from parity.faults.audio_mel import MEL_FAULTS
from parity.faults.audio_sound import SOUND_FAULTS
from parity.faults.audio_stem import STEM_FAULTS
from parity.faults.controls import CONTROLS
from parity.faults.fault import Fault, Patch
from reference.layers.norm import RMSNorm

AUDIO_FAULTS = SOUND_FAULTS + MEL_FAULTS + STEM_FAULTS + ATTENTION_FAULTS + LAYER_FAULTS


def _norm_rounding_each_op(norm: RMSNorm, x: Tensor, *_: Any) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    return norm.weight * (x * torch.rsqrt(mean + norm.eps))


# Other places of rounding and other orders of sums: not different in float64, within the noise in bfloat16.
AUDIO_CONTROLS = (
    *(control for control in CONTROLS if control.id in ("transformers_rounding", "linear_in_halves", "norm_backwards")),
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
