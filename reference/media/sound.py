"""Sound files to what the speech encoder hears: one channel of float32 samples, nominally within [-1, 1].

file  ->  samples [S, channels] at the file's rate  ->  one channel  ->  the encoder's rate

Nothing else is done to the samples: no normalisation, no dither, no trimming of silence. Public implementations differ
in two steps, which are arguments here. The two resamplers, measured from 44.1 to 16 kHz: they differ by 0.7 % of the
norm for noise up to 7 kHz and by 10 % for white noise, because one cuts off later than the other below 8 kHz. So two
implementations are compared on the same 16 kHz samples.

libsndfile decodes, except for MP3 files that do not say how long they are: it takes the length from the rate of the
first frame, and of one with a variable rate it reads half or less without a word. Those are left to PyAV.
Source: audio specification, section 2.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from reference.errors import MissingPackageError
from reference.media.errors import MediaError
from reference.media.packages import pyav
from reference.media.video_sound import to_pcm, waveform

# S samples  C channels

# mean: vLLM and its C++ port. first: channel 0, an early transformers proposal and SGLang's server.
ChannelRule = Literal["mean", "first"]
# soxr: a sound file. swresample, through PyAV: the sound of a video, and vLLM's loader for sound files too.
Resampler = Literal["soxr", "swresample"]

SAMPLING_RATE = 16000
# 524,288 tokens of 80 ms: the clip that would fill the model's context by itself. In seconds.
MAX_SECONDS = 524288 * 0.08
# Headers of streams that were written before their length was known.
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)
# In the first frame of an MP3 file that says how long it is.
_LENGTH_TAGS = (b"Xing", b"Info", b"VBRI")

Source = str | os.PathLike[str] | bytes


class SoundError(MediaError):
    """A sound file, a waveform or its features cannot be what the speech encoder hears."""


@dataclass(frozen=True)
class Sound:
    """A decoded file: `samples_SC` float32 [S, channels], `rate` in Hz."""

    samples_SC: Tensor
    rate: int


def load_waveform(
    source: Source,
    rate: int = SAMPLING_RATE,
    channels: ChannelRule = "mean",
    resampler: Resampler = "soxr",
    max_seconds: float = MAX_SECONDS,
) -> Tensor:
    """A file, given by path or by its bytes, as one channel at `rate` Hz: float32 [S].

    Raises: SoundError and MissingPackageError, as `decode` and `resample` do.
    """
    sound = decode(source, max_seconds)
    return resample(to_mono(sound.samples_SC, channels), sound.rate, rate, resampler)


def decode(source: Source, max_seconds: float = MAX_SECONDS) -> Sound:
    """Every channel of a WAV, FLAC, MP3 or other file that libsndfile reads, at its own rate.

    Integer samples are divided by their full scale (int16 by 32768); MP3 may exceed 1.
    Raises: SoundError for a file that is missing, no sound, empty, cut short, not finite, or longer than `max_seconds`.
    An Ogg file, or an MP3 without a length, that is cut between two pages or frames cannot be told from a shorter one.
    MissingPackageError.
    """
    soundfile = _soundfile()
    name = f"sound of {len(source)} bytes" if isinstance(source, bytes) else os.fspath(source)
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise SoundError(f"{name}: not a file")
    try:
        opened = soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source)
    except (soundfile.LibsndfileError, OSError) as error:
        reason = getattr(error, "error_string", error)
        raise SoundError(
            f"{name}: cannot be opened as sound ({reason}); it must be a WAV, FLAC, MP3, OGG or AIFF file"
        ) from error
    with opened as file:
        _refuse_lengths(name, source, file, max_seconds)
        if file.format == "MP3" and not _has_length_tag(source):
            samples_SC = _read_to_the_end(name, source, round(max_seconds * file.samplerate))
        else:
            samples_SC = _read(name, file)
    return Sound(refuse_non_finite(samples_SC, name), file.samplerate)


def _refuse_lengths(name: str, source: Source, file: Any, max_seconds: float) -> None:
    if not file.frames:
        raise SoundError(f"{name}: has no samples; at least one is needed")
    seconds = file.frames / file.samplerate
    if seconds > max_seconds:
        raise SoundError(f"{name}: is {seconds:.2f} s long; the limit is {max_seconds:.2f} s")
    size, head = _size_and_part(source, 0, 8)
    if head[:4] in (b"RIFF", b"FORM"):
        # libsndfile reads as many samples as there are and says nothing.
        declared = int.from_bytes(head[4:8], "little" if head[:4] == b"RIFF" else "big")
        if declared not in _UNKNOWN_SIZES and declared + 8 > size:
            raise SoundError(f"{name}: is cut short: {size} bytes, and its header promises {declared + 8}")


def _size_and_part(source: Source, start: int, count: int) -> tuple[int, bytes]:
    if isinstance(source, bytes):
        return len(source), source[start : start + count]
    with Path(source).open("rb") as file:
        file.seek(start)
        return os.fstat(file.fileno()).st_size, file.read(count)


def _has_length_tag(source: Source) -> bool:
    _, head = _size_and_part(source, 0, 10)
    # An ID3 block, whose size is four times seven bits, may come before the first frame.
    start = 10 + sum(byte << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
    _, frame = _size_and_part(source, start if head[:3] == b"ID3" else 0, 256)
    return any(tag in frame for tag in _LENGTH_TAGS)


def _read_to_the_end(name: str, source: Source, max_samples: int) -> Tensor:
    av = pyav()
    parts: list[np.ndarray] = []
    try:
        with av.open(io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source)) as container:
            for frame in container.decode(audio=0):
                parts.append(frame.to_ndarray())
                if sum(part.shape[1] for part in parts) > max_samples:
                    raise SoundError(f"{name}: is longer than the limit of {max_samples} samples")
    except av.FFmpegError as error:
        raise SoundError(f"{name}: is damaged or cut short: {error}") from error
    return torch.from_numpy(np.concatenate(parts, axis=1).T.astype(np.float32))


def _soundfile() -> ModuleType:
    try:
        import soundfile  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingPackageError("soundfile is needed to read sound files: install note-parity[media]") from error
    return soundfile


def _read(name: str, file: Any) -> Tensor:
    try:
        samples_SC = file.read(dtype="float32", always_2d=True)
    except _soundfile().LibsndfileError as error:
        raise SoundError(f"{name}: is damaged or cut short: {error}") from error
    if len(samples_SC) != file.frames:
        raise SoundError(f"{name}: is cut short: {len(samples_SC)} samples, and its header promises {file.frames}")
    return torch.from_numpy(samples_SC)


def to_mono(samples_SC: Tensor, rule: ChannelRule = "mean") -> Tensor:
    """One channel [S] of float samples [S, channels]. Two channels of opposite phase tell the rules apart.

    Raises: SoundError for another shape or rule.
    """
    if samples_SC.dim() != 2 or not samples_SC.shape[1]:
        raise SoundError(f"expected samples [S, channels], found {tuple(samples_SC.shape)}")
    if rule == "mean":
        return samples_SC.mean(1)
    if rule == "first":
        return samples_SC[:, 0].contiguous()
    raise SoundError(f"no channel rule {rule!r}; there are 'mean' and 'first'")


def resample(samples_S: Tensor, rate: int, target: int = SAMPLING_RATE, resampler: Resampler = "soxr") -> Tensor:
    """Samples [S] at `rate` Hz as float32 [about S · target / rate] at `target` Hz.

    The same bytes on the same machine; not on every one, since both libraries use what vector units they find.
    Raises: SoundError for another resampler, or if less than one sample is left. MissingPackageError.
    """
    if resampler not in ("soxr", "swresample"):
        raise SoundError(f"no resampler {resampler!r}; there are 'soxr' and 'swresample'")
    if rate == target:
        return samples_S.to(torch.float32)
    samples = samples_S.to(torch.float32).contiguous().numpy()
    resampled = _by_soxr(samples, rate, target) if resampler == "soxr" else _by_swresample(samples, rate, target)
    if not len(resampled):
        raise SoundError(f"{len(samples_S)} samples at {rate} Hz are not one sample at {target} Hz")
    return torch.from_numpy(resampled)


def _by_soxr(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    try:
        import soxr  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingPackageError("soxr is needed to resample sound files: install note-parity[media]") from error
    return soxr.resample(samples, rate, target, quality="HQ")


def _by_swresample(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """FFmpeg's resampler with its defaults, as PyAV makes it."""
    av = pyav()
    frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
    frame.sample_rate = rate
    converter = av.AudioResampler(format="fltp", layout="mono", rate=target)
    frames = [*converter.resample(frame), *converter.resample(None)]
    return np.concatenate([np.zeros(0, np.float32), *(made.to_ndarray()[0] for made in frames)])


def through_int16(samples_S: Tensor) -> Tensor:
    """What the sound of a video goes through: clipped to [-1, 1], times 32767, truncated to int16, over 32768.

    Up to two steps of int16 from the same track as a sound file. Float32 [S]. Raises: VideoError for NaN, infinities.
    """
    return waveform(to_pcm(samples_S.to(torch.float32).numpy()))


def refuse_non_finite(samples: Tensor, name: str) -> Tensor:
    """The samples, first dim S. Raises: SoundError: one NaN would become its chunk's maximum, and spoil all of it."""
    is_bad_S = ~samples.isfinite().flatten(1).all(1) if samples.dim() > 1 else ~samples.isfinite()
    if is_bad_S.any():
        raise SoundError(
            f"{name}: {int(is_bad_S.sum())} of {len(is_bad_S)} samples are NaN or infinite, the first is sample "
            f"{int(is_bad_S.nonzero()[0])}; all must be finite"
        )
    return samples
