"""The router of a mixture of experts: K of E experts for each token, and their weights.

logits = x Wᵀ          score = sigmoid(logits)          choice = score + bias
chosen = the K largest choices, in descending order, ties to the lower expert
weight = scaling · score of the chosen / (their sum + 1e-20)             (without the division: scaling · score)

Two launches. The first multiplies a slice of D for a block of tokens and experts, so that a single token keeps every
SM reading: it writes partial sums, and the second adds them in a fixed order and chooses, one program a token.
Products are exact and sums float32; nothing is rounded on the way. Tensor cores drop bits in a long chain of sums, so
chains are short, and added to each other in full float32. Choices are compared as integers of the same order, so that
a row of NaN still names experts that exist. The second launch also counts the rows of each expert, which the sort of
rows needs: whole numbers, so that the order of the additions does not matter; the first launch has set them to zero.

Assumes K ≤ E, and that all experts of a token fit one program (E up to some thousands).
Measured on an H200, bfloat16, E = 256, D = 5120, in a CUDA graph, weights not in L2: 6.3 / 7.0 / 7.5 / 9.2 / 39 us at
T = 1 / 16 / 64 / 256 / 4096; the second launch is 3 us of it.
Source: text_model specification, sections 11.2 and 11.3 (float32 router).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import (
    check_tensor,
    dot,
    next_power_of_2,
    overlap,
    tile,
    tl,
    triton,
    wait_for_inputs,
    widen,
)

# T tokens  D model  E experts  K chosen experts

# About one for each of 132 SMs.
PROGRAMS = 128


class Routes(NamedTuple):
    """`expert_ids_TK` int32 by descending choice; `weights_TK` in that order, at least float32.

    `counts_E` int32: how many tokens chose each expert. `logits_TE`, `scores_TE` and `choice_TE`, at least float32, are
    None unless observed.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor
    logits_TE: Tensor | None
    scores_TE: Tensor | None
    choice_TE: Tensor | None


def route_torch(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, k: int, scaling: float, normalize: bool, observe: bool = False
) -> Routes:
    """The definition; see the module."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    logits_TE = x_TD.to(wide) @ weight_ED.to(wide).T
    scores_TE = logits_TE.sigmoid()
    choice_TE = scores_TE + bias_E
    ids_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights_TK = scores_TE.gather(-1, ids_TK)
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    counts_E = torch.bincount(ids_TK.flatten(), minlength=len(weight_ED)).int()
    observed = (logits_TE, scores_TE, choice_TE) if observe else (None, None, None)
    return Routes(ids_TK.int(), weights_TK * scaling, counts_E, *observed)


def route_triton(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, k: int, scaling: float, normalize: bool, observe: bool = False
) -> Routes:
    """Choose `k` experts for each token.

    x_TD float32 or bfloat16, weight_ED of the same dtype, bias_E float32. Everything inside is float32.
    Raises: KernelInputError for other shapes or dtypes, or `k` beyond the number of experts.
    """
    check_tensor("x", x_TD, (None, None), torch.float32, torch.bfloat16)
    T, D = x_TD.shape
    check_tensor("router weight", weight_ED, (None, D), x_TD.dtype)
    E = len(weight_ED)
    check_tensor("correction bias", bias_E, (E,), torch.float32)
    if not 1 <= k <= E:
        raise KernelInputError(f"expected k between 1 and the {E} experts, found {k}")
    ids_TK = torch.empty(T, k, dtype=torch.int32, device=x_TD.device)
    weights_TK = torch.empty(T, k, dtype=torch.float32, device=x_TD.device)
    logits_TE, scores_TE, choice_TE = (
        torch.empty(T, E, dtype=torch.float32, device=x_TD.device) if observe else None for _ in range(3)
    )
    counts_E = torch.empty(E, dtype=torch.int32, device=x_TD.device)
    routes = Routes(ids_TK, weights_TK, counts_E, logits_TE, scores_TE, choice_TE)
    if T == 0:
        counts_E.zero_()
        return routes
    block_t, block_e, block_d, depth = slices(T, E, D)
    partial_STE = torch.empty(triton.cdiv(D, depth), T, E, dtype=torch.float32, device=x_TD.device)
    grid = (len(partial_STE), triton.cdiv(E, block_e), triton.cdiv(T, block_t))
    if T == 1:
        _partial_logits_of_one_kernel[grid[:2]](
            x_TD, weight_ED, partial_STE, counts_E, E, D, weight_ED.stride(0),
            BLOCK_E=block_e, BLOCK_D=depth, num_warps=4, **overlap(x_TD.device),
        )  # fmt: skip
    else:
        _partial_logits_kernel[grid](
            x_TD, weight_ED, partial_STE, counts_E, T, E, D, x_TD.stride(0), weight_ED.stride(0),
            DEPTH=depth, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_D=block_d, WIDEN=widen(x_TD.dtype),
            num_warps=4, num_stages=3, **overlap(x_TD.device),
        )  # fmt: skip
    _choose_kernel[(T,)](
        partial_STE, bias_E, ids_TK, weights_TK, counts_E, logits_TE, scores_TE, choice_TE, T, E, scaling,
        SLICES=len(partial_STE), K=k, NORMALIZE=normalize, OBSERVE=observe,
        BLOCK_E=next_power_of_2(E), BLOCK_K=next_power_of_2(k), num_warps=1, **overlap(x_TD.device),
    )  # fmt: skip
    return routes


def slices(T: int, E: int, D: int) -> tuple[int, int, int, int]:
    """Blocks of tokens, experts and D, and the depth of D that one program adds up.

    On an H200 every slice costs the second launch 0.06 us, so a slice is at least 512 deep.
    """
    if T == 1:
        return 1, 8, 512, 512
    block_t, block_e, block_d = tile(T, 16, 64), 32 if T <= 64 else 64, 128
    tiles = triton.cdiv(T, block_t) * triton.cdiv(E, block_e)
    steps = triton.cdiv(D, block_d)
    return block_t, block_e, block_d, max(512, triton.cdiv(steps, max(1, PROGRAMS // tiles)) * block_d)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), float32, to the last bit or two.

    The hardware's exponential has base 2: what rounding takes from its argument is multiplied back in. Beyond 88,
    where the result is 1 or below the smallest normal number, the argument is held, so that nothing overflows.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    LOG_2: tl.constexpr = 0.6931471805599453
    held = tl.where(x > 88.0, -88.0, tl.where(x < -88.0, 88.0, -x))
    rounded = held * LOG2_E
    lost = tl.fma(held, LOG2_E, -rounded)
    power = tl.exp2(rounded)
    return tl.div_rn(1.0, 1.0 + tl.fma(power, lost * LOG_2, power))


@triton.jit
def add_product(a, b, sums, WIDEN: tl.constexpr):
    """sums + a b, the product added up on its own first: two short chains of sums err less than a long one.

    Triton merges an addition of a product into the chain; this multiplication by one keeps them apart.
    """
    return tl.fma(dot(a, b, tl.zeros_like(sums), WIDEN), 1.0, sums)


@triton.jit
def _partial_logits_of_one_kernel(
    x, weight, partial, counts, E, D, weight_stride,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """partial[slice, e] = Σ over the slice of D of x[d] weight[e, d]: one token is no work for a tensor core."""
    wait_for_inputs(OVERLAPS)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    a = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)
    rows = weight + e.to(tl.int64)[:, None] * weight_stride + d[None, :]
    b = tl.load(rows, mask=(e[:, None] < E) & (d[None, :] < D), other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0) * E + e, tl.sum(a[None, :] * b, axis=1), mask=e < E)
    if tl.program_id(0) == 0:
        tl.store(counts + e, tl.zeros([BLOCK_E], tl.int32), mask=e < E)


@triton.jit(do_not_specialize=["T"])
def _partial_logits_kernel(
    x, weight, partial, counts, T, E, D, x_stride, weight_stride,
    DEPTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """partial[slice, t, e] = Σ over the slice of D of x[t, d] weight[e, d]."""
    wait_for_inputs(OVERLAPS)
    piece = tl.program_id(0)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    x_rows = x + t.to(tl.int64)[:, None] * x_stride  # [BLOCK_T, 1]
    weight_rows = weight + e.to(tl.int64)[None, :] * weight_stride  # [1, BLOCK_E]
    sums = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for start in range(0, DEPTH, BLOCK_D):
        d = piece * DEPTH + start + tl.arange(0, BLOCK_D)
        a = tl.load(x_rows + d[None, :], mask=(t[:, None] < T) & (d[None, :] < D), other=0.0)
        b = tl.load(weight_rows + d[:, None], mask=(e[None, :] < E) & (d[:, None] < D), other=0.0)
        sums = add_product(a, b, sums, WIDEN)
    out = partial + (piece.to(tl.int64) * T + t[:, None]) * E + e[None, :]
    tl.store(out, sums, mask=(t[:, None] < T) & (e[None, :] < E))
    if piece + tl.program_id(2) == 0:
        tl.store(counts + e, tl.zeros([BLOCK_E], tl.int32), mask=e < E)


@triton.jit(do_not_specialize=["T"])
def _choose_kernel(
    partial, bias, ids, weights, counts, logits_out, scores_out, choice_out, T, E, scaling,
    SLICES: tl.constexpr, K: tl.constexpr, NORMALIZE: tl.constexpr, OBSERVE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One token: adds its partial logits, chooses K experts, weighs and counts them."""
    wait_for_inputs(OVERLAPS)
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    logits = tl.zeros([BLOCK_E], tl.float32)
    for piece in tl.static_range(SLICES):
        logits += tl.load(partial + (piece * T + t) * E + e, mask=e < E, other=0.0)
    scores = sigmoid(logits)
    choice = scores + tl.load(bias + e, mask=e < E, other=0.0)
    if OBSERVE:
        tl.store(logits_out + t * E + e, logits, mask=e < E)
        tl.store(scores_out + t * E + e, scores, mask=e < E)
        tl.store(choice_out + t * E + e, choice, mask=e < E)

    # Bits of a float are ordered like an integer once the lower 31 of a negative one are flipped.
    bits = choice.to(tl.int32, bitcast=True)
    lowest = -2147483648
    left = tl.where(e < E, bits ^ ((bits >> 31) & 0x7FFFFFFF), lowest)
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for i in tl.static_range(K):
        best = tl.min(tl.where(left == tl.max(left, axis=0), e, BLOCK_E), axis=0)
        chosen = tl.where(slot == i, best, chosen)
        left = tl.where(e == best, lowest, left)
    chosen_scores = tl.sum(tl.where(chosen[:, None] == e[None, :], scores[None, :], 0.0), axis=1)
    if BLOCK_K > K:
        chosen_scores = tl.where(slot < K, chosen_scores, 0.0)
    if NORMALIZE:
        chosen_scores = tl.div_rn(chosen_scores, tl.sum(chosen_scores, axis=0) + 1e-20)
    tl.store(ids + t * K + slot, chosen, mask=slot < K)
    tl.atomic_add(counts + chosen, 1, mask=slot < K, sem="relaxed")
    tl.store(weights + t * K + slot, chosen_scores * scaling, mask=slot < K)
