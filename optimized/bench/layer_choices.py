"""What a layer chooses, experts and keys, apart from what it computes with its choices.

Of scores that are close another expert may be taken after one more rounding, and the row then differs by tenths. So the
choices of the run that is judged are noted, its twins are given the same, and how good they are is judged by itself:
the scores, in float64, of what each run would choose, added up for each row.
Source: style, section 6; design, "Discrete choices are judged by margins".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optimized.attention.shown import keys_of_bits
from optimized.bench.judge import Triple
from optimized.device import Ops
from optimized.kernels.router import Routes

# T rows  S keys  E experts  K chosen experts or selected keys

# Added to the score of an expert that must be chosen: more than any score differs.
CERTAIN = 1000.0


@dataclass(frozen=True)
class Choices:
    """Experts [T, K] and keys [T, K] of some rows, keys padded with -1; None where nothing is chosen."""

    experts_TK: Tensor | None
    keys_TK: Tensor | None

    def of_rows(self, rows: list[int]) -> Choices:
        return Choices(*(None if ids is None else ids[rows] for ids in (self.experts_TK, self.keys_TK)))


class NotedOps(Ops):
    """The same ops; what `route`, `select_keys` and `select_bits` return is noted, in the order of rows."""

    def __init__(self, ops: Ops):
        super().__init__(ops.choices)
        self._experts: list[Tensor] = []
        self._keys: list[Tensor] = []

    @property
    def noted(self) -> Choices:
        return Choices(*(torch.cat(found) if found else None for found in (self._experts, self._keys)))

    def route(self, *arguments: Any, **options: Any) -> Routes:
        routes = super().__getattr__("route")(*arguments, **options)
        self._experts.append(routes.expert_ids_TK)
        return routes

    def select_keys(self, scores_TS: Tensor, positions_T: Tensor, k: int) -> Tensor:
        selected_TK = super().__getattr__("select_keys")(scores_TS, positions_T, k)
        self._keys.append(selected_TK)
        return selected_TK

    def select_bits(self, scores_TS: Tensor, positions_T: Tensor, k: int) -> Tensor:
        bits_TW = super().__getattr__("select_bits")(scores_TS, positions_T, k)
        self._keys.append(keys_of_bits(bits_TW, k))
        return bits_TW


class GivenOps(Ops):
    """The same ops, but for what is chosen, which is given. Keeps the scores and what they would have chosen.

    Experts are numbered among those that any row uses, ascending: their weights are to be cut to these.
    """

    def __init__(self, ops: Ops, given: Choices):
        super().__init__(ops.choices)
        self._given = given
        self.scores: list[Tensor] = []
        self.own: list[Tensor] = []

    def route(
        self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, k: int, scaling: float, normalize: bool, _: bool = False
    ) -> Routes:
        route = super().__getattr__("route")
        own = route(x_TD, weight_ED, bias_E, k, scaling, normalize, True)
        self._note(own.choice_TE, own.expert_ids_TK)
        experts_TK = self._given.experts_TK
        assert experts_TK is not None
        forced_TE = torch.zeros_like(own.choice_TE).scatter_(1, experts_TK.long(), CERTAIN)
        routes = route(x_TD, weight_ED, forced_TE, k, scaling, normalize)
        used, numbers = experts_TK.unique(), routes.expert_ids_TK
        ids_TK = torch.searchsorted(used, numbers).int()
        counts = torch.bincount(ids_TK.flatten(), minlength=len(used)).int()
        return Routes(ids_TK, routes.weights_TK, counts, None, None, None)

    def select_keys(self, scores_TS: Tensor, positions_T: Tensor, k: int) -> Tensor:
        key_S = torch.arange(scores_TS.shape[1], device=scores_TS.device)
        # Rows that take all that they see are not scored.
        is_unscored_TS = (key_S > positions_T[:, None]) | (positions_T[:, None] < k)
        own_TK = super().__getattr__("select_keys")(scores_TS, positions_T, k)
        self._note(scores_TS.masked_fill(is_unscored_TS, 0.0), own_TK)
        keys_TK = self._given.keys_TK
        return own_TK if keys_TK is None else keys_TK

    def _note(self, scores_TE: Tensor, own_TK: Tensor) -> None:
        self.scores.append(scores_TE)
        self.own.append(own_TK)


def choice_triples(given: Choices, eager: GivenOps, truth: GivenOps, dtype: torch.dtype) -> list[Triple]:
    """How good the given choices, eager's own and the truth's own are by the truth's scores: of keys, of experts."""
    chosen = [ids for ids in (given.keys_TK, given.experts_TK) if ids is not None]
    return [
        Triple(_sum(scores, ids).to(dtype), _sum(scores, plain).to(dtype), _sum(scores, best))
        for scores, ids, plain, best in zip(truth.scores, chosen, eager.own, truth.own, strict=True)
    ]


def _sum(scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Of each row's scores at these places; negative ones are none."""
    found_TK = scores_TE.gather(1, ids_TK.long().clamp(min=0))
    return found_TK.masked_fill(ids_TK < 0, 0.0).sum(-1)
