"""Compares the trace of an audio side with the reference, in the views of `findings`.

Truth is the reference in float64, features included. The floor is measured from draws of the reference in the
candidate's dtype, with float32 features; limits are those of `tolerance`. The tower makes no discrete choices. A row
that one side has and the other has not (a token too many or too few) makes its tensor different.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from parity.audio_clips import ClipWorkload, Heard
from parity.findings import Comparison, Place, ProbeResult, Verdict, View
from parity.rounding import RoundingDraw
from parity.schema_audio import AUDIO_BOUNDARIES, AUDIO_FLOAT32, audio_dataflow_key, audio_pattern_of
from parity.tolerance import (
    DRAWS,
    EXACT_LIMIT,
    FALSE_ALARM_RATE,
    floor_of,
    noise_limit,
    row_errors,
)
from parity.trace import Trace, TraceRecorder, common_rows
from reference.probe import Listener, Rows, listening


class AudioSide(Protocol):
    """What embeds clips and shows its intermediates through `reference.probe`, under the schema's names."""

    name: str

    def embed(self, clip: Heard) -> Tensor:
        """[tokens, O]."""


AudioReference = Callable[[torch.dtype], AudioSide]


def traced_clips(side: AudioSide, workload: ClipWorkload, *after: Listener) -> Trace:
    """Embed every clip. Each tensor is recorded, then goes through the listeners `after`."""
    recorder = TraceRecorder(producer=side.name)
    for action, clip in enumerate(workload.clips):
        recorder.action = action
        with listening(recorder, *after):
            side.embed(clip)
    return recorder.trace()


def compare_audio(
    reference: AudioReference,
    candidate: Trace,
    dtype: torch.dtype,
    workload: ClipWorkload,
    views: Sequence[View] = ("cascade", "isolated"),
    draws: int = DRAWS,
) -> Comparison:
    """Compare a candidate that embedded `workload` in `dtype`. With `draws` = 0 the limit is 1e-10."""
    results = [result for view in views for result in _results(reference, candidate, dtype, workload, view, draws)]
    return Comparison(tuple(results), (), 0, FALSE_ALARM_RATE)


def first_different(comparison: Comparison) -> ProbeResult | None:
    """The earliest tensor, in dataflow order, of the most isolated view that shows a difference."""
    different = [result for result in comparison.probes if result.verdict == "different"]
    last_view = different[-1].view if different else None
    own = (result for result in different if result.view == last_view)
    return min(own, key=lambda result: audio_dataflow_key(result.name), default=None)


class _Given:
    """Puts recorded values in place of computed ones, so that what follows is computed from the candidate's."""

    def __init__(self, trace: Trace, view: View):
        self._view = view
        self._held = {(entry.name, entry.request, tuple(entry.positions)): entry.source for entry in trace.entries()}

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        if self._view == "cascade" or rows is None:
            return value
        if self._view == "isolated" and audio_pattern_of(name) not in AUDIO_BOUNDARIES:
            return value
        held = self._held.get((name, rows.request, tuple(rows.positions.tolist())))
        given = held.load() if held else value
        return given.to(value.dtype) if given.shape == value.shape else value


def _results(
    reference: AudioReference, candidate: Trace, dtype: torch.dtype, workload: ClipWorkload, view: View, draws: int
) -> list[ProbeResult]:
    given = _Given(candidate, view)
    truth = traced_clips(reference(torch.float64), workload, given)
    eager = reference(dtype) if draws else None
    drawn = []
    for draw in range(draws if eager else 0):
        with RoundingDraw(draw).drawing() if draw else nullcontext():
            drawn.append(traced_clips(eager, workload, given))  # type: ignore[arg-type]
    names = sorted(truth.names(), key=audio_dataflow_key)
    rows = sum(len(truth.keys(name, clip)) for name in names for clip in truth.requests(name))
    return [_result(name, truth, candidate, drawn, dtype, view, rows) for name in names]


def _result(
    name: str,
    truth: Trace,
    candidate: Trace,
    drawn: Sequence[Trace],
    dtype: torch.dtype,
    view: View,
    comparisons: int,
) -> ProbeResult:
    places: list[Place] = []
    error, noise, limits = [], [], []
    elements, missing, largest, is_equal = 0, 0, 0.0, True
    for clip in truth.requests(name):
        if not candidate.has(name, clip):
            missing += len(truth.keys(name, clip))
            continue
        expected = truth.table(name, clip)
        if candidate.table(name, clip).values.shape[1:] != expected.values.shape[1:]:
            missing += len(expected.keys)
            continue
        expected_RX, actual_RX, keys, left_over = common_rows(expected, candidate.table(name, clip))
        missing += left_over
        errors = row_errors(actual_RX, expected_RX)
        index = {key: row for row, key in enumerate(expected.keys)}
        kept = torch.tensor([index[key] for key in keys], dtype=torch.long)
        if drawn:
            rounded_to = torch.promote_types(dtype, torch.float32) if name in AUDIO_FLOAT32 else dtype
            floor = floor_of([draw.table(name, clip).values for draw in drawn], expected.values, rounded_to)
            noise.append(floor.noise[kept])
            limits.append(floor.limits(noise_limit(floor.spread, comparisons))[kept])
            plain_RX = drawn[0].table(name, clip).values[kept]
        else:
            noise.append(torch.full_like(errors.relative, EXACT_LIMIT))
            limits.append(torch.ones_like(errors.relative))
            plain_RX = expected_RX
        is_equal &= torch.equal(plain_RX.to(actual_RX.dtype), actual_RX)
        places += [Place(clip, *key) for key in keys]
        error.append(errors.relative)
        elements += actual_RX.numel()
        largest = max(largest, float(errors.largest.max())) if keys else largest
    if not places:
        return ProbeResult(name, view, "missing", 0, 0, missing, 0.0, 0.0, 0.0, 0.0, None, None)
    error_R, noise_R, limits_R = torch.cat(error), torch.cat(noise), torch.cat(limits)
    excess_R = error_R / (noise_R * limits_R)
    worst, bad = int(excess_R.argmax()), (excess_R > 1.0).nonzero().flatten().tolist()
    verdict: Verdict = "different" if bad or missing else "bitwise equal" if is_equal else "within noise"
    return ProbeResult(
        name,
        view,
        "close" if verdict == "within noise" and not drawn else verdict,
        len(places),
        elements,
        missing,
        float(error_R[worst]),
        float(noise_R[worst]),
        float(limits_R[worst]),
        largest,
        places[worst],
        places[bad[0]] if bad else None,
    )
