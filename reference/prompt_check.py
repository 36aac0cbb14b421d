"""Is our chat format the checkpoint's? Its template file against our renderer, on one conversation of each kind.

The template is the only true source of the prompt's text, and the sentences around the tools are read from it. Without
the file nothing can be compared, and the answer is `not verified`.
Source: multimodal prompt specification, section 3.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from reference.prompt import TEMPLATE_FILE, render_template
from reference.prompt_media import ImageItem, MediaItem
from reference.prompt_messages import MediaPart, PromptError, read_messages
from reference.prompt_render import END_OF_SYSTEM, SYSTEM, PromptOptions, ToolsText, render, rendered_text

_USER = {"role": "user", "content": "Hi"}
_CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "é", "ids": [1, 2.5, None]}}}
_TOOL = {"type": "function", "function": {"name": "search", "description": "é", "parameters": {"type": "object"}}}
_RESULTS = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]


def _answered(content: str, **fields: Any) -> list[dict[str, Any]]:
    return [_USER, {"role": "assistant", "content": content, **fields}]


# One conversation of each kind, with its tools.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "one question": ([_USER], []),
    "a system message": ([{"role": "system", "content": "S"}, _USER], []),
    "a later system message": ([_USER, {"role": "system", "content": "S"}, _USER], []),
    "a question that asks for no thinking": ([{"role": "user", "content": "Hi<no_think>"}], []),
    "an answer": ([*_answered("b"), _USER], []),
    "reasoning in the text": ([*_answered("<think>r</think>x"), _USER], []),
    "reasoning in its field": ([*_answered("x", reasoning_content="\nr "), _USER], []),
    "calls and results": ([*_answered("", tool_calls=[_CALL, _CALL]), *_RESULTS], [_TOOL, _TOOL]),
    "an image": ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}], []),
}


def read_template(folder: str | os.PathLike[str]) -> str | None:
    """The checkpoint's own template, None if the folder has none. Raises: PromptError if it cannot be read."""
    path = Path(folder) / TEMPLATE_FILE
    try:
        return path.read_bytes().decode() if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: cannot be read: {error}") from error


def read_tools_text(template: str) -> ToolsText:
    """The sentences around the tools: what the template writes before and after the line of a made-up tool.

    Raises: PromptError if the template does not write one tool a line within the system turn.
    """
    name = "tool_of_the_question"
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    text = render_template(template, [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], [tool])
    before, start, section = text.partition(f"{SYSTEM}S")
    section, stop, _ = section.partition(END_OF_SYSTEM)
    head, _, rest = section.partition(name)
    if before or not (start and stop and rest):
        raise PromptError(f"{TEMPLATE_FILE}: does not list tools between {SYSTEM} and {END_OF_SYSTEM}")
    line_start, line_stop = head.rfind("\n"), rest.find("\n")
    if line_start < 0 or line_stop < 0:
        raise PromptError(f"{TEMPLATE_FILE}: does not write a tool on a line of its own")
    return ToolsText(head[:line_start], rest[line_stop:])


@dataclass(frozen=True)
class TemplateDifference:
    """Where our text and the template's part: `at` is the first character that differs."""

    case: str
    at: int
    expected: str
    actual: str


@dataclass(frozen=True)
class TemplateCheck:
    """`not verified` means that there is no template to compare with."""

    verdict: Literal["verified", "differs", "not verified"]
    differences: tuple[TemplateDifference, ...] = ()
    tools_text_as_rebuilt: bool | None = None


def check_template(template: str | None, options: PromptOptions | None = None) -> TemplateCheck:
    """Does our renderer write what the checkpoint's template writes, for one conversation of each kind?"""
    if template is None:
        return TemplateCheck("not verified")
    tools_text = read_tools_text(template)
    differences = []
    for case, (messages, tools) in CONVERSATIONS.items():
        for thinking in (True, False):
            ours = replace(options or PromptOptions(), thinking=thinking, tools_text=tools_text)
            actual = rendered_text(render(read_messages(messages), tools, ours), _single_items(messages))
            name = f"{case}, thinking {'on' if thinking else 'off'}"
            try:
                expected = render_template(template, messages, tools, thinking)
            except PromptError as error:
                differences.append(TemplateDifference(name, 0, str(error), actual))
                continue
            if expected != actual:
                differences.append(TemplateDifference(name, _first_difference(expected, actual), expected, actual))
    return TemplateCheck("differs" if differences else "verified", tuple(differences), tools_text.is_as_rebuilt)


def _first_difference(expected: str, actual: str) -> int:
    pairs = zip(expected, actual, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))


def _single_items(messages: Sequence[Mapping[str, Any]]) -> list[MediaItem]:
    parts = (part for message in read_messages(messages) for part in message.parts)
    return [ImageItem(1) for part in parts if isinstance(part, MediaPart)]
