"""Checks the whole model: mixed requests through processing, towers, scatter, text and generation, stage by stage.

processing   ids, pixels and mel features of each side's own preprocessing; at level exact only: equal bits, and 1e-10
towers       `vision.merged`, `audio.adapted`: the rows of each side's own towers, from the same pixels and features
scatter      `layers.0.input`: what enters the first layer of the text model, rows in the places of placeholders
text         every intermediate of prefill, decoding, several tokens at once, drafts and their rollback
generation   greedy tokens, with drafts and without; a token that differs is judged by its margin

The levels are those of `parity.check`. Files and prompts are made on the spot (`multimodal_case`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from optimized.device import Backend
from parity.check import LEVELS, CheckReport, Level, Run
from parity.compare import compare, compare_exact
from parity.exact import exact
from parity.findings import Comparison, View
from parity.multimodal_case import MultimodalCase, boundary_cases, drawn_cases
from parity.multimodal_generation import compare_generation
from parity.multimodal_processing import compare_processing
from parity.multimodal_requests import Folder, make_requests, workload_of
from parity.run import run_workload
from parity.runners.note_sides import NoteSide, ReferenceNoteSide, TransformersNoteSide
from parity.runners.optimized_note import OPTIONS, OptimizedNoteSide
from parity.runners.transformers_processing import TransformersProcessing
from parity.trace import Trace, TraceRecorder
from reference.checkpoint import write_synthetic
from reference.config import NoteConfig
from reference.model_load import load_note_model
from reference.model_tiny import tiny_note
from reference.numerics import Numerics
from reference.vision_numerics import VisionNumerics

NEW_TOKENS = 12
DRAFT_DEPTHS = (1, 3)
VIDEO_NOTE = "processing of videos: transformers has no interleaved layout, and its video processor needs torchvision"


@contextmanager
def synthetic_note_checkpoint(seed: int = 0) -> Iterator[Path]:
    """`tiny_note` as a released-layout folder, for as long as the context lasts."""
    with TemporaryDirectory(prefix="note-parity-") as parent:
        folder = Path(parent) / "tiny-note"
        write_synthetic(folder, tiny_note(), seed)
        yield folder


def check_multimodal(
    folder: str | Path,
    cases: Sequence[MultimodalCase] | None = None,
    levels: Sequence[Level] = LEVELS,
    drawn: int = 0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[CheckReport, NoteConfig]:
    """Against transformers: run `cases`, or the boundary cases and `drawn` random ones, at each level.

    Raises: CheckpointError, ConfigError, PromptError for the folder; RunnerUnavailable without transformers,
    NotSupportedHere for a folder without both towers.
    """
    opened = Folder.open(folder)

    def candidate(level: Level) -> NoteSide:
        if level == "exact":
            return TransformersNoteSide(folder, torch.float64, exact=True)
        return TransformersNoteSide(folder, getattr(torch, level))

    processing = TransformersProcessing(opened, is_exact=True) if "exact" in levels else None
    numerics = Numerics.preset("transformers"), VisionNumerics.preset("transformers")
    run = _Check(opened, numerics, candidate, processing, has_exact_mode=True)
    return run.report(cases or (*boundary_cases(seed), *drawn_cases(drawn, seed)), levels, progress), opened.config


def check_multimodal_optimized(
    folder: str | Path,
    cases: Sequence[MultimodalCase] | None = None,
    levels: Sequence[Level] = LEVELS,
    drawn: int = 0,
    seed: int = 0,
    device: str = "cpu",
    backend: Backend | None = None,
    progress: Callable[[str], None] = lambda line: None,
    graphs: bool = False,
) -> tuple[CheckReport, NoteConfig]:
    """The optimized towers and engine, from the same pixels, features and ids; level exact is float64, torch twins.

    Raises: as `check_multimodal`; RunnerUnavailable for a device or a backend that is not here.
    """
    opened = Folder.open(folder)
    model = load_note_model(opened.path, dtype=None)
    weights, layout = dict(model.state_dict()), model.indexer_rope_layout
    options = replace(OPTIONS, graphs=graphs)

    def candidate(level: Level) -> NoteSide:
        if level == "exact":
            return OptimizedNoteSide(opened.config, weights, torch.float64, device, "torch", options, layout)
        return OptimizedNoteSide(opened.config, weights, getattr(torch, level), device, backend, options, layout)

    run = _Check(opened, (Numerics(), VisionNumerics()), candidate, None, has_exact_mode=False)
    return run.report(cases or (*boundary_cases(seed), *drawn_cases(drawn, seed)), levels, progress), opened.config


class _Check:
    def __init__(
        self,
        folder: Folder,
        numerics: tuple[Numerics, VisionNumerics],
        candidate: Callable[[Level], NoteSide],
        processing: TransformersProcessing | None,
        has_exact_mode: bool,
    ):
        self._folder, self._numerics, self._candidate, self._processing = folder, numerics, candidate, processing
        # A candidate of which float64 can be asked runs without promotion, and so does the reference then.
        self._has_exact_mode = has_exact_mode
        # As stored: bfloat16 weights and float32 biases, which every dtype represents exactly.
        model = load_note_model(folder.path, numerics=numerics[0], vision_numerics=numerics[1], dtype=None)
        self._weights: Mapping[str, Tensor] = model.state_dict()
        self._layout = model.indexer_rope_layout
        self._skipped: dict[str, None] = {}

    def report(
        self, cases: Sequence[MultimodalCase], levels: Sequence[Level], progress: Callable[[str], None]
    ) -> CheckReport:
        runs, name = [], ""
        for level in levels:
            side = self._candidate(level)
            name = side.name
            for number, case in enumerate(cases, 1):
                progress(f"{level}: case {number} of {len(cases)}: {case.text()}")
                runs.append(Run(level, case, self._compared(side, case, level, is_first=number == 1)))
        return CheckReport("reference", name, tuple(runs), tuple(self._skipped))

    def _compared(self, side: NoteSide, case: MultimodalCase, level: Level, is_first: bool) -> Comparison:
        is_exact = level == "exact"
        is_promoted = is_exact and self._has_exact_mode
        with exact() if is_promoted else nullcontext():
            made = make_requests(case, self._folder)
        workload = workload_of(case, made)

        def reference(dtype: torch.dtype) -> ReferenceNoteSide:
            text, vision = self._numerics
            return ReferenceNoteSide(
                self._folder.config, self._weights, dtype, text, vision, is_promoted, self._layout, placed=made
            )

        side.placed = made
        recorder = TraceRecorder(producer=side.name)
        for line in run_workload(side, workload, recorder):
            self._skipped[line.partition(": ")[2]] = None
        trace = _behind_the_scatter(recorder.trace()) if isinstance(side, TransformersNoteSide) else recorder.trace()
        if is_exact:
            found = compare_exact(reference, trace, workload, with_detail=is_first)
        else:
            # Each layer from its own input is the sharper test; how error grows over depth is shown once.
            views: tuple[View, ...] = ("cascade", "isolated") if is_first else ("isolated",)
            found = compare(reference, trace, getattr(torch, level), workload, views, with_detail=is_first)
        if is_exact and self._processing is not None:
            if any(request.has_video for request in made.values()):
                self._skipped[VIDEO_NOTE] = None
            found = replace(found, probes=(*compare_processing(self._processing, made), *found.probes))
        dtype = torch.float64 if is_exact else getattr(torch, level)
        choices, rows = compare_generation(reference, side, dtype, NEW_TOKENS, DRAFT_DEPTHS)
        return replace(found, choices=(*found.choices, *choices), choice_rows=found.choice_rows + rows)


def _behind_the_scatter(trace: Trace) -> Trace:
    """Without `embeddings`: transformers shows those before the scatter; `layers.0.input` are those behind it."""
    return Trace([entry for entry in trace.entries() if entry.name != "embeddings"], trace.producer)
