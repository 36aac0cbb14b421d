"""Latents, rope key and index key of new tokens, and their way into pools, against the twins."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, check_against_twin
from poison import assert_same_bytes, poisoned, random, surrounded

from optimized.errors import KernelInputError
from optimized.kernels.latent import (
    AProjection,
    LatentWeights,
    gather_rows_torch,
    gather_rows_triton,
    store_rows_torch,
    store_rows_triton,
    write_latents_torch,
    write_latents_triton,
)
from optimized.kernels.parts import whole

pytest.importorskip("triton")

EPS = 1e-5
FULL = AProjection(query=32, latent=16, rope=8, gate=6, index_key=22, index_heads=9)
SLIDING = AProjection(query=24, latent=48, rope=6, gate=4)
SMALLEST = AProjection(query=1, latent=1, rope=2, gate=1, index_key=2, index_heads=1)
ODD = AProjection(query=33, latent=17, rope=34, gate=3, index_key=35, index_heads=17)
LAYOUTS = {"full": FULL, "sliding": SLIDING, "smallest": SMALLEST, "odd": ODD}


def draws(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [random(generator, *shape, dtype=dtype, device=DEVICE) for shape in shapes]


def angles_of(T, R):
    angles = torch.arange(T)[:, None] * 1031.0 * 80.0 ** (-torch.arange(0, R, 2) / R)
    return surrounded(torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE))


def pool_of(rows_per_page, pages, width, dtype):
    """NaN everywhere, rows further apart than they are wide."""
    room = torch.full((pages, rows_per_page, width + 3), float("nan"), dtype=dtype, device=DEVICE)
    return room[..., :width]


def run(write, layout, page, observe):
    """`write` as a function of tensors, so that the truth can widen them; returns its outputs and the pools."""

    def call(a, cos_sin, slots, *weights):
        parts = a if a.dim() == 3 else a[None]
        T, dtype = parts.shape[1], weights[0].dtype
        norms = LatentWeights(*weights[:3], query_scale=1.75, latent_scale=2.5)
        latent_pool = pool_of(page, T // page + 2, layout.row, dtype)
        index = (None, None)
        if layout.index_key:
            norms = norms._replace(index_norm_J=weights[3], index_bias_J=weights[4])
            index = (pool_of(page, T // page + 2, layout.index_key, dtype), slots.flip(0))
        new = write(parts, layout, norms, EPS, cos_sin, latent_pool, slots, *index, observe=observe)
        return *new, latent_pool, index[0]

    return call


def arguments_of(layout, T, dtype, seed=0):
    J = layout.index_key
    weights = draws(dtype, (layout.query,), (layout.latent,), (layout.rope,), *([(J,), (J,)] if J else []), seed=seed)
    (a,) = draws(dtype, (T, layout.width), seed=seed + 1)
    a[:, layout.gate_at : layout.gate_at + layout.gate] = float("nan")  # the gate's lanes are not read
    slots = torch.randperm(T + 1, generator=torch.Generator().manual_seed(seed))[:T] - 1  # some row goes nowhere
    return a, angles_of(T, layout.rope), slots.to(DEVICE), *weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("T", "page", "observe"), [(0, 1, True), (1, 1, False), (5, 1, True), (5, 64, False)])
def test_write_latents_is_as_good_as_eager(dtype, name, T, page, observe):
    layout = LAYOUTS[name]
    calls = [run(write, layout, page, observe) for write in (poisoned(write_latents_triton), write_latents_torch)]
    check_against_twin(*calls, *arguments_of(layout, T, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("S", [1, 2, 5])
def test_a_projection_in_parts_is_added_up(dtype, name, S):
    """The same bytes as of the sum, rounded before; the gate is then a sum as well."""
    layout = LAYOUTS[name]
    _, *rest = arguments_of(layout, 3, dtype)
    (parts,) = draws(torch.float32, (S, 3, layout.width))
    calls = [run(write, layout, 2, True) for write in (poisoned(write_latents_triton), write_latents_torch)]
    check_against_twin(*calls, parts, *rest)
    sum_TX = whole(parts, dtype)
    for added, before in zip(calls[0](parts, *rest), calls[0](sum_TX, *rest), strict=True):
        assert added is before is None or assert_same_bytes(added, before) is None
    assert_same_bytes(calls[0](parts, *rest)[5], layout.gate_of(sum_TX))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_hold_what_is_returned_and_nothing_else_is_written(dtype):
    a, cos_sin, _, *weights = arguments_of(FULL, 3, dtype)
    norms = LatentWeights(*weights[:3], 1.0, 1.0, *weights[3:])
    latent_pool, index_pool = pool_of(4, 2, FULL.row, dtype), pool_of(2, 4, FULL.index_key, dtype)
    slots, index_slots = torch.tensor([[6, -1, 0], [-1, 7, 2]], device=DEVICE)
    new = write_latents_triton(a[None], FULL, norms, EPS, cos_sin, latent_pool, slots, index_pool, index_slots)
    assert new.k_rope_unrotated_TR is None
    for pool, rows, written in (
        (latent_pool, new.latent_TL, {6: 0, 0: 2}),
        (index_pool, new.index_key_TJ, {7: 1, 2: 2}),
    ):
        expected = torch.full_like(pool._base, float("nan"))
        for slot, token in written.items():
            expected.view(8, -1)[slot, : rows.shape[1]] = rows[token]
        assert_same_bytes(pool._base, expected)


def test_the_key_is_rounded_before_it_is_rotated():
    layout = replace(SMALLEST, rope=16)
    a, cos_sin, slots, *weights = arguments_of(layout, 4, torch.bfloat16)
    out = run(write_latents_triton, layout, 1, True)(a, cos_sin, slots, *weights)
    latent, unrotated = out[1], out[4].float()
    cos, sin = cos_sin.chunk(2, dim=-1)
    even, odd = unrotated[:, 0::2], unrotated[:, 1::2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(1)
    torch.testing.assert_close(latent[:, layout.latent :].float(), rotated, rtol=2**-8, atol=0)


@pytest.mark.parametrize("layout", [FULL, SLIDING], ids=["full", "sliding"])
def test_same_bytes_alone_in_company_and_again(layout):
    a, cos_sin, slots, *weights = arguments_of(layout, 4, torch.bfloat16)
    call = run(write_latents_triton, layout, 1, True)
    out = call(a, cos_sin, slots, *weights)
    for first, again in zip(out, call(a, cos_sin, slots, *weights), strict=True):
        assert first is again is None or assert_same_bytes(first, again) is None
    for row, alone in zip(out[:6], call(a[2:3], cos_sin[2:3], slots[2:3] * 0, *weights)[:6], strict=True):
        assert row is alone is None or assert_same_bytes(row[2:3], alone) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "L"), [(0, 3), (1, 1), (4, 24), (5, 54), (9, 65)])
def test_rows_are_stored_and_gathered(dtype, T, L):
    (fresh,) = draws(dtype, (T, L))
    slots = torch.tensor([3, -1, 0, 12, 7, -1, 5, 11, 1], device=DEVICE)[:T]
    pools = [pool_of(7, 2, L, dtype) for _ in range(2)]
    store_rows_triton(fresh, pools[0], slots)
    store_rows_torch(fresh, pools[1], slots)
    assert_same_bytes(pools[0]._base, pools[1]._base)

    sources = torch.cat((slots[slots >= 0], -1 - torch.arange(T, device=DEVICE))).flip(0)
    gathered = poisoned(gather_rows_triton)(pools[0], fresh, sources)
    assert_same_bytes(gathered, gather_rows_torch(pools[0], fresh, sources))
    assert_same_bytes(gathered[:T].flip(0), fresh)
    assert not gathered.isnan().any()


def test_wrong_input_is_named():
    a, cos_sin, slots, *weights = arguments_of(FULL, 3, torch.float32)
    norms = LatentWeights(*weights[:3], 1.0, 1.0, *weights[3:])
    latent_pool, index_pool = pool_of(1, 3, FULL.row, torch.float32), pool_of(1, 3, FULL.index_key, torch.float32)
    with pytest.raises(KernelInputError, match="latent pool"):
        write_latents_triton(a[None], FULL, norms, EPS, cos_sin, index_pool, slots, index_pool, slots)
    with pytest.raises(KernelInputError, match="index norm, bias, pool and slots all"):
        write_latents_triton(a[None], FULL, norms, EPS, cos_sin, latent_pool, slots)
    with pytest.raises(KernelInputError, match=r"slot in torch\.int64"):
        write_latents_triton(a[None], FULL, norms, EPS, cos_sin, latent_pool, slots.int(), index_pool, slots)
    with pytest.raises(KernelInputError, match=r"expected a \(any, any, 93\)"):
        write_latents_triton(a[None, :, 1:], FULL, norms, EPS, cos_sin, latent_pool, slots, index_pool, slots)
    with pytest.raises(KernelInputError, match="equally far apart"):
        store_rows_triton(a[:2, :4], torch.zeros(3, 3, 4, device=DEVICE)[:, :2], slots[:2])


@settings(max_examples=8)
@given(
    T=st.integers(0, 6), query=st.integers(1, 70), latent=st.integers(1, 70), pairs=st.integers(1, 12),
    index_heads=st.integers(0, 20), passed=st.integers(0, 9), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_sweep(T, query, latent, pairs, index_heads, passed, dtype, seed):
    index_key = 2 * pairs + passed if index_heads else 0
    layout = AProjection(query, latent, 2 * pairs, 3, index_key, index_heads)
    calls = [run(write, layout, 3, True) for write in (poisoned(write_latents_triton), write_latents_torch)]
    check_against_twin(*calls, *arguments_of(layout, T, dtype, seed))
