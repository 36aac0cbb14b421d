"""Checks a checkpoint folder: the reference, loaded by this project, against transformers, loaded by its own converter.

Nothing is shared between the two sides but the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from parity.check import LEVELS, CheckReport, Level, check
from parity.judge import Reference
from parity.runners.reference import ReferenceRunner
from parity.runners.transformers import TransformersRunner
from parity.sweep import boundary_workloads, drawn_workloads
from parity.workload import Workload
from reference.checkpoint import CheckpointFolder, load_text_model, write_synthetic
from reference.config import NoteConfig, tiny
from reference.numerics import Numerics


@contextmanager
def synthetic_checkpoint(seed: int = 0) -> Iterator[Path]:
    """The tiny model as a released-layout folder, for as long as the context lasts."""
    with TemporaryDirectory(prefix="note-parity-") as parent:
        folder = Path(parent) / "tiny"
        write_synthetic(folder, tiny(), seed, shards=3)
        yield folder


def check_against_transformers(
    folder: str | Path,
    workloads: Sequence[Workload] | None = None,
    levels: Sequence[Level] = LEVELS,
    drawn: int = 0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[CheckReport, NoteConfig]:
    """Run `workloads`, or the boundary workloads and `drawn` random ones, at each level.

    Raises: CheckpointError, ConfigError for the folder; RunnerUnavailable without transformers.
    """
    numerics = Numerics.preset("transformers")
    opened = CheckpointFolder.open(folder, numerics, ("language", "mtp"))
    config, layout = opened.config, opened.indexer_rope_layout
    # As stored: bfloat16 weights and float32 biases, which every dtype below represents exactly.
    weights = load_text_model(folder, numerics, dtype=None).state_dict()
    shrinks = workloads is None
    if workloads is None:
        workloads = (*boundary_workloads(config.text), *drawn_workloads(config.text, drawn, seed))

    def reference(level: Level) -> Reference:
        is_exact = level == "exact"
        return lambda dtype: ReferenceRunner(config, weights, dtype, numerics, is_exact, layout)

    def candidate(level: Level) -> TransformersRunner:
        if level == "exact":
            return TransformersRunner(folder, torch.float64, exact=True)
        return TransformersRunner(folder, getattr(torch, level))

    return check(reference, candidate, workloads, levels, progress, shrinks), config
