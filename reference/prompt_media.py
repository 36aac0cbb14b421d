"""Media in a prompt: how many placeholder tokens each item takes, and how the text shows it.

    image    <|img|> N x <|imgpad|> <|endofimg|>                                      N = t h w / merge^2
    audio    <|audio_comp_start|> K x <|audio_comp_pad|> <|audio_comp_end|>           K = ceil(samples / 1280) a segment
    video    time stamps, images and audios in turn                 vLLM, SGLang, and what the model was trained on
             or N x <|video_pad|>                                   transformers 5.24

The counts come from the towers' preprocessing; this file only places them.
Source: multimodal prompt specification, sections 2.1 to 2.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reference.prompt_messages import MediaKind, MediaPart, Message, PromptError

PADS: dict[MediaKind, str] = {"image": "<|imgpad|>", "audio": "<|audio_comp_pad|>", "video": "<|video_pad|>"}
AROUND: dict[MediaKind, tuple[str, str]] = {
    "image": ("<|img|>", "<|endofimg|>"),
    "audio": ("<|audio_comp_start|>", "<|audio_comp_end|>"),
    "video": ("", ""),
}


@dataclass(frozen=True)
class ImageItem:
    """One image or frame of `tokens` merged patch groups."""

    tokens: int
    kind: MediaKind = field(default="image", init=False)


@dataclass(frozen=True)
class AudioItem:
    """One piece of audio of `tokens` adapter outputs."""

    tokens: int
    kind: MediaKind = field(default="audio", init=False)


@dataclass(frozen=True)
class VideoItem:
    """A video as the model was trained on it: time stamps (such as `<00:00:01.50>`), images and audios in turn."""

    parts: tuple[str | ImageItem | AudioItem, ...]
    kind: MediaKind = field(default="video", init=False)


@dataclass(frozen=True)
class PaddedVideoItem:
    """A video as transformers' generic path writes it: `tokens` times the video pad, no stamps, no sound."""

    tokens: int
    kind: MediaKind = field(default="video", init=False)


MediaItem = ImageItem | AudioItem | VideoItem | PaddedVideoItem


@dataclass(frozen=True)
class MediaRules:
    """What a request may hold. The defaults are vLLM's; SGLang allows several videos, and others beside one."""

    modalities: tuple[MediaKind, ...] = ("image", "audio", "video")
    limits: Mapping[MediaKind, int] = field(default_factory=lambda: {"image": 512, "audio": 128, "video": 1})
    video_beside_others: bool = False


@dataclass(frozen=True)
class MediaSpan:
    """Where the tower's rows go: pads of `kind` at positions [start, stop) of the prompt, 0-based, of media[item]."""

    kind: MediaKind
    item: int
    start: int
    stop: int


def check_media(messages: Sequence[Message], media: Sequence[MediaItem], rules: MediaRules) -> None:
    """Every place has its item, in order, and the request keeps the rules. Raises: PromptError."""
    places = [
        (f"messages[{number}]", part.kind)
        for number, message in enumerate(messages)
        for part in message.parts
        if isinstance(part, MediaPart)
    ]
    for where, kind in places:
        if kind not in rules.modalities:
            held = ", ".join(rules.modalities) or "text only"
            raise PromptError(f"{where}: has {kind}, and this model is loaded for {held}")
    if len(places) != len(media):
        raise PromptError(f"the messages have {len(places)} places for media, and {len(media)} items were given")
    for number, ((where, kind), item) in enumerate(zip(places, media, strict=True)):
        if item.kind != kind:
            raise PromptError(f"{where}: has a place for {kind}, and media[{number}] is {item.kind}")
        _check_item(item, f"media[{number}]", rules)
    for kind, limit in rules.limits.items():
        found = sum(item.kind == kind for item in media)
        if found > limit:
            raise PromptError(f"the messages have {found} items of {kind}, and at most {limit} are allowed")
    kinds = {item.kind for item in media}
    if "video" in kinds and len(kinds) > 1 and not rules.video_beside_others:
        others = ", ".join(sorted(kinds - {"video"}))
        raise PromptError(f"the messages have a video and {others}: vLLM refuses this; `video_beside_others` allows it")


def _check_item(item: MediaItem, where: str, rules: MediaRules) -> None:
    if isinstance(item, VideoItem):
        if not any(isinstance(part, ImageItem) for part in item.parts):
            raise PromptError(f"{where}: a video must have at least one frame")
        for number, part in enumerate(item.parts):
            if isinstance(part, str):
                continue
            if part.kind not in rules.modalities:
                raise PromptError(f"{where}: parts[{number}] is {part.kind}, which this model is not loaded for")
            _check_item(part, f"{where}: parts[{number}]", rules)
    elif isinstance(item.tokens, bool) or not isinstance(item.tokens, int) or item.tokens < 1:
        raise PromptError(f"{where}: tokens of {item.kind} must be an integer of at least 1, found {item.tokens!r}")
