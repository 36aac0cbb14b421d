"""The token behind each row, chosen where the logits are, and fed to the next step without leaving the device.

chosen_t = argmax_w  logit[t, w]                                           temperature 0
chosen_t = argmax_w  logit[t, w] / temperature_t + gumbel(seed_t, position_t, w)     else

The noise is the reference's: a hash of seed, position and token id, in float64. Equal values go to the lower id. A
nucleus (top_p below 1) is not here; the reference's `choose` takes such rows. Source: `reference.sampling`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.kernels.common import check_tensor, next_power_of_2, tl, triton
from reference.sampling import gumbel

# T rows  W vocabulary  P parts of the vocabulary  R rows of the buffer of chosen tokens

# Enough programs to fill a card when few rows are chosen for.
MOST_PARTS = 64
BLOCK_W = 1024


@triton.jit
def _mixed(x):
    """The bijection of 64-bit integers that `reference.sampling` spreads bits with."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _part_kernel(
    logits, logits_row, seeds, positions, temperatures, values, ids, W, part_width, parts, BLOCK: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    key = _mixed(tl.load(seeds + row).to(tl.uint64, bitcast=True))
    key = _mixed(tl.load(positions + row).to(tl.uint64, bitcast=True) ^ key)
    best = tl.full([], float("-inf"), tl.float64)
    best_id = tl.full([], 0, tl.int64)
    for start in range(part * part_width, tl.minimum(part * part_width + part_width, W), BLOCK):
        id_W = start + tl.arange(0, BLOCK)
        value_W = tl.load(logits + row * logits_row + id_W, mask=id_W < W, other=float("-inf")).to(tl.float64)
        if temperature > 0:
            bits_W = _mixed(id_W.to(tl.uint64) ^ key)
            uniform_W = ((bits_W >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
            value_W = value_W / temperature - tl.log(-tl.log(uniform_W))
        value = tl.max(value_W, axis=0)
        id = tl.min(tl.where(value_W == value, id_W, W), axis=0)
        best_id = tl.where(value > best, id.to(tl.int64), best_id)
        best = tl.maximum(value, best)
    tl.store(values + row * parts + part, best)
    tl.store(ids + row * parts + part, best_id)


@triton.jit
def _whole_kernel(values, ids, out, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part_P = tl.arange(0, BLOCK)
    value_P = tl.load(values + row * parts + part_P, mask=part_P < parts, other=float("-inf"))
    first = tl.min(tl.where(value_P == tl.max(value_P, axis=0), part_P, parts - 1), axis=0)
    tl.store(out + row, tl.load(ids + row * parts + first))


def choose_tokens_torch(
    logits_TW: Tensor, position_T: Tensor, seed_T: Tensor, temperature_T: Tensor, out_T: Tensor
) -> None:
    """As `choose_tokens_triton`."""
    is_greedy_T1 = temperature_T[:, None] == 0
    scaled_TW = logits_TW.to(torch.float64) / temperature_T[:, None].masked_fill(is_greedy_T1, 1.0)
    noise_TW = gumbel(seed_T, position_T, logits_TW.shape[1]).masked_fill(is_greedy_T1, 0.0)
    out_T.copy_((scaled_TW + noise_TW).argmax(dim=-1))


def choose_tokens_triton(
    logits_TW: Tensor, position_T: Tensor, seed_T: Tensor, temperature_T: Tensor, out_T: Tensor
) -> None:
    """Write the token of each row to out_T, int64.

    position_T int64: absolute position of the token; seed_T int64; temperature_T float64, 0 for greedy.
    Raises: KernelInputError for other shapes or dtypes.
    """
    T, W = logits_TW.shape
    check_tensor("logits", logits_TW, (T, W))
    for name, tensor in (("positions", position_T), ("seeds", seed_T), ("chosen tokens", out_T)):
        check_tensor(name, tensor, (T,), torch.int64)
    check_tensor("temperatures", temperature_T, (T,), torch.float64)
    part_width = max(BLOCK_W, triton.cdiv(triton.cdiv(W, MOST_PARTS), BLOCK_W) * BLOCK_W)
    parts = triton.cdiv(W, part_width)
    values_TP = torch.empty(T, parts, dtype=torch.float64, device=logits_TW.device)
    ids_TP = torch.empty(T, parts, dtype=torch.int64, device=logits_TW.device)
    _part_kernel[(T, parts)](
        logits_TW, logits_TW.stride(0), seed_T, position_T, temperature_T, values_TP, ids_TP, W, part_width, parts,
        BLOCK=BLOCK_W,
    )  # fmt: skip
    _whole_kernel[(T,)](values_TP, ids_TP, out_T, parts, BLOCK=next_power_of_2(parts))


@triton.jit
def _fed_kernel(token_ids, sources, chosen, out, T, BLOCK: tl.constexpr):
    row_T = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row_T < T
    source_T = tl.load(sources + row_T, mask=inside, other=-1)
    given_T = tl.load(token_ids + row_T, mask=inside, other=0)
    fed_T = tl.load(chosen + source_T, mask=inside & (source_T >= 0), other=0)
    tl.store(out + row_T, tl.where(source_T >= 0, fed_T, given_T), mask=inside)


def feed_tokens_torch(token_ids_T: Tensor, source_T: Tensor, chosen_R: Tensor) -> Tensor:
    """As `feed_tokens_triton`."""
    return torch.where(source_T < 0, token_ids_T, chosen_R[source_T.clamp(min=0).long()])


def feed_tokens_triton(token_ids_T: Tensor, source_T: Tensor, chosen_R: Tensor) -> Tensor:
    """int64 [T]: chosen_R[source] where a row has a source, its own id where that is -1.

    Raises: KernelInputError for other dtypes than int64 ids and int32 sources.
    """
    (T,) = token_ids_T.shape
    check_tensor("token ids", token_ids_T, (T,), torch.int64)
    check_tensor("sources", source_T, (T,), torch.int32)
    check_tensor("chosen tokens", chosen_R, (None,), torch.int64)
    out_T = torch.empty_like(token_ids_T)
    _fed_kernel[(triton.cdiv(T, 256),)](token_ids_T, source_T, chosen_R, out_T, T, BLOCK=256)
    return out_T
