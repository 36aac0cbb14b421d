"""Images: sizes, resampling, decoding, patch order, and everything that is refused."""

import io
import json
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from hypothesis import assume, event, example, given
from hypothesis import strategies as st
from media_files import checkerboard, encoded, noise, smooth, turned_jpeg
from PIL import Image

from reference.config import released
from reference.errors import ConfigError, MissingPackageError
from reference.media.errors import ImageError
from reference.media.image import (
    check_placeholders,
    image_of_rows,
    normalise,
    patch_rows,
    preprocess_image,
    preprocess_images,
    resize,
)
from reference.media.image_config import CLIP_MEAN, CLIP_STD, ImageConfig, ImageRequest
from reference.media.image_decode import DecodeRules, decode_image
from reference.media.image_resample import Resampler
from reference.media.image_size import CELL, PixelBounds, cells, fitted_size, image_size, patch_grid

BOUNDS = PixelBounds()
SIDES = st.sampled_from([7, 13, 14, 15, 27, 28, 29, 41, 42, 43, 70, 98, 1008]) | st.integers(7, 6000)
SMALL = st.integers(1, 60)

# Section 2.2: (height, width), resized, tokens.
SIZES = [
    *(((side, side), (56, 56), 4) for side in (7, 14, 28, 42, 56)),
    ((70, 98), (56, 112), 8),
    ((336, 448), (336, 448), 192),
    ((720, 1280), (728, 1288), 1196),
    ((1000, 1000), (1008, 1008), 1296),
    ((1000, 1020), (1008, 1008), 1296),
    ((1080, 1920), (756, 1344), 1296),
    ((2000, 3000), (812, 1232), 1276),
    ((4032, 3024), (1148, 868), 1271),
    ((100, 20000), (56, 14252), 1018),
    ((10, 292), (28, 280), 10),
    ((1500, 8), (1512, 28), 54),
    ((7, 100), (28, 112), 4),
]


@pytest.mark.parametrize(("size", "expected", "tokens"), SIZES)
def test_the_size_rule(size, expected, tokens):
    assert image_size(*size, BOUNDS) == expected
    assert cells(*expected) == tokens


def test_above_the_bound_only_after_rounding():
    """1079 x 939 is below the bound, rounds above it and is reduced."""
    assert 1079 * 939 < BOUNDS.max_pixels < 1092 * 952
    height, width = image_size(1079, 939, BOUNDS)
    assert height * width <= BOUNDS.max_pixels


@given(SIDES, SIDES)
@example(100, 20000)
def test_sizes_are_aligned_bounded_stable_and_symmetric(height, width):
    assume(max(height, width) <= 200 * min(height, width))
    size = image_size(height, width, BOUNDS)
    assert all(side >= CELL and side % CELL == 0 for side in size)
    assert all(count % 2 == 0 for count in patch_grid(*size)[1:])
    assert BOUNDS.min_pixels <= size[0] * size[1] <= BOUNDS.max_pixels
    # By the rule alone: rounding may take a long image past 200 to 1.
    assert fitted_size(*size, BOUNDS.min_pixels, BOUNDS.max_pixels) == size
    assert image_size(width, height, BOUNDS) == size[::-1]


@pytest.mark.parametrize("size", [(6, 100), (100, 6), (7, 1401), (0, 5)])
def test_impossible_sides_are_refused_with_their_numbers(size):
    with pytest.raises(ImageError, match=f"{size[0]} x {size[1]}"):
        image_size(*size, BOUNDS)


@given(SMALL, SMALL, SMALL, SMALL, st.integers(0, 2**32 - 1), st.booleans())
@example(113, 251, 112, 252, 0, False)
@example(47, 99, 28, 112, 0, False)
@example(60, 60, 13, 13, 0, True)
def test_resampling_is_bitwise_the_definition(height, width, new_height, new_width, seed, is_checkerboard):
    image = checkerboard(height, width) if is_checkerboard else noise(height, width, seed=seed)
    assert np.array_equal(resize(image, new_height, new_width), Resampler()(image, new_height, new_width))


@given(SMALL, SMALL, SMALL, SMALL, st.integers(0, 255))
def test_a_constant_image_stays_constant(height, width, new_height, new_width, value):
    image = np.full((height, width, 3), value, dtype=np.uint8)
    assert (resize(image, new_height, new_width) == value).all()


def test_an_unchanged_size_is_a_copy():
    image = noise(56, 84)
    assert np.array_equal(resize(image, 56, 84), image)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 100))
def test_rows_are_patches_in_merge_blocks(block_rows, block_columns, seed):
    image = noise(28 * block_rows, 28 * block_columns, seed=seed)
    rows = patch_rows(image)
    h, w = 2 * block_rows, 2 * block_columns
    assert rows.shape == (h * w, 588)
    for y in range(h):
        for x in range(w):
            row = ((y // 2) * (w // 2) + x // 2) * 4 + (y % 2) * 2 + x % 2
            patch = image[14 * y : 14 * y + 14, 14 * x : 14 * x + 14]
            assert np.array_equal(rows[row], patch.transpose(2, 0, 1).ravel())
    assert np.array_equal(image_of_rows(rows, (1, h, w)), image)


def test_normalisation_is_two_float32_divisions():
    values = np.arange(256, dtype=np.uint8).reshape(1, 256, 1).repeat(3, axis=2)
    out = normalise(values, CLIP_MEAN, CLIP_STD)
    assert out.dtype == np.float32
    for channel in range(3):
        for value in (0, 1, 127, 255):
            scaled = np.float32(np.float32(value) / np.float32(255))
            expected = (scaled - np.float32(CLIP_MEAN[channel])) / np.float32(CLIP_STD[channel])
            assert out[0, value, channel] == expected


def test_images_in_one_call_equal_each_alone():
    images = [noise(100, 60, seed=1), noise(56, 200, seed=2), noise(30, 30, seed=3)]
    together = preprocess_images(images)
    alone = [preprocess_image(image) for image in images]
    assert torch.equal(together.pixels_PX, torch.cat([part.pixels_PX for part in alone]))
    assert together.grids_N3.tolist() == [part.grids_N3[0].tolist() for part in alone]
    assert together.grids_N3.dtype == torch.int64
    assert together.pixels_PX.dtype == torch.float32
    assert together.tokens == tuple(part.tokens[0] for part in alone)
    assert together.pixels_PX.shape == (4 * sum(together.tokens), 588)


def test_the_number_of_images_and_placeholders_is_checked():
    with pytest.raises(ImageError, match="found 513"):
        preprocess_images([noise(8, 8)] * 513)
    with pytest.raises(ImageError, match="found 0"):
        preprocess_images([])
    images = preprocess_images([noise(56, 56)])
    check_placeholders(4, images)
    with pytest.raises(ImageError, match=r"5 image placeholders.* take 4"):
        check_placeholders(5, images)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ImageRequest(max_pixels=200_000), (308, 588)),
        (ImageRequest(detail="low"), (140, 252)),
        (ImageRequest(detail="low", max_pixels=200_000), (308, 588)),
        (ImageRequest(target_height=100, target_width=100), (112, 112)),
        (ImageRequest(target_width=5600), (336, 2800)),
    ],
)
def test_a_request_changes_bounds_and_sides(request_, expected):
    config = ImageConfig(details={"low": PixelBounds(3136, 40_000)})
    size = preprocess_image(smooth(720, 1280), config, request_).grids_N3[0, 1:] * 14
    assert tuple(size.tolist()) == expected


def test_unknown_details_and_impossible_bounds_are_refused():
    with pytest.raises(ImageError, match="unknown detail 'high'"):
        ImageRequest(detail="high").bounds(ImageConfig())
    with pytest.raises(ImageError, match="at most max_pixels"):
        ImageRequest(min_pixels=2_000_000).bounds(ImageConfig())
    with pytest.raises(ImageError, match="target sides"):
        ImageRequest(target_width=-1).sides(10, 10)


PROCESSOR = {
    "vision_config": {
        "min_pixels": 3136,
        "max_pixels": 1_016_064,
        "patch_size": 14,
        "temporal_patch_size": 1,
        "merge_size": 2,
        "image_mean": list(CLIP_MEAN),
        "image_std": list(CLIP_STD),
    }
}


def test_the_processor_file_is_read_from_its_nested_object(tmp_path):
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(PROCESSOR))
    assert ImageConfig.from_json(path, released().vision) == ImageConfig()
    details = {"image_details": {"low": {"min_pixels": 3136, "max_pixels": 50_000}}}
    read = ImageConfig.from_json({"vision_config": PROCESSOR["vision_config"] | details})
    assert read.details == {"low": PixelBounds(3136, 50_000)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"patch_size": 16}, "patch_size"),
        ({"merge_size": 1}, "merge_size"),
        ({"temporal_patch_size": 2}, "temporal_patch_size"),
        ({"pre_pixel_shuffle": False}, "pre_pixel_shuffle"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        ({"min_pixels": 2_000_000}, "min_pixels"),
        ({"max_pixels": "1016064"}, "max_pixels"),
        ({"image_details": {"low": 5}}, "low"),
    ],
)
def test_a_processor_file_for_another_tower_is_refused(change, named):
    with pytest.raises(ConfigError, match=named):
        ImageConfig.from_json({"vision_config": PROCESSOR["vision_config"] | change})


def test_a_flat_or_broken_processor_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="vision_config"):
        ImageConfig.from_json(PROCESSOR["vision_config"])
    path = tmp_path / "preprocessor_config.json"
    for text in ("{", "[]", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
            ImageConfig.from_json(path)


# What each file format keeps bitwise.
@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("PPM", {})],
)
def test_lossless_files_give_their_pixels(kind, options, tmp_path):
    image = noise(20, 30)
    data = encoded(image, kind, **options)
    path = tmp_path / "image"
    path.write_bytes(data)
    for source in (data, path, str(path), image, Image.fromarray(image)):
        assert np.array_equal(decode_image(source), image)


def test_lossy_files_come_close():
    image = smooth(64, 96)
    for kind in ("JPEG", "WEBP"):
        out = decode_image(encoded(image, kind, quality=95)).astype(int)
        assert np.abs(out - image).mean() < 3


def test_an_animation_is_its_first_frame():
    first, second = (Image.fromarray(np.full((16, 16), value, dtype=np.uint8)) for value in (10, 200))
    for kind in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(first.convert("RGB"), kind, save_all=True, append_images=[second.convert("RGB")], **options)
        assert (decode_image(data) == 10).all()


# Modes without transparency: a value, and what all three channels become.
@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 7, (7, 7, 7)),
        ("RGB", (1, 2, 3), (1, 2, 3)),
        ("RGBX", (1, 2, 3, 9), (1, 2, 3)),
        ("CMYK", (255, 0, 0, 0), (0, 255, 255)),
        ("HSV", (0, 0, 9), (9, 9, 9)),
        ("YCbCr", (9, 128, 128), (9, 9, 9)),
        ("I", 9, (9, 9, 9)),
        ("I", 300, (255, 255, 255)),
        ("I;16", 256, (255, 255, 255)),
        ("F", 9.4, (9, 9, 9)),
    ],
)
def test_modes_are_converted(mode, value, expected):
    out = decode_image(Image.new(mode, (9, 8), value))
    assert out.shape == (8, 9, 3)
    assert (out == np.array(expected, dtype=np.uint8)).all()


def test_greys_of_16_bits_are_clipped_not_scaled():
    greys = np.array([[0, 1, 128, 255, 256, 257, 4000, 65535]], dtype=np.uint16)
    expected = [0, 1, 128, 255, 255, 255, 255, 255]
    for data in (encoded(Image.fromarray(greys), "PNG"), encoded(Image.fromarray(greys), "TIFF")):
        assert decode_image(data)[0, :, 0].tolist() == expected


def palette_with_hole() -> bytes:
    """A palette PNG of red and green of which green is transparent (tRNS)."""
    image = Image.new("P", (8, 8), 0)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.paste(1, (0, 0, 8, 4))
    return encoded(image, "PNG", transparency=1)


def test_c51_transparent_becomes_white_in_every_mode():
    white = np.full((8, 8, 3), 255, dtype=np.uint8)
    assert np.array_equal(decode_image(encoded(Image.new("RGBA", (8, 8), (9, 8, 7, 0)), "PNG")), white)
    assert np.array_equal(decode_image(encoded(Image.new("LA", (8, 8), (9, 0)), "PNG")), white)
    assert np.array_equal(decode_image(np.zeros((8, 8, 4), dtype=np.uint8)), white)
    palette = decode_image(palette_with_hole())
    assert (palette[:4] == 255).all()
    assert (palette[4:] == (255, 0, 0)).all()
    colour_key = Image.new("RGB", (8, 8), (1, 2, 3))
    assert np.array_equal(decode_image(encoded(colour_key, "PNG", transparency=(1, 2, 3))), white)


def test_c51_rgba_only_shows_hidden_colours_of_other_modes():
    rules = DecodeRules(transparency="rgba_only")
    assert (decode_image(encoded(Image.new("LA", (8, 8), (9, 0)), "PNG"), rules) == 9).all()
    assert (decode_image(palette_with_hole(), rules)[:4] == (0, 255, 0)).all()
    assert (decode_image(Image.new("RGBA", (8, 8), (9, 8, 7, 0)), rules) == 255).all()


def test_blending_over_white_is_rounded_to_the_nearest_level():
    """All pairs of alpha and value; pasting with a mask and alpha compositing give the same bits."""
    alpha, value = np.mgrid[:256, :256].astype(np.uint8)
    rgba = np.stack([value, value, value, alpha], axis=-1)
    out = decode_image(rgba)
    exact = (alpha.astype(float) * value + (255.0 - alpha) * 255) / 255
    assert np.abs(out[..., 0] - exact).max() <= 0.5
    background = Image.new("RGBA", (256, 256), (255, 255, 255, 255))
    composite = Image.alpha_composite(background, Image.fromarray(rgba)).convert("RGB")
    assert np.array_equal(out, np.array(composite))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_c51_orientation_is_ignored_unless_asked_for(orientation):
    image = smooth(40, 64)
    data = turned_jpeg(image, orientation)
    stored = decode_image(data)
    assert stored.shape == image.shape
    turned = decode_image(data, DecodeRules(orientation="exif"))
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(stored),
    }[orientation]
    assert np.array_equal(turned, upright)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "not an image"),
        (b"no image at all", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        ("nowhere/at/all.png", "not a file"),
        ("/dev/zero", "not a file"),
        (5, "found int"),
        (np.zeros((8, 8, 3), dtype=np.float32), "float32"),
        (np.zeros((8, 8), dtype=np.uint8), "uint8"),
        (np.zeros((0, 8, 3), dtype=np.uint8), "no pixels"),
        (Image.new("RGB", (0, 4)), "no pixels"),
    ],
)
def test_what_is_no_image_is_refused(source, message):
    with pytest.raises(ImageError, match=message):
        preprocess_image(source)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_a_cut_file_is_an_error_never_a_grey_image(kind):
    data = encoded(noise(64, 64), kind)
    for kept in range(0, int(len(data) * 0.9), max(1, len(data) // 25)):
        with pytest.raises(ImageError):
            decode_image(data[:kept])


@given(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"]), st.data())
def test_damaged_files_give_pixels_or_a_named_error(kind, data):
    file = bytearray(encoded(noise(24, 24), kind))
    for _ in range(data.draw(st.integers(1, 8))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        out = decode_image(bytes(file), DecodeRules(max_file_pixels=1_000_000))
    except ImageError:
        event("refused")
    else:
        assert out.dtype == np.uint8
        assert out.ndim == 3


def png_that_announces(width: int, height: int) -> bytes:
    """A valid PNG header, and next to nothing behind it."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (30_000, 30_000), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_on_its_header(width, height):
    with pytest.raises(ImageError, match=r"bomb|at most 89,478,485"):
        decode_image(png_that_announces(width, height))


def test_the_pixel_limit_is_the_callers():
    image = encoded(noise(20, 30), "PNG")
    with pytest.raises(ImageError, match="at most 599"):
        decode_image(image, DecodeRules(max_file_pixels=599))
    assert decode_image(image, DecodeRules(max_file_pixels=600)).shape == (20, 30, 3)


def test_an_image_that_is_open_but_damaged_is_refused():
    damaged = Image.open(io.BytesIO(encoded(noise(64, 64), "PNG")[:5000]))
    with pytest.raises(ImageError, match="damaged"):
        decode_image(damaged)


def test_a_bad_image_is_named_by_its_number():
    with pytest.raises(ImageError, match=r"images\[1\]: image: not an image of a known format"):
        preprocess_images([noise(8, 8), b"broken"])


def test_a_phone_picture_with_several_frames_is_its_first():
    first, second = (Image.fromarray(np.full((16, 16, 3), value, dtype=np.uint8)) for value in (10, 200))
    data = encoded(first, "MPO", save_all=True, append_images=[second])
    assert (decode_image(data) == 10).all()


def test_without_pillow_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingPackageError, match="Pillow is needed"):
        decode_image(noise(8, 8))


def test_unknown_rules_are_refused():
    with pytest.raises(ImageError, match="transparency"):
        DecodeRules(transparency="black")
    with pytest.raises(ImageError, match="orientation"):
        DecodeRules(orientation="up")
