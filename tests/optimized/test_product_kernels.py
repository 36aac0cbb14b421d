"""Products of few rows, whole, in parts and with SwiGLU behind them, against their twins."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, check_against_twin
from poison import assert_same_bytes, poisoned, random, surrounded

from optimized.errors import KernelInputError
from optimized.kernels.parts import whole
from optimized.kernels.products import (
    MOST_ROWS,
    SHORTEST_DEPTH,
    cut_of,
    product_parts_torch,
    product_parts_triton,
    product_swiglu_torch,
    product_swiglu_triton,
    product_torch,
    product_triton,
)

pytest.importorskip("triton")

# T, X, Y: one row of any depth; several rows at a depth that is cut; what is left to the library.
SHAPES = [
    (1, 1, 1), (1, 9, 513), (1, 130, 2100), (2, 127, SHORTEST_DEPTH), (17, 130, SHORTEST_DEPTH + 5),
    (MOST_ROWS, 3, SHORTEST_DEPTH + 128), (MOST_ROWS + 1, 6, 40), (3, 6, 40), (0, 6, 40),
]  # fmt: skip


def draws(dtype, T, X, Y, seed=0, room=1):
    """x and a weight that keeps the size of what it multiplies; a room of 8 leaves the rows aligned."""
    generator = torch.Generator().manual_seed(seed)
    x = random(generator, T, Y, dtype=dtype, device=DEVICE)
    weight = torch.randn(X, Y, generator=generator) * Y**-0.5
    return x, surrounded(weight.to(DEVICE, dtype), room)


def summed(product_parts):
    """The parts of a product, added up in its dtype."""
    return lambda x, weight: whole(product_parts(x, weight), x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "X", "Y"), SHAPES)
@pytest.mark.parametrize("room", [1, 8], ids=["pointers", "copy engine"])
def test_products_are_as_good_as_eager(dtype, T, X, Y, room):
    x, weight = draws(dtype, T, X, Y, room=room)
    check_against_twin(poisoned(product_triton), product_torch, x, weight)
    check_against_twin(summed(poisoned(product_parts_triton)), summed(product_parts_torch), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "F", "Y"), [(1, 1, 1), (1, 13, 600), (3, 65, SHORTEST_DEPTH), (3, 5, 40), (0, 5, 40)])
@pytest.mark.parametrize("room", [1, 8], ids=["pointers", "copy engine"])
def test_swiglu_is_as_good_as_eager(dtype, T, F, Y, room):
    x, weight = draws(dtype, T, 2 * F, Y, room=room)
    check_against_twin(poisoned(product_swiglu_triton), product_swiglu_torch, x, weight)


@pytest.mark.parametrize(("T", "X", "Y"), [(1, 5120, 16384), (16, 1920, 5120), (64, 2176, 5120), (64, 5120, 13824)])
def test_slices_cover_the_depth(T, X, Y):
    """At released shapes: more than one slice, one wave of tiles, and no slice without a step."""
    cut = cut_of(T, X, Y, True)
    assert cut.slices > 1
    assert T == 1 or -(-X // cut.outputs) * cut.slices <= 132
    assert (cut.slices - 1) * -(-Y // (cut.depth * cut.slices)) * cut.depth < Y


def test_parts_are_float32_and_few_rows_only():
    x, weight = draws(torch.bfloat16, 2, 130, SHORTEST_DEPTH)
    parts = product_parts_triton(x, weight)
    assert parts.dtype == torch.float32
    assert parts.shape[1:] == (2, 130)
    assert len(parts) > 1
    assert product_parts_triton(*draws(torch.bfloat16, 65, 4, 40)).shape == (1, 65, 4)
    assert product_parts_triton(*draws(torch.float32, 1, 4, 4096)).shape == (1, 1, 4)


@pytest.mark.parametrize(("T", "Y"), [(1, 2500), (4, SHORTEST_DEPTH)])
def test_same_bytes_and_no_row_reaches_another(T, Y):
    x, weight = draws(torch.bfloat16, T, 20, Y)
    for product in (product_triton, product_swiglu_triton, summed(product_parts_triton)):
        out = product(x, weight)
        assert_same_bytes(out, product(x, weight))
        if T > 1:
            poisoned_x = x.clone()
            poisoned_x[1] = float("nan")
            assert_same_bytes(product(poisoned_x, weight)[[0, 2, 3]], out[[0, 2, 3]])


def test_wrong_input_is_named():
    x, weight = draws(torch.bfloat16, 2, 5, 40)
    with pytest.raises(KernelInputError, match=r"weight \(any, 40\), found \(5, 39\)"):
        product_triton(x, weight[:, 1:])
    with pytest.raises(KernelInputError, match=r"weight in torch\.bfloat16"):
        product_parts_triton(x, weight.float())
    with pytest.raises(KernelInputError, match="equal numbers, found 5 rows"):
        product_swiglu_triton(x, weight)
    with pytest.raises(KernelInputError, match="dense last dim"):
        product_triton(x.T.contiguous().T, weight)


@settings(max_examples=8)
@given(T=st.integers(1, 20), X=st.integers(1, 140), Y=st.integers(1, 5000), seed=st.integers(0, 99))
def test_sweep(T, X, Y, seed):
    x, weight = draws(torch.bfloat16, T, X, Y, seed)
    check_against_twin(summed(poisoned(product_parts_triton)), summed(product_parts_torch), x, weight)
