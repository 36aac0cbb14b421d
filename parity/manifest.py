"""`manifest.json`: what a dump folder holds, who made it and from what. Schema version 1.

The manifest comes from engines that nobody here has vouched for. It is checked in full before a byte of a tensor is
read: types and unknown fields, names against the schema, file names that could leave the folder, sizes that no run
has, one tensor listed twice. Whatever is wrong ends in a `DumpError` that says where and what would be right.

How to write one: `docs/dumps.md`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field, ValidationError, field_validator

from parity.json_keys import repetition_lines
from parity.schema import PROBES, SCHEMA_VERSION, pattern_of, spec_of
from parity.statistics import MAX_ELEMENTS, Record, Statistics
from parity.workload import Workload, WorkloadError
from reference.checkpoint.header import DTYPES, MAX_DIMS
from reference.errors import NoteError

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 256 * 2**20
# Far above any context length; a larger number is a mistake or an attack.
MAX_ROWS = 2**22
MAX_POSITION = 2**40
MAX_LINES = 20

# float32 -> F32: the words of the manifest, and the codes of a safetensors header.
DTYPE_CODES = {str(dtype).removeprefix("torch."): code for code, dtype in DTYPES.items()}


class DumpError(NoteError):
    """A dump cannot be read, is incomplete, or is not what it says it is."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


def _plain_file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors", name):
        raise ValueError(
            "must be the plain name of a .safetensors file in the same folder: letters, digits, '.', '_' and '-'"
        )
    return name


def _known_dtype(name: str) -> str:
    if name not in DTYPE_CODES:
        raise ValueError(f"must be one of {', '.join(sorted(DTYPE_CODES))}")
    return name


def _floating_dtype(name: str) -> str:
    floating = sorted(word for word, code in DTYPE_CODES.items() if DTYPES[code].is_floating_point)
    if name not in floating:
        raise ValueError(f"must be the dtype of weights and activations, one of {', '.join(floating)}")
    return name


Text = Annotated[str, Field(max_length=400), AfterValidator(_printable)]
Name = Annotated[str, Field(min_length=1, max_length=400), AfterValidator(_printable)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
DtypeName = Annotated[str, AfterValidator(_known_dtype)]
FloatingDtypeName = Annotated[str, AfterValidator(_floating_dtype)]
Position = Annotated[int, Field(ge=0, lt=MAX_POSITION)]
Size = Annotated[int, Field(ge=0, lt=MAX_ELEMENTS)]


class Producer(Record):
    """Who made the dump."""

    engine: Name
    version: Text = ""
    commit: Text = ""
    device: Text = ""


class Hashes(Record):
    """Lower-case hex; None where unknown. What is hashed: `sha256_of_files`, `sha256_of_tokens`, `docs/dumps.md`."""

    config: Sha256 | None = None
    weights: Sha256 | None = None
    inputs: Sha256 | None = None


class ChosenToken(Record):
    """A token id that the seed does not decide; `truncations`: how often the request was taken back before it."""

    request: Name
    position: Position
    truncations: Annotated[int, Field(ge=0, lt=2**31)]
    token_id: Annotated[int, Field(ge=0, lt=2**31)]


class WorkloadLine(Record):
    """What was run, in the one-line form of `parity.workload`, and its token ids: a seed, and those chosen."""

    text: Annotated[str, Field(min_length=1, max_length=100_000)]
    seed: int = 0
    chosen: tuple[ChosenToken, ...] = ()

    @field_validator("text")
    @classmethod
    def _can_be_parsed(cls, text: str) -> str:
        try:
            Workload.parse(text)
        except WorkloadError as error:
            raise ValueError(str(error)) from error
        return text

    @classmethod
    def of(cls, workload: Workload) -> WorkloadLine:
        chosen = tuple(
            ChosenToken(request=request, position=position, truncations=epoch, token_id=token)
            for (request, position, epoch), token in workload.chosen.items()
        )
        return cls(text=workload.text(), seed=workload.seed, chosen=chosen)

    def workload(self) -> Workload:
        chosen = {(item.request, item.position, item.truncations): item.token_id for item in self.chosen}
        return dataclasses.replace(Workload.parse(self.text, self.seed), chosen=chosen)


class PositionRange(Record):
    """`count` positions from `start` on."""

    start: Position
    count: Annotated[int, Field(ge=0, le=MAX_ROWS)]


class _Rows(Record):
    """What every entry says of its rows: name, owner, and absolute positions, one for each row of dim 0."""

    name: Name
    request: Name
    action: Annotated[int, Field(ge=0, lt=2**31)]
    kind: Literal["prefill", "decode", "verify", "draft"]
    positions: PositionRange | tuple[Position, ...]
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=MAX_DIMS)]
    dims: Name
    dtype: DtypeName
    layout: Text = ""

    def rows(self) -> Sequence[int]:
        """The positions; a range stays one, however long it says it is."""
        if isinstance(self.positions, PositionRange):
            return range(self.positions.start, self.positions.start + self.positions.count)
        return self.positions

    def spans(self) -> list[tuple[int, int]]:
        """The positions as half-open intervals."""
        rows = self.rows()
        if isinstance(rows, range):
            return [(rows.start, rows.stop)] if rows else []
        return [(position, position + 1) for position in rows]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[DTYPE_CODES[self.dtype]]

    def problems(self) -> Iterator[str]:
        """What the entry contradicts itself in."""
        rows = len(self.rows())
        if rows != self.shape[0]:
            yield f"{rows} positions for shape {list(self.shape)}; dim 0 is the rows, one position each"
        if len(self.dims.split()) != len(self.shape):
            yield f"dims {self.dims!r} for shape {list(self.shape)}; one word for each dim"
        if 0 in self.shape[1:] or prod(self.shape) >= MAX_ELEMENTS:
            yield f"shape {list(self.shape)}; every size behind the first must be at least 1, and no tensor is so large"


class TensorEntry(_Rows):
    """A tensor that is there: under `key` in the safetensors file `file`."""

    file: Annotated[str, Field(max_length=200), AfterValidator(_plain_file_name)]
    key: Name


class StatisticsEntry(_Rows):
    """A tensor of which only statistics were kept."""

    statistics: Statistics

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.statistics.count != prod(self.shape):
            yield f"statistics of {self.statistics.count} elements for shape {list(self.shape)}"


class Manifest(Record):
    """The whole file. Entries are in the order of their computation. `dtype` is that of weights and activations."""

    schema_version: int
    producer: Producer
    dtype: FloatingDtypeName
    sha256: Hashes = Hashes()
    workload: WorkloadLine | None = None
    tensors: tuple[TensorEntry, ...] = ()
    statistics_only: tuple[StatisticsEntry, ...] = ()

    def entries(self) -> Iterator[TensorEntry | StatisticsEntry]:
        yield from self.tensors
        yield from self.statistics_only


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder`'s manifest; names may be any, see `require_schema_names`.

    Raises: DumpError for a folder without manifest, and with the list of all problems of one that is wrong.
    """
    manifest = _parse(folder, _read(folder))
    if manifest.schema_version != SCHEMA_VERSION:
        raise DumpError(
            f"{folder}: schema_version {manifest.schema_version}; this version of note-parity reads {SCHEMA_VERSION}"
        )
    problems = [f"{entry.name}: {problem}" for entry in manifest.entries() for problem in entry.problems()]
    problems += _repetitions(manifest)
    refuse(folder / MANIFEST_FILE, problems)
    return manifest


def _read(folder: Path) -> bytes:
    path = folder / MANIFEST_FILE
    try:
        if path.is_symlink():
            raise DumpError(f"{path}: is a link; a dump holds its own files")
        if not path.exists():
            raise DumpError(f"{folder}: {_why_no_manifest(folder)}")
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DumpError(f"{path}: {path.stat().st_size} bytes; at most {MAX_MANIFEST_BYTES} are read")
        return path.read_bytes()
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror}") from error


def _why_no_manifest(folder: Path) -> str:
    if folder.exists() and not folder.is_dir():
        return "is a file; a dump is a folder with manifest.json and safetensors files"
    if not folder.exists():
        return "no such folder; a dump is a folder with manifest.json and safetensors files"
    if any(path.name.endswith((".partial", ".safetensors")) for path in folder.iterdir()):
        return "incomplete: it has tensors and no manifest.json, which is written last; the run that wrote it stopped"
    return "has no manifest.json; a dump is a folder with manifest.json and safetensors files"


def _parse(folder: Path, content: bytes) -> Manifest:
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        refuse(folder / MANIFEST_FILE, list(validation_lines(error)))
        raise AssertionError("a validation error has lines") from error
    refuse(folder / MANIFEST_FILE, repetition_lines(content))
    return manifest


def validation_lines(error: ValidationError) -> Iterator[str]:
    """`tensors.3.dtype: must be …, found 'bf17'`, one line a problem."""
    for problem in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in problem["loc"]) or "the file"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "Extra inputs are not permitted: no field of this name is known here"
        # Of a file that is no JSON the whole text would be shown, and the message names the place.
        found = "" if problem["type"] == "json_invalid" else f", found {problem['input']!r:.120}"
        yield f"{where}: {message}{found}"


def _repetitions(manifest: Manifest) -> Iterator[str]:
    keys = Counter((entry.file, entry.key) for entry in manifest.tensors)
    for (file, key), count in keys.items():
        if count > 1:
            yield f"{file}: {key!r} is listed {count} times, expected once"
    spans: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
    for entry in manifest.entries():
        spans.setdefault((entry.name, entry.request, entry.action), []).extend(entry.spans())
    for (name, request, action), parts in spans.items():
        parts.sort()
        if any(second[0] < first[1] for first, second in pairwise(parts)):
            yield f"{name}: request {request!r}, action {action}: has a position twice, expected once"


def require_schema_names(folder: Path, manifest: Manifest) -> None:
    """Refuse names that the schema does not know, and known names in another layout than the schema's.

    Raises: DumpError, with the nearest known names.
    """
    problems = []
    for name, entry in {entry.name: entry for entry in manifest.entries()}.items():
        spec = spec_of(name)
        if spec is None:
            problems.append(f"{name}: not in the schema{did_you_mean(name)}; give it its schema name, or use a mapping")
        elif len(spec.dims.split()) != len(entry.shape):
            problems.append(f"{name}: shape {list(entry.shape)}, expected dims {spec.dims!r}; a mapping can reshape it")
        elif entry.torch_dtype.is_floating_point != (spec.kind != "choice"):
            wanted = "an integer dtype" if spec.kind == "choice" else "a floating dtype"
            problems.append(f"{name}: {entry.dtype}, expected {wanted}")
    refuse(folder / MANIFEST_FILE, problems)


def did_you_mean(name: str) -> str:
    """` (nearest: attn.q_latent, …)` for a name that is unknown, or nothing."""
    known = {spec.local_name: spec.pattern for spec in reversed(PROBES)}
    known |= {spec.pattern: spec.pattern for spec in PROBES}
    local = re.sub(r"^(layers|mtp|cache)\.\{.\}\.", "", pattern_of(name))
    # As it stands, and with a layer's number where it has one, whatever stands before that.
    spelt = [local, re.sub(r"\.\d+\.", ".{i}.", name)]
    found = [known[match] for text in spelt for match in get_close_matches(text, known, n=3, cutoff=0.5)]
    nearest = list(dict.fromkeys(found))[:3]
    return f" (nearest: {', '.join(nearest)})" if nearest else ""


def refuse(subject: object, problems: Sequence[str]) -> None:
    """Raise one DumpError that lists the problems, if there are any."""
    if not problems:
        return
    lines = [f"{subject}: {len(problems)} problem{'s' * (len(problems) != 1)}"]
    lines += [f"  {line if line.isprintable() else ascii(line)}" for line in problems[:MAX_LINES]]
    if len(problems) > MAX_LINES:
        lines.append(f"  and {len(problems) - MAX_LINES} more")
    raise DumpError("\n".join(lines))


def sha256_of_files(paths: Iterable[Path]) -> str:
    """Hash of some files: of the sha256 of each, in the order of their names. For config and weights."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def sha256_of_tokens(steps: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Hash of the inputs: for each step of each request, a line `request id id …` in UTF-8 with a line feed."""
    total = hashlib.sha256()
    for request, ids in steps:
        total.update(f"{' '.join([request, *map(str, ids)])}\n".encode())
    return total.hexdigest()
