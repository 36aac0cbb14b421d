"""The chat format: messages to text, as the checkpoint's template writes it.

    <|system|>SYSTEM [tools] <|endofsystem|>
    { <|user|>CONTENT[<no_think>]<|endofuser|> | <|assistant|>[<think>…</think>]CONTENT[calls]<|endofassistant|> }
    <|assistant|>[<think>\\n\\n</think>\\n\\n]

The text comes in three kinds, which never mix: markup (what the template writes; its special tokens are tokens), plain
(what people and models wrote; `<|endofuser|>` in it is twelve characters), and places for media.
With thinking off two things change at once: `<no_think>` after every user turn, and a closed empty block before every
answer, the one to come included.
The template file was not available to those who wrote the specification: they rebuilt it from two open implementations
that agree. `prompt_check` compares with the file; what stays open is a field of `PromptOptions`.
Source: multimodal prompt specification, section 3.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from reference.prompt_media import AROUND, PADS, MediaItem, MediaRules
from reference.prompt_messages import MediaPart, Message, PromptError, TextPart, ToolCall, checked_text
from reference.tool_scan import CLOSE, OPEN, THINK_CLOSE, THINK_OPEN

SYSTEM, END_OF_SYSTEM = "<|system|>", "<|endofsystem|>"
USER, END_OF_USER = "<|user|>", "<|endofuser|>"
ASSISTANT, END_OF_ASSISTANT = "<|assistant|>", "<|endofassistant|>"
NO_THINK = "<no_think>"
EMPTY_THINK = f"{THINK_OPEN}\n\n{THINK_CLOSE}\n\n"
DEFAULT_SYSTEM = "You are a helpful assistant."

# Of the sentences around the tools as they were rebuilt; they themselves are read from the checkpoint's template.
REBUILT_HEAD = "f007699e00fc258eaee44009c9c98460f8376d6bc97b16b31d1e58cb23d29d79"
REBUILT_TAIL = "9d06876295df7ab5a0a7a968bde6fce87187bbb74d70669450a5c42e874c979b"


@dataclass(frozen=True)
class ToolsText:
    """What the template writes before and after the list of tools. From `prompt_check.read_tools_text`."""

    head: str
    tail: str

    @property
    def is_as_rebuilt(self) -> bool:
        """Whether the template says what the open implementations say."""
        hashes = [hashlib.sha256(text.encode()).hexdigest() for text in (self.head, self.tail)]
        return hashes == [REBUILT_HEAD, REBUILT_TAIL]


@dataclass(frozen=True)
class PromptOptions:
    """How a prompt is written. The second group is what public sources leave open; its defaults are theirs."""

    thinking: bool = True
    add_generation_prompt: bool = True
    default_system: str = DEFAULT_SYSTEM
    tools_text: ToolsText | None = None
    media: MediaRules = field(default_factory=MediaRules)

    # Special tokens that people write: text, or tokens as in engines that encode the rendered text as one string.
    markers_in_text: Literal["plain", "tokens"] = "plain"
    # \u escapes in the tools' schemas and in calls of earlier turns.
    escape_non_ascii: bool = False
    # What stands between the parts of a message; some engines join them with a line break.
    part_separator: str = ""
    # <|endoftext|> in front; the renderers and Qwen-2 tokenizers write none.
    add_bos: bool = False


@dataclass(frozen=True)
class Markup:
    text: str


@dataclass(frozen=True)
class Plain:
    text: str


@dataclass(frozen=True)
class Place:
    """media[item] stands here."""

    item: int


Segment = Markup | Plain | Place


def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: PromptOptions) -> list[Segment]:
    """The segments of a prompt; places are numbered in order. Raises: PromptError, see `prompt_messages`."""
    numbers = iter(range(sum(isinstance(part, MediaPart) for message in messages for part in message.parts)))
    system, turns = options.default_system, messages
    if messages[0].role == "system":
        system, turns = messages[0].text, messages[1:]
    segments: list[Segment] = [Markup(SYSTEM), Plain(system)]
    if tools:
        segments += _tools_section(tools, options)
    segments.append(Markup(END_OF_SYSTEM))
    for number, message in enumerate(turns):
        if message.role == "assistant":
            segments += _assistant_turn(message, options)
        elif message.role == "tool":
            is_first = number == 0 or turns[number - 1].role != "tool"
            is_last = number + 1 == len(turns) or turns[number + 1].role != "tool"
            segments += [Markup(USER)] if is_first else []
            segments += [Markup("\n<dots_function_response>\n"), *_content(message, options, numbers)]
            segments += [Markup("\n</dots_function_response>"), *([Markup(END_OF_USER)] if is_last else [])]
        else:
            segments += _user_turn(message, options, numbers)
    if options.add_generation_prompt:
        segments.append(Markup(ASSISTANT if options.thinking else ASSISTANT + EMPTY_THINK))
    return segments


def rendered_text(segments: Sequence[Segment], media: Sequence[MediaItem]) -> str:
    """The prompt as the template writes it: one block for each item, whatever it expands to."""
    return "".join(
        media_block(media[segment.item]) if isinstance(segment, Place) else segment.text for segment in segments
    )


def media_block(item: MediaItem) -> str:
    """An item before expansion: a delimited single pad, or the video pad alone."""
    start, stop = AROUND[item.kind]
    return f"{start}{PADS[item.kind]}{stop}"


def split_reasoning(content: str) -> tuple[str, str]:
    """(reasoning, answer) of an assistant's text: reasoning is between the last <think> and the first </think>.

    Without </think> all is answer. Line breaks at both ends of the reasoning and before the answer are dropped.
    """
    before, close, after = content.partition(THINK_CLOSE)
    if not close:
        return "", content
    return before.rpartition(THINK_OPEN)[2].strip("\n"), after.lstrip("\n")


def call_segments(call: ToolCall, escape_non_ascii: bool = False) -> Iterator[Segment]:
    """A call of an earlier turn. Texts are written as they are; all else as JSON with ", " and ": "."""
    yield Markup(f'\n{OPEN}\n<invoke name="')
    yield Plain(call.name)
    yield Markup('">')
    for key, value in call.arguments.items():
        yield Markup('\n<parameter name="')
        yield Plain(key)
        yield Markup('">\n')
        yield Plain(value if isinstance(value, str) else _json(value, escape_non_ascii, f"{call.name}: {key}"))
        yield Markup("\n</parameter>")
    yield Markup(f"\n</invoke>\n{CLOSE}")


def call_markup(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as text."""
    return rendered_text(list(call_segments(ToolCall(name, arguments))), ())


def _user_turn(message: Message, options: PromptOptions, numbers: Iterator[int]) -> Iterator[Segment]:
    yield Markup(USER)
    yield from _content(message, options, numbers)
    ends_so = bool(message.parts) and isinstance(message.parts[-1], TextPart) and message.text.endswith(NO_THINK)
    if message.role == "user" and not options.thinking and not ends_so:
        yield Markup(NO_THINK)
    yield Markup(END_OF_USER)


def _assistant_turn(message: Message, options: PromptOptions) -> Iterator[Segment]:
    reasoning, content = message.reasoning, message.text
    if reasoning is None:
        reasoning, content = split_reasoning(content)
    yield Markup(ASSISTANT)
    if not options.thinking:
        yield Markup(EMPTY_THINK)
    elif reasoning:
        yield Markup(f"{THINK_OPEN}\n")
        yield Plain(reasoning.strip())
        yield Markup(f"\n{THINK_CLOSE}\n\n")
    yield Plain(content)
    for call in message.calls:
        yield from call_segments(call, options.escape_non_ascii)
    yield Markup(END_OF_ASSISTANT)


def _content(message: Message, options: PromptOptions, numbers: Iterator[int]) -> Iterator[Segment]:
    for number, part in enumerate(message.parts):
        if number and options.part_separator:
            yield Markup(options.part_separator)
        yield Plain(part.text) if isinstance(part, TextPart) else Place(next(numbers))


def _tools_section(tools: Sequence[Mapping[str, Any]], options: PromptOptions) -> Iterator[Segment]:
    if options.tools_text is None:
        raise PromptError(
            "tools need the sentences around their list, which are in the checkpoint's chat_template.jinja: "
            "pass tools_text=read_tools_text(template)"
        )
    yield Markup(options.tools_text.head)
    for number, tool in enumerate(tools):
        yield Markup("\n")
        yield Plain(_json(_wrapped_tool(tool, f"tools[{number}]"), options.escape_non_ascii, f"tools[{number}]"))
    yield Markup(options.tools_text.tail)


def _wrapped_tool(tool: Any, where: str) -> Mapping[str, Any]:
    """`{"type": "function", "function": …}`, also from a flat tool."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function", tool), Mapping):
        raise PromptError(f'{where} must be {{"type": "function", "function": {{…}}}}, found {type(tool).__name__}')
    if "function" in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _json(value: Any, escape_non_ascii: bool, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=escape_non_ascii)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{where} must be JSON: {error}") from error
    return checked_text(text, where)
