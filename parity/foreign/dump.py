"""A foreign dump: tensors under foreign names, one entry for each forward pass that shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from parity.manifest import DumpError
from parity.statistics import Statistics
from parity.trace import Source, Trace


@dataclass(frozen=True)
class OwnRows:
    """Whose rows a tensor holds, where the dump itself says so."""

    request: str
    kind: str
    positions: Sequence[int]


@dataclass(frozen=True)
class Foreign:
    """`forward`: which pass of the model, from 0. `rows`: owner and positions of the rows, where the dump says them."""

    name: str
    forward: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: OwnRows | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class ForeignTensor(Foreign):
    """A tensor that is there."""

    source: Source


@dataclass(frozen=True)
class ForeignStatistics(Foreign):
    """A tensor of which the tool kept numbers only."""

    statistics: Statistics


@dataclass(frozen=True)
class ForeignDump:
    """`mapping`: the ready mapping to start from. `notes`: what was there and not read, one line each."""

    producer: str
    mapping: str
    tensors: tuple[ForeignTensor, ...] = ()
    statistics: tuple[ForeignStatistics, ...] = ()
    notes: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Every foreign name, in the order of its first appearance."""
        return list(dict.fromkeys([*(t.name for t in self.tensors), *(s.name for s in self.statistics)]))


def from_trace(trace: Trace) -> ForeignDump:
    """A trace whose names or layouts are not the schema's. Loads each tensor once, to know its shape."""
    tensors = []
    for entry in trace.entries():
        value = entry.source.load()
        rows = OwnRows(entry.request, entry.kind, entry.positions)
        shape = tuple(value.shape)
        tensors.append(ForeignTensor(entry.name, entry.action, shape, value.dtype, entry.source, rows=rows))
    return ForeignDump(trace.producer, "", tuple(tensors))


@dataclass(frozen=True)
class TorchFile:
    """The tensor in a `.pt` file: alone, or under `value` in a dict. Unpickled with `weights_only`, memory-mapped."""

    path: Path

    def load(self) -> Tensor:
        """Raises: DumpError for a file that holds anything else."""
        value = self.content()
        if not isinstance(value, Tensor):
            raise DumpError(f"{self.path}: holds a {type(value).__name__}, expected a tensor")
        return value

    def content(self) -> object:
        """Whatever is in the file, out of its `value` if it is such a dict. Raises: DumpError if it cannot be read."""
        try:
            value = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # the unpickler of a hostile file raises anything
            raise DumpError(
                f"{self.path}: cannot be read as a .pt file of plain tensors: {type(error).__name__}; expected what "
                f"torch.save writes of a tensor"
            ) from error
        return value["value"] if isinstance(value, dict) and "value" in value else value


def read_torch_file(path: Path, name: str, forward: int) -> ForeignTensor | None:
    """A file's tensor, or None if it holds something else (a number, None, a list)."""
    source = TorchFile(path)
    value = source.content()
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dim() == 0:
        return None
    return ForeignTensor(name, forward, tuple(value.shape), value.dtype, source)


def plain_files(folder: Path, suffix: str) -> Iterable[Path]:
    """The regular files of a folder with a suffix, by name; links are refused. Raises: DumpError."""
    for path in sorted(folder.glob(f"*{suffix}")):
        if path.is_symlink():
            raise DumpError(f"{path}: is a link; a dump holds its own files")
        if path.is_file():
            yield path
