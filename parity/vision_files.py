"""Image and video files as rows of a vision tower: what a word `file:PATH` of a case stands for.

    image    PNG, JPEG, WebP, GIF (its first frame), BMP, TIFF or PPM, by what the file begins with
    video    anything else; its frames are one item with one grid, the sound only takes its share of the budget

Both go through the released preprocessing (`reference.media`): decoded, resized to sides of whole cells of 28 pixels,
normalised. The resized picture is then cut into the patches of the tower at hand, whose merged squares need not be as
wide as a cell but must divide it. A file is read once, when its pixels are first needed: both sides and every draw of
rounding see the same ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parity.errors import ParityError
from reference.config import VisionConfig
from reference.layers.vision_grid import Grid, coordinates
from reference.media.errors import MediaError, VideoError
from reference.media.image import Patches, image_of_rows, preprocess_image
from reference.media.image_decode import FORMATS
from reference.media.image_size import CELL, PATCH
from reference.media.video import prepare_video
from reference.model_media import PaddedVideoInput, video_input

# N patches of an item  X values of a patch  H, W sides in pixels  C channels

FILE = "file:"
_IMAGE_STARTS = re.compile(rb"\x89PNG|\xff\xd8\xff|RIFF....WEBP|GIF8|BM|II[*+]\0|MM\0[*+]|P[1-7]\s", re.DOTALL)


class VisionFileError(ParityError):
    """A path that a line cannot hold, or a tower whose patches files cannot be cut into."""


@dataclass(frozen=True)
class VisionFile:
    """An image or a video by its path. Reading it may raise MediaError.

    Raises: VisionFileError for a path that is empty or has white space: a line is split there.
    """

    path: str

    def __post_init__(self) -> None:
        if not self.path or re.search(r"\s", self.path):
            raise VisionFileError(
                f"'{FILE}{self.path}': a path in a workload must be given and have no spaces; rename or link the file"
            )

    def text(self) -> str:
        return FILE + self.path

    @cached_property
    def patches(self) -> Patches:
        """float32 pixels by the released preprocessing, in its patches of 14 pixels, with one grid.

        Raises: ImageError, VideoError for a file that cannot be model input; MediaError for what is no file;
        MissingPackageError without the package that reads it.
        """
        if _begins_like_an_image(self.path):
            return preprocess_image(self.path)
        try:
            video = video_input(prepare_video(self.path), None, "padded")
        except VideoError as error:
            raise VideoError(f"{error} (and it does not begin like an image: {', '.join(FORMATS)})") from error
        assert isinstance(video, PaddedVideoInput)
        return video.patches

    def rows(self, vision: VisionConfig) -> tuple[Tensor, Grid]:
        """What the tower reads: float32 [N, X], and the grid in its own patches.

        Raises: what `patches` raises; VisionFileError for a tower of other channels, or of squares that do not fit.
        """
        patch, merge = vision.patch_size, vision.spatial_merge_size
        if vision.num_channels != 3 or CELL % (patch * merge):
            raise VisionFileError(
                f"{self.text()}: files have 3 channels and sides of whole {CELL} pixels, but the tower has "
                f"num_channels = {vision.num_channels} and squares of patch_size {patch} x spatial_merge_size {merge} "
                f"pixels, which must divide {CELL}; give it grids, such as 1x4x6"
            )
        ((frames, height, width),) = self.patches.grids_N3.tolist()
        pictures = self.patches.pixels_PX.numpy().reshape(frames, height * width, -1)
        cut = [_cut(image_of_rows(rows_PX, (1, height, width)), patch, merge) for rows_PX in pictures]
        return torch.from_numpy(np.concatenate(cut)), (frames, height * PATCH // patch, width * PATCH // patch)


def _begins_like_an_image(path: str) -> bool:
    # A pipe or a device would be read without end.
    if not Path(path).is_file():
        raise MediaError(f"{path}: not a file; it must be an image or a video")
    try:
        with Path(path).open("rb") as file:
            return _IMAGE_STARTS.match(file.read(12)) is not None
    except OSError as error:
        raise MediaError(f"{path}: cannot be read: {error}") from error


def _cut(image_HWC: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """[N, X]: patches in the order of the tower's rows; in a patch channel, pixel row, pixel column."""
    H, W, C = image_HWC.shape
    patches = image_HWC.reshape(H // patch, patch, W // patch, patch, C).transpose(0, 2, 4, 1, 3)
    y, x = coordinates(H // patch, W // patch, merge).unbind(-1)
    return patches[y.numpy(), x.numpy()].reshape(len(y), -1)
