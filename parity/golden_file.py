"""A golden on disk: truths, floors and margins of one model and one workload. No weights.

    golden.json           what was run, and which tables lie in which part
    *.safetensors         one part a layer, one for what follows the layers:
      truth/N/R           rows of name N and request R, in float64's result
      noise/N/R           floor of each row, relative to the norm of the true row
      choice/N/R          chosen ids, ascending, -1 for none
      margin/N/R          score of the last chosen less that of the first left out, in score units; inf: none left out
      margin_noise/N/R    standard deviation that rounding gives to such a difference, in the same units

Router weights are in the order of ascending expert ids. A truth is kept in float32 where the candidate's dtype is
coarser: that costs 2.4e-8 of a row, 1/65000 of bfloat16's smallest floor and 1/8000 of float16's. It is kept in float64
where the model owes float32 (scores, logits of the router), where choices are decided, and in goldens of float32 runs.

A golden is written under another name and renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parity.errors import GoldenError
from parity.json_keys import repetition_lines
from parity.schema import dataflow_key, spec_of
from parity.tolerance import Floor
from parity.trace import RowKey
from parity.workload import Workload, WorkloadError

GOLDEN_FILE = "golden.json"
GOLDEN_VERSION = 1
SHIPPED = Path(__file__).parent / "goldens"
VALUE_PARTS = ("truth", "noise")
CHOICE_PARTS = ("choice", "margin", "margin_noise")
DtypeName = Literal["float32", "float16", "bfloat16"]
_DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_PART_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*\.safetensors")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TableRecord(_Record):
    """One name and request of a part. `rows` says which of its row lists; `spread`, `largest`: see `Floor`."""

    name: str
    request: str
    rows: int = Field(ge=0)
    spread: float = Field(default=0.0, ge=0)
    largest: float = Field(default=0.0, ge=0)


class PartRecord(_Record):
    """One safetensors file. A row is (position, occurrence)."""

    file: str
    sha256: str
    row_lists: list[list[tuple[int, int]]]
    tables: list[TableRecord]


class WeightsRecord(_Record):
    """Which weights were run: hashes of the checkpoint's index and headers, and the seed if they are synthetic.

    `files_sha256`: of the weight files, as a dump's manifest has it (`manifest.sha256_of_files`); None in goldens that
    were made before this was noted down.
    """

    index_sha256: str
    headers_sha256: str
    synthetic_seed: int | None = None
    files_sha256: str | None = None


class ChosenToken(_Record):
    """A token id that the workload's seed does not decide; see `Workload.chosen`."""

    request: str
    position: int
    epoch: int
    token_id: int


class GoldenRecord(_Record):
    """`golden.json`. `config` is the model's, as in its `config.json`; `numerics` the fields of `Numerics`.

    The floors hold for runs in `dtype`, and were made from `draws` draws. `names` are the globs of what was kept.
    """

    golden_version: Literal[1] = 1
    schema_version: Literal[1] = 1
    config: dict[str, Any]
    numerics: dict[str, str | float | bool]
    indexer_rope_layout: Literal["leading", "tail"]
    dtype: DtypeName
    draws: int = Field(ge=2)
    workload: str
    seed: int
    chosen_tokens: list[ChosenToken] = []
    names: list[str]
    weights: WeightsRecord
    producers: dict[str, str]
    parts: list[PartRecord] = []


@dataclass(frozen=True)
class ValueTable:
    """Rows of a value or of scores. `floor` has one noise for each row."""

    keys: tuple[RowKey, ...]
    truth: Tensor
    floor: Floor


@dataclass(frozen=True)
class ChoiceTable:
    """Rows of a choice; `margins` and `margin_noises` [rows], float64."""

    keys: tuple[RowKey, ...]
    choices: Tensor
    margins: Tensor
    margin_noises: Tensor


def shipped_names() -> list[str]:
    """The goldens that ship with the package."""
    return sorted(entry.name for entry in SHIPPED.iterdir())


class Golden:
    """An opened golden. Tables are read one at a time.

    `open` raises: GoldenError for a folder that is not a complete golden of this version.
    """

    def __init__(self, folder: Path, record: GoldenRecord):
        self.folder, self.record = folder, record
        self.dtype = _DTYPES[record.dtype]
        self._tables = {(table.name, table.request): (part, table) for part in record.parts for table in part.tables}
        self._requests: dict[str, list[str]] = {}
        for name, request in self._tables:
            self._requests.setdefault(name, []).append(request)

    @classmethod
    def open(cls, source: str | Path) -> Golden:
        """`source` is a folder, or the name of a golden that ships with the package: `tiny`.

        A folder of one's own that is called so is written `./tiny`, or given as a Path.
        """
        folder = SHIPPED / source if source in shipped_names() else Path(source)
        record = _read_record(folder)
        for part in record.parts:
            _verify_part(folder, part)
        golden = cls(folder, record)
        _ = golden.workload
        return golden

    @property
    def workload(self) -> Workload:
        return workload_of(self.record, self.folder)

    @property
    def vocab_size(self) -> int:
        """Raises: GoldenError if the golden's config does not say it."""
        size = self.record.config.get("vocab_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise GoldenError(f"{self.folder / GOLDEN_FILE}: config: vocab_size is {size!r:.80}, expected a number")
        return size

    def names(self) -> list[str]:
        """Every name, in dataflow order."""
        return sorted(self._requests, key=dataflow_key)

    def requests(self, name: str) -> list[str]:
        return list(self._requests.get(name, ()))

    def has(self, name: str, request: str) -> bool:
        return (name, request) in self._tables

    def keys(self, name: str, request: str) -> tuple[RowKey, ...]:
        part, table = self._tables[name, request]
        return tuple(part.row_lists[table.rows])

    def row_shape(self, name: str, request: str) -> torch.Size:
        """The shape of one row, from the header of the file."""
        part, _ = self._tables[name, request]
        kind = (CHOICE_PARTS if _is_choice(name) else VALUE_PARTS)[0]
        with safe_open(self.folder / part.file, framework="pt") as file:
            return torch.Size(file.get_slice(f"{kind}/{name}/{request}").get_shape()[1:])

    def values(self, name: str, request: str) -> ValueTable:
        part, table = self._tables[name, request]
        truth, noise = self._load(part, VALUE_PARTS, table)
        return ValueTable(self.keys(name, request), truth, Floor(noise.to(torch.float64), table.spread, table.largest))

    def choices(self, name: str, request: str) -> ChoiceTable:
        part, table = self._tables[name, request]
        choices, margins, noises = self._load(part, CHOICE_PARTS, table)
        return ChoiceTable(self.keys(name, request), choices.to(torch.int64), margins, noises)

    def rows(self, name: str, request: str, start: int, stop: int) -> Tensor:
        """Some rows of the truth, or of the chosen ids; only they are read."""
        part, _ = self._tables[name, request]
        kind = (CHOICE_PARTS if _is_choice(name) else VALUE_PARTS)[0]
        with safe_open(self.folder / part.file, framework="pt") as file:
            return file.get_slice(f"{kind}/{name}/{request}")[start:stop]

    def _load(self, part: PartRecord, kinds: Sequence[str], table: TableRecord) -> list[Tensor]:
        with safe_open(self.folder / part.file, framework="pt") as file:
            return [file.get_tensor(f"{kind}/{table.name}/{table.request}") for kind in kinds]


def _is_choice(name: str) -> bool:
    spec = spec_of(name)
    return spec is not None and spec.kind == "choice"


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """Raises: GoldenError for a dtype that has no rounding to speak of."""
    for name, known in _DTYPES.items():
        if known == dtype:
            return name
    raise GoldenError(f"a golden is for runs in {', '.join(_DTYPES)}, not in {dtype}")


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of the truth of `name` in a golden for runs in `dtype`; see the module's docstring."""
    spec = spec_of(name)
    is_coarse = torch.finfo(dtype).eps > torch.finfo(torch.float32).eps
    return torch.float32 if is_coarse and spec is not None and not spec.is_float32 else torch.float64


def workload_of(record: GoldenRecord, where: Path) -> Workload:
    try:
        workload = Workload.parse(record.workload, record.seed)
    except WorkloadError as error:
        raise GoldenError(f"{where / GOLDEN_FILE}: workload: {error}") from error
    chosen = {(token.request, token.position, token.epoch): token.token_id for token in record.chosen_tokens}
    return Workload(workload.actions, workload.seed, chosen)


def write_part(
    folder: Path,
    file: str,
    values: Mapping[tuple[str, str], ValueTable],
    choices: Mapping[tuple[str, str], ChoiceTable],
    dtype: torch.dtype,
) -> PartRecord:
    """Write the tables of one part, by name and request, and return what `golden.json` says of it."""
    tensors: dict[str, Tensor] = {}
    row_lists: dict[tuple[RowKey, ...], int] = {}
    tables = []
    for (name, request), value in values.items():
        tensors[f"truth/{name}/{request}"] = value.truth.to(stored_dtype(name, dtype)).contiguous()
        tensors[f"noise/{name}/{request}"] = value.floor.noise.to(torch.float32)
        rows = row_lists.setdefault(value.keys, len(row_lists))
        spread, largest = value.floor.spread, value.floor.largest
        tables.append(TableRecord(name=name, request=request, rows=rows, spread=spread, largest=largest))
    for (name, request), choice in choices.items():
        tensors[f"choice/{name}/{request}"] = choice.choices.to(torch.int32).contiguous()
        tensors[f"margin/{name}/{request}"] = choice.margins
        tensors[f"margin_noise/{name}/{request}"] = choice.margin_noises
        rows = row_lists.setdefault(choice.keys, len(row_lists))
        tables.append(TableRecord(name=name, request=request, rows=rows))
    temporary = folder / f"{file}.partial"
    save_file(tensors, temporary)
    temporary.replace(folder / file)
    return PartRecord(
        file=file, sha256=sha256_of(folder / file), row_lists=[list(keys) for keys in row_lists], tables=tables
    )


def write_record(folder: Path, record: GoldenRecord, file: str) -> None:
    temporary = folder / f"{file}.partial"
    temporary.write_text(record.model_dump_json(exclude_none=True) + "\n", encoding="utf-8")
    temporary.replace(folder / file)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_record(folder: Path) -> GoldenRecord:
    path = folder / GOLDEN_FILE
    if not path.is_file():
        raise GoldenError(
            f"{folder}: has no {GOLDEN_FILE}, which is written last: an export that was interrupted, or not a golden; "
            f"name a golden's folder, or one that ships ({', '.join(shipped_names())})"
        )
    try:
        content = path.read_bytes()
        record = GoldenRecord.model_validate_json(content)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:5]]
        raise GoldenError(f"{path}: not a golden of version {GOLDEN_VERSION}: {'; '.join(lines)}") from error
    except OSError as error:
        raise GoldenError(f"{path}: cannot be read: {error.strerror}") from error
    if lines := repetition_lines(content):
        raise GoldenError(f"{path}: {'; '.join(lines)}")
    return record


def _verify_part(folder: Path, part: PartRecord) -> None:
    """The file is the one that was written, and holds every tensor of its tables, with their numbers of rows."""
    path = folder / part.file
    if not _PART_NAME.fullmatch(part.file):
        raise GoldenError(f"{folder / GOLDEN_FILE}: {part.file!r:.200} is not the name of a file in the same folder")
    try:
        if sha256_of(path) != part.sha256:
            raise GoldenError(f"{path}: its bytes are not those that {GOLDEN_FILE} was written for; export it again")
        with safe_open(path, framework="pt") as file:
            for table in part.tables:
                _verify_table(path, file, part, table)
    except (OSError, SafetensorError) as error:
        raise GoldenError(f"{path}: cannot be read: {error}") from error


def _verify_table(path: Path, file: Any, part: PartRecord, table: TableRecord) -> None:
    spec = spec_of(table.name)
    if spec is None or table.rows >= len(part.row_lists):
        raise GoldenError(f"{path}: {table.name!r:.200} is no name of the schema, or its rows are not listed")
    rows = len(part.row_lists[table.rows])
    held = set(file.keys())
    for kind in CHOICE_PARTS if _is_choice(table.name) else VALUE_PARTS:
        key = f"{kind}/{table.name}/{table.request}"
        if key not in held or file.get_slice(key).get_shape()[:1] != [rows]:
            raise GoldenError(f"{path}: {key!r} must be a tensor of {rows} rows")
