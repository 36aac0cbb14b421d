"""Section F, first part: what a paged cache, or the gather from one, gives attention in place of the right rows.

Written on the reference's own caches, as what such a port would read.
Source: text_model specification, sections 13, 15 and 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import reference.layers.mla
from parity.faults.fault import Fault, Patch, Visibility, after_construction
from reference.cache import FullCache, LatentRows, RequestCache, SlidingCache
from reference.config import TextConfig
from reference.layers.mla import in_window

# T query tokens  S key tokens  R rope dim  C kv latent  X = C + R lanes of a cached row  F freed rows

CORE = "layers.{i}.attn.core"
# A decode kernel gathers whole tiles of this many keys.
TILE = 8
# Tokens on a page: few, so that short requests have several pages.
PAGE = 4


def _room_for_all(append: Callable[..., LatentRows]) -> Callable[..., LatentRows]:
    def run(cache: Any, kv_latent_TC: Tensor, k_rope_TR: Tensor) -> LatentRows:
        more = cache.length + len(kv_latent_TC) - cache.size
        if more > 0:
            cache.size += more
            cache._ring = {name: F.pad(ring, (0, 0, 0, more), value=float("nan")) for name, ring in cache._ring.items()}
        return append(cache, kv_latent_TC, k_rope_TR)

    return run


# Sliding caches keep every row of a request, and give all of them back. With the mask intact this changes nothing.
KEEPS_ALL = (
    Patch(SlidingCache, "_first_needed", lambda original: lambda cache, length: 0),
    Patch(SlidingCache, "append", _room_for_all),
)


def sliding_read_as(change: Callable[[Any, LatentRows, int], LatentRows]) -> Patch:
    """A patch of what sliding layers read: `change(cache, rows, T)` in place of `rows`, of which T are new."""

    def make(append: Callable[..., LatentRows]) -> Callable[..., LatentRows]:
        def run(cache: Any, kv_latent_TC: Tensor, k_rope_TR: Tensor) -> LatentRows:
            return change(cache, append(cache, kv_latent_TC, k_rope_TR), len(kv_latent_TC))

        return run

    return Patch(SlidingCache, "append", make)


def masked_by(visible: Callable[[Tensor, Tensor, int], Tensor]) -> Patch:
    """A patch of the mask of sliding layers: `visible(query_positions_T, key_positions_S, window)`, bool [T, S]."""
    return Patch(reference.layers.mla, "in_window", lambda original: visible)


def _full_read_as(change: Callable[[Any, LatentRows], LatentRows]) -> Patch:
    """The same for full layers. Index keys are another cache, and stay right."""

    def make(append: Callable[..., Any]) -> Callable[..., Any]:
        def run(cache: Any, *new: Tensor) -> tuple[LatentRows, Tensor]:
            rows, index_key_SJ = append(cache, *new)
            return change(cache, rows), index_key_SJ

        return run

    return Patch(FullCache, "append", make)


def _whole_tiles(query_positions_T: Tensor, key_positions_S: Tensor, window: int) -> Tensor:
    visible_TS = in_window(query_positions_T, key_positions_S, window)
    if len(query_positions_T) > 1 or query_positions_T[0] == 0:
        return visible_TS
    slot_S = torch.arange(len(key_positions_S), device=key_positions_S.device)
    return visible_TS & (slot_S < window // TILE * TILE)


def _changed(rows: LatentRows, change: Callable[[Tensor], Tensor], positions_S: Tensor) -> LatentRows:
    """`change` of the latents and of the rope keys, at other positions."""
    return LatentRows(change(rows.kv_latent_SC), change(rows.k_rope_SR), positions_S)


def _only(rows: LatentRows, is_kept_S: Tensor) -> LatentRows:
    return _changed(rows, lambda x_SX: x_SX[is_kept_S], rows.positions_S[is_kept_S])


def _is_decode(cache: Any, T: int) -> bool:
    return T == 1 and cache.length > 1


def _gather_length(cache: Any) -> int:
    return -(-cache.window // TILE) * TILE


def _freed(cache: Any, like: Tensor) -> Tensor:
    """Positions that a decode gather of whole tiles reads before the window, where pages may have been freed."""
    start, needed = (max(0, cache.length - count) for count in (_gather_length(cache), cache.window))
    return torch.arange(start, needed, device=like.device)


def _gathered_from_zero(cache: Any, rows: LatentRows, T: int) -> LatentRows:
    return _only(rows, rows.positions_S < _gather_length(cache)) if _is_decode(cache, T) else rows


def _gathered_as_decode(cache: Any, rows: LatentRows, T: int) -> LatentRows:
    return _only(rows, rows.positions_S >= cache.length - cache.window)


def _stale_rows_unzeroed(cache: Any, rows: LatentRows, T: int) -> LatentRows:
    if not _is_decode(cache, T):
        return rows
    positions_F = _freed(cache, rows.positions_S)

    def behind_stale(x_SX: Tensor) -> Tensor:
        return torch.cat((x_SX.new_full((len(positions_F), x_SX.shape[1]), float("nan")), x_SX))

    return _changed(rows, behind_stale, torch.cat((positions_F, rows.positions_S)))


def _page_zero_for_unmapped(cache: Any, rows: LatentRows, T: int) -> LatentRows:
    if not _is_decode(cache, T):
        return rows
    positions_F = _freed(cache, rows.positions_S)
    # Nothing but the page id was to hide these slots: they count as visible, as the query itself is.
    seen_at_F = rows.positions_S[-1:].expand(len(positions_F))
    return _changed(
        rows, lambda x_SX: torch.cat((x_SX[positions_F % PAGE], x_SX)), torch.cat((seen_at_F, rows.positions_S))
    )


def _widest_row(cache: Any, config: TextConfig, *_: Any) -> None:
    """Rows of both layer kinds have one physical width."""
    for layer in cache.layers:
        layer.physical_width = max(config.full.latent_row, config.sliding.latent_row)


_PADDED_ROWS = after_construction(RequestCache, _widest_row)


def _at_logical_stride(cache: Any, rows: LatentRows) -> LatentRows:
    C, R, S = rows.kv_latent_SC.shape[1], rows.k_rope_SR.shape[1], len(rows.positions_S)
    row_SX = torch.cat((rows.kv_latent_SC, rows.k_rope_SR), dim=-1)
    memory = F.pad(row_SX, (0, cache.physical_width - C - R)).flatten()
    kv_latent_SC, k_rope_SR = memory[: S * (C + R)].unflatten(0, (S, C + R)).split((C, R), dim=-1)
    return LatentRows(kv_latent_SC, k_rope_SR, rows.positions_S)


def _trodden_on(append: Callable[..., Any]) -> Callable[..., Any]:
    """Rows of one step are written at once; the padding of each lands on the row behind it."""

    def run(cache: Any, kv_latent_TC: Tensor, k_rope_TR: Tensor, index_key_TJ: Tensor) -> Any:
        row_TX = torch.cat((kv_latent_TC, k_rope_TR), dim=-1)
        row_TX[1:, : cache.physical_width - row_TX.shape[1]] = 0.0
        return append(cache, *row_TX.split((kv_latent_TC.shape[1], k_rope_TR.shape[1]), dim=-1), index_key_TJ)

    return run


def _in_physical_order(cache: Any, rows: LatentRows) -> LatentRows:
    """The table exchanges the pages of each pair; a page without a partner is where it should be."""
    S = len(rows.positions_S)
    order_S = torch.arange(S, device=rows.positions_S.device)
    paired = S // (2 * PAGE) * (2 * PAGE)
    order_S[:paired] = order_S[:paired].unflatten(0, (-1, 2, PAGE)).flip(1).flatten()
    return _changed(rows, lambda x_SX: x_SX[order_S], rows.positions_S)


def core_fault(
    fault_id: str, says: str, visible_when: str, source: str, *patches: Patch, visibility: Visibility = "C"
) -> Fault:
    """A fault of what attention sees, which first shows in its output."""
    return Fault(fault_id, says, visibility, (CORE,), visible_when, source, patches=patches)


PAGING_FAULTS = (
    core_fault(
        "gather_start_zero",
        "decode gathers its keys from position 0 on in place of the last ones",
        "decode at more tokens than the window rounded up to a multiple of 8",
        "vllm.cpp",
        *KEEPS_ALL,
        sliding_read_as(_gathered_from_zero),
    ),
    core_fault(
        "gather_whole_context",
        "every cached row is gathered, and the window mask hides what is too old",
        "never; the workspace is larger",
        "vllm.cpp",
        *KEEPS_ALL,
        visibility="I",
    ),
    core_fault(
        "gather_len_not_rounded",
        "the gather length is no multiple of the tile of 8 keys, and the keys behind the last whole tile are not read",
        "decode, a window that is no multiple of 8",
        "vllm.cpp",
        masked_by(_whole_tiles),
    ),
    core_fault(
        "decode_sized_gather_in_prefill",
        "a chunk gathers as many keys as a single query sees, so that its early queries lose keys",
        "a chunk of 2 that ends past the window",
        "vllm.cpp",
        sliding_read_as(_gathered_as_decode),
    ),
    core_fault(
        "zero_prob_times_nan",
        "masked slots of recycled pages keep NaN values, and a probability of zero times NaN is NaN",
        "decode past the window, which is no multiple of 8",
        "vLLM, which zeroes invalid slots",
        sliding_read_as(_stale_rows_unzeroed),
    ),
    core_fault(
        "unmapped_page_valid",
        "a page that was freed, with id -1, is read as page 0 and counts as valid",
        "decode past the window, which is no multiple of 8",
        "vllm.cpp",
        *KEEPS_ALL,
        sliding_read_as(_page_zero_for_unmapped),
    ),
    core_fault(
        "logical_stride_on_padded_row",
        "cached rows of full layers are padded to the width of sliding ones and read at their own width",
        "T = 2, a full layer",
        "vllm.cpp",
        _PADDED_ROWS,
        _full_read_as(_at_logical_stride),
    ),
    core_fault(
        "padded_write",
        "rows of full layers are written with their padding where no room is left for it, over the rows behind",
        "T = 2, a full layer",
        "vllm.cpp",
        _PADDED_ROWS,
        Patch(FullCache, "append", _trodden_on),
    ),
    core_fault(
        "block_table_ignored",
        "pages of full layers are read in physical order in place of the order of the block table",
        "a prefill of two pages, or T > index_topk, and a shuffled table",
        "vllm.cpp",
        _full_read_as(_in_physical_order),
    ),
)
