"""Embeddings that the requests of one step bring with them, handed out part by part.

    row of a token = what its request brought for it, or the table's row of its id

A prompt with media brings all of its rows. Its ids may lie beyond the vocabulary: no table is asked for them but the
draft layer's, which has its last row for such a one, so that is the id that is kept.
Source: multimodal prompt specification, section 2.3; text_model specification, section 17.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optimized.step import PlanItem
from reference.errors import CacheError, TokenIdError
from reference.session import StepItem

# T rows of a part  W vocabulary  D model


class GivenRows:
    """Of the items of one step; `table_WD` has the rows of those that bring none.

    Raises: CacheError for embeddings of another shape or dtype than the table's rows, TokenIdError for an id below 0
    beside embeddings.
    """

    def __init__(self, items: Sequence[StepItem], table_WD: Tensor):
        self._table_WD = table_WD
        self._left: dict[str, Tensor] = {}
        for item in items:
            if item.embeddings_TD is not None:
                _check(item, item.embeddings_TD, table_WD)
                self._left[item.request] = item.embeddings_TD.to(table_WD.device)

    def planned(self, item: StepItem) -> PlanItem:
        """The item with ids that the vocabulary has."""
        ids = tuple(item.token_ids)
        if item.request in self._left:
            last = len(self._table_WD) - 1
            ids = tuple(min(token_id, last) for token_id in ids)
        return PlanItem(item.request, ids, item.kind)

    def next(self, items: Sequence[PlanItem]) -> Tensor | None:
        """[T, D] for the next tokens of these requests, in their order; None where none of them brings rows."""
        if not any(item.request in self._left for item in items):
            return None
        rows = []
        for item in items:
            count = len(item.token_ids)
            if item.request in self._left:
                rows.append(self._left[item.request][:count])
                self._left[item.request] = self._left[item.request][count:]
            else:
                rows.append(self._table_WD[torch.tensor(item.token_ids, device=self._table_WD.device)])
        return torch.cat(rows)


def _check(item: StepItem, embeddings_TD: Tensor, table_WD: Tensor) -> None:
    shape = (len(item.token_ids), table_WD.shape[1])
    if tuple(embeddings_TD.shape) != shape or embeddings_TD.dtype != table_WD.dtype:
        raise CacheError(
            f"request {item.request!r}: embeddings must be {shape} in {table_WD.dtype}, found "
            f"{tuple(embeddings_TD.shape)} in {embeddings_TD.dtype}"
        )
    if min(item.token_ids) < 0:
        raise TokenIdError(f"request {item.request!r}: token id {min(item.token_ids)} is negative")
