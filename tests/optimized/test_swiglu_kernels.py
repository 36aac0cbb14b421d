"""SwiGLU's elementwise half against its twin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, check_against_twin
from poison import assert_same_bytes, poisoned, random

from optimized.errors import KernelInputError
from optimized.kernels.swiglu import swiglu_torch, swiglu_triton

pytest.importorskip("triton")


def packed(dtype, T, F, seed=0):
    return random(torch.Generator().manual_seed(seed), T, 2 * F, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "F"), [(1, 1), (3, 28), (2, 1023), (2, 1024), (2, 1025), (0, 28)])
def test_swiglu_is_as_good_as_eager(dtype, T, F):
    check_against_twin(poisoned(swiglu_triton), swiglu_torch, packed(dtype, T, F))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_that_saturate(dtype):
    gate_up = packed(dtype, 2, 8)
    gate_up[:, :8] = torch.tensor([-1e4, -100.0, -90.0, -20.0, 0.0, 20.0, 100.0, 1e4], device=DEVICE)
    check_against_twin(poisoned(swiglu_triton), swiglu_torch, gate_up)


def test_the_gate_is_the_first_half():
    gate_up = torch.tensor([[50.0, -50.0, 3.0, 3.0]], device=DEVICE)
    torch.testing.assert_close(swiglu_triton(gate_up), torch.tensor([[150.0, 0.0]], device=DEVICE))


def test_same_bytes_and_errors():
    gate_up = packed(torch.bfloat16, 4, 33)
    assert_same_bytes(swiglu_triton(gate_up), swiglu_triton(gate_up))
    assert_same_bytes(swiglu_triton(gate_up)[2:3], swiglu_triton(gate_up[2:3]))
    with pytest.raises(KernelInputError, match="2F"):
        swiglu_triton(gate_up[:, :65])
    with pytest.raises(KernelInputError, match="gate_up"):
        swiglu_triton(gate_up.double())


@settings(max_examples=12)
@given(T=st.integers(0, 9), F=st.integers(1, 300), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_sweep(T, F, dtype, seed):
    check_against_twin(poisoned(swiglu_triton), swiglu_torch, packed(dtype, T, F, seed))
