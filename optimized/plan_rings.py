"""Plans the layers that keep a ring: where their rows go, and which keys a prefill chunk gathers.

For a chunk of `count` tokens that ends at length L, window W:
kv_len = min(L, count + W - 1)        the keys of its first query, and everything behind
keys     positions L - kv_len .. L - 1: those before the chunk from the ring, its own from the step's rows

The past is gathered before any row of the chunk is written, so a chunk may be longer than the ring. Decode rows are
written first: a ring has room for as many as `Track.most_decoded` beside what they see.
Source: text_model specification, sections 15 and 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optimized.cache import CachePools
from optimized.errors import PlanError
from optimized.plan_spans import Span, StepLimits, Track, expanded_key_bytes, key_group, packed
from optimized.step import KeyGroup, PlanItem, RingRows

# T rows of the step  S gathered key rows


def text_track(pools: CachePools) -> Track:
    """The backbone: full and sliding layers hold the same number of tokens."""
    return Track(lambda slots: slots.length, lambda slots: slots.ring, pools.ring_rows, 1 + pools.max_draft_tokens)


def draft_track(pools: CachePools) -> Track:
    """The draft layer, with a ring and a length of its own."""
    most = 1 + 2 * pools.max_draft_tokens
    return Track(lambda slots: slots.draft_length, lambda slots: slots.draft_ring, pools.draft_ring_rows, most)


def window_keys(start: int, count: int, window: int) -> int:
    """kv_len of a chunk of `count` tokens behind `start`."""
    return min(start + count, count + window - 1)


def longest_chunk(item: PlanItem, start: int, pools: CachePools, limits: StepLimits, track: Track) -> int:
    """How many tokens a prefill chunk behind `start` may have for its expanded keys to fit.

    Raises: PlanError if that is no more than what runs as decode.
    """
    key_bytes = expanded_key_bytes(pools.config.sliding, pools)
    past = min(start, pools.window - 1)
    longest = limits.expanded_bytes // key_bytes - past
    if longest <= track.most_decoded:
        shortest = track.most_decoded + 1
        raise PlanError(
            f"request {item.request!r}, {len(item.token_ids)} tokens: the shortest prefill chunk, {shortest} tokens, "
            f"expands {past} keys of the window besides its own, {key_bytes} bytes each; raise expanded_bytes = "
            f"{limits.expanded_bytes} to at least {(pools.window - 1 + shortest) * key_bytes}"
        )
    return longest


def window_groups(spans: Sequence[Span], pools: CachePools, limits: StepLimits) -> list[list[Span]]:
    """Prefill items whose expanded keys fit together. Raises: PlanError for one that does not fit alone."""
    key_bytes = expanded_key_bytes(pools.config.sliding, pools)
    budget = limits.expanded_bytes // key_bytes
    for span in spans:
        keys = window_keys(span.start, span.count, pools.window)
        if keys > budget:
            raise PlanError(
                f"request {span.item.request!r}: {span.count} tokens expand {keys} keys of a sliding layer, "
                f"{keys * key_bytes} bytes; raise expanded_bytes = {limits.expanded_bytes}, or cut the item with "
                f"split_step or split_draft"
            )
    return packed(spans, lambda span: window_keys(span.start, span.count, pools.window), budget)


def ring_rows(
    spans: Sequence[Span],
    groups: Sequence[Sequence[Span]],
    request_T: np.ndarray,
    positions_T: np.ndarray,
    decode_rows: int,
    pools: CachePools,
    track: Track,
) -> RingRows[np.ndarray]:
    """Rings and ring rows of all rows; padding rows have negative positions."""
    ring_B = np.array([track.ring(span.slots) for span in spans] or [0], np.int64)
    length_B = np.array([span.length for span in spans] or [0], np.int64)
    ring_T = ring_B[request_T]
    slot_T = ring_T * track.ring_rows + positions_T % track.ring_rows
    is_decode_T = np.arange(len(positions_T)) < decode_rows
    is_kept_T = positions_T >= length_B[request_T] - track.ring_rows
    return RingRows(
        ring_T=ring_T.astype(np.int32),
        ring_slot_T=np.where(is_decode_T & (positions_T >= 0), slot_T, -1),
        kept_slot_T=np.where(~is_decode_T & is_kept_T, slot_T, -1),
        prefill=tuple(_gathered(group, pools.window, track) for group in groups),
    )


def _gathered(spans: Sequence[Span], window: int, track: Track) -> KeyGroup[np.ndarray]:
    first_keys, sources = [], []
    for span in spans:
        first = span.length - window_keys(span.start, span.count, window)
        past = track.ring(span.slots) * track.ring_rows + np.arange(first, span.start, dtype=np.int64) % track.ring_rows
        fresh = -1 - np.arange(span.first_row, span.stop_row, dtype=np.int64)
        first_keys.append(first)
        sources.append(np.concatenate((past, fresh)))
    return key_group(spans, first_keys, sources)
