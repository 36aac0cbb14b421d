"""Decode cores over pages and rings, and the merge of parts, against their twins.

NaN lies wherever nothing was written.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_good_as_eager, check_against_twin
from poison import assert_same_bytes, poisoned
from torch import Tensor

from optimized.attention.absorbed import (
    ring_attention_torch,
    ring_attention_triton,
    sparse_attention_torch,
    sparse_attention_triton,
)
from optimized.attention.combine import merge_parts_torch, merge_parts_triton
from optimized.attention.one_pass import parts_of_tiles, takes_pages, takes_ring
from optimized.attention.two_pass import parts_of
from optimized.errors import KernelInputError

# tiny(): full layers H 6, C 16, R 8, 13 selected keys; sliding layers H 4, C 48, R 6, window 7.
FULL = {"H": 6, "C": 16, "R": 8}
SLIDING = {"H": 4, "C": 48, "R": 6}
# Every size is a compilation of its own on a GPU.
EXAMPLES = 12 if DEVICE == "cpu" else 2


def int32(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def paged(
    lengths: list[int],
    selected: list[list[int]],
    page_size: int,
    dtype: torch.dtype,
    H: int,
    C: int,
    R: int,
    seed: int = 0,
) -> tuple:
    """One token for each length; pages in shuffled order inside a pool with wider rows, and a table with wild ends."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(pages) + 2, generator=generator).tolist()
    pool = torch.full((sum(pages) + 2, page_size, C + R + 3), float("nan"), dtype=dtype, device=DEVICE)[..., : C + R]
    table = torch.full((len(lengths), max(pages) + 1), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    for request, count in enumerate(pages):
        for index in range(count):
            page = order.pop()
            table[request, index] = page
            rows = min(page_size, lengths[request] - index * page_size)
            pool[page, :rows] = torch.randn(rows, C + R, generator=generator).to(DEVICE, dtype)
    q = torch.randn(len(lengths), H, C + R, generator=generator).to(DEVICE, dtype)
    return q, pool, int32(selected), table, int32(range(len(lengths))), (C + R) ** -0.5, C


def ringed(
    positions: list[int], ring_rows: int, window: int, dtype: torch.dtype, H: int, C: int, R: int, seed: int = 0
) -> tuple:
    """One ring for each token, in reverse; only the rows of the window are written."""
    generator = torch.Generator().manual_seed(seed)
    count = len(positions)
    pool = torch.full((count + 1, ring_rows + 1, C + R + 2), float("nan"), dtype=dtype, device=DEVICE)
    pool = pool[:, :ring_rows, : C + R]
    for ring, last in enumerate(reversed(positions)):
        for position in range(max(0, last - window + 1), last + 1):
            pool[ring, position % ring_rows] = torch.randn(C + R, generator=generator).to(DEVICE, dtype)
    q = torch.randn(count, H, C + R, generator=generator).to(DEVICE, dtype)
    return q, pool, int32(range(count - 1, -1, -1)), int32(positions), window, (C + R) ** -0.5, C


def choose(length: int, count: int, slots: int, seed: int) -> list[int]:
    """`count` of `length` positions in random order, among -1 at random places."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(length, generator=generator)[:count].tolist()
    row = torch.full((slots,), -1)
    row[torch.randperm(slots, generator=generator)[: len(positions)]] = torch.tensor(positions, dtype=torch.int64)
    return row.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_sparse_attention_is_as_good_as_its_twin(page_size: int, dtype: torch.dtype) -> None:
    lengths = [1, 13, 40, 70]
    selected = [choose(n, 13, 13, seed=n) for n in lengths]
    arguments = paged(lengths, selected, page_size, dtype, **FULL)
    for splits in (None, 1, 2, 5):
        check_against_twin(poisoned(sparse_attention_triton), sparse_attention_torch, *arguments, splits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "ring_rows"), [(7, 7), (7, 10), (1, 1), (64, 64), (65, 70), (130, 131)])
def test_ring_attention_is_as_good_as_its_twin(window: int, ring_rows: int, dtype: torch.dtype) -> None:
    arguments = ringed([0, window - 1, window, 5 * ring_rows + 3], ring_rows, window, dtype, **SLIDING)
    for splits in (None, 2):
        check_against_twin(poisoned(ring_attention_triton), ring_attention_torch, *arguments, splits)


@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 20),
    st.sampled_from([1, 15, 16, 17, 33]),
    st.sampled_from([1, 2, 7]),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_sizes(dtype: torch.dtype, H: int, C: int, R: int, lengths: list[int], slots: int, seed: int) -> None:
    selected = [choose(n, slots - seed, slots, seed) for n in lengths]
    check_against_twin(
        poisoned(sparse_attention_triton),
        sparse_attention_torch,
        *paged(lengths, selected, 5, dtype, H, C, R, seed),
    )
    check_against_twin(
        poisoned(ring_attention_triton),
        ring_attention_torch,
        *ringed([n - 1 for n in lengths], slots + 2, slots, dtype, H, C, R, seed),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sentinels_anywhere_and_tiles_of_sentinels_only(dtype: torch.dtype) -> None:
    """C11: row 0 of the pool is NaN, whole tiles select nothing, and the order of the list does not matter."""
    live = [5, 1, 8, 3]
    rows = [[-1] * 80 + live + [-1] * 6, [*live, *[-1] * 86], [-1] * 8 + live + [-1] * 78]
    q, pool, selected, table, request, scale, C = paged([9] * 3, rows, 4, dtype, **FULL)
    q[:], request[:] = q[0].clone(), 0
    pool[table[0, 0], 0] = float("nan")
    arguments = (q, pool, selected, table, request, scale, C)
    check_against_twin(poisoned(sparse_attention_triton), sparse_attention_torch, *arguments, 1)
    dense = int32([live])
    truth = sparse_attention_torch(q[:1].double(), pool.double(), dense, table, request[:1], scale, C)
    eager = sparse_attention_torch(q[:1], pool, dense, table, request[:1], scale, C)
    for splits in (1, 3):
        for row in sparse_attention_triton(*arguments, splits):
            assert_as_good_as_eager(row[None], eager, truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_see_gives_zeros(dtype: torch.dtype) -> None:
    """Padding rows of a captured batch: no selected key, a negative position, and ids that must not be used."""
    q, pool, selected, table, request, *rest = paged([9, 9], [[-1] * 13, [3] + [-1] * 12], 4, dtype, **FULL)
    request[0] = 2**31 - 1
    for kernel in (poisoned(sparse_attention_triton), sparse_attention_torch):
        for splits in (1, 3):
            out = kernel(q, pool, selected, table, request, *rest, splits)
            assert not out[0].any()
            # With one key the softmax is 1, and the output is the key's latent.
            latent = pool[table[1, 0], 3, : rest[-1]].expand_as(out[1])
            torch.testing.assert_close(out[1], latent, rtol=2 * torch.finfo(dtype).eps, atol=0)

    q, pool, ring, positions, *rest = ringed([3, 6], 7, 7, dtype, **SLIDING)
    ring[0], positions[0] = 2**31 - 1, -1
    for kernel in (poisoned(ring_attention_triton), ring_attention_torch):
        for splits in (1, 2):
            out = kernel(q, pool, ring, positions, *rest, splits)
            assert not out[0].any()
            assert out[1].isfinite().all()


def test_no_tokens() -> None:
    q, pool, selected, table, request, *rest = paged([3], [[0, 1]], 2, torch.float32, **FULL)
    assert sparse_attention_triton(q[:0], pool, selected[:0], table, request[:0], *rest).shape == (0, 6, 16)
    q, pool, ring, positions, *rest = ringed([3], 7, 7, torch.float32, **SLIDING)
    assert ring_attention_triton(q[:0], pool, ring[:0], positions[:0], *rest).shape == (0, 4, 48)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unused_rows_of_a_page_stay_out(dtype: torch.dtype) -> None:
    """C40: a page of 4, a sequence of 5, NaN in the 3 rows that were not written."""
    arguments = paged([5], [[0, 1, 2, 3, 4, -1, -1, -1]], 4, dtype, **FULL)
    assert arguments[1].isnan().any()
    assert poisoned(sparse_attention_triton)(*arguments).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bytes_twice_and_alone(dtype: torch.dtype) -> None:
    arguments = paged([30, 7, 19], [choose(n, 13, 20, n) for n in (30, 7, 19)], 4, dtype, **FULL)
    assert_same_bytes(sparse_attention_triton(*arguments), sparse_attention_triton(*arguments))
    q, pool, selected, table, request, *rest = arguments
    alone = sparse_attention_triton(q[1:2], pool, selected[1:2], table, request[1:2], *rest, splits=1)
    assert_same_bytes(alone, sparse_attention_triton(*arguments, splits=1)[1:2])

    arguments = ringed([100, 3, 12], 10, 7, dtype, **SLIDING)
    assert_same_bytes(ring_attention_triton(*arguments), ring_attention_triton(*arguments))
    q, pool, ring, positions, *rest = arguments
    alone = ring_attention_triton(q[1:2], pool, ring[1:2], positions[1:2], *rest, splits=1)
    assert_same_bytes(alone, ring_attention_triton(*arguments, splits=1)[1:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers(dtype: torch.dtype) -> None:
    """Scores of +-1000s, so that tiles differ by more than the range of float32's exponent."""
    q, pool, selected, table, *rest = paged([150], [choose(150, 150, 150, 0)], 64, dtype, **FULL)
    arguments = (q * 100, pool * 10, selected, table, *rest)
    for splits in (1, 2):
        check_against_twin(sparse_attention_triton, sparse_attention_torch, *arguments, splits)


def test_the_window_counts_the_token_itself() -> None:
    """C15: window 4, one-hot values; the token at position 4 no longer sees position 0, the one at 3 still does."""
    latent = torch.eye(16, device=DEVICE)[:5]
    pool = torch.zeros(2, 6, 20, device=DEVICE)
    pool[:, :5, :16] = latent
    out = ring_attention_triton(torch.zeros(2, 1, 20, device=DEVICE), pool, int32([0, 1]), int32([3, 4]), 4, 1.0, 16)
    expected = torch.zeros(2, 16, device=DEVICE)
    expected[0, 0:4] = expected[1, 1:5] = 0.25
    assert_same_bytes(out[:, 0], expected)


def test_offsets_past_32_bits() -> None:
    """C14: rows that lie 2^31 elements into the pool; the memory between them is never touched."""
    far = 2**31 + 64
    memory = torch.empty(far + 4096, dtype=torch.bfloat16, device=DEVICE)
    rows = normal(1, 2, 4, 24, dtype=torch.bfloat16)
    pool = memory.as_strided((2, 4, 24), (far, 24, 1)).copy_(rows)
    q = normal(2, 1, 6, 24, dtype=torch.bfloat16)
    one = int32([0])
    arguments = (int32([[3, -1, 4, 7, 5]]), int32([[0, 1]]), one, 0.2, 16)
    assert_same_bytes(sparse_attention_triton(q, pool, *arguments), sparse_attention_triton(q, rows, *arguments))
    arguments = (int32([1]), int32([9]), 4, 0.2, 16)
    assert_same_bytes(ring_attention_triton(q, pool, *arguments), ring_attention_triton(q, rows, *arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [10, 9, 5, 0])
def test_parts_merge_to_the_whole(first: int, dtype: torch.dtype) -> None:
    """C37: ten keys as 10 + 0, 9 + 1, 5 + 5 and 0 + 10; the empty part's output is NaN and must not matter."""
    score, value = normal(3, 1, 6, 10) * 3, normal(4, 10, 16).to(dtype).float()
    parts = torch.full((2, 1, 6, 16), float("nan"), device=DEVICE)
    lse = torch.full((2, 1, 6), float("-inf"), device=DEVICE)
    for part, keys in enumerate((slice(0, first), slice(first, 10))):
        if score[..., keys].shape[-1]:
            parts[part] = score[..., keys].softmax(-1) @ value[keys]
            lse[part] = score[..., keys].logsumexp(-1)
    merged, total = poisoned(merge_parts_triton)(parts, lse)
    check_against_twin(poisoned(merge_parts_triton), merge_parts_torch, parts, lse)
    assert_as_good_as_eager(merged, score.softmax(-1) @ value, score.double().softmax(-1) @ value.double())
    assert_as_good_as_eager(total, score.logsumexp(-1), score.double().logsumexp(-1))
    out = torch.full((1, 6, 16), float("nan"), dtype=dtype, device=DEVICE)
    merge_parts_triton(parts, lse, out=out)
    torch.testing.assert_close(out, merged.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_merge_of_empty_parts_and_of_many() -> None:
    parts = torch.full((3, 2, 2, 5), float("nan"), device=DEVICE)
    lse = torch.full((3, 2, 2), float("-inf"), device=DEVICE)
    merged, total = merge_parts_triton(parts, lse)
    assert not merged.any()
    assert_same_bytes(total, lse[0])
    check_against_twin(
        poisoned(merge_parts_triton), merge_parts_torch, normal(5, 17, 3, 2, 33), normal(6, 17, 3, 2) * 50
    )


def test_few_tokens_are_split_and_many_are_not() -> None:
    assert parts_of(programs=8, tiles=16) == 8
    assert parts_of(programs=64, tiles=16) == 2
    assert parts_of(programs=256, tiles=16) == 1
    assert parts_of(programs=1, tiles=1) == 1


def test_one_pass_is_split_by_rounds_of_its_programs() -> None:
    """Two programs a token over 32 tiles, four rounds of 132 and their like."""
    assert parts_of_tiles(programs=2, tiles=32) == 32
    assert parts_of_tiles(programs=32, tiles=32) == 4
    assert parts_of_tiles(programs=64, tiles=32) == 2
    assert parts_of_tiles(programs=128, tiles=32) == 1
    assert parts_of_tiles(programs=512, tiles=32) == 1
    assert parts_of_tiles(programs=1, tiles=1) == 1


def test_one_pass_is_for_compiled_kernels_only() -> None:
    q, pool = torch.zeros(64, 128, 576, dtype=torch.bfloat16), torch.zeros(1, 1, 576, dtype=torch.bfloat16)
    assert not takes_pages(q, pool, 512)
    q, pool = torch.zeros(64, 64, 1088, dtype=torch.bfloat16), torch.zeros(1, 1, 1088, dtype=torch.bfloat16)
    assert not takes_ring(q, pool, 1024, None)


def test_wrong_tensors_are_named() -> None:
    q, pool, selected, table, request, *rest = paged([3], [[0, 1]], 2, torch.float32, **FULL)
    with pytest.raises(KernelInputError, match=r"selected .*torch.int32, found torch.int64"):
        sparse_attention_triton(q, pool, selected.long(), table, request, *rest)
    with pytest.raises(KernelInputError, match=r"expected pool \(any, any, 24\), found"):
        sparse_attention_triton(q, pool[..., :-1], selected, table, request, *rest)
    q, pool, ring, positions, *rest = ringed([3], 7, 7, torch.float32, **SLIDING)
    with pytest.raises(KernelInputError, match=r"positions \(1\), found \(0,\)"):
        ring_attention_triton(q, pool, ring, positions[:0], *rest)
