"""How the markup of a tool call is searched: shortest matches, in time linear in the text.

    element = "<" TAG ws1 "name" ws0 "=" name ">" body "</" TAG ">"

`name` is one or more characters other than ">", `body` the shortest span up to the closing tag. A regular expression
with lazy groups says the same, and rescans the rest of the text for every opening tag whose closing tag is missing.
Here an opening tag without its closing tag ends the search: no later one can have it either.
Source: tool-call specification, sections 1 and 5.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

OPEN = "<dots_function_call>"
CLOSE = "</dots_function_call>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True)
class Tag:
    """An element's name, how it begins (possessive, so without backtracking) and how it ends."""

    name: str
    header: re.Pattern[str]
    close: str


def _tag(name: str) -> Tag:
    return Tag(name, re.compile(rf"<{name}\s++name\s*+="), f"</{name}>")


INVOKE = _tag("invoke")
PARAMETER = _tag("parameter")


@dataclass(frozen=True)
class Element:
    """One match in a text: 0-based character offsets. `stop` is None where the closing tag is missing."""

    name: str
    start: int
    body: int
    body_stop: int
    stop: int | None


def find(text: str, part: str, start: int, stop: int) -> int:
    """Where `part` first begins and ends within [start, stop); -1 if nowhere. Looks at no character after its end."""
    return text.find(part, start, stop)


def find_header(text: str, tag: Tag, start: int, stop: int) -> re.Match[str] | None:
    """The first `<TAG name=` within [start, stop)."""
    return tag.header.search(text, start, stop)


def elements(text: str, tag: Tag, start: int, stop: int) -> Iterator[Element]:
    """The elements in [start, stop), in order; the last one may lack its closing tag.

    What stands between them is skipped, and so is an opening tag without a name (`<invoke name=>`).
    """
    while header := find_header(text, tag, start, stop):
        end_of_name = find(text, ">", header.end(), stop)
        if end_of_name < 0:
            return
        start = end_of_name + 1
        if end_of_name == header.end():
            continue
        name = unquoted(text[header.end() : end_of_name])
        close = find(text, tag.close, start, stop)
        if close < 0:
            yield Element(name, header.start(), start, stop, None)
            return
        yield Element(name, header.start(), start, close, close + len(tag.close))
        start = close + len(tag.close)


def unquoted(name: str) -> str:
    """Trim; then drop one pair of equal quotes around it. Nothing is trimmed inside quotes."""
    name = name.strip()
    return name[1:-1] if len(name) >= 2 and name[0] == name[-1] and name[0] in "\"'" else name


def held_back(text: str, tag: str, start: int) -> int:
    """How many characters at the end of text[start:] may be the beginning of `tag`.

    "<" stands only at the start of a tag, so the longest such suffix begins at the last one.
    """
    last = text.rfind("<", max(start, len(text) - len(tag) + 1))
    return len(text) - last if last >= 0 and tag.startswith(text[last:]) else 0
