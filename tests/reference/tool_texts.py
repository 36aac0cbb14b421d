"""Texts in the notation of the tool-call specification, its tools, and texts that hurt.

W(b) is a block, I(n, b) an invoke, P(k, v) a parameter; no spaces are added.
"""

import random

from reference.tool_scan import CLOSE, OPEN
from reference.tool_schema import Tools

_PROPERTIES = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "a": {"type": "array"},
    "u": {"type": ["null", "integer"]},
    "is": {"type": ["integer", "string"]},
    "nn": {"type": ["null"]},
    "ou": {"anyOf": [{"type": "null"}, {"type": "array"}]},
    "so": {"anyOf": [{"type": "string"}, {"type": "object"}]},
    "r": {"$ref": "#/$defs/P"},
    "all": {"allOf": [{"$ref": "#/$defs/P"}]},
    "cyc": {"$ref": "#/$defs/C"},
    "e": {"enum": ["x", "1"]},
    "d": {"$ref": "#/definitions/P"},
    "z": {"type": "null"},
    "any": {},
}


def _tool(name: str, properties: object) -> dict[str, object]:
    definitions = {"P": {"type": "object"}, "C": {"$ref": "#/$defs/C"}}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOL_LIST = [
    _tool("search", {"query": {"type": "string"}}),
    _tool("open", {"id": {"type": "integer"}}),
    {"type": "function", "function": {"name": "ping"}},
    _tool("mk", _PROPERTIES),
]
TOOLS = Tools(TOOL_LIST)


def W(body: str) -> str:
    return f"{OPEN}{body}{CLOSE}"


def I(name: str, body: str = "") -> str:  # noqa: E743
    return f'<invoke name="{name}">{body}</invoke>'


def P(name: str, value: str) -> str:
    return f'<parameter name="{name}">{value}</parameter>'


# What the generators below put together: markup, near misses of it, and text.
PIECES = (
    OPEN, CLOSE, "<invoke name=ping>", '<invoke name="search">', "<invoke name='mk'>", "<invoke name=>", "</invoke>",
    '<parameter name="query">', "<parameter name=s>", "<parameter name = i >", "<parameter name=>", "</parameter>",
    W(I("ping")), W(I("search", P("query", "q"))), W(I("mk", P("n", "1e400") + P("b", "no"))), W(I("ghost")),
    W('{"name": "open", "arguments": {"id": 7}}'), W('{"name": "open", "arguments": [7]}'), '{"name": "ping"}',
    "<dots_function_cal", "<dots_function_call", "</dots_function_call", "<invoke", "<invoke name", "<parameter", "</",
    "<", ">", "<<", "=", '"', "'", "{", "}", "[", "]", "\\", "null", "7", "3.0", "true", " ", "\n", "\r\n", "\u2003",
    "text", "é", "北京", "😀", "\ufffd", "\ud800", "\x00", "<think>", "</think>", "<dots_function_response>",
)  # fmt: skip


def random_text(source: random.Random, pieces: int = 12) -> str:
    return "".join(source.choice(PIECES) for _ in range(source.randrange(pieces)))


def random_cuts(source: random.Random, text: str) -> list[str]:
    """The text in pieces, some of them empty."""
    cuts = sorted(source.randrange(len(text) + 1) for _ in range(source.randrange(8)))
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
