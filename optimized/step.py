"""The metadata of one step over a ragged batch, and its way to the device.

T rows (new tokens) of B requests stand one request behind the other: first those that run from the caches alone
(decode, verification), then prefill chunks. The same classes hold numpy arrays on the host (`StepPlan`) and tensors on
the device (`DeviceStep`); whole numbers stay on the host in both, for they decide grids and buffer sizes.

An upload packs all arrays into one pinned host buffer and queues one copy; the tensors are views of its target. The
device is not waited for, except that a host buffer is reused only after the copy out of it is done.
Source: text_model specification, sections 13, 15 and 16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from optimized.errors import PlanError

# T rows of the step  B requests  P pages a request  S gathered key rows  B1 = B + 1

Array = TypeVar("Array")
StepKind = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True)
class PlanItem:
    """New tokens of one request, at its next positions. `kind` is for traces: what runs how depends on counts alone."""

    request: str
    token_ids: tuple[int, ...]
    kind: StepKind


def row_spans(items: Sequence[PlanItem]) -> dict[str, slice]:
    """The rows of each request in a step of these items, in row order."""
    stops = accumulate(len(item.token_ids) for item in items)
    return {item.request: slice(stop - len(item.token_ids), stop) for item, stop in zip(items, stops, strict=True)}


@dataclass(frozen=True)
class RowBlock(Generic[Array]):
    """Rows start:stop of the step, few enough for the workspace; they are scored, selected and attended together.

    query_start_B1: int32, where the rows of each item of the group start, counted from `start`: a run for every item,
    also of no rows; `max_queries` is the longest.
    """

    start: int
    stop: int
    max_queries: int
    query_start_B1: Array


@dataclass(frozen=True)
class KeyGroup(Generic[Array]):
    """Rows start:stop of the step: whole prefill items whose keys are gathered, expanded and attended together.

    source_S: int64, where each key row comes from: a flat row of the pool, or -i - 1 for row i of the step.
    query_start_B1, key_start_B1: int32, first row of each item among the rows of the group, and among the S.
    first_key_B: int32, absolute position of each item's first key row; the others follow.
    """

    start: int
    stop: int
    max_queries: int
    query_start_B1: Array
    key_start_B1: Array
    first_key_B: Array
    source_S: Array

    @property
    def key_rows(self) -> int:
        return int(self.source_S.shape[0])  # type: ignore[attr-defined]


@dataclass(frozen=True)
class FullGroup(Generic[Array]):
    """Rows start:stop of the step, which the full layers attend to in one form.

    `keys` bounds the keys that a row sees, so it is the width of its scores. With `selects` the indexer chooses among
    them, block by block; without, every row sees at most index_topk keys and takes them all.
    `expanded` holds the gather of all keys for the expanded form; None: absorbed, block by block, from the pages.
    """

    start: int
    stop: int
    keys: int
    selects: bool
    blocks: tuple[RowBlock[Array], ...]
    expanded: KeyGroup[Array] | None


@dataclass(frozen=True)
class PagedRows(Generic[Array]):
    """What the full layers read.

    page_slot_T: int64, flat row of a paged pool that each row's latent and index key go to; -1 for padding.
    block_table_BP: int32 page numbers, P a power of two; entries behind a request's pages mean nothing.
    """

    page_slot_T: Array
    block_table_BP: Array
    decode: FullGroup[Array] | None
    prefill: tuple[FullGroup[Array], ...]


@dataclass(frozen=True)
class RingRows(Generic[Array]):
    """What layers with a ring read: the sliding layers, or the draft layer.

    ring_T: int32, the ring of each row.
    ring_slot_T: int64, flat row of the ring pool to write before attention: decode rows; -1 elsewhere.
    kept_slot_T: int64, the same to write after the groups' keys are gathered: the last rows of each prefill item, as
    many as a ring holds; -1 elsewhere.
    """

    ring_T: Array
    ring_slot_T: Array
    kept_slot_T: Array
    prefill: tuple[KeyGroup[Array], ...]


@dataclass(frozen=True)
class Draws(Generic[Array]):
    """How the token behind each row is chosen, and where the row's own token comes from.

    position_T: int64, absolute position of the chosen token; seed_T: int64.
    temperature_T: int64, the bits of a float64; 0 is greedy.
    source_T: int32, row of the run before whose chosen token this row has; -1 where `token_ids_T` says it.
    """

    position_T: Array
    seed_T: Array
    temperature_T: Array
    source_T: Array


@dataclass(frozen=True)
class Step(Generic[Array]):
    """One step. `items` in row order; item b has the rows row_starts[b] : row_starts[b + 1].

    The first `decode_rows` rows run from the caches. Padding rows, counted among them, stand behind the items' rows:
    token 0, position -1, request 0, all slots -1.
    token_ids_T: int64; positions_T, request_T: int32; query_start_B1: int32, equal to `row_starts`, then constant for
    padding requests; length_B: int32, tokens of each request after the step, 0 for padding.
    `pages` is None in a step of the draft layer; `draws` where nothing is chosen on the device. In a draft step they
    have a row for each request, of which only the sources are for rows.
    """

    items: tuple[PlanItem, ...]
    row_starts: tuple[int, ...]
    decode_rows: int
    token_ids_T: Array
    positions_T: Array
    request_T: Array
    query_start_B1: Array
    length_B: Array
    pages: PagedRows[Array] | None
    ring: RingRows[Array]
    draws: Draws[Array] | None = None


StepPlan: TypeAlias = Step[np.ndarray]
DeviceStep: TypeAlias = Step[Tensor]

_FIELDS = {
    part: tuple(field.name for field in dataclasses.fields(part))
    for part in (Step, PagedRows, RingRows, FullGroup, KeyGroup, RowBlock, Draws)
}
# Views start at multiples of this, so that kernels see the same alignment in every step.
ALIGNMENT = 16


def map_arrays(part: Any, function: Callable[[Any], Any]) -> Any:
    """`part` with every array replaced by `function` of it, in the order of the fields."""
    if isinstance(part, np.ndarray | Tensor):
        return function(part)
    if fields := _FIELDS.get(type(part)):
        return type(part)(*(map_arrays(getattr(part, name), function) for name in fields))
    if isinstance(part, tuple) and part and type(part[0]) in _FIELDS:
        return tuple(map_arrays(each, function) for each in part)
    return part


def arrays_of(part: Any) -> Iterator[Any]:
    """Every array of `part`, in the order of `map_arrays`."""
    if isinstance(part, np.ndarray | Tensor):
        yield part
    elif fields := _FIELDS.get(type(part)):
        for name in fields:
            yield from arrays_of(getattr(part, name))
    elif isinstance(part, tuple) and part and type(part[0]) in _FIELDS:
        for each in part:
            yield from arrays_of(each)


def upload_bytes(plan: StepPlan) -> int:
    """Size of the packed arrays; equal for plans whose arrays have equal shapes, as are the places in it."""
    return sum(_packed_bytes(array) for array in arrays_of(plan))


def _packed_bytes(array: np.ndarray) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


class Uploader:
    """Brings plans to `device`, through `buffers` host buffers in turn.

    The host waits only when it is that many steps ahead of the copies.
    """

    def __init__(self, device: torch.device | str, buffers: int = 4):
        self.device = torch.device(device)
        self._is_cuda = self.device.type == "cuda"
        self.host_buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(buffers)]
        self._copied: list[torch.cuda.Event | None] = [None] * buffers
        self._next = 0

    def upload(self, plan: StepPlan, out: Tensor | None = None) -> DeviceStep:
        """The step on the device, queued on the current stream.

        The tensors are views of a new buffer, or of `out` (uint8, `upload_bytes` or more): the same views for every
        plan with arrays of the same shapes, so a captured graph can read them. Raises: PlanError if `out` is too small.
        """
        if out is None:
            out = torch.empty(upload_bytes(plan), dtype=torch.uint8, device=self.device)
        self.send(plan, out)
        start = 0

        def view(array: np.ndarray) -> Tensor:
            nonlocal start
            first, end = start, start + array.nbytes
            start += _packed_bytes(array)
            dtype = torch.int64 if array.dtype == np.int64 else torch.int32
            return out[first:end].view(dtype).view(array.shape)

        return map_arrays(plan, view)

    def send(self, plan: StepPlan, out: Tensor) -> None:
        """As `upload`, for whoever has the views of `out` already."""
        arrays = [*arrays_of(plan)]
        size = sum(map(_packed_bytes, arrays))
        if len(out) < size:
            raise PlanError(f"the step's metadata takes {size} bytes; the buffer passed in has {len(out)}")
        host = self._host_buffer(size)
        host_bytes, start = host.numpy(), 0
        for array in arrays:
            host_bytes[start : start + array.nbytes] = array.ravel().view(np.uint8)
            start += _packed_bytes(array)
        out[:size].copy_(host[:size], non_blocking=True)
        if self._is_cuda:
            copied = torch.cuda.Event()
            copied.record()
            self._copied[self._next] = copied
        self._next = (self._next + 1) % len(self.host_buffers)

    def _host_buffer(self, size: int) -> Tensor:
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        if len(self.host_buffers[self._next]) < size:
            capacity = 1 << (size - 1).bit_length()
            self.host_buffers[self._next] = torch.empty(capacity, dtype=torch.uint8, pin_memory=self._is_cuda)
        return self.host_buffers[self._next]
