"""A case of the vision tower: images and videos, made from a seed or read from files.

It is written in one line, so that a failure can be repeated by pasting it:

    1x4x6           an image of 4 by 6 patches, its pixels by the seed
    2x2x2           a video of two frames of 2 by 2
    file:cat.png    an image or a video file (`vision_files`)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parity.errors import ParityError
from parity.vision_files import FILE, VisionFile
from reference.checkpoint.recipes import seed_of
from reference.config import VisionConfig
from reference.layers.vision_grid import Grid, patch_count

# Mean and standard deviation of a channel (R, G, B) by which the released processor normalises a value of 0 to 1.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


class VisionCaseError(ParityError):
    """A line is not a list of grids and files."""


@dataclass(frozen=True)
class VisionCase:
    """What a tower is asked in one call. `text()`, `seed` and `tokens` are what reports know of any case."""

    items: tuple[Grid | VisionFile, ...]
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> VisionCase:
        """Read the one-line form; files are not opened yet.

        Raises: VisionCaseError, quoting the word that is wrong; VisionFileError for `file:` without a path.
        """
        items = tuple(_item(word) for word in text.split())
        if not items:
            raise VisionCaseError("a case needs at least one grid, such as 1x4x6, or file, such as file:cat.png")
        return cls(items, seed)

    def text(self) -> str:
        return " ".join(
            item.text() if isinstance(item, VisionFile) else "x".join(map(str, item)) for item in self.items
        )

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Those that the line itself gives. What the files have depends on the tower: `inputs`."""
        return tuple(item for item in self.items if not isinstance(item, VisionFile))

    @property
    def tokens(self) -> int:
        """How many patches: the rows of most tensors. Those of files are counted in patches of 14 pixels."""
        files = [item for item in self.items if isinstance(item, VisionFile)]
        return patch_count(self.grids) + sum(len(file.patches.pixels_PX) for file in files)

    def inputs(self, config: VisionConfig) -> tuple[Tensor, tuple[Grid, ...]]:
        """Pixels float32 [N, X] and grids of all items, in their order.

        Raises: MediaError for a file that cannot be read; VisionFileError for a tower that it does not fit.
        """
        made = iter(self._made(config).split([patch_count([grid]) for grid in self.grids]))
        parts = [item.rows(config) if isinstance(item, VisionFile) else (next(made), item) for item in self.items]
        return torch.cat([pixels_NX for pixels_NX, _ in parts]), tuple(grid for _, grid in parts)

    def pixels(self, config: VisionConfig) -> Tensor:
        """[N, X] float32: those of `inputs`."""
        return self.inputs(config)[0]

    def _made(self, config: VisionConfig) -> Tensor:
        """[N, X] float32 of the grids: 8-bit levels by seed, normalised as the processor does; equal on every machine.

        A patch has a level of its own and noise around it, so that patches differ in brightness as in contrast.
        """
        patches, channels, area = patch_count(self.grids), config.num_channels, config.patch_size**2
        raw = np.random.PCG64(seed_of(self.seed, f"pixels of {VisionCase(self.grids).text()}"))
        level_N11 = (raw.random_raw(patches) >> np.uint64(57)).astype(np.int64)[:, None, None]
        noise_NCA = (raw.random_raw(patches * channels * area) >> np.uint64(57)).astype(np.int64)
        levels_NCA = level_N11 + noise_NCA.reshape(patches, channels, area)
        mean_C1, std_C1 = (np.resize(values, channels)[:, None] for values in (IMAGE_MEAN, IMAGE_STD))
        normalised_NCA = ((levels_NCA / 255 - mean_C1) / std_C1).astype(np.float32)
        return torch.from_numpy(normalised_NCA.reshape(patches, channels * area))


def _item(word: str) -> Grid | VisionFile:
    if word.startswith(FILE):
        return VisionFile(word.removeprefix(FILE))
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,4})", word)
    if not match:
        raise VisionCaseError(
            f"{word!r} is not a grid (frames, height, width in patches, such as 1x4x6) and not a file "
            f"(such as file:cat.png; a path has no spaces)"
        )
    frames, height, width = (int(number) for number in match.groups())
    return frames, height, width
