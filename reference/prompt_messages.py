"""The messages of a chat, read from the usual JSON and checked before any text is written.

A message is `{"role", "content"}` with content a text, or a list of parts: `{"type": "text", "text"}`, or a place for
media (`image`, `audio`, `video`, also spelled `image_url`, `input_audio`, …). An assistant message may have
`reasoning_content` (or `reasoning`) and `tool_calls`. What is not so is refused by name, with its place in the list.
Source: multimodal prompt specification, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reference.errors import NoteError

Role = Literal["system", "user", "assistant", "tool"]
MediaKind = Literal["image", "audio", "video"]

ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
MEDIA_PARTS: dict[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
REASONING_KEYS = ("reasoning_content", "reasoning")


class PromptError(NoteError):
    """Messages, media or tokenizer cannot make a prompt. Says which message, what is wrong and what would be right."""


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class MediaPart:
    """A place for one image, audio or video."""

    kind: MediaKind


@dataclass(frozen=True)
class ToolCall:
    """A call of an earlier turn."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """`reasoning` is None where the message has no such field: the content is searched for it then."""

    role: Role
    parts: tuple[TextPart | MediaPart, ...]
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


def read_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Raises: PromptError for the first message that is not as the module's docstring says."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(f"messages must be a list of objects, found {type(messages).__name__}")
    if not messages:
        raise PromptError("messages must hold at least one message, found none")
    return tuple(_read_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} must be an object with role and content, found {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PromptError(f"{where}: role must be one of {', '.join(ROLES)}, found {role!r}")
    known = ROLES[role]
    parts = _read_parts(message.get("content"), where, known)
    if known != "assistant":
        return Message(known, parts)
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise PromptError(f"{where}: tool_calls must be a list, found {type(calls).__name__}")
    return Message(
        known,
        parts,
        None if reasoning is None else checked_text(reasoning, f"{where}: reasoning"),
        tuple(_read_call(call, f"{where}: tool_calls[{number}]") for number, call in enumerate(calls)),
    )


def _read_parts(content: Any, where: str, role: Role) -> tuple[TextPart | MediaPart, ...]:
    if content is None and role == "assistant":
        return ()
    if isinstance(content, str):
        return (TextPart(checked_text(content, f"{where}: content")),)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise PromptError(f"{where}: content must be a text or a list of parts, found {type(content).__name__}")
    return tuple(_read_part(part, f"{where}: content[{number}]", role) for number, part in enumerate(content))


def _read_part(part: Any, where: str, role: Role) -> TextPart | MediaPart:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return TextPart(checked_text(part.get("text"), f"{where}: text"))
    if not isinstance(kind, str) or kind not in MEDIA_PARTS:
        raise PromptError(f"{where}: type must be text or one of {', '.join(MEDIA_PARTS)}, found {kind!r}")
    if role not in ("user", "tool"):
        raise PromptError(f"{where}: {MEDIA_PARTS[kind]} in a message of the {role}; only user and tool have media")
    return MediaPart(MEDIA_PARTS[kind])


def _read_call(call: Any, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f'{where} must be {{"function": {{"name": …, "arguments": {{…}}}}}}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{where}: arguments must be an object, or JSON text of one: {error}") from error
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise PromptError(f"{where}: arguments must be an object, found {type(arguments).__name__}")
    for key, value in arguments.items():
        checked_text(key, f"{where}: a key of arguments")
        if isinstance(value, str):
            checked_text(value, f"{where}: arguments: {key!r}")
    return ToolCall(checked_text(function["name"], f"{where}: name"), arguments)


def checked_text(text: Any, where: str) -> str:
    """A text that can be encoded. Raises: PromptError otherwise."""
    if not isinstance(text, str):
        raise PromptError(f"{where} must be a text, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{where}: character {error.start} is half of a surrogate pair, which is no text") from error
    return text
