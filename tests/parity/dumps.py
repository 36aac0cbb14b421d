"""A recorded run of the tiny model, and ways to write and to damage dumps, for the tests of this folder."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.trace import Entry, InMemory, Trace
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors
from reference.config import tiny

CONFIG = tiny()
WORKLOAD = Workload.parse("p:a16+b3 d:a+b m:a2 v:a3 t:a2 d:a")


@cache
def weights() -> dict[str, Tensor]:
    return dict(synthetic_tensors(CONFIG))


@cache
def recorded(line: str = WORKLOAD.text(), dtype: torch.dtype = torch.float32) -> Trace:
    return traced(ReferenceRunner(CONFIG, weights(), dtype), Workload.parse(line))


def edited(trace: Trace, edit: Callable[[str, Tensor], dict[str, Tensor]]) -> Trace:
    """The same rows under other names: `edit(name, value)` gives what stands in place of each tensor."""
    return Trace(
        [
            Entry(name, entry.request, entry.action, entry.kind, entry.positions, InMemory(value))
            for entry in trace.entries()
            for name, value in edit(entry.name, entry.source.load()).items()
        ],
        "foreign",
    )


def split_lanes(x: Tensor, stop: int | None = None) -> Tensor:
    """Rope pairs as [even | odd], of the first `stop` lanes."""
    rotated, rest = (x, x[..., :0]) if stop is None else (x[..., :stop], x[..., stop:])
    return torch.cat((rotated[..., 0::2], rotated[..., 1::2], rest), dim=-1)


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def same(left: Trace, right: Trace) -> bool:
    """The same names, requests, keys, dtypes and bytes."""
    pairs = [(name, request) for name in left.names() for request in left.requests(name)]
    if left.names() != right.names() or any(left.requests(name) != right.requests(name) for name in left.names()):
        return False
    tables = ((left.table(*pair), right.table(*pair)) for pair in pairs)
    return all(
        a.keys == b.keys and a.values.dtype == b.values.dtype and torch.equal(a.values, b.values) for a, b in tables
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The path of every value in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> str:
    """A JSON document in which one to three values are something else, or gone."""
    document = json.loads(content)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from([place for place in places(document) if place]))
        target = document
        for step in parents:
            target = target[step]
        if draw(st.booleans()):
            target[last] = draw(JSON)
        else:
            del target[last]
    return json.dumps(document)
