"""Which token follows: the best one, or one drawn with noise that depends on nothing but seed, position and token id.

greedy     argmax of the logits; equal logits go to the lower id
sampled    argmax over the nucleus of  logit / temperature + Gumbel noise(seed, position, id)

The largest of logits with Gumbel noise is distributed as softmax(logits / temperature). The noise is a hash of three
integers, so a draw is the same alone, in a batch, on any device, with drafts or without: given the logits, the token at
a position is a fixed function. The nucleus is the smallest set of most probable tokens whose probabilities add up to
`top_p`, the most probable one always included; equal probabilities go to the lower id. Source: design, "Determinism
across machines".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from sys import float_info

import torch
from torch import Tensor

from reference.errors import ConfigError

# T rows  W vocabulary


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 is greedy.

    Raises: ConfigError for a temperature below 0 or beyond float64, top_p outside (0, 1], or a seed that is no integer.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, top_p = self.temperature, self.top_p
        if not isinstance(temperature, Real) or not (0.0 <= temperature <= float_info.max or temperature == inf):
            raise ConfigError(f"sampling: temperature must be a number of at least 0, found {temperature!r}")
        if not isinstance(top_p, Real) or not 0.0 < top_p <= 1.0:
            raise ConfigError(f"sampling: top_p must be above 0 and at most 1, found {top_p!r}")
        if not isinstance(self.seed, Integral):
            raise ConfigError(f"sampling: seed must be an integer, found {self.seed!r}")


GREEDY = Sampling()


def choose(logits_TW: Tensor, positions: Sequence[int], sampling: Sampling = GREEDY) -> list[int]:
    """The token of each row; row t is for the token at absolute position `positions[t]`."""
    return contest(logits_TW, positions, sampling).argmax(dim=-1).tolist()


def choose_with_margins(
    logits_TW: Tensor, positions: Sequence[int], sampling: Sampling = GREEDY
) -> tuple[list[int], list[float]]:
    """As `choose`; and by how much each token won over the second best, in the unit of `contest`.

    0 is an exact tie; infinite where there was no second one. A token that another implementation, dtype or batch
    chooses otherwise by rounding alone has a margin within that rounding.
    """
    contest_TW = contest(logits_TW, positions, sampling)
    if contest_TW.shape[1] < 2:
        margins = [inf] * len(contest_TW)
    else:
        best_T2 = contest_TW.topk(2, dim=-1).values.to(torch.float64)
        margins = (best_T2[:, 0] - best_T2[:, 1]).tolist()
    return contest_TW.argmax(dim=-1).tolist(), margins


def contest(logits_TW: Tensor, positions: Sequence[int], sampling: Sampling = GREEDY) -> Tensor:
    """[T, W], of which the largest wins: the logits themselves, or float64 scaled logits with noise, -inf outside."""
    if sampling.temperature == 0.0:
        return logits_TW
    scaled_TW = logits_TW.to(torch.float64) / sampling.temperature
    if sampling.top_p < 1.0:
        scaled_TW = scaled_TW.masked_fill(~nucleus(scaled_TW.softmax(-1), sampling.top_p), float("-inf"))
    positions_T = torch.tensor(positions, dtype=torch.int64, device=logits_TW.device)
    return scaled_TW + gumbel(sampling.seed, positions_T, logits_TW.shape[1])


def nucleus(probabilities_TW: Tensor, top_p: float) -> Tensor:
    """bool [T, W]: a token is in while those before it, by descending probability, add up to less than `top_p`."""
    sorted_TW, ids_TW = probabilities_TW.sort(dim=-1, descending=True, stable=True)
    before_TW = sorted_TW.cumsum(-1) - sorted_TW
    is_in_TW = before_TW < top_p
    is_in_TW[:, 0] = True
    return torch.zeros_like(is_in_TW).scatter(-1, ids_TW, is_in_TW)


def gumbel(seed: int | Tensor, positions_T: Tensor, vocabulary: int) -> Tensor:
    """-log(-log u), float64 [T, W], from a uniform u of 53 bits for each (seed, position, id).

    One seed for all rows, or int64 seeds [T].
    """
    ids_W = torch.arange(vocabulary, dtype=torch.int64, device=positions_T.device)
    seeds = seed if isinstance(seed, Tensor) else torch.tensor(signed(seed), device=positions_T.device)
    key = _mixed(seeds)
    bits_TW = _mixed(_mixed(positions_T ^ key)[:, None] ^ ids_W)
    uniform_TW = (_shifted(bits_TW, 11).to(torch.float64) + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform_TW))


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers that spreads every bit over all (Stafford's variant 13 of a finalizer)."""
    x = x + signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Logical shift to the right: torch's keeps the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def signed(value: int) -> int:
    """The 64-bit pattern of `value` as a signed integer."""
    value = int(value)
    return (value & (2**64 - 1)) - (2**64 if value & 2**63 else 0)
