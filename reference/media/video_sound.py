"""The sound of a video: 16-bit samples, whether they fit, and how they are cut into pieces between the frames.

Samples a in [-1, 1] become p = trunc(32767 a) and, when a piece is used, p / 32768: not the identity, not symmetric. A
token is 1,280 samples. A track of Da seconds, kept whole or not at all, needs

    A  = 2 + the sum of ceil(samples / 1280) over chunks of 30 s          0 without sound
    Ar = A + 3 max(1, floor(Da))                                          two delimiters and a rounding for each piece

and is left out where A exceeds audio_cap L, or where beside Ar four of the smallest frames and 2,240 tokens do not fit
in L. A clip without sound sets Ar = 3 aside all the same.

Frames are grouped, and behind each group comes the sound from its first frame to the next group's. Of the possible
g = min(frames, floor(Da)) groups there are K: sqrt(g) (`eval30`), (g - 1) / ln g (`eval_ek`: the mean of what training
drew), or exp(U(0, ln g)) (`logk`, drawn as in training).
Source: image_video specification, sections 4.2, 4.3, 4.9 and 4.13, and its clarifications.
"""

import hashlib
import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.media.errors import VideoError
from reference.media.video_budget import FRAME_FLOOR, FRAME_OVERHEAD, GLOBAL_OVERHEAD, MIN_FRAMES
from reference.media.video_options import Grouping, VideoFacts, VideoOptions

SAMPLES_PER_TOKEN = 1280
ESTIMATE_SECONDS = 30
SEGMENT_SECONDS = 60
SHORTEST_GROUP_SECONDS = 1.0
DELIMITERS = 2
PIECE_ROUNDING = 1


@dataclass(frozen=True)
class Admission:
    """Whether the sound is kept. `tokens`: A. `reserved`: Ar, taken from the frames' budget. `reason`: why not."""

    is_kept: bool
    tokens: int
    reserved: int
    reason: str


def admit(facts: VideoFacts, options: VideoOptions) -> Admission:
    """Decide about the sound track of a clip."""
    room, rate = options.prompt_tokens, options.audio_rate
    seconds = facts.audio_samples / rate
    tokens = 0
    if facts.audio_samples:
        tokens = DELIMITERS + tokens_of(int(seconds * rate), ESTIMATE_SECONDS * rate)
    reserved = tokens + (DELIMITERS + PIECE_ROUNDING) * longest_grouping(seconds)
    least = MIN_FRAMES * (FRAME_FLOOR + FRAME_OVERHEAD) + GLOBAL_OVERHEAD
    if tokens > options.audio_cap * room:
        reason = f"{tokens} tokens of sound exceed audio_cap = {options.audio_cap} of {room}"
        return Admission(False, tokens, 0, reason)
    if reserved + least > room:
        reason = f"{reserved} tokens of sound and {least} for the least of frames exceed {room}"
        return Admission(False, tokens, 0, reason if facts.audio_samples else facts.audio_note)
    if not facts.audio_samples:
        return Admission(False, 0, reserved, facts.audio_note)
    return Admission(True, tokens, reserved, "")


def tokens_of(samples: int, chunk: int) -> int:
    """Audio tokens of a waveform that is cut into chunks of `chunk` samples."""
    whole, rest = divmod(samples, chunk)
    return whole * math.ceil(chunk / SAMPLES_PER_TOKEN) + math.ceil(rest / SAMPLES_PER_TOKEN)


def longest_grouping(seconds: float) -> int:
    """The most groups that a sound track can be cut into."""
    return max(1, int(seconds // SHORTEST_GROUP_SECONDS))


def group_bounds(frames: int, seconds: float, grouping: Grouping, draw: random.Random | None) -> tuple[int, ...]:
    """Bounds of the groups: 0, the first frame of each further group, and `frames`.

    seconds: of the sound track. draw: random numbers, for `logk` only (see `seeded_draw`).
    """
    possible = min(frames, longest_grouping(seconds))
    if possible <= 1 or grouping == "whole":
        return 0, frames
    if grouping == "logk":
        if draw is None:
            raise VideoError("video: grouping 'logk' draws at random and needs the video's digest (facts.video_id)")
        groups = _clamped(round(math.exp(draw.uniform(0.0, math.log(possible)))), possible)
        return 0, *sorted(draw.sample(range(1, frames), groups - 1)), frames
    mean = math.sqrt(possible) if grouping == "eval30" else (possible - 1) / math.log(possible)
    groups = _clamped(round(mean), possible)
    cuts = {round(i * frames / groups) for i in range(1, groups)}
    return tuple(sorted({0, frames} | {cut for cut in cuts if 0 < cut < frames}))


def _clamped(groups: int, possible: int) -> int:
    return max(1, min(groups, possible))


def piece_samples(
    bounds: tuple[int, ...], times: tuple[float, ...], samples: int, rate: int
) -> tuple[tuple[int, int], ...]:
    """(first, end) samples of the piece of each group; empty where the sound is over.

    times: seconds of each frame. The first piece begins at 0 and the last runs to the end of the sound track, whatever
    the frames' times are.
    """
    groups = len(bounds) - 1
    pieces = []
    for number, (first, end) in enumerate(pairwise(bounds)):
        start_s = 0.0 if number == 0 else times[first]
        end_s = samples / rate if number == groups - 1 else times[end]
        if end_s <= start_s:
            end_s = start_s + samples / rate / groups
        start, stop = max(0, round(start_s * rate)), min(samples, round(end_s * rate))
        pieces.append((start, max(start, stop)))
    return tuple(pieces)


def to_pcm(samples: np.ndarray) -> np.ndarray:
    """float32 samples to int16, towards zero. Raises: VideoError for samples that are not numbers."""
    if not np.isfinite(samples).all():
        raise VideoError("sound track: holds samples that are not finite numbers")
    return (np.clip(samples, -1.0, 1.0) * np.float32(32767)).astype(np.int16)


def waveform(pcm: np.ndarray) -> Tensor:
    """int16 to float32 samples, what the speech encoder's features are computed from."""
    return torch.from_numpy(pcm.astype(np.float32) / np.float32(32768))


def seeded_draw(video_id: str, question: str) -> random.Random:
    """The random numbers of `logk`: a function of the file and the question, and of nothing else."""
    key = sha1(f"{video_id}|{question}".encode()).hexdigest()
    return random.Random(int(sha1(f"42|flatten|{key}".encode()).hexdigest()[:8], 16))


def sha1(content: bytes = b"") -> Any:
    """SHA-1 as a checksum: it is refused as a digest for security where FIPS rules apply."""
    return hashlib.sha1(content, usedforsecurity=False)
