"""Drawn clips: lengths around frames, tokens and chunks, every kind of sound, other rates, the route of a video."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from parity.audio_clips import KINDS, Clip, ClipWorkload
from reference.config import AudioConfig
from reference.media.mel import HOP, SAMPLES_PER_TOKEN
from reference.media.sound import SAMPLING_RATE


def lengths(config: AudioConfig, max_chunks: int = 3) -> st.SearchStrategy[int]:
    """Samples of a clip: one side or the other of a boundary, or anything in between."""
    chunk = config.sampling_rate * config.chunk_seconds
    steps = st.sampled_from([HOP, SAMPLES_PER_TOKEN, chunk])
    near = st.builds(
        lambda step, times, off: step * times + off, steps, st.integers(0, 40), st.sampled_from([0, 1, -1])
    )
    return (near | st.integers(1, chunk)).filter(lambda samples: 0 < samples <= max_chunks * chunk)


def clips(config: AudioConfig) -> st.SearchStrategy[Clip]:
    """At 16 kHz most of the time. Shorter, quieter in variety and without detours shrinks first."""
    rates = st.sampled_from([SAMPLING_RATE, SAMPLING_RATE, SAMPLING_RATE, 8000, 22050, 44100, 48000])
    return st.builds(
        _at_rate, st.sampled_from(list(KINDS)), lengths(config), rates, st.booleans(), st.integers(0, 2**32)
    )


def _at_rate(kind: str, samples: int, rate: int, is_from_video: bool, seed: int) -> Clip:
    """At another rate long enough that resampling leaves something."""
    return Clip(kind, samples if rate == SAMPLING_RATE else max(samples, 100), rate, is_from_video, seed)


def clip_workloads(config: AudioConfig, max_clips: int = 4) -> st.SearchStrategy[ClipWorkload]:
    drawn = st.lists(clips(config), min_size=1, max_size=max_clips, unique_by=lambda clip: clip.name)
    return drawn.map(lambda chosen: ClipWorkload(tuple(chosen)))


def drawn_clips(config: AudioConfig, count: int, seed: int = 0) -> tuple[ClipWorkload, ...]:
    """`count` random workloads, the same for the same seed."""
    drawn: list[ClipWorkload] = []
    if count:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count, database=None, deadline=None, phases=[hypothesis.Phase.generate], derandomize=False
        )
        @hypothesis.given(st.builds(_of_words, clip_workloads(config), st.integers(0, 2**16)))
        def keep(workload: ClipWorkload) -> None:
            drawn.append(workload)

        keep()
    return tuple(drawn)


def _of_words(workload: ClipWorkload, seed: int) -> ClipWorkload:
    """The workload that its text and a seed say, so that a command can replay it."""
    return ClipWorkload.parse(workload.text(), seed)
