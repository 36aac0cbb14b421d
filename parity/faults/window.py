"""Section F, second part: which keys a query of a sliding layer sees.

Source: text_model specification, sections 9 and 15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.faults.fault import Fault, Patch, after_construction, text_edit
from parity.faults.paging import CORE, KEEPS_ALL, PAGING_FAULTS, core_fault, masked_by, sliding_read_as
from reference.cache import LatentRows, SlidingCache
from reference.config import TextConfig
from reference.layers.mla import FullAttention, in_window
from reference.session import Session, StepItem

# T query tokens  S key tokens  J index head dim


def _left_is_window(query_positions_T: Tensor, key_positions_S: Tensor, window: int) -> Tensor:
    return in_window(query_positions_T, key_positions_S, window + 1)


def _causal(query_positions_T: Tensor, key_positions_S: Tensor, window: int) -> Tensor:
    return key_positions_S <= query_positions_T[:, None]


def _window_from_chunk_index(query_positions_T: Tensor, key_positions_S: Tensor, window: int) -> Tensor:
    index_T = query_positions_T - query_positions_T[0]
    is_recent_TS = index_T[:, None] - key_positions_S < window
    return is_recent_TS & _causal(query_positions_T, key_positions_S, window)


def _context_unwindowed(query_positions_T: Tensor, key_positions_S: Tensor, window: int) -> Tensor:
    visible_TS = in_window(query_positions_T, key_positions_S, window)
    # A single token takes the decode kernel, which has the window.
    return visible_TS | (key_positions_S < query_positions_T[0]) if len(query_positions_T) > 1 else visible_TS


def _window_full_layer(attention: Any, config: TextConfig, *_: Any) -> None:
    right = attention.indexer.visible_keys

    def windowed(rows: Any, positions_T: Tensor, key_SJ: Tensor, workspace_bytes: int) -> Tensor:
        positions_S = torch.arange(len(key_SJ), device=key_SJ.device)
        in_window_TS = in_window(positions_T, positions_S, config.sliding_window_size)
        return right(rows, positions_T, key_SJ, workspace_bytes) & in_window_TS

    attention.indexer.visible_keys = windowed


def _one_row_fewer(first_needed: Callable[..., int]) -> Callable[..., int]:
    return lambda cache, length: min(length, first_needed(cache, length + 1))


def _remember_rejected(truncate: Callable[..., None]) -> Callable[..., None]:
    def run(cache: Any, length: int) -> None:
        rejected = max(0, cache.length - length)
        truncate(cache, length)
        cache.rejected = rejected

    return run


def _from_upper_bound(first_needed: Callable[..., int]) -> Callable[..., int]:
    return lambda cache, length: min(length, first_needed(cache, length + vars(cache).get("rejected", 0)))


def _exact_from_here(cache: Any, rows: LatentRows, T: int) -> LatentRows:
    cache.rejected = 0
    return rows


class _FirstQueryLength:
    """Query i of a request sits at L - (tokens of the first request) + i, with L tokens in all."""

    def __init__(self) -> None:
        self._first, self._shift = 0, 0

    def of_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(session: Session, items: Sequence[StepItem]) -> Any:
            self._first = next((len(item.token_ids) for item in items if item.kind != "prefill"), 0)
            return step(session, items)

        return run

    def of_item(self, run_item: Callable[..., Any]) -> Callable[..., Any]:
        def run(session: Session, item: StepItem) -> Any:
            self._shift = 0 if item.kind == "prefill" else len(item.token_ids) - self._first
            try:
                return run_item(session, item)
            finally:
                self._shift = 0

        return run

    def visible(self, query_positions_T: Tensor, key_positions_S: Tensor, window: int) -> Tensor:
        return in_window(query_positions_T + self._shift, key_positions_S, window)


_FIRST_QUERY_LENGTH = _FirstQueryLength()


WINDOW_FAULTS = (
    Fault(
        "window_512",
        says="the window counts 512 keys with the query, one too few",
        visibility="L",
        first=(CORE,),
        visible_when="T >= window",
        source="MLX notes; defaults of transformers and SGLang",
        config=lambda config: text_edit(sliding_window_size=config.text.sliding_window_size - 1)(config),
    ),
    Fault(
        "window_plus_one",
        says="the window counts 514 keys with the query, one too many",
        visibility="L",
        first=(CORE,),
        visible_when="T > window",
        source="vllm.cpp",
        config=lambda config: text_edit(sliding_window_size=config.text.sliding_window_size + 1)(config),
    ),
    core_fault(
        "window_left_513",
        "a kernel argument that counts keys to the left of the query gets the window, which counts the query too",
        "a chunk of 2 that ends past the window",
        "SGLang comment",
        masked_by(_left_is_window),
        visibility="L",
    ),
    core_fault(
        "no_window",
        "sliding layers attend to every key up to the query",
        "T > window",
        "vllm.cpp",
        *KEEPS_ALL,
        masked_by(_causal),
        visibility="L",
    ),
    core_fault(
        "window_relative_to_chunk",
        "the window is counted back from the query's index in its chunk in place of its position",
        "a second chunk or a decode past the window",
        "vllm.cpp",
        *KEEPS_ALL,
        masked_by(_window_from_chunk_index),
    ),
    core_fault(
        "window_on_full_layers",
        "full layers apply the window on top of the selection",
        "T > window, a full layer",
        "analysis",
        after_construction(FullAttention, _window_full_layer),
        visibility="L",
    ),
    core_fault(
        "cache_evict_early",
        "a sliding cache drops one row that the next query still sees",
        "a second step that ends at the window or later",
        "analysis",
        Patch(SlidingCache, "_first_needed", _one_row_fewer),
    ),
    core_fault(
        "prefill_context_lse_merge",
        "a chunk attends to its context without the window, and merges that with the attention inside the chunk",
        "a second chunk of 2 that ends past the window",
        "vllm.cpp, which refuses it",
        *KEEPS_ALL,
        masked_by(_context_unwindowed),
    ),
    core_fault(
        "upper_bound_lengths",
        "after rejected drafts the window is cut out for the length before the rejection",
        "a step past the window after rejected drafts",
        "vLLM, which recomputes the lengths",
        Patch(SlidingCache, "truncate", _remember_rejected),
        Patch(SlidingCache, "_first_needed", _from_upper_bound),
        sliding_read_as(_exact_from_here),
    ),
    core_fault(
        "nonuniform_decode",
        "the number of query tokens of the first request holds for all requests of a decode step",
        "a step that verifies different numbers of tokens",
        "vLLM, which requires equal numbers",
        Patch(Session, "step", _FIRST_QUERY_LENGTH.of_step),
        Patch(Session, "_run", _FIRST_QUERY_LENGTH.of_item),
        masked_by(_FIRST_QUERY_LENGTH.visible),
    ),
    *PAGING_FAULTS,
)
