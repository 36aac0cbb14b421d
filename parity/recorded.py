"""A recorded run under the schema's names, whatever wrote it: our own folder, or a foreign dump through a mapping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from parity.apply_mapping import Mapped, apply_mapping
from parity.foreign import format_of, read_foreign
from parity.foreign.dump import ForeignDump
from parity.manifest import DTYPE_CODES, MANIFEST_FILE, DumpError, StatisticsEntry
from parity.mapping import read_mapping, ready_mappings
from parity.same_run import RunIdentity
from parity.trace import Trace
from parity.trace_file import Dump, config_of, open_dump
from parity.workload import Workload
from reference.checkpoint.header import DTYPES
from reference.config import NoteConfig

_SHOWN = 3


@dataclass(frozen=True)
class Recorded:
    """`dtype`: of the run, None where nothing says it. `skipped`: what is there and was not translated, a line each."""

    trace: Trace
    statistics: tuple[StatisticsEntry, ...]
    dtype: torch.dtype | None
    identity: RunIdentity
    skipped: tuple[str, ...] = ()


def open_recorded(
    path: Path, mapping: str | None = None, config: NoteConfig | None = None, workload: Workload | None = None
) -> Recorded:
    """Open a dump. Nothing of the values is read, except of `.pt` files to know their shapes.

    `mapping`: a file, or the name of a ready one; without it the dump must have the schema's names and layouts.
    `config` and `workload` are those of the run, where they are known: sizes by letter, and who owns which rows.
    Raises: DumpError that says what is wrong with the dump, with the mapping, or that a mapping is needed.
    """
    if mapping is None:
        _require_own(path)
        return _of_own(open_dump(path))
    read = read_mapping(mapping)
    foreign = read_foreign(path)
    own = open_dump(path, any_names=True) if (path / MANIFEST_FILE).is_file() else None
    identity = _identity(own) if own else RunIdentity()
    config = config or identity.config
    mapped = apply_mapping(read, foreign, config.text if config else None, workload or identity.workload)
    if not mapped.statistics and not mapped.trace.names():
        raise DumpError(
            f"{path}: no rule of mapping {read.title!r} fits any of its {len(foreign.names())} names, such as "
            f"{', '.join(foreign.names()[:_SHOWN])}; write a mapping (docs/dumps.md), or use a ready one: "
            f"{', '.join(ready_mappings())}"
        )
    dtype = _dtype_of(own) if own else _coarsest(foreign)
    return Recorded(mapped.trace, mapped.statistics, dtype, identity, tuple(_not_translated(mapped)))


def _require_own(path: Path) -> None:
    """A foreign dump is told by its files, and refused with the mapping to start from."""
    if (path / MANIFEST_FILE).exists():
        return
    try:
        name = format_of(path)
    except DumpError:
        return  # what is wrong with it as a folder of our own is said when it is opened
    ready = {"plain": "transformers"}.get(name, name)
    raise DumpError(
        f"{path}: has no {MANIFEST_FILE}; it looks like a dump in the format {name!r}: say --mapping {ready}, or "
        f"--mapping with a mapping file of your own"
    )


def _of_own(dump: Dump) -> Recorded:
    return Recorded(dump.trace, dump.statistics, _dtype_of(dump), _identity(dump))


def _identity(dump: Dump) -> RunIdentity:
    workload = dump.manifest.workload.workload() if dump.manifest.workload else None
    return RunIdentity(dump.manifest.sha256, workload, config_of(dump))


def _dtype_of(dump: Dump) -> torch.dtype:
    return DTYPES[DTYPE_CODES[dump.manifest.dtype]]


def _coarsest(dump: ForeignDump) -> torch.dtype | None:
    """Of the floating tensors: a run is as coarse as the coarsest number in it."""
    dtypes = {foreign.dtype for foreign in (*dump.tensors, *dump.statistics) if foreign.dtype.is_floating_point}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _not_translated(mapped: Mapped) -> Iterable[str]:
    yield from mapped.notes
    if mapped.unmapped:
        more = ", …" if len(mapped.unmapped) > _SHOWN else ""
        names = ", ".join(mapped.unmapped[:_SHOWN])
        yield f"{len(mapped.unmapped)} names of the dump have no rule in the mapping: {names}{more}"
    first = {reason: name for name, reason in reversed(mapped.refused)}
    for reason, count in Counter(reason for _, reason in mapped.refused).items():
        yield f"{first[reason]}{f' and {count - 1} more' if count > 1 else ''}: {reason}"
