"""Plans one step over a ragged batch on the host, from lengths alone.

An item of at most 1 + max_draft_tokens tokens runs as decode: its rows are written to pages and rings first, then each
attends from there, absorbed. A longer one is prefill: see `plan_pages` for the full layers, `plan_rings` for the
sliding ones. A step of the draft layer is planned like the sliding layers, over rings and lengths of its own.

`split_step` cuts what exceeds the limits into several steps; `plan_step` refuses it. What a plan holds: `step`.
Source: text_model specification, sections 14 to 17.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain

import numpy as np

from optimized.cache import CachePools
from optimized.errors import PlanError
from optimized.plan_pages import PagePlanner, paged_rows
from optimized.plan_rings import draft_track, longest_chunk, ring_rows, text_track, window_groups
from optimized.plan_spans import Span, StepLimits, Track, padded
from optimized.step import PagedRows, PlanItem, RingRows, Step, StepPlan

# T rows of the step  B requests  B1 = B + 1


def plan_step(
    items: Sequence[PlanItem],
    pools: CachePools,
    limits: StepLimits,
    rows: int = 0,
    requests: int = 0,
    tokens: int = 0,
) -> StepPlan:
    """Plan a step of the backbone and grow its requests in `pools`.

    A step without prefill is padded to at least `rows` rows and `requests` requests, the shape of a captured graph;
    its block table and scores are as wide as for a request of `tokens` tokens, if there is no longer one.
    Raises: PlanError for an item without tokens, two items of one request, prefill in a padded step, or an item or step
    beyond the limits (it says which item, its size, the limit and what to raise); PoolError or CacheError from
    `grow_all`. Nothing has changed then.
    """
    track, planner = text_track(pools), PagePlanner(pools, limits, tokens)
    spans, decoded = _spans(items, pools, limits, track, bool(rows or requests))
    for span in spans:
        planner.check_scores(span.item.request, span.length)
    decode_rows = max(rows, spans[decoded - 1].stop_row if decoded else 0)
    decode = planner.decode_group(spans[:decoded], decode_rows) if decode_rows else None
    prefill = [*planner.prefill_groups(spans[decoded:])]
    windows = window_groups(spans[decoded:], pools, limits)
    pools.grow_all({span.item.request: span.count for span in spans})
    request_T, positions_T = _row_positions(spans, rows)
    requests = max(requests, len(spans), 1)
    pages = paged_rows(spans, decode, prefill, request_T, positions_T, requests, pools, tokens)
    ring = ring_rows(spans, windows, request_T, positions_T, decode_rows, pools, track)
    return _step(spans, decode_rows, request_T, positions_T, requests, pages, ring)


def plan_draft(
    items: Sequence[PlanItem], pools: CachePools, limits: StepLimits, rows: int = 0, requests: int = 0
) -> StepPlan:
    """Plan a step of the draft layer and grow the draft rows of its requests.

    Row t of a request takes token t + 1, so `token_ids` are shifted by one. Arguments and errors as `plan_step`.
    """
    track = draft_track(pools)
    spans, decoded = _spans(items, pools, limits, track, bool(rows or requests))
    decode_rows = max(rows, spans[decoded - 1].stop_row if decoded else 0)
    windows = window_groups(spans[decoded:], pools, limits)
    pools.grow_draft_all({span.item.request: span.count for span in spans})
    request_T, positions_T = _row_positions(spans, rows)
    ring = ring_rows(spans, windows, request_T, positions_T, decode_rows, pools, track)
    return _step(spans, decode_rows, request_T, positions_T, max(requests, len(spans), 1), None, ring)


def split_step(items: Sequence[PlanItem], pools: CachePools, limits: StepLimits) -> tuple[tuple[PlanItem, ...], ...]:
    """Cut items into consecutive steps that `plan_step` takes: decode items first, then prefill in chunks.

    Raises: PlanError for what no cutting makes fit, PoolError or CacheError if the pools cannot hold all of it.
    """
    steps = _split(items, pools, limits, text_track(pools))
    check_growth({item.request: len(item.token_ids) for item in items}, pools, limits)
    return steps


def check_growth(counts: Mapping[str, int], pools: CachePools, limits: StepLimits) -> None:
    """Whether the next tokens of these requests can be stepped, in one step or in several.

    Raises: PlanError for index scores that do not fit, PoolError or CacheError if the pools cannot hold all of it.
    """
    planner = PagePlanner(pools, limits)
    for request, count in counts.items():
        planner.check_scores(request, pools.slots(request).length + count)
    pools.check_room(counts)


def split_draft(items: Sequence[PlanItem], pools: CachePools, limits: StepLimits) -> tuple[tuple[PlanItem, ...], ...]:
    """Cut items into consecutive steps that `plan_draft` takes. Raises: PlanError as `split_step`."""
    return _split(items, pools, limits, draft_track(pools))


def _split(
    items: Sequence[PlanItem], pools: CachePools, limits: StepLimits, track: Track
) -> tuple[tuple[PlanItem, ...], ...]:
    _check_items(items)
    if limits.max_tokens < track.most_decoded:
        raise PlanError(
            f"max_tokens = {limits.max_tokens} cannot hold the {track.most_decoded} rows that one request may "
            f"decode at once; raise it"
        )
    steps: list[list[PlanItem]] = [[]]
    room = limits.max_tokens
    for item in _decode_first(items, track):
        left, start = item.token_ids, track.start(pools.slots(item.request))
        while left:
            is_decode = len(left) <= track.most_decoded
            if not room or (is_decode and len(left) > room):
                steps.append([])
                room = limits.max_tokens
            count = len(left) if is_decode else min(len(left), room, longest_chunk(item, start, pools, limits, track))
            steps[-1].append(PlanItem(item.request, left[:count], item.kind))
            left, start = left[count:], start + count
            # The rest of an item needs a step of its own.
            room = 0 if left else room - count
    return tuple(tuple(step) for step in steps if step)


def _spans(
    items: Sequence[PlanItem], pools: CachePools, limits: StepLimits, track: Track, is_padded: bool
) -> tuple[list[Span], int]:
    """The items in row order, and how many of them run as decode."""
    _check_items(items)
    ordered = _decode_first(items, track)
    counts = [len(item.token_ids) for item in ordered]
    if sum(counts) > limits.max_tokens:
        largest = max(ordered, key=lambda item: len(item.token_ids))
        raise PlanError(
            f"a step of {sum(counts)} tokens exceeds max_tokens = {limits.max_tokens}; the largest item is "
            f"{len(largest.token_ids)} tokens of {largest.request!r}; raise max_tokens, or cut the items with "
            f"split_step or split_draft"
        )
    spans = []
    for number, (item, count, stop) in enumerate(zip(ordered, counts, accumulate(counts), strict=True)):
        slots = pools.slots(item.request)
        start = track.start(slots)
        spans.append(Span(item, slots, number, start, start + count, stop - count, stop))
    decoded = sum(count <= track.most_decoded for count in counts)
    if is_padded and decoded < len(spans):
        raise PlanError(
            f"request {ordered[-1].request!r}, {counts[-1]} tokens, is prefill, which a padded step cannot hold: "
            f"at most {track.most_decoded} tokens of a request run as decode"
        )
    return spans, decoded


def _check_items(items: Sequence[PlanItem]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.request in seen or not item.token_ids:
            raise PlanError(f"request {item.request!r}: a step takes one item with at least one token for each request")
        seen.add(item.request)


def _decode_first(items: Sequence[PlanItem], track: Track) -> list[PlanItem]:
    return sorted(items, key=lambda item: len(item.token_ids) > track.most_decoded)


def _row_positions(spans: Sequence[Span], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Request number and position of each row, int64; padding up to `rows` is request 0, position -1."""
    counts = [span.count for span in spans]
    request_T = np.repeat(np.arange(len(spans)), counts)
    offsets_B = np.array([span.start - span.first_row for span in spans], np.int64)
    positions_T = np.arange(len(request_T)) + offsets_B[request_T]
    return padded(request_T, rows, np.int64), padded(positions_T, rows, np.int64, -1)


def _step(
    spans: Sequence[Span],
    decode_rows: int,
    request_T: np.ndarray,
    positions_T: np.ndarray,
    requests: int,
    pages: PagedRows[np.ndarray] | None,
    ring: RingRows[np.ndarray],
) -> StepPlan:
    row_starts = (0, *(span.stop_row for span in spans))
    token_ids_T = np.zeros(len(positions_T), np.int64)
    token_ids_T[: row_starts[-1]] = np.fromiter(chain.from_iterable(span.item.token_ids for span in spans), np.int64)
    return Step(
        items=tuple(span.item for span in spans),
        row_starts=row_starts,
        decode_rows=decode_rows,
        token_ids_T=token_ids_T,
        positions_T=positions_T.astype(np.int32),
        request_T=request_T.astype(np.int32),
        query_start_B1=padded(row_starts, requests + 1, np.int32, row_starts[-1]),
        length_B=padded([span.length for span in spans], requests, np.int32),
        pages=pages,
        ring=ring,
    )
