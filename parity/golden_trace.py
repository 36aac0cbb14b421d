"""A golden seen as a trace: its true rows, sorted into the steps of its workload, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from parity.golden_file import Golden
from parity.plain_steps import PlainStep, plain_steps
from parity.trace import Entry, Trace
from parity.workload import Draft, Step


@dataclass(frozen=True)
class GoldenRows:
    """Some rows of one table of a golden."""

    golden: Golden
    name: str
    request: str
    start: int
    stop: int

    def load(self) -> Tensor:
        return self.golden.rows(self.name, self.request, self.start, self.stop)


def golden_trace(golden: Golden) -> Trace:
    """The truths and the chosen ids of a golden; router weights are in the order of ascending ids."""
    steps: dict[str, list[tuple[int, PlainStep]]] = {}
    for action, step in numbered_steps(golden):
        steps.setdefault(step.request, []).append((action, step))
    entries = [
        entry
        for name in golden.names()
        for request in golden.requests(name)
        for entry in _entries(golden, name, request, steps.get(request, ()))
    ]
    return Trace(entries, f"golden {golden.folder.name}")


def numbered_steps(golden: Golden) -> Iterator[tuple[int, PlainStep]]:
    """The steps of all requests, each with the index of its action in the workload."""
    workload = golden.workload
    steps = plain_steps(workload, golden.vocab_size)
    for index, action in enumerate(workload.actions):
        count = len(action.items) if isinstance(action, Step) else int(isinstance(action, Draft))
        for step in islice(steps, count):
            yield index, step


def _entries(golden: Golden, name: str, request: str, steps: Sequence[tuple[int, PlainStep]]) -> Iterator[Entry]:
    """Rows are stored in the order of computation: each step takes those that follow and are its own."""
    keys = golden.keys(name, request)
    start = 0
    for action, step in steps:
        own = set(step.positions_of(name))
        stop = start
        while stop < len(keys) and keys[stop][0] in own:
            own.remove(keys[stop][0])
            stop += 1
        if stop > start:
            positions = tuple(position for position, _ in keys[start:stop])
            yield Entry(name, request, action, step.kind, positions, GoldenRows(golden, name, request, start, stop))
        start = stop
    if start < len(keys):
        positions = tuple(position for position, _ in keys[start:])
        last = steps[-1][0] if steps else 0
        yield Entry(name, request, last, "prefill", positions, GoldenRows(golden, name, request, start, len(keys)))
