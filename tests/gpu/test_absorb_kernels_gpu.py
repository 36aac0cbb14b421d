"""Rotation, absorption and the gated way back at released geometry."""

import pytest
import torch
from kernel_checks import check_against_twin
from poison import assert_same_bytes, poisoned, random, surrounded

from optimized.kernels.gate import gate_heads_torch, gate_heads_triton, unabsorb_gate_torch, unabsorb_gate_triton
from optimized.kernels.queries import (
    absorb_queries_torch,
    absorb_queries_triton,
    rotate_queries_torch_,
    rotate_queries_triton_,
)

R, V = 64, 128
GEOMETRIES = [pytest.param(128, 128, 512, id="full"), pytest.param(64, 192, 1024, id="sliding")]


def draws(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [random(generator, *shape, dtype=dtype, device="cuda", room=16) for shape in shapes]


def angles_of(T):
    angles = torch.arange(T)[:, None] * 31.0 * 8e7 ** (-torch.arange(0, R, 2) / R)
    return surrounded(torch.cat((angles.cos(), angles.sin()), dim=-1).cuda(), room=16)


@pytest.mark.parametrize(("H", "N", "C"), GEOMETRIES)
@pytest.mark.parametrize("T", [1, 16, 64, 300, 1024])
def test_absorb_queries(H, N, C, T):
    q, w_uk = draws(torch.bfloat16, (T, H, N + R), (H, N, C))
    check_against_twin(poisoned(absorb_queries_triton), absorb_queries_torch, q, w_uk * N**-0.5, angles_of(T))
    check_against_twin(poisoned(absorb_queries_triton), absorb_queries_torch, q, w_uk * N**-0.5)


@pytest.mark.parametrize(("H", "N", "C"), GEOMETRIES)
@pytest.mark.parametrize("T", [1, 16, 64, 300, 1024])
def test_unabsorb_gate(H, N, C, T):
    o_latent, w_uv, gate = draws(torch.bfloat16, (T, H, C), (H, V, C), (T, H))
    arguments = (o_latent, w_uv * C**-0.5, gate)
    check_against_twin(poisoned(unabsorb_gate_triton), unabsorb_gate_torch, *arguments, observe=True)


@pytest.mark.parametrize(("H", "N", "C"), GEOMETRIES)
def test_float32_fits_the_processor(H, N, C):
    q, w_uk, o_latent, w_uv, gate = draws(torch.float32, (70, H, N + R), (H, N, C), (70, H, C), (H, V, C), (70, H))
    check_against_twin(absorb_queries_triton, absorb_queries_torch, q, w_uk, angles_of(70))
    check_against_twin(unabsorb_gate_triton, unabsorb_gate_torch, o_latent, w_uv, gate)


@pytest.mark.parametrize("T", [1, 64, 4096])
def test_rotate_queries(T):
    def in_place(rotate):
        def run(q, cos_sin, index_query):
            copies = surrounded(q, 16), surrounded(index_query, 16)
            rotate(copies[0], cos_sin, copies[1])
            return copies

        return run

    q, index_query = draws(torch.bfloat16, (T, 128, 192), (T, 64, 128))
    check_against_twin(in_place(rotate_queries_triton_), in_place(rotate_queries_torch_), q, angles_of(T), index_query)


@pytest.mark.parametrize("T", [1, 300, 4096])
def test_gate_heads(T):
    core, gate = draws(torch.bfloat16, (T, 128, V), (T, 128))
    check_against_twin(poisoned(gate_heads_triton), gate_heads_torch, core, gate, observe=True)


@pytest.mark.parametrize("T", [1, 16, 64, 256])
def test_a_replayed_graph_gives_the_same_bytes(T):
    q, w_uk, w_uv, gate = draws(torch.bfloat16, (T, 128, 192), (128, 128, 512), (128, V, 512), (T, 128))
    cos_sin = angles_of(T)

    def there_and_back():
        return unabsorb_gate_triton(absorb_queries_triton(q, w_uk, cos_sin)[..., :512], w_uv, gate)[0]

    there_and_back()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = there_and_back()
    q.copy_(q.roll(1, dims=1))
    graph.replay()
    assert_same_bytes(captured, there_and_back())
