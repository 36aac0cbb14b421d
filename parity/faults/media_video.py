"""Mistakes on the way from a video file to frames, times, pieces of sound and the prompt.

Two entries of the specification are not here: a normalisation over the whole sound track belongs to the audio features,
and a prompt tokenized in parts shows only with a tokenizer that merges across `>`.
Source: image_video specification, section 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from parity.faults.fault import Fault, Patch
from reference.media import (
    video,
    video_budget,
    video_decode,
    video_frames,
    video_options,
    video_plan,
    video_sound,
)
from reference.media.video import jpeg_round_trip
from reference.media.video_budget import frame_tokens
from reference.media.video_options import VideoOptions

# What `media_outcome` of the tests observes of a video, in the order it is decided.
ROOM, ADMISSION, BUDGET, SOLVED, SIZE, INDICES, TIMES, PIECES, PROMPT, FRAMES, WAVEFORMS, KEYS = (
    f"video.{name}"
    for name in (
        "room",
        "admission",
        "budget",
        "solved",
        "frame_size",
        "indices",
        "times",
        "pieces",
        "prompt",
        "frames",
        "waveforms",
        "keys",
    )
)

# As the budget counts tokens around a frame.
_PATCHES_PER_CELL = 4


def video_fault(
    fault_id: str, says: str, first: str, visible_when: str, *patches: Patch, source: str = "analysis"
) -> Fault:
    return Fault(fault_id, says, "V", (first,), visible_when, source, patches=patches)


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _without_jpeg(rgb_HWC: np.ndarray, quality: int) -> np.ndarray:
    return rgb_HWC


def _jpeg_then_resize(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    quality = VideoOptions().jpeg_quality
    return lambda rgb_HWC, height, width: original(jpeg_round_trip(rgb_HWC, quality), height, width)


def _cost_in_patches(height: int, width: int, frames: int, token_cap: int) -> int:
    tokens = frame_tokens(height, width, token_cap)
    return frames * (_PATCHES_PER_CELL * tokens + video_budget.FRAME_OVERHEAD)


def _floored_indices(wanted: int, frames: int) -> tuple[int, ...]:
    step = (frames - 1) / (wanted - 1)
    return tuple(sorted({int(j * step) for j in range(wanted)}))


def _indices_by_share(wanted: int, frames: int) -> tuple[int, ...]:
    return tuple(sorted({min(round(j * frames / wanted), frames - 1) for j in range(wanted)}))


def _repeated_indices(wanted: int, frames: int) -> tuple[int, ...]:
    step = (frames - 1) / (wanted - 1)
    return tuple(round(j * step) for j in range(wanted))


def _padded_indices(original: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    def indices(wanted: int, frames: int) -> tuple[int, ...]:
        found = original(wanted, frames)
        return found + found[-1:] * (video_budget.MIN_FRAMES - len(found))

    return indices


def _times_by(rule: str) -> Callable[[Any], Any]:
    return lambda original: lambda indices, fps, duration, asked: original(indices, fps, duration, rule)


def _clip_times(indices: tuple[int, ...], fps: float, duration: float, rule: str) -> tuple[float, ...]:
    return tuple(round(j / fps, 3) for j in range(len(indices)))


def _milliseconds(seconds: float) -> str:
    total = round(1000 * seconds)
    return f"<{total // 3_600_000:02d}:{total // 60_000 % 60:02d}:{total // 1000 % 60:02d}.{total % 1000:03d}>"


def _truncated(original: Callable[[float], str]) -> Callable[[float], str]:
    return lambda seconds: original(int(100 * seconds) / 100)


def _sound_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def emissions(*arguments: Any) -> Any:
        items, group = [], []
        for item in original(*arguments):
            group.append(item)
            if item.kind == "sound":
                items += [item, *group[:-1]]
                group = []
        return (*items, *group)

    return emissions


def _cut_tail(original: Callable[..., Any]) -> Callable[..., Any]:
    def pieces(bounds: Any, times: Any, samples: int, rate: int) -> Any:
        found = original(bounds, times, samples, rate)
        start, end = found[-1]
        return (*found[:-1], (start, max(start, min(end, round(times[-1] * rate)))))

    return pieces


def _unreserved(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda facts, options: replace(original(facts, options), reserved=0)


def _silence_unreserved(original: Callable[..., Any]) -> Callable[..., Any]:
    def admit(facts: Any, options: Any) -> Any:
        found = original(facts, options)
        return found if found.is_kept else replace(found, reserved=0)

    return admit


def _rounded_pcm(samples: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(samples, -1.0, 1.0) * np.float32(32767)).astype(np.int16)


def _in_bfloat16(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda pcm: original(pcm).to(torch.bfloat16).to(torch.float32)


def _grouped_by(grouping: str) -> Callable[[Any], Any]:
    return lambda original: lambda frames, seconds, asked, draw: original(frames, seconds, grouping, draw)


_SOUND = "a clip with sound"
_SMALL = "a clip smaller than 128 tokens a frame"
_TIGHT = "a budget below what the clip would take"

VIDEO_FAULTS = (
    video_fault(
        "video_no_jpeg",
        "the JPEG round trip of frames is skipped",
        FRAMES,
        "any clip",
        Patch(video, "jpeg_round_trip", _constant(_without_jpeg)),
    ),
    video_fault(
        "video_jpeg_before_resize",
        "frames are compressed before they are resized",
        FRAMES,
        "a clip whose frames are resized",
        Patch(video, "jpeg_round_trip", _constant(_without_jpeg)),
        Patch(video_decode, "resize", _jpeg_then_resize),
    ),
    video_fault(
        "video_jpeg_quality_75",
        "frames are compressed at the library's default quality, 75",
        FRAMES,
        "any clip",
        Patch(video, "jpeg_round_trip", lambda original: lambda rgb_HWC, quality: original(rgb_HWC, 75)),
    ),
    video_fault(
        "video_array_rule_for_bytes",
        "frames of a file are enlarged to the floor, as decoded frames are",
        SIZE,
        _SMALL,
        Patch(video_plan, "frame_size", lambda original: lambda h, w, cap, origin: original(h, w, cap, "frames")),
    ),
    video_fault(
        "video_floor_as_min",
        "the floor of 128 tokens bounds the native size from below",
        SIZE,
        _SMALL,
        Patch(
            video_frames,
            "native_cells",
            lambda original: lambda height, width: max(video_budget.FRAME_FLOOR, original(height, width)),
        ),
    ),
    video_fault(
        "video_budget_per_patch",
        "the cost of a frame counts patches of 14 pixels, not tokens",
        SOLVED,
        _TIGHT,
        Patch(video_budget, "cost", _constant(_cost_in_patches)),
    ),
    video_fault(
        "video_overhead_13",
        "a frame's two delimiters are not counted",
        SOLVED,
        _TIGHT,
        Patch(video_budget, "FRAME_OVERHEAD", _constant(13)),
    ),
    video_fault(
        "video_fps_2",
        "up to two frames per second, another model's default",
        SOLVED,
        "a clip of more than 4 s",
        Patch(video_budget, "FASTEST", _constant(2.0)),
        source="transformers 5.24's video processor",
    ),
    video_fault(
        "video_frame_cap_1024",
        "never more than 1024 frames, whatever the context",
        SOLVED,
        "more than 148,814 prompt tokens and a long clip",
        Patch(video_plan, "frame_cap", _constant(lambda room: 1024)),
    ),
    video_fault(
        "video_index_floor",
        "an index is cut off in place of rounded",
        INDICES,
        "a clip of more frames than are taken",
        Patch(video_frames, "container_indices", _constant(_floored_indices)),
    ),
    video_fault(
        "video_step_T_over_n",
        "indices step by T / n, so that the last frame is missing",
        INDICES,
        "a clip of more frames than are taken",
        Patch(video_frames, "container_indices", _constant(_indices_by_share)),
    ),
    video_fault(
        "video_no_dedup",
        "an index that comes twice is taken twice",
        INDICES,
        "a clip of 2 or 3 frames",
        Patch(video_frames, "container_indices", _constant(_repeated_indices)),
    ),
    video_fault(
        "video_minframes_after_dedup",
        "a clip of fewer than four frames is filled up with its last",
        INDICES,
        "a clip of 1 to 3 frames",
        Patch(video_frames, "container_indices", _padded_indices),
    ),
    video_fault(
        "video_timestamp_uniform",
        "times as if frames were equally spaced, where those of the source are asked for",
        TIMES,
        "any clip of two frames",
        Patch(video_plan, "seconds_of", _times_by("uniform")),
        source="SGLang",
    ),
    video_fault(
        "video_timestamp_source",
        "times of the source, where equally spaced ones are asked for",
        TIMES,
        "timestamps = 'uniform'",
        Patch(video_plan, "seconds_of", _times_by("source")),
        source="vLLM",
    ),
    video_fault(
        "video_timestamp_clip_relative",
        "times of the sampled clip: frame number / source rate",
        TIMES,
        "a clip of more frames than are taken",
        Patch(video_plan, "seconds_of", _constant(_clip_times)),
        source="vLLM issues 36136, 46988",
    ),
    video_fault(
        "video_timestamp_ms",
        "time stamps have three decimals",
        PROMPT,
        "any clip",
        Patch(video_plan, "time_text", _constant(_milliseconds)),
    ),
    video_fault(
        "video_timestamp_truncated",
        "hundredths are cut off in place of rounded",
        PROMPT,
        "a time that is no whole hundredth",
        Patch(video_plan, "time_text", _truncated),
    ),
    video_fault(
        "video_reserve_ignored",
        "nothing is reserved for the output",
        ROOM,
        "any clip; frames only where the budget is tight",
        Patch(VideoOptions, "prompt_tokens", _constant(property(lambda options: options.context))),
    ),
    video_fault(
        "video_max_new_tokens_ignored",
        "the reserve is a quarter of the context, however long the output may be",
        ROOM,
        "max_new_tokens above the reserve",
        Patch(
            VideoOptions,
            "reserve",
            _constant(property(lambda options: options.output_reserve or options.context // 4)),
        ),
    ),
    video_fault(
        "video_audio_not_reserved",
        "sound is not taken from the frames' budget",
        ADMISSION,
        _SOUND,
        Patch(video_plan, "admit", _unreserved),
    ),
    video_fault(
        "video_silence_not_reserved",
        "a clip without sound does not set the bracket's 3 tokens aside",
        ADMISSION,
        "a clip without sound",
        Patch(video_plan, "admit", _silence_unreserved),
    ),
    video_fault(
        "video_groups_sqrt",
        "frames are grouped by `eval30` where `eval_ek` is asked for",
        PIECES,
        "a clip with 10 s of sound",
        Patch(video_plan, "group_bounds", _grouped_by("eval30")),
    ),
    video_fault(
        "video_groups_whole",
        "all sound comes in one piece behind all frames",
        PIECES,
        "a clip with 3 s of sound",
        Patch(video_plan, "group_bounds", _grouped_by("whole")),
    ),
    video_fault(
        "video_audio_first",
        "sound comes before the frames of its group",
        PROMPT,
        _SOUND,
        Patch(video_plan, "_emissions", _sound_first),
    ),
    video_fault(
        "video_audio_tail_dropped",
        "the last piece of sound ends with the last frame",
        PIECES,
        "sound that goes on behind the last frame",
        Patch(video_plan, "piece_samples", _cut_tail),
    ),
    video_fault(
        "video_audio_scale_32767",
        "samples are divided by 32767",
        WAVEFORMS,
        _SOUND,
        Patch(video, "waveform", _constant(lambda pcm: torch.from_numpy(pcm.astype(np.float32) / np.float32(32767)))),
    ),
    video_fault(
        "video_audio_rounded_pcm",
        "samples are rounded to 16 bits in place of cut towards zero",
        WAVEFORMS,
        _SOUND,
        Patch(video_decode, "to_pcm", _constant(_rounded_pcm)),
    ),
    video_fault(
        "video_audio_bf16_cast",
        "the waveform is cast to bfloat16 together with the other inputs",
        WAVEFORMS,
        _SOUND,
        Patch(video, "waveform", _in_bfloat16),
        source="vLLM",
    ),
    video_fault(
        "video_audio_estimate_floor",
        "tokens of a piece of sound are rounded down",
        ADMISSION,
        "sound of no whole number of tokens",
        Patch(video_sound, "tokens_of", _constant(lambda samples, chunk: samples // 1280)),
        Patch(video_plan, "tokens_of", _constant(lambda samples, chunk: samples // 1280)),
    ),
    video_fault(
        "video_cache_without_options",
        "a prepared clip is found again under other options",
        KEYS,
        "one clip, two limits",
        Patch(
            video_options,
            "cache_key",
            lambda original: lambda content, options, config=None: original(content, VideoOptions()),
        ),
    ),
)
