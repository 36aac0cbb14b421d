"""A mapping: how the names and layouts of another engine's dump become the schema's. Data in a JSON file, no code.

    {"mapping_version": 1, "title": "my engine",
     "layer_shift": -1,
     "rules": [
       {"from": "block.{i}.ln1", "to": "layers.{i}.attn.input"},
       {"from": ["block.{i}.hidden", "block.{i}.residual"], "to": "layers.{i}.output"},
       {"from": "block.{i}.q", "to": "layers.{i}.attn.q_rope", "transforms": [
         {"op": "lanes", "start": "N", "stop": "N+R"}, {"op": "deinterleaved_to_interleaved"}]}],
     "packing": {"cu_seqlens": "cu_seqlens"}}

In a pattern {i} stands for a layer, {s} for a draft step, * for anything. Several names in `from` are added. The first
rule that finds a tensor for a name wins, those behind it are fallbacks. `layer_shift` is added to the foreign number.
`cannot` lists what is known and has no place in the schema, with the reason. Transforms: `transforms`. Who owns the
rows of a packed tensor: `packing`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator

from parity.json_keys import repetition_lines
from parity.manifest import DumpError, Name, refuse, validation_lines
from parity.packing import Packing
from parity.schema import spec_of
from parity.statistics import Record
from parity.transforms import Transform

READY = Path(__file__).parent / "mappings"
MAX_MAPPING_BYTES = 2**20


def _check_pattern(pattern: str) -> str:
    if any(pattern.count(word) > 1 for word in ("{i}", "{s}", "*")):
        raise ValueError("may have each of {i}, {s} and * once")
    return pattern


class Rule(Record):
    """One name of the schema and where it comes from. `layers` limits the rule to these foreign layers."""

    model_config = ConfigDict(populate_by_name=True)

    sources: Annotated[tuple[Name, ...], Field(alias="from", min_length=1, max_length=4)]
    to: Name
    transforms: tuple[Transform, ...] = ()
    layers: tuple[int, ...] | None = None
    layer_shift: int | None = None

    @field_validator("sources", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("sources")
    @classmethod
    def _are_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_check_pattern(pattern) for pattern in patterns)

    @field_validator("to")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if spec_of(name.replace("{i}", "0").replace("{s}", "0")) is None:
            raise ValueError("must be a name of the schema, with {i} for the layer or {s} for the draft step")
        return name


class Cannot(Record):
    """A foreign tensor that has no place in the schema, and why."""

    model_config = ConfigDict(populate_by_name=True)

    pattern: Annotated[Name, Field(alias="from")]
    because: Name

    @field_validator("pattern")
    @classmethod
    def _is_pattern(cls, pattern: str) -> str:
        return _check_pattern(pattern)


class Mapping(Record):
    """A whole mapping. `strip`: prefixes of foreign names to take off first; the first that fits is taken."""

    mapping_version: Literal[1]
    title: Name
    strip: tuple[Name, ...] = ()
    layer_shift: int = 0
    rules: tuple[Rule, ...]
    cannot: tuple[Cannot, ...] = ()
    packing: Packing = Packing()

    def stripped(self, foreign: str) -> str:
        """A foreign name without its prefix."""
        return next((foreign.removeprefix(prefix) for prefix in self.strip if foreign.startswith(prefix)), foreign)


def read_mapping(path: str | os.PathLike[str]) -> Mapping:
    """Read a mapping from a file, or a ready one by its name (`ready_mappings`). Raises: DumpError."""
    file = READY / f"{path}.json" if str(path) in ready_mappings() else Path(path)
    try:
        if file.stat().st_size > MAX_MAPPING_BYTES:
            raise DumpError(f"{file}: {file.stat().st_size} bytes; a mapping has at most {MAX_MAPPING_BYTES}")
        content = file.read_bytes()
    except OSError as error:
        ready = ", ".join(ready_mappings())
        raise DumpError(f"{file}: cannot be read: {error.strerror}; ready mappings are {ready}") from error
    try:
        mapping = Mapping.model_validate_json(content)
    except ValidationError as error:
        refuse(file, list(validation_lines(error)))
        raise
    refuse(file, repetition_lines(content))
    return mapping


def ready_mappings() -> list[str]:
    """Names of the mappings that come with the package."""
    return sorted(path.stem for path in READY.glob("*.json"))


def mapping_json(mapping: Mapping) -> str:
    """The text of a mapping file, as `read_mapping` reads it back."""
    return mapping.model_dump_json(by_alias=True, exclude_defaults=True, indent=1) + "\n"
