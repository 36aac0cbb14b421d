"""Rotation in place and absorption of queries, against their twins and against the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, check_against_twin
from poison import assert_same_bytes, poisoned, random, surrounded

from optimized.errors import KernelInputError
from optimized.kernels.queries import (
    absorb_queries_torch,
    absorb_queries_triton,
    rotate_queries_torch_,
    rotate_queries_triton_,
)

pytest.importorskip("triton")

# H, N, R, C of the two tiny geometries, then heads and widths at the edges of tiles.
GEOMETRIES = [(6, 12, 8, 16), (4, 15, 6, 48), (1, 1, 2, 1), (2, 65, 16, 129), (33, 3, 18, 5)]


def draws(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [random(generator, *shape, dtype=dtype, device=DEVICE) for shape in shapes]


def angles_of(T, R, seed=0):
    """cos_sin_TR of positions up to 100,000, float32."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 100_000, (T,), generator=generator).float()
    angles = positions[:, None] * 80.0 ** (-torch.arange(0, R, 2) / R)
    return surrounded(torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE))


def in_place(rotate):
    """`rotate` on copies that NaN surrounds; returns the copies, and what is around them has to stay."""

    def run(q, cos_sin, index_query=None):
        copies = [None if x is None else surrounded(x) for x in (q, index_query)]
        rotate(copies[0], cos_sin, copies[1])
        for copy in copies:
            assert copy is None or copy._base.isnan().sum() == copy._base.numel() - copy.numel()
        return tuple(copies)

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "N", "R", "C"), GEOMETRIES)
@pytest.mark.parametrize("T", [0, 1, 3])
def test_rotation_is_as_good_as_eager(dtype, H, N, R, C, T):
    q, index_query = draws(dtype, (T, H, N + R), (T, 9, R + 3))
    kernel, twin = in_place(rotate_queries_triton_), in_place(rotate_queries_torch_)
    check_against_twin(kernel, twin, q, angles_of(T, R), index_query)
    check_against_twin(kernel, twin, q, angles_of(T, R))


def test_neighbours_are_rotated_and_other_lanes_stay():
    q = torch.zeros(1, 1, 6, device=DEVICE)
    q[0, 0, :2], q[0, 0, 2], q[0, 0, 5] = 7.0, 1.0, 1.0
    index_query = torch.tensor([[[1.0, 0.0, 0.0, 1.0, 5.0, 5.0]]], device=DEVICE)
    angle = torch.tensor([0.3, 1.1], device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    rotate_queries_triton_(q, torch.cat((cos, sin))[None], index_query)
    expected = torch.stack((cos[0], sin[0], -sin[1], cos[1]))
    torch.testing.assert_close(q[0, 0, 2:], expected)
    torch.testing.assert_close(index_query[0, 0, :4], expected)
    assert (q[0, 0, :2] == 7.0).all()
    assert (index_query[0, 0, 4:] == 5.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "N", "R", "C"), GEOMETRIES)
@pytest.mark.parametrize("T", [0, 1, 17])
def test_absorption_is_as_good_as_eager(dtype, H, N, R, C, T):
    q, w_uk = draws(dtype, (T, H, N + R), (H, N, C))
    check_against_twin(poisoned(absorb_queries_triton), absorb_queries_torch, q, w_uk)
    check_against_twin(poisoned(absorb_queries_triton), absorb_queries_torch, q, w_uk, angles_of(T, R))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [63, 65])
def test_absorption_at_the_edge_of_a_block_of_tokens(dtype, T):
    q, w_uk = draws(dtype, (T, 2, 20), (2, 12, 16))
    check_against_twin(poisoned(absorb_queries_triton), absorb_queries_torch, q, w_uk, angles_of(T, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotating_on_the_way_equals_rotating_before(dtype):
    q, w_uk = draws(dtype, (5, 6, 20), (6, 12, 16))
    cos_sin = angles_of(5, 8)
    on_the_way = absorb_queries_triton(q, w_uk, cos_sin)
    before = q.clone()
    rotate_queries_triton_(q, cos_sin)
    assert_same_bytes(on_the_way, absorb_queries_triton(q, w_uk))
    assert torch.equal(before[..., :12], q[..., :12])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "H", "heads", "C"), [(0, 2, 9, 16), (1, 2, 9, 16), (17, 1, 1, 5), (3, 6, 7, 300)])
def test_index_queries_rotate_on_the_way(dtype, T, H, heads, C):
    """As many programs as it takes for all heads, whatever the number of latent blocks; nothing else is written."""
    q, w_uk, index_query = draws(dtype, (T, H, 20), (H, 12, C), (T, heads, 11))
    cos_sin, expected, inside = angles_of(T, 8), index_query.clone(), surrounded(index_query)
    out = absorb_queries_triton(q, w_uk, cos_sin, inside)
    assert_same_bytes(out, absorb_queries_triton(q, w_uk, cos_sin))
    rotate_queries_triton_(q.clone(), cos_sin, expected)
    assert torch.equal(inside, expected)
    assert inside._base.isnan().sum() == inside._base.numel() - inside.numel()
    twin_query = index_query.clone()
    absorb_queries_torch(q, w_uk, cos_sin, twin_query)
    rotate_queries_torch_(q, cos_sin, index_query)
    assert torch.equal(twin_query, index_query)


def test_same_bytes_and_no_row_reaches_another():
    q, w_uk = draws(torch.bfloat16, (4, 6, 20), (6, 12, 16))
    cos_sin = angles_of(4, 8)
    out = absorb_queries_triton(q, w_uk, cos_sin)
    assert_same_bytes(out, absorb_queries_triton(q, w_uk, cos_sin))
    assert_same_bytes(out[2:3], absorb_queries_triton(q[2:3], w_uk, cos_sin[2:3]))
    q[1] = float("nan")
    poisoned_out = absorb_queries_triton(q, w_uk, cos_sin)
    assert_same_bytes(poisoned_out[[0, 2, 3]], out[[0, 2, 3]])


def test_wrong_input_is_named():
    q, w_uk = draws(torch.float32, (2, 6, 20), (6, 12, 16))
    with pytest.raises(KernelInputError, match=r"w_uk \(6, 12, 16\)"):
        absorb_queries_triton(q, w_uk[:5])
    with pytest.raises(KernelInputError, match=r"cos_sin \(2, 8\)"):
        absorb_queries_triton(q, w_uk, angles_of(2, 6))
    with pytest.raises(KernelInputError, match=r"cos_sin in torch\.float32"):
        rotate_queries_triton_(q, angles_of(2, 8).bfloat16())
    with pytest.raises(KernelInputError, match="even number of rope lanes"):
        absorb_queries_triton(q[..., :19], w_uk)
    with pytest.raises(KernelInputError, match="index_query"):
        rotate_queries_triton_(q, angles_of(2, 8), q[..., :7])
    with pytest.raises(KernelInputError, match="cos_sin with index_query"):
        absorb_queries_triton(q, w_uk, None, q)


@settings(max_examples=8)
@given(
    T=st.integers(0, 40), H=st.integers(1, 3), N=st.integers(1, 70), pairs=st.integers(1, 9), C=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_sweep(T, H, N, pairs, C, dtype, seed):
    q, w_uk = draws(dtype, (T, H, N + 2 * pairs), (H, N, C), seed=seed)
    check_against_twin(poisoned(absorb_queries_triton), absorb_queries_torch, q, w_uk, angles_of(T, 2 * pairs, seed))
