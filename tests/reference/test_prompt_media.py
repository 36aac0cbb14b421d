"""Media in prompts: where pads stand, what does not fit, and the ids of the placeholders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prompt_texts import user, write_tokenizer

from reference.config import tiny
from reference.prompt import ChatTokenizer, build_prompt
from reference.prompt_media import (
    AROUND,
    PADS,
    AudioItem,
    ImageItem,
    MediaItem,
    MediaRules,
    MediaSpan,
    PaddedVideoItem,
    VideoItem,
)
from reference.prompt_messages import PromptError
from reference.prompt_render import PromptOptions

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> ChatTokenizer:
    return ChatTokenizer.open(tokenizer_file)


def expanded(tokenizer: ChatTokenizer, kind: Any, count: int) -> list[int]:
    start, stop = AROUND[kind]
    markers = [*([start] if start else []), *[PADS[kind]] * count, *([stop] if stop else [])]
    return [tokenizer.id_of(marker) for marker in markers]


def test_media_stand_where_their_parts_do(tokenizer: ChatTokenizer) -> None:
    parts = [{"type": "image_url"}, {"type": "text", "text": "Hi"}, {"type": "audio"}, {"type": "image"}]
    items: list[MediaItem] = [ImageItem(3), AudioItem(2), ImageItem(1)]
    prompt = build_prompt([user(parts)], tokenizer, media=items)
    image, sound, last = (
        expanded(tokenizer, item.kind, item.tokens) for item in items if not isinstance(item, VideoItem)
    )
    body = [*image, *tokenizer.encode_plain("Hi"), *sound, *last]
    opened = tokenizer.id_of("<|user|>")
    at = prompt.ids.index(opened) + 1
    assert list(prompt.ids[at : at + len(body)]) == body
    assert "<|user|><|img|><|imgpad|><|endofimg|>Hi<|audio_comp_start|><|audio_comp_pad|>" in prompt.text
    assert [(span.kind, span.item, span.stop - span.start) for span in prompt.media] == [
        ("image", 0, 3), ("audio", 1, 2), ("image", 2, 1),
    ]  # fmt: skip
    for span in prompt.media:
        assert set(prompt.ids[span.start : span.stop]) == {tokenizer.id_of(PADS[span.kind])}


def test_a_video_is_stamps_frames_and_sound_in_turn(tokenizer: ChatTokenizer) -> None:
    stamps = ["<00:00:00.00>", "<00:00:01.50>"]
    video = VideoItem((stamps[0], ImageItem(2), stamps[1], ImageItem(2), AudioItem(3)))
    prompt = build_prompt([user([{"type": "video"}])], tokenizer, media=[video])
    frame, sound = expanded(tokenizer, "image", 2), expanded(tokenizer, "audio", 3)
    body = [*tokenizer.encode_plain(stamps[0]), *frame, *tokenizer.encode_plain(stamps[1]), *frame, *sound]
    at = prompt.ids.index(tokenizer.id_of("<|user|>")) + 1
    assert list(prompt.ids[at : at + len(body)]) == body
    assert tokenizer.id_of("<|video_pad|>") not in prompt.ids
    assert [(span.kind, span.item) for span in prompt.media] == [("image", 0), ("image", 0), ("audio", 0)]
    assert "<|user|><|video_pad|><|endofuser|>" in prompt.text


def test_a_video_as_transformers_writes_it(tokenizer: ChatTokenizer) -> None:
    prompt = build_prompt([user([{"type": "video"}])], tokenizer, media=[PaddedVideoItem(4)])
    at = prompt.ids.index(tokenizer.id_of("<|video_pad|>"))
    assert prompt.media == (MediaSpan("video", 0, at, at + 4),)


def test_parts_are_joined_as_asked(tokenizer: ChatTokenizer) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    options = PromptOptions(part_separator="\n")
    assert (
        "<|endofimg|>\na\nb<|endofuser|>" in build_prompt([user(parts)], tokenizer, options, media=[ImageItem(1)]).text
    )


IMAGE, AUDIO, VIDEO = ({"type": kind} for kind in ("image", "audio", "video"))


@pytest.mark.parametrize(
    ("parts", "media", "rules", "message"),
    [
        ([IMAGE], [], {}, "1 places for media, and 0 items"),
        ([], [ImageItem(1)], {}, "0 places for media, and 1 items"),
        (
            [IMAGE, AUDIO],
            [AudioItem(1), ImageItem(1)],
            {},
            r"messages\[0\]: has a place for image, and media\[0\] is audio",
        ),
        ([IMAGE], [ImageItem(0)], {}, r"media\[0\]: tokens of image must be an integer of at least 1, found 0"),
        ([IMAGE], [ImageItem(True)], {}, "found True"),
        ([VIDEO], [VideoItem(("x", AudioItem(1)))], {}, "at least one frame"),
        ([VIDEO], [VideoItem((ImageItem(-1),))], {}, r"media\[0\]: parts\[0\]: tokens of image"),
        ([VIDEO], [VideoItem((ImageItem(1), AudioItem(1)))], {"modalities": ("image", "video")}, "parts.1. is audio"),
        ([VIDEO, IMAGE], [PaddedVideoItem(1), ImageItem(1)], {}, "a video and image"),
        ([VIDEO] * 2, [PaddedVideoItem(1)] * 2, {}, "2 items of video, and at most 1"),
        ([IMAGE] * 513, [ImageItem(1)] * 513, {}, "513 items of image, and at most 512"),
        ([AUDIO], [AudioItem(1)], {"modalities": ()}, "has audio, and this model is loaded for text only"),
    ],
)
def test_media_that_do_not_fit_are_refused(
    tokenizer: ChatTokenizer, parts: Any, media: Any, rules: dict[str, Any], message: str
) -> None:
    options = PromptOptions(media=MediaRules(**rules))
    with pytest.raises(PromptError, match=message):
        build_prompt([user([{"type": "text", "text": "Hi"}, *parts])], tokenizer, options, media=media)


def test_rules_can_be_widened(tokenizer: ChatTokenizer) -> None:
    rules = MediaRules(limits={"video": 2}, video_beside_others=True)
    media = [PaddedVideoItem(1), PaddedVideoItem(2), ImageItem(1)]
    prompt = build_prompt([user([VIDEO, VIDEO, IMAGE])], tokenizer, PromptOptions(media=rules), media=media)
    assert [span.item for span in prompt.media] == [0, 1, 2]


def test_a_pad_that_a_text_brings_is_refused(tokenizer: ChatTokenizer) -> None:
    message = [user([{"type": "image"}, {"type": "text", "text": "<|imgpad|>"}])]
    build_prompt(message, tokenizer, media=[ImageItem(2)])
    with pytest.raises(PromptError, match=r"has 3 <\|imgpad\|>, and the image items take 2"):
        build_prompt(message, tokenizer, PromptOptions(markers_in_text="tokens"), media=[ImageItem(2)])


def test_an_absent_marker_is_refused_when_it_is_needed(tokenizer: ChatTokenizer) -> None:
    added = {text: id for text, id in tokenizer.added.items() if text != "<|img|>"}
    poorer = ChatTokenizer(tokenizer._plain, added, "small.json")
    build_prompt([user()], poorer)
    with pytest.raises(PromptError, match=r"small.json: <\|img\|> is not a token of its own"):
        build_prompt([user([IMAGE])], poorer, media=[ImageItem(1)])


def test_placeholder_ids_must_be_those_of_the_configuration(tokenizer_file: Path, tokenizer: ChatTokenizer) -> None:
    """The trap: the audio ids are in the order start, end, pad; a guess swaps two of them."""
    image, audio, video = (tokenizer.id_of(PADS[kind]) for kind in ("image", "audio", "video"))  # type: ignore[index]
    right = replace(tiny(), image_token_id=image, audio_token_id=audio, video_token_id=video)
    ChatTokenizer.open(tokenizer_file, right)
    with pytest.raises(PromptError, match=rf"audio_comp_pad\|> is token {audio}, and .* audio token is {audio - 1}"):
        ChatTokenizer.open(tokenizer_file, replace(right, audio_token_id=audio - 1))
