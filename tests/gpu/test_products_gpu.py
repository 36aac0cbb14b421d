"""Products of few rows at released shapes, compiled: against twins, and in a graph of launches that overlap."""

import pytest
import torch
from kernel_checks import check_against_twin
from poison import poisoned

from optimized.kernels.norm import add_parts_rms_norm_triton
from optimized.kernels.parts import whole
from optimized.kernels.products import (
    product_parts_torch,
    product_parts_triton,
    product_swiglu_torch,
    product_swiglu_triton,
    product_torch,
    product_triton,
)

EPS = 1e-5
# Outputs and depth: a-projection, queries, o_proj, dense down, head.
SHAPES = [(1920, 5120), (32768, 1024), (5120, 16384), (5120, 13824), (152064, 5120)]


def draws(T, X, Y):
    generator = torch.Generator("cuda").manual_seed(T)
    x = torch.randn(T, Y, generator=generator, device="cuda", dtype=torch.bfloat16)
    return x, torch.randn(X, Y, generator=generator, device="cuda", dtype=torch.bfloat16) * Y**-0.5


@pytest.mark.parametrize("T", [1, 2, 16, 33, 64, 65])
@pytest.mark.parametrize(("X", "Y"), SHAPES)
def test_products(T, X, Y):
    x, weight = draws(T, X, Y)
    check_against_twin(poisoned(product_triton), product_torch, x, weight)
    parts, eager = (lambda *inputs, f=f: whole(f(*inputs), inputs[0].dtype) for f in (
        poisoned(product_parts_triton), product_parts_torch,
    ))  # fmt: skip
    check_against_twin(parts, eager, x, weight)


@pytest.mark.parametrize("T", [1, 16, 64, 65])
def test_swiglu(T):
    check_against_twin(poisoned(product_swiglu_triton), product_swiglu_torch, *draws(T, 2 * 13824, 5120))


@pytest.mark.parametrize("T", [1, 16, 64])
def test_overlapping_launches_wait_for_what_they_read(T):
    """A chain of norms and products, each reading what the one before wrote; replays equal launches one by one."""
    x, weight = draws(T, 5120, 5120)
    norm_D = torch.ones(5120, dtype=torch.bfloat16, device="cuda")

    def chain(is_apart):
        stream, normed = x, x
        for _ in range(12):
            parts = product_parts_triton(normed, weight)
            if is_apart:
                torch.cuda.synchronize()
            stream, normed = add_parts_rms_norm_triton(stream, parts, norm_D, EPS)
            if is_apart:
                torch.cuda.synchronize()
        return normed

    chain(False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(False)
    for seed in range(3):
        x.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        graph.replay()
        assert torch.equal(captured, chain(True))
