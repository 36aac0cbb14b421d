"""Runs the faults of the vision tower against its comparison; see `verify`, which does so for the text model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parity.faults.fault import Fault
from parity.faults.verify import Mode, Outcome
from parity.findings import ProbeResult
from parity.runners.reference_vision import VisionReferenceRunner, run_case
from parity.schema_vision import vision_pattern_of
from parity.vision_case import VisionCase
from parity.vision_compare import VisionComparison, compare_vision, compare_vision_exact
from reference.config import NoteConfig


class VisionOutcome(Outcome):
    @property
    def is_as_expected(self) -> bool:
        """Detected where the catalogue says so, silent where it says so."""
        if self.fault.visibility in ("I", "R"):
            return not self.is_detected
        return self.first is not None and vision_pattern_of(self.first) in self.fault.first


def verify_vision(
    fault: Fault, config: NoteConfig, weights: Mapping[str, Tensor], cases: Sequence[VisionCase]
) -> VisionOutcome:
    """Try the cases in order until one shows the fault."""
    modes: tuple[Mode, ...] = ("float32", "float64") if fault.visibility == "N" else ("float64",)
    for mode in modes:
        for case in cases:
            first = _compared(fault, config, weights, case, mode).first
            if first is not None:
                error = first.error if isinstance(first, ProbeResult) else first.exchange.gap
                return VisionOutcome(fault, mode, case, first.name, error)
    return VisionOutcome(fault, None, None, None, 0.0)


def _compared(
    fault: Fault, config: NoteConfig, weights: Mapping[str, Tensor], case: VisionCase, mode: Mode
) -> VisionComparison:
    assert config.vision
    port = VisionReferenceRunner(config, weights, getattr(torch, mode), faults=(fault,))
    values = run_case(port, config.vision, case)

    def reference(dtype: torch.dtype) -> VisionReferenceRunner:
        return VisionReferenceRunner(config, weights, dtype)

    if mode == "float64":
        return compare_vision_exact(reference, values, case)
    return compare_vision(reference, values, torch.float32, case, ("pinpoint",))
