"""What stands between the tags of one block: calls as markup, or one call as JSON.

    body = <invoke name=NAME> { <parameter name=KEY> VALUE </parameter> } </invoke> { ... }     (trimmed)
         | {"name": NAME, "arguments": {...}}

A call of an unknown tool is dropped, and the other calls of the block survive. Values of markup are read by the tool's
schema; those of the JSON form keep their JSON types.
Source: tool-call specification, sections 1 to 3 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from reference import tool_scan, tool_values
from reference.tool_scan import INVOKE, OPEN, PARAMETER, Element
from reference.tool_schema import Tools
from reference.tool_values import NonFinite, UnreadableValueError

NoticeKind = Literal[
    "unknown tool",
    "no call",
    "no JSON call",
    "unclosed invoke",
    "unclosed parameter",
    "nested invoke",
    "repeated parameter",
    "value kept as text",
    "value read as false",
    "repeated opening tag",
    "block too long",
    "unclosed block",
    "unclosed reasoning",
]


@dataclass(frozen=True)
class Notice:
    """Something in the output that is not as it should be; it was handled as `message` says. Data, not an exception."""

    kind: NoticeKind
    message: str


@dataclass(frozen=True)
class BlockCall:
    name: str
    arguments: dict[str, Any]


def read_block(
    body: str, tools: Tools, non_finite: NonFinite = "text", lenient: bool = False
) -> tuple[list[BlockCall], list[Notice]]:
    """The valid calls of a block in order, and what was found wrong. Never raises.

    With `lenient`, opening tags that are repeated at the start of the body are skipped.
    """
    notices: list[Notice] = []
    body = body.strip()
    if body.startswith(OPEN):
        what = "skipped" if lenient else "so the block has no call"
        notices.append(Notice("repeated opening tag", f"{OPEN} is followed by another one: {what}"))
    start = 0
    while lenient and body.startswith(OPEN, start):
        start += len(OPEN)
        start += _leading_whitespace(body, start)
    if not body.startswith("<invoke", start):
        call = _json_call(body[start:], tools, non_finite, notices)
        return [call] if call else [], notices
    calls = []
    invoke = None
    for invoke in tool_scan.elements(body, INVOKE, start, len(body)):
        if invoke.stop is None:
            notices.append(Notice("unclosed invoke", f"{_quoted(invoke.name)} has no </invoke>: not a call"))
        elif _is_known(invoke.name, tools, notices):
            calls.append(BlockCall(invoke.name, _arguments(body, invoke, tools, non_finite, notices)))
    if invoke is None:
        notices.append(Notice("no call", 'the block begins with <invoke, but nothing in it is <invoke name="…">'))
    return calls, notices


def _arguments(
    body: str, invoke: Element, tools: Tools, non_finite: NonFinite, notices: list[Notice]
) -> dict[str, Any]:
    """Parameters by name; of two with one name the later value, in the place of the earlier."""
    arguments: dict[str, Any] = {}
    gap = invoke.body
    for parameter in tool_scan.elements(body, PARAMETER, invoke.body, invoke.body_stop):
        _note_nested(body, gap, parameter.start, invoke.name, notices)
        gap = parameter.body_stop
        where = f"{_quoted(invoke.name)}: {_quoted(parameter.name)}"
        if parameter.stop is None:
            notices.append(Notice("unclosed parameter", f"{where} has no </parameter>: left out"))
            continue
        if parameter.name in arguments:
            notices.append(Notice("repeated parameter", f"{where} occurs again: the last value counts"))
        text = body[parameter.body : parameter.body_stop].strip()
        arguments[parameter.name] = _value(text, where, invoke.name, parameter.name, tools, non_finite, notices)
    _note_nested(body, gap, invoke.body_stop, invoke.name, notices)
    return arguments


def _value(
    text: str, where: str, tool: str, parameter: str, tools: Tools, non_finite: NonFinite, notices: list[Notice]
) -> Any:
    kind = tools.parameter_type(tool, parameter)
    try:
        value = tool_values.convert(text, kind, non_finite)
    except UnreadableValueError as error:
        notices.append(Notice("value kept as text", f"{where} must be {error}, found {_quoted(text)}: kept as text"))
        return text
    if value is False and text.lower() not in ("false", "0") and kind == "boolean":
        notices.append(
            Notice("value read as false", f"{where} must be true, 1, false or 0, found {_quoted(text)}: false")
        )
    return value


def _json_call(body: str, tools: Tools, non_finite: NonFinite, notices: list[Notice]) -> BlockCall | None:
    """A block that is one JSON object. No schema is applied: a string stays a string."""
    try:
        call = tool_values.read_json(body, non_finite)
    except UnreadableValueError:
        call = None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        notices.append(
            Notice("no JSON call", f"the block is neither <invoke …> nor a JSON object with a name: {_quoted(body)}")
        )
        return None
    arguments = call["arguments"] if "arguments" in call else call.get("parameters")
    if arguments and not isinstance(arguments, dict):
        notices.append(Notice("no JSON call", f"{_quoted(name)}: arguments must be an object: dropped"))
        return None
    return BlockCall(name, arguments or {}) if _is_known(name, tools, notices) else None


def _is_known(name: str, tools: Tools, notices: list[Notice]) -> bool:
    if name not in tools:
        notices.append(Notice("unknown tool", f"{_quoted(name)} is not a tool of the request: call dropped"))
    return name in tools


def _note_nested(body: str, start: int, stop: int, outer: str, notices: list[Notice]) -> None:
    if header := tool_scan.find_header(body, INVOKE, start, stop):
        inner = _quoted(body[header.start() : stop])
        notices.append(Notice("nested invoke", f"{_quoted(outer)} holds {inner}: its parameters count as the outer's"))


def _leading_whitespace(text: str, start: int) -> int:
    stop = start
    while stop < len(text) and text[stop].isspace():
        stop += 1
    return stop - start


def _quoted(text: str) -> str:
    """For messages: at most 60 characters, so that notices stay small whatever the model writes."""
    return repr(text if len(text) <= 60 else f"{text[:59]}…")
