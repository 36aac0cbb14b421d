"""How long a call takes on the GPU, cold: the L2 cache is cleared before each run, the median of many is reported.

events   the call issued from Python between two events: what a prefill pays; a short op pays for its launch as well
graph    one replay of a CUDA graph that holds the call: what a decode step pays, host work excluded

Small products look two to three times their floor when cold. That is their situation inside a model, where the weights
of a layer were last read a whole step ago. Source: performance specification, sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, Literal

import torch

Timing = Literal["graph", "events"]
Timer = Callable[[Callable[[], Any], Timing], float]

# More than any L2 cache on the way: writing this much leaves nothing of an op's inputs in it.
CACHE_CLEARING_BYTES = 256 << 20
WARM_UP_RUNS = 3
# A call this many times longer than what is spent on a call is run this often, and the cache is of no account.
LONG, LONG_RUNS = 5, 3


class ColdTimer:
    """`timer(call, timing)` is the median time of `call()` in microseconds; `budget_ms` bounds what is spent on one."""

    def __init__(self, budget_ms: float = 60.0, most_runs: int = 200):
        self.budget_ms, self.most_runs = budget_ms, most_runs
        self._clearing = torch.empty(CACHE_CLEARING_BYTES, dtype=torch.int8, device="cuda")

    def __call__(self, call: Callable[[], Any], timing: Timing) -> float:
        if timing == "events":
            from triton.testing import do_bench

            call()
            if (first_ms := _run_ms(call)) > LONG * self.budget_ms:
                return 1e3 * median([first_ms, *(_run_ms(call) for _ in range(LONG_RUNS - 1))])
            return 1e3 * do_bench(call, warmup=int(self.budget_ms / 4), rep=int(self.budget_ms), return_mode="median")
        return self.replays_us(captured(call))

    def replays_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Median of one replay."""
        estimate_ms = self._replay_ms(graph, WARM_UP_RUNS)[-1]
        runs = max(5, min(self.most_runs, int(self.budget_ms / max(estimate_ms, 0.1))))
        return 1e3 * median(self._replay_ms(graph, runs))

    def _replay_ms(self, graph: torch.cuda.CUDAGraph, runs: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for start, stop in pairs:
            self._clearing.zero_()
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]


def _run_ms(call: Callable[[], Any]) -> float:
    """One run between two events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The call as a graph, after warm-up runs on a side stream in which kernels compile and workspaces appear.

    Raises: RuntimeError if the call waits for the device or does something else that a graph cannot hold.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_RUNS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
