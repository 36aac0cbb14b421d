"""Makes goldens: the truth of a workload on a checkpoint, the floor of each row, and the margin of each choice.

The checkpoint may be larger than the memory: it is run layer by layer (`streamed_run`). After each layer its part of
the golden is on disk, and beside it the hidden states that the next one starts from, so an export that was killed goes
on from the last finished layer.

truth     float64
floor     error of `draws` runs in the storage dtype, with the truth's choices replayed: rounding, and nothing else
margin    between the last score that was chosen and the first that was not
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import parity
from parity.errors import GoldenError
from parity.golden_file import (
    GOLDEN_FILE,
    ChoiceTable,
    ChosenToken,
    Golden,
    GoldenRecord,
    PartRecord,
    ValueTable,
    WeightsRecord,
    dtype_name,
    write_part,
    write_record,
)
from parity.manifest import sha256_of_files
from parity.router_order import in_order_of_ids
from parity.schema import PROBES, decided_by, spec_of
from parity.streamed_run import Run, StageTraces, StreamedRun
from parity.tolerance import DRAWS, floor_of
from parity.trace import Trace
from parity.workload import Workload
from reference.checkpoint import CheckpointFolder
from reference.checkpoint.index import INDEX_FILE
from reference.numerics import Numerics

PARTIAL = ".partial"
STATE_FILE = "state.json"
Tables = tuple[dict[tuple[str, str], ValueTable], dict[tuple[str, str], ChoiceTable]]


def make_golden(
    checkpoint: str | Path,
    target: str | Path,
    workload: Workload,
    dtype: torch.dtype = torch.bfloat16,
    numerics: Numerics | None = None,
    draws: int = DRAWS,
    names: Sequence[str] = ("*",),
    synthetic_seed: int | None = None,
    max_draft_tokens: int = 4,
    progress: Callable[[str], None] = lambda line: None,
) -> Golden:
    """Run `workload` on a checkpoint folder and write the golden `target`, or go on with one that was interrupted.

    `names` are globs of what is kept; the scores of a choice are kept with it. `synthetic_seed` is noted down.
    Raises: GoldenError if `target` exists, or an interrupted export there is of something else, or for a glob that
    matches no name; WorkloadError for a request that is longer than the model takes; CheckpointError.
    """
    target = Path(target)
    numerics = numerics or Numerics()
    folder = require_exportable(checkpoint, target, workload, numerics, names, max_draft_tokens)
    record = GoldenRecord(
        config=folder.config.to_json(),
        numerics=dataclasses.asdict(numerics),
        indexer_rope_layout=folder.indexer_rope_layout,
        dtype=dtype_name(dtype),
        draws=draws,
        workload=workload.text(),
        seed=workload.seed,
        chosen_tokens=[
            ChosenToken(request=request, position=position, epoch=epoch, token_id=token_id)
            for (request, position, epoch), token_id in sorted(workload.chosen.items())
        ],
        names=list(names),
        weights=_weights_record(folder, synthetic_seed),
        producers=_producers(),
    )
    export = _Export(target.with_name(target.name + PARTIAL), record)
    streamed = StreamedRun(folder, workload, dtype, draws, numerics, max_draft_tokens)
    export.resume(streamed.runs)
    layers = folder.config.text.num_hidden_layers
    for stage in range(len(export.parts), layers + 1):
        progress(f"stage {stage + 1} of {layers + 1}")
        traces = streamed.layer(stage, progress) if stage < layers else streamed.head()
        file = f"layer.{stage}.safetensors" if stage < layers else "head.safetensors"
        export.finish_stage(file, _tables(traces, names, dtype), dtype, streamed.runs)
    progress("hash of the checkpoint's files")
    export.complete(target, sha256_of_files(folder.path / name for name in folder.files))
    return Golden.open(target)


def require_exportable(
    checkpoint: str | Path,
    target: Path,
    workload: Workload,
    numerics: Numerics | None = None,
    names: Sequence[str] = ("*",),
    max_draft_tokens: int = 4,
) -> CheckpointFolder:
    """The checkpoint's folder, if nothing that is known before the work speaks against an export.

    Raises: as `make_golden`.
    """
    folder = CheckpointFolder.open(checkpoint, numerics or Numerics(), ("language", "mtp"))
    workload.require_fits(folder.config.text.max_position_embeddings)
    _require_matches(names, folder.config.text.num_hidden_layers, max_draft_tokens)
    if target.exists():
        raise GoldenError(f"{target}: exists already; export to another folder or remove it")
    return folder


def _require_matches(globs: Sequence[str], layers: int, draft_steps: int) -> None:
    numbers = {"{i}": range(layers), "{s}": range(draft_steps)}
    known = [spec.pattern for spec in PROBES]
    for letter, values in numbers.items():
        known = [name.replace(letter, str(value)) for name in known for value in (values if letter in name else (0,))]
    for glob in globs:
        if not fnmatch.filter(known, glob):
            raise GoldenError(f"{glob!r} matches no tensor's name; names are such as layers.0.output, mtp.0.logits")


class _Export:
    """The folder of an export that is not complete: parts, the hidden states behind the last, and a state file."""

    def __init__(self, folder: Path, record: GoldenRecord):
        self._folder, self._record = folder, record
        self.parts: list[PartRecord] = []

    def resume(self, runs: Sequence[Run]) -> None:
        """Take up what an earlier export of the same has finished. Raises: GoldenError if it was of something else."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / STATE_FILE
        if not path.exists():
            return
        state = GoldenRecord.model_validate_json(path.read_bytes())
        if state.model_copy(update={"parts": []}) != self._record:
            raise GoldenError(
                f"{self._folder}: holds an interrupted export of another checkpoint, workload or version; "
                f"remove it to start anew"
            )
        self.parts = list(state.parts)
        hidden = load_file(self._hidden_file(len(self.parts)))
        for number, run in enumerate(runs):
            steps = sum(name.startswith(f"{number}/") for name in hidden)
            run.hidden = [hidden[f"{number}/{step}"] for step in range(steps)]

    def finish_stage(self, file: str, tables: Tables, dtype: torch.dtype, runs: Sequence[Run]) -> None:
        """The state file is written last: until then the stage before counts."""
        done = len(self.parts)
        self.parts.append(write_part(self._folder, file, *tables, dtype))
        hidden = {
            f"{number}/{step}": rows.contiguous()
            for number, run in enumerate(runs)
            for step, rows in enumerate(run.hidden or ())
        }
        save_file(hidden, self._hidden_file(done + 1))
        write_record(self._folder, self._record.model_copy(update={"parts": self.parts}), STATE_FILE)
        self._hidden_file(done).unlink(missing_ok=True)

    def complete(self, target: Path, files_sha256: str) -> None:
        weights = self._record.weights.model_copy(update={"files_sha256": files_sha256})
        record = self._record.model_copy(update={"parts": self.parts, "weights": weights})
        write_record(self._folder, record, GOLDEN_FILE)
        kept = {GOLDEN_FILE, *(part.file for part in self.parts)}
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink()
        shutil.move(self._folder, target)

    def _hidden_file(self, stages: int) -> Path:
        return self._folder / f"hidden.{stages}.safetensors"


def _tables(traces: StageTraces, names: Sequence[str], dtype: torch.dtype) -> Tables:
    truth = traces.truth
    kept = {name for name in truth.names() if any(fnmatch.fnmatchcase(name, pattern) for pattern in names)}
    kept |= {scores for name in kept if (scores := decided_by(name))}
    values: dict[tuple[str, str], ValueTable] = {}
    choices: dict[tuple[str, str], ChoiceTable] = {}
    for name, request in _tables_of(truth, kept):
        spec = spec_of(name)
        if spec is None or spec.kind == "choice":
            continue
        table = in_order_of_ids(name, request, truth)
        drawn = [in_order_of_ids(name, request, draw).values for draw in traces.draws]
        rounded_to = torch.float32 if spec.is_float32 else dtype
        values[name, request] = ValueTable(table.keys, table.values, floor_of(drawn, table.values, rounded_to))
    for name, request in _tables_of(truth, kept):
        if scores_name := decided_by(name):
            table = truth.table(name, request)
            choices[name, request] = with_margins(table.keys, table.values, values[scores_name, request])
    return values, choices


def _tables_of(trace: Trace, names: set[str]) -> Iterator[tuple[str, str]]:
    return ((name, request) for name in trace.names() if name in names for request in trace.requests(name))


def with_margins(keys: tuple[tuple[int, int], ...], chosen_RK: torch.Tensor, scores: ValueTable) -> ChoiceTable:
    """Chosen ids in ascending order, and how far the nearest exchange is, in score units and in noise.

    Of one score: the row's noise shared out among its elements; of a difference of two: sqrt(2) times that.
    """
    chosen_RK = chosen_RK.to(torch.int64)  # a dump may keep them in fewer bits than the placeholder below needs
    is_none_RK = chosen_RK < 0
    ascending_RK = chosen_RK.masked_fill(is_none_RK, torch.iinfo(torch.int64).max).sort(dim=-1).values
    ascending_RK = ascending_RK.masked_fill(ascending_RK == torch.iinfo(torch.int64).max, -1)
    descending_RS = scores.truth.sort(dim=-1, descending=True).values
    is_visible_RS = scores.truth.isfinite()
    visible_R, chosen_count_R = is_visible_RS.sum(-1), (~is_none_RK).sum(-1)
    last_R1 = (chosen_count_R - 1).clamp(min=0, max=descending_RS.shape[-1] - 1)[:, None]
    first_left_out_R1 = (last_R1 + 1).clamp(max=descending_RS.shape[-1] - 1)
    margins_R = (descending_RS.gather(-1, last_R1) - descending_RS.gather(-1, first_left_out_R1)).flatten()
    margins_R = margins_R.masked_fill((visible_R <= chosen_count_R) | (chosen_count_R == 0), float("inf"))
    scale_R = scores.truth.masked_fill(~is_visible_RS, 0.0).norm(dim=-1)
    return ChoiceTable(keys, ascending_RK, margins_R, scores.floor.noise * scale_R * (2.0 / visible_R).sqrt())


def _weights_record(folder: CheckpointFolder, synthetic_seed: int | None) -> WeightsRecord:
    """Hashes of the index and of all headers, by the names of the files. That of whole files comes at the end."""
    headers = hashlib.sha256()
    for name in folder.files:
        with (folder.path / name).open("rb") as file:
            length = file.read(8)
            headers.update(length + file.read(int.from_bytes(length, "little")))
    index = hashlib.sha256((folder.path / INDEX_FILE).read_bytes())
    return WeightsRecord(
        index_sha256=index.hexdigest(), headers_sha256=headers.hexdigest(), synthetic_seed=synthetic_seed
    )


def _producers() -> dict[str, str]:
    return {
        parity.DISTRIBUTION: version(parity.DISTRIBUTION),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
