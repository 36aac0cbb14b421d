"""The router of a mixture of experts: K of E experts for each token, and their weights.

logits = x Wᵀ          score = sigmoid(logits)          choice = score + bias
chosen = the K largest choices, in descending order, ties to the lower expert
weight = scaling · score of the chosen / (their sum + 1e-20)             (without the division: scaling · score)

Two launches. The first multiplies a slice of D for a block of tokens and experts, so that a single token keeps every
SM reading: it writes partial sums, and the second adds them in a fixed order and chooses, one program a token.
Products are exact, sums float32; nothing is rounded on the way. A choice and its expert are packed into one integer,
so the largest integer is the next choice and a tie already resolved; a row of NaN still names K distinct experts.

Assumes K ≤ E, and that all experts of a token fit one program (E up to some thousands).
Source: text_model specification, sections 11.2 and 11.3 (float32 router).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, dot, next_power_of_2, tile, tl, triton, widen

# T tokens  D model  E experts  K chosen experts

# Programs that keep 132 SMs reading: one each, and some to even out.
PROGRAMS = 160


class Routes(NamedTuple):
    """`expert_ids_TK` int32 by descending choice; `weights_TK` in that order, at least float32.

    `logits_TE`, `scores_TE` and `choice_TE`, at least float32, are None unless observed.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
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
    observed = (logits_TE, scores_TE, choice_TE) if observe else (None, None, None)
    return Routes(ids_TK.int(), weights_TK * scaling, *observed)


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
    routes = Routes(ids_TK, weights_TK, logits_TE, scores_TE, choice_TE)
    if T == 0:
        return routes
    block_t, block_e, block_d, depth = slices(T, E, D)
    partial_STE = torch.empty(triton.cdiv(D, depth), T, E, dtype=torch.float32, device=x_TD.device)
    grid = (len(partial_STE), triton.cdiv(E, block_e), triton.cdiv(T, block_t))
    _partial_logits_kernel[grid](
        x_TD, weight_ED, partial_STE, T, E, D, x_TD.stride(0), weight_ED.stride(0),
        DEPTH=depth, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_D=block_d, WIDEN=widen(x_TD.dtype),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _choose_kernel[(T,)](
        partial_STE, bias_E, ids_TK, weights_TK, logits_TE, scores_TE, choice_TE, T, E, scaling,
        SLICES=len(partial_STE), K=k, NORMALIZE=normalize, OBSERVE=observe,
        BLOCK_S=next_power_of_2(len(partial_STE)), BLOCK_E=next_power_of_2(E), BLOCK_K=next_power_of_2(k), num_warps=4,
    )  # fmt: skip
    return routes


def slices(T: int, E: int, D: int) -> tuple[int, int, int, int]:
    """Blocks of tokens, experts and D, and the depth of D that one program adds up."""
    block_t = tile(T, 16, 64)
    block_e = 32 if T <= 64 else 64
    block_d = 256 if block_t == 16 else 128
    tiles = -(-T // block_t) * -(-E // block_e)
    steps = -(-D // block_d)
    wanted = min(steps, max(1, PROGRAMS // tiles))
    return block_t, block_e, block_d, -(-steps // wanted) * block_d


@triton.jit(do_not_specialize=["T"])
def _partial_logits_kernel(
    x, weight, partial, T, E, D, x_stride, weight_stride,
    DEPTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """partial[slice, t, e] = Σ over the slice of D of x[t, d] weight[e, d]."""
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
        sums = dot(a, b, sums, WIDEN)
    out = partial + (piece.to(tl.int64) * T + t[:, None]) * E + e[None, :]
    tl.store(out, sums, mask=(t[:, None] < T) & (e[None, :] < E))


@triton.jit(do_not_specialize=["T"])
def _choose_kernel(
    partial, bias, ids, weights, logits_out, scores_out, choice_out, T, E, scaling,
    SLICES: tl.constexpr, K: tl.constexpr, NORMALIZE: tl.constexpr, OBSERVE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One token: adds its partial logits, chooses K experts, weighs them."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    s = tl.arange(0, BLOCK_S)
    pieces = tl.load(
        partial + (s[:, None].to(tl.int64) * T + t) * E + e[None, :],
        mask=(s[:, None] < SLICES) & (e[None, :] < E),
        other=0.0,
    )
    logits = tl.sum(pieces, axis=0)  # [BLOCK_E]
    scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores + tl.load(bias + e, mask=e < E, other=0.0)
    if OBSERVE:
        tl.store(logits_out + t * E + e, logits, mask=e < E)
        tl.store(scores_out + t * E + e, scores, mask=e < E)
        tl.store(choice_out + t * E + e, choice, mask=e < E)

    # Bits of a float are ordered like an integer once the lower 31 of a negative one are flipped.
    bits = choice.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    lowest = -9223372036854775808
    keys = tl.where(e < E, (ordered.to(tl.int64) << 32) | (BLOCK_E - 1 - e), lowest)
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros_like(slot)
    chosen_scores = tl.zeros(slot.shape, tl.float32)
    for i in tl.static_range(K):
        best = BLOCK_E - 1 - (tl.max(keys, axis=0) & 0xFFFFFFFF).to(tl.int32)
        chosen = tl.where(slot == i, best, chosen)
        chosen_scores = tl.where(slot == i, tl.sum(tl.where(e == best, scores, 0.0), axis=0), chosen_scores)
        keys = tl.where(e == best, lowest, keys)
    if NORMALIZE:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, axis=0) + 1e-20)
    tl.store(ids + t * K + slot, chosen, mask=slot < K)
    tl.store(weights + t * K + slot, chosen_scores * scaling, mask=slot < K)
