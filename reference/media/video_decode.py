"""Reads a container with PyAV: its facts, its sound track, and the frames that a plan asks for.

Frames are counted in the order they are shown, from 0, by decoding from the beginning: an index means the same frame in
every file. Implementations that seek by index / rate instead may find other frames in streams of variable rate.
Decoding uses one thread, and keeps only frames that were asked for, resized at once. Rotation tags are not applied, and
interlaced streams are taken as they are, as everywhere.

A file is opened by us and read as bytes, so that none that names other files or addresses makes FFmpeg open those.
Source: image_video specification, sections 4.2, 4.7, 4.8 and 4.12.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from reference.media.errors import VideoError
from reference.media.image import resize
from reference.media.packages import pyav
from reference.media.video_options import BROKEN_SOUND, VideoFacts
from reference.media.video_sound import sha1, to_pcm

VideoSource: TypeAlias = "bytes | str | os.PathLike[str]"

# Containers whose demuxers read one file; not playlists, which name others.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif,m4v,h264,hevc,ivf"
ASSUMED_FPS = 25.0


@dataclass(frozen=True)
class DecodeLimits:
    """What decoding may cost. frame_pixels: of one source frame. seconds: of decoding, by the clock, per stream."""

    frame_pixels: int = 8192 * 8192
    seconds: float = 600.0


@dataclass(frozen=True)
class SoundTrack:
    """pcm: int16 samples, mono. note: why there are none, if so."""

    pcm: np.ndarray
    note: str = ""


def read_facts(source: VideoSource, limits: DecodeLimits | None = None) -> VideoFacts:
    """What the container announces: nothing is decoded, and the sound track is not looked at.

    Raises: VideoError for what is no video file, and for sizes or durations that are missing or not positive.
    """
    limits = limits or DecodeLimits()
    with _opened(source) as container:
        stream = container.streams.best("video")
        context = stream and stream.codec_context
        if context is None:
            raise VideoError(f"{_name(source)}: has no video stream that can be decoded")
        if context.height * context.width > limits.frame_pixels:
            raise VideoError(
                f"{_name(source)}: frames of {context.height} x {context.width} (h x w); "
                f"at most {limits.frame_pixels:,} pixels are decoded"
            )
        duration = _duration(container, stream)
        fps = float(stream.average_rate or 0) or ASSUMED_FPS
        frames = stream.frames or max(1, int(duration * fps))
        return VideoFacts(context.height, context.width, fps, duration, frames)


def read_sound(source: VideoSource, rate: int, most: int, limits: DecodeLimits | None = None) -> SoundTrack:
    """The best sound track at `rate` Hz, mixed to one channel: int16.

    Decoding stops once there are more than `most` samples. A track that does not decode is none, with a note.
    """
    limits = limits or DecodeLimits()
    nothing = np.zeros(0, dtype=np.int16)
    with _opened(source) as container:
        stream = container.streams.best("audio")
        if stream is None:
            return SoundTrack(nothing, "no sound track")
        parts, total = [nothing], 0
        try:
            for samples in _resampled(container, stream, rate, limits.seconds):
                parts.append(to_pcm(samples))
                total += len(samples)
                if total > most:
                    break
        except Exception as error:  # a decoder fed with broken bytes raises nearly anything
            return SoundTrack(nothing, f"{BROKEN_SOUND}: {error}")
    return SoundTrack(np.concatenate(parts), "" if total else "the sound track is empty")


def read_frames(
    source: VideoSource, indices: tuple[int, ...], size: tuple[int, int], limits: DecodeLimits | None = None
) -> tuple[Mapping[int, np.ndarray], int]:
    """The frames at `indices` (ascending), each uint8 RGB [height, width, 3] of `size`, by index.

    Returns them and how many frames were decoded, fewer than the last index + 1 where the file ends early or is broken.
    Raises: VideoError where not one frame decodes.
    """
    limits = limits or DecodeLimits()
    wanted = set(indices)
    frames: dict[int, np.ndarray] = {}
    decoded, reason = 0, "the stream is empty"
    with _opened(source) as container:
        stream = container.streams.best("video")
        stream.thread_type = "NONE"
        # A stream may change its size on the way.
        stream.codec_context.options = {"max_pixels": str(limits.frame_pixels)}
        try:
            for frame in _until(container.decode(stream), limits.seconds):
                if decoded in wanted:
                    frames[decoded] = resize(frame.to_ndarray(format="rgb24"), *size)
                decoded += 1
                if decoded > indices[-1]:
                    break
        except VideoError:
            raise
        except Exception as error:  # as above
            reason = str(error)
    if decoded == 0:
        raise VideoError(f"{_name(source)}: no frame decodes: {reason}")
    return frames, decoded


def digest(source: VideoSource) -> str:
    """SHA-1 of the file, in hex digits."""
    if isinstance(source, bytes):
        return str(sha1(source).hexdigest())
    hashed = sha1()
    with Path(source).open("rb") as file:
        while block := file.read(1 << 20):
            hashed.update(block)
    return str(hashed.hexdigest())


@contextlib.contextmanager
def _opened(source: VideoSource) -> Iterator[Any]:
    av = pyav()
    with contextlib.ExitStack() as stack:
        if isinstance(source, bytes):
            file: Any = io.BytesIO(source)
        elif isinstance(source, str | os.PathLike):
            # A pipe or a device would be read without end.
            if not Path(source).is_file():
                raise VideoError(f"{source}: not a file")
            try:
                file = stack.enter_context(Path(source).open("rb"))
            except OSError as error:
                raise VideoError(f"{source}: cannot be read: {error}") from error
        else:
            raise VideoError(f"video: must be a file's bytes or a path, found {type(source).__name__}")
        try:
            container = stack.enter_context(av.open(file, options={"format_whitelist": FORMATS}))
        except Exception as error:  # as above
            raise VideoError(f"{_name(source)}: not a readable video file: {_reason(error)}") from error
        yield container


def _reason(error: Exception) -> str:
    """FFmpeg's words, without its error numbers."""
    return getattr(error, "strerror", None) or str(error)


def _duration(container: Any, stream: Any) -> float:
    """Seconds: of the stream where its header says so, else of the container; 0 where neither does."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return (container.duration or 0) / 1_000_000


def _resampled(container: Any, stream: Any, rate: int, seconds: float) -> Iterator[np.ndarray]:
    resampler = pyav().AudioResampler(format="flt", layout="mono", rate=rate)
    for frame in _until(container.decode(stream), seconds):
        for mono in resampler.resample(frame):
            yield mono.to_ndarray()[0]
    for mono in resampler.resample(None):
        yield mono.to_ndarray()[0]


def _until(frames: Iterator[Any], seconds: float) -> Iterator[Any]:
    """The frames, for at most this long. Raises: VideoError."""
    end = time.monotonic() + seconds
    for frame in frames:
        if time.monotonic() > end:
            raise VideoError(f"video: decoding takes longer than {seconds:g} s")
        yield frame


def _name(source: VideoSource) -> str:
    return "video" if isinstance(source, bytes) else str(source)
