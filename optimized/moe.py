"""The mixture-of-experts layer: packed weights, and the ops in their order.

y = Σ_k weight_k expert_k(x) + shared(x)

The shared expert, of width n_shared_experts · F, is n_shared_experts experts of width F behind the routed ones: the
rows of its gate and up matrices and the columns of its down matrix are cut into pieces, whose outputs add up.
Source: text_model specification, section 11.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from optimized.device import Ops
from optimized.errors import NotSupportedError
from optimized.kernels.experts import rows_per_tile
from optimized.kernels.parts import Parts
from reference.config import TextConfig
from reference.errors import CheckpointError

# T tokens  D model  E experts with the shared ones  K chosen experts  F ffn width  X = 2F


class Routing(Protocol):
    """How many experts a token chooses, and what their weights add up to: the fields of `TextConfig`."""

    @property
    def num_experts_per_tok(self) -> int: ...

    @property
    def routed_scaling_factor(self) -> float: ...

    @property
    def norm_topk_prob(self) -> bool: ...


@dataclass(frozen=True)
class PackedExperts:
    """Weights of one layer. `gate_up_EXD` rows are [gate F | up F]; experts from `routed` on are the shared ones.

    The correction bias is float32 whatever the weights are (float64 in a float64 model).
    """

    router_weight_ED: Tensor
    bias_E: Tensor
    gate_up_EXD: Tensor
    down_EDF: Tensor
    routed: int

    @property
    def shared(self) -> int:
        return len(self.gate_up_EXD) - self.routed


class Observed(NamedTuple):
    """What a run is watched by; names as in the probe schema under `ffn.`. `shared_TD` is None without shared experts.

    Logits, scores, choice and weights are at least float32, expert ids int32, the two sums in the dtype of the output.
    """

    logits_TE: Tensor
    scores_TE: Tensor
    choice_TE: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    routed_TD: Tensor
    shared_TD: Tensor | None


def pack_experts(
    state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: TextConfig,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
) -> PackedExperts:
    """Copy the tensors of one layer's `mlp.` into stacks of `dtype` on `device`, one at a time, in any order.

    Names: `gate.weight`, `gate.e_score_correction_bias`, `experts.{e}.{gate,up,down}_proj.weight`,
    `shared_experts.{gate,up,down}_proj.weight`. An iterator may drop each tensor once it is read, so that no more than
    the stacks and one tensor are held. Nothing is cast.
    Raises: CheckpointError naming every tensor that is missing, unknown, given twice, or of another shape or dtype;
    NotSupportedError for grouped routing.
    """
    if config.n_group != 1:
        raise NotSupportedError(
            f"the router chooses among all experts: expected n_group = 1, found n_group = {config.n_group}"
        )
    packed = empty_experts(config, device, dtype)
    places = expert_places(packed)
    missing = dict.fromkeys(places)
    problems = []
    for name, tensor in state.items() if isinstance(state, Mapping) else state:
        if name not in missing:
            problems.append(f"{name}: {'given twice' if name in places else 'not a tensor of this layer'}")
            continue
        del missing[name]
        place = places[name]
        if tensor.dtype != place.pieces[0].dtype or tensor.shape != place.shape:
            problems.append(
                f"{name}: expected {place.pieces[0].dtype} {tuple(place.shape)}, "
                f"found {tensor.dtype} {tuple(tensor.shape)}"
            )
            continue
        for piece, values in zip(place.pieces, tensor.chunk(len(place.pieces), place.dim), strict=True):
            piece.copy_(values)
    problems += [f"{name}: missing" for name in missing]
    if problems:
        raise CheckpointError("expert weights: " + "; ".join(problems))
    return packed


def empty_experts(config: TextConfig, device: torch.device | str, dtype: torch.dtype) -> PackedExperts:
    """Stacks without values. The correction bias stays at least float32: 238 values near 7 are 9 in bfloat16."""
    E, D, F = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    total = E + config.n_shared_experts
    return PackedExperts(
        router_weight_ED=torch.empty(E, D, dtype=dtype, device=device),
        bias_E=torch.empty(E, dtype=torch.promote_types(dtype, torch.float32), device=device),
        gate_up_EXD=torch.empty(total, 2 * F, D, dtype=dtype, device=device),
        down_EDF=torch.empty(total, D, F, dtype=dtype, device=device),
        routed=E,
    )


def unpack_experts(packed: PackedExperts) -> dict[str, Tensor]:
    """The tensors that `pack_experts` read, bit for bit; views of the stacks where a tensor lies in one piece."""
    return {
        name: place.pieces[0] if len(place.pieces) == 1 else torch.cat(place.pieces, place.dim)
        for name, place in expert_places(packed).items()
    }


class Place(NamedTuple):
    """Where a checkpoint tensor goes: cut into equal pieces along `dim`, each a view of a stack."""

    pieces: list[Tensor]
    dim: int

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.pieces[0].shape)
        sizes[self.dim] *= len(self.pieces)
        return torch.Size(sizes)


def expert_places(packed: PackedExperts) -> dict[str, Place]:
    E, F = packed.routed, packed.down_EDF.shape[-1]
    places = {
        "gate.weight": Place([packed.router_weight_ED], 0),
        "gate.e_score_correction_bias": Place([packed.bias_E], 0),
    }
    owners = {f"experts.{e}": [e] for e in range(E)}
    if packed.shared:
        owners["shared_experts"] = list(range(E, E + packed.shared))
    for owner, members in owners.items():
        places[f"{owner}.gate_proj.weight"] = Place([packed.gate_up_EXD[e, :F] for e in members], 0)
        places[f"{owner}.up_proj.weight"] = Place([packed.gate_up_EXD[e, F:] for e in members], 0)
        places[f"{owner}.down_proj.weight"] = Place([packed.down_EDF[e] for e in members], 1)
    return places


def moe(
    x_TD: Tensor, packed: PackedExperts, config: Routing, ops: Ops, observe: bool = False
) -> tuple[Tensor, Observed | None]:
    """[T, D] to [T, D]; what was observed, or None. None of the launches waits for the device."""
    parts, observed = moe_parts(x_TD, packed, config, ops, observe)
    if parts.weights_TK is None:
        return parts.parts_STX[0], observed
    return ops.combine(parts.parts_STX.transpose(0, 1), parts.weights_TK).output_TD, observed


def moe_parts(
    x_TD: Tensor, packed: PackedExperts, config: Routing, ops: Ops, observe: bool = False
) -> tuple[Parts, Observed | None]:
    """As `moe`, but unobserved the outputs of a token's experts stay apart, for the next norm to add up."""
    k = config.num_experts_per_tok
    routes = ops.route(
        x_TD, packed.router_weight_ED, packed.bias_E, k, config.routed_scaling_factor, config.norm_topk_prob, observe
    )
    tile_rows = rows_per_tile(len(x_TD), k, packed.routed, x_TD.dtype)
    plan = ops.sort_rows(routes.expert_ids_TK, packed.routed, tile_rows, packed.shared, routes.counts_E)
    act_RF = ops.expert_swiglu(x_TD, packed.gate_up_EXD, plan)
    rows_TSD = ops.expert_down(act_RF, packed.down_EDF, plan)
    if routes.logits_TE is None or routes.scores_TE is None or routes.choice_TE is None:
        return Parts(rows_TSD.transpose(0, 1), routes.weights_TK), None
    combined = ops.combine(rows_TSD, routes.weights_TK, observe)
    observed = Observed(
        routes.logits_TE,
        routes.scores_TE,
        routes.choice_TE,
        routes.expert_ids_TK,
        routes.weights_TK,
        combined.routed_TD,
        combined.shared_TD,
    )
    return Parts(combined.output_TD[None]), observed
