"""Section H, second part: the experts and the shared expert.

Source: text_model specification, section 11.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import reference.layers.mlp
from parity.faults.fault import Fault, Patch, Weights, after_construction
from parity.faults.norms import in_bfloat16
from parity.faults.router import LOGITS, ROUTER_FAULTS, WEIGHTS, expert_fault, routing, weights_with_floor
from reference.config import NoteConfig, TextConfig
from reference.layers.moe import Moe
from reference.numerics import at_least_float32
from reference.probe import probe
from reference.text import DecoderLayer

# T tokens  D model  K chosen experts  F ffn lanes

ROUTED, SHARED, OUTPUT = "layers.{i}.ffn.routed", "layers.{i}.ffn.shared", "layers.{i}.ffn.output"


def _with_shared(change: Callable[[Tensor, Tensor, TextConfig], Tensor]) -> Patch:
    """A patch of the block: `change(shared_TD, weights_TK, config)` in place of the shared expert's output."""

    def forward(moe: Any, x_TD: Tensor) -> Tensor:
        ids_TK, weights_TK = moe.gate(x_TD)
        routed_TD = probe("routed", moe._routed(x_TD, ids_TK, weights_TK))
        shared_TD = change(moe.shared_experts(x_TD), weights_TK, moe.gate.config).to(x_TD.dtype)
        return routed_TD + probe("shared", shared_TD)

    return Patch(Moe, "forward", lambda original: forward)


def _without_shared(moe: Any, x_TD: Tensor) -> Tensor:
    routed_TD: Tensor = probe("routed", moe._routed(x_TD, *moe.gate(x_TD)))
    return routed_TD


def _shared_by_first_weight(shared_TD: Tensor, weights_TK: Tensor, config: TextConfig) -> Tensor:
    return shared_TD * weights_TK[:, :1]


def _half_gated(shared_TD: Tensor, weights_TK: Tensor, config: TextConfig) -> Tensor:
    # The gate's weight is not in the checkpoint: zeros, and the sigmoid of zero is a half.
    return shared_TD * 0.5


def _shared_normalised(shared_TD: Tensor, weights_TK: Tensor, config: TextConfig) -> Tensor:
    """Of weight 1 in the sum of all: what the weights of the chosen experts leave."""
    return shared_TD * (1.0 - weights_TK.sum(-1, keepdim=True) / config.routed_scaling_factor)


def _summed(
    term: Callable[[Any, Tensor, Tensor], Tensor], rounded: Callable[[Tensor], Tensor] = lambda x: x
) -> Callable[..., Tensor]:
    """The routed sum with another `term(expert, x_rows, weight_rows)`, `rounded` at each addition."""

    def routed(moe: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        wide = at_least_float32(x_TD.dtype)
        sum_TD = torch.zeros_like(x_TD, dtype=wide)
        for expert_id, expert in enumerate(moe.experts):
            rows, slots = (ids_TK == expert_id).nonzero(as_tuple=True)
            if len(rows):
                terms = rounded(term(expert, x_TD[rows], weights_TK[rows, slots, None]).to(wide))
                sum_TD = rounded(sum_TD.index_add(0, rows, terms))
        return sum_TD.to(x_TD.dtype)

    return routed


def _weighted_output(expert: Any, x: Tensor, weights: Tensor) -> Tensor:
    return expert(x) * weights


def _weighted_input(expert: Any, x: Tensor, weights: Tensor) -> Tensor:
    output: Tensor = expert((x * weights).to(x.dtype))
    return output


def _first_choice_twice(routed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(moe: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        twice_TK = (torch.cat((of_TK, of_TK[:, :1]), dim=-1) for of_TK in (ids_TK, weights_TK))
        return routed(moe, x_TD, *twice_TK)

    return run


def _scaled_again(routed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda moe, *arguments: routed(moe, *arguments) * moe.gate.config.routed_scaling_factor


def _experts_from_residual(layer: Any, *_: Any, **__: Any) -> None:
    if not isinstance(layer.mlp, Moe):
        return
    norm: Any = layer.post_attention_layernorm
    moe: Any = layer.mlp
    right_norm, right_moe = norm.forward, moe.forward
    residual: list[Tensor] = []

    def remembered(hidden_TD: Tensor) -> Tensor:
        residual[:] = [hidden_TD]
        return right_norm(hidden_TD)

    norm.forward = remembered
    moe.forward = lambda x_TD: right_moe(residual[0])


def _gate_and_up_swapped(weights: Weights, config: NoteConfig) -> Weights:
    def other(name: str) -> str:
        if ".mlp.experts." not in name:
            return name
        swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        return re.sub("gate_proj|up_proj", lambda match: swapped[match.group()], name)

    return {name: weights[other(name)] for name in weights}


def _experts_sorted_as_text(weights: Weights, config: NoteConfig) -> Weights:
    order = sorted(range(config.text.n_routed_experts), key=str)

    def stacked(name: str) -> str:
        return re.sub(r"(?<=\.mlp\.experts\.)\d+", lambda match: str(order[int(match.group())]), name)

    return {name: weights[stacked(name)] for name in weights}


def _gelu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    wide = at_least_float32(gate_TF.dtype)
    return (F.gelu(gate_TF.to(wide), approximate="tanh") * up_TF.to(wide)).to(gate_TF.dtype)


MOE_FAULTS = (
    *ROUTER_FAULTS,
    expert_fault(
        "routed_scale_twice",
        "routed_scaling_factor multiplies the weights and the routed sum",
        ROUTED,
        "vLLM flag",
        visibility="R",
        visible_when="routed_scaling_factor is not 1",
        patches=(Patch(Moe, "_routed", _scaled_again),),
    ),
    expert_fault(
        "shared_scaled",
        "the shared expert is multiplied by the largest routed weight",
        SHARED,
        patches=(_with_shared(_shared_by_first_weight),),
    ),
    expert_fault(
        "shared_dropped",
        "the shared expert is left out",
        OUTPUT,
        "vllm.cpp",
        patches=(Patch(Moe, "forward", lambda original: _without_shared),),
    ),
    expert_fault(
        "shared_gated",
        "the shared expert passes a sigmoid gate, as in other families, whose weight is zero",
        SHARED,
        patches=(_with_shared(_half_gated),),
    ),
    expert_fault(
        "shared_fused_as_257th_renorm",
        "the shared expert is fused as one more routed expert, and takes part in the normalisation",
        WEIGHTS,
        "SGLang fusion path",
        patches=(routing(weigh=weights_with_floor(1.0)), _with_shared(_shared_normalised)),
    ),
    expert_fault(
        "gate_up_swapped",
        "the packed gate and up rows of the experts are read in the other order, so that up passes the silu",
        ROUTED,
        "vllm.cpp",
        weights=_gate_and_up_swapped,
    ),
    Fault(
        "gelu_for_silu",
        says="the feed-forward activation is a gelu",
        visibility="V",
        first=(ROUTED, OUTPUT),
        visible_when="T = 1",
        source="analysis",
        patches=(
            Patch(reference.layers.mlp, "_multiply_then_round", lambda original: _gelu),
            Patch(reference.layers.mlp, "_round_then_multiply", lambda original: _gelu),
        ),
    ),
    expert_fault(
        "expert_order",
        "experts are stacked in the order of their ids as text: 0, 1, 10, 11, …",
        ROUTED,
        visible_when="more than 10 experts",
        weights=_experts_sorted_as_text,
    ),
    expert_fault(
        "moe_input_wrong",
        "router and experts read the residual stream in place of its norm",
        LOGITS,
        patches=(after_construction(DecoderLayer, _experts_from_residual),),
    ),
    expert_fault(
        "moe_accum_bf16",
        "the sum over the experts is rounded to bfloat16 at each addition",
        ROUTED,
        "transformers 5.24, eager experts",
        visibility="N",
        visible_when="bit test",
        patches=(Patch(Moe, "_routed", lambda original: _summed(_weighted_output, in_bfloat16)),),
    ),
    expert_fault(
        "moe_weight_before_down",
        "the weight of an expert multiplies its input",
        ROUTED,
        patches=(Patch(Moe, "_routed", lambda original: _summed(_weighted_input)),),
    ),
    expert_fault(
        "token_dispatch_dup",
        "a token is sent twice to its first expert",
        ROUTED,
        "transformers 5.24, sentinel of masked experts",
        patches=(Patch(Moe, "_routed", _first_choice_twice),),
    ),
)
