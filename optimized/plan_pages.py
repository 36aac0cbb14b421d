"""Plans the full layers: where rows go, in which form each group attends, and in which blocks it is scored.

Rows are written to their pages first. Decode rows attend absorbed, each to the rows selected for it. A prefill item may
also have all its L keys gathered and expanded, the selection as a mask. The form with fewer products is taken:
expanded    L · C(N + V) to expand the keys, and N + R + V for each visible pair
absorbed    count · C(N + V) to absorb and un-absorb the queries, and 2C + R for each selected pair
both for each head. For a whole prompt at released size the two meet at about 13 k tokens; for a late or short chunk
absorbed wins earlier. Expanded keys that do not fit leave the absorbed form, which works in blocks.
Source: text_model specification, section 14; performance specification, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from optimized.cache import CachePools
from optimized.errors import PlanError
from optimized.kernels.common import next_power_of_2
from optimized.plan_spans import Span, StepLimits, expanded_key_bytes, key_group, packed, starts
from optimized.step import FullGroup, PagedRows, RowBlock
from reference.config import TextConfig

# T rows of the step  B requests  P pages a request  L tokens of a request  N nope dim  R rope dim  C kv latent
# V value dim

SCORE_BYTES = 4


def is_expansion_cheaper(config: TextConfig, start: int, length: int) -> bool:
    """Whether queries at positions start .. length - 1 take fewer products expanded than absorbed."""
    full, topk, count = config.full, config.index_topk, length - start
    per_key = full.kv_lora_rank * (full.qk_nope_head_dim + full.v_head_dim)
    visible = (start + 1 + length) * count // 2
    unpruned = min(max(topk - start, 0), count)
    selected = (2 * start + 1 + unpruned) * unpruned // 2 + (count - unpruned) * topk
    expanded = length * per_key + visible * (full.qk_head_dim + full.v_head_dim)
    absorbed = count * per_key + selected * (2 * full.kv_lora_rank + full.qk_rope_head_dim)
    return expanded < absorbed


@dataclass(frozen=True)
class PageGroup:
    """A group of the full layers before page numbers are known. Fields as in `FullGroup`; `edges` bound the blocks."""

    spans: tuple[Span, ...]
    keys: int
    selects: bool
    edges: tuple[int, ...]
    is_expanded: bool


class PagePlanner:
    """Groups rows within the limits; decode rows as if one request had `tokens` tokens.

    Raises: PlanError if one row's absorbed query does not fit.
    """

    def __init__(self, pools: CachePools, limits: StepLimits, tokens: int = 0):
        self.config, self.pools, self.limits, self.tokens = pools.config, pools, limits, tokens
        full = pools.config.full
        self._key_bytes = expanded_key_bytes(full, pools)
        # The absorbed query and the attended latent of all heads.
        self._query_bytes = full.num_attention_heads * (full.latent_row + full.kv_lora_rank) * pools.dtype.itemsize
        if self._query_bytes > limits.expanded_bytes:
            raise PlanError(
                f"the absorbed query of one token takes {self._query_bytes} bytes; raise expanded_bytes = "
                f"{limits.expanded_bytes} to at least that"
            )

    def check_scores(self, request: str, length: int) -> None:
        """Raises: PlanError if the index scores of a single row do not fit."""
        length = max(length, self.tokens)
        need = self._bucket(length) * SCORE_BYTES
        if self._bucket(length) > self.config.index_topk and need > self.limits.score_bytes:
            raise PlanError(
                f"request {request!r} with {length} tokens: the index scores of one query take {need} bytes (keys in a "
                f"power of two of pages); raise score_bytes = {self.limits.score_bytes} to at least that"
            )

    def decode_group(self, spans: Sequence[Span], rows: int) -> PageGroup:
        """All decode rows. The width of their scores is a bucket of lengths, so that a captured graph can be kept."""
        keys = self._bucket(max(self.tokens, 1, *(span.length for span in spans)))
        selects = keys > self.config.index_topk
        return PageGroup(tuple(spans), keys, selects, self._edges(0, rows, keys, selects, False), False)

    def prefill_groups(self, spans: Sequence[Span]) -> Iterator[PageGroup]:
        """Consecutive items of one form; those that need a selection apart from those that see few enough keys."""
        for (is_expanded, selects), run in groupby(spans, self._form):
            budget = self.limits.expanded_bytes // self._key_bytes if is_expanded else self.limits.max_tokens
            for group in packed(run, _length if is_expanded else _count, budget):
                keys = max(span.length for span in group)
                edges = self._edges(group[0].first_row, group[-1].stop_row, keys, selects, is_expanded)
                yield PageGroup(tuple(group), keys, selects, edges, is_expanded)

    def _form(self, span: Span) -> tuple[bool, bool]:
        fits = span.length * self._key_bytes <= self.limits.expanded_bytes
        is_expanded = fits and is_expansion_cheaper(self.config, span.start, span.length)
        return is_expanded, span.length > self.config.index_topk

    def _bucket(self, length: int) -> int:
        return table_width(length, self.pools.page_size) * self.pools.page_size

    def _edges(self, start: int, stop: int, keys: int, selects: bool, is_expanded: bool) -> tuple[int, ...]:
        """Even blocks. Scores bound them where keys are selected, absorbed queries where the form is absorbed."""
        most = stop - start
        if selects:
            most = min(most, max(1, self.limits.score_bytes // (keys * SCORE_BYTES)))
        if not is_expanded:
            most = min(most, self.limits.expanded_bytes // self._query_bytes)
        count = -(-(stop - start) // most)
        return tuple(start + (stop - start) * block // count for block in range(count + 1))


def table_width(length: int, page_size: int) -> int:
    """Pages of `length` tokens, rounded up to a power of two."""
    return next_power_of_2(-(-length // page_size))


def paged_rows(
    spans: Sequence[Span],
    decode: PageGroup | None,
    prefill: Sequence[PageGroup],
    request_T: np.ndarray,
    positions_T: np.ndarray,
    requests: int,
    pools: CachePools,
    tokens: int = 0,
) -> PagedRows[np.ndarray]:
    """Block table, page slots and groups, once the requests own their pages; padding rows have negative positions."""
    page_size = pools.page_size
    width = table_width(max(tokens, 1, *(span.length for span in spans)), page_size)
    table_BP = np.zeros((requests, width), np.int32)
    for span in spans:
        table_BP[span.number, : len(span.slots.pages)] = span.slots.pages
    slot_T = _page_slots(table_BP[request_T, positions_T // page_size], positions_T, page_size)
    return PagedRows(
        page_slot_T=np.where(positions_T >= 0, slot_T, -1),
        block_table_BP=table_BP,
        decode=_full_group(decode, table_BP, page_size, 0 if prefill else requests) if decode else None,
        prefill=tuple(_full_group(group, table_BP, page_size) for group in prefill),
    )


def _full_group(group: PageGroup, table_BP: np.ndarray, page_size: int, runs: int = 0) -> FullGroup[np.ndarray]:
    expanded = None
    if group.is_expanded:
        sources = []
        for span in group.spans:
            positions = np.arange(span.length, dtype=np.int64)
            sources.append(_page_slots(table_BP[span.number, positions // page_size], positions, page_size))
        expanded = key_group(group.spans, [0] * len(sources), sources)
    blocks = tuple(_row_block(start, stop, group.spans, runs) for start, stop in pairwise(group.edges))
    return FullGroup(group.edges[0], group.edges[-1], group.keys, group.selects, blocks, expanded)


def _row_block(start: int, stop: int, spans: Sequence[Span], least_runs: int) -> RowBlock[np.ndarray]:
    ends = [(max(span.first_row, start), min(span.stop_row, stop)) for span in spans]
    # A run for every item, also of no rows: runs count items, whose keys they are attended with.
    runs = [max(0, last - first) for first, last in ends]
    longest, padding = max(runs, default=0), [0] * (least_runs - len(runs))
    return RowBlock(start, stop, longest, starts([*runs, *padding]))


def _page_slots(pages: np.ndarray, positions: np.ndarray, page_size: int) -> np.ndarray:
    return pages.astype(np.int64) * page_size + positions % page_size


def _length(span: Span) -> int:
    return span.length


def _count(span: Span) -> int:
    return span.count
