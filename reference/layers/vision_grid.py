"""Where the rows of a call are: which frame, and which patch of it.

A row is one patch. Rows are ordered by item, frame, and within a frame (h, w patches) by merge block and patch in it:

    r(y, x) = ((y // m) · (w / m) + x // m) · m² + (y mod m) · m + x mod m

so that m² consecutive rows are the square that becomes one output row, and squares are in raster order.
Source: vision specification, sections 3.1 and 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from reference.errors import NoteError

# T patches of one frame

# Frames, height and width of one item; the latter two in patches.
Grid = tuple[int, int, int]


class VisionInputError(NoteError):
    """Pixels and grids do not fit each other, or not the tower."""


@dataclass(frozen=True)
class Segment:
    """One frame: the only rows that see each other. `start` is its first row in the call, 0-based.

    `coordinates_T2`: row (y) and column (x) of each patch in its frame, int64, 0-based, in the order of the rows.
    """

    start: int
    coordinates_T2: Tensor

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + len(self.coordinates_T2))


def coordinates(height: int, width: int, merge: int, device: torch.device | None = None) -> Tensor:
    """(y, x) of the patches of a frame in the order of its rows, int64 [height · width, 2]."""
    y, x = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    blocks = torch.stack((y, x), dim=-1).reshape(height // merge, merge, width // merge, merge, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)


def segments(grids: Sequence[Grid], merge: int, device: torch.device | None = None) -> list[Segment]:
    """The frames of all items, in the order of their rows. Frames of an item have the same coordinates."""
    found, start = [], 0
    for frames, height, width in grids:
        coordinates_T2 = coordinates(height, width, merge, device)
        for _ in range(frames):
            found.append(Segment(start, coordinates_T2))
            start += len(coordinates_T2)
    return found


def patch_count(grids: Sequence[Grid]) -> int:
    return sum(frames * height * width for frames, height, width in grids)


def split_by_item(merged_MO: Tensor, grids: Sequence[Grid], merge: int) -> tuple[Tensor, ...]:
    """The output rows of each item, t · h · w / m² of them."""
    return merged_MO.split([frames * height * width // merge**2 for frames, height, width in grids])


def check_grids(grids: Sequence[Grid], merge: int) -> None:
    """Raises: VisionInputError, naming the item."""
    for item, grid in enumerate(grids):
        try:
            frames, height, width = map(index, grid)
        except (TypeError, ValueError):
            expected = "a grid of three integers (frames, height, width)"
            raise VisionInputError(f"item {item}: expected {expected}, found {grid!r}") from None
        if frames < 1 or height < merge or width < merge or height % merge or width % merge:
            raise VisionInputError(
                f"item {item}: grid {(frames, height, width)} must have at least one frame, and a height and width "
                f"that are multiples of {merge} patches, at least {merge}"
            )
