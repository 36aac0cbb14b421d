"""Chat messages to token ids, with the checkpoint's own tokenizer and, to verify against, its own template.

    messages --render--> segments --encode--> ids, and where each tower's rows go

Special tokens are tokens only where the template writes them. The text between two of them is encoded as one piece,
without any added token: as the tokenizer itself does, but that a user who types <|endofuser|> gets twelve characters.
Every id is looked up by its string; where the model's configuration states one as well, the two must be equal.
Needs the package `tokenizers`; `render_template` needs jinja2.
Source: multimodal prompt specification, sections 1 to 3.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference.config import NoteConfig
from reference.errors import MissingPackageError
from reference.prompt_media import AROUND, PADS, MediaItem, MediaSpan, VideoItem, check_media
from reference.prompt_messages import MediaKind, PromptError, checked_text, read_messages
from reference.prompt_render import (
    ASSISTANT,
    END_OF_ASSISTANT,
    END_OF_SYSTEM,
    END_OF_USER,
    SYSTEM,
    USER,
    Markup,
    Place,
    Plain,
    PromptOptions,
    Segment,
    render,
    rendered_text,
)
from reference.prompt_tokens import TextStream
from reference.tool_scan import THINK_CLOSE, THINK_OPEN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
BOS = "<|endoftext|>"
# Each must be a single token, or no prompt of this model can be written.
TURN_MARKERS = (
    SYSTEM, END_OF_SYSTEM, USER, END_OF_USER, ASSISTANT, END_OF_ASSISTANT, THINK_OPEN, THINK_CLOSE,
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """`ids` with all pads; `text` as the template writes it, one pad an item; `media` in order of position."""

    ids: tuple[int, ...]
    text: str
    media: tuple[MediaSpan, ...]


class ChatTokenizer:
    """A byte-level tokenizer file, and the added tokens in it by their string."""

    def __init__(self, plain: Tokenizer, added: Mapping[str, int], where: str):
        """`plain` knows no added tokens; `added` are all of them."""
        self.where = where
        self.added = dict(added)
        self._plain = plain
        self._tokens = {id: text for text, id in added.items()}
        # Of several at one place the longest is taken, as the tokenizer does.
        longest_first = sorted(added, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: NoteConfig | None = None) -> ChatTokenizer:
        """Read `tokenizer.json`, or the one in a folder.

        Raises: PromptError if the file is none, lacks a marker of the chat format, treats a marker in a way that
        depends on its neighbours, or disagrees with the placeholder ids of `config`.
        """
        file = Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)
        document = _read_object(file)
        entries = document.get("added_tokens")
        if not isinstance(entries, list) or not all(_is_added_token(entry) for entry in entries):
            raise PromptError(f"{file}: 'added_tokens' must be a list of objects with content and id")
        added = {entry["content"]: entry["id"] for entry in entries}
        if absent := [marker for marker in TURN_MARKERS if marker not in added]:
            raise PromptError(f"{file}: the chat format needs a single token for each of {', '.join(absent)}")
        for entry in entries:
            if any(entry.get(key) for key in ("lstrip", "rstrip", "single_word")):
                raise PromptError(f"{file}: {entry['content']!r} has lstrip, rstrip or single_word; none may be set")
        _check_ids(added, config, str(file))
        return cls(_without_added(document, file), added, str(file))

    def id_of(self, marker: str) -> int:
        """Raises: PromptError for a string that is no single token."""
        if marker not in self.added:
            raise PromptError(f"{self.where}: {marker} is not a token of its own")
        return self.added[marker]

    def token(self, id: int) -> str:
        """Raises: PromptError for an id that the tokenizer does not have."""
        token = self._tokens.get(id) or self._plain.id_to_token(id)
        if token is None:
            raise PromptError(f"{self.where}: has no token {id}")
        return token

    def text_stream(self) -> TextStream:
        """Decodes ids as they come."""
        return TextStream(self.token)

    def encode_plain(self, text: str) -> list[int]:
        """A text in which nothing is special."""
        return self._plain.encode(text, add_special_tokens=False).ids if text else []

    def split(self, markup: str) -> list[str | int]:
        """A text of the template: ids of the tokens in it, and what stands between them."""
        pieces: list[str | int] = []
        at = 0
        for marker in self._markers.finditer(markup):
            pieces += [markup[at : marker.start()], self.added[marker[0]]]
            at = marker.end()
        return [*pieces, markup[at:]]


def build_prompt(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: ChatTokenizer,
    options: PromptOptions | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    media: Sequence[MediaItem] = (),
) -> Prompt:
    """Write a chat as the model reads it.

    `media` has one item for each place in the messages, in order. Nothing is cut: a prompt longer than the model's
    context is the caller's to refuse.
    Raises: PromptError for messages, tools or media that make no prompt; no id is computed before media are accepted.
    """
    options = options or PromptOptions()
    read = read_messages(messages)
    check_media(read, media, options.media)
    segments = render(read, tools, options)
    if options.add_bos:
        segments.insert(0, Markup(BOS))
    writer = _Writer(tokenizer, options.markers_in_text == "tokens")
    for segment in segments:
        writer.write(segment, media)
    writer.end_text()
    _check_pads(writer, tokenizer)
    return Prompt(tuple(writer.ids), rendered_text(segments, media), tuple(writer.spans))


class _Writer:
    """Collects ids. Texts that touch are encoded together; an added token or media ends the text before it."""

    def __init__(self, tokenizer: ChatTokenizer, has_markers_in_text: bool):
        self.ids: list[int] = []
        self.spans: list[MediaSpan] = []
        self._tokenizer = tokenizer
        self._has_markers_in_text = has_markers_in_text
        self._markup: list[str] = []
        self._text: list[str] = []

    def write(self, segment: Segment, media: Sequence[MediaItem]) -> None:
        if isinstance(segment, Place):
            self._write_item(media[segment.item], segment.item)
        elif isinstance(segment, Markup) or self._has_markers_in_text:
            self._markup.append(segment.text)
        else:
            self._end_markup()
            self._text.append(segment.text)

    def end_text(self) -> None:
        self._end_markup()
        self.ids += self._tokenizer.encode_plain("".join(self._text))
        self._text = []

    def _end_markup(self) -> None:
        """Markup is searched for tokens as a whole: one may be written in two pieces."""
        if not self._markup:
            return
        markup, self._markup = "".join(self._markup), []
        for piece in self._tokenizer.split(markup):
            if isinstance(piece, str):
                self._text.append(piece)
            else:
                self.end_text()
                self.ids.append(piece)

    def _write_item(self, item: MediaItem, number: int) -> None:
        if isinstance(item, VideoItem):
            for part in item.parts:
                if isinstance(part, str):
                    self.write(Plain(checked_text(part, f"media[{number}]: a time stamp")), ())
                else:
                    self._write_item(part, number)
            return
        self.end_text()
        start, stop = AROUND[item.kind]
        pad = self._tokenizer.id_of(PADS[item.kind])
        self.ids += [self._tokenizer.id_of(start)] if start else []
        self.spans.append(MediaSpan(item.kind, number, len(self.ids), len(self.ids) + item.tokens))
        self.ids += [pad] * item.tokens
        self.ids += [self._tokenizer.id_of(stop)] if stop else []


def _check_pads(writer: _Writer, tokenizer: ChatTokenizer) -> None:
    """No pad stands where no tower's row goes: one that a user wrote, where `markers_in_text` is `tokens`."""
    for kind, marker in PADS.items():
        pad = tokenizer.added.get(marker)
        owned = sum(span.stop - span.start for span in writer.spans if span.kind == kind)
        found = 0 if pad is None else writer.ids.count(pad)
        if found != owned:
            raise PromptError(f"the prompt has {found} {marker}, and the {kind} items take {owned}: a text has one too")


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool = True,
    add_generation_prompt: bool = True,
) -> str:
    """What a template file writes, in a sandbox set up as transformers does.

    Raises: PromptError if it fails, MissingPackageError without jinja2.
    """
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingPackageError("jinja2 is needed to run a chat template: install note-parity[prompt]") from error

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **keywords: json.dumps(value, **{"ensure_ascii": False} | keywords)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    switches = {} if thinking else {"enable_thinking": False}
    try:
        return environment.from_string(template).render(
            messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **switches
        )
    except Exception as error:
        # A template is a program of the checkpoint's: it may fail in any way.
        raise PromptError(f"{TEMPLATE_FILE}: {type(error).__name__}: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise PromptError(f"{path}: must hold a JSON object, found {type(document).__name__}")
    return document


def _is_added_token(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    content, id = entry.get("content"), entry.get("id")
    return isinstance(content, str) and bool(content) and isinstance(id, int) and not isinstance(id, bool)


def _check_ids(added: Mapping[str, int], config: NoteConfig | None, where: str) -> None:
    if config is None:
        return
    stated: dict[MediaKind, int] = {
        "image": config.image_token_id,
        "audio": config.audio_token_id,
        "video": config.video_token_id,
    }
    for kind, id in stated.items():
        found = added.get(PADS[kind])
        if found is not None and found != id:
            raise PromptError(f"{where}: {PADS[kind]} is token {found}, and the configuration's {kind} token is {id}")


def _without_added(document: Mapping[str, Any], file: Path) -> Tokenizer:
    """The same tokenizer without added tokens, and without what cuts, pads or adds tokens."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingPackageError("tokenizers is needed to write prompts: install note-parity[prompt]") from error
    silent = dict.fromkeys(("truncation", "padding", "post_processor"))
    try:
        return Tokenizer.from_str(json.dumps(dict(document) | silent | {"added_tokens": []}))
    except Exception as error:
        # The package raises plain Exception for what it cannot read.
        raise PromptError(f"{file}: is no tokenizer: {error}") from error
