"""The size an image is resized to: sides that are multiples of 28 pixels, their product within bounds.

An image becomes patches of 14 x 14 pixels, and 2 x 2 patches become one token, so a token covers a *cell* of 28 x 28:

    H, W = 28 * round(h / 28), 28 * round(w / 28), each at least 28
    above the upper bound:  b = sqrt(h w / max),  H = 28 * floor(h / b / 28)
    below the lower bound:  b = sqrt(min / (h w)),  H = 28 * ceil(h b / 28)

`round` takes halves to the even cell; all quotients are float64. Bounds are compared with the rounded sides, but the
scale comes from the original ones: 1000 x 1020, above the bound, rounds to 1008 x 1008 and stays.
Source: image_video specification, sections 1 and 2.2.
"""

import math
from dataclasses import dataclass

from reference.media.errors import ImageError

PATCH = 14
MERGE = 2
CELL = PATCH * MERGE
CELL_PIXELS = CELL * CELL
SMALLEST_SIDE = CELL // 4
LARGEST_ASPECT = 200


@dataclass(frozen=True)
class PixelBounds:
    """Pixels of a resized image. The defaults are those of the release: 4 and 1,296 tokens."""

    min_pixels: int = 3136
    max_pixels: int = 1_016_064

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= self.max_pixels:
            raise ImageError(
                f"pixel bounds: min_pixels must be positive and at most max_pixels, "
                f"found min_pixels = {self.min_pixels}, max_pixels = {self.max_pixels}"
            )


def image_size(height: int, width: int, bounds: PixelBounds) -> tuple[int, int]:
    """The resized (height, width) of an image, in pixels.

    Raises: ImageError for a side below 7 pixels or sides more than 200 to 1 apart.
    """
    check_sides(height, width)
    return fitted_size(height, width, bounds.min_pixels, bounds.max_pixels)


def check_sides(height: int, width: int, what: str = "image") -> None:
    """Raises: ImageError where the size rule has no useful answer."""
    if min(height, width) < SMALLEST_SIDE:
        raise ImageError(f"{what}: sides must be at least {SMALLEST_SIDE} pixels, found {height} x {width} (h x w)")
    if max(height, width) / min(height, width) > LARGEST_ASPECT:
        raise ImageError(f"{what}: sides may be at most {LARGEST_ASPECT} to 1, found {height} x {width} (h x w)")


def fitted_size(height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size rule alone, for positive sides. Where `min_pixels` exceeds `max_pixels`, the upper bound decides."""
    tall, wide = rounded(height), rounded(width)
    if tall * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return floored(height / shrink), floored(width / shrink)
    if tall * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        tall, wide = CELL * math.ceil(height * grow / CELL), CELL * math.ceil(width * grow / CELL)
        if tall * wide > max_pixels:
            shrink = math.sqrt(tall * wide / max_pixels)
            return floored(tall / shrink), floored(wide / shrink)
    return tall, wide


def rounded(side: float) -> int:
    """The nearest multiple of a cell, halves to the even one, and at least one cell."""
    return max(CELL, CELL * round(side / CELL))


def floored(side: float) -> int:
    """The next smaller multiple of a cell, and at least one cell."""
    return max(CELL, CELL * math.floor(side / CELL))


def patch_grid(height: int, width: int) -> tuple[int, int, int]:
    """(1, rows, columns) of patches of an image whose sides are multiples of a cell."""
    return 1, height // PATCH, width // PATCH


def cells(height: int, width: int) -> int:
    """Tokens of an image whose sides are multiples of a cell."""
    return (height // CELL) * (width // CELL)
