"""The tool-call specification's cases 1 to 72 (section 8), as it states them.

Cases 73 to 75, which need a splitter of reasoning or two lists of tools, are in `test_tool_calls`.
"""

from typing import Any

from tool_texts import CLOSE, OPEN, I, P, W

RAW = object()  # compat content: the whole input
BIG = 123456789012345678901234567890


def mk(**arguments: Any) -> list[tuple[str, dict[str, Any]]]:
    return [("mk", arguments)]


PING: list[tuple[str, dict[str, Any]]] = [("ping", {})]
CANONICAL = f'{OPEN}\n<invoke name="search">\n<parameter name="query">\nweather\n</parameter>\n</invoke>\n{CLOSE}'

# number, input, expected calls, content of vLLM's batch parser
CASES: list[tuple[str, str, list[tuple[str, dict[str, Any]]], Any]] = [
    ("1", "hello", [], "hello"),
    ("2", "a < b", [], "a < b"),
    ("3", CANONICAL, [("search", {"query": "weather"})], None),
    ("4", W(I("ping")), PING, None),
    ("5", W("<invoke name = ping ></invoke>"), PING, None),
    (
        "6",
        W("<invoke name='search'><parameter name='query'>x</parameter></invoke>"),
        [("search", {"query": "x"})],
        None,
    ),
    (
        "7",
        f"hi {W(I('search', P('query', 'a')))} mid {W(I('search', P('query', 'b')))} tail",
        [("search", {"query": "a"}), ("search", {"query": "b"})],
        "hi",
    ),
    ("8", W(f"{I('ping')} and {I('search', P('query', 'z'))}"), [*PING, ("search", {"query": "z"})], None),
    ("9", f"A{W(I('ping'))}B", PING, "A"),
    ("10", f"  hi \n{W(I('ping'))}\n", PING, "hi"),
    (
        "11",
        W(f"\r\n{I('search', chr(13) + chr(10) + P('query', chr(13) + chr(10) + 'a' + chr(13) + chr(10)))}\r\n"),
        [("search", {"query": "a"})],
        None,
    ),
    ("12", W(I("search", P("query", "\n  a\n b \n"))), [("search", {"query": "a\n b"})], None),
    ("13", W(I("search", P("query", "a &lt; b > c <d>"))), [("search", {"query": "a &lt; b > c <d>"})], None),
    ("14", W(I("search", P("query", "北京"))), [("search", {"query": "北京"})], None),
    ("15", W(I("search", P("query", f"use {OPEN} tag"))), [("search", {"query": f"use {OPEN} tag"})], None),
    ("16", W(I("search", P("query", "a</parameter>b"))), [("search", {"query": "a"})], None),
    ("17", W(I("open", P("id", "-7"))), [("open", {"id": -7})], None),
    ("17b", W(I("open", P("id", "+7"))), [("open", {"id": 7})], None),
    ("18", W(I("mk", P("i", "1_000"))), mk(i=1000), None),
    ("19", W(I("mk", P("i", "3.0"))), mk(i="3.0"), None),
    ("20", W(I("open", P("id", "0x10"))), [("open", {"id": "0x10"})], None),
    ("21", W(I("open", P("id", str(BIG)))), [("open", {"id": BIG})], None),
    ("22", W(I("mk", P("i", ""))), mk(i=""), None),
    ("23", W(I("mk", P("n", "1e3"))), mk(n=1000), None),
    ("24", W(I("mk", P("n", "2.50"))), mk(n=2.5), None),
    ("25", W(I("mk", P("n", "-0.0"))), mk(n=0), None),
    ("26", W(I("mk", P("n", "nan"))), mk(n="nan"), None),
    ("27", W(I("mk", P("n", "abc"))), mk(n="abc"), None),
    (
        "28",
        "".join(W(I("mk", P("b", text))) for text in ("TRUE", "yes", "1")),
        [*mk(b=True), *mk(b=False), *mk(b=True)],
        None,
    ),
    ("29", W(I("mk", P("b", ""))), mk(b=False), None),
    ("30", W(I("mk", P("s", "NULL"))), mk(s=None), None),
    ("31", W(I("mk", P("s", '{"a":1}'))), mk(s='{"a":1}'), None),
    ("32", W(I("mk", P("o", "{'a':1}"))), mk(o="{'a':1}"), None),
    ("33", W(I("mk", P("o", "[1]"))), mk(o=[1]), None),
    ("34", W(I("mk", P("a", "[1, 2]"))), mk(a=[1, 2]), None),
    ("35", W(I("mk", P("a", '"x"'))), mk(a="x"), None),
    ("36", W(I("mk", P("u", "5"))), mk(u=5), None),
    ("37", W(I("mk", P("is", "abc"))), mk(**{"is": "abc"}), None),
    ("37b", W(I("mk", P("is", "5"))), mk(**{"is": 5}), None),
    ("38", W(I("mk", P("nn", "x"))), mk(nn="x"), None),
    ("39", W(I("mk", P("ou", "[]"))), mk(ou=[]), None),
    ("40", W(I("mk", P("so", '{"a":1}'))), mk(so='{"a":1}'), None),
    ("41", W(I("mk", P("r", '{"k":[]}'))), mk(r={"k": []}), None),
    ("42", W(I("mk", P("all", '{"a":1}'))), mk(all={"a": 1}), None),
    ("43", W(I("mk", P("cyc", '{"a":1}'))), mk(cyc='{"a":1}'), None),
    ("44", W(I("mk", P("d", '{"k":1}'))), mk(d='{"k":1}'), None),
    ("45", W(I("mk", P("e", "1"))), mk(e="1"), None),
    ("46", W(I("mk", P("any", '{"k":1}'))), mk(any='{"k":1}'), None),
    ("47", W(I("mk", P("z", "5"))), mk(z=5), None),
    ("48", W(I("mk", P("qq", "5"))), mk(qq="5"), None),
    ("49", W(I("mk", P("s", "a") + P("s", "b"))), mk(s="b"), None),
    ("50", W('{"name":"open","parameters":{"id":"7"}}'), [("open", {"id": "7"})], None),
    ("51", W('{"name":"open","arguments":{"id":1},"parameters":{"id":2}}'), [("open", {"id": 1})], None),
    ("52", W('{"name":"ping","arguments":null}'), PING, None),
    ("52b", W('{"name":"ping","arguments":[]}'), PING, None),
    ("53", W('{"name":"open","arguments":[1]}'), [], RAW),
    ("54", W('{"name":"open","arguments":"{\\"id\\":7}"}'), [], RAW),
    ("55", W('[{"name":"open","arguments":{}}]'), [], RAW),
    ("56", W('{"name":5}'), [], RAW),
    ("57", W(I("ghost", P("q", "1"))), [], RAW),
    ("58", W(I("ghost", P("q", "1")) + I("ping")), PING, None),
    ("59", W("garbage") + W(I("ping")), PING, None),
    ("60", W(f"note {I('ping')}"), [], RAW),
    ("61", OPEN + W(I("ping")), [], RAW),
    ("62", f"t {OPEN}{I('ping')}", [], RAW),
    ("63", W('<invoke name="ping">'), [], RAW),
    ("64", W(I("search", '<parameter name="query">x')), [("search", {})], None),
    ("65", W('<invoke name="ping" id="1"></invoke>'), [], RAW),
    ("66", W('<invoke name="  ping "></invoke>'), [], RAW),
    ("67", W("<invoke name=\"ping'></invoke>"), [], RAW),
    ("68", W('<INVOKE name="ping"></INVOKE>'), [], RAW),
    ("69", W(f'<invoke name="ping">{I("search", P("query", "x"))}</invoke>'), [("ping", {"query": "x"})], None),
    ("70", W(""), [], RAW),
    ("71", f"x {CLOSE} y", [], RAW),
    ("72", "answer <dots_func", [], RAW),
]
