"""Everything that happens to a video, decided before a frame is decoded.

A plan follows from `VideoFacts` and `VideoOptions` alone: equal inputs, equal plans. `describe` prints it with all it
depends on, since two servers that give one clip different frames differ in one of these lines.

The prompt it leads to: per frame `<HH:MM:SS.cc><|img|>` + pads + `<|endofimg|>`; behind the frames of a group, where
there is sound, `<|audio_comp_start|>` + pads + `<|audio_comp_end|>`. It takes the place of `<|video_pad|>` and is
tokenized as one string.
Source: image_video specification, sections 4.4 and 4.7 to 4.10.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from reference.media.errors import VideoError
from reference.media.image_config import ImageConfig
from reference.media.image_size import cells, image_size
from reference.media.video_budget import FRAME_FLOOR, FRAME_OVERHEAD, MIN_FRAMES, Allocation, frame_cap, solve
from reference.media.video_frames import frame_indices, frame_size, seconds_of, time_text
from reference.media.video_options import BROKEN_SOUND, VideoFacts, VideoOptions
from reference.media.video_sound import (
    DELIMITERS,
    SEGMENT_SECONDS,
    Admission,
    admit,
    group_bounds,
    piece_samples,
    seeded_draw,
    tokens_of,
)

IMAGE_START, IMAGE_PAD, IMAGE_END = "<|img|>", "<|imgpad|>", "<|endofimg|>"
AUDIO_START, AUDIO_PAD, AUDIO_END = "<|audio_comp_start|>", "<|audio_comp_pad|>", "<|audio_comp_end|>"


@dataclass(frozen=True)
class Emission:
    """One item of the prompt: the frame or the piece of sound `number` (from 0), with its placeholders.

    `text` precedes a frame: its time stamp.
    """

    kind: Literal["frame", "sound"]
    number: int
    tokens: int
    text: str = ""

    @property
    def prompt(self) -> str:
        start, pad, end = (
            (IMAGE_START, IMAGE_PAD, IMAGE_END) if self.kind == "frame" else (AUDIO_START, AUDIO_PAD, AUDIO_END)
        )
        return self.text + start + pad * self.tokens + end


@dataclass(frozen=True)
class VideoPlan:
    """What is decoded, to what size, and where it stands in the prompt.

    budget: B, tokens for frames. cap: most frames. indices: 0-based, of the source. times: seconds, one a frame.
    frame_size: (height, width) in pixels of a frame before the image stage, image_size behind it.
    pieces: (first, end) samples of each piece of sound. notes: what a reader would not expect.
    """

    facts: VideoFacts
    options: VideoOptions
    admission: Admission
    budget: int
    cap: int
    allocation: Allocation
    frame_size: tuple[int, int]
    image_size: tuple[int, int]
    indices: tuple[int, ...]
    times: tuple[float, ...]
    pieces: tuple[tuple[int, int], ...]
    emissions: tuple[Emission, ...]
    notes: tuple[str, ...] = ()

    @property
    def frame_tokens(self) -> int:
        """Placeholders of each frame."""
        return cells(*self.image_size)

    @property
    def fragment(self) -> str:
        """The text that takes the place of the video placeholder."""
        return "".join(item.prompt for item in self.emissions)

    @property
    def tokens(self) -> int:
        """Length of the fragment: a token for each character of a time stamp, each delimiter and each placeholder."""
        return sum(len(item.text) + DELIMITERS + item.tokens for item in self.emissions)

    def describe(self) -> str:
        """The plan in lines of text, one decision a line."""
        facts, options, found = self.facts, self.options, self.allocation
        sound = f"kept, {self.admission.tokens} tokens" if self.admission.is_kept else f"none: {self.admission.reason}"
        tall, wide = self.image_size
        first, last = self.times[0], self.times[-1]
        lines = [
            f"source     {facts.origin}, {facts.height} x {facts.width} pixels (h x w), {facts.fps:g} frames/s, "
            f"{facts.duration:g} s, {facts.frames} frames, {facts.audio_samples} samples at {options.audio_rate} Hz",
            f"context    {options.context} tokens, {options.reserve} reserved for output, {options.prompt_tokens} left",
            f"sound      {sound}; {self.admission.reserved} tokens reserved, cap {options.audio_cap:g}",
            f"budget     {self.budget} tokens for frames, after {options.prompt_overhead} for the prompt; "
            f"at most {self.cap} frames",
            f"solved     {found.branch}: {found.frames} frames of at most {found.token_cap} tokens, accounted at "
            f"{found.frame_tokens} + {FRAME_OVERHEAD} each, {found.usage} in all",
            f"frames     {len(self.indices)} of {tall} x {wide} pixels (h x w), {self.frame_tokens} tokens each, "
            f"JPEG quality {options.jpeg_quality}",
            f"times      {options.timestamps}: {time_text(first)} to {time_text(last)}",
            f"groups     {len(self.pieces)} of {options.grouping}" if self.pieces else "groups     none",
            f"prompt     {self.tokens} tokens",
        ]
        return "\n".join([*lines, *(f"note       {note}" for note in self.notes)])


def plan_video(
    facts: VideoFacts,
    options: VideoOptions | None = None,
    config: ImageConfig | None = None,
    decodable: int | None = None,
) -> VideoPlan:
    """Plan a clip. `decodable`: how many frames turned out to decode, where that is fewer than announced.

    Raises: VideoError where no frame is left, or, if `options.is_strict`, where a note would be written.
    """
    options, config = options or VideoOptions(), config or ImageConfig()
    admission = admit(facts, options)
    budget = max(FRAME_FLOOR + FRAME_OVERHEAD, options.prompt_tokens - options.prompt_overhead - admission.reserved)
    cap = frame_cap(options.prompt_tokens)
    found = solve(facts.height, facts.width, facts.fps, facts.duration, budget, cap)
    size = frame_size(facts.height, facts.width, found.token_cap, facts.origin)
    request = options.frame_request
    final_size = image_size(*request.sides(*size), request.bounds(config))

    announced = frame_indices(found.frames, facts.frames, facts.origin)
    indices = announced if decodable is None else tuple(index for index in announced if index < decodable)
    if not indices:
        raise VideoError(f"video: announces {facts.frames} frames, but none decodes")
    times = seconds_of(indices, facts.fps, facts.duration, options.timestamps)
    bounds, pieces = _grouped(facts, options, admission, times)
    segment = SEGMENT_SECONDS * options.audio_rate
    plan = VideoPlan(
        facts=facts,
        options=options,
        admission=admission,
        budget=budget,
        cap=cap,
        allocation=found,
        frame_size=size,
        image_size=final_size,
        indices=indices,
        times=times,
        pieces=pieces,
        emissions=_emissions(times, cells(*final_size), bounds, pieces, segment),
    )
    notes = _notes(plan, announced, decodable)
    if notes and options.is_strict:
        raise VideoError(f"video: {'; '.join(notes)} (options.is_strict refuses what is otherwise noted)")
    return replace(plan, notes=notes)


def _grouped(
    facts: VideoFacts, options: VideoOptions, admission: Admission, times: tuple[float, ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    if not admission.is_kept:
        return (0, len(times)), ()
    draw = seeded_draw(facts.video_id, options.question) if options.grouping == "logk" and facts.video_id else None
    bounds = group_bounds(len(times), facts.audio_samples / options.audio_rate, options.grouping, draw)
    return bounds, piece_samples(bounds, times, facts.audio_samples, options.audio_rate)


def _emissions(
    times: tuple[float, ...],
    tokens: int,
    bounds: tuple[int, ...],
    pieces: tuple[tuple[int, int], ...],
    segment: int,
) -> tuple[Emission, ...]:
    items: list[Emission] = []
    for group, (first, end) in enumerate(pairwise(bounds)):
        items.extend(Emission("frame", j, tokens, time_text(times[j])) for j in range(first, end))
        if pieces and pieces[group][0] < pieces[group][1]:
            start, stop = pieces[group]
            items.append(Emission("sound", group, tokens_of(stop - start, segment)))
    return tuple(items)


def _notes(plan: VideoPlan, announced: tuple[int, ...], decodable: int | None) -> tuple[str, ...]:
    """What a reader would not expect of the plan. announced: the indices, had all frames decoded."""
    facts, found = plan.facts, plan.allocation
    notes = []
    if facts.audio_samples and not plan.admission.is_kept:
        notes.append(f"sound left out: {plan.admission.reason}")
    if facts.audio_note.startswith(BROKEN_SOUND):
        notes.append(facts.audio_note)
    if found.usage > plan.budget:
        notes.append(
            f"{MIN_FRAMES} frames are always taken; they are accounted at {found.usage} tokens, "
            f"the budget is {plan.budget}"
        )
    if plan.indices != announced:
        first_lost = announced[len(plan.indices)]
        notes.append(f"{facts.frames} frames announced, {decodable} decode: no index from {first_lost} on")
    return tuple(notes)
