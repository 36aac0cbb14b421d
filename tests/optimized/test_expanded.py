"""The prefill core against its twin: ragged requests, windows, selections. NaN lies wherever nothing was written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, check_against_twin
from poison import assert_same_bytes, poisoned
from torch import Tensor

from optimized.attention.absorbed import ring_attention_triton
from optimized.attention.expanded import expanded_attention_torch, expanded_attention_triton, key_blocks
from optimized.errors import KernelInputError

# tiny(): full layers H 6, N 12, R 8, V 10; sliding layers H 4, N 15, R 6, V 11, window 7.
FULL, SLIDING = (6, 12, 8, 10), (4, 15, 6, 11)
# Every size is a compilation of its own on a GPU.
EXAMPLES = 10 if DEVICE == "cpu" else 2
WORD = torch.arange(32, dtype=torch.int64)


def int32(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def random_bits(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(DEVICE, torch.int32)


def prefill(
    lengths: list[int],
    before: list[int],
    window: int | None,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    selection: bool = False,
    seed: int = 0,
) -> tuple:
    """Requests with new tokens and earlier ones; of the earlier only what a window needs is gathered.

    The rows of keys lie between rows of NaN, and the rope keys at the end of wider rows.
    """
    generator = torch.Generator().manual_seed(seed)
    H, N, R, V = sizes
    kept = [b if window is None else min(b, window - 1) for b in before]
    keys = [k + n for k, n in zip(kept, lengths, strict=True)]
    T, S = sum(lengths), sum(keys)
    kv = torch.full((S + 4, H + 1, N + V + 1), float("nan"), dtype=dtype, device=DEVICE)[:, :H, : N + V]
    latents = torch.full((S + 4, R + 5), float("nan"), dtype=dtype, device=DEVICE)
    k_rope = latents[:, 5:]
    kv[2 : S + 2] = torch.randn(S, H, N + V, generator=generator).to(DEVICE, dtype)
    k_rope[2 : S + 2] = torch.randn(S, R, generator=generator).to(DEVICE, dtype)
    positions = [p for b, n in zip(before, lengths, strict=True) for p in range(b, b + n)]
    words = (max([1, *(b + n for b, n in zip(before, lengths, strict=True))]) + 31) // 32
    return (
        torch.randn(T, H, N + R, generator=generator).to(DEVICE, dtype),
        kv,
        k_rope,
        int32([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        int32([2, *(torch.tensor(keys).cumsum(0) + 2).tolist()]),
        int32(positions),
        int32([b - k for b, k in zip(before, kept, strict=True)]),
        window,
        random_bits(generator, T, words) if selection else None,
        (N + R) ** -0.5,
        N,
        max(lengths),
    )


def masked(*positions: int, words: int) -> Tensor:
    """Words with the bits of these positions set."""
    bits = torch.zeros(words * 32, dtype=torch.int64)
    bits[list(positions)] = 1
    return (bits.view(words, 32) << WORD).sum(-1).to(DEVICE, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("selection", [False, True], ids=["all", "selected"])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_ragged_requests(window: int | None, selection: bool, dtype: torch.dtype) -> None:
    """A prompt, a request without tokens, a chunk behind 60 positions, one token alone."""
    sizes = FULL if window is None else SLIDING
    arguments = prefill([37, 0, 5, 1], [0, 0, 60, 33], window, dtype, sizes, selection)
    check_against_twin(poisoned(expanded_attention_triton), expanded_attention_torch, *arguments)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_ends_of_tiles(length: int) -> None:
    for window, selection in ((None, False), (16, False), (None, True)):
        arguments = prefill([length], [0], window, torch.float32, FULL, selection)
        check_against_twin(poisoned(expanded_attention_triton), expanded_attention_torch, *arguments)


@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 3), st.sampled_from([1, 16, 24, 48]), st.integers(1, 20), st.sampled_from([1, 17, 32])),
    st.lists(st.integers(0, 34), min_size=1, max_size=3),
    st.none() | st.integers(1, 50),
    st.booleans(),
    st.integers(0, 70),
)
def test_sizes(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    lengths: list[int],
    window: int | None,
    selection: bool,
    history: int,
) -> None:
    before = [history] * len(lengths)
    arguments = prefill(lengths, before, window, dtype, sizes, selection, seed=history)
    check_against_twin(poisoned(expanded_attention_triton), expanded_attention_torch, *arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_window_counts_the_token_itself(dtype: torch.dtype) -> None:
    """C15: with window 4, four tokens are plain causal attention; of five exactly (query 4, key 0) is gone."""
    four, causal = (prefill([4], [0], window, dtype, FULL) for window in (4, None))
    assert_same_bytes(expanded_attention_triton(*four), expanded_attention_triton(*causal))
    q, kv, k_rope, query_start, key_start, positions, first_key, _, _, scale, N, most = prefill(
        [5], [0], None, dtype, (1, 12, 8, 10)
    )
    q.zero_()
    kv[2:7, 0, N:] = torch.eye(10, dtype=dtype, device=DEVICE)[:5]
    arguments = (q, kv, k_rope, query_start, key_start, positions, first_key, 4, None, scale, N, most)
    seen = expanded_attention_triton(*arguments)[:, 0, :5] > 0
    expected = torch.ones(5, 5, dtype=torch.bool, device=DEVICE).tril()
    expected[4, 0] = False
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_over_a_ring_is_the_last_row_of_a_prefill(dtype: torch.dtype) -> None:
    """C16: window 4, a prompt of 6, three decode steps. Keys that are the latents themselves make both forms equal."""
    C, R, window = 16, 6, 4
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(9, C + R, generator=generator).to(DEVICE, dtype)
    q = torch.randn(9, 2, C + R, generator=generator).to(DEVICE, dtype)
    kv = torch.cat((row[:, :C], row[:, :C]), dim=-1)[:, None].expand(-1, 2, -1)
    whole = expanded_attention_torch(
        q.double(), kv.double(), row[:, C:].double(), int32([0, 9]), int32([0, 9]), int32(range(9)), int32([0]),
        window, None, 0.2, C, 9,
    )  # fmt: skip
    ring = torch.full((1, window, C + R), float("nan"), dtype=dtype, device=DEVICE)
    for step in range(9):
        ring[0, step % window] = row[step]
        if step >= 6:
            out = ring_attention_triton(q[step, None], ring, int32([0]), int32([step]), window, 0.2, C)
            torch.testing.assert_close(
                out.double(), whole[step, None], rtol=0, atol=4 * torch.finfo(dtype).eps * float(whole.abs().max())
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [7, 8, 9, 33])
def test_a_selection_of_all_keys_is_dense(length: int, dtype: torch.dtype) -> None:
    """C12: bit for bit, also with bits of future positions set; and beside a request that selects less."""
    dense = prefill([length, 8], [0, 0], None, dtype, FULL)
    selection = torch.full((length + 8, 2), -1, dtype=torch.int32, device=DEVICE)
    out = expanded_attention_triton(*dense)
    assert_same_bytes(expanded_attention_triton(*dense[:8], selection, *dense[9:]), out)
    selection[-1] = masked(0, words=2)
    assert_same_bytes(expanded_attention_triton(*dense[:8], selection, *dense[9:])[:-1], out[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_hot_and_empty_selections(dtype: torch.dtype) -> None:
    """Tiles without a selected key are left out; a query that selects nothing gives zeros."""
    arguments = prefill([40], [90], None, dtype, (2, 12, 8, 10))
    selection = torch.zeros(40, 5, dtype=torch.int32, device=DEVICE)
    selection[3], selection[17], selection[39] = masked(0, words=5), masked(95, words=5), masked(64, 129, words=5)
    arguments = (*arguments[:8], selection, *arguments[9:])
    check_against_twin(poisoned(expanded_attention_triton), expanded_attention_torch, *arguments)
    out = poisoned(expanded_attention_triton)(*arguments)
    live = torch.zeros(40, dtype=torch.bool, device=DEVICE)
    live[[3, 17, 39]] = True
    assert torch.equal(out.flatten(1).any(-1), live)
    torch.testing.assert_close(out[3], arguments[1][2, :, 12:], rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bytes_twice_alone_and_with_other_tiles_before(dtype: torch.dtype) -> None:
    arguments = prefill([20, 33], [40, 0], 7, dtype, SLIDING)
    out = expanded_attention_triton(*arguments)
    assert_same_bytes(expanded_attention_triton(*arguments), out)
    q, kv, k_rope, query_start, key_start, positions, first_key, *rest = arguments
    alone = expanded_attention_triton(
        q[20:], kv, k_rope, query_start[1:] - 20, key_start[1:], positions[20:], first_key[1:], *rest
    )
    assert_same_bytes(alone, out[20:])


def test_no_queries() -> None:
    q, kv, k_rope, query_start, key_start, positions, *rest = prefill([3], [0], 7, torch.float32, SLIDING)
    out = expanded_attention_triton(q[:0], kv, k_rope, query_start * 0, key_start, positions[:0], *rest)
    assert out.shape == (0, 4, 11)


def test_offsets_past_32_bits() -> None:
    """C14: key rows that lie 2^30 elements apart; the memory between them is never touched."""
    q, kv, k_rope, *rest = prefill([3], [0], None, torch.bfloat16, (2, 12, 8, 10))
    memory = torch.empty(3 * 2**30 + 4096, dtype=torch.bfloat16, device=DEVICE)
    far = memory.as_strided((3, 2, 22), (3 * 2**29, 22, 1)).copy_(kv[2:5])
    near = expanded_attention_triton(q, kv[2:5], k_rope[2:5], rest[0], rest[1] - 2, *rest[2:])
    assert_same_bytes(expanded_attention_triton(q, far, k_rope[2:5], rest[0], rest[1] - 2, *rest[2:]), near)


def test_a_key_is_covered_by_two_blocks() -> None:
    assert key_blocks(128, 64) == (128, 64, 0)
    assert key_blocks(192, 64) == (128, 128, 64)
    for N in range(1, 300):
        block_N, block_R, rest = key_blocks(N, 64)
        assert N - rest <= block_N
        assert rest + 64 <= block_R
        assert rest == max(0, N - block_N)


def test_wrong_tensors_are_named() -> None:
    arguments = prefill([3], [0], 7, torch.float32, SLIDING)
    with pytest.raises(KernelInputError, match=r"expected k_rope \(7, 6\), found \(7, 5\)"):
        expanded_attention_triton(*arguments[:2], arguments[2][:, :-1], *arguments[3:])
    with pytest.raises(KernelInputError, match=r"positions in torch.int32, found torch.int64"):
        expanded_attention_triton(*arguments[:5], arguments[5].long(), *arguments[6:])
