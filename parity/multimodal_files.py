"""Files for requests with media, made on the spot: PNG, WAV, and MP4 with sound.

Pixels and samples come from PCG64 raw integers and are the same on every machine. A video is encoded by FFmpeg (MPEG-4
and AAC), whose bytes depend on its version: both sides read the same file. Needs what reading such files needs.
"""

from __future__ import annotations

import io
import wave
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.checkpoint.recipes import seed_of
from reference.media.packages import pillow_image, pyav
from reference.media.sound import SAMPLING_RATE

FRAMES_A_SECOND = 10


def image_file(height: int, width: int, seed: int, name: str) -> bytes:
    """PNG, RGB, any level anywhere. Raises: MissingPackageError."""
    buffer = io.BytesIO()
    pillow_image().fromarray(_levels((height, width, 3), seed, name)).save(buffer, format="PNG")
    return buffer.getvalue()


def sound_file(samples: int, seed: int, name: str) -> bytes:
    """WAV, one channel of 16-bit noise at 16 kHz, a third of full scale."""
    raw = np.random.PCG64(seed_of(seed, name)).random_raw(samples)
    values = (raw >> np.uint64(48)).astype(np.int64) - 2**15
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLING_RATE)
        file.writeframes((values // 3).astype("<i2").tobytes())
    return buffer.getvalue()


def video_file(frames: int, height: int, width: int, seed: int, name: str) -> bytes:
    """MP4: frames of blocks of 16 x 16 pixels at 10 a second, and a tone for as long. Raises: MissingPackageError."""
    av = pyav()
    blocks = _levels((frames, -(-height // 16), -(-width // 16), 3), seed, name)
    pictures = blocks.repeat(16, axis=1).repeat(16, axis=2)[:, :height, :width]
    seconds = np.arange(frames * SAMPLING_RATE // FRAMES_A_SECOND) / SAMPLING_RATE
    tone = (0.3 * np.sin(2 * np.pi * 440 * seconds)).astype(np.float32)[None]
    with TemporaryDirectory(prefix="note-parity-") as folder:
        path = Path(folder) / "film.mp4"
        with av.open(str(path), "w", format="mp4") as container:
            _write(av, container, pictures, tone)
        return path.read_bytes()


def _write(av: Any, container: Any, pictures: NDArray[np.uint8], tone: NDArray[np.float32]) -> None:
    video = container.add_stream("mpeg4", rate=FRAMES_A_SECOND)
    video.height, video.width = pictures.shape[1:3]
    video.pix_fmt = "yuv420p"
    sound = container.add_stream("aac", rate=SAMPLING_RATE, layout="mono")
    for picture in pictures:
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        container.mux(video.encode(frame))
    container.mux(video.encode())
    for first in range(0, tone.shape[1], 1024):
        block = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(tone[:, first : first + 1024]), format="fltp", layout="mono"
        )
        block.rate, block.pts, block.time_base = SAMPLING_RATE, first, Fraction(1, SAMPLING_RATE)
        container.mux(sound.encode(block))
    container.mux(sound.encode())


def _levels(shape: tuple[int, ...], seed: int, name: str) -> NDArray[np.uint8]:
    raw = np.random.PCG64(seed_of(seed, name)).random_raw(int(np.prod(shape)))
    return (raw >> np.uint64(56)).astype(np.uint8).reshape(shape)
