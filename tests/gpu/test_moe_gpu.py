"""Router, grouped experts and the layer at released geometry, compiled: against twins, and captured in a graph."""

import dataclasses

import pytest
import torch
from kernel_checks import assert_as_good_as_eager, check_against_twin
from torch import Tensor

from optimized import moe as layer
from optimized.device import choose
from optimized.kernels import experts
from optimized.kernels.experts_wide import STRETCHED_TILE_ROWS
from optimized.kernels.router import route_torch, route_triton
from reference.config import TextConfig, released

# T tokens  D model  E experts  K chosen experts  F ffn width

RELEASED = released().text
OPS = choose("cuda", "triton") if torch.cuda.is_available() else None
D, F, K = RELEASED.hidden_size, RELEASED.moe_intermediate_size, RELEASED.num_experts_per_tok


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype) * scale


def packed_layer(config: TextConfig) -> layer.PackedExperts:
    E, total = config.n_routed_experts, config.n_routed_experts + config.n_shared_experts
    return layer.PackedExperts(
        normal(E, D, seed=1, scale=D**-0.5),
        normal(E, dtype=torch.float32, seed=2, scale=0.1),
        normal(total, 2 * F, D, seed=3, scale=D**-0.5),
        normal(total, D, F, seed=4, scale=F**-0.5),
        E,
    )


def with_experts(E: int) -> TextConfig:
    return dataclasses.replace(RELEASED, n_routed_experts=E)


@pytest.mark.parametrize("T", [1, 16, 64, 300, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router(T: int, dtype: torch.dtype) -> None:
    inputs = (normal(T, D, dtype=dtype, seed=T + 10), normal(256, D, dtype=dtype, seed=1, scale=D**-0.5))
    bias_E = normal(256, dtype=torch.float32, seed=2, scale=0.1)
    truth = route_torch(inputs[0].double(), inputs[1].double(), bias_E.double(), K, 1.0, True, observe=True)
    # A choice whose margin is within float32 noise may fall either way: none of these rows has one.
    assert truth.choice_TE is not None
    best_TX = truth.choice_TE.sort(dim=-1, descending=True).values[:, : K + 1]
    clear_T = (best_TX[:, :-1] - best_TX[:, 1:]).amin(-1) > 1e-6
    assert clear_T.float().mean() > 0.9
    inputs = (inputs[0][clear_T], inputs[1])
    check_against_twin(route_triton, route_torch, *inputs, bias_E, k=K, scaling=1.0, normalize=True, observe=True)


@pytest.mark.parametrize("T", [1, 16, 64, 300, 1031, 4096, 16384])
def test_rows_are_sorted(T: int) -> None:
    ids_TK = normal(T, 256, dtype=torch.float32, seed=T).topk(K).indices.int()
    hot_TK = torch.arange(K, device="cuda").expand(T, -1).int()
    for ids in (ids_TK, hot_TK):
        tile_rows = experts.rows_per_tile(T, K, 256, torch.bfloat16)
        plan, expected = (f(ids, 256, tile_rows, 1) for f in (experts.sort_rows_triton, experts.sort_rows_torch))
        for actual, wanted in zip(plan[:3], expected[:3], strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize("T", [1, 16, 64, 300, 1031, 4096])
def test_layer(T: int) -> None:
    """With fewer experts than released where that makes the rows of an expert many."""
    config = with_experts(32)
    packed, x_TD = packed_layer(config), normal(T, D, seed=T + 10)
    out_TD, observed = layer.moe(x_TD, packed, config, OPS, observe=True)
    assert observed is not None
    for tile_rows in {experts.rows_per_tile(T, K, 32, torch.bfloat16), 16, 64, 128, STRETCHED_TILE_ROWS}:
        plan = experts.sort_rows_triton(observed.expert_ids_TK, 32, tile_rows, 1)
        act_RF = experts.expert_swiglu_torch(x_TD, packed.gate_up_EXD, plan)
        act_truth_RF = experts.expert_swiglu_torch(x_TD.double(), packed.gate_up_EXD, plan)
        assert_as_good_as_eager(experts.expert_swiglu_triton(x_TD, packed.gate_up_EXD, plan), act_RF, act_truth_RF)
        rows_TSD = experts.expert_down_torch(act_RF, packed.down_EDF, plan)
        rows_truth_TSD = experts.expert_down_torch(act_RF.double(), packed.down_EDF, plan)
        assert_as_good_as_eager(experts.expert_down_triton(act_RF, packed.down_EDF, plan), rows_TSD, rows_truth_TSD)
    check_against_twin(experts.combine_triton, experts.combine_torch, rows_TSD, observed.weights_TK, observe=True)
    again_TD, nothing = layer.moe(x_TD, packed, config, OPS)
    assert nothing is None
    assert torch.equal(again_TD, out_TD)


def test_captured_layer_follows_its_input() -> None:
    """Replays choose other experts than the capture did; no launch depends on how many rows an expert has."""
    config = with_experts(32)
    packed, T = packed_layer(config), 16
    x_TD = normal(T, D, seed=0)
    for _ in range(2):  # compiles before the capture
        layer.moe(x_TD, packed, config, OPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TD, _ = layer.moe(x_TD, packed, config, OPS)
    for seed in range(1, 5):
        x_TD.copy_(normal(1, D, seed=seed).expand(T, -1) if seed == 3 else normal(T, D, seed=seed))
        graph.replay()
        expected_TD, _ = layer.moe(x_TD.clone(), packed, config, OPS)
        assert torch.equal(out_TD, expected_TD)
