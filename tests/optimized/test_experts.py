"""Sorting rows by expert, the grouped products, and the layer made of them, against their twins and the loop."""

import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_good_as_eager, check_against_twin
from torch import Tensor

from optimized import moe as layer
from optimized.device import choose
from optimized.errors import KernelInputError, NotSupportedError
from optimized.kernels import experts
from optimized.kernels.experts_wide import STRETCHED_TILE_ROWS
from optimized.kernels.norm import add_parts_rms_norm_triton
from reference.config import tiny
from reference.errors import CheckpointError
from reference.layers.moe import Moe
from reference.numerics import Numerics

pytest.importorskip("triton")

# T tokens  D model  E experts  K chosen experts  F ffn width

CONFIG = tiny().text


def chosen(T: int, E: int, K: int, how: str = "evenly", seed: int = 0) -> Tensor:
    """Expert ids: distinct ones of each token, drawn evenly, or all tokens alike."""
    if how == "alike":
        return torch.arange(E - 1, E - 1 - K, -1).expand(T, -1).int().to(DEVICE)
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :K]
    if how == "one hot":  # every token has expert 3 first, and never expert 5
        ids_TK = torch.where(ids_TK == 5, 4, torch.where(ids_TK == 3, 5, ids_TK))
        ids_TK[:, 0] = 3
        ids_TK[ids_TK == 5] = 2
    return ids_TK.int().to(DEVICE)


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(DEVICE, dtype)


def poisoned_behind(values: Tensor) -> Tensor:
    """The same values as a view of rows that lie further apart, NaN between them."""
    wide = torch.full(
        (*values.shape[:-1], values.shape[-1] + 8), float("nan"), dtype=values.dtype, device=values.device
    )
    wide[..., : values.shape[-1]] = values
    return wide[..., : values.shape[-1]]


SHAPES = [  # T, E, K, shared
    pytest.param(5, 14, 3, 1, id="tiny"),
    pytest.param(1, 14, 3, 1, id="one-token"),
    pytest.param(1, 1, 1, 0, id="one-of-everything"),
    pytest.param(17, 7, 2, 2, id="tile-and-one"),
    pytest.param(31, 3, 3, 1, id="all-chosen"),
    pytest.param(0, 14, 3, 1, id="empty"),
]


@pytest.mark.parametrize("tile_rows", [16, 20, 32])
@pytest.mark.parametrize(("T", "E", "K", "shared"), SHAPES)
def test_rows_are_sorted(T: int, E: int, K: int, shared: int, tile_rows: int) -> None:
    for how in ("evenly", "alike"):
        ids_TK = chosen(T, E, K, how)
        counts_E = ids_TK.flatten().bincount(minlength=E).int()
        expected = experts.sort_rows_torch(ids_TK, E, tile_rows, shared)
        for counted in (counts_E, None):
            plan = experts.sort_rows_triton(ids_TK, E, tile_rows, shared, counted)
            for actual, wanted in zip(plan[:3], expected[:3], strict=True):
                assert torch.equal(actual, wanted)
            assert plan[3:] == expected[3:]


def test_more_rows_than_a_program_reads_at_once() -> None:
    ids_TK = chosen(1031, 5, 2)
    for actual, wanted in zip(
        experts.sort_rows_triton(ids_TK, 5, 64, 1)[:3], experts.sort_rows_torch(ids_TK, 5, 64, 1)[:3], strict=True
    ):
        assert torch.equal(actual, wanted)


@settings(max_examples=10)
@given(st.integers(0, 40), st.integers(1, 20), st.data(), st.integers(0, 3), st.sampled_from([16, 20, 24, 64]))
def test_tiles_hold_each_row_once(T: int, E: int, data: st.DataObject, shared: int, tile_rows: int) -> None:
    """From the definition, whichever implementation: rows by expert, then by token; tiles of one expert each."""
    K = data.draw(st.integers(1, E))
    ids_TK = chosen(T, E, K, data.draw(st.sampled_from(["evenly", "alike"])))
    plan = experts.sort_rows_triton(ids_TK, E, tile_rows, shared)
    slots = K + shared
    all_ids = [[*row, *range(E, E + shared)] for row in ids_TK.tolist()]
    pairs = sorted((expert, t * slots + s) for t, row in enumerate(all_ids) for s, expert in enumerate(row))
    assert plan.slot_R.tolist() == [slot for _, slot in pairs]
    covered = [
        (expert, row) for expert, first, end in plan.tile_3M.T.tolist() if expert >= 0 for row in range(first, end)
    ]
    assert covered == [(expert, row) for row, (expert, _) in enumerate(pairs)]
    assert all(end - first <= tile_rows for _, first, end in plan.tile_3M.T.tolist())


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        pytest.param(128, [128], id="no-rest"),
        pytest.param(129, [129], id="a-row-more"),
        pytest.param(160, [160], id="stretched"),
        pytest.param(161, [128, 33], id="too-much-for-one"),
        pytest.param(288, [160, 128], id="one-of-two"),
        pytest.param(289, [160, 129], id="both"),
        pytest.param(321, [128, 128, 65], id="a-third"),
    ],
)
def test_no_more_tiles_are_stretched_than_it_takes(rows: int, sizes: list[int]) -> None:
    ids_T1 = torch.full((rows, 1), 1, dtype=torch.int32, device=DEVICE)
    plan = experts.sort_rows_triton(ids_T1, 3, STRETCHED_TILE_ROWS)
    assert [end - first for expert, first, end in plan.tile_3M.T.tolist() if expert >= 0] == sizes
    assert torch.equal(plan.tile_3M, experts.sort_rows_torch(ids_T1, 3, STRETCHED_TILE_ROWS).tile_3M)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["evenly", "one hot", "alike"])
@pytest.mark.parametrize(
    ("T", "D", "F", "E", "K", "shared"),
    [
        pytest.param(5, 96, 28, 14, 3, 1, id="tiny"),
        pytest.param(1, 7, 5, 6, 1, 0, id="one-token"),
        pytest.param(19, 131, 33, 6, 2, 2, id="primes-and-tile-and-one"),
        pytest.param(0, 96, 28, 14, 3, 1, id="empty"),
    ],
)
def test_products_as_good_as_eager(
    T: int, D: int, F: int, E: int, K: int, shared: int, how: str, dtype: torch.dtype
) -> None:
    plan = experts.sort_rows_torch(chosen(T, E, K, how), E, 16, shared)
    x_TD = poisoned_behind(normal(T, D, dtype=dtype, seed=1) * D**0.5)
    gate_up_EXD = poisoned_behind(normal(E + shared, 2 * F, D, dtype=dtype, seed=2))
    down_EDF = poisoned_behind(normal(E + shared, D, F, dtype=dtype, seed=3))
    weights_TK = torch.rand(T, K, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    check_against_twin(experts.expert_swiglu_triton, experts.expert_swiglu_torch, x_TD, gate_up_EXD, plan)
    act_RF = experts.expert_swiglu_torch(x_TD, gate_up_EXD, plan)
    check_against_twin(experts.expert_down_triton, experts.expert_down_torch, poisoned_behind(act_RF), down_EDF, plan)
    rows_TSD = poisoned_behind(experts.expert_down_torch(act_RF, down_EDF, plan))
    check_against_twin(experts.combine_triton, experts.combine_torch, rows_TSD, weights_TK, observe=True)
    assert experts.combine_triton(rows_TSD, weights_TK)[1:] == (None, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stretched_tiles_as_good_as_eager(dtype: torch.dtype) -> None:
    """Rows that lie apart, lanes in no multiples of anything; experts of one tile, of stretched ones and of none."""
    T, D, F, E, shared = 43, 131, 33, 6, 1
    plan = experts.sort_rows_torch(chosen(T, E, 2, "one hot"), E, 48, shared)
    sizes = {end - first for _, first, end in plan.tile_3M.T.tolist()}
    assert 43 in sizes
    assert min(sizes - {0}) < 32
    x_TD = poisoned_behind(normal(T, D, dtype=dtype, seed=1) * D**0.5)
    gate_up_EXD = poisoned_behind(normal(E + shared, 2 * F, D, dtype=dtype, seed=2))
    down_EDF = poisoned_behind(normal(E + shared, D, F, dtype=dtype, seed=3))
    check_against_twin(experts.expert_swiglu_triton, experts.expert_swiglu_torch, x_TD, gate_up_EXD, plan)
    act_RF = poisoned_behind(experts.expert_swiglu_torch(x_TD, gate_up_EXD, plan))
    check_against_twin(experts.expert_down_triton, experts.expert_down_torch, act_RF, down_EDF, plan)


@pytest.mark.parametrize("tile_rows", [16, 32, 48, 128])
@pytest.mark.parametrize("rows", [15, 17, 33, 64, 65])
def test_an_expert_of_about_a_tile(rows: int, tile_rows: int) -> None:
    """All rows of one expert among experts without rows; tiles of 32 and 16, and half of 128."""
    x_TD = normal(rows, 40, dtype=torch.bfloat16, seed=1) * 6
    gate_up_EXD = normal(4, 18, 40, dtype=torch.bfloat16, seed=2)
    down_EDF = normal(4, 40, 9, dtype=torch.bfloat16, seed=3)
    ids_TK = torch.full((rows, 1), 2, dtype=torch.int32, device=DEVICE)
    plan = experts.sort_rows_triton(ids_TK, 4, tile_rows)
    check_against_twin(experts.expert_swiglu_triton, experts.expert_swiglu_torch, x_TD, gate_up_EXD, plan)
    act_RF = experts.expert_swiglu_triton(x_TD, gate_up_EXD, plan)
    check_against_twin(experts.expert_down_triton, experts.expert_down_torch, act_RF, down_EDF, plan)
    assert torch.equal(act_RF, experts.expert_swiglu_triton(x_TD, gate_up_EXD, plan))
    rows_TSD = experts.expert_down_triton(act_RF, down_EDF, plan)
    assert torch.equal(rows_TSD, experts.expert_down_triton(act_RF, down_EDF, plan))


@pytest.mark.parametrize(
    ("T", "tile_rows"), [(1, 16), (64, 16), (256, 32), (1024, 64), (2048, 128), (4096, 160), (16384, 128)]
)
def test_a_tile_holds_most_experts(T: int, tile_rows: int) -> None:
    assert experts.rows_per_tile(T, 8, 256, torch.bfloat16) == tile_rows
    assert experts.rows_per_tile(T, 8, 256, torch.bfloat16, 128) == min(tile_rows, 128)


def test_a_bad_token_stays_alone() -> None:
    """NaN in one token's row, and in an expert that nobody chose."""
    T, D, F, E, K = 4, 24, 10, 5, 2
    ids_TK = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]], dtype=torch.int32, device=DEVICE)
    x_TD = normal(T, D, dtype=torch.bfloat16, seed=1)
    gate_up_EXD, down_EDF = (
        normal(E, 2 * F, D, dtype=torch.bfloat16, seed=2),
        normal(E, D, F, dtype=torch.bfloat16, seed=3),
    )
    gate_up_EXD[3:], down_EDF[3:] = float("nan"), float("nan")
    weights_TK = torch.full((T, K), 0.5, device=DEVICE)

    def output(x_TD: Tensor) -> Tensor:
        plan = experts.sort_rows_triton(ids_TK, E, 16)
        rows_TSD = experts.expert_down_triton(experts.expert_swiglu_triton(x_TD, gate_up_EXD, plan), down_EDF, plan)
        return experts.combine_triton(rows_TSD, weights_TK).output_TD

    good = output(x_TD)
    assert good.isfinite().all()
    bad_x_TD = x_TD.clone()
    bad_x_TD[2] = float("nan")
    bad = output(bad_x_TD)
    assert bad[2].isnan().all()
    assert torch.equal(bad[[0, 1, 3]], good[[0, 1, 3]])


def random_layer(config: object, dtype: torch.dtype) -> Moe:
    module = Moe(config, Numerics())  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / max(1, parameter.shape[-1]) ** 0.5
    return module.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_packs_what_the_layer_holds_and_gives_it_back(shared: int) -> None:
    config = dataclasses.replace(CONFIG, n_shared_experts=shared)
    state = random_layer(config, torch.bfloat16).state_dict()
    if not shared:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("shared_experts")}
    packed = layer.pack_experts(iter(state.items()), config, DEVICE)
    assert packed.shared == shared
    assert packed.bias_E.dtype == torch.float32
    unpacked = layer.unpack_experts(packed)
    assert unpacked.keys() == state.keys()
    for name, tensor in unpacked.items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor.cpu(), state[name])


def test_packing_names_every_problem() -> None:
    state = random_layer(CONFIG, torch.bfloat16).state_dict()

    def damaged() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in state.items():
            if name == "gate.e_score_correction_bias":
                yield name, tensor.bfloat16()
            elif name == "experts.3.up_proj.weight":
                yield name, tensor[:, :-1]
            elif name != "experts.5.down_proj.weight":
                yield name, tensor
        yield "gate.weight", state["gate.weight"]
        yield "experts.14.up_proj.weight", state["gate.weight"]

    with pytest.raises(CheckpointError) as raised:
        layer.pack_experts(damaged(), CONFIG, DEVICE)
    for problem in (
        "gate.e_score_correction_bias: expected torch.float32 (14,), found torch.bfloat16 (14,)",
        "experts.3.up_proj.weight: expected torch.bfloat16 (28, 96), found torch.bfloat16 (28, 95)",
        "experts.5.down_proj.weight: missing",
        "gate.weight: given twice",
        "experts.14.up_proj.weight: not a tensor of this layer",
    ):
        assert problem in str(raised.value)
    with pytest.raises(NotSupportedError, match="n_group = 2"):
        layer.pack_experts({}, dataclasses.replace(CONFIG, n_group=2), DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "shared"), [(5, 1), (1, 2)])
def test_layer_as_good_as_its_twin_and_equal_to_the_reference(T: int, shared: int, dtype: torch.dtype) -> None:
    config = dataclasses.replace(CONFIG, n_shared_experts=shared)
    module = random_layer(config, dtype)
    x_TD = normal(T, config.hidden_size, dtype=dtype, seed=6) * config.hidden_size**0.5
    packed = layer.pack_experts(module.state_dict(), config, DEVICE, dtype)
    wide_module = random_layer(config, torch.float32).to(torch.float64)
    wide_module.load_state_dict({name: tensor.double() for name, tensor in module.state_dict().items()})
    wide = layer.pack_experts(wide_module.state_dict(), config, DEVICE, torch.float64)
    run = functools.partial(layer.moe, config=config)

    truth, truth_observed = run(x_TD.double(), wide, ops=choose(DEVICE, "torch"), observe=True)
    assert torch.allclose(truth.cpu(), wide_module(x_TD.double().cpu()), rtol=1e-12, atol=1e-12)
    eager, eager_observed = run(x_TD, packed, ops=choose(DEVICE, "torch"), observe=True)
    out, observed = run(x_TD, packed, ops=choose(DEVICE, "triton"), observe=True)
    assert_as_good_as_eager(out, eager, truth)
    assert observed is not None
    assert eager_observed is not None
    assert truth_observed is not None
    for actual, expected, true in zip(observed, eager_observed, truth_observed, strict=True):
        if actual.is_floating_point():
            assert_as_good_as_eager(actual, expected, true)
        else:
            assert torch.equal(actual, expected)
    unobserved, nothing = run(x_TD, packed, ops=choose(DEVICE, "triton"))
    assert nothing is None
    assert torch.equal(unobserved, out)
    parts, _ = layer.moe_parts(x_TD, packed, config, choose(DEVICE, "triton"))
    assert parts.parts_STX.shape == (config.num_experts_per_tok + shared, T, config.hidden_size)
    sum_TD, _ = add_parts_rms_norm_triton(None, parts.parts_STX, x_TD[0], 1e-5, parts.weights_TK)
    assert torch.equal(sum_TD, out)


def test_refuses() -> None:
    x_TD = normal(3, 24, dtype=torch.bfloat16, seed=1)
    plan = experts.sort_rows_torch(chosen(3, 5, 2), 5, 16)
    with pytest.raises(KernelInputError, match=r"gate and up weights \(5, any, 24\), found \(4, 20, 24\)"):
        experts.expert_swiglu_triton(x_TD, normal(4, 20, 24, dtype=torch.bfloat16, seed=2), plan)
    uneven_EXD = normal(10, 20, 24, dtype=torch.bfloat16, seed=2)[::2]
    with pytest.raises(KernelInputError, match="gate and up weights with evenly spaced rows"):
        experts.expert_swiglu_triton(x_TD, uneven_EXD, plan)
    with pytest.raises(KernelInputError, match="found 20 rows and 2 tokens"):
        experts.expert_swiglu_triton(x_TD[:2], normal(5, 20, 24, dtype=torch.bfloat16, seed=2), plan)
    with pytest.raises(KernelInputError, match=r"counts \(5\), found \(4,\)"):
        experts.sort_rows_triton(chosen(3, 5, 2), 5, 16, 0, torch.zeros(4, dtype=torch.int32, device=DEVICE))
    with pytest.raises(KernelInputError, match=r"expert ids in torch\.int32, found torch\.int64"):
        experts.sort_rows_triton(chosen(3, 5, 2).long(), 5, 16)
    with pytest.raises(KernelInputError, match="a row for each of 2 expert weights of a token, found 1"):
        experts.combine_triton(x_TD.new_zeros(3, 1, 8), torch.ones(3, 2, device=DEVICE))
