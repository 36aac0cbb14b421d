"""Exact top-k of index scores: equal scores go to the smaller position, on every device and in every run.

selected(t) = the min(k, n) visible keys of largest score, n = position of t + 1

A program holds the scores of a row, or of a part of it, in registers and finds the threshold by bisection, on integers
that sort like the floats. At least k scores reach `low`, fewer than k reach `high`; the middle replaces one of the two
until exactly k scores reach `low` or high = low + 1, after 32 steps at most. The keys from `high` on are chosen; those
in between are equal or all wanted: the first by position, until there are k. One prefix sum finds the place of every
chosen key. Rows that are too long, or too few to fill the device, take more steps of the same kernel: the best k
of each part, then the best k of these; they stay in the order of position, so ties are settled alike.
Counts are integers, and the only atomics `or` distinct bits: same input, same bytes. Columns behind a row's position
are not read. Measured on an H200, k = 2048, in a graph: 26 / 30 / 43 / 85 us for 1 / 16 / 64 / 256 rows of 32768,
8 to 12 for those of 4096. Three instructions a score and step, on units of half rate, bound it, not the bytes.
Source: text_model specification, section 7.2.
"""

import torch
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, next_power_of_2, tl, triton

# T query tokens  S key tokens  K selected keys  W words of 32 keys  L listed keys: the best of each part of a row

# The most scores that one program holds: 64 registers of each of 512 threads.
LARGEST_PART = 32768
# What a program takes of a row while there are few: the latency of a step, not its work, bounds that.
SMALL_PART = 8192
# Programs of small parts that run at the same time, four for each multiprocessor.
RESIDENT = 132 * 4


@triton.jit
def _image(x):
    """A float's bits as the integer that sorts like it, or back: the map is its own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(image):
    return _image(image).to(tl.float32, bitcast=True)


@triton.jit
def _chosen(scores, n, k, BLOCK: tl.constexpr):
    """Which of the first n scores are among the best k, and the place of each in their list; both [BLOCK]."""
    s_S = tl.arange(0, BLOCK)
    score_S = tl.load(scores + s_S, mask=s_S < n, other=float("-inf"))
    low = tl.full((), -0x7F800000, tl.int32)  # the lowest finite number: every score, not the infinity of a masked one
    largest = tl.max(score_S)
    high = _image(tl.where(largest == 0.0, 0.0, largest)) + 1  # -0.0 is 0.0, here and where floats are compared
    from_low, from_high = n, 0
    while (from_low > k) & (low + 1 < high):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count = tl.sum((score_S >= _value(middle)).to(tl.int32))
        is_enough = count >= k
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        from_low, from_high = tl.where(is_enough, count, from_low), tl.where(is_enough, from_high, count)
    is_above_S = score_S >= _value(high)
    is_between_S = (score_S >= _value(low)) & (score_S < _value(high))
    # Two counts in one prefix sum, 16 bits each: a part fits.
    pair_S = is_above_S.to(tl.int32) | (is_between_S.to(tl.int32) << 16)
    before_S = tl.cumsum(pair_S, 0) - pair_S
    above_S, between_S = before_S & 0xFFFF, (before_S >> 16) & 0xFFFF
    wanted = k - from_high
    return is_above_S | (is_between_S & (between_S < wanted)), above_S + tl.minimum(between_S, wanted)


@triton.jit
def _select_keys_kernel(
    scores, scores_row, positions, names, names_row, selected, kept, kept_last, selected_row, k,
    IS_LAST: tl.constexpr, HAS_NAMES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.maximum(tl.load(positions + t) + 1, 0)
    n = tl.maximum(tl.minimum(count - part * BLOCK, BLOCK), 0)
    selected += t * selected_row + part * k
    if n > 0:
        is_chosen_S, place_S = _chosen(scores + t * scores_row + part * BLOCK, n, k, BLOCK)
        s_S = part * BLOCK + tl.arange(0, BLOCK)
        if HAS_NAMES:
            name_S = tl.load(names + t * names_row + s_S, mask=is_chosen_S, other=0)
        else:
            name_S = s_S
        tl.store(selected + place_S, name_S, mask=is_chosen_S)
        if not IS_LAST:
            score_S = tl.load(scores + t * scores_row + s_S, mask=is_chosen_S, other=0.0)
            tl.store(kept + t * selected_row + part * k + place_S, score_S, mask=is_chosen_S)
    if IS_LAST:
        place_K = tl.arange(0, BLOCK_K)
        tl.store(selected + place_K, -1, mask=(place_K >= n) & (place_K < k))
    elif part == 0:
        tl.store(kept_last + t, count // BLOCK * k + tl.minimum(count % BLOCK, k) - 1)


@triton.jit
def _select_bits_kernel(scores, scores_row, positions, words, word_count, k, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    n = tl.maximum(tl.load(positions + t) + 1, 0)
    is_chosen_S, _ = _chosen(scores + t * scores_row, n, k, BLOCK)
    bits_W32 = tl.reshape(is_chosen_S.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
    w_W = tl.arange(0, BLOCK // 32)
    tl.store(words + t * word_count + w_W, tl.sum(bits_W32, axis=1), mask=w_W < word_count)


@triton.jit
def _bits_of_keys_kernel(selected, words, word_count, K, BLOCK_K: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    place_K = tl.arange(0, BLOCK_K)
    s_K = tl.load(selected + t * K + place_K, mask=place_K < K, other=-1)
    tl.atomic_or(words + t * word_count + (s_K >> 5), 1 << (s_K & 31), mask=s_K >= 0, sem="relaxed")


def select_keys_torch(scores_TS: Tensor, positions_T: Tensor, k: int) -> Tensor:
    S = scores_TS.shape[1]
    is_visible_TS = torch.arange(S, device=scores_TS.device) <= positions_T[:, None]
    # + 0.0 makes -0.0 positive, which a sort by bits would put first.
    visible_TS = (scores_TS + 0.0).masked_fill(~is_visible_TS, float("-inf"))
    best_TK = visible_TS.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    ascending_TK = best_TK.masked_fill(~is_visible_TS.gather(-1, best_TK), S).sort(dim=-1).values
    return ascending_TK.masked_fill(ascending_TK == S, -1).int()


def select_keys_triton(scores_TS: Tensor, positions_T: Tensor, k: int) -> Tensor:
    """The positions of the k best of the keys up to each row's position: ascending, then -1 where there are no more.

    scores_TS: float32, neither NaN nor infinite up to a row's position; rows may lie further apart than S.
    positions_T: int32, less than S; a negative one selects nothing. k: at least 1.
    Returns int32 [T, min(k, S)]. Raises: KernelInputError for another shape, dtype or a last dim that is not dense, and
    where S exceeds LARGEST_PART and k half of it, so that the best of the parts would hardly be fewer.
    """
    T, S, k = _checked(scores_TS, positions_T, k)
    names_TL = None
    while (part := _part(T, S, k)) < S:
        parts = triton.cdiv(S, part)
        # Written as far as `kept_last_T` says, and read no further.
        kept_TL = scores_TS.new_empty(T, parts * k)
        kept_names_TL = positions_T.new_empty(T, parts * k)
        kept_last_T = torch.empty_like(positions_T)
        _launch(scores_TS, positions_T, names_TL, kept_names_TL, kept_TL, kept_last_T, k, part)
        scores_TS, positions_T, names_TL, S = kept_TL, kept_last_T, kept_names_TL, parts * k
    selected_TK = positions_T.new_empty(T, k)
    _launch(scores_TS, positions_T, names_TL, selected_TK, None, None, k, part)
    return selected_TK


def select_bits_torch(scores_TS: Tensor, positions_T: Tensor, k: int) -> Tensor:
    T, S = scores_TS.shape
    selected_TK = select_keys_torch(scores_TS, positions_T, k).long()
    word_count = -(-S // 32)
    is_selected_TS = torch.zeros(T, word_count * 32 + 1, dtype=torch.int64, device=scores_TS.device)
    is_selected_TS.scatter_(1, selected_TK.masked_fill(selected_TK < 0, word_count * 32), 1)
    bits_TW32 = is_selected_TS[:, :-1].unflatten(1, (word_count, 32)) << torch.arange(32, device=scores_TS.device)
    return bits_TW32.sum(-1).int()


def select_bits_triton(scores_TS: Tensor, positions_T: Tensor, k: int) -> Tensor:
    """The set of `select_keys_triton` as bits: key s is bit s & 31 of word s >> 5.

    Arguments and errors as there. Returns int32 [T, ⌈S / 32⌉], zero where nothing is selected.
    """
    T, S, k = _checked(scores_TS, positions_T, k)
    word_count = triton.cdiv(S, 32)
    if not T or not S:
        return positions_T.new_empty(T, word_count)
    if S > LARGEST_PART:
        selected_TK = select_keys_triton(scores_TS, positions_T, k)
        words_TW = positions_T.new_zeros(T, word_count)
        _bits_of_keys_kernel[(T,)](selected_TK, words_TW, word_count, k, BLOCK_K=next_power_of_2(k))
        return words_TW
    words_TW = positions_T.new_empty(T, word_count)
    BLOCK = max(32, next_power_of_2(S))
    _select_bits_kernel[(T,)](
        scores_TS, scores_TS.stride(0), positions_T, words_TW, word_count, k, BLOCK=BLOCK, num_warps=_warps(BLOCK)
    )
    return words_TW


def _checked(scores_TS: Tensor, positions_T: Tensor, k: int) -> tuple[int, int, int]:
    check_tensor("scores", scores_TS, (None, None), torch.float32)
    T, S = scores_TS.shape
    check_tensor("positions", positions_T, (T,), torch.int32)
    if k < 1:
        raise KernelInputError(f"expected k of at least 1, found {k}")
    if S > LARGEST_PART and 2 * k > LARGEST_PART:
        raise KernelInputError(f"expected k of at most {LARGEST_PART // 2} for rows of {S} scores, found {k}")
    return T, S, min(k, S)


def _launch(
    scores_TS: Tensor,
    positions_T: Tensor,
    names_TS: Tensor | None,
    selected_TL: Tensor,
    kept_TL: Tensor | None,
    kept_last_T: Tensor | None,
    k: int,
    part: int,
) -> None:
    T, S = scores_TS.shape
    if not T or not S:
        return
    _select_keys_kernel[(T, triton.cdiv(S, part))](
        scores_TS, scores_TS.stride(0), positions_T, names_TS, 0 if names_TS is None else names_TS.stride(0),
        selected_TL, kept_TL, kept_last_T, selected_TL.stride(0), k,
        IS_LAST=kept_TL is None, HAS_NAMES=names_TS is not None, BLOCK=part, BLOCK_K=next_power_of_2(k),
        num_warps=_warps(part),
    )  # fmt: skip


def _part(T: int, S: int, k: int) -> int:
    """How much of a row of S scores one program takes; a power of two, at least S when no second step follows."""
    if S > 2 * SMALL_PART and 4 * k <= SMALL_PART and T * triton.cdiv(S, SMALL_PART) <= RESIDENT:
        return SMALL_PART
    return min(LARGEST_PART, max(32, next_power_of_2(S)))


def _warps(BLOCK: int) -> int:
    """32 scores of a thread, more where a block would have over 512 threads: that was faster than 1024."""
    return max(4, min(16, BLOCK // 1024))
