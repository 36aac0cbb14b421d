"""Images against transformers' processor for dots3_note, an independent implementation.

Its Pillow processor must give the same bits, once it is told the bounds and a temporal patch of one, which its class
defaults have otherwise. Where the bits differ, the reason is one of these, and each is shown by giving it to the
reference:

pass order   transformers resizes both axes in one call, and Pillow from 13 on may then begin with the vertical one
palette      a palette in memory whose colours have alpha is transparent here, and not for transformers

Sizes follow Qwen2-VL's rule, which is NOTE's wherever both sides are at least 15 pixels; below, they may differ. Its
processor on torchvision runs only where that is installed; elsewhere its recorded levels are compared.
"""

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import assume, event, example, given
from hypothesis import strategies as st
from media_files import checkerboard, encoded, noise, smooth, turned_jpeg
from PIL import Image
from torchvision_levels import RECORD, levels_of, pictures, record

from reference.media import image as image_module
from reference.media.image import preprocess_image
from reference.media.image_size import PixelBounds, image_size

pytest.importorskip("transformers", reason="the oracle needs transformers 5.24")
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

BOUNDS = PixelBounds()
NOTE_VALUES = {"min_pixels": BOUNDS.min_pixels, "max_pixels": BOUNDS.max_pixels, "temporal_patch_size": 1}
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
SIDES = st.sampled_from([15, 27, 28, 29, 41, 42, 43, 70, 98, 113, 251]) | st.integers(15, 400)


def both(source):
    """(pixels, grid) of the reference and of transformers."""
    picture = Image.fromarray(source) if isinstance(source, np.ndarray) else source
    expected = Qwen2VLImageProcessorPil(**NOTE_VALUES)(images=[picture], return_tensors="pt")
    return preprocess_image(picture), expected


def resized_at_once(rgb_HWC, height, width):
    """Both axes in one call, as transformers does."""
    return np.array(Image.fromarray(rgb_HWC).resize((width, height), Image.Resampling.BICUBIC))


def assert_bitwise_equal(ours, expected):
    assert ours.grids_N3.tolist() == expected["image_grid_thw"].tolist()
    assert ours.pixels_PX.dtype == expected["pixel_values"].dtype == torch.float32
    assert torch.equal(ours.pixels_PX, expected["pixel_values"])


PICTURES = {"noise": noise, "smooth": smooth, "checkerboard": lambda height, width, seed: checkerboard(height, width)}


@given(SIDES, SIDES, st.integers(0, 100), st.sampled_from(sorted(PICTURES)))
@example(113, 251, 0, "noise")
@example(360, 640, 1, "noise")
@example(47, 999, 2, "noise")
def test_pixels_are_bitwise_equal(height, width, seed, kind):
    assume(max(height, width) <= 200 * min(height, width))
    pixels = PICTURES[kind](height, width, seed=seed)
    new_height, new_width = image_size(height, width, BOUNDS)
    with pytest.MonkeyPatch.context() as patch:
        if new_height < height and new_width != width:
            event("Pillow may begin with the vertical pass")
            patch.setattr(image_module, "resize", resized_at_once)
        assert_bitwise_equal(*both(pixels))


def test_the_order_of_passes_is_the_only_difference_and_is_large():
    """113 x 251 becomes 112 x 252: under a Pillow that begins with the vertical pass, levels apart."""
    pixels = noise(113, 251)
    ours, expected = both(pixels)
    is_vertical_first = tuple(map(int, Image.__version__.split(".")[:1])) >= (13,)
    assert torch.equal(ours.pixels_PX, expected["pixel_values"]) != is_vertical_first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_module, "resize", resized_at_once)
        assert_bitwise_equal(*both(pixels))


def test_large_images_are_bitwise_equal():
    for height, width in ((720, 1280), (1080, 1920), (1500, 700)):
        assert_bitwise_equal(*both(noise(height, width, seed=height)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
def test_every_mode_is_bitwise_equal(mode):
    if mode == "I;16":
        picture = Image.fromarray(noise(40, 60, 1).astype(np.uint16) * 3)
    elif mode == "PA":
        picture = Image.fromarray(noise(40, 60)).convert("P").convert("PA")
    else:
        picture = Image.fromarray(noise(40, 60, 3 if mode == "P" else 4)).convert(mode)
    assert picture.mode == mode
    assert_bitwise_equal(*both(picture))


@pytest.mark.parametrize(
    ("kind", "options"), [("PNG", {}), ("JPEG", {}), ("WEBP", {}), ("GIF", {}), ("TIFF", {}), ("PNG", {"bits": 2})]
)
def test_files_are_bitwise_equal(kind, options, tmp_path):
    path = tmp_path / "image"
    path.write_bytes(encoded(Image.fromarray(smooth(60, 90)).convert("P" if options else "RGB"), kind, **options))
    with Image.open(path) as picture:
        assert_bitwise_equal(preprocess_image(path), both(picture)[1])


def test_orientation_is_ignored_by_both(tmp_path):
    path = tmp_path / "image.jpg"
    path.write_bytes(turned_jpeg(smooth(60, 90), 6))
    with Image.open(path) as picture:
        assert_bitwise_equal(preprocess_image(path), both(picture)[1])


def test_a_palette_with_alpha_in_memory_is_the_only_mode_apart():
    picture = Image.new("P", (28, 28), 0)
    picture.putpalette([9, 9, 9, 0], "RGBA")
    ours, expected = both(picture)
    assert torch.equal(ours.pixels_PX, preprocess_image(Image.new("RGB", (28, 28), "white")).pixels_PX)
    assert torch.equal(expected["pixel_values"], preprocess_image(Image.new("RGB", (28, 28), (9, 9, 9))).pixels_PX)


@given(st.integers(7, 3000), st.integers(7, 3000))
@example(10, 292)
@example(8, 1500)
def test_the_size_rule_is_qwens_for_sides_of_15_and_more(height, width):
    assume(max(height, width) <= 200 * min(height, width))
    ours = image_size(height, width, BOUNDS)
    theirs = smart_resize(height, width, min_pixels=BOUNDS.min_pixels, max_pixels=BOUNDS.max_pixels)
    if min(height, width) >= 15:
        assert ours == theirs
    event("differs" if ours != theirs else "equal")


def test_the_class_defaults_are_another_models():
    """Without a processor file: fewer pixels, and twice the columns."""
    defaults = Qwen2VLImageProcessorPil()
    assert defaults.size["longest_edge"] == 1_003_520
    assert defaults.temporal_patch_size == 2
    assert defaults(images=[noise(56, 56)], return_tensors="pt")["pixel_values"].shape == (16, 1176)


@pytest.mark.parametrize("name", pictures())
def test_torchvisions_resize_stays_within_a_level(name):
    """Recorded where torchvision is installed."""
    recorded = np.load(RECORD)
    assert "torchvision" in str(recorded["made_by"])
    ours = preprocess_image(pictures()[name])
    assert ours.grids_N3.tolist() == recorded[f"{name}.grid"].tolist()
    levels_PX = levels_of(ours.pixels_PX.numpy()).astype(int)
    apart_PX = np.abs(levels_PX - recorded[f"{name}.levels"])
    assert apart_PX.max() <= 1
    assert (apart_PX > 0).mean() < 0.01


@pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision is not installed: its recorded levels are compared")
def test_the_recorded_levels_are_those_of_torchvision(tmp_path):
    record(tmp_path / "levels.npz")
    made, recorded = np.load(tmp_path / "levels.npz"), np.load(RECORD)
    for name in set(recorded.files) - {"made_by"}:
        assert np.array_equal(made[name], recorded[name])
