"""Latents, keys and their cache rows at released widths; one launch replayed in a CUDA graph with other slots."""

import pytest
import torch
from kernel_checks import check_against_twin
from poison import assert_same_bytes, random

from optimized.kernels.latent import (
    AProjection,
    LatentWeights,
    gather_rows_torch,
    gather_rows_triton,
    write_latents_torch,
    write_latents_triton,
)

FULL = AProjection(query=1024, latent=512, rope=64, gate=128, index_key=128, index_heads=64)
SLIDING = AProjection(query=1024, latent=1024, rope=64, gate=64)
EPS = 1e-5


def draws(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [random(generator, *shape, dtype=torch.bfloat16, device="cuda", room=16) for shape in shapes]


def angles_of(T, R):
    angles = torch.arange(T)[:, None] * 31.0 * 8e7 ** (-torch.arange(0, R, 2) / R)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).cuda()


def call(write, layout, pages, page_size):
    def run(a, cos_sin, slots, *weights):
        norms = LatentWeights(*weights[:3], 5**0.5, 10**0.5, *weights[3:])
        pools = [
            torch.full((pages, page_size, width), float("nan"), dtype=a.dtype, device="cuda")
            for width in (layout.row, layout.index_key)
        ]
        index = (pools[1], slots) if layout.index_key else ()
        new = write(a[None], layout, norms, EPS, cos_sin, pools[0], slots, *index, observe=True)
        return *new, *pools

    return run


def arguments_of(layout, T, pages, page_size):
    J = layout.index_key
    widths = (layout.query, layout.latent, layout.rope, *([J, J] if J else []))
    a, *weights = draws((T, layout.width), *((width,) for width in widths))
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(0))[:T].cuda()
    slots[::5] = -1
    return a, angles_of(T, layout.rope), slots, *weights


@pytest.mark.parametrize("layout", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("T", [1, 16, 64, 300, 4096])
def test_write_latents(layout, T):
    size = (100, 64)
    calls = [call(write, layout, *size) for write in (write_latents_triton, write_latents_torch)]
    check_against_twin(*calls, *arguments_of(layout, T, *size))


def test_slots_and_angles_may_change_between_replays_of_a_graph():
    a, cos_sin, slots, *weights = arguments_of(FULL, 16, 4, 64)
    run = call(write_latents_triton, FULL, 4, 64)
    run(a, cos_sin, slots, *weights)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(a, cos_sin, slots, *weights)
    for shift in (1, 2):
        slots.copy_(torch.where(slots < 0, slots, (slots + 64 * shift) % 256))
        a.copy_(a.roll(shift, dims=0))
        cos_sin.copy_(cos_sin.roll(shift, dims=0))
        graph.replay()
        for replayed, eager in zip(captured, run(a, cos_sin, slots, *weights), strict=True):
            assert_same_bytes(replayed, eager)


def test_gather_past_two_to_the_31_elements():
    rows, L = 2_000_000, 1088
    pool = torch.empty(rows // 64, 64, L, dtype=torch.bfloat16, device="cuda")
    sources = torch.cat((torch.arange(rows - 513, rows), -1 - torch.arange(300))).cuda()
    (fresh,) = draws((300, L))
    pool.view(-1, L)[rows - 513 :] = draws((513, L))[0]
    assert_same_bytes(gather_rows_triton(pool, fresh, sources), gather_rows_torch(pool, fresh, sources))
