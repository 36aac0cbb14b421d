"""The tool-call format as a stream: the result never depends on the cuts, nothing is lost, and work is linear.

The oracle of calls is a second parser, written from the grammar with lazy regular expressions: what vLLM's batch parser
computes. Work is counted in characters that searches look at, not in seconds.
"""

import json
import random
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tool_cases import CASES
from tool_texts import CLOSE, OPEN, PIECES, TOOLS, I, P, W, random_cuts, random_text

from reference import tool_scan, tool_values
from reference.tool_calls import (
    Call,
    Content,
    Event,
    ParsedOutput,
    Progress,
    ReasoningMode,
    ToolCallOptions,
    ToolCallStream,
    gathered,
    parse_output,
)
from reference.tool_schema import ToolError
from reference.tool_values import UnreadableValueError

MODES: tuple[ReasoningMode, ...] = ("none", "tagged", "opened")
FUZZ_SECONDS = 600
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=14).map("".join)


def streamed(chunks: Iterable[str], options: ToolCallOptions | None = None) -> ParsedOutput:
    stream = ToolCallStream(TOOLS, options)
    events = [event for chunk in chunks for event in stream.feed(chunk)]
    return gathered([*events, *stream.finish()])


def feed_all(chunks: Iterable[str]) -> tuple[list[list[Event]], list[Event]]:
    """The events of each chunk, and those of the end."""
    stream = ToolCallStream(TOOLS)
    return [stream.feed(chunk) for chunk in chunks], stream.finish()


def content(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def calls(events: Iterable[Event]) -> list[tuple[int, str, dict[str, Any]]]:
    return [(event.index, event.name, event.arguments) for event in events if isinstance(event, Call)]


# The specification's streaming cases.


def test_s1_an_opening_tag_over_two_chunks() -> None:
    (first, second), end = feed_all(["visible<dots_func", f"tion_call>{I('search', P('query', 'a'))}{CLOSE}"])
    assert (content(first), calls(first)) == ("visible", [])
    assert (content(second), calls(second)) == ("", [(0, "search", {"query": "a"})])
    assert end == []


def test_s2_two_blocks_in_one_chunk() -> None:
    (events,), _ = feed_all([W(I("ping")) + W(I("search", P("query", "a")))])
    assert calls(events) == [(0, "ping", {}), (1, "search", {"query": "a"})]


@pytest.mark.parametrize("text", [pytest.param(case[1], id=case[0]) for case in CASES])
def test_s3_every_character_separately(text: str) -> None:
    assert streamed(text) == parse_output(text, TOOLS)


@pytest.mark.parametrize("text", [f"<think>{W(I('ping'))}</think>ok", f" <think>r</think>\n\n{W(I('ping'))}", "<thi"])
@pytest.mark.parametrize("mode", MODES)
def test_s3_with_reasoning(text: str, mode: ReasoningMode) -> None:
    options = ToolCallOptions(reasoning=mode)
    assert streamed(text, options) == parse_output(text, TOOLS, options)


def test_s4_json_before_the_closing_tag_is_no_call_yet() -> None:
    (first, second), _ = feed_all([f'{OPEN}{{"name":"search","arguments":{{"query":"c"}}}}', CLOSE])
    assert first == []
    assert calls(second) == [(0, "search", {"query": "c"})]


def test_s5_json_with_junk_after_it_is_content() -> None:
    (first, second), _ = feed_all([f'{OPEN}{{"name":"ping"}}', f' {{"a":1}}{CLOSE}'])
    assert first == []
    assert (calls(second), content(second)) == ([], W('{"name":"ping"} {"a":1}'))


def test_s6_a_closing_tag_over_two_chunks() -> None:
    (_, second), _ = feed_all([f"{OPEN}{I('ping')}</dots_", "function_call>"])
    assert calls(second) == [(0, "ping", {})]


@pytest.mark.parametrize("cut", range(len(CLOSE) + 3))
def test_s7_a_closing_tag_alone_is_content(cut: int) -> None:
    text = f"x{CLOSE}y"
    assert streamed([text[:cut], text[cut:]]).content == text


def test_s9_less_than_is_held_for_one_step() -> None:
    (first, second), end = feed_all(["<", "b>bold"])
    assert (content(first), content(second), end) == ("", "<b>bold", [])


def test_s10_an_end_inside_of_a_value() -> None:
    text = f'a{OPEN}<invoke name="search"><parameter name="query">wea'
    (first,), end = feed_all([text])
    assert (content(first), content(end)) == ("a", text[1:])
    assert gathered([*first, *end]).truncated_tool_call


def test_s11_the_call_comes_before_the_end() -> None:
    *_, last = feed_all(W(I("ping")))[0]
    assert calls(last) == [(0, "ping", {})]


def test_a_finished_stream_is_finished() -> None:
    stream = ToolCallStream(TOOLS)
    stream.finish()
    with pytest.raises(ToolError, match="a new output needs a new"):
        stream.feed("x")
    with pytest.raises(ToolError, match="finished already"):
        stream.finish()


# Cases from people who use such parsers.


def test_c58_every_cut_of_a_call_and_nothing_held_without_reason() -> None:
    text = f"before {W(I('search', P('query', 'a<b')))} after"
    whole = parse_output(text, TOOLS)
    assert all(streamed([text[:cut], text[cut:]]) == whole for cut in range(len(text) + 1))
    plain = "no < marker </dots or <dots_function> is here > at all"
    stream = ToolCallStream(TOOLS)
    shown = ""
    for position, character in enumerate(plain, 1):
        shown += content(stream.feed(character))
        held = plain[len(shown) : position]
        assert OPEN.startswith(held)
        assert len(held) < len(OPEN)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64])
def test_c61_any_number_of_characters_at_once(size: int) -> None:
    text = f"a {W(I('mk', P('o', json.dumps({'k': ['v', 1]})) + P('s', 'x' * 50)))} b"
    parsed = streamed(text[at : at + size] for at in range(0, len(text), size))
    assert parsed == parse_output(text, TOOLS)
    assert json.loads(parsed.calls[0].arguments_json) == {"o": {"k": ["v", 1]}, "s": "x" * 50}


def test_c62_a_long_argument_shows_that_it_grows() -> None:
    """The call comes whole, when its block is closed; until then each piece gives a sign of life."""
    value = "x" * 100_000
    stream = ToolCallStream(TOOLS, ToolCallOptions(progress=True))
    head, tail = OPEN + '<invoke name="search"><parameter name="query">', f"</parameter></invoke>{CLOSE}"
    stream.feed(head)
    seen = [event for at in range(0, len(value), 4) for event in stream.feed(value[at : at + 4])]
    assert all(isinstance(event, Progress) for event in seen)
    assert [event.characters for event in seen if isinstance(event, Progress)] == [
        len(head) - len(OPEN) + at for at in range(4, len(value) + 1, 4)
    ]
    assert calls(stream.feed(tail)) == [(0, "search", {"query": value})]


# Properties.


def removed_blocks(text: str, parsed: ParsedOutput) -> str:
    kept, at = "", 0
    for start, stop in sorted({call.block for call in parsed.calls}):
        kept, at = kept + text[at:start], stop
    return kept + text[at:]


def check_output(text: str, chunks: list[str], mode: ReasoningMode) -> None:
    """What holds for every text and every way to cut it."""
    options = ToolCallOptions(reasoning=mode)
    whole = parse_output(text, TOOLS, options)
    assert streamed(chunks, options) == whole
    assert len(whole.calls) <= text.count("<invoke") + text.count(OPEN)
    assert [call.index for call in whole.calls] == list(range(len(whole.calls)))
    for call in whole.calls:
        call.arguments_json.encode()
    if mode == "none":
        assert removed_blocks(text, whole) == whole.content
        assert [(call.name, call.arguments_json) for call in whole.calls] == vllm_calls(text)


@given(texts, st.lists(st.integers(0, 200), max_size=8), st.sampled_from(MODES))
def test_the_cuts_do_not_matter_and_nothing_is_lost(text: str, cuts: list[int], mode: ReasoningMode) -> None:
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    check_output(text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], mode)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read(data: bytes) -> None:
    text = data.decode(errors="replace")
    assert parse_output(text, TOOLS).content == text


@given(texts, texts)
def test_events_of_a_prefix_are_never_taken_back(text: str, more: str) -> None:
    (first, second), end = feed_all([text, more])
    (whole,), whole_end = feed_all([text + more])
    assert content([*whole, *whole_end]).startswith(content(first))
    assert calls([*whole, *whole_end])[: len(calls(first))] == calls(first)
    assert calls([*first, *second, *end]) == calls(whole)


@given(st.lists(st.sampled_from([W(I("ping")), W(I("search", P("query", "<x>")))]) | st.text(), max_size=6))
def test_content_without_markup_has_no_calls(pieces: list[str]) -> None:
    assume(all("<" not in piece or piece.startswith(OPEN) for piece in pieces))
    parsed = parse_output("".join(pieces), TOOLS)
    assert len(parsed.calls) == sum(piece.startswith(OPEN) for piece in pieces)
    assert parse_output(parsed.content, TOOLS).calls == ()


@given(texts.filter(lambda text: CLOSE not in text))
def test_a_malformed_block_leaves_the_others_alone(body: str) -> None:
    parsed = parse_output(f"{W(I('search', P('query', 'a')))}{W(body)}{W(I('open', P('id', '7')))}", TOOLS)
    assert (parsed.calls[0].name, parsed.calls[0].arguments) == ("search", {"query": "a"})
    assert (parsed.calls[-1].name, parsed.calls[-1].arguments) == ("open", {"id": 7})


# An independent parser of calls: the grammar as lazy regular expressions.

_BLOCK = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)
_INVOKE = re.compile(r"<invoke\s+name\s*=\s*([^>]+)>(.*?)</invoke>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter\s+name\s*=\s*([^>]+)>(.*?)</parameter>", re.DOTALL)


def vllm_calls(text: str) -> list[tuple[str, str]]:
    """Names and arguments text, up to the documented deviation: numbers that are not finite stay text."""
    found: list[tuple[str, Any]] = []
    for body in (match.strip() for match in _BLOCK.findall(text)):
        if not body.startswith("<invoke"):
            found += json_call(body)
            continue
        for name, inner in _INVOKE.findall(body):
            arguments = {}
            for key, value in _PARAMETER.findall(inner):
                arguments[bare(key)] = converted(bare(name), bare(key), value.strip())
            found.append((bare(name), arguments))
    return [(name, json_text(arguments)) for name, arguments in found if name in TOOLS]


def json_call(body: str) -> list[tuple[str, Any]]:
    try:
        call = json.loads(body)
    except ValueError:
        return []
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return []
    arguments = call.get("arguments", call.get("parameters")) or {}
    return [(call["name"], arguments)] if isinstance(arguments, dict) else []


def bare(name: str) -> str:
    name = name.strip()
    return name[1:-1] if re.fullmatch(r"""(["']).*\1""", name, re.DOTALL) and len(name) > 1 else name


def converted(tool: str, key: str, value: str) -> Any:
    if value.lower() == "null":
        return None
    kind = TOOLS.parameter_type(tool, key) if tool in TOOLS else "string"
    readers: dict[str, Callable[[str], Any]] = {
        "integer": int,
        "number": lambda text: int(float(text)) if float(text).is_integer() else float(text),
        "boolean": lambda text: text.lower() in ("true", "1"),
        "json": json.loads,
        "string": str,
    }
    try:
        read = readers[kind](value)
    except ValueError:
        return value
    return value if re.search(r"\b(NaN|-?Infinity)\b", json.dumps(read)) else read


def json_text(value: Any) -> str:
    return "".join(
        f"\\u{ord(character):04x}" if "\ud800" <= character <= "\udfff" else character
        for character in json.dumps(value, ensure_ascii=False)
    )


# Work: characters looked at.


class Meter:
    """Counts the characters that every search and every conversion looks at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.characters = 0
        find, find_header, convert, read_json = (
            tool_scan.find, tool_scan.find_header, tool_values.convert, tool_values.read_json,
        )  # fmt: skip

        def counted_find(text: str, part: str, start: int, stop: int) -> int:
            found = find(text, part, start, stop)
            self.characters += (stop if found < 0 else found + len(part)) - start
            return found

        def counted_header(text: str, tag: tool_scan.Tag, start: int, stop: int) -> re.Match[str] | None:
            found = find_header(text, tag, start, stop)
            self.characters += (found.end() if found else stop) - start
            return found

        def counted_convert(text: str, *rest: Any) -> Any:
            self.characters += len(text)
            return convert(text, *rest)

        def counted_json(text: str, *rest: Any) -> Any:
            self.characters += len(text)
            return read_json(text, *rest)

        monkeypatch.setattr(tool_scan, "find", counted_find)
        monkeypatch.setattr(tool_scan, "find_header", counted_header)
        monkeypatch.setattr(tool_values, "convert", counted_convert)
        monkeypatch.setattr(tool_values, "read_json", counted_json)


HOSTILE = {
    "text": "a",
    "less than": "<",
    "almost open": "<dots_function_cal",
    "opening tags": OPEN,
    "closing tags": CLOSE,
    "empty blocks": W(""),
    "calls": W(I("search", P("query", "x"))),
    "invokes never closed": "<invoke name=ping>",
    "names never closed": "<invoke name=ping",
    "names of nothing": "<invoke name=>",
    "parameters never closed": "<parameter name=s>",
    "values": P("i", "x"),
    "spaces in tags": "<invoke" + " " * 40,
    "nested": "<invoke name=ping><parameter name=s>",
    "brackets": "[",
    "quotes": '"\\',
    "think": "<think>",
}
# Searches of one character: for the block's end, invokes, their ends, parameters, their ends, ">", nested tags, JSON.
LOOKS = 12


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("prefix", ["", OPEN, f"{OPEN}<invoke name=mk>", f"{OPEN}<invoke name=mk><parameter name=o>"])
@pytest.mark.parametrize("suffix", ["", CLOSE, f"</parameter></invoke>{CLOSE}"])
def test_work_is_linear(monkeypatch: pytest.MonkeyPatch, unit: str, prefix: str, suffix: str) -> None:
    meter = Meter(monkeypatch)
    spent = []
    for length in (8_000, 32_000):
        text = prefix + unit * (length // len(unit)) + suffix
        meter.characters = 0
        parse_output(text, TOOLS)
        assert meter.characters <= LOOKS * len(text)
        spent.append(meter.characters / len(text))
    assert spent[1] <= 1.05 * spent[0] + 0.05


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE.keys())
def test_one_character_at_a_time_looks_again_at_no_more_than_a_tag(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    meter = Meter(monkeypatch)
    text = OPEN + unit * (8_000 // len(unit))
    streamed(text)
    assert meter.characters <= (len(CLOSE) + LOOKS) * len(text)


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE.keys())
def test_notices_stay_small(unit: str) -> None:
    parsed = parse_output(OPEN + unit * 1000 + CLOSE, TOOLS)
    assert all(len(notice.message) < 300 for notice in parsed.notices)


@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_memory_is_bounded_whatever_is_never_closed(cut: int) -> None:
    """A block past the limit becomes content; a closed one within it is a call, to the character."""
    value, frame = "x" * 1000, len(I("search", P("query", "")))
    text = f"a{W(I('search', P('query', value)))}b{W(I('ping'))}"
    chunks = [text[at : at + cut] for at in range(0, len(text), cut)]
    fits = streamed(chunks, ToolCallOptions(max_block=frame + 1000))
    assert [call.name for call in fits.calls] == ["search", "ping"]
    long = streamed(chunks, ToolCallOptions(max_block=frame + 999))
    assert [call.name for call in long.calls] == ["ping"]
    assert long.content == text[: -len(W(I("ping")))]
    assert [notice.kind for notice in long.notices] == ["block too long"]
    unclosed = streamed([OPEN, value, "<", "/dots_func"], ToolCallOptions(max_block=10))
    assert unclosed.content == f"{OPEN}{value}</dots_func"
    assert unclosed.truncated_tool_call


def test_deep_json_is_refused_without_recursion() -> None:
    with pytest.raises(UnreadableValueError, match="256 levels"):
        tool_values.read_json("[" * 1_000_000)


@pytest.mark.slow
@pytest.mark.timeout(2 * FUZZ_SECONDS)
@pytest.mark.parametrize("seed", [0])
def test_fuzz(seed: int) -> None:
    """Ten minutes of texts made of markup: `pytest -m slow`. A failure names the text."""
    source = random.Random(seed)
    end = time.monotonic() + FUZZ_SECONDS
    count = 0
    while time.monotonic() < end:
        text = random_text(source, 40)
        check_output(text, random_cuts(source, text), source.choice(MODES))
        count += 1
    assert count > 1000
