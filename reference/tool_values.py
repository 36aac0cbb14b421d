"""From the text of a parameter to a JSON value, and from values back to JSON text.

    null (any case)   -> null, whatever the type
    integer           -> Python's integer syntax
    number            -> Python's float syntax; an integer if the value is integral
    boolean           -> text in {true, 1} ignoring case; everything else is false
    json              -> any JSON value
    string            -> the text

What cannot be read as its type stays text. A number that JSON cannot write (NaN, infinities, 1e400) stays text too,
unless `non_finite="number"` asks for what vLLM 0.33 does.
Source: tool-call specification, sections 3.2 and 3.3, and its clarifications.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

from reference.errors import NoteError
from reference.tool_schema import ParameterType

NonFinite = Literal["text", "number"]

# Deeper JSON is refused here, so that Python's recursion limit, which depends on the caller's stack, decides nothing.
MAX_JSON_DEPTH = 256

_STRUCTURE = re.compile(r'\\.|["\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class UnreadableValueError(NoteError):
    """A text is not a value of the type it should have; says what it should be."""


def convert(text: str, kind: ParameterType, non_finite: NonFinite = "text") -> Any:
    """The value of a trimmed text. Raises UnreadableValueError, upon which the caller keeps the text."""
    if text.lower() == "null":
        return None
    if kind == "integer":
        return _integer(text)
    if kind == "number":
        return _number(text, non_finite)
    if kind == "boolean":
        return text.lower() in ("true", "1")
    return read_json(text, non_finite) if kind == "json" else text


def read_json(text: str, non_finite: NonFinite = "text") -> Any:
    """One JSON value, no deeper than MAX_JSON_DEPTH. Raises UnreadableValueError; never RecursionError."""
    if _is_too_deep(text):
        raise UnreadableValueError(f"JSON of at most {MAX_JSON_DEPTH} levels")
    try:
        if non_finite == "number":
            return json.loads(text)
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise UnreadableValueError("a JSON value") from error


def json_text(value: Any) -> str:
    """JSON with ", " and ": ", keys in their order, characters as they are.

    Half of a surrogate pair, which no encoding can write, is escaped.
    """
    text = json.dumps(value, ensure_ascii=False)
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise UnreadableValueError("an integer") from error


def _number(text: str, non_finite: NonFinite) -> float | int:
    try:
        value = float(text) if non_finite == "number" else _finite(text)
    except ValueError as error:
        raise UnreadableValueError("a finite number") from error
    return int(value) if value.is_integer() else value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


def _is_too_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return False
    depth, is_string = 0, False
    for match in _STRUCTURE.finditer(text):
        character = match[0]
        if character == '"':
            is_string = not is_string
        elif not is_string and character in "[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                return True
        elif not is_string and character in "]}":
            depth -= 1
    return False
