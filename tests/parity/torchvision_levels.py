"""Pixel levels of transformers' image processor on torchvision, recorded where that is installed.

    python tests/parity/torchvision_levels.py    # writes torchvision_levels.npz beside this file

An entry for each picture: `NAME.levels`, uint8 [patches, columns], the values before normalisation, and `NAME.grid`;
`made_by` says with which versions and when.
"""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np

RECORD = Path(__file__).with_suffix(".npz")
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def pictures() -> dict[str, np.ndarray]:
    """uint8 [height, width, 3]: noise, in which every level of rounding shows, made larger and made smaller; a ramp."""
    y, x = np.mgrid[:83, :130]
    return {
        "noise larger": np.random.default_rng(0).integers(0, 256, (61, 101, 3), dtype=np.uint8),
        "noise smaller": np.random.default_rng(1).integers(0, 256, (153, 71, 3), dtype=np.uint8),
        "ramp": np.stack([3 * y % 256, 2 * x % 256, (y + x) % 256], axis=-1).astype(np.uint8),
    }


def levels_of(pixels_PX: np.ndarray) -> np.ndarray:
    """uint8 [P, X] of normalised float32 pixels whose columns are channels first."""
    by_channel = pixels_PX.astype(np.float64).reshape(len(pixels_PX), 3, -1)
    mean, std = (np.array(values)[:, None] for values in (MEAN, STD))
    levels = (by_channel * std + mean) * 255
    assert np.abs(levels - levels.round()).max() < 1e-3, "not 8-bit levels"
    return levels.round().astype(np.uint8).reshape(pixels_PX.shape)


def record(path: Path) -> None:
    import PIL
    import torch
    import torchvision
    import transformers
    from PIL import Image
    from transformers import Qwen2VLImageProcessor

    values = {"min_pixels": 4 * 784, "max_pixels": 1296 * 784, "temporal_patch_size": 1}
    found: dict[str, np.ndarray] = {}
    for name, picture in pictures().items():
        made = Qwen2VLImageProcessor(**values)(images=[Image.fromarray(picture)], return_tensors="pt")
        found[f"{name}.levels"] = levels_of(made["pixel_values"].numpy())
        found[f"{name}.grid"] = made["image_grid_thw"].numpy()
    versions = ", ".join(
        f"{module.__name__} {module.__version__}" for module in (transformers, torchvision, torch, PIL)
    )
    found["made_by"] = np.array(f"Qwen2VLImageProcessor of {versions}; {datetime.now(UTC):%Y-%m-%d}")
    np.savez_compressed(path, **found)


if __name__ == "__main__":
    record(RECORD)
