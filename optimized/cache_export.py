"""Takes the rows of one request out of the pools and puts them into the same or other pools.

Only logical rows move, in order of position: no padding lanes, page numbers or ring order. What is restored equals what
was taken, whatever the page size, the padding, and the pages and ring it comes to lie in; rings may be longer, not
shorter. Everything stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.cache import CachePools
from optimized.errors import PoolError
from reference.errors import NoteError

# S cached tokens  L latent row  J index head dim  Z layers of one kind


@dataclass(frozen=True)
class ExportedRequest:
    """The rows of a request in the dtype of its pools.

    full_ZSL and index_key_ZSJ hold every position; sliding_ZSL and draft_ZSL (Z = 1, or 0 without a draft layer) the
    positions from `oldest` and from `draft_oldest` on.
    """

    length: int
    oldest: int
    draft_length: int
    draft_oldest: int
    full_ZSL: Tensor
    index_key_ZSJ: Tensor
    sliding_ZSL: Tensor
    draft_ZSL: Tensor


def export_request(pools: CachePools, request: str) -> ExportedRequest:
    """A copy of the rows of `request`. Raises: PoolError if it is not open."""
    slots = pools.slots(request)
    every = pools.page_places(slots, range(slots.length))
    ring = _ring_places(slots.oldest, slots.length, pools.ring_rows, pools)
    draft = _ring_places(slots.draft_oldest, slots.draft_length, pools.draft_ring_rows, pools)
    return ExportedRequest(
        slots.length,
        slots.oldest,
        slots.draft_length,
        slots.draft_oldest,
        _in_rows(pools.latents)[:, every],
        _in_rows(pools.index_keys)[:, every],
        pools.rings[:, slots.ring, ring],
        pools.draft_rings[:, slots.draft_ring, draft],
    )


def import_request(pools: CachePools, request: str, exported: ExportedRequest) -> None:
    """Open `request` with exported rows, in whatever pages and ring are free.

    Raises: PoolError or CacheError if it is open already or does not fit, PoolError for rows of another model, of
    another dtype or of longer rings; nothing has changed then.
    """
    _check(pools, request, exported)
    slots = pools.open(request)
    try:
        pools.grow(request, exported.length)
    except NoteError:
        pools.free(request)
        raise
    slots.oldest, slots.draft_oldest = exported.oldest, exported.draft_oldest
    slots.draft_length = exported.draft_length
    every = pools.page_places(slots, range(slots.length))
    _in_rows(pools.latents)[:, every] = exported.full_ZSL
    _in_rows(pools.index_keys)[:, every] = exported.index_key_ZSJ
    ring = _ring_places(slots.oldest, slots.length, pools.ring_rows, pools)
    pools.rings[:, slots.ring, ring] = exported.sliding_ZSL
    draft = _ring_places(slots.draft_oldest, slots.draft_length, pools.draft_ring_rows, pools)
    pools.draft_rings[:, slots.draft_ring, draft] = exported.draft_ZSL


def _in_rows(stack: Tensor) -> Tensor:
    """[Z, pages, page_size, width] as [Z, rows, width], the same memory also where rows are padded."""
    return stack.view(stack.shape[0], stack.shape[1] * stack.shape[2], stack.shape[3])


def _ring_places(oldest: int, length: int, rows: int, pools: CachePools) -> Tensor:
    return torch.arange(oldest, max(oldest, length), device=pools.device) % rows


def _check(pools: CachePools, request: str, exported: ExportedRequest) -> None:
    ring, draft = exported.length - exported.oldest, exported.draft_length - exported.draft_oldest
    if ring > pools.ring_rows or draft > pools.draft_ring_rows:
        raise PoolError(
            f"import of {request!r}: it brings {ring} and {draft} ring rows, these rings hold {pools.ring_rows} and "
            f"{pools.draft_ring_rows}; make CachePools with the max_draft_tokens and max_length it was exported under"
        )
    for name, tensor, stack, rows in (
        ("full_ZSL", exported.full_ZSL, pools.latents, exported.length),
        ("index_key_ZSJ", exported.index_key_ZSJ, pools.index_keys, exported.length),
        ("sliding_ZSL", exported.sliding_ZSL, pools.rings, max(0, ring)),
        ("draft_ZSL", exported.draft_ZSL, pools.draft_rings, max(0, draft)),
    ):
        shape = (stack.shape[0], rows, stack.shape[3])
        if tuple(tensor.shape) != shape or tensor.dtype != pools.dtype:
            raise PoolError(
                f"import of {request!r}: expected {name} {shape} in {pools.dtype}, found {tuple(tensor.shape)} in "
                f"{tensor.dtype}"
            )
