"""From an image to the rows the vision tower reads.

    rgb     = decoded, 8 bits                              image_decode
    H, W    = size rule                                    image_size
    resized = bicubic(rgb, H, W), 8 bits                   image_resample
    v       = (resized / 255 - mean) / std                 two float32 divisions
    row r   = patch (y, x), all its pixels;                r = ((y // 2) (w / 2) + x // 2) 4 + (y % 2) 2 + x % 2
    column  = channel * 196 + pixel row * 14 + pixel column

So the four patches that one token merges are neighbours in the rows, in reading order, and so are the merge blocks.
Source: image_video specification, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference.media.errors import ImageError
from reference.media.image_config import Channels, ImageConfig, ImageRequest
from reference.media.image_decode import DecodeRules, ImageSource, decode_image
from reference.media.image_size import MERGE, PATCH, image_size, patch_grid
from reference.media.packages import pillow_image

# P patches of an image  X values of a patch (588)  H, W sides  C channels  N images
MAX_IMAGES = 512


@dataclass(frozen=True)
class Patches:
    """Images as the tower reads them, one behind the other.

    pixels_PX: float32 [patches of all images, 588]. grids_N3: int64, (1, rows, columns) of patches of each image.
    """

    pixels_PX: Tensor
    grids_N3: Tensor

    @property
    def tokens(self) -> tuple[int, ...]:
        """Placeholders that each image takes in the prompt."""
        return tuple(int(count) // MERGE**2 for count in self.grids_N3.prod(-1))


def preprocess_images(
    sources: Sequence[ImageSource],
    config: ImageConfig | None = None,
    request: ImageRequest | None = None,
    rules: DecodeRules | None = None,
) -> Patches:
    """The rows and grids of images in prompt order.

    Raises: ImageError, naming the image (counted from 0), for more than 512 images, and for none.
    """
    if not 0 < len(sources) <= MAX_IMAGES:
        raise ImageError(f"images: between 1 and {MAX_IMAGES} are accepted in one prompt, found {len(sources)}")
    parts = []
    for number, source in enumerate(sources):
        try:
            parts.append(preprocess_image(source, config, request, rules))
        except ImageError as error:
            raise ImageError(f"images[{number}]: {error}") from error
    return joined(parts)


def preprocess_image(
    source: ImageSource,
    config: ImageConfig | None = None,
    request: ImageRequest | None = None,
    rules: DecodeRules | None = None,
) -> Patches:
    """The rows and the grid of one image. Defaults: the released config, no changes, `DecodeRules()`.

    Raises: ImageError for what is no image, cannot be decoded, or has a side below 7 or an aspect above 200.
    """
    config = config or ImageConfig()
    request = request or ImageRequest()
    rgb_HWC = decode_image(source, rules)
    height, width = request.sides(*rgb_HWC.shape[:2])
    resized_HWC = resize(rgb_HWC, *image_size(height, width, request.bounds(config)))
    pixels_PX = patch_rows(normalise(resized_HWC, config.mean, config.std))
    return Patches(torch.from_numpy(pixels_PX), torch.tensor([patch_grid(*resized_HWC.shape[:2])]))


def joined(parts: Sequence[Patches]) -> Patches:
    """Images behind one another, in order."""
    return Patches(torch.cat([part.pixels_PX for part in parts]), torch.cat([part.grids_N3 for part in parts]))


def check_placeholders(found: int, images: Patches) -> None:
    """Raises: ImageError where a prompt has another number of image placeholders than its images take."""
    if found != sum(images.tokens):
        raise ImageError(
            f"prompt: holds {found} image placeholders, but its {len(images.tokens)} images take {sum(images.tokens)}"
        )


def resize(rgb_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [h, w, 3] to uint8 [height, width, 3], by Pillow: the bits of `image_resample.Resampler()`.

    One axis at a time: asked for both at once, Pillow from version 13 on begins with the one that saves more work
    (python-pillow issue 9549), and the 8 bits between the two passes are then others.
    """
    Image = pillow_image()
    image = Image.fromarray(rgb_HWC)
    for size in ((width, image.height), (width, height)):
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.array(image)


def normalise(rgb_HWC: np.ndarray, mean: Channels, std: Channels) -> np.ndarray:
    """uint8 [h, w, 3] to float32 [h, w, 3]: scaled to 0..1, then centred; each division rounded to float32."""
    scaled_HWC = rgb_HWC.astype(np.float32) / np.float32(255)
    return (scaled_HWC - np.array(mean, dtype=np.float32)) / np.array(std, dtype=np.float32)


def patch_rows(image_HWC: np.ndarray) -> np.ndarray:
    """[H, W, 3], sides multiples of 28, to [patches, 588]: merge blocks in reading order, four patches each."""
    H, W, C = image_HWC.shape
    blocks = image_HWC.reshape(H // PATCH // MERGE, MERGE, PATCH, W // PATCH // MERGE, MERGE, PATCH, C)
    # block row, block column, patch row, patch column; channel, pixel row, pixel column
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, C * PATCH * PATCH)


def image_of_rows(rows_PX: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    """The inverse of `patch_rows`: [H, W, 3] of the rows of one image."""
    _, h, w = grid
    blocks = rows_PX.reshape(h // MERGE, w // MERGE, MERGE, MERGE, -1, PATCH, PATCH)
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * PATCH, w * PATCH, -1)
