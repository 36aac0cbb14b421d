"""What the released `preprocessor_config.json` says about images, and what one request may change.

The file nests the image keys under `vision_config`. A reader that looks at the top level misses all of them and
silently normalises with another model's statistics; so an absent object is refused, and so is one that contradicts the
tower.
Source: image_video specification, sections 1 and 2.2.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference.config import VisionConfig
from reference.errors import ConfigError
from reference.json_reader import JsonReader
from reference.media.errors import ImageError
from reference.media.image_size import MERGE, PATCH, PixelBounds

Channels = tuple[float, float, float]
# Statistics of the images that CLIP was trained on, R, G, B, of pixels scaled to 0..1.
CLIP_MEAN: Channels = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Channels = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ImageConfig:
    """Bounds, statistics (R, G, B of pixels scaled to 0..1) and named bounds (`detail` of a request)."""

    bounds: PixelBounds = field(default_factory=PixelBounds)
    mean: Channels = CLIP_MEAN
    std: Channels = CLIP_STD
    details: Mapping[str, PixelBounds] = field(default_factory=dict)

    @classmethod
    def from_json(
        cls, source: Mapping[str, Any] | str | os.PathLike[str], vision: VisionConfig | None = None
    ) -> ImageConfig:
        """Read a `preprocessor_config.json`: an object already parsed, or a path. `vision` is the tower's config.

        Raises: ConfigError, naming the key, what it must be and what was found.
        """
        values, where = (source, "preprocessor config") if isinstance(source, Mapping) else _parsed(Path(source))
        reader = JsonReader(values, where).section("vision_config")
        if reader is None:
            raise ConfigError(
                f"{where}: the object 'vision_config' is absent; image keys at the top level are another model's"
            )
        reader.choice("patch_size", [PATCH])
        reader.choice("merge_size", [MERGE])
        reader.choice("temporal_patch_size", [1])
        # Patches in rows of merge blocks. The tower's own default is false, which is another order of rows.
        reader.choice("pre_pixel_shuffle", [True], default=True)
        if vision is not None and (vision.patch_size, vision.spatial_merge_size) != (PATCH, MERGE):
            raise ConfigError(
                f"{where}: patches of {PATCH} pixels merged {MERGE} x {MERGE}, but the tower has "
                f"patch_size = {vision.patch_size}, spatial_merge_size = {vision.spatial_merge_size}"
            )
        bounds = _bounds(reader, where)
        details = reader.section("image_details")
        return cls(
            bounds,
            _channels(reader, "image_mean", where),
            _channels(reader, "image_std", where),
            {} if details is None else {name: _detail(details, name, where) for name in details.unread()},
        )


@dataclass(frozen=True)
class ImageRequest:
    """What a request changes: pixel bounds beat the `detail` preset, which beats the config.

    `target_height` and `target_width` (pixels, 0 for none) replace the sides before rounding; bounds still apply.
    """

    detail: str = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    target_height: int = 0
    target_width: int = 0

    def bounds(self, config: ImageConfig) -> PixelBounds:
        """Raises: ImageError for an unknown detail, or bounds that exclude each other."""
        preset = config.details.get(self.detail)
        if preset is None:
            if self.detail != "auto":
                known = ", ".join(["auto", *sorted(config.details)])
                raise ImageError(f"image request: unknown detail {self.detail!r}; this processor has {known}")
            preset = config.bounds
        lowest = preset.min_pixels if self.min_pixels is None else self.min_pixels
        highest = preset.max_pixels if self.max_pixels is None else self.max_pixels
        return PixelBounds(lowest, highest)

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """The sides that the size rule starts from. Raises: ImageError for a negative target."""
        if min(self.target_height, self.target_width) < 0:
            raise ImageError(
                f"image request: target sides must be positive, or 0 for none, "
                f"found {self.target_height} x {self.target_width} (h x w)"
            )
        return self.target_height or height, self.target_width or width


def _parsed(path: Path) -> tuple[Mapping[str, Any], str]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: must hold one JSON object, found {type(values).__name__}")
    return values, str(path)


def _bounds(reader: JsonReader, where: str) -> PixelBounds:
    lowest, highest = reader.integer("min_pixels"), reader.integer("max_pixels")
    if lowest > highest:
        raise ConfigError(f"{where}: min_pixels must be at most max_pixels, found {lowest} and {highest}")
    return PixelBounds(lowest, highest)


def _detail(details: JsonReader, name: str, where: str) -> PixelBounds:
    entry = details.section(name)
    if entry is None:
        raise ConfigError(f"{where}: image_details: {name!r} must be an object with min_pixels and max_pixels")
    return _bounds(entry, f"{where}: image_details: {name}")


def _channels(reader: JsonReader, key: str, where: str) -> Channels:
    found: Any = reader.unread().get(key)
    is_list = isinstance(found, list | tuple)
    values = [value for value in found if type(value) in (int, float) and 0 < value < 1] if is_list else []
    if len(values) != 3 or len(values) != len(found):
        raise ConfigError(f"{where}: {key!r} must be three numbers between 0 and 1 (R, G, B), found {found!r}")
    return float(values[0]), float(values[1]), float(values[2])
