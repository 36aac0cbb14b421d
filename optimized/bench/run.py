"""Runs cases: check first, then time the op and its peers in the same process on the same inputs.

A red check gives a row without a time. What cannot run gives a row that says why; the others go on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from optimized.bench.case import AbsentPeer, Case, Inputs, Peer
from optimized.bench.floors import Ceilings, floor_of_all
from optimized.bench.judge import judge, relative_error
from optimized.bench.records import OpRow, PeerTime
from optimized.bench.timing import Timer, Timing

Progress = Callable[[str], None]

# Reasons are printed one a line.
REASON_LENGTH = 160


def run_cases(
    cases: Iterable[Case],
    given: Inputs,
    ceilings: Ceilings,
    timer: Timer,
    progress: Progress = lambda line: None,
) -> list[OpRow]:
    rows = []
    for case in cases:
        progress(f"{case.op} {case.shape}")
        rows.append(run_case(case, given, ceilings, timer))
        gc.collect()
        if given.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def run_case(case: Case, given: Inputs, ceilings: Ceilings, timer: Timer) -> OpRow:
    """Never raises for what a kernel or a package does wrong: the row says it."""
    least = floor_of_all(case.pieces, ceilings)
    choices = given.ops(case.packages).choices
    backend = " ".join(sorted({choices[op].backend for op in case.uses})) or "cuBLAS"
    fields: dict[str, Any] = {
        "op": case.op,
        "shape": case.shape,
        "backend": backend,
        "bytes": sum(work.bytes for work in case.pieces),
        "flops": sum(work.flops for work in case.pieces),
        "floor_us": least.us,
        "bound": least.bound,
    }
    try:
        problem = case.build(given)
        triples = problem.check(problem.ours())
        agreement = judge(triples)
    except Exception as error:  # a kernel, a compiler or memory; the table has a place for all of them
        return OpRow(**fields, why=reason(error))
    fields["agreement"] = agreement
    if not agreement.is_green:
        return OpRow(**fields, why=f"check is red: {agreement.why}"[:REASON_LENGTH])
    truth = triples[0].truth
    del triples
    try:
        us, timing = _timed(problem.ours, case.timing, timer)
    except Exception as error:
        return OpRow(**fields, why=reason(error))
    peers = tuple(_peer_time(peer, truth, case.timing, timer) for peer in problem.peers)
    return OpRow(**fields, us=us, timing=timing, peers=peers)


def _peer_time(peer: Peer | AbsentPeer, truth: torch.Tensor, timing: Timing, timer: Timer) -> PeerTime:
    if isinstance(peer, AbsentPeer):
        return PeerTime(peer.name, why=peer.why[:REASON_LENGTH])
    try:
        error = relative_error(peer.checked(peer.run()), truth)
        # Written so that NaN is refused.
        if not error <= peer.limit:
            return PeerTime(peer.name, error=error, why=f"not trusted: error {error:.1e}, limit {peer.limit:.0e}")
        us, taken = _timed(peer.run, "events" if peer.waits else timing, timer)
    except Exception as failure:
        return PeerTime(peer.name, why=reason(failure))
    return PeerTime(peer.name, us, error, taken)


def _timed(call: Callable[[], Any], timing: Timing, timer: Timer) -> tuple[float, Timing]:
    """As asked; between events where a graph cannot hold the call, which a decode step could not use as it is."""
    if timing == "graph":
        try:
            return timer(call, "graph"), "graph"
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
    return timer(call, "events"), "events"


def reason(error: Exception) -> str:
    """Kind and first line of an error, for a cell of a table."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"[:REASON_LENGTH]
