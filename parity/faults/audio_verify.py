"""Runs the audio faults against the harness, as `verify` runs those of the text.

Logic is judged in float64, where the limit is 1e-10. Faults of precision (class N) are judged in a float32 run, against
the measured floor, operation by operation; those below its noise too, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.audio_clips import ClipWorkload
from parity.audio_compare import compare_audio, first_different, traced_clips
from parity.faults.fault import Fault
from parity.faults.verify import Mode
from parity.findings import ProbeResult
from parity.runners.reference_audio import ReferenceAudio
from parity.schema_audio import audio_pattern_of
from reference.config import NoteConfig


@dataclass(frozen=True)
class AudioOutcome:
    """What the harness saw of one fault. `first` is the name at which it first showed; None where it did not."""

    fault: Fault
    mode: Mode | None
    workload: ClipWorkload | None
    first: str | None

    @property
    def is_as_expected(self) -> bool:
        """Detected where the catalogue says so, silent where it says so."""
        if self.fault.visibility in ("I", "R"):
            return self.first is None
        return self.first is not None and audio_pattern_of(self.first) in self.fault.first


def verify_audio(
    fault: Fault, config: NoteConfig, weights: Mapping[str, Tensor], workloads: Sequence[ClipWorkload]
) -> AudioOutcome:
    """Try the workloads in order until one shows the fault."""
    modes: tuple[Mode, ...] = ("float32", "float64") if fault.visibility == "N" else ("float64",)
    for mode in modes:
        for workload in workloads:
            first = _first(fault, config, weights, workload, mode)
            if first is not None:
                return AudioOutcome(fault, mode, workload, first.name)
    return AudioOutcome(fault, None, None, None)


def _first(
    fault: Fault, config: NoteConfig, weights: Mapping[str, Tensor], workload: ClipWorkload, mode: Mode
) -> ProbeResult | None:
    trace = traced_clips(ReferenceAudio(config, weights, getattr(torch, mode), faults=(fault,)), workload)

    def reference(dtype: torch.dtype) -> ReferenceAudio:
        return ReferenceAudio(config, weights, dtype)

    if mode == "float64":
        found = compare_audio(reference, trace, torch.float64, workload, ("cascade",), draws=0)
    else:
        found = compare_audio(reference, trace, torch.float32, workload, ("pinpoint",))
    return first_different(found)
