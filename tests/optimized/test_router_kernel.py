"""The router's kernels against their twin: logits, choice, ties, and what a bad row may not do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, check_against_twin
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.router import route_torch, route_triton, slices

pytest.importorskip("triton")

# T tokens  D model  E experts


def drawn(T: int, E: int, D: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias, the logits of order 1; rows of x lie apart, with NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    x_TX = torch.full((T, D + 8), float("nan"))
    x_TX[:, :D] = torch.randn(T, D, generator=generator)
    weight_ED = torch.randn(E, D, generator=generator) / D**0.5
    bias_E = torch.randn(E, generator=generator) * 0.1
    return x_TX.to(DEVICE, dtype)[:, :D], weight_ED.to(DEVICE, dtype), bias_E.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "E", "D", "k", "normalize"),
    [
        pytest.param(5, 14, 96, 3, True, id="tiny"),
        pytest.param(1, 1, 1, 1, True, id="one-of-everything"),
        pytest.param(17, 33, 257, 8, True, id="tile-and-one"),
        pytest.param(15, 31, 255, 31, False, id="all-but-a-tile-chosen-all"),
        pytest.param(0, 14, 96, 3, True, id="empty"),
    ],
)
def test_as_good_as_eager(T: int, E: int, D: int, k: int, normalize: bool, dtype: torch.dtype) -> None:
    x_TD, weight_ED, bias_E = drawn(T, E, D, dtype)
    check_against_twin(
        route_triton, route_torch, x_TD, weight_ED, bias_E, k=k, scaling=2.5, normalize=normalize, observe=True
    )
    unobserved = route_triton(x_TD, weight_ED, bias_E, k, 2.5, normalize)
    assert unobserved[3:] == (None, None, None)
    assert torch.equal(unobserved.counts_E.long(), unobserved.expert_ids_TK.flatten().bincount(minlength=E))
    again = route_triton(x_TD, weight_ED, bias_E, k, 2.5, normalize, observe=True)
    assert torch.equal(unobserved.expert_ids_TK, again.expert_ids_TK)
    assert torch.equal(unobserved.weights_TK, again.weights_TK)


@settings(max_examples=8)
@given(
    T=st.integers(0, 20),
    E=st.integers(1, 40),
    D=st.integers(1, 70),
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    normalize=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sizes(T: int, E: int, D: int, data: st.DataObject, dtype: torch.dtype, normalize: bool, seed: int) -> None:
    k = data.draw(st.integers(1, E))
    inputs = drawn(T, E, D, dtype, seed)
    check_against_twin(route_triton, route_torch, *inputs, k=k, scaling=1.0, normalize=normalize, observe=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lower_expert(dtype: torch.dtype) -> None:
    """Small integers make every sum exact; negative choices and zeros take part."""
    T, E, D = 6, 14, 32
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randint(-1, 2, (T, D), generator=generator).to(DEVICE, dtype)
    weight_ED = torch.randint(-1, 2, (3, D), generator=generator).repeat(5, 1)[:E].to(DEVICE, dtype)
    weight_ED[5] = 0
    bias_E = torch.zeros(E, device=DEVICE)
    bias_E[7:] = -1.0
    args = (x_TD, weight_ED, bias_E, E, 1.0, True, True)
    kernel, twin = route_triton(*args), route_torch(*args)
    assert kernel.logits_TE is not None
    assert twin.logits_TE is not None
    assert torch.equal(kernel.logits_TE, twin.logits_TE)
    assert torch.equal(kernel.expert_ids_TK, twin.expert_ids_TK)
    assert (twin.choice_TE < 0).any()  # type: ignore[operator]


def test_bias_decides_the_choice_and_not_the_weight() -> None:
    x_TD, weight_ED, _ = drawn(4, 14, 96, torch.bfloat16)
    bias_E = torch.zeros(14, device=DEVICE)
    bias_E[11] = 8.0
    routes = route_triton(x_TD, weight_ED, bias_E, 1, 1.0, False, observe=True)
    assert (routes.expert_ids_TK == 11).all()
    assert routes.scores_TE is not None
    assert torch.equal(routes.weights_TK[:, 0], routes.scores_TE[:, 11])


def test_a_bad_row_stays_alone_and_names_experts_that_exist() -> None:
    x_TD, weight_ED, bias_E = drawn(3, 14, 96, torch.bfloat16)
    good = route_triton(x_TD, weight_ED, bias_E, 3, 1.0, True)
    x_TD[1] = float("nan")
    routes = route_triton(x_TD, weight_ED, bias_E, 3, 1.0, True)
    assert torch.equal(routes.expert_ids_TK[::2], good.expert_ids_TK[::2])
    assert torch.equal(routes.weights_TK[::2], good.weights_TK[::2])
    assert len(set(routes.expert_ids_TK[1].tolist())) == 3
    assert all(0 <= expert < 14 for expert in routes.expert_ids_TK[1].tolist())


def test_slices_cover_the_width() -> None:
    for T in (1, 16, 64, 256, 4096):
        *_, block_d, depth = slices(T, 256, 5120)
        assert depth % block_d == 0
        assert (T > 256) or 5120 // depth > 1


def test_refuses() -> None:
    x_TD, weight_ED, bias_E = drawn(2, 14, 96, torch.bfloat16)
    with pytest.raises(KernelInputError, match="k between 1 and the 14 experts, found 15"):
        route_triton(x_TD, weight_ED, bias_E, 15, 1.0, True)
    with pytest.raises(KernelInputError, match=r"router weight \(any, 96\), found \(14, 95\)"):
        route_triton(x_TD, weight_ED[:, :95], bias_E, 3, 1.0, True)
    with pytest.raises(KernelInputError, match=r"correction bias in torch\.float32, found torch\.bfloat16"):
        route_triton(x_TD, weight_ED, bias_E.bfloat16(), 3, 1.0, True)
