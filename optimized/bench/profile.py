"""Where the time of a recorded decode step goes: its kernels by layer and probe.

A replay has no Python in it, so a kernel there has no place. The same step is run eagerly once with a mark wherever a
probe is passed: a kernel belongs to the first probe behind its launch, which it helps to make. The replay's kernels are
those of the eager run in the same order; their times are the replay's.
Source: performance specification, section 7.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimized.bench.records import BenchError
from optimized.observe import BatchObserver, Segment
from reference.probe import scoped, scopes_kept

MARK = "probe "
REPLAYS = 5
# What stands behind the last probe: the choice of tokens.
REST = "behind the last probe"


@dataclass(frozen=True)
class Launch:
    """A kernel on the device, `us` long; `issued_us`: when the host asked for it, on the trace's clock."""

    name: str
    us: float
    issued_us: float
    started_us: float


@dataclass(frozen=True)
class Spent:
    """Kernels of one step that belong to one probe, by name, with their microseconds."""

    probe: str
    kernels: tuple[tuple[str, float], ...]

    @property
    def us(self) -> float:
        return sum(us for _, us in self.kernels)


class ProbeMarks(BatchObserver):
    """Leaves a mark in the profiler's trace for each probe that is passed."""

    def __init__(self) -> None:
        super().__init__(())

    def __call__(
        self,
        name: str,
        value: Tensor,
        of_segment: Callable[[Tensor, Segment], Tensor] = lambda piece, segment: piece,
    ) -> Tensor:
        with torch.profiler.record_function(MARK + scoped(name)):
            return value

    def only(
        self,
        name: str,
        value: Tensor,
        of_segment: Callable[[Tensor, Segment], Tensor] = lambda piece, segment: piece,
    ) -> None:
        self(name, value, of_segment)


def profile_step(eager: Callable[[BatchObserver], Any], replay: Callable[[], Any]) -> list[Spent]:
    """`eager(see)` and `replay()` run the same step. Times are means over a few replays.

    Raises: BenchError if the two do not launch the same number of kernels.
    """
    eager(BatchObserver(()))
    marks = ProbeMarks()
    with scopes_kept():
        found = traced(lambda: eager(marks))
    places = places_of(launches(found), marks_of(found))
    replayed = launches(traced(lambda: [replay() for _ in range(REPLAYS)]))
    if len(replayed) != REPLAYS * len(places):
        raise BenchError(
            f"the step launches {len(places)} kernels eagerly and {len(replayed) / REPLAYS:g} in a replay: their "
            f"places cannot be told"
        )
    return spent(places, [replayed[first :: len(places)] for first in range(len(places))])


def places_of(kernels: Sequence[Launch], marks: Sequence[tuple[float, str]]) -> list[str]:
    """The probe of each kernel, in the order on the device. `marks`: time and name, ascending."""
    places = []
    for kernel in kernels:
        places.append(next((name for time, name in marks if time >= kernel.issued_us), REST))
    return places


def spent(places: Sequence[str], runs: Sequence[Sequence[Launch]]) -> list[Spent]:
    """By probe in the order of first use; `runs` are the launches of each kernel of the step in several replays."""
    by_place: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for place, kernel in zip(places, runs, strict=True):
        by_place[place].append((kernel[0].name, sum(launch.us for launch in kernel) / len(kernel)))
    return [Spent(place, tuple(kernels)) for place, kernels in by_place.items()]


def traced(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The profiler's events while `call` ran, in the form of a Chrome trace."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def launches(events: Sequence[dict[str, Any]]) -> list[Launch]:
    """Kernels, copies and fills on the device by their start, but for copies from the host: those carry metadata."""
    issued = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found = [
        Launch(event["name"], event["dur"], issued.get(event["args"].get("correlation"), 0.0), event["ts"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "HtoD" not in event["name"]
    ]
    return sorted(found, key=lambda launch: launch.started_us)


def marks_of(events: Sequence[dict[str, Any]]) -> list[tuple[float, str]]:
    """When each probe was passed, and its name."""
    return sorted(
        (event["ts"], event["name"].removeprefix(MARK))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)
    )


def profile_lines(found: Sequence[Spent]) -> list[str]:
    """A line for each probe, its kernels behind it, and the sum."""
    total = sum(part.us for part in found)
    lines = [f"{total:9.1f} us in {sum(len(part.kernels) for part in found)} kernels"]
    for part in found:
        kernels = ", ".join(f"{name.split('(')[0].split('<')[0][-40:]} {us:.1f}" for name, us in part.kernels)
        lines.append(f"{part.us:9.1f} us {100 * part.us / total:5.1f} %  {part.probe:34}  {kernels}")
    return lines
