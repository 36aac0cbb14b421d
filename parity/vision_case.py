"""A case of the vision tower: the grids of some images and videos, and a seed for their pixels.

It is written in one line, so that a failure can be repeated by pasting it: `1x4x6 2x2x2` is an image of 4 by 6 patches
and a video of two frames of 2 by 2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parity.errors import ParityError
from reference.checkpoint.recipes import seed_of
from reference.config import VisionConfig
from reference.layers.vision_grid import Grid, patch_count

# Mean and standard deviation of a channel (R, G, B) by which the released processor normalises a value of 0 to 1.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


class VisionCaseError(ParityError):
    """A line is not a list of grids."""


@dataclass(frozen=True)
class VisionCase:
    """What a tower is asked in one call. `text()`, `seed` and `tokens` are what reports know of any case."""

    grids: tuple[Grid, ...]
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> VisionCase:
        """Read the one-line form. Raises: VisionCaseError, quoting the word that is wrong."""
        grids = []
        for word in text.split():
            match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,4})", word)
            if not match:
                raise VisionCaseError(f"{word!r} is not a grid: frames, height, width in patches, such as 1x4x6")
            frames, height, width = (int(number) for number in match.groups())
            grids.append((frames, height, width))
        if not grids:
            raise VisionCaseError("a case needs at least one grid, such as 1x4x6")
        return cls(tuple(grids), seed)

    def text(self) -> str:
        return " ".join("x".join(map(str, grid)) for grid in self.grids)

    @property
    def tokens(self) -> int:
        """How many patches: the rows of most tensors."""
        return patch_count(self.grids)

    def pixels(self, config: VisionConfig) -> Tensor:
        """[N, X] float32: 8-bit levels by seed, normalised as the processor does; equal on every machine.

        A patch has a level of its own and noise around it, so that patches differ in brightness as in contrast.
        """
        channels, area = config.num_channels, config.patch_size**2
        raw = np.random.PCG64(seed_of(self.seed, f"pixels of {self.text()}"))
        level_N11 = (raw.random_raw(self.tokens) >> np.uint64(57)).astype(np.int64)[:, None, None]
        noise_NCA = (raw.random_raw(self.tokens * channels * area) >> np.uint64(57)).astype(np.int64)
        levels_NCA = level_N11 + noise_NCA.reshape(self.tokens, channels, area)
        mean_C1, std_C1 = (np.resize(values, channels)[:, None] for values in (IMAGE_MEAN, IMAGE_STD))
        return torch.from_numpy(((levels_NCA / 255 - mean_C1) / std_C1).astype(np.float32).reshape(self.tokens, -1))
