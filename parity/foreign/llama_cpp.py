"""llama.cpp's eval-callback: what it prints of each node of the graph. Sums and samples, never whole tensors.

    common_debug_cb_eval:   attn_norm-3 = (f32)   MUL(norm-3{96, 6, 1, 1}, …{96, 1, 1, 1}}) = {96, 6, 1, 1}
        [
            [
                [  0.0181,  -0.0272,   0.0272, ...,  0.1900,   0.0200,  -0.1100 ],
                …
            ],
        ]
        sum = -3.214000

Sizes are in ggml's order, fastest first, so {96, 6, 1, 1} is [6, 96] here. Of a dim longer than six the first and the
last three are printed, so which element a number is follows from the sizes. Older versions print `ggml_debug:` and only
the first three; of those the sum is kept alone where it is there. `name-3` is layer 3: `layers.3.name`. A name that
comes again starts the next forward pass, unless it is printed again within its layer (a view, a reshape): then the
last one counts.
Written from the tool's public documentation and printed output. The numbers have four decimals, the sum six.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import isfinite, prod
from pathlib import Path
from typing import TextIO

import torch

from parity.foreign.dump import ForeignDump, ForeignStatistics
from parity.manifest import DumpError
from parity.statistics import MAX_ELEMENTS, Sample, Statistics

SHOWN = 3
MAX_BYTES = 2**30
MAX_VALUES = 4096
# Half a unit of the fourth decimal.
RESOLUTION = 5e-5
_HEAD = re.compile(
    r"(?:ggml_debug|common_debug_cb_eval):\s*(?P<name>\S[^=]{0,200}?) = \((?P<type>\w+)\).*"
    r"= \{(?P<sizes>\d{1,15}(?:, \d{1,15}){3})\}\s*$"
)
_SUM = re.compile(r"\s*sum = (\S{1,40})\s*$")
_NUMBER = re.compile(r"[-+]?(?:\d+\.\d+|nan|inf)")
_LAYERED = re.compile(r"(.+)-(\d{1,6})")
_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64}


@dataclass
class _Node:
    name: str
    type: str
    shape: tuple[int, ...]
    values: list[float] = field(default_factory=list)
    sum: float | None = None


def is_llama_cpp(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return any("ggml_debug:" in line or "common_debug_cb_eval:" in line for line in _lines(file))
    except OSError:
        return False


def read_llama_cpp(path: Path) -> ForeignDump:
    """Raises: DumpError for a file without a printed node, or with sizes that no tensor has."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DumpError(f"{path}: {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
        with path.open(encoding="utf-8", errors="replace") as file:
            statistics = list(_forwards(_nodes(_lines(file))))
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror}") from error
    if not statistics:
        raise DumpError(f"{path}: no node is printed here that has a sum or samples")
    return ForeignDump("llama.cpp eval-callback", "llama_cpp", statistics=tuple(statistics))


def _lines(file: TextIO) -> Iterator[str]:
    """Lines; one that is longer than any the tool prints comes in pieces."""
    return iter(partial(file.readline, 4096), "")


def _nodes(lines: Iterable[str]) -> Iterator[_Node]:
    node: _Node | None = None
    for line in lines:
        if head := _HEAD.match(line):
            if node:
                yield node
            node = _Node(head["name"].strip(), head["type"], _shape(head["name"], head["sizes"]))
        elif node and (total := _SUM.match(line)):
            node.sum = _float(total[1])
        elif node and line.lstrip().startswith("[") and len(node.values) < MAX_VALUES:
            node.values += [_float(number) for number in _NUMBER.findall(line)]
    if node:
        yield node


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _shape(name: str, sizes: str) -> tuple[int, ...]:
    """ggml's sizes, fastest first, as a shape without the leading ones; at least rows and lanes."""
    shape = [int(size) for size in reversed(sizes.split(", "))]
    if prod(shape) >= MAX_ELEMENTS or 0 in shape:
        raise DumpError(f"{name.strip()}: sizes {{{sizes}}}; no tensor has them")
    while len(shape) > 2 and shape[0] == 1:
        del shape[0]
    return tuple(shape)


def _forwards(nodes: Iterable[_Node]) -> Iterator[ForeignStatistics]:
    """Nodes with the number of their forward pass: a new one begins where layer numbers and names start over."""
    current: dict[str, _Node] = {}
    forward, first = 0, ""
    for node in nodes:
        if " (" in node.name:
            continue  # (view), (reshaped), (transposed), (copy …): the same values once more
        first = first or node.name
        if node.name == first and len(current) > 1:
            yield from _known(current, forward)
            current, forward = {}, forward + 1
        current[node.name] = node
    yield from _known(current, forward)


def _known(nodes: dict[str, _Node], forward: int) -> Iterator[ForeignStatistics]:
    for name, node in nodes.items():
        statistics = _statistics(node)
        if statistics is None or node.type not in _TYPES:
            continue
        layered = _LAYERED.fullmatch(name)
        full_name = f"layers.{int(layered[2])}.{layered[1]}" if layered else name
        yield ForeignStatistics(full_name, forward, node.shape, _TYPES[node.type], statistics)


def _statistics(node: _Node) -> Statistics | None:
    indices = _printed_indices(node.shape)
    samples: tuple[Sample, ...] = ()
    if len(indices) == len(node.values):
        pairs = zip(indices, node.values, strict=True)
        samples = tuple(Sample(index=index, value=value) for index, value in pairs if isfinite(value))
    total = node.sum if node.sum is not None and isfinite(node.sum) else None
    if total is None and not samples:
        return None
    return Statistics(count=prod(node.shape), sum=total, samples=samples, resolution=RESOLUTION)


def _printed_indices(shape: tuple[int, ...]) -> list[int]:
    """Which elements are printed, in the order of printing, as indices into the flattened tensor."""
    axes = [range(size) if size <= 2 * SHOWN else (*range(SHOWN), *range(size - SHOWN, size)) for size in shape]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [sum(i * stride for i, stride in zip(place, strides, strict=True)) for place in product(*axes)]
