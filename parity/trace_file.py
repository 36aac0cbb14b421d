"""A trace as a folder: `manifest.json`, and safetensors files that are written in parts and read one tensor at a time.

Writing. Tensors are collected up to a number of bytes, then written to a part under a temporary name. When the run is
complete the parts are renamed, the manifest last: what was interrupted has no manifest, and does not open.

Reading. The headers of all parts are held against the manifest first; then a tensor is mapped into memory when it is
asked for, and unmapped when it is dropped. Nothing of the values is read on opening.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from parity.manifest import (
    DTYPE_CODES,
    MANIFEST_FILE,
    DumpError,
    Hashes,
    Manifest,
    PositionRange,
    Producer,
    StatisticsEntry,
    TensorEntry,
    WorkloadLine,
    read_manifest,
    refuse,
    require_schema_names,
    sha256_of_files,
    validation_lines,
)
from parity.schema import SCHEMA_VERSION, spec_of
from parity.statistics import statistics_of
from parity.trace import Entry, Trace, TraceRecorder
from parity.workload import Step, Workload
from reference.checkpoint.header import HeaderEntry, read_header
from reference.config import NoteConfig
from reference.errors import ConfigError

CONFIG_FILE = "config.json"
PARTIAL = ".partial"
PART_BYTES = 128 * 2**20
_EntryKind = TypeVar("_EntryKind", TensorEntry, StatisticsEntry)


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of a file whose header has been verified. Every `load` maps it anew, copy-on-write."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def load(self) -> Tensor:
        """Raises: DumpError if the file has been removed or cut short since it was opened."""
        count = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        try:
            mapped = np.memmap(self.path, np.uint8, "c", self.start, (count,))
        except (OSError, ValueError) as error:
            raise DumpError(f"{self.path}: cannot be mapped: {error}") from error
        raw = torch.from_numpy(mapped)
        if self.start % self.dtype.itemsize:
            raw = raw.clone()  # not aligned in the file
        return raw.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Dump:
    """An opened folder: what the manifest says, the tensors, and what is there as statistics only."""

    path: Path
    manifest: Manifest
    entries: tuple[Entry, ...]  # of `manifest.tensors`, in that order

    @property
    def trace(self) -> Trace:
        maker = self.manifest.producer
        return Trace(self.entries, f"{maker.engine} {maker.version}".strip())

    @property
    def statistics(self) -> tuple[StatisticsEntry, ...]:
        return self.manifest.statistics_only

    @property
    def config_file(self) -> Path | None:
        """The dump's own copy of the model's config.json, if it has one."""
        path = self.path / CONFIG_FILE
        return path if path.is_file() and not path.is_symlink() else None


def config_of(dump: Dump) -> NoteConfig | None:
    """The model's config, if the dump has a copy. Raises: ConfigError, with the path of the file."""
    if dump.config_file is None:
        return None
    try:
        return NoteConfig.from_json(dump.config_file)
    except ConfigError as error:
        raise ConfigError(f"{error}; a dump needs no config.json, but not a wrong one") from error
    except RecursionError as error:
        raise ConfigError(f"{dump.config_file}: is nested too deeply to be a model's config") from error


def open_trace(folder: str | os.PathLike[str]) -> Trace:
    """The tensors of a dump whose names and layouts are the schema's. See `open_dump`."""
    return open_dump(folder).trace


def open_dump(folder: str | os.PathLike[str], any_names: bool = False, allow_incomplete: bool = False) -> Dump:
    """Verify a dump folder and open it lazily.

    `any_names` accepts names and layouts that a mapping has yet to translate. `allow_incomplete` accepts a run that
    stopped half-way, judged by the workload in its manifest.
    Raises: DumpError that lists every problem.
    """
    path = Path(folder)
    manifest = read_manifest(path)
    if not any_names:
        require_schema_names(path, manifest)
    refuse(path, [*_unlike(manifest), *_config_mismatch(path, manifest)])
    if not allow_incomplete:
        refuse(path, unfinished_steps(manifest))
    headers = _headers(path, manifest)
    entries = tuple(_entry(path, entry, headers[entry.file][entry.key]) for entry in manifest.tensors)
    return Dump(path, manifest, entries)


def _entry(folder: Path, entry: TensorEntry, header: HeaderEntry) -> Entry:
    source = MappedTensor(folder / entry.file, header.start, entry.torch_dtype, entry.shape)
    return Entry(entry.name, entry.request, entry.action, entry.kind, entry.rows(), source)


def _headers(folder: Path, manifest: Manifest) -> Mapping[str, Mapping[str, HeaderEntry]]:
    """The headers of all files, held against the manifest. Raises: DumpError."""
    headers: dict[str, dict[str, HeaderEntry]] = {}
    problems: list[str] = []
    for file in dict.fromkeys(entry.file for entry in manifest.tensors):
        path = folder / file
        if path.is_symlink():
            problems.append(f"{file}: is a link; a dump holds its own files")
        elif not path.is_file():
            problems.append(f"{file}: named in the manifest and not there: the dump is incomplete")
        else:
            headers[file], found = read_header(path)
            problems += [str(problem) for problem in found]
    refuse(folder, problems)
    for entry in manifest.tensors:
        header = headers[entry.file].get(entry.key)
        if header is None:
            problems.append(f"{entry.file}: {entry.key}: named in the manifest and not in the file")
        elif (header.shape, header.dtype) != (entry.shape, DTYPE_CODES[entry.dtype]):
            found_text = f"{header.dtype} {list(header.shape)}"
            problems.append(f"{entry.file}: {entry.key}: found {found_text}, the manifest says {_described(entry)}")
    refuse(folder, problems)
    return headers


def _described(entry: TensorEntry) -> str:
    return f"{DTYPE_CODES[entry.dtype]} {list(entry.shape)}"


def _unlike(manifest: Manifest) -> Iterator[str]:
    """Entries of one name must be rows of one table: one dtype, one width (the keys of a step may be more)."""
    first: dict[str, TensorEntry] = {}
    for entry in manifest.tensors:
        spec = spec_of(entry.name)
        if spec is None:
            continue
        other = first.setdefault(entry.name, entry)
        fixed = slice(1, -1) if spec.dims.split()[-1] in ("S", "K") else slice(1, None)
        widths = (entry.shape[fixed], len(entry.shape), entry.dtype)
        if widths != (other.shape[fixed], len(other.shape), other.dtype):
            yield f"{entry.name}: {_described(entry)} in action {entry.action}, {_described(other)} in {other.action}"


def _config_mismatch(folder: Path, manifest: Manifest) -> Iterator[str]:
    path = folder / CONFIG_FILE
    if manifest.sha256.config and path.is_file() and not path.is_symlink():
        found = sha256_of_files([path])
        if found != manifest.sha256.config:
            yield f"{CONFIG_FILE}: sha256 {found}, the manifest says {manifest.sha256.config}"


def unfinished_steps(manifest: Manifest) -> list[str]:
    """Steps of the workload of which there is nothing, in a dump that has other steps: the run stopped half-way."""
    recorded = {(entry.action, entry.request) for entry in manifest.entries() if entry.kind != "draft"}
    if manifest.workload is None or not recorded:
        return []
    return [
        f"incomplete: nothing of action {index} (request {request!r}) of the workload "
        f"{manifest.workload.text!r:.200}; did the run stop half-way, or is this not the line that was run?"
        for index, action in enumerate(manifest.workload.workload().actions)
        if isinstance(action, Step)
        for request, _, _ in action.items
        if (index, request) not in recorded
    ]


class TraceWriter(TraceRecorder):
    """A recorder that writes what it observes to a folder, with at most `part_bytes` of tensors in memory.

    Use as a context manager: leaving it completes the folder; leaving it by an error removes what was written.
    `patterns`: globs of names to keep. `statistics_only`: globs of names of which only statistics are kept.
    `config`: the text of the model's config.json, to be kept beside the manifest.
    Raises: DumpError if the folder already holds a dump, which is left as it is, or cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        producer: Producer,
        dtype: torch.dtype,
        *,
        patterns: Sequence[str] = ("*",),
        statistics_only: Sequence[str] = (),
        sha256: Hashes | None = None,
        workload: Workload | None = None,
        config: bytes | None = None,
        part_bytes: int = PART_BYTES,
    ):
        super().__init__(patterns, producer.engine)
        self.folder = Path(folder)
        self._maker, self._dtype = producer, dtype
        self._statistics_only = tuple(statistics_only)
        self._hashes, self._config = sha256 or Hashes(), config
        self._line = WorkloadLine.of(workload) if workload else None
        self._part_bytes = part_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._parts: list[str] = []
        self._tensors: list[TensorEntry] = []
        self._statistics: list[StatisticsEntry] = []

    def __enter__(self) -> TraceWriter:
        if (self.folder / MANIFEST_FILE).exists():
            raise DumpError(f"{self.folder}: already holds a dump; write to another folder or remove it")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_partial()
        except OSError as error:
            raise self._cannot_write(error) from error
        return self

    def keep(self, entry: Entry) -> None:
        tensor = entry.source.load().detach().cpu().contiguous()
        known = _said_of(entry, tensor)
        if any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in self._statistics_only):
            self._statistics.append(_valid(StatisticsEntry, **known, statistics=statistics_of(tensor)))
            return
        if self._pending and self._pending_bytes + tensor.nbytes > self._part_bytes:
            self._flush()
        storage = tensor.untyped_storage().data_ptr()
        if any(other.untyped_storage().data_ptr() == storage for other in self._pending.values()):
            tensor = tensor.clone()  # a file keeps no two tensors in one memory
        key = f"{len(self._tensors):06d}.{entry.name}"
        self._pending[key] = tensor
        self._pending_bytes += tensor.nbytes
        self._tensors.append(_valid(TensorEntry, **known, file=self._part_name(), key=key))

    def trace(self) -> Trace:
        """What was written, opened lazily; for after the folder is complete."""
        return open_trace(self.folder)

    def _part_name(self) -> str:
        return f"part-{len(self._parts) + 1:05d}.safetensors"

    def _flush(self) -> None:
        if not self._pending:
            return
        name = self._part_name()
        try:
            save_file(self._pending, self.folder / (name + PARTIAL))
        except OSError as error:
            raise self._cannot_write(error) from error
        self._parts.append(name)
        self._pending, self._pending_bytes = {}, 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            self._remove_partial()

    def _remove_partial(self) -> None:
        for path in self.folder.glob(f"part-*.safetensors{PARTIAL}"):
            path.unlink()

    def _complete(self) -> None:
        self._flush()
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            producer=self._maker,
            dtype=_word(self._dtype),
            sha256=self._hashes,
            workload=self._line,
            tensors=tuple(self._tensors),
            statistics_only=tuple(self._statistics),
        )
        text = json.dumps(manifest.model_dump(mode="json", exclude_defaults=True))
        try:
            for name in self._parts:
                os.replace(self.folder / (name + PARTIAL), self.folder / name)
            if self._config is not None:
                _write(self.folder / CONFIG_FILE, self._config)
            _write(self.folder / MANIFEST_FILE, text.encode())
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> DumpError:
        return DumpError(f"{self.folder}: cannot be written: {error.strerror}")


def write_trace(
    folder: str | os.PathLike[str],
    trace: Trace,
    dtype: torch.dtype,
    producer: Producer | None = None,
    *,
    sha256: Hashes | None = None,
    workload: Workload | None = None,
    config: bytes | None = None,
    part_bytes: int = PART_BYTES,
) -> None:
    """Write a trace as a dump folder, one tensor of it in memory at a time. Arguments and errors as `TraceWriter`."""
    maker = producer or Producer(engine=trace.producer or "unknown")
    with TraceWriter(
        folder, maker, dtype, sha256=sha256, workload=workload, config=config, part_bytes=part_bytes
    ) as writer:
        for entry in sorted(trace.entries(), key=lambda entry: entry.action):
            writer.keep(entry)


def _valid(entry_class: type[_EntryKind], **fields: Any) -> _EntryKind:
    """A manifest entry. Raises: DumpError, so that nothing is written that could not be read."""
    try:
        entry = entry_class(**fields)
    except ValidationError as error:
        refuse(f"{fields['name']}: cannot be recorded", list(validation_lines(error)))
        raise
    refuse(f"{entry.name}: cannot be recorded", list(entry.problems()))
    return entry


def _said_of(entry: Entry, tensor: Tensor) -> dict[str, Any]:
    spec = spec_of(entry.name)
    dims = " ".join(["T", *(f"d{number}" for number in range(1, tensor.dim()))])
    if spec and len(spec.dims.split()) == tensor.dim():
        dims = spec.dims
    positions = tuple(entry.positions)
    is_range = bool(positions) and positions == tuple(range(positions[0], positions[0] + len(positions)))
    return {
        "name": entry.name,
        "request": entry.request,
        "action": entry.action,
        "kind": entry.kind,
        "positions": PositionRange(start=positions[0], count=len(positions)) if is_range else positions,
        "shape": tuple(tensor.shape),
        "dims": dims,
        "dtype": _word(tensor.dtype),
    }


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write(path: Path, content: bytes) -> None:
    """Under a temporary name first, so that the final name never stands for half a file."""
    temporary = path.with_name(path.name + PARTIAL)
    temporary.write_bytes(content)
    os.replace(temporary, path)
