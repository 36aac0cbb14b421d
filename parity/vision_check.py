"""Checks the vision tower of a checkpoint folder: the reference, loaded by this project, against another.

transformers   nothing is shared between the two sides but the files; under `VisionNumerics.transformers`
optimized      the production twin on the same tensors, under the default numerics

The levels are those of `parity.check`: exact (logic, 1e-10), float32 and bfloat16 (within the measured floor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import hypothesis
import torch
from hypothesis import strategies as st

from optimized.device import Backend
from parity.check import LEVELS, CheckReport, Level, Run
from parity.engine_vision import VisionOptimizedRunner
from parity.report.from_findings import report_of_check
from parity.report.records import Report
from parity.runners import NotSupportedHere
from parity.runners.reference_vision import Values, VisionReferenceRunner, VisionRunner, run_case
from parity.runners.transformers_vision import TransformersVisionRunner
from parity.vision_case import VisionCase
from parity.vision_compare import VisionComparison, VisionReference, compare_vision, compare_vision_exact
from reference.checkpoint import CheckpointFolder, write_synthetic
from reference.checkpoint.expected_towers import VISION
from reference.checkpoint.load_vision import load_vision_tower
from reference.config import NoteConfig, VisionConfig
from reference.vision import tiny_with_vision
from reference.vision_numerics import VisionNumerics


@contextmanager
def synthetic_vision_checkpoint(seed: int = 0) -> Iterator[Path]:
    """The tiny model with the tiny tower as a released-layout folder, for as long as the context lasts."""
    with TemporaryDirectory(prefix="note-parity-") as parent:
        folder = Path(parent) / "tiny-vision"
        write_synthetic(folder, tiny_with_vision(), seed)
        yield folder


def boundary_cases(vision: VisionConfig, seed: int = 0) -> tuple[VisionCase, ...]:
    """One square; odd numbers of squares, wide and high; images beside each other; frames; the same grid twice."""
    m = vision.spatial_merge_size
    shapes = (
        ((1, 1, 1),),
        ((1, 3, 5),),
        ((1, 2, 3), (1, 5, 1), (1, 1, 4)),
        ((3, 2, 1), (1, 3, 3)),
        ((1, 2, 2), (1, 2, 2)),
    )
    return tuple(
        VisionCase(tuple((frames, height * m, width * m) for frames, height, width in squares), seed + number)
        for number, squares in enumerate(shapes)
    )


@st.composite
def vision_cases(draw: st.DrawFn, vision: VisionConfig, max_patches: int = 120) -> VisionCase:
    """Grids, fewer and smaller first, and a seed."""
    side = vision.spatial_merge_size
    grid = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)).map(
        lambda squares: (squares[0], squares[1] * side, squares[2] * side)
    )
    drawn = draw(st.lists(grid, min_size=1, max_size=4))
    grids = [drawn[0]]
    for one in drawn[1:]:
        if VisionCase((*grids, one)).tokens <= max_patches:
            grids.append(one)
    return VisionCase(tuple(grids), draw(st.integers(0, 999)))


def drawn_cases(vision: VisionConfig, count: int, seed: int = 0) -> tuple[VisionCase, ...]:
    """`count` random cases, the same for the same seed."""
    drawn: list[VisionCase] = []
    if count:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count, database=None, deadline=None, phases=[hypothesis.Phase.generate], derandomize=False
        )
        @hypothesis.given(vision_cases(vision))
        def keep(case: VisionCase) -> None:
            drawn.append(case)

        keep()
    return tuple(drawn)


def check_vision(
    folder: str | Path,
    cases: Sequence[VisionCase] | None = None,
    levels: Sequence[Level] = LEVELS,
    drawn: int = 0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
    candidate: Literal["transformers", "optimized"] = "transformers",
    device: str = "cpu",
    backend: Backend | None = None,
) -> tuple[CheckReport, NoteConfig]:
    """Run `cases`, or the boundary cases and `drawn` random ones, at each level; the optimized tower on `device`.

    Raises: CheckpointError, ConfigError for the folder; NotSupportedHere for a folder without a vision tower,
    RunnerUnavailable without transformers, or without the device or backend that is asked for; MediaError and
    VisionFileError for the files of a case.
    """
    numerics = VisionNumerics.preset("transformers") if candidate == "transformers" else VisionNumerics()
    config = CheckpointFolder.open(folder, None, ("vision",)).config
    if config.vision is None:
        raise NotSupportedHere(f"{folder}: there is no vision tower to check: config.json has no vision_config")
    # As stored: bfloat16 weights and float32 biases, which every dtype below represents exactly.
    loaded = load_vision_tower(folder, numerics, dtype=None).state_dict()
    weights = {VISION + name: tensor for name, tensor in loaded.items()}
    if cases is None:
        cases = (*boundary_cases(config.vision, seed), *drawn_cases(config.vision, drawn, seed))
    runs, name = [], ""
    for level in levels:
        is_exact = level == "exact"
        # Foreign code rounds where its authors wrote so; the optimized tower is built in float64, like the truth.
        is_promoted = is_exact and candidate == "transformers"

        def reference(dtype: torch.dtype, is_promoted: bool = is_promoted) -> VisionReferenceRunner:
            return VisionReferenceRunner(config, weights, dtype, numerics, is_promoted)

        dtype = torch.float64 if is_exact else getattr(torch, level)
        port: VisionRunner
        if candidate == "transformers":
            port = TransformersVisionRunner(folder, dtype, is_exact)
        else:
            port = VisionOptimizedRunner(config, weights, dtype, device, "torch" if is_exact else backend)
        name = port.name
        for number, case in enumerate(cases, 1):
            progress(f"{level}: case {number} of {len(cases)}: {case.text()}")
            found = _compared(reference, port, config.vision, case, level)
            runs.append(Run(level, case, found))
    return CheckReport("reference", name, tuple(runs), ()), config


def _compared(
    reference: VisionReference, port: VisionRunner, vision: VisionConfig, case: VisionCase, level: Level
) -> VisionComparison:
    values: Values = {name: value.cpu() for name, value in run_case(port, vision, case).items()}
    if level == "exact":
        return compare_vision_exact(reference, values, case)
    return compare_vision(reference, values, getattr(torch, level), case)


def block_kinds(vision: VisionConfig) -> dict[str, str]:
    """What each block is: {"0": "dense", "25": "4 experts"}."""
    return {str(block): f"{experts} experts" if experts else "dense" for block, experts in enumerate(vision.experts)}


def report_of_vision_check(
    found: CheckReport, config: NoteConfig, command: str = "note-parity check --tower vision"
) -> Report:
    """For every format of `parity.report`. Rows that are only out of order are told in its notes."""
    assert config.vision
    orders = {str(order): None for run in found.runs for order in getattr(run.comparison, "orders", ())}
    report = report_of_check(found, block_kinds(config.vision), command)
    return replace(report, notes=tuple(orders))
