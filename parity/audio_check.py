"""Does the audio side of the reference agree with another, from waveform to embeddings, on one checkpoint?

The same levels as the text's check: `exact` (all rounding promoted to float64, features included; limit 1e-10),
`float32` and `bfloat16` (limit: the measured floor). Against transformers under `Numerics.transformers`; against the
optimized tower under the default, `exact` with its torch twins in float64. A clip is decoded, mixed and resampled once
for both; everything behind that is each side's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from optimized.device import Backend
from parity.audio_clips import ClipWorkload, boundary_clips
from parity.audio_compare import AudioReference, AudioSide, compare_audio, traced_clips
from parity.audio_strategies import drawn_clips
from parity.check import LEVELS, CheckReport, Level, Run
from parity.findings import View
from parity.runners.optimized_audio import OptimizedAudio
from parity.runners.reference_audio import ReferenceAudio
from parity.runners.transformers_audio import TransformersAudio
from reference.audio import tiny_audio
from reference.checkpoint import write_synthetic
from reference.checkpoint.load_audio import PREFIX, load_audio_encoder
from reference.config import NoteConfig, tiny
from reference.numerics import Numerics


def tiny_with_audio() -> NoteConfig:
    """The tiny text model with the tiny speech encoder."""
    return replace(tiny(), audio=tiny_audio())


@contextmanager
def synthetic_audio_checkpoint(seed: int = 0) -> Iterator[Path]:
    """`tiny_with_audio` as a released-layout folder, for as long as the context lasts."""
    with TemporaryDirectory(prefix="note-parity-") as parent:
        folder = Path(parent) / "tiny-audio"
        write_synthetic(folder, tiny_with_audio(), seed, shards=2)
        yield folder


def check_audio(
    folder: str | Path,
    workloads: Sequence[ClipWorkload] | None = None,
    levels: Sequence[Level] = LEVELS,
    drawn: int = 0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Embed `workloads`, or the boundary clips and `drawn` random ones, at each level.

    Raises: CheckpointError, ConfigError for the folder; RunnerUnavailable without transformers.
    """
    numerics = Numerics.preset("transformers")
    config, weights, workloads = _given(folder, numerics, workloads, drawn, seed)

    def candidate(level: Level) -> AudioSide:
        if level == "exact":
            return TransformersAudio(folder, torch.float64, exact_mode=True)
        return TransformersAudio(folder, getattr(torch, level))

    # Foreign code rounds where its authors wrote so: only `exact` takes that away.
    reference = _reference(config, weights, numerics, is_promoted=True)
    return check_audio_sides(reference, candidate, workloads, levels, progress)


def check_audio_optimized(
    folder: str | Path,
    workloads: Sequence[ClipWorkload] | None = None,
    levels: Sequence[Level] = LEVELS,
    drawn: int = 0,
    seed: int = 0,
    device: str = "cpu",
    backend: Backend | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """The same for the optimized tower, with features that it computes itself.

    Raises: CheckpointError, ConfigError for the folder; RunnerUnavailable for a device or backend that is not here.
    """
    numerics = Numerics()
    config, weights, workloads = _given(folder, numerics, workloads, drawn, seed)

    def candidate(level: Level) -> AudioSide:
        if level == "exact":
            return OptimizedAudio(config, weights, torch.float64, device, "torch")
        return OptimizedAudio(config, weights, getattr(torch, level), device, backend)

    reference = _reference(config, weights, numerics, is_promoted=False)
    return check_audio_sides(reference, candidate, workloads, levels, progress)


def _given(
    folder: str | Path, numerics: Numerics, workloads: Sequence[ClipWorkload] | None, drawn: int, seed: int
) -> tuple[NoteConfig, dict[str, Tensor], Sequence[ClipWorkload]]:
    """Config and weights of a folder by released names, and what is to be embedded."""
    encoder = load_audio_encoder(folder, numerics, dtype=None)
    weights = {PREFIX + name: tensor for name, tensor in encoder.state_dict().items()}
    config = NoteConfig.from_json(Path(folder) / "config.json")
    if workloads is None:
        workloads = (*boundary_clips(encoder.config), *drawn_clips(encoder.config, drawn, seed))
    return config, weights, workloads


def _reference(
    config: NoteConfig, weights: dict[str, Tensor], numerics: Numerics, is_promoted: bool
) -> Callable[[Level], AudioReference]:
    """`is_promoted`: at the level `exact`, what is float32 in every model (angles) becomes float64 as well."""

    def reference(level: Level) -> AudioReference:
        return lambda dtype: ReferenceAudio(config, weights, dtype, numerics, is_promoted and level == "exact")

    return reference


def check_audio_sides(
    reference: Callable[[Level], AudioReference],
    candidate: Callable[[Level], AudioSide],
    workloads: Sequence[ClipWorkload],
    levels: Sequence[Level] = LEVELS,
    progress: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Run every workload at every level. `reference(level)` gives the reference of that level in any dtype."""
    runs, name = [], ""
    for level in levels:
        side = candidate(level)
        name = side.name
        for number, workload in enumerate(workloads, 1):
            progress(f"{level}: workload {number} of {len(workloads)}: {workload.text()}")
            trace = traced_clips(side, workload)
            if level == "exact":
                found = compare_audio(reference(level), trace, torch.float64, workload, ("cascade",), draws=0)
            else:
                # Each part from its own input is the sharper test; how error grows over depth is shown once.
                views: tuple[View, ...] = ("cascade", "isolated") if number == 1 else ("isolated",)
                found = compare_audio(reference(level), trace, getattr(torch, level), workload, views)
            runs.append(Run(level, workload, found))
    return CheckReport("reference", name, tuple(runs), ())
