"""What requests keep on the device between steps: pages for the full layers, rings for the others.

full layer:     latent rows [kv_latent C | k_rope R] and index keys J of every position, in pages of `page_size` rows;
                position p of a request lies in page pages[p // page_size], row p % page_size. All full layers share
                the page numbers, so one block table serves all of them.
sliding layer:  latent rows of the last positions, in a ring of window + drafts rows: position p in row p % rows.
draft layer:    the same in a ring of its own with window + 2 · drafts rows: drafts run ahead of the committed tokens,
                and after that tokens may be taken back. With `max_length` no ring is longer than a request can need.

Who owns which page and ring is decided on the host from lengths alone; nothing here waits for the device. Copies and
fills are queued on the current stream, in order with the steps around them. Prefixes are not found or reused: every
request computes its own prompt, and only `fork` shares pages, until one of the two appends to a page they share.
Source: text_model specification, sections 13, 15 and 16; `reference.cache` is the same contract in simple form.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimized.errors import PoolError
from reference.config import TextConfig
from reference.errors import CacheError

# S cached tokens  C kv latent  R rope dim  L = C + R  J index head dim  Z layers of one kind

PREFIX_REUSE = "prefix reuse: none; every request computes its own prompt, fork() shares pages"


@dataclass
class RequestSlots:
    """The places of one request. `length` counts its tokens, `draft_length` the rows of the draft layer.

    `pages` holds int32 page numbers in order of position. `oldest` and `draft_oldest` are the smallest positions that
    the rings still hold; what lies before is overwritten, also after a truncation.
    """

    ring: int
    draft_ring: int
    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    oldest: int = 0
    draft_length: int = 0
    draft_oldest: int = 0


@dataclass(frozen=True)
class PoolRow:
    """Memory of one kind of pool: `layers` layers of `rows` rows of `row_bytes` bytes."""

    kind: str
    layers: int
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.layers * self.rows * self.row_bytes

    def __str__(self) -> str:
        return (
            f"{self.kind:13} {self.layers:3} layers x {self.rows:9,} rows x {self.row_bytes:5,} B = {self.nbytes:,} B"
        )


class CachePools:
    """All pools of one model on one device, and who owns what in them.

    `pages` pages for all requests together; `rings` is how many requests can be open. `max_draft_tokens` is how deep a
    draft may go and how many tokens `truncate` can always take back. `max_length` bounds a request.
    `row_lanes` makes the physical rows of all latent pools that wide; the lanes behind a row are never touched.

    For tests: `poison` fills the pools, and whatever is given back, with NaN instead of zeros. `disjoint_numbers` gives
    pages, rings and draft rings numbers that never coincide, and every pool room for all of them, so that a number of
    the wrong kind reads poison.
    Raises: PoolError for sizes that hold nothing, or row_lanes below the widest row.
    """

    def __init__(
        self,
        config: TextConfig,
        *,
        pages: int,
        page_size: int,
        rings: int,
        max_draft_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        poison: bool = False,
        max_length: int | None = None,
        row_lanes: int | None = None,
        disjoint_numbers: bool = False,
    ):
        widest = max(config.full.latent_row, config.sliding.latent_row)
        lanes = row_lanes or 0
        if min(pages, page_size, rings) < 1 or max_draft_tokens < 0 or (max_length is not None and max_length < 1):
            raise PoolError(
                f"pools need at least one page, row a page, ring and token a request; found pages={pages}, "
                f"page_size={page_size}, rings={rings}, max_draft_tokens={max_draft_tokens}, max_length={max_length}"
            )
        if row_lanes is not None and row_lanes < widest:
            raise PoolError(f"row_lanes must be at least {widest}, the widest latent row; found {row_lanes}")
        self.config, self.page_size, self.max_draft_tokens = config, page_size, max_draft_tokens
        self.dtype, self.device, self.max_length = dtype, torch.device(device), max_length
        self.window = config.sliding_window_size
        rows = self.window + max_draft_tokens
        self.ring_rows = rows if max_length is None else min(rows, max_length)
        self.draft_ring_rows = self.ring_rows + max_draft_tokens
        self.fill = float("nan") if poison else 0.0
        self._is_poisoned = poison

        self.page_count, self.ring_count = pages, rings
        self._first_ring, self._first_draft_ring = (pages, pages + rings) if disjoint_numbers else (0, 0)
        page_numbers, ring_numbers = (pages + 2 * rings,) * 2 if disjoint_numbers else (pages, rings)
        layers = range(config.num_hidden_layers)
        self._full = {layer: place for place, layer in enumerate(filter(config.is_full, layers))}
        sliding = [layer for layer in layers if not config.is_full(layer)]
        self._sliding = {layer: place for place, layer in enumerate(sliding)}

        def stack(count: int, numbers: int, rows: int, width: int, physical: int) -> Tensor:
            shape = (count, numbers, rows, max(width, physical))
            return torch.full(shape, self.fill, dtype=dtype, device=self.device)[..., :width]

        full, ring, J = config.full.latent_row, config.sliding.latent_row, config.index_head_dim
        self.latents = stack(len(self._full), page_numbers, page_size, full, lanes)
        self.index_keys = stack(len(self._full), page_numbers, page_size, J, J)
        self.rings = stack(len(sliding), ring_numbers, self.ring_rows, ring, lanes)
        drafts = min(1, config.num_nextn_predict_layers)
        self.draft_rings = stack(drafts, ring_numbers, self.draft_ring_rows, ring, lanes)

        # The numbers handed out next stand at the end.
        self._free_pages = list(range(pages - 1, -1, -1))
        self._free_rings = list(range(rings - 1, -1, -1))
        self._page_users = [0] * pages
        self._requests: dict[str, RequestSlots] = {}

    def latent_pool(self, layer: int) -> Tensor:
        """[pages, page_size, C + R] of a full layer."""
        return self.latents[self._full[layer]]

    def index_pool(self, layer: int) -> Tensor:
        """[pages, page_size, J] of a full layer."""
        return self.index_keys[self._full[layer]]

    def ring_pool(self, layer: int) -> Tensor:
        """[rings, ring_rows, C + R] of a sliding layer; the layer behind the last one is the draft layer."""
        is_draft = layer == self.config.num_hidden_layers
        return self.draft_rings[0] if is_draft else self.rings[self._sliding[layer]]

    @property
    def requests(self) -> tuple[str, ...]:
        return tuple(self._requests)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def slots(self, request: str) -> RequestSlots:
        """Raises: PoolError for a request that is not open."""
        if request not in self._requests:
            raise PoolError(f"request {request!r} was freed or never opened; open are {sorted(self._requests)}")
        return self._requests[request]

    def open(self, request: str) -> RequestSlots:
        """Start an empty request. Raises: PoolError if it is open already or no ring is free."""
        if request in self._requests:
            raise PoolError(f"request {request!r} is open already; free it, or open another name")
        if not self._free_rings:
            raise PoolError(
                f"request {request!r} needs a ring and none of {self.ring_count} is free; free a request, or allow "
                f"more (`rings` of CachePools, `requests` of EngineOptions)"
            )
        ring = self._free_rings.pop()
        self._requests[request] = RequestSlots(self._first_ring + ring, self._first_draft_ring + ring)
        return self._requests[request]

    def grow(self, request: str, count: int) -> None:
        """Make room for the next `count` tokens. Raises: see `grow_all`."""
        self.grow_all({request: count})

    def check_room(self, counts: Mapping[str, int]) -> None:
        """Whether the next tokens of several requests fit together.

        Forks that still share an unfinished page are each counted a copy of it, though the last one takes none.
        Raises: CacheError for a request that would grow past `max_length`, PoolError if the free pages do not suffice.
        """
        needs = {request: self._pages_needed(request, count) for request, count in counts.items()}
        need, free = sum(needs.values()), len(self._free_pages)
        if need > free:
            largest = max(needs, key=needs.__getitem__)
            raise PoolError(
                f"{sum(counts.values())} tokens of {len(counts)} request(s) need {need} pages of {self.page_size} "
                f"tokens and {free} of {self.page_count} are free; the largest need is {needs[largest]} pages for "
                f"{counts[largest]} tokens of {largest!r}; free or truncate a request, send fewer tokens, or allow "
                f"at least {self.page_count + need - free} pages (`pages` of CachePools and EngineOptions)"
            )

    def grow_all(self, counts: Mapping[str, int]) -> None:
        """Make room for the next tokens of several requests; all of them or none.

        A page that the first of these tokens would share with a fork is copied first. Raises: see `check_room`.
        """
        self.check_room(counts)
        for request, count in counts.items():
            slots = self._requests[request]
            if count and self._has_shared_tail(slots):
                self._unshare_tail(slots)
            slots.length += count
            slots.pages.extend(self._take_page() for _ in range(self._page_total(slots.length) - len(slots.pages)))
            slots.oldest = max(slots.oldest, slots.length - self.ring_rows)

    def grow_draft(self, request: str, count: int) -> None:
        """Make room for the next `count` rows of the draft layer. Raises: see `grow_draft_all`."""
        self.grow_draft_all({request: count})

    def grow_draft_all(self, counts: Mapping[str, int]) -> None:
        """Make room for the next rows of the draft layer of several requests; all of them or none.

        Raises: CacheError for more than max_draft_tokens rows behind that of the last token but one; the row of the
        last token is itself a draft, since its next token is not committed.
        """
        for request, count in counts.items():
            slots = self.slots(request)
            most = max(0, slots.length - 1) + self.max_draft_tokens
            if slots.draft_length + count > most:
                raise CacheError(
                    f"request {request!r}: {count} rows behind {slots.draft_length} of the draft layer exceed {most}: "
                    f"with {slots.length} tokens, max_draft_tokens = {self.max_draft_tokens} allows no more"
                )
        for request, count in counts.items():
            slots = self._requests[request]
            slots.draft_length += count
            slots.draft_oldest = max(slots.draft_oldest, slots.draft_length - self.draft_ring_rows)

    def truncate(self, request: str, length: int) -> None:
        """Keep the first `length` tokens; the draft layer keeps one row fewer, for its row t is made from token t + 1.

        Raises: CacheError for a length the request does not have, or when a ring has overwritten what the next token
        sees; nothing has changed then.
        """
        slots = self.slots(request)
        draft_length = min(slots.draft_length, max(0, length - 1))
        if not 0 <= length <= slots.length:
            raise CacheError(f"request {request!r} has {slots.length} tokens and cannot be truncated to {length}")
        if len(self.rings):
            self._check_ring(request, "sliding", slots.length, length, slots.oldest, self.ring_rows)
        self._check_ring(request, "draft", slots.draft_length, draft_length, slots.draft_oldest, self.draft_ring_rows)
        self.truncate_draft(request, draft_length)
        self._poison_ring(self.rings, slots.ring, range(length, slots.length))
        while len(slots.pages) > self._page_total(length):
            self._release_page(slots.pages.pop())
        slots.length = length
        if self._is_poisoned and self._has_open_tail(slots) and not self._has_shared_tail(slots):
            self._fill_page(slots.pages[-1], length % self.page_size)

    def first_draft_row(self, request: str) -> int:
        """The first row of the draft layer that may have to be made: now, or after any truncation that is possible."""
        slots = self.slots(request)
        shortest = self._shortest(slots.oldest) if len(self.rings) else 0
        return min(slots.draft_length, max(shortest - 1, self._shortest(slots.draft_oldest)))

    def truncate_draft(self, request: str, length: int) -> None:
        """Keep the first `length` rows of the draft layer. Raises: CacheError as `truncate`."""
        slots = self.slots(request)
        if not 0 <= length <= slots.draft_length:
            raise CacheError(f"request {request!r} has {slots.draft_length} draft rows, not {length}")
        self._check_ring(request, "draft", slots.draft_length, length, slots.draft_oldest, self.draft_ring_rows)
        self._poison_ring(self.draft_rings, slots.draft_ring, range(length, slots.draft_length))
        slots.draft_length = length

    def fork(self, request: str, new: str) -> None:
        """Open `new` with the tokens of `request`: pages are shared, rings copied on the device.

        Raises: PoolError as `open`.
        """
        slots = self.slots(request)
        forked = self.open(new)
        for rings, source, target in (
            (self.rings, slots.ring, forked.ring),
            (self.draft_rings, slots.draft_ring, forked.draft_ring),
        ):
            rings[:, target].copy_(rings[:, source])
        for page in slots.pages:
            self._page_users[page] += 1
        forked.pages = slots.pages[:]
        forked.length, forked.oldest = slots.length, slots.oldest
        forked.draft_length, forked.draft_oldest = slots.draft_length, slots.draft_oldest

    def free(self, request: str) -> None:
        """Give everything of a request back. Raises: PoolError for a request that is not open."""
        slots = self.slots(request)
        for page in slots.pages:
            self._release_page(page)
        self._poison_ring(self.rings, slots.ring, range(self.ring_rows))
        self._poison_ring(self.draft_rings, slots.draft_ring, range(self.draft_ring_rows))
        self._free_rings.append(slots.ring - self._first_ring)
        del self._requests[request]

    def latent_rows(self, request: str, layer: int, positions: range) -> Tensor:
        """[len(positions), C + R] as stored; the layer behind the last one is the draft layer.

        Raises: CacheError for positions that the layer does not hold.
        """
        slots = self.slots(request)
        if layer in self._full:
            return self._paged(self.latents, slots, positions)[self._full[layer]]
        if layer == self.config.num_hidden_layers:
            return self._draft_rows(slots, positions)[0]
        return self._ring_rows(slots, positions)[self._sliding[layer]]

    def index_key_rows(self, request: str, layer: int, positions: range) -> Tensor:
        """[len(positions), J] of a full layer. Raises: CacheError for positions that it does not hold."""
        return self._paged(self.index_keys, self.slots(request), positions)[self._full[layer]]

    def bytes_per_token(self) -> int:
        """Bytes that one more token of context takes: full layers only."""
        return len(self._full) * (self.config.full.latent_row + self.config.index_head_dim) * self.dtype.itemsize

    def describe(self, tokens: int | None = None) -> tuple[PoolRow, ...]:
        """Rows and bytes by kind: of the pools, or of a request of that many tokens (whole pages)."""
        paged, rings = self.page_count * self.page_size, self.ring_count
        if tokens is not None:
            paged, rings = self._page_total(tokens) * self.page_size, 1
        kinds = (
            ("full latents", self.latents, paged),
            ("index keys", self.index_keys, paged),
            ("sliding rings", self.rings, rings * self.ring_rows),
            ("draft ring", self.draft_rings, rings * self.draft_ring_rows),
        )
        # The stride is the physical row: padding lanes cost memory too.
        return tuple(
            PoolRow(kind, stack.shape[0], rows, stack.stride(2) * self.dtype.itemsize) for kind, stack, rows in kinds
        )

    def bytes(self, tokens: int | None = None) -> dict[str, int]:
        """Bytes by kind, as `describe`."""
        return {row.kind: row.nbytes for row in self.describe(tokens)}

    def summary(self, tokens: int | None = None) -> str:
        """`describe` as text, with what is not shared."""
        return "\n".join((*map(str, self.describe(tokens)), PREFIX_REUSE))

    def _page_total(self, length: int) -> int:
        return -(-length // self.page_size)

    def _pages_needed(self, request: str, count: int) -> int:
        slots = self.slots(request)
        length = slots.length + count
        if count < 0 or (self.max_length is not None and length > self.max_length):
            raise CacheError(
                f"request {request!r}: {count} tokens behind {slots.length} exceed max_length = {self.max_length}; "
                f"allow more (`max_length` of CachePools and EngineOptions)"
            )
        copied = bool(count) and self._has_shared_tail(slots)
        return self._page_total(length) - len(slots.pages) + copied

    def _has_open_tail(self, slots: RequestSlots) -> bool:
        """Whether the next token goes into a page that holds rows already."""
        return slots.length % self.page_size != 0

    def _has_shared_tail(self, slots: RequestSlots) -> bool:
        return self._has_open_tail(slots) and self._page_users[slots.pages[-1]] > 1

    def _unshare_tail(self, slots: RequestSlots) -> None:
        """Copy the rows of the last page that are the request's own into a page of its own."""
        shared, used = slots.pages[-1], slots.length % self.page_size
        slots.pages[-1] = self._take_page()
        for stack in (self.latents, self.index_keys):
            stack[:, slots.pages[-1], :used].copy_(stack[:, shared, :used])
        self._release_page(shared)

    def _take_page(self) -> int:
        page = self._free_pages.pop()
        self._page_users[page] = 1
        return page

    def _release_page(self, page: int) -> None:
        self._page_users[page] -= 1
        if not self._page_users[page]:
            self._free_pages.append(page)
            if self._is_poisoned:
                self._fill_page(page, 0)

    def _fill_page(self, page: int, first_row: int) -> None:
        for stack in (self.latents, self.index_keys):
            stack[:, page, first_row:] = self.fill

    def _check_ring(self, request: str, kind: str, length: int, wanted: int, oldest: int, rows: int) -> None:
        if wanted < length and wanted < self._shortest(oldest):
            needed = max(0, wanted - (self.window - 1))
            raise CacheError(
                f"request {request!r}, {kind} ring: cannot go back from {length} to {wanted} tokens: the window of the "
                f"next token starts at position {needed}, but positions below {oldest} are overwritten; a ring of "
                f"{rows} rows takes back at most {rows - self.window + 1}"
            )

    def _shortest(self, oldest: int) -> int:
        """The fewest tokens whose next one sees no position of a ring before `oldest`."""
        return oldest + self.window - 1 if oldest else 0

    def _poison_ring(self, rings: Tensor, ring: int, positions: range) -> None:
        if self._is_poisoned and positions:
            rows = sorted({position % rings.shape[2] for position in positions})
            rings[:, ring, torch.tensor(rows, device=self.device)] = self.fill

    def page_places(self, slots: RequestSlots, positions: Iterable[int]) -> Tensor:
        """Flat rows of a paged pool, int64."""
        size = self.page_size
        places = [slots.pages[position // size] * size + position % size for position in positions]
        return torch.tensor(places, dtype=torch.int64, device=self.device)

    def _paged(self, stack: Tensor, slots: RequestSlots, positions: range) -> Tensor:
        _check_held(positions, 0, slots.length)
        return stack.flatten(1, 2)[:, self.page_places(slots, positions)]

    def _ring_rows(self, slots: RequestSlots, positions: range) -> Tensor:
        _check_held(positions, slots.oldest, slots.length)
        return self.rings[:, slots.ring, torch.tensor(positions, dtype=torch.int64) % self.ring_rows]

    def _draft_rows(self, slots: RequestSlots, positions: range) -> Tensor:
        _check_held(positions, slots.draft_oldest, slots.draft_length)
        return self.draft_rings[:, slots.draft_ring, torch.tensor(positions, dtype=torch.int64) % self.draft_ring_rows]


def _check_held(positions: range, oldest: int, length: int) -> None:
    if positions and not (oldest <= positions[0] and positions[-1] < length and positions.step > 0):
        raise CacheError(f"positions {positions} are not all held: from {oldest} to {length - 1}")
