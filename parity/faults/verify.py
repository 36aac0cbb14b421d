"""Runs the catalogue against the harness: each visible fault must be detected, each invisible one must not.

Logic is judged in float64, where the only limit is 1e-10. Faults of precision (class N) are judged in a float32 run,
against the measured floor, operation by operation; those that are below its noise too, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from parity.compare import compare, compare_exact
from parity.faults.fault import Fault
from parity.findings import ChoiceResult, Comparison, ProbeResult
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.schema import pattern_of
from parity.sweep import boundary_workloads
from parity.workload import Case, Workload
from reference.checkpoint import synthetic_tensors
from reference.config import NoteConfig, tiny

Mode = Literal["float64", "float32"]


@dataclass(frozen=True)
class Outcome:
    """What the harness saw of one fault. `first` is the name at which it first showed; None where it did not."""

    fault: Fault
    mode: Mode | None
    workload: Case | None
    first: str | None
    error: float

    @property
    def is_detected(self) -> bool:
        return self.first is not None

    @property
    def is_as_expected(self) -> bool:
        """Detected where the catalogue says so, silent where it says so."""
        if self.fault.visibility in ("I", "R"):
            return not self.is_detected
        return self.first is not None and pattern_of(self.first) in self.fault.first


def verify(fault: Fault, config: NoteConfig, weights: Mapping[str, Tensor], workloads: Sequence[Workload]) -> Outcome:
    """Try the workloads in order until one shows the fault."""
    modes: tuple[Mode, ...] = ("float32", "float64") if fault.visibility == "N" else ("float64",)
    for mode in modes:
        for workload in workloads:
            first = _owed(fault, _compared(fault, config, weights, workload, mode)).first
            if first is not None:
                return Outcome(fault, mode, workload, first.name, _error(first))
    return Outcome(fault, None, None, None, 0.0)


def verify_tiny(faults: Sequence[Fault], progress: Callable[[str], None] = lambda line: None) -> list[Outcome]:
    """Each fault on the tiny synthetic model, over the boundary workloads."""
    config = tiny()
    weights = dict(synthetic_tensors(config))
    outcomes = []
    for number, fault in enumerate(faults, 1):
        progress(f"fault {number} of {len(faults)}: {fault.id}")
        outcomes.append(verify(fault, config, weights, boundary_workloads(config.text)))
    return outcomes


def _owed(fault: Fault, comparison: Comparison) -> Comparison:
    """Without the probes at which the fault may differ with no consequence."""
    probes = tuple(result for result in comparison.probes if pattern_of(result.name) not in fault.hides_in)
    return replace(comparison, probes=probes)


def _compared(
    fault: Fault, config: NoteConfig, weights: Mapping[str, Tensor], workload: Workload, mode: Mode
) -> Comparison:
    port = ReferenceRunner(config, weights, getattr(torch, mode), faults=(fault,))
    trace = traced(port, workload)

    def reference(dtype: torch.dtype) -> ReferenceRunner:
        return ReferenceRunner(config, weights, dtype)

    if mode == "float64":
        return compare_exact(reference, trace, workload)
    return compare(reference, trace, torch.float32, workload, views=("pinpoint",))


def _error(result: ProbeResult | ChoiceResult) -> float:
    return result.error if isinstance(result, ProbeResult) else result.exchange.gap
