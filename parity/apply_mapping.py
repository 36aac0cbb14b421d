"""Translates a foreign dump with a mapping. Values are read when an entry is loaded; shapes are checked before.

For every forward pass and every rule, the foreign names that fit give a name of the schema. The rule's transforms run
on meta tensors once, which tells the shape that will come out, or that the mapping does not fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Dict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from parity.foreign.dump import Foreign, ForeignDump, ForeignStatistics, ForeignTensor
from parity.manifest import DumpError, StatisticsEntry, refuse, validation_lines
from parity.map_statistics import mapped_statistics
from parity.mapping import Mapping, Rule
from parity.packing import Item, RowPlan, plan_rows
from parity.schema import spec_of
from parity.trace import Entry, Source, Trace
from parity.transforms import Context, DropFuture, KeepRows, Transform, sizes_of
from parity.workload import Workload
from reference.config import TextConfig


@dataclass(frozen=True)
class Mapped:
    """A dump under the schema's names.

    `unmapped`: foreign names without a rule. `refused`: (name, reason) of what is known and cannot be translated.
    """

    trace: Trace
    statistics: tuple[StatisticsEntry, ...]
    unmapped: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class MappedSource:
    """Foreign tensors that are added, transformed and cut to some rows when they are loaded."""

    name: str
    sources: tuple[Source, ...]
    transforms: tuple[Transform, ...]
    context: Context
    start: int
    stop: int

    def load(self) -> Tensor:
        """Raises: DumpError if the values do not fit the mapping."""
        whole = _transformed(self.name, [source.load() for source in self.sources], self.transforms, self.context)
        # A copy: a few rows must not keep the whole packed tensor in memory.
        return whole[self.start : self.stop].clone()


_Foreign = TypeVar("_Foreign", bound=Foreign)
_Key = tuple[str, int, str, int]  # name of the schema, forward pass, owner, first position


@dataclass(frozen=True)
class _Match(Generic[_Foreign]):
    """What a rule found for one name of the schema in one forward pass."""

    name: str
    rule: Rule
    found: tuple[_Foreign, ...]


def apply_mapping(
    mapping: Mapping, dump: ForeignDump, config: TextConfig | None = None, workload: Workload | None = None
) -> Mapped:
    """Translate a foreign dump.

    `config` gives sizes that a transform names by letter, and what shapes must be. `workload` says who owns the rows of
    each forward pass; without it the mapping's packing does.
    Raises: DumpError that lists everything that does not fit.
    """
    problems: list[str] = []
    tensors = _matches(mapping, dump.tensors, problems)
    numbers = _matches(mapping, dump.statistics, problems)
    refuse(f"mapping {mapping.title!r} of {dump.producer}", problems)

    def rows_of(forward: int) -> int | None:
        every: list[_Match[Any]] = [*tensors, *numbers]
        for match in every:
            if match.found[0].forward == forward and not any(
                isinstance(transform, KeepRows | DropFuture) for transform in match.rule.transforms
            ):
                context = Context(sizes_of(config, _layer(match.name, config)))
                return len(_meta(match.name, match.found, match.rule, context))
        return None

    plan = plan_rows(mapping.packing, dump, rows_of, workload)
    entries: list[Entry] = []
    for match in tensors:
        try:
            entries += _entries(match, plan, config)
        except DumpError as error:
            problems.append(str(error))
    refuse(f"mapping {mapping.title!r} of {dump.producer}", problems)
    statistics, refused = [], []
    for numbered in numbers:
        try:
            statistics.append(_statistics_entry(numbered, plan, config))
        except DumpError as error:
            refused.append((numbered.name, str(error)))
    used = {foreign.name for match in tensors for foreign in match.found} | mapping.packing.names()
    used |= {foreign.name for numbered in numbers for foreign in numbered.found}
    unmapped = []
    for name in dump.names():
        reason = next((c.because for c in mapping.cannot if _regex(c.pattern).fullmatch(mapping.stripped(name))), None)
        if name not in used and reason is None:
            unmapped.append(name)
        elif name not in used and reason:
            refused.append((name, reason))
    entries.sort(key=lambda entry: entry.action)
    return Mapped(Trace(entries, dump.producer), tuple(statistics), tuple(unmapped), tuple(refused), dump.notes)


def _matches(mapping: Mapping, foreign: Sequence[_Foreign], problems: list[str]) -> list[_Match[_Foreign]]:
    """By the rules, in their order, then by names that are the schema's; what is ambiguous goes to `problems`."""
    groups: dict[tuple[int, str, int], dict[str, _Foreign]] = {}
    for tensor in foreign:
        rows = tensor.rows
        first = rows.positions[0] if rows and len(rows.positions) else -1
        group = groups.setdefault((tensor.forward, rows.request if rows else "", first), {})
        name = mapping.stripped(tensor.name)
        if name in group:
            problems.append(f"{tensor.name}: twice in forward pass {tensor.forward}; a name stands for one tensor")
        group[name] = tensor
    matches: dict[_Key, _Match[_Foreign]] = {}
    for rule in mapping.rules:
        shift = mapping.layer_shift if rule.layer_shift is None else rule.layer_shift
        for place, group in groups.items():
            by_rule: dict[_Key, str] = {}
            for words, found in _found(rule, group):
                target = _target(rule, words, shift)
                if target is None:
                    continue
                key = (target, *place)
                if key in by_rule:
                    problems.append(f"{target}: both {by_rule[key]} and {found[0].name} fit {rule.sources[0]}")
                by_rule[key] = found[0].name
                matches.setdefault(key, _Match(target, rule, found))
    used = {(id(tensor)) for match in matches.values() for tensor in match.found}
    for place, group in groups.items():
        for name, tensor in group.items():
            # A name of the schema needs no rule; with shifted layers it would be another layer's.
            if spec_of(name) and id(tensor) not in used and not mapping.layer_shift:
                matches.setdefault((name, *place), _Match(name, Rule(sources=(name,), to=name), (tensor,)))
    return list(matches.values())


def _found(rule: Rule, group: Dict[str, _Foreign]) -> list[tuple[dict[str, str], tuple[_Foreign, ...]]]:
    """The captured words and tensors of every way in which all names of a rule are there."""
    found = []
    for name in group:
        match = _regex(rule.sources[0]).fullmatch(name)
        if match is None or (rule.layers is not None and int(match.groupdict().get("i") or -1) not in rule.layers):
            continue
        words = match.groupdict()
        names = [name, *(_filled(pattern, words) for pattern in rule.sources[1:])]
        if all(other in group for other in names):
            found.append((words, tuple(group[other] for other in names)))
    return found


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern).replace(r"\{i\}", r"(?P<i>\d{1,9})").replace(r"\{s\}", r"(?P<s>\d{1,9})")
    return re.compile(escaped.replace(r"\*", "(?P<any>.*)"))


def _filled(pattern: str, words: Dict[str, str]) -> str:
    return (
        pattern.replace("{i}", words.get("i", "")).replace("{s}", words.get("s", "")).replace("*", words.get("any", ""))
    )


def _target(rule: Rule, words: Dict[str, str], shift: int) -> str | None:
    """The schema's name, or None for a layer that the shift moves in front of the first."""
    layer = int(words["i"]) + shift if "i" in words else 0
    if layer < 0:
        return None
    return rule.to.replace("{i}", str(layer)).replace("{s}", words.get("s", "0"))


def _layer(name: str, config: TextConfig | None) -> int | None:
    """The layer whose sizes a name has; a draft layer is behind the last."""
    match = re.match(r"(layers|cache)\.(\d+)\.", name)
    if match:
        return int(match.group(2))
    return config.num_hidden_layers if config and name.startswith("mtp.") else None


def _transformed(name: str, tensors: Sequence[Tensor], transforms: Sequence[Transform], context: Context) -> Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise DumpError(f"{name}: the tensors to be added have shapes {sorted(shapes)}, expected one shape")
    try:
        # One addition rounds once, as the residual stream of a model does.
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        for transform in transforms:
            total = transform.apply(total, context)
    except DumpError as error:
        raise DumpError(f"{name}: {error}") from error
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DumpError(f"{name}: the mapping does not fit {sorted(shapes)[0]}: {reason}") from error
    return total


def _meta(name: str, found: Sequence[Foreign], rule: Rule, context: Context) -> Tensor:
    """What comes out of a rule, without values. Raises: DumpError."""
    metas = [torch.empty(foreign.shape, dtype=foreign.dtype, device="meta") for foreign in found]
    result = _transformed(name, metas, rule.transforms, context)
    if result.dim() < 2:
        raise DumpError(f"{name}: shape {list(result.shape)}, expected rows first and at least one dim behind")
    return result


def _context(name: str, items: Sequence[Item], config: TextConfig | None) -> Context:
    positions = [position for item in items for position in item.positions]
    return Context(sizes_of(config, _layer(name, config)), positions)


def _entries(match: _Match[ForeignTensor], plan: RowPlan, config: TextConfig | None) -> list[Entry]:
    """One entry for each request of the forward pass."""
    name, first = match.name, match.found[0]
    items = plan.of(first.forward, first.rows)
    context = _context(name, items, config)
    shape_of = _meta(name, match.found, match.rule, context)
    _require_layout(name, shape_of, context)
    sources = tuple(foreign.source for foreign in match.found)
    try:
        cut = list(plan.cut(items, len(shape_of)))
    except DumpError as error:
        raise DumpError(f"{name}, forward pass {first.forward}: {error}") from error
    return [
        Entry(
            name,
            item.request,
            plan.action(first.forward),
            item.kind,
            item.positions,
            MappedSource(name, sources, match.rule.transforms, context, start, stop),
        )
        for item, start, stop in cut
    ]


def _require_layout(name: str, meta: Tensor, context: Context) -> None:
    """The dims, sizes (where known) and kind of number that the schema has for a name. Raises: DumpError."""
    spec = spec_of(name)
    assert spec is not None
    letters = spec.dims.split()
    sizes = [len(meta) if letter == "T" else context.sizes.get(letter) for letter in letters]
    fits = len(letters) == meta.dim() and all(
        size in (None, found) for size, found in zip(sizes, meta.shape, strict=True)
    )
    if not fits:
        wanted = " ".join(
            f"{letter}={context.sizes[letter]}" if letter in context.sizes else letter for letter in letters
        )
        raise DumpError(f"{name}: shape {list(meta.shape)} after its transforms, expected {wanted}")
    if meta.is_floating_point() == (spec.kind == "choice"):
        raise DumpError(f"{name}: {meta.dtype}, expected {'integers' if spec.kind == 'choice' else 'a floating dtype'}")


def _statistics_entry(match: _Match[ForeignStatistics], plan: RowPlan, config: TextConfig | None) -> StatisticsEntry:
    """Raises: DumpError for what cannot be said of sums and samples."""
    name, first = match.name, match.found[0]
    items = plan.of(first.forward, first.rows)
    if len(items) != 1:
        raise DumpError("statistics of the rows of several requests together cannot be told apart")
    context = _context(name, items, config)
    meta = _meta(name, match.found, match.rule, context)
    _require_layout(name, meta, context)
    known = mapped_statistics([foreign.statistics for foreign in match.found], match.rule.transforms, context)
    try:
        entry = StatisticsEntry(
            name=name,
            request=items[0].request,
            action=plan.action(first.forward),
            kind=items[0].kind,  # type: ignore[arg-type] # validated
            positions=tuple(items[0].positions),
            shape=tuple(meta.shape),
            dims=spec.dims if (spec := spec_of(name)) else "",
            dtype=str(meta.dtype).removeprefix("torch."),
            statistics=known,
        )
    except ValidationError as error:
        raise DumpError("; ".join(validation_lines(error))) from error
    refuse(name, list(entry.problems()))
    return entry
