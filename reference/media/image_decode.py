"""From an image file (or a decoded image) to 8-bit RGB; what implementations do differently is a named choice.

Transparency
    `white`      every mode that can carry it is laid over white: p' = (a p + (255 - a) 255) / 255, rounded
                 (transformers). Default
    `rgba_only`  RGBA is; grey with alpha and palettes lose their alpha and show the hidden colours (vLLM, SGLang)
Orientation
    `ignore`     the pixels as stored (vLLM, SGLang, transformers). Default
    `exif`       turned upright as the file's EXIF tag says, as a viewer does
Animation: the first frame.

Other modes are converted by Pillow. Two results worth knowing: CMYK is converted without its colour profile, and greys
of 16 bits, 32 bits or floating point are *clipped* at 255, not scaled.

A file is refused before it is decoded when its header announces too many pixels; decoding is limited to formats that
Pillow decodes itself. A truncated or corrupt file is an error, never a grey image.
Source: image_video specification, sections 2.1 and 2.5.
"""

import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from reference.media.errors import ImageError
from reference.media.packages import pillow_image

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

ImageSource: TypeAlias = "bytes | str | os.PathLike[str] | np.ndarray | PillowImage"

# Not EPS and the like, which run other programs. A JPEG of several pictures (MPO, from phones) is a JPEG.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
WHITE = (255, 255, 255)


@dataclass(frozen=True)
class DecodeRules:
    """See the module. `max_file_pixels`: what a header may announce; each takes up to about 14 bytes of memory."""

    transparency: Literal["white", "rgba_only"] = "white"
    orientation: Literal["ignore", "exif"] = "ignore"
    max_file_pixels: int = 89_478_485

    def __post_init__(self) -> None:
        for name, allowed in (
            ("transparency", ("white", "rgba_only")),
            ("orientation", ("ignore", "exif")),
        ):
            if getattr(self, name) not in allowed:
                raise ImageError(f"decode rules: {name} must be {' or '.join(allowed)}, found {getattr(self, name)!r}")


def decode_image(source: ImageSource, rules: DecodeRules | None = None) -> np.ndarray:
    """8-bit RGB of an image: uint8 [height, width, 3].

    source: the bytes of a file, its path, a Pillow image, or a uint8 array [height, width, 3 or 4] (RGB or RGBA).
    Raises: ImageError, with the decoder's reason; MissingPackageError without Pillow.
    """
    rules = rules or DecodeRules()
    Image = pillow_image()
    if isinstance(source, np.ndarray):
        _check_array(source)
        return _to_rgb(Image.fromarray(source), "image array", rules)
    if isinstance(source, Image.Image):
        return _to_rgb(source, "image", rules)
    if isinstance(source, bytes):
        return _decode_file(io.BytesIO(source), "image", rules)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        # A pipe or a device would be read without end.
        if not path.is_file():
            raise ImageError(f"{path}: not a file")
        try:
            with path.open("rb") as file:
                return _decode_file(file, str(path), rules)
        except OSError as error:
            raise ImageError(f"{path}: cannot be read: {error}") from error
    raise ImageError(
        f"image: must be a file's bytes, a path, a Pillow image or a uint8 array, found {type(source).__name__}"
    )


def _check_array(array: np.ndarray) -> None:
    # Values in 0..1 are not guessed at: a black image has them too.
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (3, 4):
        raise ImageError(f"image array: must be uint8 [height, width, 3 or 4], found {array.dtype} {list(array.shape)}")
    if 0 in array.shape:
        raise ImageError(f"image array: has no pixels, shape {list(array.shape)}")


def _decode_file(file: Any, where: str, rules: DecodeRules) -> np.ndarray:
    Image = pillow_image()
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images at a limit of its own; `_to_rgb` checks ours.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageError(f"{where}: refused as a decompression bomb: {error}") from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"{where}: not an image of a known format ({', '.join(FORMATS)})") from error
    except Exception as error:  # a parser fed with broken bytes raises nearly anything
        raise ImageError(f"{where}: cannot be opened as an image: {error!r}") from error
    with image:
        return _to_rgb(image, where, rules)


def _to_rgb(image: Any, where: str, rules: DecodeRules) -> np.ndarray:
    width, height = image.size
    if width * height == 0:
        raise ImageError(f"{where}: has no pixels, {height} x {width} (h x w)")
    if width * height > rules.max_file_pixels:
        raise ImageError(
            f"{where}: {height} x {width} (h x w) = {width * height:,} pixels; "
            f"at most {rules.max_file_pixels:,} are decoded"
        )
    try:
        if rules.orientation == "exif":
            image = upright(image)
        has_alpha = image.mode == "RGBA" if rules.transparency == "rgba_only" else image.has_transparency_data
        # A copy: Pillow's own buffer is read-only.
        return np.array(over_white(image) if has_alpha else image.convert("RGB"))
    except Exception as error:  # as above: pixels are decoded here
        raise ImageError(f"{where}: damaged, or in a mode without conversion ({image.mode}): {error!r}") from error


def upright(image: Any) -> Any:
    """The image turned as its EXIF orientation (1 to 8) says; the image itself where there is none."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def over_white(image: Any) -> Any:
    """The RGB image of an image with transparency, over white."""
    Image = pillow_image()
    rgba = image.convert("RGBA")
    background = Image.new("RGB", rgba.size, WHITE)
    background.paste(rgba, mask=rgba.getchannel("A"))
    return background
