"""Images and videos made on the spot, so that no binary file is part of the tests."""

import functools
import io
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
from PIL import Image


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, channels]; without a third dim for one channel."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


def checkerboard(height: int, width: int) -> np.ndarray:
    """0 and 255 alternating: every clamp of a resize is reached."""
    y, x = np.mgrid[:height, :width]
    return np.repeat(((x + y) % 2 * 255).astype(np.uint8)[..., None], 3, axis=2)


def encoded(image: Image.Image | np.ndarray, kind: str, **options: object) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    picture = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    picture.save(buffer, format=kind, **options)
    return buffer.getvalue()


def turned_jpeg(pixels: np.ndarray, orientation: int) -> bytes:
    """A JPEG with an EXIF orientation tag."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(pixels, "JPEG", exif=exif, quality=95)


@functools.cache
def movie(
    frames: int = 60,
    fps: int = 10,
    size: tuple[int, int] = (120, 160),
    sound_seconds: float = 0.0,
    kind: str = "mp4",
    sound_rate: int = 44_100,
) -> bytes:
    """A video whose frame i is a smooth picture of its own; stereo sound, 440 Hz left and 660 Hz right, if any.

    The header comes first, so that a cut file still opens.
    """
    options = {"movflags": "faststart"} if kind == "mp4" else {}
    # A file of its own: to put the header first, it is read once more.
    with TemporaryDirectory() as folder, av.open(f"{folder}/film", "w", format=kind, options=options) as container:
        video = container.add_stream("mpeg4", rate=fps)
        video.height, video.width = size
        video.pix_fmt = "yuv420p"
        video.codec_context.gop_size = 1
        sound = container.add_stream("aac", rate=sound_rate, layout="stereo") if sound_seconds else None
        for i in range(frames):
            picture = av.VideoFrame.from_ndarray(smooth(*size, seed=i), format="rgb24")
            container.mux(video.encode(picture))
        container.mux(video.encode())
        if sound is not None:
            seconds = np.arange(int(sound_seconds * sound_rate)) / sound_rate
            tones = np.stack([0.5 * np.sin(2 * np.pi * pitch * seconds) for pitch in (440, 660)]).astype(np.float32)
            for first in range(0, tones.shape[1], 1024):
                block = np.ascontiguousarray(tones[:, first : first + 1024])
                frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="stereo")
                frame.rate, frame.pts, frame.time_base = sound_rate, first, Fraction(1, sound_rate)
                container.mux(sound.encode(frame))
            container.mux(sound.encode())
        container.close()
        return Path(folder, "film").read_bytes()


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, 3]: gradients and a stripe whose place tells the seed."""
    y, x = np.mgrid[:height, :width].astype(np.float64)
    stripe = 120 * np.exp(-(((x - (seed * 7) % width) / 6) ** 2))
    picture = np.stack([x / width * 120 + stripe, y / height * 200, (x + y) / (height + width) * 180 + seed % 50], -1)
    return np.clip(picture, 0, 255).astype(np.uint8)
