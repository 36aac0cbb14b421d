"""How many frames, and how large: one line search over rate and size together.

A frame of H x W pixels takes tok = (H / 28)(W / 28) tokens and 15 around it (13 for its time stamp, 2 delimiters). At
s in [0, 1] a plan has

    rate  = 0.2 + s (min(1, source rate) - 0.2)              frames per second
    c     = round(128 + s (min(1024, max(native, 128)) - 128))     tokens a frame may take
    n     = round(duration * rate), at least 4, at most the frame cap
    usage = n (tok(c) + 15)

s = 1 if that fits the budget; else the largest s that does (50 halvings); and where not even s = 0 does, c = 128 and as
many frames as fit, below 0.2 frames per second. `round` takes halves to the even integer. Four frames are planned even
where they exceed the budget: the caller looks at `usage`.
Source: image_video specification, sections 4.5 to 4.7.
"""

from dataclasses import dataclass
from typing import Literal

from reference.media.image_size import CELL, CELL_PIXELS, cells, fitted_size

FRAME_FLOOR = 128
FRAME_CEILING = 1024
SLOWEST = 0.2
FASTEST = 1.0
MIN_FRAMES = 4
FRAME_OVERHEAD = 15
# Set aside where the frame cap is computed and where sound is admitted, but not from the budget of frames.
GLOBAL_OVERHEAD = 2240
SMALLEST_FRAME_CAP = 1024
HALVINGS = 50


@dataclass(frozen=True)
class Allocation:
    """The solver's answer.

    frames: how many. token_cap: c, tokens a frame may take. frame_tokens: tok(c), what a frame is accounted at.
    usage: frames * (frame_tokens + 15). branch: everything fitted; found by halving; below the slowest rate.
    """

    frames: int
    token_cap: int
    frame_tokens: int
    usage: int
    branch: Literal["full", "bisect", "floor"]


def frame_cap(prompt_tokens: int) -> int:
    """The most frames for L prompt tokens: a power of two, at least 1024, that holds all of the smallest that fit."""
    fitting = max(1, (prompt_tokens - GLOBAL_OVERHEAD) // (FRAME_FLOOR + FRAME_OVERHEAD))
    return max(SMALLEST_FRAME_CAP, 1 << (fitting - 1).bit_length())


def native_cells(height: int, width: int) -> int:
    """Tokens of a frame at about its own size."""
    return max(1, round(height / CELL)) * max(1, round(width / CELL))


def sized_frame(height: int, width: int, token_cap: int) -> tuple[int, int]:
    """(height, width) in pixels of a frame of at most `token_cap` tokens, enlarged to the floor of 128 if smaller."""
    return fitted_size(height, width, FRAME_FLOOR * CELL_PIXELS, token_cap * CELL_PIXELS)


def frame_tokens(height: int, width: int, token_cap: int) -> int:
    """tok(c). Below 128 where rounding to cells loses more than it may; above c only where the aspect exceeds c."""
    return cells(*sized_frame(height, width, max(FRAME_FLOOR, token_cap)))


def cost(height: int, width: int, frames: int, token_cap: int) -> int:
    """Tokens that `frames` frames are accounted at."""
    return frames * (frame_tokens(height, width, token_cap) + FRAME_OVERHEAD)


def allocation_at(s: float, height: int, width: int, fps: float, duration: float, cap: int) -> tuple[int, int]:
    """(frames, token cap) at one point of the line."""
    fastest = min(FASTEST, max(fps, 1e-6))
    largest = min(FRAME_CEILING, max(native_cells(height, width), FRAME_FLOOR))
    rate = SLOWEST + s * (fastest - SLOWEST)
    return (
        max(MIN_FRAMES, min(round(duration * rate), cap)),
        round(FRAME_FLOOR + s * (largest - FRAME_FLOOR)),
    )


def solve(height: int, width: int, fps: float, duration: float, budget: int, cap: int) -> Allocation:
    """Frames and their size for a budget of tokens.

    height, width: pixels. fps: of the source, frames per second. duration: seconds. cap: `frame_cap`.
    """

    def usage(s: float) -> int:
        return cost(height, width, *allocation_at(s, height, width, fps, duration, cap))

    def allocation(frames: int, token_cap: int, branch: Literal["full", "bisect", "floor"]) -> Allocation:
        tokens = frame_tokens(height, width, token_cap)
        return Allocation(frames, token_cap, tokens, frames * (tokens + FRAME_OVERHEAD), branch)

    if usage(1.0) <= budget:
        return allocation(*allocation_at(1.0, height, width, fps, duration, cap), "full")
    if usage(0.0) > budget:
        fitting = budget // cost(height, width, 1, FRAME_FLOOR)
        return allocation(max(MIN_FRAMES, min(fitting, cap)), FRAME_FLOOR, "floor")
    fits, exceeds = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (fits + exceeds) / 2
        if usage(middle) <= budget:
            fits = middle
        else:
            exceeds = middle
    return allocation(*allocation_at(fits, height, width, fps, duration, cap), "bisect")
