"""The one observation point of the model.

Code that computes a named intermediate writes `x = probe("q_latent", x)`. With nobody listening that returns its
argument, also under `torch.compile`. A listener sees `layers.3.attn.q_latent` (the enclosing `scope`s joined with
dots), together with the request and the absolute positions of the tensor's rows, and may return another tensor:
that is how values are recorded, replayed, isolated and spoilt on purpose.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Which rows of which request the tensors observed now belong to.

    `positions` are absolute and 0-based, one for each row of the tensor (its first dim). `kind` is the step's kind:
    `prefill`, `decode`, `verify` or `draft`.
    """

    request: str
    positions: Tensor
    kind: str


class Listener(Protocol):
    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor: ...


# One process runs one observed model at a time; plain globals keep `probe` traceable by torch.compile.
_listeners: tuple[Listener, ...] = ()
_scopes: tuple[str, ...] = ()
_keeps_scopes = False
_rows: Rows | None = None


def probe(name: str, value: Tensor) -> Tensor:
    """Show `value` to the listeners and return it, or what they put in its place."""
    if not _listeners:
        return value
    full_name = scoped(name)
    for listener in _listeners:
        value = listener.observe(full_name, value, _rows)
    return value


def scoped(name: str) -> str:
    """`name` with the enclosing scopes before it; they are kept while somebody listens, and inside `scopes_kept`."""
    return ".".join((*_scopes, name))


def is_observed() -> bool:
    return bool(_listeners)


def scope(name: str) -> AbstractContextManager[None]:
    """Prefix the names of the probes inside with `name` and a dot."""
    return _set_scope(name) if _listeners or _keeps_scopes else nullcontext()


@contextmanager
def scopes_kept() -> Iterator[None]:
    """Inside, `scoped` knows where it is though nobody listens: for a profile of what runs unobserved."""
    global _keeps_scopes
    before, _keeps_scopes = _keeps_scopes, True
    try:
        yield
    finally:
        _keeps_scopes = before


@contextmanager
def _set_scope(name: str) -> Iterator[None]:
    global _scopes
    before, _scopes = _scopes, (*_scopes, name)
    try:
        yield
    finally:
        _scopes = before


@contextmanager
def rows(request: str, positions: Tensor, kind: str) -> Iterator[None]:
    """Say which rows the tensors observed inside belong to."""
    global _rows
    before, _rows = _rows, Rows(request, positions, kind)
    try:
        yield
    finally:
        _rows = before


def narrowed_rows(block: slice) -> AbstractContextManager[None]:
    """Inside, observed tensors hold only this block of the current rows."""
    if _rows is None:
        return nullcontext()
    return rows(_rows.request, _rows.positions[block], _rows.kind)


@contextmanager
def listening(*listeners: Listener, first: bool = False) -> Iterator[None]:
    """Let `listeners` observe, in this order, every probe inside; behind those already listening, or `first`."""
    global _listeners
    before = _listeners
    _listeners = (*listeners, *before) if first else (*before, *listeners)
    try:
        yield
    finally:
        _listeners = before


@contextmanager
def unobserved() -> Iterator[None]:
    """Inside, nobody listens: for what is shown once as a whole, and not part by part."""
    global _listeners
    before, _listeners = _listeners, ()
    try:
        yield
    finally:
        _listeners = before


@dataclass(frozen=True)
class Observation:
    """One observed tensor: a private copy, and the rows it belongs to (None outside a session)."""

    name: str
    value: Tensor
    rows: Rows | None


class Recorder:
    """Keeps a detached clone of every observed tensor whose name matches one of the glob `patterns`.

    Engines reuse buffers, hence the clone at the moment of observation.
    """

    def __init__(self, patterns: Sequence[str] = ("*",)):
        self._patterns = tuple(patterns)
        self.observations: list[Observation] = []

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns):
            self.observations.append(Observation(name, value.detach().clone(), rows))
        return value

    def values(self, name: str) -> list[Tensor]:
        """All recorded tensors of that exact name, in the order they were computed."""
        return [o.value for o in self.observations if o.name == name]

    def names(self) -> list[str]:
        """Distinct names, in the order of their first observation."""
        return list(dict.fromkeys(o.name for o in self.observations))


class Override:
    """Replaces observed tensors: `replace(value, rows)` gives the new value for names that match the glob `pattern`."""

    def __init__(self, pattern: str, replace: Callable[[Tensor, Rows | None], Tensor]):
        self._pattern = pattern
        self._replace = replace
        self.count = 0

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        if not fnmatch.fnmatchcase(name, self._pattern):
            return value
        self.count += 1
        return self._replace(value, rows)


def concatenated(observations: Iterable[Observation]) -> dict[str, Tensor]:
    """Join the pieces of each name along dim 0. For one request; pieces must agree in their other dims."""
    pieces: dict[str, list[Tensor]] = {}
    for observation in observations:
        pieces.setdefault(observation.name, []).append(observation.value)
    return {name: torch.cat(values) for name, values in pieces.items()}
