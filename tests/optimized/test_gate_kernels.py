"""The output gate, alone and behind the way out of the latent space, against their twins."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, check_against_twin
from poison import assert_same_bytes, poisoned, random

from optimized.errors import KernelInputError
from optimized.kernels.gate import gate_heads_torch, gate_heads_triton, unabsorb_gate_torch, unabsorb_gate_triton

pytest.importorskip("triton")

# H, V, C of the two tiny geometries, then widths at the edges of tiles.
GEOMETRIES = [(6, 10, 16), (4, 11, 48), (1, 1, 1), (2, 33, 129), (3, 130, 20)]


def draws(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [random(generator, *shape, dtype=dtype, device=DEVICE) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize(("H", "V", "C"), GEOMETRIES)
@pytest.mark.parametrize("T", [0, 1, 5])
def test_gate_heads_is_as_good_as_eager(dtype, observe, H, V, C, T):
    core, gate = draws(dtype, (T, H, V), (T, H))
    check_against_twin(poisoned(gate_heads_triton), gate_heads_torch, core, gate * 3, observe=observe)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize(("H", "V", "C"), GEOMETRIES)
@pytest.mark.parametrize("T", [0, 1, 17])
def test_unabsorb_gate_is_as_good_as_eager(dtype, observe, H, V, C, T):
    arguments = draws(dtype, (T, H, C), (H, V, C), (T, H))
    check_against_twin(poisoned(unabsorb_gate_triton), unabsorb_gate_torch, *arguments, observe=observe)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [63, 65])
def test_unabsorb_gate_at_the_edge_of_a_block_of_tokens(dtype, T):
    arguments = draws(dtype, (T, 2, 16), (2, 10, 16), (T, 2))
    check_against_twin(poisoned(unabsorb_gate_triton), unabsorb_gate_torch, *arguments, observe=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_observing_changes_no_byte_and_the_fused_gate_is_the_gate(dtype):
    o_latent, w_uv, gate = draws(dtype, (5, 6, 16), (6, 10, 16), (5, 6))
    gated, core, sigmoid = unabsorb_gate_triton(o_latent, w_uv, gate, observe=True)
    assert_same_bytes(gated, unabsorb_gate_triton(o_latent, w_uv, gate)[0])
    alone, sigmoid_alone = gate_heads_triton(core, gate, observe=True)
    assert_same_bytes(gated, alone)
    assert_same_bytes(sigmoid, sigmoid_alone)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_that_saturate(dtype):
    core, _ = draws(dtype, (1, 6, 4), (1, 6))
    gate = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 1e4]], device=DEVICE, dtype=dtype)
    check_against_twin(poisoned(gate_heads_triton), gate_heads_torch, core, gate, observe=True)
    gated, _ = gate_heads_triton(core, gate)
    assert torch.equal(gated[0, -4:], core[0, -1])


def test_no_row_reaches_another():
    o_latent, w_uv, gate = draws(torch.bfloat16, (4, 2, 16), (2, 10, 16), (4, 2))
    clean, _, _ = unabsorb_gate_triton(o_latent, w_uv, gate)
    assert_same_bytes(clean[3:], unabsorb_gate_triton(o_latent[3:], w_uv, gate[3:])[0])
    o_latent[1] = gate[2] = float("nan")
    assert_same_bytes(unabsorb_gate_triton(o_latent, w_uv, gate)[0][[0, 3]], clean[[0, 3]])


def test_wrong_input_is_named():
    o_latent, w_uv, gate = draws(torch.float32, (4, 2, 16), (2, 10, 16), (4, 2))
    with pytest.raises(KernelInputError, match=r"w_uv \(2, any, 16\)"):
        unabsorb_gate_triton(o_latent, w_uv[..., :15], gate)
    with pytest.raises(KernelInputError, match=r"gate \(4, 2\)"):
        unabsorb_gate_triton(o_latent, w_uv, gate[:3])
    with pytest.raises(KernelInputError, match="gate in"):
        gate_heads_triton(o_latent, gate.bfloat16())


@settings(max_examples=8)
@given(
    T=st.integers(0, 40), H=st.integers(1, 3), V=st.integers(1, 70), C=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_sweep(T, H, V, C, dtype, seed):
    arguments = draws(dtype, (T, H, C), (H, V, C), (T, H), seed=seed)
    check_against_twin(poisoned(unabsorb_gate_triton), unabsorb_gate_torch, *arguments)
