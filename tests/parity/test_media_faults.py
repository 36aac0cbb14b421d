"""Every fault of the preprocessing shows where its entry says, on files made on the spot, and nowhere before."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from media_files import encoded, movie, noise, smooth, turned_jpeg
from PIL import Image

from parity.faults.catalogue import CATALOGUE
from parity.faults.fault import applied
from parity.faults.media import MEDIA_FAULTS
from parity.faults.media_image import IMAGE_FAULTS
from parity.faults.media_video import VIDEO_FAULTS
from reference.media import image, video_options
from reference.media.image_config import ImageConfig, ImageRequest
from reference.media.video import prepare_video
from reference.media.video_options import VideoFacts, VideoOptions
from reference.media.video_plan import VideoPlan, plan_video

RATE = 16_000


@functools.cache
def pictures() -> dict[str, bytes]:
    """One file for every condition that an image fault waits for."""
    return {
        "shrinks": encoded(noise(181, 97), "PNG"),
        "grows": encoded(noise(50, 90), "PNG"),
        "half cells": encoded(noise(70, 98), "PNG"),
        "short side": encoded(noise(8, 1500), "PNG"),
        "odd multiple of 14": encoded(noise(98, 154), "PNG"),
        "transparent": encoded(noise(56, 84, 4), "PNG"),
        "turned": turned_jpeg(smooth(56, 112), 6),
        "grey 16": encoded(Image.fromarray(noise(56, 56, 1).astype(np.uint16) * 257), "PNG"),
    }


# Sizes large enough for the upper bound; none is resized.
LARGE = [(1000, 1020), (4000, 3000)]


def large_outcome() -> dict[str, object]:
    bounds = ImageRequest().bounds(ImageConfig())
    return {"image.size": tuple(image.image_size(*size, bounds) for size in LARGE)}


def image_outcome(file: bytes) -> dict[str, object]:
    """What becomes of an image, in the order it is computed. A stage that fails has its error as its value."""
    request, config = ImageRequest(), ImageConfig()
    rgb_HWC = image.decode_image(file, None)
    size = image.image_size(*rgb_HWC.shape[:2], request.bounds(config))
    found = {"image.rgb": rgb_HWC, "image.size": size}
    try:
        found["image.resized"] = image.resize(rgb_HWC, *size)
        found["image.rows"] = image.preprocess_image(file).pixels_PX
    except ValueError as error:
        found["image.rows"] = str(error)
    return found


FACTS = VideoFacts(720, 1280, 30.0, 300.0, 9000, audio_note="no sound track")
WITH_SOUND = dataclasses.replace(FACTS, audio_samples=305 * RATE + 77, audio_note="")
PLANS: dict[str, tuple[VideoFacts, VideoOptions]] = {
    "silent": (FACTS, VideoOptions()),
    "sound": (WITH_SOUND, VideoOptions()),
    "tight": (WITH_SOUND, VideoOptions(context=16_384)),
    "long answer": (FACTS, VideoOptions(context=16_384, max_new_tokens=9000)),
    "uniform": (FACTS, VideoOptions(timestamps="uniform")),
    "small": (dataclasses.replace(FACTS, height=224, width=224), VideoOptions()),
    "hours": (dataclasses.replace(FACTS, duration=7200.0, frames=216_000), VideoOptions(context=524_288)),
    "two frames": (VideoFacts(112, 112, 10.0, 0.2, 2), VideoOptions()),
}


def planned(plan: VideoPlan) -> dict[str, object]:
    return {
        "video.room": plan.options.prompt_tokens,
        "video.admission": plan.admission,
        "video.budget": plan.budget,
        "video.solved": plan.allocation,
        "video.frame_size": plan.frame_size,
        "video.indices": plan.indices,
        "video.times": plan.times,
        "video.pieces": plan.pieces,
        "video.prompt": plan.fragment,
        "video.keys": video_options.cache_key(b"film", plan.options),
    }


def film_outcome(film: bytes) -> dict[str, object]:
    video = prepare_video(film)
    return planned(video.plan) | {"video.frames": video.frames.pixels_PX, "video.waveforms": video.pieces}


def same(expected: object, actual: object) -> bool:
    if isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray):
        return np.array_equal(expected, actual)
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return torch.equal(expected, actual)
    if isinstance(expected, tuple) and isinstance(actual, tuple):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    return type(expected) is type(actual) and expected == actual


def first_difference(expected: dict[str, object], actual: dict[str, object]) -> str | None:
    return next((name for name in expected if not same(expected[name], actual.get(name))), None)


@functools.cache
def right_images() -> dict[str, dict[str, object]]:
    return {name: image_outcome(file) for name, file in pictures().items()} | {"large": large_outcome()}


@functools.cache
def right_videos() -> dict[str, dict[str, object]]:
    plans = {name: planned(plan_video(*inputs)) for name, inputs in PLANS.items()}
    return plans | {"film": film_outcome(film())}


def film() -> bytes:
    return movie(frames=24, size=(240, 320), sound_seconds=2.5)


@pytest.mark.parametrize("fault", IMAGE_FAULTS, ids=lambda fault: fault.id)
def test_an_image_fault_shows_first_where_it_says(fault):
    expected = right_images()
    with applied([fault]):
        firsts = {first_difference(expected[name], image_outcome(file)) for name, file in pictures().items()}
        firsts.add(first_difference(expected["large"], large_outcome()))
    assert firsts - {None} == set(fault.first)


@pytest.mark.parametrize("fault", VIDEO_FAULTS, ids=lambda fault: fault.id)
def test_a_video_fault_shows_first_where_it_says(fault):
    expected = right_videos()
    with applied([fault]):
        firsts = {first_difference(expected[name], planned(plan_video(*inputs))) for name, inputs in PLANS.items()}
        firsts.add(first_difference(expected["film"], film_outcome(film())))
    assert firsts - {None} == set(fault.first)


def test_without_a_fault_nothing_shows():
    assert all(first_difference(right_images()[name], image_outcome(file)) is None for name, file in pictures().items())
    assert first_difference(right_videos()["film"], film_outcome(film())) is None


def test_ids_are_unique_and_faults_of_bits_are_below_bfloat16():
    ids = [fault.id for fault in MEDIA_FAULTS]
    assert len(set(ids)) == len(ids) >= 60
    assert not set(ids) & set(CATALOGUE)
    for fault in MEDIA_FAULTS:
        if fault.visibility != "N":
            continue
        pixels = noise(112, 112)
        right = image.preprocess_image(pixels).pixels_PX
        with applied([fault]):
            wrong = image.preprocess_image(pixels).pixels_PX
        assert (right - wrong).abs().max() < 1e-6
        assert (right.bfloat16() != wrong.bfloat16()).float().mean() < 0.01


RESIZES = [fault for fault in IMAGE_FAULTS if fault.id.startswith("image_resize_")]
# The case's sizes (h x w), to the size the rule gives and to one that shrinks both sides.
C50_SIZES = [
    ((360, 640), (364, 644)),
    ((360, 640), (252, 448)),
    ((251, 113), (252, 112)),
    ((251, 113), (140, 56)),
    ((999, 47), (1008, 56)),
    ((999, 47), (504, 28)),
]


def levels(fault, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    with applied([fault] if fault else []):
        return image.resize(pixels, *size).astype(int)


@pytest.mark.parametrize(("size", "target"), C50_SIZES)
def test_c50_resizes_are_told_apart(size, target):
    """A foreign resize is named by the fault that reproduces it; no two give the same pixels, and none the right ones.

    The filter's widening does nothing where no side shrinks, so that a test on enlarged images does not see it.
    """
    results = {fault.id: levels(fault, noise(*size), target) for fault in RESIZES}
    results["none"] = levels(None, noise(*size), target)
    if target[0] >= size[0] and target[1] >= size[1]:
        assert np.array_equal(results.pop("image_resize_no_antialias"), results["none"])
    for name, result in results.items():
        assert [other for other in results if np.array_equal(results[other], result)] == [name]


def test_c50_by_their_size_in_levels():
    """On a photo-like picture that shrinks: rounding is a level, another kernel a few, aliasing many."""
    pixels = np.clip(smooth(360, 640).astype(int) + noise(360, 640) // 8, 0, 255).astype(np.uint8)
    right = levels(None, pixels, (140, 252))
    error = {
        fault.id.removeprefix("image_resize_"): np.abs(levels(fault, pixels, (140, 252)) - right) for fault in RESIZES
    }
    assert error["float_two_pass"].max() <= 2
    assert error["vertical_first"].max() <= 2
    assert error["float_two_pass"].mean() < error["torch_a075"].mean() < error["bilinear"].mean()
    assert error["bilinear"].mean() < error["no_antialias"].mean() < error["nearest"].mean()
