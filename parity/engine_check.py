"""Checks the optimized implementation against the reference, with the sweep that also detects the faults.

exact       torch twins in float64: the logic of packing, planning, caches and batches. Limit 1e-10.
float32,    the backend that is asked for, or the best one here: compiled kernels, interpreted kernels, torch twins.
bfloat16    Limit: the measured floor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from optimized.device import Backend
from optimized.engine import EngineOptions
from optimized.plan_spans import StepLimits
from parity.check import LEVELS, CheckReport, Level, check
from parity.judge import Reference
from parity.runners.optimized import OptimizedRunner
from parity.runners.reference import ReferenceRunner
from parity.sweep import boundary_workloads, drawn_workloads
from parity.workload import Workload
from reference.checkpoint import CheckpointFolder, load_text_model, synthetic_tensors
from reference.config import NoteConfig, tiny
from reference.layers.indexer import RopeLayout
from reference.numerics import Numerics

# Small pages, poison wherever nothing was written, and limits that leave room for every workload of the sweep.
OPTIONS = EngineOptions(
    pages=256, page_size=4, requests=6, limits=StepLimits(4096, 2**26, 2**22), poison=True, disjoint_numbers=True
)


def check_optimized(
    config: NoteConfig,
    weights: Mapping[str, Tensor],
    workloads: Sequence[Workload] | None = None,
    levels: Sequence[Level] = LEVELS,
    device: str = "cpu",
    backend: Backend | None = None,
    options: EngineOptions = OPTIONS,
    progress: Callable[[str], None] = lambda line: None,
    indexer_rope_layout: RopeLayout = "leading",
    shrinks: bool = False,
) -> CheckReport:
    """Run `workloads`, or the boundary ones. `shrinks`: see `check`.

    Raises: RunnerUnavailable for a device, a backend or a layout that the optimized implementation does not have.
    """

    def reference(level: Level) -> Reference:
        return lambda dtype: ReferenceRunner(config, weights, dtype, indexer_rope_layout=indexer_rope_layout)

    def candidate(level: Level) -> OptimizedRunner:
        if level == "exact":
            return OptimizedRunner(config, weights, torch.float64, device, "torch", options, indexer_rope_layout)
        return OptimizedRunner(config, weights, getattr(torch, level), device, backend, options, indexer_rope_layout)

    return check(reference, candidate, workloads or boundary_workloads(config.text), levels, progress, shrinks)


def check_folder(
    folder: str | Path,
    workloads: Sequence[Workload] | None = None,
    levels: Sequence[Level] = LEVELS,
    drawn: int = 0,
    seed: int = 0,
    device: str = "cpu",
    backend: Backend | None = None,
    progress: Callable[[str], None] = lambda line: None,
    graphs: bool = False,
) -> tuple[CheckReport, NoteConfig]:
    """The same on a checkpoint folder, with `drawn` random workloads beside the boundary ones.

    Raises: CheckpointError, ConfigError for the folder; RunnerUnavailable as `check_optimized`.
    """
    opened = CheckpointFolder.open(folder, Numerics(), ("language", "mtp"))
    weights = load_text_model(folder, Numerics(), dtype=None).state_dict()
    text, shrinks = opened.config.text, workloads is None
    if workloads is None:
        workloads = (*boundary_workloads(text), *drawn_workloads(text, drawn, seed))
    engine = replace(OPTIONS, graphs=graphs)
    report = check_optimized(
        opened.config,
        weights,
        workloads,
        levels,
        device,
        backend,
        engine,
        progress,
        opened.indexer_rope_layout,
        shrinks,
    )
    return report, opened.config


def first_difference(device: str) -> str | None:
    """The tiny model in bfloat16 on `device`: the first tensor that differs, with its numbers; None if all agree."""
    config = tiny()
    found = check_optimized(config, dict(synthetic_tensors(config)), levels=("bfloat16",), device=device)
    if not found.compared:
        return "nothing was compared"
    run = found.first_different
    return None if run is None else f"{run.comparison.first} in workload {run.workload.text()}"
