"""Is a dump worth comparing? Everything that can be said of one alone, before it is held against anything.

An *error* makes a comparison wrong or impossible, a *warning* makes it doubtful, a *note* says what it will not show.
Tensors are read one at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from parity.judge import has_own_input
from parity.manifest import MAX_POSITION, Manifest, did_you_mean
from parity.schema import dataflow_key, layer_of, pattern_of, spec_of
from parity.trace import Entry, Trace
from parity.trace_file import config_of, open_dump, unfinished_steps
from parity.transforms import sizes_of
from parity.workload import Fork
from reference.config import NoteConfig, TextConfig

Severity = Literal["error", "warning", "note"]
# Fewer elements than this may well be equal by chance.
MIN_ELEMENTS = 16
# Two tokens may be the same, so only what attention has mixed can be expected to differ from row to row.
_MIXED = ("layers.{i}.output", "final_norm", "logits")


@dataclass(frozen=True)
class Finding:
    """`kind` is a short class (`NaN`, `unknown name`, …); `names` are the tensors that it is about."""

    severity: Severity
    kind: str
    names: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class ValidationReport:
    """What is in a dump, and what is wrong with it, errors first."""

    path: str
    producer: str
    tensors: int
    statistics: int
    elements: int
    requests: tuple[str, ...]
    steps: int
    findings: tuple[Finding, ...]

    @property
    def is_valid(self) -> bool:
        """Nothing makes a comparison wrong, and there is something to compare."""
        return self.tensors + self.statistics > 0 and all(finding.severity != "error" for finding in self.findings)


def validate_dump(folder: str | os.PathLike[str], config: NoteConfig | None = None) -> ValidationReport:
    """Look at a dump folder. Without `config` the dump's own config.json is used, if it has one.

    Raises: DumpError for a folder that cannot be read as a dump at all; ConfigError for its config.json.
    """
    dump = open_dump(folder, any_names=True, allow_incomplete=True)
    config = config or config_of(dump)
    text = config.text if config else None
    manifest = dump.manifest
    findings = [
        *_names(manifest),
        *(Finding("error", "incomplete", (), line) for line in unfinished_steps(manifest)),
        *_sizes(manifest, text),
        *_positions(dump.trace, manifest),
        *_wanted(manifest, text),
        *_values(dump.entries, text),
        *(
            Finding("error", "NaN", (entry.name,), f"{entry.statistics.nan_count} NaN, by the statistics")
            for entry in dump.statistics
            if entry.statistics.nan_count
        ),
    ]
    if not any(True for _ in manifest.entries()):
        findings.append(Finding("error", "empty", (), "the manifest lists no tensor: there is nothing to compare"))
    order = ("error", "warning", "note")
    return ValidationReport(
        str(folder),
        dump.trace.producer,
        len(manifest.tensors),
        len(manifest.statistics_only),
        sum(torch.Size(entry.shape).numel() for entry in manifest.tensors),
        tuple(sorted({entry.request for entry in manifest.entries()})),
        len({entry.action for entry in manifest.entries()}),
        tuple(sorted(findings, key=lambda finding: order.index(finding.severity))),
    )


def _names(manifest: Manifest) -> Iterator[Finding]:
    for name, entry in {entry.name: entry for entry in manifest.entries()}.items():
        spec = spec_of(name)
        if spec is None:
            message = f"not in the schema{did_you_mean(name)}; it will not be compared without a mapping"
            yield Finding("error", "unknown name", (name,), message)
        elif len(entry.shape) != len(spec.dims.split()):
            yield Finding("error", "layout", (name,), f"shape {list(entry.shape)}, expected dims {spec.dims!r}")
        elif entry.torch_dtype.is_floating_point != (spec.kind != "choice"):
            wanted = "integers" if spec.kind == "choice" else "a floating dtype"
            yield Finding("error", "dtype", (name,), f"{entry.dtype}, expected {wanted}")


def _sizes(manifest: Manifest, config: TextConfig | None) -> Iterator[Finding]:
    """Every dim whose letter the configuration gives a size, and layers that the model does not have."""
    if config is None:
        yield Finding("note", "no config", (), "sizes were not checked: no config.json in the dump, and none given")
        return
    for name, entry in {entry.name: entry for entry in manifest.entries()}.items():
        spec, layer = spec_of(name), _layer(name)
        if spec is None or len(spec.dims.split()) != len(entry.shape):
            continue
        if layer is not None and layer >= config.num_hidden_layers:
            message = f"layer {layer}; the model has layers 0 to {config.num_hidden_layers - 1}"
            yield Finding("error", "layer", (name,), message)
            continue
        draft = config.num_hidden_layers if name.startswith("mtp.") else layer
        sizes = sizes_of(config, draft) | {"2D": 2 * config.hidden_size}
        for letter, size in zip(spec.dims.split(), entry.shape, strict=True):
            if sizes.get(letter, size) != size:
                message = f"shape {list(entry.shape)}, expected {letter} = {sizes[letter]} in {spec.dims!r}"
                yield Finding("error", "size", (name,), message)


def _layer(name: str) -> int | None:
    if name.startswith("cache."):
        return int(name.split(".")[1]) if spec_of(name) else None
    return layer_of(name)


def _positions(trace: Trace, manifest: Manifest) -> Iterator[Finding]:
    """Rows must follow each other from position 0, or go back; names with the same fault are put together."""
    actions = manifest.workload.workload().actions if manifest.workload else ()
    forked = {action.new for action in actions if isinstance(action, Fork)}
    faults: dict[str, list[str]] = defaultdict(list)
    for name in trace.names():
        if name.startswith(("cache.", "mtp.")):
            continue  # a ring has only the newest rows of a long chunk, a deeper draft step only the newest row
        for request in trace.requests(name):
            end = MAX_POSITION if request in forked else 0
            for entry in trace.of(name, request):
                for fault in _jumps(entry, end):
                    faults[fault].append(name)
                end = entry.positions[-1] + 1 if len(entry.positions) else end
    for message, names in faults.items():
        yield Finding("warning", "positions", tuple(dict.fromkeys(names)), message)


def _jumps(entry: Entry, end: int) -> Iterator[str]:
    positions = entry.positions
    where = f"request {entry.request!r}, action {entry.action}"
    if len(positions) and positions[0] > end:
        before = f"after {end} rows" if end else "nothing before it: no history, so no layer can be isolated"
        yield f"{where}: jumps to position {positions[0]}, {before}"
    if not isinstance(positions, range) and any(second != first + 1 for first, second in pairwise(positions)):
        yield f"{where}: positions {list(positions)[:8]} do not follow each other"


def _wanted(manifest: Manifest, config: TextConfig | None) -> Iterator[Finding]:
    """What a comparison would want and does not find."""
    recorded = {entry.name for entry in manifest.entries() if spec_of(entry.name)}
    if not recorded:
        return
    for name in ("embeddings", "final_norm", "logits"):
        if name not in recorded:
            yield Finding("note", "missing", (name,), "not in the dump")
    layers = {layer for name in recorded if (layer := layer_of(name)) is not None}
    last = config.num_hidden_layers if config else max(layers, default=-1) + 1
    if absent := [layer for layer in range(last) if layer not in layers]:
        yield Finding("warning", "missing", (), f"nothing of layers {_ranges(absent)}")
    alone = sorted({layer for name in recorded if not has_own_input(name, recorded) and (layer := layer_of(name))})
    if alone:
        message = f"layers {_ranges(alone)} have neither their input nor the output before: they cannot be isolated"
        yield Finding("note", "missing", tuple(f"layers.{layer}.input" for layer in alone), message)


def _ranges(numbers: Iterable[int]) -> str:
    """`0 to 3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)


def _values(entries: Iterable[Entry], config: TextConfig | None) -> Iterator[Finding]:
    digests: dict[tuple[str, str, int, bytes], list[str]] = defaultdict(list)
    for entry in entries:
        spec = spec_of(entry.name)
        value = entry.source.load()
        if value.is_floating_point() and value.dtype.itemsize == 1:
            value = value.to(torch.float32)  # float8 knows no comparison
        if value.is_floating_point():
            yield from _not_finite(entry, value)
        elif spec and spec.kind == "choice" and value.dim() == 2:
            yield from _choices(entry, value, config)
        pattern = pattern_of(entry.name)
        if pattern in _MIXED:
            yield from _repeated_rows(entry, value)
        # Small or constant tensors are alike by nature, and choices may well agree.
        if layer_of(entry.name) is not None and value.is_floating_point() and value.numel() >= MIN_ELEMENTS:
            raw = value.contiguous().view(torch.uint8)
            if not bool((value == value.flatten()[0]).all()):
                digest = hashlib.blake2b(raw.numpy().data, digest_size=16).digest()
                digests[pattern, entry.request, entry.action, digest].append(entry.name)
    for (_, request, action, _), names in digests.items():
        if len(names) > 1:
            message = f"bitwise identical in request {request!r}, action {action}: recorded inside of a captured graph?"
            yield Finding("error", "identical layers", tuple(sorted(names, key=dataflow_key)), message)


def _flat_rows(value: Tensor) -> Tensor:
    return value[:, None].flatten(1)


def _not_finite(entry: Entry, value: Tensor) -> Iterator[Finding]:
    where = f"request {entry.request!r}, action {entry.action}"
    spec = spec_of(entry.name)
    if nans := int(value.isnan().sum()):
        row = entry.positions[int(_flat_rows(value).isnan().any(dim=1).nonzero()[0])]
        message = f"{nans} of {value.numel()} are NaN in {where}, first at position {row}"
        yield Finding("error", "NaN", (entry.name,), message)
    may_be_masked = spec is not None and (spec.kind == "scores" or entry.name.endswith("router.choice"))
    infinite = value == float("inf") if may_be_masked else value.isinf()
    if infs := int(infinite.sum()):
        yield Finding("error", "infinite", (entry.name,), f"{infs} of {value.numel()} are infinite in {where}")


def _choices(entry: Entry, value: Tensor, config: TextConfig | None) -> Iterator[Finding]:
    where = f"request {entry.request!r}, action {entry.action}"
    if entry.name.endswith("index.selected"):
        future = value > torch.tensor(entry.positions)[:, None]
        if count := int(future.sum()):
            message = f"{count} selected keys are behind their query in {where}; -1 stands for none (drop_future)"
            yield Finding("error", "future keys", (entry.name,), message)
    elif config and bool(((value < 0) | (value >= config.n_routed_experts)).any()):
        message = f"experts outside 0 to {config.n_routed_experts - 1} in {where}"
        yield Finding("error", "experts", (entry.name,), message)


def _repeated_rows(entry: Entry, value: Tensor) -> Iterator[Finding]:
    flat = _flat_rows(value)
    if flat.shape[1] < MIN_ELEMENTS:
        return
    first: dict[bytes, int] = {}
    for row, position in zip(flat.contiguous().view(torch.uint8).numpy(), entry.positions, strict=True):
        before = first.setdefault(hashlib.blake2b(row.tobytes(), digest_size=16).digest(), position)
        if before != position:
            message = (
                f"rows at positions {before} and {position} of request {entry.request!r}, action {entry.action}, are "
                f"bitwise identical: padding, or a buffer that was not written?"
            )
            yield Finding("warning", "duplicate rows", (entry.name,), message)
            return
