"""What `note-parity check` runs: a part of the model, a candidate, on a folder or on a tiny synthetic checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from optimized.device import Backend
from parity.audio_check import check_audio, check_audio_optimized, synthetic_audio_checkpoint
from parity.audio_clips import ClipWorkload
from parity.check import LEVELS, CheckReport, Level
from parity.engine_check import check_folder
from parity.multimodal_case import MultimodalCase
from parity.oracle_check import check_against_transformers, synthetic_checkpoint
from parity.report.from_findings import layer_kinds, report_of_check
from parity.report.records import Report
from parity.runners import NotSupportedHere
from parity.vision_case import VisionCase
from parity.vision_check import check_vision, report_of_vision_check, synthetic_vision_checkpoint
from parity.workload import Workload
from reference.checkpoint.folder import CONFIG_FILE
from reference.config import NoteConfig

# `multimodal` is all of them together.
Tower = Literal["text", "vision", "audio", "multimodal"]
Candidate = Literal["transformers", "optimized"]


@dataclass(frozen=True)
class CheckOptions:
    """`workload`: one line in the tower's own form. `workload_seed` draws its tokens, pixels or noise; None: `seed`,
    which draws the weights where there is no folder. `device`, `backend`, `graphs`: of the optimized candidate."""

    tower: Tower = "text"
    candidate: Candidate = "transformers"
    folder: Path | None = None
    workload: str | None = None
    workload_seed: int | None = None
    drawn: int = 0
    seed: int = 0
    device: str = "cpu"
    backend: Backend | None = None
    graphs: bool = False

    def command(self) -> str:
        """What repeats it, without what narrows a run down."""
        words = ["note-parity", "check", *([str(self.folder)] if self.folder else [])]
        words += {"text": [], "multimodal": ["--multimodal"]}.get(self.tower, ["--tower", self.tower])
        if self.candidate == "optimized":
            words += ["--candidate", "optimized", "--device", self.device]
            words += ["--backend", self.backend] if self.backend else []
            words += ["--graphs"] if self.graphs else []
        words += [] if self.folder else ["--seed", str(self.seed)]
        return shlex.join(words)

    def narrowed(self, levels: Sequence[Level]) -> str:
        """What repeats all that was run."""
        words = [word for level in levels if len(levels) < len(LEVELS) for word in ("--level", level)]
        if self.workload is not None:
            words += ["--workload", self.workload, "--workload-seed", str(self.line_seed)]
        elif self.folder is not None:
            words += ["--seed", str(self.seed)]
        words += ["--drawn", str(self.drawn)] if self.drawn else []
        return " ".join([self.command(), *([shlex.join(words)] if words else [])])

    @property
    def line_seed(self) -> int:
        """What draws the inputs of the one workload."""
        return self.seed if self.workload_seed is None else self.workload_seed


def run_check(
    options: CheckOptions, levels: Sequence[Level], progress: Callable[[str], None]
) -> tuple[CheckReport, Report]:
    """The findings, and their report. Raises: NotSupportedHere for a folder without the tower; as the checks."""
    if options.folder is not None:
        _refuse_missing_towers(options.folder, options.tower)
    run = {"text": _text, "vision": _vision, "audio": _audio, "multimodal": _multimodal}[options.tower]
    found, report = run(options, levels, progress)
    return found, report if report.first else replace(report, again=options.narrowed(levels))


def _refuse_missing_towers(folder: Path, tower: Tower) -> None:
    """A folder that is none, or whose config is not readable, is for the checks to name."""
    if tower == "text" or not (folder / CONFIG_FILE).is_file():
        return
    config = NoteConfig.from_json(folder / CONFIG_FILE)
    towers = {"vision": config.vision, "audio": config.audio}
    for name in (tower,) if tower != "multimodal" else towers:
        if towers[name] is None:
            why = f"config.json has no {name}_config"
            if tower == "multimodal":
                raise NotSupportedHere(f"{folder}: check --multimodal needs both towers, and {why}")
            raise NotSupportedHere(f"{folder}: there is no {name} tower to check: {why}")


def _text(
    options: CheckOptions, levels: Sequence[Level], progress: Callable[[str], None]
) -> tuple[CheckReport, Report]:
    line, seed = options.workload, options.seed
    workloads = None if line is None else [Workload.parse(line, options.line_seed)]
    with synthetic_checkpoint(seed) if options.folder is None else nullcontext(options.folder) as folder:
        if options.candidate == "optimized":
            found, config = check_folder(
                folder,
                workloads,
                levels,
                options.drawn,
                seed,
                options.device,
                options.backend,
                progress,
                options.graphs,
            )
        else:
            found, config = check_against_transformers(folder, workloads, levels, options.drawn, seed, progress)
    return found, report_of_check(found, layer_kinds(config.text), options.command())


def _vision(
    options: CheckOptions, levels: Sequence[Level], progress: Callable[[str], None]
) -> tuple[CheckReport, Report]:
    line = options.workload
    cases = None if line is None else [VisionCase.parse(line, options.line_seed)]
    made = synthetic_vision_checkpoint(options.seed) if options.folder is None else nullcontext(options.folder)
    with made as folder:
        found, config = check_vision(
            folder, cases, levels, options.drawn, options.seed, progress, options.candidate, options.device,
            options.backend,
        )  # fmt: skip
    return found, report_of_vision_check(found, config, options.command())


def _audio(
    options: CheckOptions, levels: Sequence[Level], progress: Callable[[str], None]
) -> tuple[CheckReport, Report]:
    line = options.workload
    clips = None if line is None else [ClipWorkload.parse(line, options.line_seed)]
    made = synthetic_audio_checkpoint(options.seed) if options.folder is None else nullcontext(options.folder)
    with made as folder:
        if options.candidate == "optimized":
            found = check_audio_optimized(
                folder, clips, levels, options.drawn, options.seed, options.device, options.backend, progress
            )
        else:
            found = check_audio(folder, clips, levels, options.drawn, options.seed, progress)
    return found, report_of_check(found, command=options.command())


def _multimodal(
    options: CheckOptions, levels: Sequence[Level], progress: Callable[[str], None]
) -> tuple[CheckReport, Report]:
    # It makes files, with packages that the other checks do without.
    from parity.multimodal_check import check_multimodal, check_multimodal_optimized, synthetic_note_checkpoint

    line = options.workload
    cases = None if line is None else [MultimodalCase.parse(line, options.line_seed)]
    made = synthetic_note_checkpoint(options.seed) if options.folder is None else nullcontext(options.folder)
    with made as folder:
        if options.candidate == "optimized":
            found, config = check_multimodal_optimized(
                folder,
                cases,
                levels,
                options.drawn,
                options.seed,
                options.device,
                options.backend,
                progress,
                options.graphs,
            )
        else:
            found, config = check_multimodal(folder, cases, levels, options.drawn, options.seed, progress)
    return found, report_of_check(found, layer_kinds(config.text), options.command())
