"""Bidirectional attention of many sequences against its twin. NaN lies wherever no sequence is."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_good_as_eager, float64
from poison import assert_same_bytes, poisoned
from torch import Tensor

from optimized.attention.varlen import varlen_attention_torch, varlen_attention_triton
from optimized.errors import KernelInputError

# Every size is a compilation of its own on a GPU.
EXAMPLES = 30 if DEVICE == "cpu" else 4


def sequences(lengths: list[int], H: int, X: int, dtype: torch.dtype, seed: int = 0) -> tuple:
    """q, k and v as views of one projection with a head more, between rows of NaN; starts, longest, scale."""
    generator = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    packed = torch.full((T + 5, 3, H + 1, X), float("nan"), dtype=dtype, device=DEVICE)
    packed[2 : T + 2, :, :H] = torch.randn(T, 3, H, X, generator=generator).to(DEVICE, dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).add(2).to(DEVICE, torch.int32)
    q_THX, k_THX, v_THX = packed[:, :, :H].unbind(1)
    return q_THX, k_THX, v_THX, starts, max(lengths), X**-0.5


def check(arguments: tuple) -> Tensor:
    """Within the floor in rows of sequences; what lies outside of them stays as it was."""
    out, eager = (poisoned(f)(*arguments) for f in (varlen_attention_triton, varlen_attention_torch))
    truth = varlen_attention_torch(*float64(*arguments))
    rows = slice(2, len(out) - 3)
    assert_as_good_as_eager(out[rows], eager[rows], truth[rows])
    assert out[:2].isnan().all()
    assert out[-3:].isnan().all()
    return out[rows]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129])
def test_ends_of_tiles(length: int, dtype: torch.dtype) -> None:
    check(sequences([length], 2, 12, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lengths",
    [[1, 1, 1], [0, 7, 0, 0, 13, 0], [1, 150, 3, 2, 5], [64, 64, 64], [37]],
    ids=["ones", "empty", "one-long", "tiles", "prime"],
)
def test_ragged_sequences(lengths: list[int], dtype: torch.dtype) -> None:
    check(sequences(lengths, 3, 16, dtype))


def test_the_tiles_of_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU takes from MANY_ROWS on, at lengths that the interpreter can take."""
    monkeypatch.setattr("optimized.attention.varlen.MANY_ROWS", 1)
    for lengths in ([127], [128, 129], [1, 200, 3]):
        check(sequences(lengths, 2, 12, torch.bfloat16))


@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from([1, 12, 16, 17, 64]),
    st.integers(0, 99),
)
@example(torch.bfloat16, [0], 1, 16, 0)
def test_sizes(dtype: torch.dtype, lengths: list[int], H: int, X: int, seed: int) -> None:
    arguments = sequences(lengths, H, X, dtype, seed)
    if sum(lengths):
        check(arguments)
    else:
        assert poisoned(varlen_attention_triton)(*arguments).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_is_the_same_alone_and_in_company(dtype: torch.dtype) -> None:
    """Bytes, as long as `longest` is the same, which decides the tiles."""
    lengths = [9, 70, 33]
    q, k, v, starts, longest, scale = sequences(lengths, 2, 16, dtype)
    together = varlen_attention_triton(q, k, v, starts, longest, scale)
    for start, end in pairwise(starts.tolist()):
        alone = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        own = varlen_attention_triton(q[start:end], k[start:end], v[start:end], alone, longest, scale)
        assert_same_bytes(own, together[start:end])


def test_scores_of_thousands_do_not_overflow() -> None:
    """The maximum is taken off before the exponential, so that nearly all weight is on one key."""
    q, k, v, starts, longest, scale = sequences([40], 1, 16, torch.float32)
    check((q * 300, k * 300, v, starts, longest, scale))


def test_it_refuses_what_it_cannot_read() -> None:
    q, k, v, starts, longest, scale = sequences([5], 2, 16, torch.float32)
    for arguments, told in (
        ((q[0], k, v, starts, longest, scale), r"expected q \(any, any, any\)"),
        ((q, k[:4], v, starts, longest, scale), r"expected k \(10, 2, 16\), found \(4, 2, 16\)"),
        ((q, k, v.bfloat16(), starts, longest, scale), r"expected v in torch.float32, found torch.bfloat16"),
        ((q, k, v.mT.contiguous().mT, starts, longest, scale), "expected v with a dense last dim"),
        ((q, k, v, starts.long(), longest, scale), "expected starts in torch.int32"),
        ((q, k, v, starts, longest, -1.0), r"expected a positive scale, found -1.0"),
    ):
        with pytest.raises(KernelInputError, match=told):
            varlen_attention_triton(*arguments)
