"""A mixture of experts with 8-bit weights and activations: packed stacks, and the ops in their order.

y = Σ_k w_k expert_k(x) / max(Σ_k w_k, 1e-9)             the slots' weights enter in the second product: `experts_fp8`

The router stays as it is. Gate and up are filled up to multiples of 128 rows each before they lie behind each other, so
that no block of a scale holds rows of both. Without shared experts; activations are bfloat16 (the torch twins take
any dtype: in float64 they are the scheme without any other rounding). Source: vision specification, section 9.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.device import Ops
from optimized.errors import NotSupportedError
from optimized.kernels.experts import rows_per_tile
from optimized.kernels.experts_fp8 import MOST_ROWS
from optimized.kernels.fp8 import quantize_blocks
from optimized.moe import Observed, PackedExperts, Routing

# T tokens  D model  E experts  K chosen experts  F ffn width  X, Y: D, 2F filled up to multiples of 128  G groups


@dataclass(frozen=True)
class Fp8Experts:
    """Router as in `PackedExperts`. gate_up_EYX [gate | up] and down_EDF: float8_e4m3fn with float32 block scales."""

    router_weight_ED: Tensor
    bias_E: Tensor
    gate_up_EYX: Tensor
    gate_up_scale_EGG: Tensor
    down_EXF: Tensor
    down_scale_EGG: Tensor

    @property
    def routed(self) -> int:
        return len(self.gate_up_EYX)

    @property
    def nbytes(self) -> int:
        """Of the experts, scales included."""
        stacks = (self.gate_up_EYX, self.gate_up_scale_EGG, self.down_EXF, self.down_scale_EGG)
        return sum(stack.nbytes for stack in stacks)


def quantize_experts(packed: PackedExperts) -> Fp8Experts:
    """Experts of one layer in 8 bits, an expert at a time. Raises: NotSupportedError for shared experts."""
    if packed.shared:
        raise NotSupportedError(f"8-bit experts: expected no shared expert, found {packed.shared}")
    stacks: list[list[Tensor]] = [[], [], [], []]
    for gate_up_YD, down_DF in zip(packed.gate_up_EXD, packed.down_EDF, strict=True):
        gate, up, down = (quantize_blocks(weight) for weight in (*gate_up_YD.chunk(2), down_DF))
        found = (torch.cat((gate[0], up[0])), torch.cat((gate[1], up[1])), *down)
        for stack, one in zip(stacks, found, strict=True):
            stack.append(one)
    return Fp8Experts(packed.router_weight_ED, packed.bias_E, *(torch.stack(stack) for stack in stacks))


def fp8_moe(
    x_TD: Tensor, experts: Fp8Experts, config: Routing, ops: Ops, observe: bool = False
) -> tuple[Tensor, Observed | None]:
    """[T, D] to [T, D]; what was observed, or None. Nothing waits for the device."""
    k, (_, D) = config.num_experts_per_tok, x_TD.shape
    routes = ops.route(
        x_TD, experts.router_weight_ED, experts.bias_E, k, config.routed_scaling_factor, config.norm_topk_prob, observe
    )
    tile_rows = rows_per_tile(len(x_TD), k, experts.routed, x_TD.dtype, MOST_ROWS)
    plan = ops.sort_rows(routes.expert_ids_TK, experts.routed, tile_rows)
    rows = ops.quantize_rows(x_TD)
    act = ops.fp8_swiglu(*rows, experts.gate_up_EYX, experts.gate_up_scale_EGG, plan, x_TD.dtype)
    rows_TKD = ops.fp8_down(*act, experts.down_EXF, experts.down_scale_EGG, routes.weights_TK, plan, D, x_TD.dtype)
    output_TD = ops.fp8_combine(rows_TKD, routes.weights_TK)
    if routes.logits_TE is None or routes.scores_TE is None or routes.choice_TE is None:
        return output_TD, None
    observed = Observed(
        routes.logits_TE, routes.scores_TE, routes.choice_TE, routes.expert_ids_TK, routes.weights_TK, output_TD, None
    )
    return output_TD, observed
