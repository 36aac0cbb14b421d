"""The start of a step and of a draft step: lookup, norms and rotations, against their twins."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, check_against_twin
from poison import assert_same_bytes, poisoned, random

from optimized.errors import KernelInputError
from optimized.kernels.draft import draft_input_torch, draft_input_triton
from optimized.kernels.embed import embed_torch, embed_triton
from optimized.kernels.norm import rms_norm_triton
from optimized.kernels.rotation import RotationLanes
from optimized.rope import RopeTables
from reference.config import tiny

pytest.importorskip("triton")

EPS = 1e-5
LANES = RopeTables(tiny().text, torch.device(DEVICE)).lanes


def draws(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [random(generator, *shape, dtype=dtype, device=DEVICE) for shape in shapes]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# Below, at both ends, and beyond a table of 11 rows; positions of padding, of the start and far out.
IDS = (-3, 0, 10, 11, torch.iinfo(torch.int32).max)
POSITIONS = (-1, 0, 1, 131_071, 524_287)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "D"), [(1, 96), (5, 33), (0, 8)])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_starts_are_as_good_as_eager(dtype, T, D, ids_dtype):
    table, hidden, enorm, hnorm = draws(dtype, (11, D), (T, D), (D,), (D,))
    ids, positions = int32(*IDS)[:T].to(ids_dtype), int32(*POSITIONS)[:T]
    check_against_twin(poisoned(embed_triton), embed_torch, table, ids, hnorm, EPS, positions, LANES)
    inputs = (table, ids, hidden, enorm, hnorm, EPS, positions, LANES)
    check_against_twin(poisoned(draft_input_triton), draft_input_torch, *inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_of_lookup_and_norm(dtype):
    table, weight = draws(dtype, (11, 40), (40,))
    embedded = embed_triton(table, int32(*IDS), weight, EPS, int32(*POSITIONS), LANES)
    assert torch.equal(embedded.hidden_TD, table[[0, 0, 10, 10, 10]])
    assert_same_bytes(embedded.normed_TD, rms_norm_triton(embedded.hidden_TD, weight, EPS))


def test_a_row_is_cosines_then_sines_of_each_layer_kind():
    config = tiny().text
    table, weight = draws(torch.float32, (4, 8), (8,))
    rotation_TX = embed_triton(table, int32(1, 2), weight, EPS, int32(0, 7), LANES).rotation_TX
    parts = RopeTables(config, torch.device(DEVICE)).of(rotation_TX)
    for part_TR, geometry in ((parts.full_TR, config.full), (parts.sliding_TR, config.sliding)):
        R = geometry.qk_rope_head_dim
        angle = torch.tensor([7 * geometry.rope_theta ** (-2 * j / R) for j in range(R // 2)], device=DEVICE)
        torch.testing.assert_close(part_TR[1], torch.cat((angle.cos(), angle.sin())))
        assert torch.equal(part_TR[0], torch.tensor([1.0, 0.0], device=DEVICE).repeat_interleave(R // 2))


def test_draft_input_has_the_embedding_first():
    table, hidden, enorm, hnorm = draws(torch.float32, (4, 8), (2, 8), (8,), (8,))
    out, rotation = draft_input_triton(table, int32(3, -1), hidden, enorm, hnorm, EPS, int32(5, 6), LANES)
    assert torch.equal(out[:, :8], rms_norm_triton(table[[3, 0]], enorm, EPS))
    assert torch.equal(out[:, 8:], rms_norm_triton(hidden, hnorm, EPS))
    assert_same_bytes(rotation, embed_triton(table, int32(3, -1), enorm, EPS, int32(5, 6), LANES).rotation_TX)


def test_wrong_input_is_named():
    table, weight = draws(torch.float32, (2, 8), (8,))
    with pytest.raises(KernelInputError, match="token_ids"):
        draft_input_triton(table, torch.zeros(2, device=DEVICE), table, weight, weight, EPS, int32(0, 1), LANES)
    with pytest.raises(KernelInputError, match=r"positions \(2\)"):
        embed_triton(table, int32(0, 1), weight, EPS, int32(0, 1, 2), LANES)
    lanes = RotationLanes(LANES.frequency_X, LANES.is_cosine_X[:-1])
    with pytest.raises(KernelInputError, match="cosine lanes"):
        embed_triton(table, int32(0, 1), weight, EPS, int32(0, 1), lanes)


@settings(max_examples=8)
@given(T=st.integers(0, 6), D=st.integers(1, 200), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_sweep(T, D, dtype, seed):
    table, weight = draws(dtype, (11, D), (D,), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    ids, positions = (torch.randint(most, (T,), generator=generator).int().to(DEVICE) for most in (11, 524_288))
    check_against_twin(poisoned(embed_triton), embed_torch, table, ids, weight, EPS, positions, LANES)
