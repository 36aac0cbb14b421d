"""Section K: tensors that are read wrongly, from the wrong place, or not at all.

Source: fault specification, section K; checkpoint specification, sections 8 and 9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity.faults.fault import Fault, Weights
from parity.faults.router import CHOICE, each_tensor
from reference.config import NoteConfig, released, tiny

# E experts

# The number of the draft layer in a whole model: 46, and its counterpart in the tiny one.
DRAFT_LAYER_LITERALS = (released().text.num_hidden_layers, tiny().text.num_hidden_layers)


def _as_bfloat16_pairs(bias_E: Tensor) -> Tensor:
    """The bytes of float32 numbers as twice as many bfloat16 numbers, of which the first half is taken."""
    return bias_E.float().contiguous().view(torch.bfloat16)[: len(bias_E)].to(bias_E.dtype)


def _draft_by_literal(weights: Weights, config: NoteConfig) -> Weights:
    number = config.text.num_hidden_layers
    if number in DRAFT_LAYER_LITERALS:
        return weights
    prefixes = (f"model.layers.{number}.", "model.mtp.")
    return {name: torch.zeros_like(t) if name.startswith(prefixes) else t for name, t in weights.items()}


LOADING_FAULTS = (
    Fault(
        "bias_reinterpreted",
        says="the bytes of the float32 correction bias are read as bfloat16",
        visibility="V",
        first=(CHOICE,),
        visible_when="T = 1, a layer with experts",
        source="vllm.cpp",
        weights=each_tensor(".e_score_correction_bias", _as_bfloat16_pairs),
    ),
    Fault(
        "missing_reads_zero",
        says="tensors that are not found keep their initial value: here gate weights of zero, so that gates are 1/2",
        visibility="V",
        first=("layers.{i}.attn.gate",),
        visible_when="T = 1",
        source="vllm.cpp accounting",
        weights=each_tensor(".self_attn.g_proj.weight", torch.zeros_like),
    ),
    Fault(
        "mlp_gate_prefix",
        says="the prefix mlp.gate of the router also takes mlp.gate_proj, which dense layers then lack",
        visibility="V",
        first=("layers.{i}.ffn.output",),
        visible_when="T = 1, a dense layer",
        source="analysis",
        weights=each_tensor(".mlp.gate_proj.weight", torch.zeros_like),
    ),
    Fault(
        "slice_router_not_sliced",
        says="experts and router rows of a slice are cut out at one place and the correction bias at another",
        visibility="V",
        first=(CHOICE,),
        visible_when="T = 1, a layer with experts",
        source="llama.cpp slice method",
        weights=each_tensor(".e_score_correction_bias", lambda bias_E: bias_E.roll(-1)),
    ),
    Fault(
        "layer46_literal",
        says="the draft layer is looked for at layer 46, so that a slice does not load it",
        visibility="R",
        first=("mtp.{s}.eh_input",),
        visible_when="one draft, a slice of the layers",
        source="transformers 5.24, tokenspeed, SGLang",
        weights=_draft_by_literal,
    ),
)
