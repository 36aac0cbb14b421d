"""Norms, the starts of a step and of a draft step, and SwiGLU at released widths."""

import pytest
import torch
from kernel_checks import check_against_twin
from poison import poisoned, random

from optimized.kernels.draft import draft_input_torch, draft_input_triton
from optimized.kernels.embed import embed_torch, embed_triton
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
from optimized.kernels.swiglu import swiglu_torch, swiglu_triton
from optimized.rope import RopeTables
from reference.config import released

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


@pytest.mark.parametrize("T", [1, 16, 64, 300])
def test_a_delta_in_parts_is_added_up(T):
    """Slices of a product and outputs of experts: the same bytes as of their sum, added and rounded before."""
    residual, weight, rows_TSD = draws((T, D), (D,), (T, 9, D))
    parts, weights_TK = torch.randn(4, T, D, device="cuda"), torch.rand(T, 8, device="cuda")
    check_against_twin(poisoned(add_parts_rms_norm_triton), add_parts_rms_norm_torch, residual, parts, weight, EPS)
    inputs = (residual, rows_TSD.transpose(0, 1), weight, EPS, weights_TK)
    check_against_twin(poisoned(add_parts_rms_norm_triton), add_parts_rms_norm_torch, *inputs)
    for found, delta in (
        (add_parts_rms_norm_triton(residual, parts, weight, EPS), whole(parts, torch.bfloat16)),
        (add_parts_rms_norm_triton(*inputs), combine_triton(rows_TSD, weights_TK).output_TD),
    ):
        for out, expected in zip(found, add_rms_norm_triton(residual, delta, weight, EPS), strict=True):
            assert torch.equal(out, expected)


@pytest.mark.parametrize("T", [1, 64, 300])
def test_starts_read_a_table_past_two_to_the_31_bytes(T):
    vocabulary = 152064
    table = torch.full((vocabulary, D), float("nan"), dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(T, device="cuda") * 503 % vocabulary
    ids[-1] = vocabulary + 7  # clamped: the last row, which lies past 2^29 elements
    hidden, enorm, hnorm, rows = draws((T, D), (D,), (D,), (T, D))
    table[ids.clamp(max=vocabulary - 1)] = rows
    table = table.contiguous()
    positions = (torch.arange(T, device="cuda") * 8191 - 1).int()
    lanes = RopeTables(released().text, torch.device("cuda")).lanes
    inputs = (table, ids, hidden, enorm, hnorm, EPS, positions, lanes)
    check_against_twin(poisoned(draft_input_triton), draft_input_torch, *inputs)
    check_against_twin(poisoned(embed_triton), embed_torch, table, ids, enorm, EPS, positions, lanes)


@pytest.mark.parametrize(("T", "F"), [(1, 13824), (64, 1536), (300, 13824), (4096, 1536), (70_000, 1536)])
def test_swiglu(T, F):
    check_against_twin(poisoned(swiglu_triton), swiglu_torch, *draws((T, 2 * F)))
