"""What a difference means for the text: two tables of logits, compared as distributions over the next token.

With p and q the softmax of the expected and the actual logits of a row:

KL divergence      sum p · log(p / q), in nats: the information that is lost by reading q for p
top-1 agreement    share of rows whose best token is the same; equal logits go to the lower id
first different    the earliest row, in the order of computation, whose best tokens differ, with its margin:
                   expected logit of the expected token less expected logit of the actual one. A margin within the
                   noise of the logits is a near tie that any implementation may lose; a large one is not.

Rows with a NaN or +inf on either side have no distribution: their divergence is infinite, and they never agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parity.trace import Trace, row_blocks

W_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class DifferentToken:
    """A row whose best token differs. `margin` in logits; NaN where the row has no distribution."""

    request: str
    position: int
    occurrence: int
    action: int
    expected: int
    actual: int
    margin: float


@dataclass(frozen=True)
class EndToEnd:
    """Over all rows of `name` that both sides have. KL divergences in nats."""

    name: str
    rows: int
    agreeing_rows: int
    rows_without_distribution: int
    mean_kl: float
    largest_kl: float
    first_different: DifferentToken | None

    @property
    def top1_agreement(self) -> float:
        """Share of rows, 0 to 1."""
        return self.agreeing_rows / self.rows


def end_to_end(expected: Trace, actual: Trace, name: str = "logits") -> EndToEnd | None:
    """Compare [rows, vocab] logits of two traces in float64, in blocks of rows; None where they share no row."""
    divergences: list[float] = []
    different: list[DifferentToken] = []
    lost = 0
    for request in expected.requests(name):
        actions = actions_of(expected, name, request)
        for expected_TW, actual_TW, keys in row_blocks(expected, actual, name, request, W_BLOCK_BYTES):
            expected_TW, actual_TW = expected_TW.to(torch.float64), actual_TW.to(torch.float64)
            is_lost_T = ~(_has_distribution(expected_TW) & _has_distribution(actual_TW))
            best_T, found_T = best_token(expected_TW), best_token(actual_TW)
            divergences += kl_divergence(expected_TW, actual_TW).masked_fill(is_lost_T, float("inf")).tolist()
            lost += int(is_lost_T.sum())
            for row in ((best_T != found_T) | is_lost_T).nonzero().flatten().tolist():
                best, found = int(best_T[row]), int(found_T[row])
                margin = float("nan") if is_lost_T[row] else float(expected_TW[row, best] - expected_TW[row, found])
                position, occurrence = keys[row]
                action = actions[position, occurrence]
                different.append(DifferentToken(request, position, occurrence, action, best, found, margin))
    if not divergences:
        return None
    return EndToEnd(
        name,
        len(divergences),
        len(divergences) - len(different),
        lost,
        sum(divergences) / len(divergences),
        max(divergences),
        min(different, key=lambda token: (token.action, token.position), default=None),
    )


def kl_divergence(expected_TW: Tensor, actual_TW: Tensor) -> Tensor:
    """Of each row, in nats. A token that the expected side excludes (-inf) adds nothing. Returns [T]."""
    log_p_TW, log_q_TW = expected_TW.log_softmax(-1), actual_TW.log_softmax(-1)
    terms_TW = log_p_TW.exp() * (log_p_TW - log_q_TW)
    # Rounding can leave -1e-17 where the two are equal.
    return terms_TW.masked_fill(log_p_TW == float("-inf"), 0.0).sum(-1).clamp(min=0.0)


def best_token(logits_TW: Tensor) -> Tensor:
    """The lowest id among those with the largest logit. Returns [T] int64; a row with a NaN gives 0."""
    T, W = logits_TW.shape
    is_best_TW = logits_TW == logits_TW.amax(-1, keepdim=True)
    ids_TW = torch.arange(W).expand(T, W).masked_fill(~is_best_TW, W)
    return ids_TW.amin(-1).remainder(W)


def actions_of(trace: Trace, name: str, request: str) -> dict[tuple[int, int], int]:
    """Which action of the workload computed each row (position, occurrence)."""
    actions = (entry.action for entry in trace.of(name, request) for _ in entry.positions)
    return dict(zip(trace.keys(name, request), actions, strict=True))


def _has_distribution(logits_TW: Tensor) -> Tensor:
    is_broken_TW = logits_TW.isnan() | (logits_TW == float("inf"))
    return ~is_broken_TW.any(-1) & logits_TW.isfinite().any(-1)
