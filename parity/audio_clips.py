"""Sounds for comparing audio sides: files, or generated on the spot and the same on every machine.

    noise:1281                      kind and number of samples, at 16 kHz and one channel
    opposed:44100@44100             at another rate in Hz
    noise:16000/video               the same samples on the route of a video's sound, through int16
    file:talk.wav                   a sound file, its channels mixed and resampled

A workload is such words with spaces between. Generated samples are multiples of 2^-15: no library decides a last bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference.config import AudioConfig
from reference.errors import NoteError
from reference.media import sound
from reference.media.mel import token_count
from reference.media.sound import SAMPLING_RATE

# S samples  C channels

_WORD = re.compile(r"^([a-z-]+):([1-9]\d{0,8})(?:@([1-9]\d{0,6}))?(/video)?$")
_STEP = 2.0**-15
_FILE = "file:"


class ClipError(NoteError):
    """A word that describes no clip."""


class Heard(Protocol):
    """What an audio side embeds."""

    @property
    def name(self) -> str: ...

    def waveform(self, rate: int = SAMPLING_RATE) -> Tensor:
        """One channel at `rate` Hz, float32 [S]."""


@dataclass(frozen=True)
class FileClip:
    """A sound file. Reading it may raise SoundError.

    Raises: ClipError for a path that is empty or has white space: a line is split there.
    """

    path: str

    def __post_init__(self) -> None:
        if not self.path or re.search(r"\s", self.path):
            raise ClipError(
                f"'{_FILE}{self.path}': a path in a workload must be given and have no spaces; rename or link the file"
            )

    @property
    def name(self) -> str:
        return f"{_FILE}{self.path}"

    def waveform(self, rate: int = SAMPLING_RATE) -> Tensor:
        return sound.load_waveform(self.path, rate)


@dataclass(frozen=True)
class Clip:
    """A generated sound. `samples` counts those of one channel at `rate` Hz. `seed` draws the noise."""

    kind: str
    samples: int
    rate: int = SAMPLING_RATE
    is_from_video: bool = False
    seed: int = 0

    @classmethod
    def parse(cls, word: str, seed: int = 0) -> Clip:
        """Raises: ClipError."""
        match = _WORD.match(word)
        if not match or match.group(1) not in KINDS:
            raise ClipError(
                f"{word!r} is no clip; write KIND:SAMPLES[@HZ][/video], with KIND of {', '.join(KINDS)}, or file:PATH "
                f"(such as file:talk.wav; a path has no spaces)"
            )
        kind, samples, rate, video = match.groups()
        return cls(kind, int(samples), int(rate or SAMPLING_RATE), bool(video), seed)

    @property
    def name(self) -> str:
        rate = "" if self.rate == SAMPLING_RATE else f"@{self.rate}"
        return f"{self.kind}:{self.samples}{rate}{'/video' if self.is_from_video else ''}"

    @cached_property
    def samples_SC(self) -> Tensor:
        """What its file holds: float32 [samples, channels]."""
        raw = np.random.PCG64(self.seed).random_raw(self.samples)
        # Uniform, from -0.25 to almost 0.25.
        noise = (raw >> np.uint64(50)).astype(np.int64) - 2**13
        steps = KINDS[self.kind](noise, self.rate)
        return torch.from_numpy((steps.reshape(self.samples, -1) * _STEP).astype(np.float32))

    def waveform(self, rate: int = SAMPLING_RATE) -> Tensor:
        mono_S = sound.to_mono(self.samples_SC)
        if self.is_from_video:
            return sound.through_int16(sound.resample(mono_S, self.rate, rate, "swresample"))
        return sound.resample(mono_S, self.rate, rate)


Steps = NDArray[np.int64]


def _tone(noise: Steps, rate: int) -> Steps:
    """440 Hz at half of full scale."""
    return np.rint(2**14 * np.sin(2 * np.pi * 440 * np.arange(len(noise)) / rate)).astype(np.int64)


def _clicks(noise: Steps, rate: int) -> Steps:
    """One sample at each end: the first at half, the last at full scale, where it decides the floor of silence."""
    steps = np.zeros_like(noise)
    steps[0], steps[-1] = 2**14, 2**15 - 1
    return steps


def _fading(noise: Steps, rate: int) -> Steps:
    """The first two seconds a thousand times louder than what follows, in which every other 50 ms are silent."""
    at = np.arange(len(noise))
    quiet = np.where(at * 20 // rate % 2 == 0, noise // 1024, 0)
    return np.where(at < 2 * rate, noise, quiet)


KINDS: dict[str, Callable[[Steps, int], Steps]] = {
    "noise": lambda noise, rate: noise,
    "tone": _tone,
    "silence": lambda noise, rate: np.zeros_like(noise),
    "clipped": lambda noise, rate: np.clip(16 * noise, -(2**15), 2**15 - 1),
    "constant": lambda noise, rate: np.full_like(noise, 2**14),
    "clicks": _clicks,
    "fading": _fading,
    # Two channels of opposite phase, and a quiet tone in both: their mean is the tone, the first is mostly noise.
    "opposed": lambda noise, rate: np.stack((noise + _tone(noise, rate) // 16, _tone(noise, rate) // 16 - noise), 1),
}


@dataclass(frozen=True)
class ClipWorkload:
    """Clips that are embedded one after the other."""

    clips: tuple[Heard, ...]
    seed: int = 0

    @classmethod
    def parse(cls, line: str, seed: int = 0) -> ClipWorkload:
        """Raises: ClipError for a word that is no clip, none, or one that stands there twice."""
        words = line.split()
        if not words or len(set(words)) < len(words):
            raise ClipError(f"{line!r}: at least one clip is needed, and each of them once")
        return cls(tuple(_clip(word, seed + number) for number, word in enumerate(words)), seed)

    def text(self) -> str:
        return " ".join(clip.name for clip in self.clips)

    @property
    def tokens(self) -> int:
        """Those of all clips together: the size of the workload."""
        return sum(token_count(len(clip.waveform())) for clip in self.clips)


def _clip(word: str, seed: int) -> Heard:
    if word.startswith(_FILE):
        return FileClip(word.removeprefix(_FILE))
    return Clip.parse(word, seed)


def boundary_clips(config: AudioConfig) -> tuple[ClipWorkload, ...]:
    """Lengths around frames, tokens and chunks; signals without energy or with too much; other rates and channels."""
    chunk = config.sampling_rate * config.chunk_seconds
    lines = (
        # Masked tails are 1281, 1439 and 2561; below 160 samples nothing but the mask is heard.
        "noise:1 noise:100 noise:159 noise:160 noise:1279 noise:1280 noise:1281 noise:1439 noise:1440 noise:2561",
        f"noise:{chunk - 1} noise:{chunk} noise:{chunk + 1}",
        f"fading:{chunk + 1440} noise:{2 * chunk + 777}",
        f"tone:16000 silence:3000 clipped:4001 constant:2000 clicks:16000 clicks:{chunk}",
        "opposed:11025@44100 noise:3000@8000 noise:4801/video noise:9000@48000/video",
    )
    return tuple(ClipWorkload.parse(line, 100 * number) for number, line in enumerate(lines))
