"""Chooses the tokens of a workload so that no discrete choice of the model is near a tie.

Then an implementation that rounds as it should makes every choice as the truth does, and each of its rows can be
judged. Token after token: of the ids that are tried, the first one whose choices are all clear, or the clearest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from parity.golden import with_margins
from parity.golden_file import ValueTable
from parity.replay import ChoiceReplay
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.schema import decided_by
from parity.tokens import Tokens
from parity.tolerance import Floor, row_errors
from parity.trace import Trace, TraceRecorder
from parity.workload import Fork, Free, Step, Truncate, Workload
from reference.checkpoint import CheckpointFolder, load_text_model
from reference.config import NoteConfig
from reference.layers.indexer import RopeLayout
from reference.probe import listening
from reference.session import StepItem

# Judging asks for 4 times the measured noise of a margin; this leaves room for noise above the average.
CLEARANCE = 10.0
TRIED = 200


def clear_workload(
    checkpoint: str | Path, workload: Workload, progress: Callable[[str], None] = lambda line: None
) -> Workload:
    """`clear_of_ties` for a checkpoint folder, run in bfloat16. The whole text model is loaded, in float64 as well.

    Raises: CheckpointError; WorkloadError for a request that is longer than the model takes.
    """
    folder = CheckpointFolder.open(checkpoint, buckets=("language", "mtp"))
    workload.require_fits(folder.config.text.max_position_embeddings)
    weights = load_text_model(checkpoint, dtype=None).state_dict()
    return clear_of_ties(
        folder.config, weights, workload, torch.bfloat16, CLEARANCE, folder.indexer_rope_layout, progress
    )


def clear_of_ties(
    config: NoteConfig,
    weights: Mapping[str, torch.Tensor],
    workload: Workload,
    dtype: torch.dtype,
    clearance: float = CLEARANCE,
    indexer_rope_layout: RopeLayout = "leading",
    progress: Callable[[str], None] = lambda line: None,
) -> Workload:
    """`workload` with token ids chosen such that, if possible, every margin is `clearance` times its noise in `dtype`.

    The noise is what one run of the workload's own tokens shows on average for each name of scores.
    """
    runner, rounding = (
        ReferenceRunner(config, weights, level, indexer_rope_layout=indexer_rope_layout)
        for level in (torch.float64, dtype)
    )
    noise = _typical_noise(runner, rounding, workload)
    chosen: dict[tuple[str, int, int], int] = {}
    tokens = Tokens(workload, config.text.vocab_size)
    for action in workload.actions:
        if isinstance(action, Step):
            for request, count, _ in action.items:
                for _ in range(count):
                    place = tokens.place(request)
                    progress(f"tokens clear of ties: {request} position {place[0]}")
                    # Another token than the one that was taken back there: what is left of that must show.
                    before = {token for (name, at, _), token in chosen.items() if (name, at) == (request, place[0])}
                    token = _clearest(runner, request, tokens, before, noise, clearance)
                    chosen[request, *place] = token
                    tokens.take(request, 1)
                    runner.step([StepItem(request, (token,), "decode")])
        elif isinstance(action, Truncate):
            runner.truncate(action.request, tokens.truncate(action.request, action.count))
        elif isinstance(action, Fork):
            tokens.fork(action.request, action.new)
            runner.fork(action.request, action.new)
        elif isinstance(action, Free):
            tokens.free(action.request)
            runner.free(action.request)
    return Workload(workload.actions, workload.seed, chosen)


def _typical_noise(truth_runner: ReferenceRunner, runner: ReferenceRunner, workload: Workload) -> dict[str, float]:
    """Root mean square of the relative error of each name of scores."""
    truth = traced(truth_runner, workload)
    rounded = traced(runner, workload, before=[ChoiceReplay(truth)])
    errors: dict[str, list[torch.Tensor]] = {}
    for name in filter(None, map(decided_by, truth.names())):
        for request in truth.requests(name):
            row = row_errors(rounded.table(name, request).values, truth.table(name, request).values).relative
            errors.setdefault(name, []).append(row)
    return {name: float(torch.cat(rows).square().mean().sqrt()) for name, rows in errors.items()}


def _clearest(
    runner: ReferenceRunner,
    request: str,
    tokens: Tokens,
    excluded: set[int],
    noise: Mapping[str, float],
    clearance: float,
) -> int:
    best, best_clearance = 0, -1.0
    first = tokens.peek(request, 1)[0]
    for number in range(TRIED):
        token = (first + number) % runner.config.text.vocab_size
        if token in excluded:
            continue
        recorder, attempt = TraceRecorder(), "attempt"
        if tokens.length(request):
            runner.fork(request, attempt)
        with listening(recorder):
            runner.step([StepItem(attempt, (token,), "decode")])
        runner.free(attempt)
        found = _clearance(recorder.trace(), noise)
        if found > best_clearance:
            best, best_clearance = token, found
        if found >= clearance:
            break
    return best


def _clearance(trace: Trace, noise: Mapping[str, float]) -> float:
    """The smallest margin of all choices, in units of its noise."""
    smallest = float("inf")
    for name in trace.names():
        scores_name = decided_by(name)
        for request in trace.requests(name) if scores_name else ():
            scores = trace.table(str(scores_name), request)
            floor = Floor(torch.full((len(scores.keys),), noise[str(scores_name)]).double(), 0.0)
            table = with_margins(
                scores.keys, trace.table(name, request).values, ValueTable(scores.keys, scores.values, floor)
            )
            smallest = min(smallest, float((table.margins / table.margin_noises).min()))
    return smallest
