"""Reads and verifies the header of one safetensors file, and nothing behind it.

The file is  [8 bytes: header length, little-endian] [header: a JSON object] [tensor bytes].
The header gives each tensor a dtype, a shape and a range of the tensor bytes. Verified here: the length is plausible
before anything is allocated by it; no name twice; each range has numel * itemsize bytes; the ranges tile the rest of
the file exactly. A file cut short would otherwise be mapped and read as zeros.
Source: checkpoint specification, section 8, refusals 3 and 6.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from reference.checkpoint.problems import Problem

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 * 2**20
MAX_DIMS = 8

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file. Its bytes are `start` to `end`, counted from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_header(path: Path) -> tuple[dict[str, HeaderEntry], list[Problem]]:
    """The tensors of a file in the order of their bytes, and everything that is wrong with it.

    Entries that cannot be read are left out of the first and are in the second. Never raises for a file's content.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw_length = file.read(LENGTH_BYTES)
            if len(raw_length) < LENGTH_BYTES:
                return {}, [_truncated(path, "", f"{size} bytes", f"at least {LENGTH_BYTES} for the header's length")]
            length = int.from_bytes(raw_length, "little")
            limit = min(MAX_HEADER_BYTES, size - LENGTH_BYTES)
            if length > limit:
                return {}, [_truncated(path, "", f"a header of {length} bytes", f"at most {limit} (file: {size})")]
            text = file.read(length)
    except OSError as error:
        return {}, [Problem("unreadable", path.name, "", error.strerror or "an error", "a readable file")]
    return _parse(path, text, LENGTH_BYTES + length, size)


def _parse(path: Path, text: bytes, data_start: int, size: int) -> tuple[dict[str, HeaderEntry], list[Problem]]:
    problems: list[Problem] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, count in Counter(name for name, _ in pairs).items():
            if count > 1:
                problems.append(Problem("duplicate", path.name, name, f"{count} times in one header", "once"))
        return dict(pairs)

    try:
        header = json.loads(text, object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        return {}, [Problem("corrupt", path.name, "", f"a header that is no JSON ({error})", "a safetensors header")]
    if not isinstance(header, dict):
        return {}, [Problem("corrupt", path.name, "", f"a {type(header).__name__} as header", "a JSON object")]
    header.pop("__metadata__", None)
    entries = []
    for name, description in header.items():
        entry = _entry(name, description, data_start)
        if isinstance(entry, HeaderEntry):
            entries.append(entry)
        else:
            problems.append(Problem("corrupt", path.name, name, *entry))
    entries.sort(key=lambda entry: (entry.start, entry.end))
    if not problems:
        problems = _tiling(path, entries, data_start, size)
    return {entry.name: entry for entry in entries}, problems


def _entry(name: str, description: Any, data_start: int) -> HeaderEntry | tuple[str, str]:
    """The entry; or what was found and what was expected instead."""
    if not isinstance(description, Mapping) or set(description) != {"dtype", "shape", "data_offsets"}:
        return "another description", "an object with dtype, shape and data_offsets"
    dtype, shape, offsets = description["dtype"], description["shape"], description["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"dtype {dtype!r:.80}", f"one of {', '.join(DTYPES)}"
    if not _are_counts(shape, MAX_DIMS):
        return f"shape {shape!r:.80}", f"at most {MAX_DIMS} sizes"
    if not _are_counts(offsets, 2) or len(offsets) != 2:
        return f"data_offsets {offsets!r:.80}", "a first and a last byte"
    start, end = offsets
    needed = prod(shape) * DTYPES[dtype].itemsize
    if end - start != needed:
        return f"{end - start} bytes ({start} to {end})", f"{needed} bytes for {dtype} {tuple(shape)}"
    return HeaderEntry(name, dtype, tuple(shape), data_start + start, data_start + end)


def _are_counts(values: Any, at_most: int) -> bool:
    if not isinstance(values, list) or len(values) > at_most:
        return False
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _tiling(path: Path, entries: list[HeaderEntry], data_start: int, size: int) -> list[Problem]:
    """Ranges must follow each other without gap or overlap, and the last must end where the file does."""
    position, problems = data_start, []
    for entry in entries:
        if entry.start != position:
            what = "overlapping" if entry.start < position else "non-contiguous"
            found = f"{what} bytes from {entry.start}"
            problems.append(Problem("corrupt", path.name, entry.name, found, f"bytes from {position}"))
        position = max(position, entry.end)
    if size < position:
        first = next(entry for entry in entries if entry.end > size)
        problems.append(_truncated(path, first.name, f"a file of {size} bytes", f"{position} bytes"))
    elif size > position:
        found = f"{size - position} bytes behind the last tensor (file: {size})"
        problems.append(Problem("corrupt", path.name, "", found, f"a file of {position} bytes"))
    return problems


def _truncated(path: Path, tensor: str, found: str, expected: str) -> Problem:
    return Problem("truncated", path.name, tensor, found, expected)
