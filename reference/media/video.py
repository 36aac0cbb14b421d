"""From a video to what the towers read and the prompt says.

    facts   of the container, and its sound track            video_decode
    plan    frames, sizes, times, groups, pieces             video_plan
    frame   decoded, resized, JPEG at quality 85 and back, then an image like any other
    piece   int16 samples / 32768, one audio item each

The JPEG round trip is part of the model: training stored frames so. It comes behind the resize. Its bits depend on the
JPEG library's version, by up to two levels.
Source: image_video specification, section 4.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from reference.media.errors import VideoError
from reference.media.image import Patches, joined, preprocess_image, resize
from reference.media.image_config import ImageConfig
from reference.media.packages import pillow_image
from reference.media.video_decode import (
    DecodeLimits,
    SoundTrack,
    VideoSource,
    digest,
    read_facts,
    read_frames,
    read_sound,
)
from reference.media.video_options import VideoFacts, VideoOptions
from reference.media.video_plan import VideoPlan, plan_video
from reference.media.video_sound import SAMPLES_PER_TOKEN, waveform

DEFAULT_FRAMES_FPS = 1.0


@dataclass(frozen=True)
class Video:
    """frames: one image a frame, in order. pieces: float32 waveforms [samples], in order, none of them empty.

    `plan.emissions` says how the two alternate, `plan.fragment` is the prompt.
    """

    plan: VideoPlan
    frames: Patches
    pieces: tuple[Tensor, ...]


def prepare_video(
    source: VideoSource,
    options: VideoOptions | None = None,
    config: ImageConfig | None = None,
    limits: DecodeLimits | None = None,
) -> Video:
    """A video file (its bytes, or its path) as model input.

    Raises: VideoError for what cannot be read or planned; MissingPackageError without PyAV or Pillow.
    """
    options = options or VideoOptions()
    facts = read_facts(source, limits)
    if options.audio_cap > 0:
        # More than this is refused whatever else is so; it bounds the memory that sound takes.
        sound = read_sound(source, options.audio_rate, options.prompt_tokens * SAMPLES_PER_TOKEN, limits)
    else:
        sound = SoundTrack(np.zeros(0, dtype=np.int16), "not asked for (audio_cap = 0)")
    # Only drawn groups need the file's digest.
    video_id = digest(source) if options.grouping == "logk" else ""
    facts = dataclasses.replace(facts, audio_samples=len(sound.pcm), audio_note=sound.note, video_id=video_id)
    plan = plan_video(facts, options, config)
    frames, decoded = read_frames(source, plan.indices, plan.frame_size, limits)
    if len(frames) < len(plan.indices):
        plan = plan_video(facts, options, config, decodable=decoded)
    return _prepared(plan, (frames[index] for index in plan.indices), sound.pcm, config)


def prepare_frames(
    frames_NHWC: np.ndarray,
    fps: float | None = None,
    options: VideoOptions | None = None,
    config: ImageConfig | None = None,
) -> Video:
    """Frames that are decoded already, uint8 [n, height, width, 3 or 4], as model input. Alpha is dropped; no sound.

    fps: frames per second of these frames, 1 where unknown. They follow other rules than a file: see `video_frames`.
    Raises: VideoError for any other array.
    """
    if not isinstance(frames_NHWC, np.ndarray) or frames_NHWC.dtype != np.uint8:
        found = getattr(frames_NHWC, "dtype", type(frames_NHWC).__name__)
        raise VideoError(f"video frames: must be a uint8 array, found {found}")
    if frames_NHWC.ndim != 4 or frames_NHWC.shape[3] not in (3, 4) or 0 in frames_NHWC.shape:
        raise VideoError(
            f"video frames: must be [frames, height, width, 3 or 4], none empty, found {list(frames_NHWC.shape)}"
        )
    count, height, width, _ = frames_NHWC.shape
    rate = max(DEFAULT_FRAMES_FPS if fps is None else fps, 1e-6)
    facts = VideoFacts(height, width, rate, count / rate, count, audio_note="frames have no sound", origin="frames")
    plan = plan_video(facts, options, config)
    frames = (resize(np.ascontiguousarray(frames_NHWC[i, ..., :3]), *plan.frame_size) for i in plan.indices)
    return _prepared(plan, frames, np.zeros(0, dtype=np.int16), config)


def jpeg_round_trip(rgb_HWC: np.ndarray, quality: int) -> np.ndarray:
    """uint8 [H, W, 3], written as JPEG (baseline, chroma at half resolution) and read back."""
    Image = pillow_image()
    buffer = io.BytesIO()
    Image.fromarray(rgb_HWC).save(buffer, format="JPEG", quality=quality)
    with Image.open(buffer, formats=("JPEG",)) as image:
        return np.array(image.convert("RGB"))


def _prepared(plan: VideoPlan, frames: Iterable[np.ndarray], pcm: np.ndarray, config: ImageConfig | None) -> Video:
    options = plan.options
    images = [
        preprocess_image(jpeg_round_trip(frame_HWC, options.jpeg_quality), config, options.frame_request)
        for frame_HWC in frames
    ]
    pieces = tuple(waveform(pcm[start:end]) for start, end in plan.pieces if start < end)
    return Video(plan, joined(images), pieces)
