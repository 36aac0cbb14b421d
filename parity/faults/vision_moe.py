"""The vision tower, second part: dense SwiGLU, router and experts.

Source: vision specification, sections 5, 6 and 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference.layers.vision_moe
from parity.faults.fault import Fault, Patch, Visibility, Weights, after_construction
from parity.faults.norms import in_bfloat16
from reference.checkpoint.expected_towers import VISION
from reference.config import NoteConfig
from reference.layers.vision_moe import VisionMoe
from reference.numerics import at_least_float32
from reference.probe import probe, scope
from reference.vision import VisionBlock

# T patches  D tower width  E experts  K chosen experts

_FFN = "vision.blocks.{i}.ffn."
LOGITS, SCORES, CHOICE, IDS, WEIGHTS = (
    f"{_FFN}router.{name}" for name in ("logits", "scores", "choice", "expert_ids", "weights")
)
OUTPUT = f"{_FFN}output"
EXPERTS = "a block with experts"
# Significant bits of a TF32 number.
TF32_BITS = 11


def vision_fault(
    fault_id: str,
    says: str,
    first: str,
    source: str = "analysis",
    visibility: Visibility = "V",
    visible_when: str = "one image",
    **change: Any,
) -> Fault:
    return Fault(fault_id, says, visibility, (first,), visible_when, source, **change)


def _moe_fault(fault_id: str, says: str, first: str, source: str = "analysis", **change: Any) -> Fault:
    return vision_fault(fault_id, says, first, source, **{"visible_when": EXPERTS} | change)


Scored = Callable[[Tensor], Tensor]
Chosen = Callable[[Tensor, Tensor, Tensor], Tensor]
Weighed = Callable[[Tensor, Tensor, Tensor], Tensor]


def _right_choice(logits_TE: Tensor, scores_TE: Tensor, bias_E: Tensor) -> Tensor:
    return scores_TE + bias_E


def _right_weights(scores_TE: Tensor, choice_TE: Tensor, ids_TK: Tensor) -> Tensor:
    weights_TK = scores_TE.gather(-1, ids_TK)
    return weights_TK / weights_TK.sum(-1, keepdim=True)


def _right_logits(moe: VisionMoe, x_TD: Tensor) -> Tensor:
    wide = at_least_float32(x_TD.dtype)
    return F.linear(x_TD.to(wide), moe.gate_weight.to(wide))


def _routing(
    logits: Callable[[VisionMoe, Tensor], Tensor] = _right_logits,
    scored: Scored = torch.sigmoid,
    chosen: Chosen = _right_choice,
    weighed: Weighed = _right_weights,
) -> Patch:
    """A patch of the router, step by step: logits, scores, what ranks the experts, weights of the chosen."""

    def route(moe: VisionMoe, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        with scope("router"):
            logits_TE = probe("logits", logits(moe, x_TD))
            scores_TE = probe("scores", scored(logits_TE))
            choice_TE = probe("choice", chosen(logits_TE, scores_TE, moe.router_bias))
            ids_TK = probe("expert_ids", choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, : moe.chosen])
            return ids_TK, probe("weights", weighed(scores_TE, choice_TE, ids_TK))

    return Patch(VisionMoe, "route", lambda original: route)


def _rounded_logits(moe: VisionMoe, x_TD: Tensor) -> Tensor:
    return in_bfloat16(_right_logits(moe, x_TD))


def _in_tf32(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**TF32_BITS).round() / 2**TF32_BITS, exponent).to(x.dtype)


def _tf32_logits(moe: VisionMoe, x_TD: Tensor) -> Tensor:
    wide = at_least_float32(x_TD.dtype)
    return F.linear(_in_tf32(x_TD.to(wide)), _in_tf32(moe.gate_weight.to(wide)))


def _weights_with_bias(scores_TE: Tensor, choice_TE: Tensor, ids_TK: Tensor) -> Tensor:
    return _right_weights(choice_TE, choice_TE, ids_TK)


def _raw_scores(scores_TE: Tensor, choice_TE: Tensor, ids_TK: Tensor) -> Tensor:
    return scores_TE.gather(-1, ids_TK)


def _divided_by_all(scores_TE: Tensor, choice_TE: Tensor, ids_TK: Tensor) -> Tensor:
    return scores_TE.gather(-1, ids_TK) / scores_TE.sum(-1, keepdim=True)


def _router_reads_residual(block: VisionBlock, *_: Any) -> None:
    if not isinstance(block.mlp, VisionMoe):
        return
    route, held = block.mlp.route, {}

    def hold(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        held["residual"] = args[0]

    block.norm_2.register_forward_pre_hook(hold)
    block.mlp.route = lambda x_TD: route(held["residual"])  # type: ignore[method-assign]


def _with_capacity(summed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Each expert takes K · T / E patches, the first ones; for the others its part is missing."""

    def dropped(
        experts: nn.ModuleList, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, accumulated: torch.dtype
    ) -> Tensor:
        capacity = math.ceil(ids_TK.numel() / len(experts))
        place_TKE = F.one_hot(ids_TK, len(experts)).flatten(0, 1).cumsum(0).view(*ids_TK.shape, -1)
        is_over_TK = place_TKE.gather(-1, ids_TK[..., None])[..., 0] > capacity
        return summed(experts, x_TD, ids_TK, weights_TK.masked_fill(is_over_TK, 0.0), accumulated)

    return dropped


def _with_shared_expert(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda moe, x_TD: forward(moe, x_TD) + moe.experts[0](x_TD)


def _rounded_sum(experts: nn.ModuleList, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Each weighted output and each partial sum in bfloat16."""
    sum_TD = torch.zeros_like(x_TD)
    for expert_id, expert in enumerate(experts):
        weight_T1 = weights_TK.masked_fill(ids_TK != expert_id, 0.0).sum(-1, keepdim=True)
        sum_TD = in_bfloat16(sum_TD + in_bfloat16((expert(x_TD) * weight_T1).to(x_TD.dtype)))
    return sum_TD


def _each(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[Weights, NoteConfig], Weights]:
    def edit(weights: Weights, config: NoteConfig) -> Weights:
        return {name: change(tensor) if name.endswith(suffix) else tensor for name, tensor in weights.items()}

    return edit


def _gate_and_up_swapped(weights: Weights, config: NoteConfig) -> Weights:
    other = {"fc1": "fc3", "fc3": "fc1"}

    def source(name: str) -> str:
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        is_mlp = name.startswith(f"{VISION}blocks.") and leaf in other
        return f"{parent}.{other[leaf]}.{kind}" if is_mlp else name

    return {name: weights[source(name)] for name in weights}


def _rows_interleaved(weights: Weights, config: NoteConfig) -> Weights:
    """Gate and up rows of an expert one after the other are read as alternating."""
    edited = dict(weights)
    for name in weights:
        if ".mlp.experts." in name and name.startswith(VISION) and name.endswith("fc1.weight"):
            up = name.removesuffix("fc1.weight") + "fc3.weight"
            stacked = torch.cat((weights[name], weights[up]))
            edited[name], edited[up] = stacked[0::2], stacked[1::2]
    return edited


def _sorted_as_text(weights: Weights, config: NoteConfig) -> Weights:
    assert config.vision
    edited = dict(weights)
    for block, experts in enumerate(config.vision.experts):
        prefix = f"{VISION}blocks.{block}.mlp.experts."
        for place, expert in enumerate(sorted(range(experts), key=str)):
            for name in ("fc1.weight", "fc2.weight", "fc3.weight"):
                edited[f"{prefix}{place}.{name}"] = weights[f"{prefix}{expert}.{name}"]
    return edited


def _chooses(count: int) -> Callable[[NoteConfig], NoteConfig]:
    def edit(config: NoteConfig) -> NoteConfig:
        assert config.vision
        return replace(config, vision=replace(config.vision, num_experts_per_tok=count))

    return edit


VISION_MOE_FAULTS = (
    vision_fault(
        "vision_fc1_fc3_swapped",
        "fc3 passes the silu in place of fc1",
        OUTPUT,
        weights=_gate_and_up_swapped,
    ),
    _moe_fault(
        "vision_moe_router_unnormed_input",
        "the router reads the residual stream in place of its norm",
        LOGITS,
        patches=(after_construction(VisionBlock, _router_reads_residual),),
    ),
    _moe_fault(
        "vision_moe_router_bf16",
        "router logits are rounded to bfloat16",
        LOGITS,
        "vLLM, SGLang and llama.cpp record it as the dominant drift",
        visibility="N",
        visible_when="float32, and near ties",
        patches=(_routing(logits=_rounded_logits),),
    ),
    _moe_fault(
        "vision_moe_router_tf32",
        "the router's product is computed in TF32",
        LOGITS,
        visibility="N",
        visible_when="float32, and near ties",
        patches=(_routing(logits=_tf32_logits),),
    ),
    _moe_fault(
        "vision_moe_softmax",
        "scores are a softmax over the experts",
        SCORES,
        "variant in the code of vLLM and SGLang",
        patches=(_routing(scored=lambda logits_TE: logits_TE.softmax(-1)),),
    ),
    _moe_fault(
        "vision_moe_bias_dropped",
        "experts are chosen without the router bias",
        CHOICE,
        weights=_each(".mlp.router_bias", torch.zeros_like),
    ),
    _moe_fault(
        "vision_moe_bias_sign",
        "the router bias is subtracted",
        CHOICE,
        weights=_each(".mlp.router_bias", torch.neg),
    ),
    _moe_fault(
        "vision_moe_bias_on_logits",
        "the router bias is added before the sigmoid",
        CHOICE,
        patches=(_routing(chosen=lambda logits_TE, scores_TE, bias_E: (logits_TE + bias_E).sigmoid()),),
    ),
    _moe_fault(
        "vision_moe_bias_bf16",
        "the router bias is rounded to bfloat16 with the rest of the tower",
        CHOICE,
        "vLLM and SGLang",
        visibility="N",
        visible_when="float32, and near ties",
        weights=_each(".mlp.router_bias", in_bfloat16),
    ),
    _moe_fault(
        "vision_moe_top1",
        "a patch chooses one expert",
        IDS,
        config=_chooses(1),
    ),
    _moe_fault(
        "vision_moe_topk_8",
        "a patch chooses as many experts as a token of the text model",
        IDS,
        config=_chooses(8),
        visible_when="a block with more experts than a patch should choose",
    ),
    _moe_fault(
        "vision_moe_bias_in_weights",
        "the weights of the chosen experts are taken from score plus bias",
        WEIGHTS,
        patches=(_routing(weighed=_weights_with_bias),),
    ),
    _moe_fault(
        "vision_moe_no_renorm",
        "the weights of the chosen experts are not divided by their sum",
        WEIGHTS,
        patches=(_routing(weighed=_raw_scores),),
    ),
    _moe_fault(
        "vision_moe_renorm_before_topk",
        "the weights are divided by the sum over all experts",
        WEIGHTS,
        patches=(_routing(weighed=_divided_by_all),),
    ),
    _moe_fault(
        "vision_moe_expert_index_shift",
        "experts are stacked in the order of their ids as text: 0, 1, 10, 11, …",
        OUTPUT,
        weights=_sorted_as_text,
        visible_when="a block with more than 10 experts",
    ),
    _moe_fault(
        "vision_moe_gate_up_interleaved",
        "the stacked gate and up rows of an expert are read as alternating",
        OUTPUT,
        weights=_rows_interleaved,
    ),
    _moe_fault(
        "vision_moe_capacity_drop",
        "capacity_factor is taken for a limit: an expert drops the patches that come too late",
        OUTPUT,
        "GShard; the key's historical meaning",
        patches=(Patch(reference.layers.vision_moe, "_summed", _with_capacity),),
        visible_when="an expert that more patches choose than its share",
    ),
    _moe_fault(
        "vision_moe_dense_branch_kept",
        "a shared expert is added, as in the text model",
        OUTPUT,
        patches=(Patch(VisionMoe, "forward", _with_shared_expert),),
    ),
    _moe_fault(
        "vision_moe_accumulate_bf16",
        "each weighted output and each partial sum is rounded to bfloat16",
        OUTPUT,
        "transformers 5.24, eager experts; vLLM without fp8",
        visibility="N",
        visible_when="float32; percents where outputs cancel",
        patches=(Patch(reference.layers.vision_moe, "_in_float32", lambda original: _rounded_sum),),
    ),
)
