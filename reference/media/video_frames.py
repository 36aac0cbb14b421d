"""Which frames of the source, at what times, at what size.

Frames are spread evenly with the first and the last included. A container's index is round(j (T - 1) / (n - 1)), and an
index that comes twice is taken once, so that a clip of fewer frames than asked for repeats none.

A time stamp is `source`, index / fps, the frame's true time; or `uniform`, j / (n / duration), as if frames were
equally spaced from 0, which differs by up to one interval. Both are rounded to milliseconds and written as hundredths,
halves to the even one: 59.999 s is <00:01:00.00>.
Source: image_video specification, sections 4.7 and 4.9.
"""

import numpy as np

from reference.media.errors import VideoError
from reference.media.image_size import CELL_PIXELS, fitted_size
from reference.media.video_budget import FRAME_FLOOR, MIN_FRAMES, native_cells, sized_frame
from reference.media.video_options import Origin, Timestamps


def frame_size(height: int, width: int, token_cap: int, origin: Origin) -> tuple[int, int]:
    """(height, width) in pixels that frames are resized to.

    Frames of a container are not enlarged; frames that come as an array are, to the floor of 128 tokens.
    """
    if origin == "frames":
        return sized_frame(height, width, token_cap)
    largest = min(token_cap, native_cells(height, width))
    return fitted_size(height, width, FRAME_FLOOR * CELL_PIXELS, largest * CELL_PIXELS)


def frame_indices(planned: int, frames: int, origin: Origin) -> tuple[int, ...]:
    """Indices (0-based, ascending, each once) of `planned` frames out of `frames`: at most as many as exist."""
    if origin == "frames":
        spread = np.rint(np.linspace(0, frames - 1, min(max(1, planned), frames)))
        return tuple(sorted({int(index) for index in spread}))
    return container_indices(max(MIN_FRAMES, min(planned, frames)), frames)


def container_indices(wanted: int, frames: int) -> tuple[int, ...]:
    """`wanted` (at least 2) indices from 0 to `frames` - 1, repetitions removed."""
    step = (frames - 1) / (wanted - 1)
    return tuple(sorted({min(round(j * step), frames - 1) for j in range(wanted)}))


def seconds_of(indices: tuple[int, ...], fps: float, duration: float, rule: Timestamps) -> tuple[float, ...]:
    """The time of each frame in seconds, rounded to milliseconds."""
    if rule == "source":
        return tuple(round(index / fps, 3) for index in indices)
    rate = round(len(indices) / duration, 4)
    if rate == 0:
        raise VideoError(
            f"video: {len(indices)} frames in {duration} s are too few for uniform time stamps (rate rounds to 0); "
            "use timestamps = 'source'"
        )
    return tuple(round(j / rate, 3) for j in range(len(indices)))


def time_text(seconds: float) -> str:
    """`<HH:MM:SS.cc>`: 13 characters, one token each, below 100 hours."""
    total = round(100 * seconds)
    minutes, hundredths = divmod(total, 6000)
    hours, minutes = divmod(minutes, 60)
    return f"<{hours:02d}:{minutes:02d}:{hundredths // 100:02d}.{hundredths % 100:02d}>"
