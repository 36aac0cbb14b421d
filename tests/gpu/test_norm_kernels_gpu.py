"""Norms, the draft layer's input and SwiGLU at released widths."""

import pytest
import torch
from kernel_checks import check_against_twin
from poison import poisoned, random

from optimized.kernels.draft import draft_input_torch, draft_input_triton
from optimized.kernels.norm import add_rms_norm_torch, add_rms_norm_triton, rms_norm_torch, rms_norm_triton
from optimized.kernels.swiglu import swiglu_torch, swiglu_triton

D = 5120
EPS = 1e-5


def draws(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [random(generator, *shape, dtype=torch.bfloat16, device="cuda", room=16) for shape in shapes]


@pytest.mark.parametrize("T", [1, 16, 64, 300, 4096])
def test_norms(T):
    x, delta, weight = draws((T, D), (T, D), (D,))
    check_against_twin(poisoned(rms_norm_triton), rms_norm_torch, x, weight, EPS)
    check_against_twin(poisoned(add_rms_norm_triton), add_rms_norm_torch, x, delta, weight, EPS)


@pytest.mark.parametrize("T", [1, 64, 300])
def test_draft_input_reads_a_table_past_two_to_the_31_bytes(T):
    vocabulary = 152064
    table = torch.full((vocabulary, D), float("nan"), dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(T, device="cuda") * 503 % vocabulary
    ids[-1] = vocabulary + 7  # clamped: the last row, which lies past 2^29 elements
    hidden, enorm, hnorm, rows = draws((T, D), (D,), (D,), (T, D))
    table[ids.clamp(max=vocabulary - 1)] = rows
    table = table.contiguous()
    check_against_twin(poisoned(draft_input_triton), draft_input_torch, table, ids, hidden, enorm, hnorm, EPS)


@pytest.mark.parametrize(("T", "F"), [(1, 13824), (64, 1536), (300, 13824), (4096, 1536), (70_000, 1536)])
def test_swiglu(T, F):
    check_against_twin(poisoned(swiglu_triton), swiglu_torch, *draws((T, 2 * F)))
