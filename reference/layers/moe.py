"""Mixture of experts: a sigmoid router, K of E experts for each token, and one shared expert for all.

score  = sigmoid(x W_routerᵀ)                                    float32
chosen = the K experts with the largest score + correction bias  (bias for the choice only; ties to the lower id)
weight = score of the chosen / (their sum + 1e-20) · routed_scaling_factor
y      = Σ weight · expert(x) + shared(x)

Source: text_model specification, section 11.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.config import TextConfig
from reference.layers.mlp import Mlp
from reference.numerics import Numerics, at_least_float32
from reference.probe import probe, scope

# T tokens  D model  E experts  K chosen experts  G groups


class Router(nn.Module):
    """The correction bias stays at least float32 whatever the model is cast to: 238 values near 7 are 9 in bfloat16."""

    def __init__(self, config: TextConfig, numerics: Numerics):
        super().__init__()
        self.config = config
        self.router_dtype = numerics.router_dtype
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        # Also under a bfloat16 default dtype; a later cast passes through `_apply`.
        bias = torch.zeros(config.n_routed_experts, dtype=at_least_float32(torch.get_default_dtype()))
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns expert_ids_TK, int64 by descending choice, and weights_TK in that order, at least float32."""
        with scope("router"):
            logits_TE = probe("logits", self._logits(x_TD))
            scores_TE = probe("scores", logits_TE.to(at_least_float32(logits_TE.dtype)).sigmoid())
            choice_TE = probe("choice", self._within_best_groups(scores_TE + self.e_score_correction_bias))
            ids_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, : self.config.num_experts_per_tok]
            ids_TK = probe("expert_ids", ids_TK)
            weights_TK = scores_TE.gather(-1, ids_TK)
            if self.config.norm_topk_prob:
                weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
            return ids_TK, probe("weights", weights_TK * self.config.routed_scaling_factor)

    def _logits(self, x_TD: Tensor) -> Tensor:
        # float32: rounding the logits to bfloat16 moves a score by up to 5e-3, the usual gap between 8th and 9th.
        dtype = at_least_float32(x_TD.dtype) if self.router_dtype == "float32" else x_TD.dtype
        return F.linear(x_TD.to(dtype), self.weight.to(dtype))

    def _within_best_groups(self, choice_TE: Tensor) -> Tensor:
        """-inf outside the `topk_group` groups whose two best experts add up to most. One group: unchanged."""
        groups = self.config.n_group
        if groups == 1:
            return choice_TE
        by_group_TGE = choice_TE.unflatten(-1, (groups, -1))
        merit_TG = by_group_TGE.topk(2, dim=-1).values.sum(-1)
        best_TG = merit_TG.sort(dim=-1, descending=True, stable=True).indices[:, : self.config.topk_group]
        kept_TG = torch.zeros_like(merit_TG, dtype=torch.bool).scatter(-1, best_TG, True)
        return by_group_TGE.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`module.to(bfloat16)` and its like pass through here."""
        before = self.e_score_correction_bias.data
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias.data
        if after.dtype != at_least_float32(after.dtype):
            self.e_score_correction_bias.data = before.to(after.device, at_least_float32(after.dtype))
        return self


class Moe(nn.Module):
    """Routed experts plus the shared expert, [T, D] to [T, D]. The experts are a loop, in the order of their ids."""

    def __init__(self, config: TextConfig, numerics: Numerics):
        super().__init__()
        D, F_ = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config, numerics)
        self.experts = nn.ModuleList(Mlp(D, F_, numerics) for _ in range(config.n_routed_experts))
        self.shared_experts = Mlp(D, config.shared_intermediate_size, numerics)
        self.accumulation = numerics.expert_accumulation

    def forward(self, x_TD: Tensor) -> Tensor:
        ids_TK, weights_TK = self.gate(x_TD)
        routed_TD = probe("routed", self._routed(x_TD, ids_TK, weights_TK))
        shared_TD = probe("shared", self.shared_experts(x_TD))
        return routed_TD + shared_TD

    def _routed(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        # A sum over K products in bfloat16 would round K times; float32 rounds once, at the end.
        dtype = at_least_float32(x_TD.dtype) if self.accumulation == "float32" else x_TD.dtype
        sum_TD = torch.zeros_like(x_TD, dtype=dtype)
        for expert_id, expert in enumerate(self.experts):
            rows, slots = (ids_TK == expert_id).nonzero(as_tuple=True)
            if len(rows):
                weighted = expert(x_TD[rows]) * weights_TK[rows, slots, None]
                sum_TD = sum_TD.index_add(0, rows, weighted.to(dtype))
        return sum_TD.to(x_TD.dtype)
