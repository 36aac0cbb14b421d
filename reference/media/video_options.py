"""What a video becomes depends on these values and on nothing else: the options of a request, the facts of a clip.

The output a request reserves changes its pixels: L = context - max(output_reserve, max_new_tokens) tokens are left for
the prompt, and frames and their sizes are chosen to fill them.
Source: image_video specification, sections 4.1, 4.12 and 4.13.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from reference.media.errors import VideoError
from reference.media.image_config import ImageConfig, ImageRequest

# How frames are grouped between pieces of sound: `video_sound.group_bounds`.
Grouping = Literal["eval_ek", "eval30", "whole", "logk"]
# A frame's time stamp: of the source frame, or as if frames were equally spaced: `video_frames.seconds_of`.
Timestamps = Literal["source", "uniform"]
# A clip in a container, or frames that someone else decoded; the two follow different rules.
Origin = Literal["container", "frames"]

# How a clip's `audio_note` begins where there is a sound track that could not be read.
BROKEN_SOUND = "sound track unreadable"

# The default system prompt, and the clip's own name, as the budget counts them.
COUNTED_SYSTEM = "<|system|>You are a helpful assistant.<|endofsystem|>\n"
COUNTED_NAME = "<video_0>"
# The same where no tokenizer is at hand.
ESTIMATED_OVERHEAD = 96


@dataclass(frozen=True)
class VideoOptions:
    """The options of one request.

    context, output_reserve (None: a quarter of the context), max_new_tokens, prompt_overhead: tokens.
    audio_cap: largest share of L that sound may take; 0 leaves the sound track undecoded. audio_rate: Hz.
    question: the request's text; only `logk` grouping reads it. jpeg_quality: of the round trip of frames.
    frame_request: bounds and targets of the image stage, applied to frames *after* the budget was solved.
    is_strict: what is otherwise noted in the plan (sound left out although there is some, a budget too small for
    four frames, frames that do not decode) is an error.
    """

    context: int = 131_072
    output_reserve: int | None = None
    max_new_tokens: int = 0
    audio_cap: float = 1.0
    audio_rate: int = 16_000
    grouping: Grouping = "eval_ek"
    question: str = ""
    timestamps: Timestamps = "source"
    jpeg_quality: int = 85
    prompt_overhead: int = ESTIMATED_OVERHEAD
    frame_request: ImageRequest = field(default_factory=ImageRequest)
    is_strict: bool = False

    def __post_init__(self) -> None:
        for name, lowest in (("context", 1), ("max_new_tokens", 0), ("audio_rate", 1), ("prompt_overhead", 0)):
            if getattr(self, name) < lowest:
                raise VideoError(f"video options: {name} must be at least {lowest}, found {getattr(self, name)}")
        if self.output_reserve is not None and self.output_reserve < 0:
            raise VideoError(f"video options: output_reserve must be at least 0, found {self.output_reserve}")
        if self.reserve >= self.context:
            raise VideoError(
                f"video options: the output reserve must be below context = {self.context}, found {self.reserve}, "
                f"the larger of output_reserve and max_new_tokens"
            )
        if not 0 <= self.audio_cap < math.inf:
            raise VideoError(f"video options: audio_cap must be at least 0 and finite, found {self.audio_cap}")
        if not 1 <= self.jpeg_quality <= 100:
            raise VideoError(f"video options: jpeg_quality must be 1 to 100, found {self.jpeg_quality}")
        for name, allowed in (("grouping", get_args(Grouping)), ("timestamps", get_args(Timestamps))):
            if getattr(self, name) not in allowed:
                raise VideoError(f"video options: {name} must be {' or '.join(allowed)}, found {getattr(self, name)!r}")

    @property
    def reserve(self) -> int:
        """Tokens kept for the output."""
        reserve = self.context // 4 if self.output_reserve is None else self.output_reserve
        return max(reserve, self.max_new_tokens)

    @property
    def prompt_tokens(self) -> int:
        """L: tokens left for the prompt."""
        return self.context - self.reserve


@dataclass(frozen=True)
class VideoFacts:
    """What a plan needs to know of a clip; none of it takes decoding frames.

    height, width: pixels. fps: frames per second of the source. duration: seconds. frames: how many the source
    announces. audio_samples: of the sound track at `audio_rate`; 0 where there is none or it is not wanted, and
    `audio_note` says why. video_id: SHA-1 of the file, for `logk` grouping only.
    """

    height: int
    width: int
    fps: float
    duration: float
    frames: int
    audio_samples: int = 0
    audio_note: str = "no sound track"
    origin: Origin = "container"
    video_id: str = ""

    def __post_init__(self) -> None:
        sizes = (self.height, self.width, self.duration)
        if min(sizes) <= 0 or not all(map(math.isfinite, sizes)):
            raise VideoError(
                f"video: height, width and duration must be positive, "
                f"found {self.height} x {self.width} pixels (h x w), {self.duration} s"
            )
        if self.frames <= 0:
            raise VideoError(f"video: must have at least one frame, found {self.frames}")
        if not 0 < self.fps < math.inf:
            raise VideoError(f"video: frames per second must be positive, found {self.fps}")


def prompt_overhead(count_tokens: Callable[[str], int]) -> int:
    """Tokens of the prompt that the budget sets aside, with a tokenizer's plain length (no special tokens added).

    An estimate: neither the real system prompt nor the question is counted.
    """
    return count_tokens(COUNTED_SYSTEM) + 2 + count_tokens(COUNTED_NAME) + 64


def cache_key(content: bytes, options: VideoOptions, config: ImageConfig | None = None) -> str:
    """A digest of everything a prepared video depends on; equal keys, equal results.

    The question counts only where it is read. SHA-256, so it works where weak digests are disabled (FIPS).
    """
    counted = options if options.grouping == "logk" else dataclasses.replace(options, question="")
    settings = {"options": dataclasses.asdict(counted), "config": dataclasses.asdict(config or ImageConfig())}
    digest = hashlib.sha256(content)
    digest.update(json.dumps(settings, sort_keys=True).encode())
    return digest.hexdigest()
