"""A trace: the named tensors of one run, each row keyed by request and absolute position.

In memory, or as a folder with `manifest.json` and safetensors files (`trace_file`), read lazily, one tensor at a time.
A row is identified by (request, position, occurrence): after drafts are taken back, the same position runs again and
counts as its next occurrence. Draft steps have their own names (`mtp.{s}.…`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from parity.schema import dataflow_key

if TYPE_CHECKING:
    from reference.probe import Rows

RowKey = tuple[int, int]  # (absolute position, occurrence)


class Source(Protocol):
    """Where an entry's tensor comes from: memory or a file."""

    def load(self) -> Tensor: ...


@dataclass(frozen=True)
class InMemory:
    tensor: Tensor

    def load(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True)
class Entry:
    """One observed tensor. `action` is the index of the workload action it belongs to."""

    name: str
    request: str
    action: int
    kind: str
    positions: Sequence[int]
    source: Source


@dataclass(frozen=True)
class Table:
    """All rows of one name and request: `values` [n, …], and their keys in the order in which they were computed."""

    keys: tuple[RowKey, ...]
    values: Tensor


class Trace:
    """Entries in the order of their computation."""

    def __init__(self, entries: Sequence[Entry], producer: str = ""):
        self.producer = producer
        self._entries: dict[tuple[str, str], list[Entry]] = {}
        self._requests: dict[str, dict[str, None]] = {}
        for entry in entries:
            self._entries.setdefault((entry.name, entry.request), []).append(entry)
            self._requests.setdefault(entry.name, {})[entry.request] = None

    def names(self) -> list[str]:
        """Every recorded name, in dataflow order."""
        return sorted(self._requests, key=dataflow_key)

    def requests(self, name: str) -> list[str]:
        """The requests that have rows of this name, in the order of their first appearance."""
        return list(self._requests.get(name, ()))

    def entries(self) -> Iterator[Entry]:
        for group in self._entries.values():
            yield from group

    def of(self, name: str, request: str) -> Sequence[Entry]:
        """The entries of one name and request, in the order of their computation."""
        return self._entries.get((name, request), ())

    def has(self, name: str, request: str) -> bool:
        return (name, request) in self._entries

    def keys(self, name: str, request: str) -> tuple[RowKey, ...]:
        """The row keys of a table, without its values."""
        return tuple(_row_keys(self._entries[name, request]))

    def table(self, name: str, request: str) -> Table:
        """Loads the rows of one name and request. [T, S] scores are padded with -inf to the widest step.

        Numbers that know no arithmetic or no -1 get the next dtype that does: float8 float32, bool and uint8 int16.
        """
        entries = self._entries[name, request]
        tensors = [_comparable(entry.source.load()) for entry in entries]
        return Table(tuple(_row_keys(entries)), torch.cat(_equally_wide(tensors)) if len(tensors) > 1 else tensors[0])


def row_blocks(
    expected: Trace, actual: Trace, name: str, request: str, max_bytes: int = 64 * 2**20
) -> Iterator[tuple[Tensor, Tensor, tuple[RowKey, ...]]]:
    """The rows that both have, in the order of `expected`, at most `max_bytes` of `expected` at a time.

    Yields values of expected and actual, equally wide, and the rows' keys. No table is ever whole in memory.
    """
    places = {key: (entry, row) for entry, row, key in _places(actual, name, request)}
    own = ((entry, row, key) for entry, row, key in _places(expected, name, request) if key in places)
    for entry, group in groupby(own, key=lambda place: place[0]):
        rows = list(group)
        values = _comparable(entry.source.load())
        step = max(1, max_bytes * len(values) // max(1, values.nbytes))
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            left = values[torch.tensor([row for _, row, _ in block], dtype=torch.long)]
            right = _gathered([places[key] for _, _, key in block])
            left, right = _equally_wide([left, right])
            yield left, right, tuple(key for _, _, key in block)


def _places(trace: Trace, name: str, request: str) -> Iterator[tuple[Entry, int, RowKey]]:
    """Where each row is: entry, row in it, key."""
    if not trace.has(name, request):
        return
    keys = iter(trace.keys(name, request))
    for entry in trace.of(name, request):
        for row in range(len(entry.positions)):
            yield entry, row, next(keys)


def _gathered(places: Sequence[tuple[Entry, int]]) -> Tensor:
    """These rows of these entries, in this order; each run of rows of one entry is read at once."""
    parts = []
    for entry, group in groupby(places, key=lambda place: place[0]):
        parts.append(_comparable(entry.source.load())[torch.tensor([row for _, row in group], dtype=torch.long)])
    return torch.cat(_equally_wide(parts))


def _comparable(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype that can be compared, sorted and padded with -1 or -inf."""
    if tensor.is_floating_point():
        return tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
    return tensor.to(torch.int16) if tensor.dtype in (torch.bool, torch.uint8) else tensor


def _row_keys(entries: Sequence[Entry]) -> Iterator[RowKey]:
    seen: dict[int, int] = {}
    for entry in entries:
        for position in entry.positions:
            occurrence = seen.get(position, -1) + 1
            seen[position] = occurrence
            yield position, occurrence


def _equally_wide(tensors: list[Tensor]) -> list[Tensor]:
    """Keys grow from step to step: pad the last dim with -inf for scores, -1 for choices."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return [
        torch.nn.functional.pad(
            tensor, (0, width - tensor.shape[-1]), value=float("-inf") if tensor.is_floating_point() else -1
        )
        if tensor.shape[-1] < width
        else tensor
        for tensor in tensors
    ]


def common_rows(expected: Table, actual: Table) -> tuple[Tensor, Tensor, tuple[RowKey, ...], int]:
    """Values of the rows that both have, in the order of `expected`, their keys, and how many rows only one has."""
    if expected.keys == actual.keys:
        left, right = _equally_wide([expected.values, actual.values])
        return left, right, expected.keys, 0  # no copy where none is needed
    index = {key: row for row, key in enumerate(actual.keys)}
    pairs = [(row, index[key]) for row, key in enumerate(expected.keys) if key in index]
    missing = len(expected.keys) + len(actual.keys) - 2 * len(pairs)
    expected_rows, actual_rows = (torch.tensor([pair[side] for pair in pairs], dtype=torch.long) for side in (0, 1))
    keys = tuple(expected.keys[row] for row, _ in pairs)
    left, right = _equally_wide([expected.values[expected_rows], actual.values[actual_rows]])
    return left, right, keys, missing


class TraceRecorder:
    """A probe listener that keeps a clone, in host memory, of every tensor whose name matches one of the globs.

    `action` is set by whoever runs the workload.
    """

    def __init__(self, patterns: Sequence[str] = ("*",), producer: str = ""):
        self._patterns = tuple(patterns)
        self._kept: dict[str, bool] = {}
        self._producer = producer
        self._entries: list[Entry] = []
        self.action = 0

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        if rows is not None and self._keeps(name):
            positions = tuple(rows.positions.tolist())
            clone = InMemory(value.detach().to("cpu", copy=True))
            self.keep(Entry(name, rows.request, self.action, rows.kind, positions, clone))
        return value

    def _keeps(self, name: str) -> bool:
        if name not in self._kept:
            self._kept[name] = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)
        return self._kept[name]

    def keep(self, entry: Entry) -> None:
        """What becomes of an entry: a list here, a file in `trace_file.TraceWriter`."""
        self._entries.append(entry)

    def trace(self) -> Trace:
        return Trace(self._entries, self._producer)
