"""Exact top-k of index scores: equal scores go to the smaller position, on every device and in every run.

selected(t) = the min(k, n) visible keys of largest score, n = position of t + 1

A program holds the scores of a row, or of a part of it, in registers and brackets the threshold, on integers that sort
like the floats: at least k scores reach `low`, fewer than k reach `high`, and a probe in between that is counted
replaces one of the two, until exactly k reach `low` or high = low + 1. The first probe is where the threshold of a
normal distribution would lie; the next go on from there, four times as far each, until one falls on the other side;
then they interpolate, and bisect where that does not halve what lies between. Smooth scores take 5 to 8 probes. After
PROBES of them, ties and gaps are left to bisection of the integers, in at most 32 steps.
A second pass over the row in pieces chooses the keys from `high` on; those in between are equal or all wanted: the
first by position, until there are k. A prefix sum finds the place of every chosen key. Rows that are too long, or too
few to fill the device, take more steps of the same kernel: the best k of each part, then the best k of these; they
stay in the order of position, so ties are settled alike. Where a row sees at most k keys no score is read.
Counts are integers, and the only atomics `or` distinct bits: same input, same bytes. Columns behind a row's position
are not read. Source: text_model specification, section 7.2.

Measured on an H200, k = 2048, in a graph with a cold cache: 26 / 30 / 39 / 75 us for 1 / 16 / 64 / 256 rows of 32768
(29 / 33 / 46 / 95 by bisection alone), 11 for 64 rows of 4096; for all rows of a prompt of 4096 and of 8192 tokens 54
and 271, for 4096 rows of 16384 scores 456. Few rows are bound by the chain of dependent steps: loads, probes, pieces.
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
# Guesses at the threshold; a row that they do not settle is bisected, in at most 32 steps more.
PROBES = 10


@triton.jit
def _image(x):
    """A float's bits as the integer that sorts like it, or back: the map is its own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(image):
    return _image(image).to(tl.float32, bitcast=True)


@triton.jit
def _guess(score_S, is_key_S, n, k):
    """Where the k-th largest of n would lie if the scores were normal, and how many there would be to a unit of score.

    The quantile is formula 26.2.22 of Abramowitz and Stegun, good to 0.003 standard deviations.
    """
    mean = tl.sum(tl.where(is_key_S, score_S, 0.0)) / n
    square = tl.sum(tl.where(is_key_S, (score_S - mean) * (score_S - mean), 0.0)) / n
    deviation = tl.maximum(tl.sqrt(square), 1e-30)
    share = (k - 0.5) / n
    t = tl.sqrt(-2.0 * tl.log(tl.minimum(share, 1.0 - share)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    z = tl.where(share <= 0.5, z, -z)
    return mean + deviation * z, n * 0.398942 * tl.exp(-0.5 * z * z) / deviation


@triton.jit
def _threshold(scores, n, k, PROBES: tl.constexpr, BLOCK: tl.constexpr):
    """(low, high, from_high): at least k of the n scores reach `low`, fewer than k reach `high`, from_high in number.

    Exactly k reach `low`, or high = low + 1. Where n <= k nothing is read.
    """
    low = tl.full((), -0x7F800000, tl.int32)  # the lowest finite number: every score, not the infinity of a masked one
    high = tl.full((), 0x7F800000, tl.int32)
    from_low, from_high = n, 0
    if n > k:
        s_S = tl.arange(0, BLOCK)
        is_key_S = s_S < n
        score_S = tl.load(scores + s_S, mask=is_key_S, other=float("-inf"))
        probe, density = _guess(score_S, is_key_S, n, k)
        step, between, probes = 0.0, n, 0
        while (from_low > k) & (low + 1 < high):
            image = tl.minimum(tl.maximum(_image(probe), low + 1), high - 1)
            is_probe = (probes < PROBES) & (tl.abs(probe) < float("inf"))
            image = tl.where(is_probe, image, (low >> 1) + (high >> 1) + (low & high & 1))
            value = _value(image)
            count = tl.sum((score_S >= value).to(tl.int32))
            is_enough = count >= k
            low, high = tl.where(is_enough, image, low), tl.where(is_enough, high, image)
            from_low, from_high = tl.where(is_enough, count, from_low), tl.where(is_enough, from_high, count)
            probes += 1
            if (from_low < n) & (from_high > 0):
                share = (from_low - k + 0.5) / (from_low - from_high + 1)
                share = tl.where(((from_low - from_high) * 2 > between) & (probes % 2 == 0), 0.5, share)
                between = from_low - from_high
                probe = _value(low) + (_value(high) - _value(low)) * share
            else:
                step = tl.maximum(4.0 * step, (1.25 * tl.abs(count - k) + 2.0) / density)
                probe = value + tl.where(is_enough, step, -step)
    return low, high, from_high


@triton.jit
def _chosen(score_S, is_key_S, n, k, low, high, wanted, above, between):
    """Which scores are among the best k, the place of each in their list, and `above` and `between` moved on.

    `above` scores before these reach `high`, `between` lie from `low` on below it: of these `wanted` are chosen.
    """
    is_above_S = score_S >= _value(high)
    is_between_S = tl.where(n > k, (score_S >= _value(low)) & (score_S < _value(high)), is_key_S)
    # Two counts in one prefix sum, 16 bits each: a part fits.
    pair_S = is_above_S.to(tl.int32) | (is_between_S.to(tl.int32) << 16)
    before_S = tl.cumsum(pair_S, 0) - pair_S
    above_S, between_S = above + (before_S & 0xFFFF), between + ((before_S >> 16) & 0xFFFF)
    pair = tl.sum(pair_S)
    is_chosen_S = is_above_S | (is_between_S & (between_S < wanted))
    return is_chosen_S, above_S + tl.minimum(between_S, wanted), above + (pair & 0xFFFF), between + (pair >> 16)


@triton.jit
def _select_keys_kernel(
    scores, scores_row, positions, names, names_row, selected, kept, kept_last, selected_row, k,
    IS_LAST: tl.constexpr, HAS_NAMES: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.maximum(tl.load(positions + t) + 1, 0)
    n = tl.maximum(tl.minimum(count - part * BLOCK, BLOCK), 0)
    scores += t * scores_row + part * BLOCK
    selected += t * selected_row + part * k
    low, high, from_high = _threshold(scores, n, k, PROBES, BLOCK)
    above, between = 0, 0
    for start in range(0, n, BLOCK_S):
        s_S = start + tl.arange(0, BLOCK_S)
        score_S = tl.load(scores + s_S, mask=s_S < tl.where(n > k, n, 0), other=float("-inf"))
        is_chosen_S, place_S, above, between = _chosen(score_S, s_S < n, n, k, low, high, k - from_high, above, between)
        if HAS_NAMES:
            name_S = tl.load(names + t * names_row + part * BLOCK + s_S, mask=is_chosen_S, other=0)
        else:
            name_S = part * BLOCK + s_S
        tl.store(selected + place_S, name_S, mask=is_chosen_S)
        if not IS_LAST:
            score_S = tl.load(scores + s_S, mask=is_chosen_S, other=0.0)
            tl.store(kept + t * selected_row + part * k + place_S, score_S, mask=is_chosen_S)
    if IS_LAST:
        place_K = tl.arange(0, BLOCK_K)
        tl.store(selected + place_K, -1, mask=(place_K >= n) & (place_K < k))
    elif part == 0:
        tl.store(kept_last + t, count // BLOCK * k + tl.minimum(count % BLOCK, k) - 1)


@triton.jit
def _select_bits_kernel(
    scores, scores_row, positions, words, word_count, k, PROBES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    n = tl.maximum(tl.load(positions + t) + 1, 0)
    scores += t * scores_row
    low, high, from_high = _threshold(scores, n, k, PROBES, BLOCK)
    above, between = 0, 0
    for start in range(0, word_count * 32, BLOCK_S):
        s_S = start + tl.arange(0, BLOCK_S)
        score_S = tl.load(scores + s_S, mask=s_S < tl.where(n > k, n, 0), other=float("-inf"))
        is_chosen_S, _, above, between = _chosen(score_S, s_S < n, n, k, low, high, k - from_high, above, between)
        bits_W32 = tl.reshape(is_chosen_S.to(tl.int32), (BLOCK_S // 32, 32)) << tl.arange(0, 32)[None, :]
        w_W = start // 32 + tl.arange(0, BLOCK_S // 32)
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
        scores_TS, scores_TS.stride(0), positions_T, words_TW, word_count, k, PROBES=PROBES, BLOCK=BLOCK,
        BLOCK_S=_piece(BLOCK), num_warps=_warps(BLOCK),
    )  # fmt: skip
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
        IS_LAST=kept_TL is None, HAS_NAMES=names_TS is not None, PROBES=PROBES, BLOCK=part, BLOCK_S=_piece(part),
        BLOCK_K=next_power_of_2(k), num_warps=_warps(part),
    )  # fmt: skip


def _part(T: int, S: int, k: int) -> int:
    """How much of a row of S scores one program takes; a power of two, at least S when no second step follows."""
    if S > 2 * SMALL_PART and 4 * k <= SMALL_PART and T * triton.cdiv(S, SMALL_PART) <= RESIDENT:
        return SMALL_PART
    return min(LARGEST_PART, max(32, next_power_of_2(S)))


def _warps(BLOCK: int) -> int:
    """32 scores of a thread, more where a block would have over 512 threads: that was faster than 1024."""
    return max(4, min(16, BLOCK // 1024))


def _piece(BLOCK: int) -> int:
    """Keys of a step of the second pass: eight of a thread."""
    return min(BLOCK, 256 * _warps(BLOCK))
