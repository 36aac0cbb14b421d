"""Mistakes on the way from an image file to patch rows.

Source: image_video specification, section 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parity.faults.fault import Fault, Patch, Visibility
from reference.media import image, image_decode, image_size
from reference.media.image_config import ImageRequest
from reference.media.image_resample import Resampler, keys_cubic, triangle
from reference.media.image_size import CELL, MERGE, PATCH, PixelBounds

# H, W sides  C channels

# What `media_outcome` of the tests observes of an image, in the order it is computed.
RGB, SIZE, RESIZED, ROWS = "image.rgb", "image.size", "image.resized", "image.rows"

Resize = Callable[[np.ndarray, int, int], np.ndarray]


def image_fault(
    fault_id: str,
    says: str,
    first: str,
    visible_when: str,
    *patches: Patch,
    source: str = "analysis",
    visibility: Visibility = "V",
) -> Fault:
    return Fault(fault_id, says, visibility, (first,), visible_when, source, patches=patches)


def resized_by(resize: Resize) -> Patch:
    """A patch of the resize: `resize(image_HWC, height, width)`."""
    return Patch(image, "resize", lambda original: resize)


def _nearest(rgb_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    rows, columns = (
        np.floor((np.arange(new) + 0.5) * old / new).astype(int)
        for new, old in zip((height, width), rgb_HWC.shape, strict=False)
    )
    return rgb_HWC[rows][:, columns]


def _vertical_first(rgb_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    return Resampler()(rgb_HWC.transpose(1, 0, 2), width, height).transpose(1, 0, 2)


def _letterboxed(original: Resize) -> Resize:
    def resize(rgb_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
        scale = min(height / rgb_HWC.shape[0], width / rgb_HWC.shape[1])
        tall, wide = (
            max(1, min(limit, round(side * scale))) for limit, side in zip((height, width), rgb_HWC.shape, strict=False)
        )
        out_HWC = np.zeros((height, width, 3), dtype=np.uint8)
        top, left = (height - tall) // 2, (width - wide) // 2
        out_HWC[top : top + tall, left : left + wide] = original(rgb_HWC, tall, wide)
        return out_HWC

    return resize


def _source_stride(original: Resize) -> Resize:
    def resize(rgb_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
        out_HWC = original(rgb_HWC, height, width)
        values = np.arange(height)[:, None] * rgb_HWC.shape[1] * 3 + np.arange(width * 3)
        return out_HWC.ravel()[values % out_HWC.size].reshape(height, width, 3)

    return resize


def _half_up(side: float) -> int:
    return max(CELL, CELL * int(side / CELL + 0.5))


def _qwen_size(height: int, width: int, bounds: PixelBounds) -> tuple[int, int]:
    tall, wide = CELL * round(height / CELL), CELL * round(width / CELL)
    if bounds.min_pixels <= tall * wide <= bounds.max_pixels:
        return tall, wide
    scale = (bounds.max_pixels if tall * wide > bounds.max_pixels else bounds.min_pixels) / (height * width)
    if scale < 1:
        return image_size.floored(height * scale**0.5), image_size.floored(width * scale**0.5)
    return CELL * int(np.ceil(height * scale**0.5 / CELL)), CELL * int(np.ceil(width * scale**0.5 / CELL))


def _bounds_up_to(max_pixels: int) -> Patch:
    return Patch(ImageRequest, "bounds", lambda original: lambda request, config: PixelBounds(3136, max_pixels))


def _normalised_with(mean: tuple[float, ...] | None, std: tuple[float, ...] | None, scale: float = 255.0) -> Patch:
    """Other statistics; None keeps the config's."""

    def make(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def normalise(rgb_HWC: np.ndarray, right_mean: Any, right_std: Any) -> np.ndarray:
            scaled_HWC = rgb_HWC.astype(np.float32) / np.float32(scale)
            centred_HWC = scaled_HWC - np.array(mean or right_mean, dtype=np.float32)
            return centred_HWC / np.array(std or right_std, dtype=np.float32)

        return normalise

    return Patch(image, "normalise", make)


def _scalar_statistics(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda rgb_HWC, mean, std: original(rgb_HWC, (mean[0],) * 3, (std[0],) * 3)


def _fused(rgb_HWC: np.ndarray, mean: Any, std: Any) -> np.ndarray:
    mean_C, std_C = (np.array(values, dtype=np.float32) * np.float32(255) for values in (mean, std))
    return (rgb_HWC.astype(np.float32) - mean_C) / std_C


def _multiplied(rgb_HWC: np.ndarray, mean: Any, std: Any) -> np.ndarray:
    scaled_HWC = rgb_HWC.astype(np.float32) * np.float32(1 / 255)
    return (scaled_HWC - np.array(mean, dtype=np.float32)) / np.array(std, dtype=np.float32)


def _raster_rows(image_HWC: np.ndarray) -> np.ndarray:
    H, W, C = image_HWC.shape
    patches = image_HWC.reshape(H // PATCH, PATCH, W // PATCH, PATCH, C)
    return patches.transpose(0, 2, 4, 1, 3).reshape(-1, C * PATCH * PATCH)


def _channels_last_rows(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def rows(image_HWC: np.ndarray) -> np.ndarray:
        patches = original(image_HWC).reshape(-1, 3, PATCH, PATCH)
        return patches.transpose(0, 2, 3, 1).reshape(-1, 3 * PATCH * PATCH)

    return rows


def _column_blocks(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def rows(image_HWC: np.ndarray) -> np.ndarray:
        in_blocks = original(image_HWC).reshape(-1, MERGE, MERGE, 3 * PATCH * PATCH)
        return in_blocks.transpose(0, 2, 1, 3).reshape(-1, 3 * PATCH * PATCH)

    return rows


def _scaled_greys(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_rgb(picture: Any, where: str, rules: Any) -> Any:
        if picture.mode.startswith("I;16"):
            grey_HW = (np.array(picture).astype(np.uint16) >> 8).astype(np.uint8)
            return np.repeat(grey_HW[..., None], 3, axis=2)
        return original(picture, where, rules)

    return to_rgb


_DOWN = "an image that shrinks"
_ANY_RESIZE = "an image that is resized"
_ANY = "any image"

IMAGE_FAULTS = (
    image_fault(
        "image_resize_no_antialias",
        "four-tap bicubic: the filter does not widen when the image shrinks",
        RESIZED,
        _DOWN,
        resized_by(Resampler(is_antialiased=False)),
        source="llama.cpp issue 27594",
    ),
    image_fault(
        "image_resize_torch_a075",
        "the cubic kernel has a = -0.75 in place of -0.5 (torch's interpolate, OpenCV)",
        RESIZED,
        _ANY_RESIZE,
        resized_by(Resampler(kernel=keys_cubic(-0.75))),
    ),
    image_fault(
        "image_resize_bilinear",
        "resized with the bilinear kernel",
        RESIZED,
        _ANY_RESIZE,
        resized_by(Resampler(kernel=triangle, reach=1.0)),
    ),
    image_fault("image_resize_nearest", "resized by nearest neighbour", RESIZED, _ANY_RESIZE, resized_by(_nearest)),
    image_fault(
        "image_resize_float_two_pass",
        "both passes in floating point, without 8 bits between them",
        RESIZED,
        "an image resized along both axes, hard edges",
        resized_by(Resampler(is_fixed_point=False)),
    ),
    image_fault(
        "image_resize_vertical_first",
        "the vertical pass comes first (Pillow from 13 on, for both axes in one call, where that saves work)",
        RESIZED,
        "an image resized along both axes, hard edges",
        resized_by(_vertical_first),
        source="python-pillow issue 9549",
    ),
    image_fault(
        "image_letterbox",
        "the aspect is kept and the rest padded with black",
        RESIZED,
        "an image whose rounded sides have another aspect",
        Patch(image, "resize", _letterboxed),
        source="llama.cpp",
    ),
    image_fault(
        "image_source_stride",
        "the resized buffer is read with the row stride of the original",
        RESIZED,
        "a width that changes",
        Patch(image, "resize", _source_stride),
    ),
    image_fault(
        "image_round_half_up",
        "half cells are rounded up in place of to the even cell",
        SIZE,
        "a side of 70 pixels (2.5 cells)",
        Patch(image_size, "rounded", lambda original: _half_up),
        source="llama.cpp",
    ),
    image_fault(
        "image_factor_14",
        "sides are multiples of 14 in place of 28",
        SIZE,
        "a side nearer to an odd multiple of 14",
        Patch(image_size, "CELL", lambda original: PATCH),
    ),
    image_fault(
        "image_size_qwen",
        "Qwen2-VL's rule, where a short side may round to no cell at all",
        SIZE,
        "a side of 7 to 14 pixels",
        Patch(image, "image_size", lambda original: _qwen_size),
        source="transformers 5.24",
    ),
    image_fault(
        "image_max_1003520",
        "at most 1,003,520 pixels, Qwen2-VL's default",
        SIZE,
        "an image of more than 1280 tokens",
        _bounds_up_to(1_003_520),
        source="transformers 5.24 without a processor file",
    ),
    image_fault(
        "image_max_12845056",
        "at most 12,845,056 pixels",
        SIZE,
        "an image of more than 1296 tokens",
        _bounds_up_to(12_845_056),
        source="vllm.cpp's fallback",
    ),
    image_fault(
        "image_hw_swapped",
        "height and width of the target are exchanged",
        SIZE,
        "an image that is not square",
        Patch(image, "image_size", lambda original: lambda h, w, bounds: original(h, w, bounds)[::-1]),
    ),
    image_fault(
        "image_norm_half",
        "mean and deviation are 0.5",
        ROWS,
        _ANY,
        _normalised_with((0.5,) * 3, (0.5,) * 3),
        source="vllm.cpp, a flat reader of the processor file",
    ),
    image_fault(
        "image_norm_scalar",
        "the statistics of red serve for all channels",
        ROWS,
        _ANY,
        Patch(image, "normalise", _scalar_statistics),
    ),
    image_fault(
        "image_norm_imagenet",
        "ImageNet's mean and deviation in place of CLIP's",
        ROWS,
        _ANY,
        _normalised_with((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ),
    image_fault(
        "image_norm_no_std",
        "the mean is subtracted and nothing divided",
        ROWS,
        _ANY,
        _normalised_with(None, (1.0,) * 3),
    ),
    image_fault(
        "image_no_rescale",
        "pixels of 0..255 go into the normalisation of 0..1",
        ROWS,
        _ANY,
        _normalised_with(None, None, scale=1.0),
    ),
    image_fault(
        "image_rescale_256", "pixels are divided by 256", ROWS, _ANY, _normalised_with(None, None, scale=256.0)
    ),
    image_fault(
        "image_norm_fused",
        "scale and statistics are folded: (p - 255 mean) / (255 std), rounded elsewhere",
        ROWS,
        "any image, in float32; gone after the cast to bfloat16",
        Patch(image, "normalise", lambda original: _fused),
        source="transformers 5.24 on torchvision",
        visibility="N",
    ),
    image_fault(
        "image_rescale_multiplied",
        "pixels are multiplied by a float32 1/255",
        ROWS,
        "any image, in float32; gone after the cast to bfloat16",
        Patch(image, "normalise", lambda original: _multiplied),
        source="vmlx",
        visibility="N",
    ),
    image_fault(
        "image_bgr",
        "channels come in the order B, G, R",
        RGB,
        "an image with colour",
        Patch(image, "decode_image", lambda original: lambda *arguments: original(*arguments)[..., ::-1].copy()),
    ),
    image_fault(
        "image_alpha_black",
        "transparency is laid over black",
        RGB,
        "an image with transparency",
        Patch(image_decode, "WHITE", lambda original: (0, 0, 0)),
        source="vLLM issue 44974",
    ),
    image_fault(
        "image_alpha_dropped",
        "alpha is dropped, and hidden colours show",
        RGB,
        "an image with transparency",
        Patch(image_decode, "over_white", lambda original: lambda picture: picture.convert("RGBA").convert("RGB")),
        source="vLLM issue 18569",
    ),
    image_fault(
        "image_exif_applied",
        "the file's orientation is applied",
        RGB,
        "a photo with an orientation tag",
        Patch(
            image_decode,
            "_to_rgb",
            lambda original: lambda picture, where, rules: original(image_decode.upright(picture), where, rules),
        ),
    ),
    image_fault(
        "image_grey16_scaled",
        "greys of 16 bits are scaled to 8 bits in place of clipped",
        RGB,
        "a grey image of 16 bits",
        Patch(image_decode, "_to_rgb", _scaled_greys),
    ),
    image_fault(
        "image_rows_raster",
        "patches come row by row, not in merge blocks",
        ROWS,
        "more than one merge block in a row",
        Patch(image, "patch_rows", lambda original: _raster_rows),
    ),
    image_fault(
        "image_rows_column_major",
        "the four patches of a merge block come column by column",
        ROWS,
        _ANY,
        Patch(image, "patch_rows", _column_blocks),
    ),
    image_fault(
        "image_columns_channels_last",
        "the values of a patch come pixel by pixel, not channel by channel",
        ROWS,
        "an image with colour",
        Patch(image, "patch_rows", _channels_last_rows),
    ),
)
