"""Steps of few shapes, recorded once and replayed: CUDA graphs over buffers that stay where they are.

A step that runs from the caches alone is padded to a shape: rows and requests to the next bucket, the block table to a
power of two of pages. Its metadata goes to the buffer of that shape, so lengths, ends, rings and block tables of a
replay are those of the step. Padding rows have position -1, no slot and no key; they reach no row of a request.

Uneven batches have many shapes. Some hundred recordings are kept; for a new one that which ran longest ago goes.

Recordings share one memory pool: a run may write where another shape's results lie. So whoever keeps a result copies it
before the next run, in the same turn: a turn waits on the device for the one before it, on whatever stream that was.

Where there are no CUDA graphs a recording is the function itself, called again: the same buffers, padding and order.
Source: performance specification, section 6; cases C38, C39 and C41.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from optimized.errors import NotSupportedError, PlanError
from optimized.observe import BatchObserver, Segment
from optimized.step import DeviceStep, StepPlan, Uploader, upload_bytes
from reference.probe import is_observed, scoped

Output = TypeVar("Output")

# Even batches of up to 512 requests take 23 buckets of rows, each with several sizes of block table.
MOST_RECORDINGS = 256
# Powers of two, 24, and from 32 on four to an octave: padding costs bandwidth where rows route to experts.
BUCKETS = (1, 2, 4, 8, 16, *range(24, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 513, 64))


def bucket(count: int) -> int | None:
    """The smallest bucket that holds `count`; None beyond the largest."""
    return next((size for size in BUCKETS if size >= count), None)


@dataclass(frozen=True)
class Shape:
    """Rows and requests that a step is padded to, and the tokens that a block table has room for at least."""

    rows: int
    requests: int
    tokens: int = 0


def shape_of(counts: Sequence[int], most_rows: int) -> Shape | None:
    """The shape for items of `counts` tokens; None if it would have more rows than `most_rows` or the largest bucket.

    Items of one size get as many rows as that many requests take, so that 1 + d tokens each need no further padding.
    """
    requests = bucket(len(counts))
    if requests is None:
        return None
    longest = max(counts)
    rows = requests * longest if sum(counts) == longest * len(counts) else bucket(sum(counts))
    return Shape(rows, requests) if rows is not None and rows <= min(most_rows, BUCKETS[-1]) else None


def one_shape(requests: int, most_decoded: int, most_rows: int, tokens: int) -> Shape:
    """The shape that every step of up to `requests` requests fits in.

    Raises: NotSupportedError if that is more rows than a step may have.
    """
    needed, most_rows = requests * most_decoded, min(most_rows, BUCKETS[-1])
    rows = bucket(needed) or needed
    if rows > most_rows:
        raise NotSupportedError(
            f"batch_invariant: every step takes the {needed} rows of {requests} requests with {most_decoded} tokens "
            f"each, padded to {rows}, and at most {most_rows} fit in one; allow fewer requests or drafts"
        )
    return Shape(rows, requests, tokens)


class Turns:
    """`with turns.next():` what is queued inside begins when what the turn before has queued is done, on any stream.

    The host waits for nothing. Where there are no streams there is nothing to do.
    """

    def __init__(self, device: torch.device):
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    @contextmanager
    def next(self) -> Iterator[None]:
        if self._done is None:
            yield
            return
        torch.cuda.current_stream().wait_event(self._done)
        try:
            yield
        finally:
            self._done.record()


class StaticProbes(BatchObserver):
    """Observes a recorded run: keeps copies that every replay fills, to be shown under the step's own requests."""

    def __init__(self) -> None:
        super().__init__(())
        self._copies: list[tuple[str, Tensor, Callable[[Tensor, Segment], Tensor]]] = []

    def __call__(
        self,
        name: str,
        value: Tensor,
        of_segment: Callable[[Tensor, Segment], Tensor] = lambda piece, segment: piece,
    ) -> Tensor:
        self._copies.append((scoped(name), value.clone(), of_segment))
        return value

    def only(
        self,
        name: str,
        value: Tensor,
        of_segment: Callable[[Tensor, Segment], Tensor] = lambda piece, segment: piece,
    ) -> None:
        self(name, value, of_segment)

    def clear(self) -> None:
        self._copies.clear()

    def show(self, segments: Sequence[Segment]) -> None:
        """Raises: NotSupportedError if a listener wants to replace what has been computed with already."""
        observer = BatchObserver(segments)
        for name, copy, of_segment in self._copies:
            if observer(name, copy, of_segment) is not copy:
                raise NotSupportedError(
                    f"{name!r} was computed by a recorded step and cannot be replaced: graphs=False"
                )


@dataclass(frozen=True)
class Recording(Generic[Output]):
    """One shape: where its metadata goes, what it shows, and how it runs again."""

    metadata: Tensor
    step: DeviceStep
    probes: StaticProbes
    replay: Callable[[], Output]


class Recorder(Generic[Output]):
    """Recordings of one model by key, on one device, `most` at a time; `kept` tensors hold values from run to run.

    Raises: PlanError for none at a time.
    """

    def __init__(self, uploader: Uploader, kept: Sequence[Tensor], most: int = MOST_RECORDINGS):
        if most < 1:
            raise PlanError(f"recordings: expected 1 or more to be kept, found {most}")
        self._uploader, self._kept, self._most = uploader, tuple(kept), most
        self._recordings: dict[Hashable, Recording[Output]] = {}
        self._is_cuda = uploader.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None

    @property
    def recordings(self) -> tuple[Recording[Output], ...]:
        return tuple(self._recordings.values())

    def run(
        self, key: Hashable, plan: StepPlan, function: Callable[[DeviceStep, BatchObserver], Output]
    ) -> tuple[DeviceStep, StaticProbes, Output]:
        """Run `function` on the plan, from its recording if there is one. Plans of one key have one shape.

        What it returns is good until the next run, of whichever key.
        """
        recording = self._recordings.pop(key, None)
        if recording is None:
            recording = self._recorded(plan, function)
        else:
            self._uploader.send(plan, recording.metadata)
        # The last to have run is the last in order. One goes behind the new one: the pool needs a graph to live.
        self._recordings[key] = recording
        if len(self._recordings) > self._most:
            self._forget_oldest()
        return recording.step, recording.probes, recording.replay()

    def _forget_oldest(self) -> None:
        """Its graph may still run, on another stream; nobody gets its metadata's memory before this turn begins."""
        recording = self._recordings.pop(next(iter(self._recordings)))
        if self._is_cuda:
            recording.metadata.record_stream(torch.cuda.current_stream())

    def _recorded(self, plan: StepPlan, function: Callable[[DeviceStep, BatchObserver], Output]) -> Recording[Output]:
        metadata = torch.empty(upload_bytes(plan), dtype=torch.uint8, device=self._uploader.device)
        step = self._uploader.upload(plan, metadata)
        probes = StaticProbes()
        see = probes if is_observed() else BatchObserver(())
        if not self._is_cuda:

            def again() -> Output:
                probes.clear()
                return function(step, see)

            return Recording(metadata, step, probes, again)
        # The warm-up compiles, and writes the very cache rows that the first replay writes again.
        before = [tensor.clone() for tensor in self._kept]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function(step, see)
        torch.cuda.current_stream().wait_stream(side)
        probes.clear()
        graph = torch.cuda.CUDAGraph()
        # A collection inside of the capture could free graphs, which no capture allows.
        gc.collect()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            output = function(step, see)
        for tensor, value in zip(self._kept, before, strict=True):
            tensor.copy_(value)

        def replay() -> Output:
            graph.replay()
            return output

        return Recording(metadata, step, probes, replay)
