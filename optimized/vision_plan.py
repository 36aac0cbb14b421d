"""What a call of the vision tower needs to know about its frames: from host integers, without asking the device.

A call is cut into runs at the borders of frames, each of at most `most_patches` patches: frames do not see each other,
so that only memory depends on where it is cut. Of each run the device gets one int32 buffer, in one copy:

    [starts B + 1 | y N | x N]      the first row of each frame and the end; the coordinates of each patch

Source: vision specification, sections 3.1 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from optimized.errors import PlanError
from reference.layers.vision_grid import Grid, check_grids

# N patches of a run  B frames


@dataclass(frozen=True)
class VisionRun:
    """Frames that are processed together. `start`: their first row in the call; `sizes`: (height, width) in patches."""

    start: int
    sizes: tuple[tuple[int, int], ...]

    @property
    def patches(self) -> int:
        return sum(height * width for height, width in self.sizes)

    @property
    def longest(self) -> int:
        """Patches of the largest frame."""
        return max(height * width for height, width in self.sizes)


@dataclass(frozen=True)
class FramesOnDevice:
    """`starts_B1` int32: the first row of each frame, and the end. `coordinates_2N` int32: y and x of each patch."""

    starts_B1: Tensor
    coordinates_2N: Tensor
    longest: int


def vision_runs(grids: Sequence[Grid], merge: int, most_patches: int) -> list[VisionRun]:
    """As few runs as fit `most_patches`, in order.

    Raises: VisionInputError for a grid that is none, PlanError for a frame that is too large by itself.
    """
    check_grids(grids, merge)
    runs: list[VisionRun] = []
    sizes: list[tuple[int, int]] = []
    start = held = 0
    for item, (height, width) in _frames(grids):
        patches = height * width
        if patches > most_patches:
            raise PlanError(
                f"item {item}: a frame of {height} x {width} = {patches} patches exceeds the budget of {most_patches} "
                f"patches a run: raise `most_patches`, or make the image smaller"
            )
        if held + patches > most_patches:
            runs.append(VisionRun(start, tuple(sizes)))
            start, held, sizes = start + held, 0, []
        sizes.append((height, width))
        held += patches
    if sizes:
        runs.append(VisionRun(start, tuple(sizes)))
    return runs


def upload(run: VisionRun, merge: int, device: torch.device) -> FramesOnDevice:
    """The run's metadata on `device`, in one copy that nobody waits for."""
    lengths = [height * width for height, width in run.sizes]
    starts_B1 = np.concatenate(([0], np.cumsum(lengths)))
    coordinates_2N = np.concatenate([_coordinates(*size, merge) for size in run.sizes], axis=1)
    flat = torch.from_numpy(np.concatenate((starts_B1, coordinates_2N.ravel())).astype(np.int32))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    starts, coordinates = flat.split((len(starts_B1), coordinates_2N.size))
    return FramesOnDevice(starts, coordinates.view(2, -1), run.longest)


def _frames(grids: Sequence[Grid]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Item and size of each frame."""
    for item, (frames, height, width) in enumerate(grids):
        for _ in range(frames):
            yield item, (height, width)


@lru_cache(maxsize=64)
def _coordinates(height: int, width: int, merge: int) -> np.ndarray:
    """y and x of the patches of a frame, [2, height · width], square by square, row by row inside a square."""
    y, x = np.divmod(np.arange(height * width, dtype=np.int32).reshape(height, width), width)
    squares = np.stack((y, x)).reshape(2, height // merge, merge, width // merge, merge)
    return squares.transpose(0, 1, 3, 2, 4).reshape(2, -1)
