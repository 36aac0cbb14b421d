"""Does the audio side of the reference agree with transformers', from waveform to embeddings, on one checkpoint?

The same levels as the text's check: `exact` (all rounding promoted to float64, features included; limit 1e-10),
`float32` and `bfloat16` (limit: the measured floor), under `Numerics.transformers`. A clip is decoded, mixed and
resampled once for both; everything behind that is each side's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from parity.audio_clips import ClipWorkload, boundary_clips
from parity.audio_compare import AudioReference, AudioSide, compare_audio, traced_clips
from parity.audio_strategies import drawn_clips
from parity.check import LEVELS, CheckReport, Level, Run
from parity.findings import View
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
    encoder = load_audio_encoder(folder, numerics, dtype=None)
    weights = {PREFIX + name: tensor for name, tensor in encoder.state_dict().items()}
    config = NoteConfig.from_json(Path(folder) / "config.json")
    if workloads is None:
        workloads = (*boundary_clips(encoder.config), *drawn_clips(encoder.config, drawn, seed))

    def reference(level: Level) -> AudioReference:
        is_exact = level == "exact"
        return lambda dtype: ReferenceAudio(config, weights, dtype, numerics, is_exact)

    def candidate(level: Level) -> AudioSide:
        if level == "exact":
            return TransformersAudio(folder, torch.float64, exact_mode=True)
        return TransformersAudio(folder, getattr(torch, level))

    return check_audio_sides(reference, candidate, workloads, levels, progress)


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
