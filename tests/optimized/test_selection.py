"""Exact top-k with the tie rule: kernels equal their twins, whose rule is stated again here in plain Python."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE
from torch import Tensor

from optimized.attention import selection
from optimized.attention.selection import (
    LARGEST_PART,
    SMALL_PART,
    select_bits_torch,
    select_bits_triton,
    select_keys_torch,
    select_keys_triton,
)
from optimized.errors import KernelInputError

# T query tokens  S key tokens  K selected keys  W words of 32 keys

NAN = float("nan")


def by_definition(scores_TS: Tensor, positions_T: Tensor, k: int) -> list[list[int]]:
    lists = []
    for scores, position in zip(scores_TS.tolist(), positions_T.tolist(), strict=True):
        best = sorted(range(position + 1), key=lambda s: (-scores[s], s))[:k]
        lists.append(sorted(best) + [-1] * (min(k, len(scores)) - len(best)))
    return lists


def check(scores_TS: Tensor, positions: list[int], k: int) -> None:
    """Keys and bits of both implementations, NaN behind every row's position and behind the rows."""
    T, S = scores_TS.shape
    wide_TS = torch.full((T, S + 5), NAN, device=DEVICE)
    wide_TS[:, :S] = scores_TS
    for row, position in zip(wide_TS, positions, strict=True):
        row[position + 1 :] = NAN
    scores_TS, positions_T = wide_TS[:, :S], torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    expected = by_definition(scores_TS, positions_T, k)
    for select_keys in (select_keys_torch, select_keys_triton):
        selected_TK = select_keys(scores_TS, positions_T, k)
        assert selected_TK.dtype == torch.int32
        assert selected_TK.tolist() == expected
    words = [[0] * -(-S // 32) for _ in expected]
    for row, keys in zip(words, expected, strict=True):
        for s in (s for s in keys if s >= 0):
            row[s >> 5] |= 1 << (s & 31)
    for select_bits in (select_bits_torch, select_bits_triton):
        words_TW = select_bits(scores_TS, positions_T, k)
        assert words_TW.dtype == torch.int32
        assert [[word & 0xFFFFFFFF for word in row] for row in words_TW.tolist()] == words


def random_scores(T: int, S: int, seed: int = 0) -> Tensor:
    return torch.randn(T, S, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("S", [1, 2, 31, 32, 33, 64, 97, 1000])
@pytest.mark.parametrize("k", [1, 13, 32, 2000])
def test_random_rows_of_every_length(S, k):
    positions = sorted({-1, 0, min(k, S) // 2, min(k, S) - 1, min(k, S - 1), S // 2, S - 1})
    check(random_scores(len(positions), S), positions, k)


def test_at_topk_and_one_more():
    """Prompts of 7, 8 and 9 at top-k 8, in one batch: nothing is dropped before the ninth key."""
    scores_TS = random_scores(3, 9)
    check(scores_TS, [6, 7, 8], 8)
    selected_TK = select_keys_triton(scores_TS.to(DEVICE), torch.tensor([6, 7, 8], dtype=torch.int32, device=DEVICE), 8)
    assert selected_TK[0].tolist() == [*range(7), -1]
    assert selected_TK[1].tolist() == [*range(8)]


def test_ties_go_to_the_smaller_position():
    """Ten keys of which eight score exactly 0.0, of either sign: 25 runs select the same four."""
    scores_TS = torch.tensor([[0.0, -0.0, -0.0, 0.0, 2.0, 0.0, -0.0, 1.0, 0.0, -0.0]])
    check(scores_TS, [9], 4)
    positions_T = torch.tensor([9], dtype=torch.int32, device=DEVICE)
    runs = {tuple(select_keys_triton(scores_TS.to(DEVICE), positions_T, 4)[0].tolist()) for _ in range(25)}
    assert runs == {(0, 1, 4, 7)}


TINY, HUGE = 1e-45, 3.4028234663852886e38
VALUES = {
    "all equal": [1.5],
    "all zero": [0.0],
    "both zeros": [0.0, -0.0],
    "neighbours": [1.0, 1.0 + 2**-23, 1.0 - 2**-24],
    "around zero": [TINY, -TINY, 0.0, -0.0],
    "lowest": [-HUGE],
    "extremes": [HUGE, -HUGE, 0.0, TINY, -TINY],
    "coarse": [x / 4 for x in range(-9, 9)],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_values_that_hurt(values):
    choice_TS = torch.randint(len(values), (5, 77), generator=torch.Generator().manual_seed(0))
    check(torch.tensor(values)[choice_TS], [76, 76, 40, 31, 3], 13)


@pytest.mark.parametrize("order", [1.0, -1.0], ids=["ascending", "descending"])
def test_sorted_rows(order):
    check(order * torch.arange(100.0).repeat(2, 1), [99, 63], 31)


def heavy_tailed(x_TS: Tensor) -> Tensor:
    return x_TS.double().mul(9).exp().float()


DISTRIBUTIONS = {
    "heavy tail": heavy_tailed,
    "heavy tail below": lambda x_TS: -heavy_tailed(x_TS),
    "one sink": lambda x_TS: torch.where(torch.arange(x_TS.shape[1]) == 3, 1e30, x_TS),
    "largest numbers": lambda x_TS: x_TS.sign() * torch.finfo(torch.float32).max,
    "smallest numbers": lambda x_TS: (x_TS * 4).round() * 2.0**-149,
    "two clusters": lambda x_TS: x_TS * 1e-6 + torch.where(x_TS > 0.7, 1e6, -1e6),
    "neighbouring numbers": lambda x_TS: 1.0 + (x_TS * 4).round() * 2.0**-23,
    "constant": lambda x_TS: torch.full_like(x_TS, 0.1),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_scores_that_are_not_normal(name):
    """Where the first probes are far off, the bracket still ends at the k-th score."""
    scores_TS = DISTRIBUTIONS[name](random_scores(4, 300, seed=1))
    for k in (1, 20, 150, 290):
        check(scores_TS, [299, 260, k, k - 1], k)


@pytest.mark.parametrize("probes", [0, 1, 2])
def test_bisection_alone_ends_at_the_same_keys(probes, monkeypatch):
    monkeypatch.setattr(selection, "PROBES", probes)
    check((random_scores(3, 200) * 8).round(), [199, 120, 31], 30)


def test_rows_that_take_every_key_are_not_read():
    """Their scores may be missing: see `unscored` of the index scores."""
    scores_TS = torch.full((3, 70), NAN, device=DEVICE)
    scores_TS[2] = torch.arange(70.0)
    positions_T = torch.tensor([0, 39, 69], dtype=torch.int32, device=DEVICE)
    expected = [[0], [*range(40)], [*range(30, 70)]]
    for select_keys in (select_keys_torch, select_keys_triton):
        keys = select_keys(scores_TS, positions_T, 40).tolist()
        assert [[s for s in row if s >= 0] for row in keys] == expected
    for select_bits in (select_bits_torch, select_bits_triton):
        words_TW = select_bits(scores_TS, positions_T, 40)
        assert [[s for s in range(96) if row[s >> 5] >> (s & 31) & 1] for row in words_TW.tolist()] == expected


def test_padding_rows_select_nothing():
    """Positions below 0, alone and beside a live row."""
    check(random_scores(4, 50), [-1, 30, -1, -1], 7)
    check(random_scores(2, 50), [-1, -1], 7)


def test_no_rows_and_no_columns():
    for scores_TS in (torch.empty(0, 40, device=DEVICE), torch.empty(2, 0, device=DEVICE)):
        T, S = scores_TS.shape
        positions_T = torch.full((T,), -1, dtype=torch.int32, device=DEVICE)
        assert select_keys_triton(scores_TS, positions_T, 7).shape == (T, min(7, S))
        assert select_bits_triton(scores_TS, positions_T, 7).shape == (T, -(-S // 32))


@settings(max_examples=20)
@given(
    st.integers(1, 150),
    st.integers(1, 150),
    st.integers(1, 40),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
    st.integers(0, 99),
)
@example(S=65, k=64, levels=1, ends=[1.0], seed=0)
def test_sweep(S, k, levels, ends, seed):
    """Few levels make many ties; `ends` are the visible parts of the rows."""
    scores_TS = (random_scores(len(ends), S, seed) * levels / 4).round()
    check(scores_TS, [round(end * S) - 1 for end in ends], k)


@pytest.mark.parametrize("S", [2 * SMALL_PART + 1, LARGEST_PART, LARGEST_PART + 1])
@pytest.mark.parametrize("k", [2000, 3000], ids=["small parts", "large parts"])
def test_rows_of_several_parts(S, k):
    positions = [-1, 5, SMALL_PART - 1, SMALL_PART, min(LARGEST_PART, S - 1), S - 1]
    scores_TS = random_scores(len(positions), S)
    scores_TS[-2] = scores_TS[-2].clamp(min=1.6)  # the tie goes on over the borders between parts
    check(scores_TS, positions, k)


@pytest.mark.parametrize("resident", [0, 1000], ids=["large parts", "small parts"])
def test_parts_of_parts(resident, monkeypatch):
    monkeypatch.setattr(selection, "SMALL_PART", 32)
    monkeypatch.setattr(selection, "LARGEST_PART", 64)
    monkeypatch.setattr(selection, "RESIDENT", resident)
    scores_TS = (random_scores(2, 200) * 2).round()
    check(scores_TS, [199, 130], 8)
    check(scores_TS, [199, 63], 30)


def test_equal_calls_give_equal_bytes():
    scores_TS, positions_T = random_scores(3, 300).to(DEVICE), torch.tensor([299, 100, 7], dtype=torch.int32).to(DEVICE)
    for select in (select_keys_triton, select_bits_triton):
        assert torch.equal(select(scores_TS, positions_T, 20), select(scores_TS, positions_T, 20))


def test_refusals_name_what_is_wrong():
    scores_TS, positions_T = torch.zeros(2, 9, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for select in (select_keys_triton, select_bits_triton):
        with pytest.raises(KernelInputError, match=r"scores in torch\.float32"):
            select(scores_TS.bfloat16(), positions_T, 3)
        with pytest.raises(KernelInputError, match=r"positions \(2\)"):
            select(scores_TS, positions_T[:1], 3)
        with pytest.raises(KernelInputError, match="k of at least 1, found 0"):
            select(scores_TS, positions_T, 0)
        with pytest.raises(KernelInputError, match=f"k of at most {LARGEST_PART // 2}"):
            select(torch.zeros(2, LARGEST_PART + 1, device=DEVICE), positions_T, LARGEST_PART)
