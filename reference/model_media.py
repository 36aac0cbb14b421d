"""What the towers read for one prompt, item by item, and how many placeholders each item takes.

    interleaved   time stamp, frame, …, sound, time stamp, frame, … : what the model was trained on (vLLM, SGLang)
    padded        all frames on <|video_pad|>, no time stamps, no sound: transformers 5.24

Files become these inputs in `media/`; `prompt_item` is the same item as the writer of prompts wants it.
Source: multimodal prompt specification, sections 2.1 and 2.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from reference.config import AudioConfig
from reference.layers.vision_grid import Grid
from reference.media.image import Patches
from reference.media.mel import Features, features
from reference.media.sound import SoundError
from reference.media.video import Video
from reference.prompt_media import AudioItem, ImageItem, MediaItem, PaddedVideoItem, VideoItem

VideoConvention = Literal["interleaved", "padded"]


@dataclass(frozen=True)
class ImageInput:
    """One image or frame: its patches and their one grid."""

    patches: Patches


@dataclass(frozen=True)
class SoundInput:
    """One clip, or the sound of one group of frames: features of its own chunks."""

    features: Features


@dataclass(frozen=True)
class VideoInput:
    """A video as the model was trained on it: time stamps, frames and sounds in turn."""

    parts: tuple[str | ImageInput | SoundInput, ...]


@dataclass(frozen=True)
class PaddedVideoInput:
    """A video as transformers has it: the patches of all frames, with the one grid (frames, height, width)."""

    patches: Patches


MediaInput = ImageInput | SoundInput | VideoInput | PaddedVideoInput
# What a tower makes rows of.
TowerInput = ImageInput | SoundInput | PaddedVideoInput


def images(patches: Patches) -> list[ImageInput]:
    """The images of a preprocessor's result, one by one."""
    grids = patches.grids_N3
    pixels = patches.pixels_PX.split(grids.prod(-1).tolist())
    return [ImageInput(Patches(own_PX, grid[None])) for own_PX, grid in zip(pixels, grids, strict=True)]


def video_input(
    video: Video, audio: AudioConfig | None, convention: VideoConvention = "interleaved"
) -> VideoInput | PaddedVideoInput:
    """A prepared video. Its sound needs the encoder's config; `padded` leaves sound and time stamps out.

    Raises: SoundError for sound without a config, or at another rate than its config says.
    """
    if convention == "padded":
        count = len(video.frames.grids_N3)
        _, height, width = video.frames.grids_N3[0].tolist()
        return PaddedVideoInput(Patches(video.frames.pixels_PX, torch.tensor([[count, height, width]])))
    frames = images(video.frames)
    parts: list[str | ImageInput | SoundInput] = []
    pieces = iter(video.pieces)
    for emission in video.plan.emissions:
        if emission.kind == "frame":
            parts += [emission.text, frames[emission.number]]
        else:
            parts.append(_sound(next(pieces), video.plan.options.audio_rate, audio))
    return VideoInput(tuple(parts))


def _sound(piece_S: torch.Tensor, rate: int, audio: AudioConfig | None) -> SoundInput:
    if audio is None or audio.sampling_rate != rate:
        wanted = "no audio tower" if audio is None else f"{audio.sampling_rate} Hz"
        raise SoundError(f"video: has sound at {rate} Hz, and the model has {wanted}; audio_cap = 0 leaves sound out")
    return SoundInput(features(piece_S, audio))


def tower_inputs(media: Sequence[MediaInput]) -> Iterator[TowerInput]:
    """What the towers run on, in the order of the prompt."""
    for item in media:
        if isinstance(item, VideoInput):
            yield from (part for part in item.parts if not isinstance(part, str))
        else:
            yield item


def grid_of(item: ImageInput | PaddedVideoInput) -> Grid:
    """Frames, height and width; the latter two in patches."""
    ((frames, height, width),) = item.patches.grids_N3.tolist()
    return frames, height, width


def prompt_item(item: MediaInput) -> MediaItem:
    """The item with its count of placeholders, for `prompt.build_prompt`."""
    if isinstance(item, VideoInput):
        return VideoItem(tuple(part if isinstance(part, str) else _counted(part) for part in item.parts))
    if isinstance(item, PaddedVideoInput):
        return PaddedVideoItem(sum(item.patches.tokens))
    return _counted(item)


def _counted(item: ImageInput | SoundInput) -> ImageItem | AudioItem:
    if isinstance(item, ImageInput):
        return ImageItem(sum(item.patches.tokens))
    return AudioItem(item.features.tokens)
