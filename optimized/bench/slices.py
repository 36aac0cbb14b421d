"""Whole steps of the four-layer slice with its head: time on the GPU, wall time, the host's share, number of kernels.

The slice has every kind of layer: full + dense, full + MoE, two sliding + MoE, at released geometry. What runs it is
given as `make_step(shape)`, which returns a call that does one step, so any engine can be measured; the benchmark
itself knows only floors and clocks.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimized.bench.floors import Ceilings
from optimized.bench.records import StepRow
from optimized.bench.run import Progress, reason
from optimized.bench.text_floors import decode_floors, prefill_floors
from reference.config import NoteConfig, TextConfig, slice_of

# Layers of the released model: full + dense, full + MoE, sliding + MoE twice.
SLICE_LAYERS = (0, 1, 2, 3)
WARM_UP_RUNS = 2
TIMED_STEPS = 10
# Kernels that are listed by name.
SLOWEST = 12


@dataclass(frozen=True)
class StepShape:
    """A decode step of `batch` requests that have seen `context` tokens; or, `batch` = 0, a prompt of that length.

    `eager`: every kernel of a decode step is launched; otherwise the step is recorded and replayed.
    """

    batch: int
    context: int
    eager: bool = False

    @property
    def name(self) -> str:
        if not self.batch:
            return f"prefill {self.context}"
        return f"decode {self.batch} x {self.context}{', eager' if self.eager else ''}"

    def floor_us(self, config: TextConfig, ceilings: Ceilings) -> float:
        """Slice and head; a prompt needs the head for its last token alone."""
        if self.batch:
            floors = decode_floors(config, self.batch, self.context, ceilings)
            return floors.slice + floors.head
        return prefill_floors(config, self.context, ceilings).slice + decode_floors(config, 1, 1, ceilings).head


@dataclass(frozen=True)
class Steps:
    """`run()` does `count` steps one behind the other; `reset()` brings back what it began with, and is not timed."""

    run: Callable[[], Any]
    count: int = 1
    reset: Callable[[], Any] = lambda: None


MakeStep = Callable[[StepShape], Steps]

STEP_SHAPES = (
    *(StepShape(batch, 4096) for batch in (1, 16, 64, 256)),
    *(StepShape(batch, 4096, eager=True) for batch in (1, 64)),
    StepShape(1, 131072),
    StepShape(64, 32768),
    StepShape(0, 4096),
    StepShape(0, 16384),
)


def slice_config(config: NoteConfig) -> NoteConfig:
    """The four layers as a model of their own."""
    return slice_of(config, SLICE_LAYERS)


def measure_steps(
    make_step: MakeStep,
    config: TextConfig,
    ceilings: Ceilings,
    shapes: Iterable[StepShape] = STEP_SHAPES,
    progress: Progress = lambda line: None,
) -> list[StepRow]:
    """A shape that cannot run, for memory or because it is not supported, gives a row that says why."""
    rows = []
    for shape in shapes:
        progress(shape.name)
        floor_us = shape.floor_us(config, ceilings)
        try:
            rows.append(measure_step(shape.name, make_step(shape), floor_us))
        except Exception as error:  # an engine, a compiler or memory; the table has a place for all of them
            rows.append(StepRow(shape.name, floor_us, why=reason(error)))
        torch.cuda.empty_cache()
    return rows


def measure_step(name: str, steps: Steps, floor_us: float) -> StepRow:
    """Of one step, medians of several runs. Wall and host time are taken without the profiler, which slows the host.

    host_us: until the call returns; a call that hands out tokens waits for the device once. wall_us: until the device
    is done. gpu_us: sum of the times of the step's kernels, copies and fills, from torch.profiler; graph replays
    included.
    """
    for _ in range(WARM_UP_RUNS):
        steps.run()
        steps.reset()
    torch.cuda.synchronize()
    runs = max(2, TIMED_STEPS // steps.count)
    host, wall = zip(*(_host_and_wall_us(steps) for _ in range(runs)), strict=True)
    kernels = kernel_times(steps, runs)
    return StepRow(
        name,
        floor_us,
        gpu_us=sum(us for _, us in kernels) / (runs * steps.count),
        wall_us=statistics.median(wall),
        host_us=statistics.median(host),
        kernels=round(len(kernels) / (runs * steps.count)),
        slowest=slowest(kernels, runs * steps.count),
    )


def kernel_times(steps: Steps, runs: int) -> list[tuple[str, float]]:
    """Name and microseconds of everything that ran on the device during `runs` runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(runs):
            steps.run()
            steps.reset()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return [(event.name, event.time_range.elapsed_us()) for event in profiler.events() if event.device_type == device]


def slowest(kernels: Sequence[tuple[str, float]], steps: int, most: int = SLOWEST) -> tuple[tuple[str, float], ...]:
    """The names that take most of a step, with their microseconds in one step."""
    total: defaultdict[str, float] = defaultdict(float)
    for name, us in kernels:
        total[name] += us / steps
    return tuple(sorted(total.items(), key=lambda item: -item[1])[:most])


def _host_and_wall_us(steps: Steps) -> tuple[float, float]:
    """Of one step of a run."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    steps.run()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    steps.reset()
    return 1e6 * (issued - start) / steps.count, 1e6 * (done - start) / steps.count
