"""Videos: plans without a decoder, files made on the spot, sound and its pieces, and everything that is refused."""

import dataclasses
import hashlib
import math
import random
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st
from media_files import movie, smooth

from reference.errors import MissingPackageError
from reference.media import video_sound
from reference.media.errors import ImageError, VideoError
from reference.media.image import preprocess_image, resize
from reference.media.image_config import ImageRequest
from reference.media.video import jpeg_round_trip, prepare_frames, prepare_video
from reference.media.video_decode import DecodeLimits, read_facts, read_frames, read_sound
from reference.media.video_options import VideoFacts, VideoOptions, cache_key, prompt_overhead
from reference.media.video_plan import plan_video
from reference.media.video_sound import (
    admit,
    group_bounds,
    longest_grouping,
    piece_samples,
    seeded_draw,
    to_pcm,
    tokens_of,
    waveform,
)

RATE = 16_000
CLIP = VideoFacts(720, 1280, 25.0, 60.0, 1500, audio_samples=60 * RATE, audio_note="")
SILENT = dataclasses.replace(CLIP, audio_samples=0, audio_note="no sound track")
SAMPLES = st.sampled_from([0, 1, 1279, 1280, 1281, 15_840, 16_000, 32_000, 960_000]) | st.integers(0, 30_000_000)
FACTS = st.builds(
    VideoFacts,
    height=st.integers(14, 1200),
    width=st.integers(14, 1200),
    fps=st.floats(0.1, 60.0),
    duration=st.floats(0.5, 4000.0),
    frames=st.integers(1, 100_000),
    audio_samples=SAMPLES,
    audio_note=st.just(""),
    video_id=st.just("0" * 40),
)
OPTIONS = st.builds(
    VideoOptions,
    context=st.integers(2000, 400_000),
    max_new_tokens=st.integers(0, 1000),
    audio_cap=st.sampled_from([0.0, 0.4, 1.0]),
    grouping=st.sampled_from(["eval_ek", "eval30", "whole", "logk"]),
    question=st.sampled_from(["", "what?"]),
)


def test_c53_the_output_limit_changes_the_frames_and_the_plan_says_so():
    few = plan_video(SILENT, VideoOptions(context=4096, output_reserve=2048))
    many = plan_video(SILENT, VideoOptions(context=4096, output_reserve=1024))
    assert (len(many.indices), many.allocation.token_cap) == (15, 193)
    assert few.tokens < many.tokens
    assert few.describe() != many.describe()
    assert plan_video(SILENT, VideoOptions(context=4096, output_reserve=1024)) == many
    assert (
        plan_video(SILENT, VideoOptions(context=4096, output_reserve=1024, max_new_tokens=2048)).indices == few.indices
    )


def test_the_printed_plan():
    assert plan_video(CLIP, VideoOptions(context=8192)).describe().splitlines() == [
        "source     container, 720 x 1280 pixels (h x w), 25 frames/s, 60 s, 1500 frames, 960000 samples at 16000 Hz",
        "context    8192 tokens, 2048 reserved for output, 6144 left",
        "sound      kept, 752 tokens; 932 tokens reserved, cap 1",
        "budget     5116 tokens for frames, after 96 for the prompt; at most 1024 frames",
        "solved     bisect: 19 frames of at most 268 tokens, accounted at 252 + 15 each, 5073 in all",
        "frames     19 of 336 x 588 pixels (h x w), 252 tokens each, JPEG quality 85",
        "times      source: <00:00:00.00> to <00:00:59.96>",
        "groups     6 of eval_ek",
        "prompt     5836 tokens",
    ]


def test_a_clip_without_sound_still_reserves_a_bracket():
    """3 tokens, from 2,815 prompt tokens on."""
    assert plan_video(SILENT).budget == 98_205
    options = [VideoOptions(context=room, output_reserve=0) for room in (2814, 2815)]
    assert [admit(SILENT, each).reserved for each in options] == [0, 3]
    assert [plan_video(SILENT, each).notes for each in options] == [(), ()]


# Section 4.3: prompt tokens, the longest sound track in whole seconds that is kept.
@pytest.mark.parametrize(("room", "seconds"), [(3072, 16), (24_576, 1404), (98_304, 6160), (393_216, 25_187)])
def test_how_much_sound_is_kept(room, seconds):
    options = VideoOptions(context=room, output_reserve=0)
    kept, dropped = (
        admit(dataclasses.replace(CLIP, audio_samples=length * RATE), options) for length in (seconds, seconds + 1)
    )
    assert kept.is_kept
    assert not dropped.is_kept
    assert dropped.reserved == 0
    assert "exceed" in dropped.reason


def test_c53_sound_that_exceeds_the_budget_is_left_out_and_noted():
    hour = dataclasses.replace(CLIP, audio_samples=3600 * RATE)
    options = VideoOptions(context=24_576)
    plan = plan_video(hour, options)
    assert "sound      none: 55802 tokens of sound" not in plan.describe()
    assert plan.notes == ("sound left out: 45002 tokens of sound exceed audio_cap = 1.0 of 18432",)
    assert not plan.pieces
    with pytest.raises(VideoError, match="45002 tokens of sound exceed"):
        plan_video(hour, dataclasses.replace(options, is_strict=True))


def test_c54_a_budget_below_four_frames_is_noted_or_refused():
    options = VideoOptions(context=400)
    plan = plan_video(SILENT, options)
    assert len(plan.indices) == 4
    assert "4 frames are always taken" in plan.notes[0]
    with pytest.raises(VideoError, match="4 frames"):
        plan_video(SILENT, dataclasses.replace(options, is_strict=True))


@pytest.mark.parametrize("change", [{"duration": 0.0}, {"height": 0}, {"width": -1}, {"duration": math.nan}])
def test_c54_a_clip_without_extent_is_refused(change):
    with pytest.raises(VideoError, match="must be positive"):
        dataclasses.replace(CLIP, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"context": 0}, "context"),
        ({"output_reserve": 131_072}, "output reserve"),
        ({"max_new_tokens": 131_072}, "output reserve"),
        ({"output_reserve": -1}, "output_reserve"),
        ({"audio_cap": -0.1}, "audio_cap"),
        ({"audio_cap": math.nan}, "audio_cap"),
        ({"audio_rate": 0}, "audio_rate"),
        ({"grouping": "eval"}, "grouping"),
        ({"timestamps": "ms"}, "timestamps"),
        ({"jpeg_quality": 0}, "jpeg_quality"),
    ],
)
def test_impossible_options_are_refused_up_front(change, named):
    with pytest.raises(VideoError, match=named):
        VideoOptions(**change)


@given(FACTS, OPTIONS)
def test_a_plan_adds_up(facts, options):
    try:
        plan = plan_video(facts, options)
    except ImageError:
        event("sides more than 200 to 1")
        return
    event(f"sound kept: {plan.admission.is_kept}")
    assert plan == plan_video(facts, options)
    frames = [item for item in plan.emissions if item.kind == "frame"]
    sounds = [item for item in plan.emissions if item.kind == "sound"]
    assert [item.number for item in frames] == list(range(len(plan.indices)))
    expected = sum(len(item.text) + 2 + plan.frame_tokens for item in frames) + sum(2 + s.tokens for s in sounds)
    assert plan.tokens == expected
    assert plan.fragment.count("<|imgpad|>") == plan.frame_tokens * len(frames)
    assert plan.fragment.count("<|audio_comp_pad|>") == sum(item.tokens for item in sounds)
    if plan.admission.is_kept:
        assert sum(2 + item.tokens for item in sounds) <= plan.admission.reserved
    else:
        assert not sounds
    if plan.allocation.usage <= plan.budget:
        # Frames of a file take no more than they are accounted at.
        assert sum(len(item.text) + 2 + item.tokens for item in frames) <= plan.budget + len(frames)


@given(FACTS, OPTIONS, OPTIONS)
def test_only_drawn_groups_read_the_question(facts, options, other):
    options = dataclasses.replace(options, grouping="eval_ek")
    asked = dataclasses.replace(options, question=other.question)
    state = random.getstate()
    try:
        one, two = plan_video(facts, options), plan_video(facts, asked)
    except ImageError:
        return
    assert (one.indices, one.pieces, one.fragment) == (two.indices, two.pieces, two.fragment)
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("frames", "seconds", "bounds"),
    [
        (60, 60.0, (0, 4, 9, 13, 17, 21, 26, 30, 34, 39, 43, 47, 51, 56, 60)),
        (10, 10.2, (0, 2, 5, 8, 10)),
        (8, 8.0, (0, 3, 5, 8)),
        (8, 0.99, (0, 8)),
        (1, 60.0, (0, 1)),
    ],
)
def test_group_bounds(frames, seconds, bounds):
    assert group_bounds(frames, seconds, "eval_ek", None) == bounds
    assert group_bounds(frames, seconds, "whole", None) == (0, frames)


GROUPS = [2, 3, 4, 5, 8, 10, 20, 30, 60, 120, 300, 600, 1024]


@pytest.mark.parametrize(
    ("grouping", "counts"),
    [
        ("eval_ek", [1, 2, 2, 2, 3, 4, 6, 9, 14, 25, 52, 94, 148]),
        ("eval30", [1, 2, 2, 2, 3, 3, 4, 5, 8, 11, 17, 24, 32]),
    ],
)
def test_how_many_groups(grouping, counts):
    assert [len(group_bounds(g, float(g), grouping, None)) - 1 for g in GROUPS] == counts


@given(st.integers(1, 1024), st.floats(0.05, 5000), st.sampled_from(["eval_ek", "eval30", "whole", "logk"]))
def test_bounds_ascend(frames, seconds, grouping):
    bounds = group_bounds(frames, seconds, grouping, random.Random(frames))
    assert (bounds[0], bounds[-1]) == (0, frames)
    assert all(a < b for a, b in pairwise(bounds))
    assert len(bounds) - 1 <= min(frames, longest_grouping(seconds))


@given(st.integers(2, 200), st.integers(1, 4_000_000), st.floats(0.2, 1.0), st.sampled_from(["eval_ek", "eval30"]))
def test_pieces_cover_the_sound_once(frames, samples, rate, grouping):
    times = tuple(round(j / rate, 3) for j in range(frames))
    bounds = group_bounds(frames, samples / RATE, grouping, None)
    pieces = piece_samples(bounds, times, samples, RATE)
    position = 0
    for start, end in pieces:
        if start < end:
            assert start == position or position == samples
            position = end
    if times[bounds[-2]] < samples / RATE:
        assert position == samples
    assert pieces[0][0] == 0


def test_drawn_groups_are_a_function_of_the_file_and_the_question():
    facts = dataclasses.replace(CLIP, video_id=hashlib.sha1(b"film", usedforsecurity=False).hexdigest())
    plans = [
        plan_video(facts, VideoOptions(grouping="logk", question=question)).pieces
        for question in ("what?", "what?", "who?", "where?")
    ]
    assert plans[0] == plans[1]
    assert len({len(pieces) for pieces in plans}) > 1
    with pytest.raises(VideoError, match="digest"):
        plan_video(CLIP, VideoOptions(grouping="logk"))


def test_drawn_groups_use_the_published_seed():
    """sha1("42|flatten|" + sha1(id + "|" + question)): its first eight digits."""
    key = hashlib.sha1(b"id|q", usedforsecurity=False).hexdigest()
    seed = int(hashlib.sha1(f"42|flatten|{key}".encode(), usedforsecurity=False).hexdigest()[:8], 16)
    assert seeded_draw("id", "q").random() == random.Random(seed).random()


def fips_sha1(content=b"", *, usedforsecurity=True):
    if usedforsecurity:
        raise ValueError("disabled for FIPS")
    return REAL_SHA1(content, usedforsecurity=False)


REAL_SHA1 = hashlib.sha1


def test_hashes_work_where_weak_digests_are_disabled(monkeypatch):
    monkeypatch.setattr(video_sound.hashlib, "sha1", fips_sha1)
    film = movie(frames=20, sound_seconds=2.0)
    assert prepare_video(film, VideoOptions(grouping="logk")).pieces


def test_deterministic_groups_compute_no_digest(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a digest was computed")

    monkeypatch.setattr(video_sound.hashlib, "sha1", refuse)
    assert prepare_video(movie(frames=20, sound_seconds=2.0)).pieces


def test_equal_keys_for_equal_results_only():
    base = VideoOptions()
    keys = {cache_key(b"film", base), cache_key(b"other", base)}
    for change in (
        {"context": 4096},
        {"output_reserve": 1},
        {"max_new_tokens": 40_000},
        {"audio_cap": 0.4},
        {"audio_rate": 8000},
        {"grouping": "eval30"},
        {"timestamps": "uniform"},
        {"jpeg_quality": 90},
        {"prompt_overhead": 95},
        {"frame_request": ImageRequest(max_pixels=50_000)},
        {"grouping": "logk"},
        {"grouping": "logk", "question": "what?"},
    ):
        keys.add(cache_key(b"film", VideoOptions(**change)))
    assert len(keys) == 14
    assert cache_key(b"film", VideoOptions(question="what?")) == cache_key(b"film", base)


def test_the_overhead_counts_the_systems_text_and_the_clips_name():
    assert prompt_overhead(len) == 54 + 2 + 9 + 64


@pytest.mark.parametrize(
    ("samples", "tokens"), [(0, 0), (1, 1), (1279, 1), (1280, 1), (1281, 2), (480_000, 375), (960_001, 751)]
)
def test_tokens_of_a_waveform(samples, tokens):
    assert tokens_of(samples, 30 * RATE) == tokens_of(samples, 60 * RATE) == tokens


def test_samples_are_cut_towards_zero_and_scaled_by_another_number():
    pcm = to_pcm(np.array([-2.0, -1.0, -0.00002, 0.00002, 0.5, 1.0, 2.0], dtype=np.float32))
    assert pcm.tolist() == [-32767, -32767, 0, 0, 16383, 32767, 32767]
    assert waveform(pcm)[-1].item() == 32767 / 32768
    assert waveform(pcm).dtype == torch.float32
    with pytest.raises(VideoError, match="not finite"):
        to_pcm(np.array([math.nan], dtype=np.float32))


def test_a_file_becomes_frames_and_pieces_of_sound():
    video = prepare_video(movie(frames=60, fps=10, sound_seconds=6.0))
    plan = video.plan
    assert (plan.facts.height, plan.facts.width, plan.facts.fps, plan.facts.frames) == (120, 160, 10.0, 60)
    assert plan.indices == (0, 12, 24, 35, 47, 59)
    assert plan.times == (0.0, 1.2, 2.4, 3.5, 4.7, 5.9)
    assert video.frames.grids_N3.tolist() == [[1, 8, 10]] * 6
    assert [item.kind for item in plan.emissions] == ["frame", "frame", "sound"] * 3
    assert sum(len(piece) for piece in video.pieces) == plan.facts.audio_samples
    assert len(video.pieces[0]) == round(2.4 * RATE)
    assert plan.fragment.startswith("<00:00:00.00><|img|>" + "<|imgpad|>" * 20 + "<|endofimg|><00:00:01.20><|img|>")
    # Both tones of the stereo track are in the mixed one.
    spectrum = np.abs(np.fft.rfft(video.pieces[1].numpy()))
    seconds = len(video.pieces[1]) / RATE
    assert sorted(round(float(peak) / seconds / 10) * 10 for peak in np.argsort(spectrum)[-2:]) == [440, 660]


@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
def test_frames_are_those_of_the_indices(kind):
    frames, decoded = read_frames(movie(frames=30, kind=kind), (0, 7, 29), (120, 160))
    assert decoded == 30
    for index in (0, 7, 29):
        expected = smooth(120, 160, seed=index)
        errors = [np.abs(frames[index].astype(int) - smooth(120, 160, seed=i)).mean() for i in range(30)]
        assert int(np.argmin(errors)) == index
        assert np.abs(frames[index].astype(int) - expected).mean() < 6


def test_a_frame_is_resized_then_compressed_then_an_image():
    film = movie(frames=4, size=(240, 320))
    video = prepare_video(film)
    raw, _ = read_frames(film, (0,), (240, 320))
    frame = jpeg_round_trip(resize(raw[0], 224, 308), 85)
    expected = preprocess_image(frame)
    assert torch.equal(video.frames.pixels_PX[: len(expected.pixels_PX)], expected.pixels_PX)
    assert not np.array_equal(frame, resize(raw[0], 224, 308))


def test_an_override_shrinks_frames_after_the_budget_was_solved():
    film = movie(frames=4, size=(240, 320))
    video = prepare_video(film, VideoOptions(frame_request=ImageRequest(max_pixels=20_000)))
    assert video.plan.allocation == prepare_video(film).plan.allocation
    assert video.plan.frame_size == (224, 308)
    assert video.plan.image_size == (112, 140)
    assert video.frames.grids_N3.tolist() == [[1, 8, 10]] * 4


def test_the_same_file_gives_the_same_bytes(tmp_path):
    film = movie(sound_seconds=3.0)
    path = tmp_path / "film.mp4"
    path.write_bytes(film)
    one, two = prepare_video(film), prepare_video(path)
    assert one.plan == two.plan
    assert torch.equal(one.frames.pixels_PX, two.frames.pixels_PX)
    assert all(torch.equal(a, b) for a, b in zip(one.pieces, two.pieces, strict=True))


def test_c54_without_a_sound_track():
    plan = prepare_video(movie(frames=20)).plan
    assert plan.admission.reason == "no sound track"
    assert plan.notes == ()
    assert "<|audio" not in plan.fragment


def test_sound_that_is_not_wanted_is_not_decoded():
    plan = prepare_video(movie(frames=20, sound_seconds=2.0), VideoOptions(audio_cap=0)).plan
    assert plan.facts.audio_samples == 0
    assert "audio_cap = 0" in plan.admission.reason


@pytest.mark.parametrize("kept", [0.97, 0.6, 0.3])
def test_c54_a_broken_tail_gives_the_frames_that_exist_and_a_note(kept):
    film = movie(frames=100)
    cut = film[: int(len(film) * kept)]
    video = prepare_video(cut)
    plan = video.plan
    assert plan.facts.frames == 100
    assert plan.indices[0] == 0
    assert plan.indices[-1] < 99
    assert set(plan.indices) <= {0, 11, 22, 33, 44, 55, 66, 77, 88}
    assert len(video.frames.grids_N3) == len(plan.indices) == plan.fragment.count("<|img|>")
    assert "100 frames announced" in plan.notes[-1]
    with pytest.raises(VideoError, match="100 frames announced"):
        prepare_video(cut, VideoOptions(is_strict=True))


def test_c54_a_broken_sound_track_is_noted_or_refused(monkeypatch):
    def broken(samples):
        raise VideoError("sound track: holds samples that are not finite numbers")

    monkeypatch.setattr("reference.media.video_decode.to_pcm", broken)
    film = movie(frames=20, sound_seconds=2.0)
    assert "sound track unreadable: " in prepare_video(film).plan.notes[0]
    with pytest.raises(VideoError, match="unreadable"):
        prepare_video(film, VideoOptions(is_strict=True))


def test_long_sound_is_decoded_no_further_than_could_be_kept():
    film = movie(frames=20, sound_seconds=30.0)
    sound = read_sound(film, RATE, 16_000)
    assert 16_000 < len(sound.pcm) < 20_000
    video = prepare_video(film, VideoOptions(context=280, output_reserve=0))
    assert video.plan.facts.audio_samples < 29 * RATE
    assert not video.pieces
    assert "sound left out" in video.plan.notes[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "not a readable video"),
        (b"no video at all", "not a readable video"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile.ts\n", "not a readable video"),
        ("nowhere/film.mp4", "not a file"),
        ("/dev/zero", "not a file"),
        (7, "found int"),
    ],
)
def test_what_is_no_video_is_refused(source, message):
    with pytest.raises(VideoError, match=message):
        prepare_video(source)


def test_a_file_of_sound_alone_is_refused():
    import io
    import wave

    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(bytes(3200))
    with pytest.raises(VideoError, match="not a readable video"):
        prepare_video(buffer.getvalue())


def test_a_plan_needs_no_decoder_and_a_file_names_it(monkeypatch):
    film = movie(frames=20)
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert plan_video(CLIP).describe()
    with pytest.raises(MissingPackageError, match="PyAV is needed"):
        prepare_video(film)


def test_limits_of_decoding():
    film = movie(frames=20)
    with pytest.raises(VideoError, match="at most 100 pixels"):
        read_facts(film, DecodeLimits(frame_pixels=100))
    with pytest.raises(VideoError, match="longer than 0 s"):
        prepare_video(film, limits=DecodeLimits(seconds=0))


@given(st.data())
def test_damaged_films_give_a_video_or_a_named_error(data):
    film = bytearray(movie(frames=6, size=(28, 28), sound_seconds=0.6))
    for _ in range(data.draw(st.integers(1, 12))):
        film[data.draw(st.integers(0, len(film) - 1))] = data.draw(st.integers(0, 255))
    try:
        video = prepare_video(bytes(film), limits=DecodeLimits(frame_pixels=1_000_000, seconds=20))
    except (VideoError, ImageError):
        event("refused")
    else:
        assert len(video.frames.grids_N3) == len(video.plan.indices)


def frames_of(count, height=56, width=84, channels=3):
    return np.stack([np.resize(smooth(height, width, seed=i), (height, width, channels)) for i in range(count)])


def test_decoded_frames_follow_their_own_rule():
    video = prepare_frames(frames_of(300, 24, 32), fps=30.0)
    assert video.plan.facts.duration == 10.0
    assert video.plan.indices == (0, 33, 66, 100, 133, 166, 199, 233, 266, 299)
    assert video.plan.image_size == (252, 364)
    assert prepare_frames(frames_of(3)).plan.indices == (0, 1, 2)
    assert not video.pieces


def test_alpha_of_decoded_frames_is_dropped():
    frames = np.concatenate([frames_of(2), np.zeros((2, 56, 84, 1), dtype=np.uint8)], axis=-1)
    assert torch.equal(prepare_frames(frames).frames.pixels_PX, prepare_frames(frames_of(2)).frames.pixels_PX)


@pytest.mark.parametrize(
    "frames",
    [
        [1],
        np.zeros((2, 8, 8, 3), dtype=np.float32),
        np.zeros((8, 8, 3), dtype=np.uint8),
        np.zeros((0, 8, 8, 3), dtype=np.uint8),
        np.zeros((2, 8, 8, 2), dtype=np.uint8),
    ],
)
def test_other_arrays_are_refused(frames):
    with pytest.raises(VideoError, match="must be"):
        prepare_frames(frames)


def test_long_frames_are_refused_before_they_are_decoded():
    facts = dataclasses.replace(SILENT, height=1, width=9000)
    with pytest.raises(ImageError, match="200 to 1"):
        plan_video(facts)


@pytest.mark.parametrize("height", [1, 5, 6])
def test_tiny_frames_are_enlarged_first(height):
    """Unlike an image of that size, which is refused."""
    assert min(plan_video(dataclasses.replace(SILENT, height=height, width=100)).image_size) >= 28


@example(1, 5.0)
@given(st.integers(1, 5), st.floats(0.5, 100.0))
def test_very_short_clips(frames, fps):
    facts = VideoFacts(56, 56, fps, frames / fps, frames)
    plan = plan_video(facts)
    assert len(plan.indices) == min(frames, max(4, plan.allocation.frames))
