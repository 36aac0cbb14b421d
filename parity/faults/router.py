"""Section H, first part: the router: its precision, the correction bias, the weights of the chosen experts.

Source: text_model specification, sections 11.2 and 11.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.faults.fault import Fault, Patch, Weights, text_edit
from parity.faults.norms import in_bfloat16
from reference.config import NoteConfig, TextConfig
from reference.layers.moe import Router
from reference.numerics import at_least_float32
from reference.probe import Override, probe, scope

# T tokens  D model  E experts  K chosen experts  G groups

ROUTER = "layers.{i}.ffn.router."
LOGITS, SCORES, CHOICE, IDS, WEIGHTS = (
    ROUTER + name for name in ("logits", "scores", "choice", "expert_ids", "weights")
)
# A floor of another family's router, where NOTE has 1e-20.
OTHER_FLOOR = 6.1e-5


Choose = Callable[[Tensor, Tensor, Tensor], Tensor]
Weigh = Callable[[Tensor, Tensor, Tensor, TextConfig], Tensor]


def each_tensor(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[Weights, NoteConfig], Weights]:
    """A weight edit: `change` of every tensor whose name ends in `suffix`."""

    def edit(weights: Weights, config: NoteConfig) -> Weights:
        return {name: change(tensor) if name.endswith(suffix) else tensor for name, tensor in weights.items()}

    return edit


def _right_choice(logits_TE: Tensor, scores_TE: Tensor, bias_E: Tensor) -> Tensor:
    return scores_TE + bias_E


def _right_weights(scores_TE: Tensor, choice_TE: Tensor, ids_TK: Tensor, config: TextConfig) -> Tensor:
    chosen_TK = scores_TE.gather(-1, ids_TK)
    total_T1 = chosen_TK.sum(-1, keepdim=True) + 1e-20 if config.norm_topk_prob else 1.0
    return chosen_TK / total_T1 * config.routed_scaling_factor


def routing(
    choose: Choose = _right_choice, weigh: Weigh = _right_weights, order: Callable[[Tensor], Tensor] = lambda ids: ids
) -> Patch:
    """A patch of the router.

    `choose(logits_TE, scores_TE, bias_E)` ranks the experts, `weigh(scores_TE, choice_TE, ids_TK, config)` gives
    weights_TK of the chosen ones, `order` arranges ids_TK.
    """

    def forward(router: Any, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        with scope("router"):
            logits_TE = probe("logits", router._logits(x_TD))
            wide_TE = logits_TE.to(at_least_float32(logits_TE.dtype))
            scores_TE = probe("scores", wide_TE.sigmoid())
            choice_TE = choose(wide_TE, scores_TE, router.e_score_correction_bias)
            choice_TE = probe("choice", router._within_best_groups(choice_TE))
            ids_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[
                :, : router.config.num_experts_per_tok
            ]
            ids_TK = probe("expert_ids", order(ids_TK))
            return ids_TK, probe("weights", weigh(scores_TE, choice_TE, ids_TK, router.config))

    return Patch(Router, "forward", lambda original: forward)


def _bias_in_logits(logits_TE: Tensor, scores_TE: Tensor, bias_E: Tensor) -> Tensor:
    return (logits_TE + bias_E).sigmoid()


def _weights_with_bias(scores_TE: Tensor, choice_TE: Tensor, ids_TK: Tensor, config: TextConfig) -> Tensor:
    return _right_weights(choice_TE, choice_TE, ids_TK, config)


def _weights_of_all(scores_TE: Tensor, choice_TE: Tensor, ids_TK: Tensor, config: TextConfig) -> Tensor:
    return scores_TE.gather(-1, ids_TK) / scores_TE.sum(-1, keepdim=True) * config.routed_scaling_factor


def weights_with_floor(floor: float) -> Weigh:
    """Chosen scores over their sum plus `floor`."""

    def weigh(scores_TE: Tensor, choice_TE: Tensor, ids_TK: Tensor, config: TextConfig) -> Tensor:
        chosen_TK = scores_TE.gather(-1, ids_TK)
        return chosen_TK / (chosen_TK.sum(-1, keepdim=True) + floor) * config.routed_scaling_factor

    return weigh


def _rounded_router(router: Any, x_TD: Tensor) -> Tensor:
    wide = at_least_float32(x_TD.dtype)
    return in_bfloat16(F.linear(in_bfloat16(x_TD.to(wide)), in_bfloat16(router.weight.to(wide))))


def _one_group_stage(within_best_groups: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def staged(router: Any, choice_TE: Tensor) -> Tensor:
        if router.config.n_group > 1:
            return within_best_groups(router, choice_TE)
        by_group_TGE = choice_TE[:, None]
        merit_TG = by_group_TGE.topk(2, dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(merit_TG, dtype=torch.bool).scatter(-1, merit_TG.topk(1).indices, True)
        return by_group_TGE.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)

    return staged


_EXPERTS = "T = 1, a layer with experts"


def expert_fault(
    fault_id: str,
    says: str,
    first: str,
    source: str = "analysis",
    visibility: Any = "V",
    visible_when: str = _EXPERTS,
    **change: Any,
) -> Fault:
    return Fault(fault_id, says, visibility, (first,), visible_when, source, **change)


ROUTER_FAULTS = (
    expert_fault(
        "router_bf16",
        "the router's product is computed and rounded in bfloat16",
        LOGITS,
        "transformers 5.24 and vLLM against the others; SGLang issue 33764",
        patches=(Patch(Router, "_logits", lambda original: _rounded_router),),
    ),
    expert_fault(
        "router_fp32",
        "the router's product is computed in float32 while the other side rounds it to bfloat16",
        LOGITS,
        "transformers 5.24 and vLLM against the others; SGLang issue 33764",
        visibility="I",
        visible_when="never in exact arithmetic, nor against a float32 router",
        numerics=lambda numerics: replace(numerics, router_dtype="float32"),
    ),
    expert_fault(
        "router_sigmoid_bf16",
        "router scores are rounded to bfloat16 before the bias is added",
        SCORES,
        "the older dots3_note_omni port",
        listener=lambda config: Override("*.router.scores", lambda scores_TE, rows: in_bfloat16(scores_TE)),
    ),
    expert_fault(
        "bias_in_weights",
        "the weights of the chosen experts are taken from score plus bias",
        WEIGHTS,
        "vllm.cpp, vLLM comment",
        patches=(routing(weigh=_weights_with_bias),),
    ),
    expert_fault(
        "bias_dropped",
        "experts are chosen without the correction bias",
        CHOICE,
        "vllm.cpp",
        weights=each_tensor(".e_score_correction_bias", torch.zeros_like),
    ),
    expert_fault(
        "bias_in_logits",
        "the correction bias is added before the sigmoid",
        CHOICE,
        patches=(routing(choose=_bias_in_logits),),
    ),
    expert_fault(
        "bias_bf16",
        "the correction bias is rounded to bfloat16",
        CHOICE,
        "vllm.cpp",
        weights=each_tensor(".e_score_correction_bias", in_bfloat16),
    ),
    expert_fault(
        "no_norm_topk",
        "the weights of the chosen experts are not normalised",
        WEIGHTS,
        "vllm.cpp",
        config=text_edit(norm_topk_prob=False),
    ),
    expert_fault(
        "norm_over_all",
        "the weights are divided by the sum over all experts",
        WEIGHTS,
        patches=(routing(weigh=_weights_of_all),),
    ),
    expert_fault(
        "norm_floor",
        "the sum of the chosen scores gets an epsilon of 6.1e-5 in place of 1e-20",
        WEIGHTS,
        "ds4",
        visibility="N",
        visible_when="small scores",
        patches=(routing(weigh=weights_with_floor(OTHER_FLOOR)),),
    ),
    expert_fault(
        "router_transposed",
        "the router weight [E, D] is read as [D, E]",
        LOGITS,
        "vllm.cpp",
        weights=each_tensor(".mlp.gate.weight", lambda weight_ED: weight_ED.reshape(weight_ED.T.shape).T),
    ),
    expert_fault(
        "group_stage_present",
        "the group stage of the router runs with a single group",
        CHOICE,
        "vllm.cpp",
        visibility="I",
        visible_when="never",
        patches=(Patch(Router, "_within_best_groups", _one_group_stage),),
    ),
    expert_fault(
        "topk_order",
        "the chosen experts come in ascending order of their scores",
        IDS,
        "vllm.cpp",
        visibility="I",
        visible_when="never: the order of a sum",
        patches=(routing(order=lambda ids_TK: ids_TK.flip(-1)),),
    ),
)
