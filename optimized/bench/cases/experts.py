"""The router, and the experts of a layer: sort, both grouped products, combine, with the shared expert among them.

Tokens choose evenly and at random. The check runs a few tokens through their own experts only, so that no copy of all
experts in float64 is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.bench.case import AbsentPeer, Case, Inputs, Peer, Problem, Sizes, checked_rows, int32, triples
from optimized.bench.floors import Work
from optimized.bench.judge import Triple
from optimized.bench.text_floors import routed_experts
from reference.config import TextConfig

# T tokens  D model  E routed experts  K chosen experts  F ffn width  R rows (token, slot)

# Choices closer than this, in scores of about a half, may be decided by the order of a float32 sum.
CLEAR_MARGIN = 1e-5


def expert_cases(config: TextConfig, sizes: Sizes) -> Iterator[Case]:
    D, E = config.hidden_size, config.n_routed_experts
    one = 3 * D * config.moe_intermediate_size * config.n_shared_experts
    for T in sizes.tokens:
        work = Work(2 * E * D, 2 * T * E * D)
        shape = f"T={T} E={E} K={config.num_experts_per_tok}"
        yield Case("route", shape, T, work, sizes.timing(T), _route(T), ("route",))
    for T in sizes.tokens:
        routed = routed_experts(config, T)
        work = Work(routed.bytes + 2 * one, routed.flops + 2 * T * one)
        uses = ("sort_rows", "expert_swiglu", "expert_down", "combine")
        shape = f"T={T} {E}+{config.n_shared_experts} experts"
        yield Case("experts", shape, T, work, sizes.timing(T), _experts(T), uses)


def _route(T: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        config = given.config
        D, E, K = config.hidden_size, config.n_routed_experts, config.num_experts_per_tok
        x_TD, weight_ED = given.randn(T, D), given.weight(E, D)
        bias_E = given.randn(E, scale=0.1, dtype=torch.float32)
        rest = (weight_ED, bias_E, K, config.routed_scaling_factor, config.norm_topk_prob)
        route, rows = given.op("route"), _clear_rows(x_TD, weight_ED, bias_E, K, checked_rows(T))
        wide_ED = weight_ED.float()

        def plain() -> Tensor:
            scores_TE = F.linear(x_TD.float(), wide_ED).sigmoid()
            chosen_TK = (scores_TE + bias_E).topk(K, dim=-1).indices
            weights_TK = scores_TE.gather(-1, chosen_TK)
            return weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor

        def check(out: Any) -> list[Triple]:
            ids, weights = triples(
                (out.expert_ids_TK[rows], out.weights_TK[rows], *[None] * 4),
                given.twin("route"),
                x_TD[rows],
                *rest,
            )
            return [weights, ids]

        return Problem(
            lambda: route(x_TD, *rest), check, [Peer("torch linear, topk (float32)", plain, lambda out: out[rows])]
        )

    return build


def _clear_rows(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, K: int, rows: list[int]) -> list[int]:
    """Of `rows` those whose K best choices and the next are further apart than float32 sums are uncertain."""
    scores_TE = F.linear(x_TD[rows].double(), weight_ED.double()).sigmoid() + bias_E.double()
    best_TK = scores_TE.topk(min(K + 1, scores_TE.shape[1]), dim=-1).values
    is_clear_T = (best_TK[:, :-1] - best_TK[:, 1:]).min(dim=-1).values > CLEAR_MARGIN
    return [row for row, is_clear in zip(rows, is_clear_T.tolist(), strict=True) if is_clear]


@dataclass(frozen=True)
class _Weights:
    """[gate | up] rows and down matrices of the routed experts, then of the shared ones."""

    gate_up_EXD: Tensor
    down_EDF: Tensor


def _weights(given: Inputs) -> _Weights:
    config = given.config
    D, width = config.hidden_size, config.moe_intermediate_size
    total = config.n_routed_experts + config.n_shared_experts
    return _Weights(given.weight(total, 2 * width, D), given.weight(total, D, width))


def _experts(T: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        from optimized.kernels.experts import rows_per_tile

        config = given.config
        E, K, shared = config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts
        # A layer of the released model is 12 GB: made once.
        weights = given.keep("experts", lambda: _weights(given))
        x_TD = given.randn(T, config.hidden_size)
        ids_TK = int32(given.uniform(T, E).topk(K, dim=-1).indices)
        weights_TK = given.uniform(T, K) + 0.1
        weights_TK /= weights_TK.sum(-1, keepdim=True)
        counts_E = int32(torch.bincount(ids_TK.flatten(), minlength=E))
        sort_rows, swiglu, down, combine = (
            given.op(name) for name in ("sort_rows", "expert_swiglu", "expert_down", "combine")
        )
        tile_rows, rows = rows_per_tile(T, K, E, given.dtype), checked_rows(T)

        def ours() -> Tensor:
            plan = sort_rows(ids_TK, E, tile_rows, shared, counts_E)
            return combine(down(swiglu(x_TD, weights.gate_up_EXD, plan), weights.down_EDF, plan), weights_TK).output_TD

        def check(out_TD: Tensor) -> list[Triple]:
            used, renumbered = ids_TK[rows].unique(return_inverse=True)
            members = torch.cat((used.long(), torch.arange(E, E + shared, device=given.device)))
            few = (x_TD[rows], weights.gate_up_EXD[members], weights.down_EDF[members], weights_TK[rows])
            twin = _twin(given, int32(renumbered), len(used), shared)
            return triples(out_TD[rows], twin, *few)

        return Problem(ours, check, [_grouped_products(x_TD, ids_TK, weights_TK, weights, E, rows)])

    return build


def _twin(given: Inputs, ids_TK: Tensor, experts: int, shared: int) -> Callable[..., Tensor]:
    """The layer from its twins, as a function of what is widened for the truth."""

    def layer(x_TD: Tensor, gate_up_EXD: Tensor, down_EDF: Tensor, weights_TK: Tensor) -> Tensor:
        plan = given.twin("sort_rows")(ids_TK, experts, 16, shared)
        act_RF = given.twin("expert_swiglu")(x_TD, gate_up_EXD, plan)
        return given.twin("combine")(given.twin("expert_down")(act_RF, down_EDF, plan), weights_TK).output_TD

    return layer


def _grouped_products(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: _Weights, E: int, rows: list[int]
) -> Peer | AbsentPeer:
    """torch's grouped product over sorted rows, with the sort, the weighted sum and the shared expert around it."""
    name = "torch grouped_mm, sort, combine, shared"
    if not x_TD.is_cuda:
        return AbsentPeer(name, "needs CUDA")
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    total = len(weights.gate_up_EXD)
    expert_E = torch.arange(E, device=x_TD.device)

    def run() -> Tensor:
        flat_R = ids_TK.flatten()
        order_R = flat_R.argsort(stable=True)
        ends_E = (flat_R[:, None] == expert_E).sum(0).cumsum(0).to(torch.int32)
        gate_up_RX = torch._grouped_mm(x_TD[order_R // K], weights.gate_up_EXD[:E].mT, offs=ends_E)
        gate_RF, up_RF = gate_up_RX.chunk(2, dim=-1)
        down_RD = torch._grouped_mm(F.silu(gate_RF) * up_RF, weights.down_EDF[:E].mT, offs=ends_E)
        rows_RD = torch.empty_like(down_RD).index_copy_(0, order_R, down_RD)
        out_TD = (rows_RD.view(T, K, D) * weights_TK[..., None]).sum(1).to(x_TD.dtype)
        for expert in range(E, total):
            gate_TF, up_TF = F.linear(x_TD, weights.gate_up_EXD[expert]).chunk(2, dim=-1)
            out_TD = out_TD + F.linear(F.silu(gate_TF) * up_TF, weights.down_EDF[expert])
        return out_TD

    return Peer(name, run, lambda out_TD: out_TD[rows])
