"""Who owns the rows of a foreign tensor: which request, and at which absolute positions.

An engine runs all requests of a step as one tensor. How it is cut, in the order in which the sources are tried:

1. the dump says it itself (`OwnRows`);
2. the workload that was run: its steps are the forward passes, its items the parts;
3. `lengths`: the tokens of each request in each forward pass, written in the mapping;
4. `cu_seqlens`: a tensor of the dump with the first row of each request, and the number of rows behind the last;
5. neither: one request.

Positions continue from pass to pass, or are read from the tensor that `positions` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from parity.foreign.dump import Foreign, ForeignDump, OwnRows
from parity.manifest import MAX_POSITION, MAX_ROWS, DumpError, Name
from parity.statistics import Record
from parity.workload import Step, Workload, act

Layout = Literal["packed", "packed_padded", "padded_right", "padded_left"]


class Packing(Record):
    """How rows lie in a tensor whose dim 0 is rows.

    packed          the requests behind each other, nothing else
    packed_padded   the same, then rows of padding (a graph of a fixed size)
    padded_right    each request has as many rows as the longest; its own come first
    padded_left     the same; its own come last
    """

    layout: Layout = "packed"
    requests: tuple[Name, ...] = ()
    lengths: tuple[tuple[Annotated[int, Field(ge=1, le=MAX_ROWS)], ...], ...] | None = None
    cu_seqlens: Name | None = None
    positions: Name | None = None

    def names(self) -> set[str]:
        """Foreign tensors that say whose the rows are, and are nothing else."""
        return {name for name in (self.cu_seqlens, self.positions) if name}


@dataclass(frozen=True)
class Item:
    """The part of one request in one step."""

    request: str
    kind: str
    positions: Sequence[int]


@dataclass(frozen=True)
class RowPlan:
    """The items of each forward pass, and the index of the action that it is."""

    layout: Layout
    items: dict[int, tuple[Item, ...]]
    actions: dict[int, int]

    def of(self, forward: int, rows: OwnRows | None) -> tuple[Item, ...]:
        """Raises: DumpError for a forward pass that nothing is known of."""
        if rows is not None:
            return (Item(rows.request, rows.kind, rows.positions),)
        if forward not in self.items:
            raise DumpError(
                f"forward pass {forward}: its number of rows is not known; give the workload or the lengths"
            )
        return self.items[forward]

    def action(self, forward: int) -> int:
        return self.actions.get(forward, forward)

    def cut(self, items: Sequence[Item], rows: int) -> Iterator[tuple[Item, int, int]]:
        """Each item with its first row and the row behind its last, in a tensor of so many rows.

        Raises: DumpError if the tensor has not the rows that the layout needs.
        """
        lengths = [len(item.positions) for item in items]
        total = sum(lengths)
        if self.layout in ("packed", "packed_padded"):
            if rows < total or (self.layout == "packed" and rows > total):
                hint = "; if rows of padding follow, the packing's layout is packed_padded" if rows > total else ""
                raise DumpError(f"{rows} rows, expected {total} for {_listed(items)}{hint}")
            starts = [sum(lengths[:number]) for number in range(len(lengths))]
        else:
            stride = rows // len(items)
            if rows % len(items) or stride < max(lengths):
                raise DumpError(f"{rows} rows, expected {len(items)} times at least {max(lengths)} ({self.layout})")
            own = [0 if self.layout == "padded_right" else stride - length for length in lengths]
            starts = [number * stride + offset for number, offset in enumerate(own)]
        for item, start, length in zip(items, starts, lengths, strict=True):
            yield item, start, start + length


def plan_rows(
    packing: Packing, dump: ForeignDump, rows_of: Callable[[int], int | None], workload: Workload | None
) -> RowPlan:
    """`rows_of(forward)` counts the rows of a forward pass, for a single request whose lengths nobody gives.

    Raises: DumpError if the dump has another number of forward passes than the workload or the lengths.
    """
    foreign: list[Foreign] = [*dump.tensors, *dump.statistics]
    forwards = sorted({tensor.forward for tensor in foreign if tensor.rows is None})
    if not forwards:
        return RowPlan(packing.layout, {}, {})
    if workload is not None:
        steps = list(_steps(workload))
        _require_as_many(forwards, len(steps), f"the workload {workload.text()!r:.200} has {len(steps)} steps")
        items = {forward: step for forward, (_, step) in zip(forwards, steps, strict=True)}
        actions = {forward: action for forward, (action, _) in zip(forwards, steps, strict=True)}
        return RowPlan(packing.layout, items, actions)
    return RowPlan(packing.layout, _counted(packing, dump, forwards, rows_of), {})


def _counted(
    packing: Packing, dump: ForeignDump, forwards: Sequence[int], rows_of: Callable[[int], int | None]
) -> dict[int, tuple[Item, ...]]:
    if packing.lengths is not None:
        _require_as_many(forwards, len(packing.lengths), f"the packing gives the lengths of {len(packing.lengths)}")
    length: dict[str, int] = {}
    plan = {}
    for number, forward in enumerate(forwards):
        if packing.lengths is not None:
            counts = list(packing.lengths[number])
        elif packing.cu_seqlens is not None:
            bounds = _integers(dump, packing.cu_seqlens, forward)
            counts = [end - start for start, end in pairwise(bounds)]
            if bounds[:1] != [0] or min(counts, default=0) < 1:
                raise DumpError(f"{packing.cu_seqlens}: found {bounds[:8]}, expected 0 and ascending numbers of rows")
        else:
            rows = rows_of(forward)
            if rows is None:
                continue
            counts = [rows]
        if packing.requests and len(counts) > len(packing.requests):
            raise DumpError(f"forward pass {forward}: {len(counts)} requests; the packing names {packing.requests}")
        names = packing.requests or tuple(_request_name(index) for index in range(len(counts)))
        given = _integers(dump, packing.positions, forward) if packing.positions else None
        plan[forward] = tuple(_items(names, counts, length, given))
    return plan


def _items(
    names: Sequence[str], counts: Sequence[int], length: dict[str, int], given: Sequence[int] | None
) -> Iterator[Item]:
    row = 0
    for name, count in zip(names, counts, strict=False):
        start = length.get(name, 0)
        positions: Sequence[int] = range(start, start + count)
        if given is not None:
            positions = given[row : row + count]
            if len(positions) != count or not all(0 <= position < MAX_POSITION for position in positions):
                raise DumpError(f"positions: found {list(positions)[:8]} for {count} rows of request {name!r}")
        yield Item(name, "prefill" if count > 1 else "decode", positions)
        length[name] = max(positions, default=start - 1) + 1
        row += count


def _steps(workload: Workload) -> Iterator[tuple[int, tuple[Item, ...]]]:
    """The workload's steps: index of the action, and its items with their positions."""
    length: dict[str, int] = {}
    for index, action in enumerate(workload.actions):
        if isinstance(action, Step):
            starts = [(item, length.get(item[0], 0)) for item in action.items]
            yield index, tuple(Item(name, kind, range(start, start + n)) for (name, n, kind), start in starts)
        act(action, length)


def _integers(dump: ForeignDump, name: str, forward: int) -> list[int]:
    """A small tensor of integers of one forward pass."""
    tensor = next((tensor for tensor in dump.tensors if (tensor.name, tensor.forward) == (name, forward)), None)
    if tensor is None:
        raise DumpError(f"forward pass {forward}: has no tensor {name!r}, which the mapping's packing names")
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or len(tensor.shape) != 1:
        raise DumpError(f"{name}: {tensor.dtype} {list(tensor.shape)}, expected a list of integers")
    if tensor.shape[0] > MAX_ROWS:
        raise DumpError(f"{name}: {tensor.shape[0]} numbers, expected at most {MAX_ROWS}")
    return tensor.source.load().tolist()


def _require_as_many(forwards: Sequence[int], count: int, expected: str) -> None:
    if len(forwards) != count:
        raise DumpError(f"the dump has {len(forwards)} forward passes, {expected}; did the run stop half-way?")


def _request_name(index: int) -> str:
    """a, b, … z, then r26, r27, …"""
    return chr(ord("a") + index) if index < 26 else f"r{index}"


def _listed(items: Sequence[Item]) -> str:
    return ", ".join(f"{len(item.positions)} of {item.request}" for item in items[:8])
