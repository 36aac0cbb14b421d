"""One run of the benchmark: ceilings, then the chosen rows, with what it ran on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from optimized.bench.case import Case, Inputs
from optimized.bench.ceilings import measure_ceilings
from optimized.bench.generation import GENERATION_SHAPES, GenerationShape, MakeGeneration, measure_generations
from optimized.bench.machine import obstacle, this_machine
from optimized.bench.records import BenchReport
from optimized.bench.run import Progress, run_cases
from optimized.bench.slices import STEP_SHAPES, MakeStep, StepShape, measure_steps
from optimized.bench.timing import ColdTimer
from optimized.errors import NotSupportedError
from reference.config import TextConfig


def measure(
    config: TextConfig,
    cases: Sequence[Case],
    command: str,
    seed: int = 0,
    progress: Progress = lambda line: None,
    make_step: MakeStep | None = None,
    shapes: Sequence[StepShape] = STEP_SHAPES,
    make_generation: MakeGeneration | None = None,
    texts: Sequence[GenerationShape] = GENERATION_SHAPES,
) -> BenchReport:
    """Run `cases`, and `shapes` and `texts` through what makes them if it is given, on this machine's GPU in bfloat16.

    Raises: NotSupportedError where there is none.
    """
    if found := obstacle():
        raise NotSupportedError(f"the benchmark needs a GPU: {found}")
    timer = ColdTimer()
    progress("ceilings")
    ceilings = measure_ceilings(timer, seed)
    rows = run_cases(cases, Inputs(config, torch.device("cuda"), seed), ceilings, timer, progress)
    steps = measure_steps(make_step, config, ceilings, shapes, progress) if make_step else []
    written = measure_generations(make_generation, config, ceilings, texts, progress) if make_generation else []
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return BenchReport(this_machine(), ceilings, date, command, tuple(rows), tuple(steps), tuple(written))
