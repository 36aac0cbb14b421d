"""RMSNorm with and without the residual addition, against its twins."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, check_against_twin
from poison import assert_same_bytes, poisoned, random

from optimized.errors import KernelInputError
from optimized.kernels.experts import combine_triton
from optimized.kernels.norm import (
    add_parts_rms_norm_torch,
    add_parts_rms_norm_triton,
    add_rms_norm_torch,
    add_rms_norm_triton,
    rms_norm_torch,
    rms_norm_triton,
)
from optimized.kernels.parts import whole

pytest.importorskip("triton")

EPS = 1e-5
SHAPES = [(1, 1), (1, 96), (3, 15), (7, 16), (2, 17), (5, 131), (0, 96)]


def draws(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [random(generator, *shape, dtype=dtype, device=DEVICE) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "D"), SHAPES)
def test_norms_are_as_good_as_eager(dtype, T, D):
    x, delta, weight = draws(dtype, (T, D), (T, D), (D,))
    check_against_twin(poisoned(rms_norm_triton), rms_norm_torch, x, weight, EPS)
    check_against_twin(poisoned(add_rms_norm_triton), add_rms_norm_torch, x, delta, weight, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_hurt(dtype):
    x, weight = draws(dtype, (4, 96), (96,))
    x[0] = 0.0
    x[1] *= 1e-4  # mean of squares far below eps
    x[2, 5] = 3e3  # one outlier
    check_against_twin(poisoned(rms_norm_triton), rms_norm_torch, x, weight, EPS)
    assert torch.equal(rms_norm_triton(x, weight, EPS)[0], torch.zeros_like(x[0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_of_the_rounded_sum(dtype):
    residual, delta, weight = draws(dtype, (3, 33), (3, 33), (33,))
    total, normed = add_rms_norm_triton(residual, delta, weight, EPS)
    assert torch.equal(total, residual + delta)
    assert torch.equal(normed, rms_norm_triton(total, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1, 2, 5])
def test_a_delta_in_parts_is_added_up(dtype, S):
    """The same bytes as of the sum, rounded before; also without a residual stream."""
    residual, weight = draws(dtype, (3, 33), (33,))
    (parts,) = draws(torch.float32, (S, 3, 33))
    for stream in (residual, None):
        check_against_twin(poisoned(add_parts_rms_norm_triton), add_parts_rms_norm_torch, stream, parts, weight, EPS)
        start = torch.zeros_like(residual) if stream is None else stream
        before = add_rms_norm_triton(start, whole(parts, dtype), weight, EPS)
        for out, expected in zip(add_parts_rms_norm_triton(stream, parts, weight, EPS), before, strict=True):
            assert_same_bytes(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "K", "S"), [(1, 1, 1), (3, 4, 4), (2, 3, 5), (0, 1, 2)])
def test_expert_outputs_are_combined_on_the_way(dtype, T, K, S):
    residual, weight, rows_TSD = draws(dtype, (T, 40), (40,), (T, S, 40))
    (weights_TK,) = draws(torch.float32, (T, K))
    inputs = (residual, rows_TSD.transpose(0, 1), weight, EPS, weights_TK)
    check_against_twin(poisoned(add_parts_rms_norm_triton), add_parts_rms_norm_torch, *inputs)
    combined = combine_triton(rows_TSD, weights_TK).output_TD
    before = add_rms_norm_triton(residual, combined, weight, EPS)
    for out, expected in zip(add_parts_rms_norm_triton(*inputs), before, strict=True):
        assert_same_bytes(out, expected)


def test_a_row_does_not_depend_on_its_company_nor_on_the_run():
    x, delta, weight = draws(torch.bfloat16, (5, 40), (5, 40), (40,))
    both = add_rms_norm_triton(x, delta, weight, EPS)
    for out, again in zip(both, add_rms_norm_triton(x, delta, weight, EPS), strict=True):
        assert_same_bytes(out, again)
    for out, alone in zip(both, add_rms_norm_triton(x[3:4], delta[3:4], weight, EPS), strict=True):
        assert_same_bytes(out[3:4], alone)


def test_a_poisoned_row_stays_alone():
    x, weight = draws(torch.bfloat16, (3, 24), (24,))
    x[1] = float("nan")
    out = rms_norm_triton(x, weight, EPS)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_wrong_input_is_named():
    x, weight = draws(torch.float32, (2, 8), (8,))
    with pytest.raises(KernelInputError, match="weight"):
        rms_norm_triton(x, weight[:7], EPS)
    with pytest.raises(KernelInputError, match=r"weight in torch\.float32"):
        rms_norm_triton(x, weight.bfloat16(), EPS)
    with pytest.raises(KernelInputError, match="delta"):
        add_rms_norm_triton(x, x[0], weight, EPS)
    with pytest.raises(KernelInputError, match="residual"):
        add_rms_norm_triton(x, x[:1], weight, EPS)
    with pytest.raises(KernelInputError, match="for each of 3 weights of a token, found 2"):
        add_parts_rms_norm_triton(x, x.expand(2, 2, 8), weight, EPS, torch.ones(2, 3, device=DEVICE))
    with pytest.raises(KernelInputError, match="dense last dim"):
        rms_norm_triton(x.T.contiguous().T, weight, EPS)


@settings(max_examples=12)
@given(T=st.integers(0, 9), D=st.integers(1, 200), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_sweep(T, D, dtype, seed):
    x, delta, weight = draws(dtype, (T, D), (T, D), (D,), seed=seed)
    check_against_twin(poisoned(add_rms_norm_triton), add_rms_norm_torch, x, delta, weight, EPS)
