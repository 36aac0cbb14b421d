"""The feed-forward part of a vision block: dense SwiGLU, or a mixture of experts without a shared one.

dense   fc2(silu(fc1 x) · fc3 x)                             fc1 is the gate, fc3 up, fc2 down
score   = sigmoid(x W_gateᵀ)                                 float32
chosen  = the K experts with the largest score + bias        (bias for the choice only; ties to the lower id)
weight  = score of the chosen / (their sum + 1e-20)
y       = Σ weight · expert(x)

The number of experts grows from block to block (the pyramid); K is the config's `capacity_factor`, which limits nothing
but how many experts a patch chooses, and at most all of them.
Source: vision specification, sections 5 and 6.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.config import VisionConfig
from reference.numerics import at_least_float32
from reference.probe import probe, scope
from reference.vision_numerics import VisionNumerics

# T patches  D tower width  F ffn width  E experts  K chosen experts

# Second division of the engines that divide the sum of the experts by the sum of their weights.
DIVIDED_FLOOR = 1e-9


class VisionMlp(nn.Module):
    """[T, D] to [T, D] through F lanes: a dense block, or one expert."""

    def __init__(self, embed_dim: int, intermediate_size: int, numerics: VisionNumerics):
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, intermediate_size, bias=False)
        self.fc2 = nn.Linear(intermediate_size, embed_dim, bias=False)
        self.fc3 = nn.Linear(embed_dim, intermediate_size, bias=False)
        self._activated = _multiply_then_round if numerics.swiglu_rounding == "once" else _round_then_multiply

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.fc2(self._activated(self.fc1(x_TD), self.fc3(x_TD)))


def _multiply_then_round(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    wide = at_least_float32(gate_TF.dtype)
    return (F.silu(gate_TF.to(wide)) * up_TF.to(wide)).to(gate_TF.dtype)


def _round_then_multiply(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    return F.silu(gate_TF) * up_TF


class VisionMoe(nn.Module):
    """[T, D] to [T, D]. `experts` of this block; the bias stays at least float32 whatever the model is cast to."""

    def __init__(self, config: VisionConfig, experts: int, numerics: VisionNumerics):
        super().__init__()
        D = config.embed_dim
        self.chosen = min(config.num_experts_per_tok, experts)
        self.gate_weight = nn.Parameter(torch.zeros(experts, D))
        # Also under a bfloat16 default dtype; a later cast passes through `_apply`.
        bias = torch.zeros(experts, dtype=at_least_float32(torch.get_default_dtype()))
        self.router_bias = nn.Parameter(bias, requires_grad=False)
        self.experts = nn.ModuleList(VisionMlp(D, config.moe_intermediate_size, numerics) for _ in range(experts))
        self.weight_floor = numerics.weight_floor
        self._bias = _as_stored if numerics.router_bias == "float32" else _rounded
        self._combined = {"float32": _in_float32, "activation": _in_activation, "divided": _divided}[
            numerics.expert_combine
        ]

    def forward(self, x_TD: Tensor) -> Tensor:
        ids_TK, weights_TK = self.route(x_TD)
        return self._combined(self.experts, x_TD, ids_TK, weights_TK)

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns expert_ids_TK, int64 by descending choice, and weights_TK in that order, at least float32."""
        # float32: in bfloat16 scores tie and other experts are chosen, the largest drift that ports of it report.
        wide = at_least_float32(x_TD.dtype)
        with scope("router"):
            logits_TE = probe("logits", F.linear(x_TD.to(wide), self.gate_weight.to(wide)))
            scores_TE = probe("scores", logits_TE.sigmoid())
            choice_TE = probe("choice", scores_TE + self._bias(self.router_bias))
            ids_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen]
            ids_TK = probe("expert_ids", ids_TK)
            weights_TK = scores_TE.gather(-1, ids_TK)
            return ids_TK, probe("weights", weights_TK / (weights_TK.sum(-1, keepdim=True) + self.weight_floor))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`module.to(bfloat16)` and its like pass through here."""
        before = self.router_bias.data
        super()._apply(fn, recurse)
        after = self.router_bias.data
        if after.dtype != at_least_float32(after.dtype):
            self.router_bias.data = before.to(after.device, at_least_float32(after.dtype))
        return self


def _as_stored(bias_E: Tensor) -> Tensor:
    return bias_E


def _rounded(bias_E: Tensor) -> Tensor:
    return bias_E.to(torch.bfloat16).to(bias_E.dtype)


def _summed(
    experts: nn.ModuleList, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, accumulated: torch.dtype
) -> Tensor:
    """Σ weight · expert(x) in the order of the experts' ids; each product and each sum in `accumulated`."""
    sum_TD = torch.zeros_like(x_TD, dtype=accumulated)
    for expert_id, expert in enumerate(experts):
        rows, slots = (ids_TK == expert_id).nonzero(as_tuple=True)
        if len(rows):
            weighted = expert(x_TD[rows]) * weights_TK[rows, slots, None]
            sum_TD = sum_TD.index_add(0, rows, weighted.to(accumulated))
    return sum_TD


def _in_float32(experts: nn.ModuleList, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    # Two outputs of 250 may add up to 5: a rounding of each in bfloat16 would be a tenth of their sum.
    return _summed(experts, x_TD, ids_TK, weights_TK, at_least_float32(x_TD.dtype)).to(x_TD.dtype)


def _in_activation(experts: nn.ModuleList, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    return _summed(experts, x_TD, ids_TK, weights_TK, x_TD.dtype)


def _divided(experts: nn.ModuleList, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """With rounded weights, whose sum need not be 1: the division puts that right."""
    weights_TK = weights_TK.to(x_TD.dtype)
    return _summed(experts, x_TD, ids_TK, weights_TK, x_TD.dtype) / (weights_TK.sum(-1, keepdim=True) + DIVIDED_FLOOR)
