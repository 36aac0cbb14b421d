"""What the planning of all layer kinds shares: the rows of an item, the limits of a step, packing into groups.

Everything follows from lengths; no token id is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from optimized.cache import CachePools, RequestSlots
from optimized.step import KeyGroup, PlanItem
from reference.config import MlaGeometry

# T rows of the step  B requests  P pages a request  S gathered key rows  B1 = B + 1


@dataclass(frozen=True)
class StepLimits:
    """What a step may take.

    `max_tokens` rows; `expanded_bytes` for the expanded keys and values of one group of prefill items, or for the
    absorbed queries and attended latents of one block of rows; `score_bytes` for the float32 index scores of a block.
    """

    max_tokens: int
    expanded_bytes: int
    score_bytes: int


@dataclass(frozen=True)
class Track:
    """Where the rows of one part of the model continue, and the rings that they go to.

    `most_decoded` is how many rows of a request can be written before the first of them is attended: no row that one
    of them sees is overwritten then.
    """

    start: Callable[[RequestSlots], int]
    ring: Callable[[RequestSlots], int]
    ring_rows: int
    most_decoded: int


@dataclass(frozen=True)
class Span:
    """Rows first_row : stop_row of a step are positions start : length of request number `number` of the step."""

    item: PlanItem
    slots: RequestSlots
    number: int
    start: int
    length: int
    first_row: int
    stop_row: int

    @property
    def count(self) -> int:
        return self.length - self.start


def expanded_key_bytes(geometry: MlaGeometry, pools: CachePools) -> int:
    """Memory of one gathered key: its latent row, and the keys and values of all heads."""
    lanes = geometry.num_attention_heads * (geometry.qk_nope_head_dim + geometry.v_head_dim)
    return (geometry.latent_row + lanes) * pools.dtype.itemsize


def packed(spans: Iterable[Span], size: Callable[[Span], int], budget: int) -> list[list[Span]]:
    """Consecutive spans whose sizes add up to at most `budget`, which no single one exceeds."""
    groups: list[list[Span]] = []
    total = 0
    for span in spans:
        total += size(span)
        if not groups or total > budget:
            groups.append([])
            total = size(span)
        groups[-1].append(span)
    return groups


def starts(sizes: Iterable[int]) -> np.ndarray:
    """Where each part starts, and the end: [0, a, a + b, …], int32."""
    return np.cumsum([0, *sizes], dtype=np.int32)


def padded(values: Sequence[int] | np.ndarray, size: int, dtype: type, fill: int = 0) -> np.ndarray:
    """`values`, and behind them as often `fill` as it takes to be `size`. (np.pad takes ten times as long.)"""
    array: np.ndarray = np.full(max(size, len(values)), fill, dtype)
    array[: len(values)] = values
    return array


def key_group(spans: Sequence[Span], first_keys: Sequence[int], sources: Sequence[np.ndarray]) -> KeyGroup[np.ndarray]:
    """The group of consecutive spans whose key rows come from `sources`, the first from position `first_keys`."""
    return KeyGroup(
        start=spans[0].first_row,
        stop=spans[-1].stop_row,
        max_queries=max(span.count for span in spans),
        query_start_B1=starts(span.count for span in spans),
        key_start_B1=starts(map(len, sources)),
        first_key_B=np.array(first_keys, np.int32),
        source_S=np.concatenate(sources),
    )
