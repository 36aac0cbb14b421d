"""The tool-call format, one output at a time: the specification's 75 cases, schemas, values, notices, hostile input.

Expected results are the specification's (section 8), not what the parser was seen to give.
"""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_cases import CANONICAL, CASES, RAW
from tool_texts import CLOSE, OPEN, TOOLS, I, P, W

from reference.prompt_render import call_markup
from reference.tool_calls import ToolCallOptions, parse_output, vllm_content
from reference.tool_schema import NoToolCallError, ToolError, Tools, tools_of_request
from reference.tool_values import MAX_JSON_DEPTH


@pytest.mark.parametrize(("text", "calls", "content"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_case(text: str, calls: list[tuple[str, dict[str, Any]]], content: Any) -> None:
    parsed = parse_output(text, TOOLS)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    # 5 and 5.0, true and 1 are different JSON.
    assert [call.arguments_json for call in parsed.calls] == [json.dumps(a, ensure_ascii=False) for _, a in calls]
    assert vllm_content(text, parsed.calls) == (text if content is RAW else content)
    assert parsed.finish_reason == ("tool_calls" if calls else "stop")
    assert [call.index for call in parsed.calls] == list(range(len(calls)))
    if not calls:
        assert parsed.content == text


def test_case_26_as_vllm_reads_it() -> None:
    options = ToolCallOptions(non_finite="number")
    assert math.isnan(parse_output(W(I("mk", P("n", "nan"))), TOOLS, options).calls[0].arguments["n"])
    assert parse_output(W(I("mk", P("o", "[Infinity]"))), TOOLS, options).calls[0].arguments == {"o": [math.inf]}
    assert parse_output(W(I("mk", P("o", "[Infinity, 1e400]"))), TOOLS).calls[0].arguments == {"o": "[Infinity, 1e400]"}
    body = W('{"name":"open","arguments":{"id":NaN}}')
    assert len(parse_output(body, TOOLS, options).calls) == 1
    assert parse_output(body, TOOLS).content == body


def test_case_59_and_61_keep_what_engines_drop() -> None:
    assert parse_output(W("garbage") + W(I("ping")), TOOLS).content == W("garbage")
    doubled = OPEN + W(I("ping"))
    assert parse_output(doubled, TOOLS).content == doubled
    lenient = parse_output(f"{OPEN} \n{doubled}", TOOLS, ToolCallOptions(lenient=True))
    assert [call.name for call in lenient.calls] == ["ping"]


def test_case_62_says_that_the_call_is_cut() -> None:
    parsed = parse_output(f"t {OPEN}{I('ping')}", TOOLS)
    assert parsed.truncated_tool_call
    assert parsed.content == f"t {OPEN}{I('ping')}"


@pytest.mark.parametrize(
    ("text", "mode", "reasoning", "content", "names"),
    [
        pytest.param(f"<think>{W(I('ping'))}</think>ok", "tagged", W(I("ping")), "ok", [], id="73"),
        pytest.param(f"<think>r</think>\n\n{W(I('ping'))}", "tagged", "r", "\n\n", ["ping"], id="74"),
        ("\n<think>\nr\n</think>x</think><think>", "tagged", "\nr\n", "\nx</think><think>", []),
        ("answer</think>more", "tagged", "", "answer</think>more", []),
        ("a<think>b</think>", "tagged", "", "a<think>b</think>", []),
        ("<think>a</think>b", "none", "", "<think>a</think>b", []),
        ("r</think>x", "opened", "r", "x", []),
        (" <think>r</think>x", "opened", " r", "x", []),
        (f"<think>{W(I('ping'))}", "tagged", W(I("ping")), "", []),
        ("<thi", "tagged", "", "<thi", []),
        ("<thi", "opened", "<thi", "", []),
        ("", "opened", "", "", []),
    ],
)
def test_reasoning_is_split_off_first(text: str, mode: Any, reasoning: str, content: str, names: list[str]) -> None:
    parsed = parse_output(text, TOOLS, ToolCallOptions(reasoning=mode))
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert [call.name for call in parsed.calls] == names
    begins = mode == "opened" or (mode == "tagged" and text.lstrip().startswith("<think>"))
    assert parsed.truncated_reasoning == (begins and "</think>" not in text)


def test_case_75_whose_tools_count() -> None:
    ping = [{"type": "function", "name": "ping"}]
    text = W(I("ping"))
    assert len(parse_output(text, tools_of_request(None, ping, fall_back=True)).calls) == 1
    assert parse_output(text, tools_of_request(None, ping)).calls == ()
    assert parse_output(text, tools_of_request([{"function": {"name": "other"}}], ping, fall_back=True)).calls == ()
    assert len(parse_output(text, tools_of_request(ping)).calls) == 1


def test_arguments_text_has_no_escapes_and_python_separators() -> None:
    text = W(I("mk", P("s", '北京 "é"\n😀') + P("a", '[1,{"k":null}]')))
    assert parse_output(text, TOOLS).calls[0].arguments_json == '{"s": "北京 \\"é\\"\\n😀", "a": [1, {"k": null}]}'


def test_half_a_surrogate_pair_stays_encodable() -> None:
    call = parse_output(W(I("mk", P("o", r'{"k": "a\ud83d"}'))), TOOLS).calls[0]
    assert call.arguments_json.encode() == rb'{"o": {"k": "a\ud83d"}}'
    assert json.loads(call.arguments_json) == call.arguments


def test_c59_values_are_read_by_their_schema_and_what_does_not_fit_is_named() -> None:
    """Strings come back as text: never numbers or booleans. The format itself trims them (specification, 3.4)."""
    for text in ("true", "007", "a < b && c", "x\n\ny", '"quoted"', "&lt;b&gt;"):
        assert parse_output(W(I("search", P("query", text))), TOOLS).calls[0].arguments == {"query": text}
    assert parse_output(W(I("search", P("query", "  x\n"))), TOOLS).calls[0].arguments == {"query": "x"}
    parsed = parse_output(W(I("open", P("id", "seven"))) + W(I("mk", P("b", "yes"))) + W(I("ping")), TOOLS)
    assert [call.name for call in parsed.calls] == ["open", "mk", "ping"]
    assert [notice.kind for notice in parsed.notices] == ["value kept as text", "value read as false"]
    assert parsed.notices[0].message == "'open': 'id' must be an integer, found 'seven': kept as text"


def test_c60_calls_keep_their_order_and_their_own_values() -> None:
    block = W(I("search", P("query", "a")) + I("search", P("query", "b")))
    in_json = W('{"name": "search", "arguments": {"query": "c"}}')
    parsed = parse_output(f"{block}-{W(I('ping'))}-{in_json}", TOOLS)
    assert [(call.index, call.arguments) for call in parsed.calls] == [
        (0, {"query": "a"}),
        (1, {"query": "b"}),
        (2, {}),
        (3, {"query": "c"}),
    ]
    assert parsed.content == "--"
    assert len({call.id for call in parsed.calls}) == 4


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (W(I("ghost") + I("ping")), "unknown tool"),
        (W("<invoke=ping></invoke>"), "no call"),
        (W("<tool_call></tool_call>"), "no JSON call"),
        (W('<invoke name="ping">'), "unclosed invoke"),
        (W(I("search", '<parameter name="query">x')), "unclosed parameter"),
        (W(f'<invoke name="ping">{I("search", P("query", "x"))}</invoke>'), "nested invoke"),
        (W(I("mk", P("s", "a") + P("s", "b"))), "repeated parameter"),
        (OPEN + W(I("ping")), "repeated opening tag"),
        (OPEN + I("ping"), "unclosed block"),
    ],
)
def test_what_is_malformed_is_named(text: str, kind: str) -> None:
    assert parse_output(text, TOOLS).notices[0].kind == kind


def test_parameters_count_only_where_there_are_no_arguments() -> None:
    text = W('{"name": "open", "arguments": null, "parameters": {"id": 1}}')
    assert parse_output(text, TOOLS).calls[0].arguments == {}


def test_every_tag_is_case_sensitive() -> None:
    call = I("search", P("query", "x"))
    for written in ("invoke name", "parameter name", "</parameter>", "</invoke>"):
        text = W(I("ping") + call.replace(written, written.upper().replace("NAME", "name")))
        assert [c.arguments for c in parse_output(text, TOOLS).calls if c.name == "search" and c.arguments] == []
    for tag in (OPEN, CLOSE):
        text = W(call).replace(tag, tag.upper())
        assert parse_output(text, TOOLS).content == text


def test_a_well_formed_output_has_no_notice() -> None:
    assert parse_output(f"a{CANONICAL}b{W(I('mk', P('b', 'false') + P('s', '<invoke name=x>')))}", TOOLS).notices == ()


def test_a_required_call_that_is_absent_is_an_error() -> None:
    assert parse_output(W(I("ping")), TOOLS).required_calls()[0].name == "ping"
    with pytest.raises(NoToolCallError, match="'ghost' is not a tool of the request"):
        parse_output(W(I("ghost")), TOOLS).required_calls()
    with pytest.raises(NoToolCallError, match="no block"):
        parse_output("text", TOOLS).required_calls()


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "STR"}, "string"),
        ({"type": "Int"}, "integer"),
        ({"type": "FLOAT"}, "number"),
        ({"type": "bool"}, "boolean"),
        ({"type": "whatever"}, "json"),
        ({"type": ""}, "string"),
        ({"type": []}, "string"),
        ({"type": 5}, "string"),
        ({"type": ["null", "null"]}, "string"),
        ({"type": ["null", "boolean", "string"]}, "boolean"),
        ({"type": "integer", "anyOf": [{"type": "string"}]}, "integer"),
        ({"anyOf": [{"type": ""}, {"type": "integer"}]}, "string"),
        ({"anyOf": [{"type": None}, {"type": "integer"}]}, "integer"),
        ({"anyOf": [{"type": "null"}], "oneOf": [{"type": "integer"}]}, "integer"),
        ({"anyOf": "x", "allOf": [5, {"enum": [1]}, {"type": "number"}]}, "number"),
        ({"anyOf": [{"type": ["null", "integer"]}]}, "integer"),
        ({"$ref": "#/$defs/deep/N"}, "number"),
        ({"$ref": "#/$defs/absent"}, "string"),
        ({"$ref": "other.json#/$defs/N", "anyOf": [{"type": "integer"}]}, "integer"),
        ({"$ref": 5}, "string"),
        (True, "string"),
        (None, "string"),
    ],
)
def test_effective_type(schema: Any, kind: str) -> None:
    parameters = {"properties": {"p": schema}, "$defs": {"N": {"type": "number"}}}
    assert Tools([{"name": "t", "parameters": parameters}]).parameter_type("t", "p") == kind


def chain(length: int) -> Tools:
    """A parameter whose type stands behind so many references."""
    definitions: dict[str, Any] = {f"L{n}": {"$ref": f"#/$defs/L{n + 1}"} for n in range(length)}
    definitions[f"L{length}"] = {"type": "integer"}
    return Tools([{"name": "t", "parameters": {"properties": {"p": definitions["L0"]}, "$defs": definitions}}])


def test_references_are_followed_ten_deep() -> None:
    assert chain(10).parameter_type("t", "p") == "integer"
    assert chain(11).parameter_type("t", "p") == "string"


def test_a_schema_of_cycles_and_alternatives_is_no_work() -> None:
    """Plain recursion would visit 50^10 alternatives."""
    cyclic = {"anyOf": [{"$ref": "#/$defs/A"}] * 25 + [{"oneOf": [{"$ref": "#/$defs/A"}]}] * 25}
    tools = Tools([{"name": "t", "parameters": {"properties": {"p": cyclic}, "$defs": {"A": cyclic}}}])
    assert parse_output(W(I("t", P("p", "5"))), tools).calls[0].arguments == {"p": "5"}


@pytest.mark.parametrize("parameters", [None, 5, "x", [], {"properties": []}, {"properties": None, "$defs": 3}])
def test_schemas_that_are_none_make_strings(parameters: Any) -> None:
    tools = Tools([{"name": "t", "parameters": parameters}])
    assert parse_output(W(I("t", P("p", "5"))), tools).calls[0].arguments == {"p": "5"}


def test_of_two_tools_with_one_name_the_first_counts() -> None:
    typed = {"properties": {"p": {"type": "integer"}}}
    tools = Tools([{"name": "t", "parameters": typed}, {"name": "t"}])
    assert parse_output(W(I("t", P("p", "5"))), tools).calls[0].arguments == {"p": 5}


@pytest.mark.parametrize("tools", [{"name": "t"}, "t", 5, [5], [{}], [{"name": 5}], [{"function": None}], [None]])
def test_tools_that_are_no_tools_are_refused(tools: Any) -> None:
    with pytest.raises(ToolError, match=r"tools(\[0\])? must be"):
        Tools(tools)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[", "not valid JSON"), ("5", "must hold a list"), ("[5]", r"tools\[0\]"), ("[" * 100_000, "not valid JSON")],
)
def test_tool_files_that_are_none_are_refused(tmp_path: Any, text: str, message: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(text)
    with pytest.raises(ToolError, match=message):
        Tools.from_json(path)
    with pytest.raises(ToolError, match="cannot be read"):
        Tools.from_json(tmp_path / "absent.json")


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH, MAX_JSON_DEPTH + 1, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"k":'])
def test_nested_json_is_read_to_a_stated_depth(opening: str, depth: int) -> None:
    text = opening * depth + ("0" if opening != "[" else "") + ("]" if opening == "[" else "}") * depth
    value = parse_output(W(I("mk", P("o", text))), TOOLS).calls[0].arguments["o"]
    assert isinstance(value, list | dict) if depth <= MAX_JSON_DEPTH else value == text
    whole = parse_output(W(f'{{"name": "ping", "arguments": {{"k": {text}}}}}'), TOOLS)
    assert len(whole.calls) == (depth + 2 <= MAX_JSON_DEPTH)


def test_depth_is_not_the_number_of_brackets() -> None:
    wide = json.dumps([[[]] * MAX_JSON_DEPTH, json.loads("[" * (MAX_JSON_DEPTH - 1) + "]" * (MAX_JSON_DEPTH - 1))])
    assert isinstance(parse_output(W(I("mk", P("o", wide))), TOOLS).calls[0].arguments["o"], list)
    assert parse_output(W(I("mk", P("o", f"[{wide}]"))), TOOLS).calls[0].arguments == {"o": f"[{wide}]"}


def test_brackets_inside_of_strings_are_no_depth() -> None:
    for value in ('[[[["\\' * 300, "{" * 1000):
        text = json.dumps({"k": value})
        assert parse_output(W(I("mk", P("o", text))), TOOLS).calls[0].arguments == {"o": {"k": value}}


@pytest.mark.parametrize("text", ["1" * 5000, "9" * 4301, "[" + "1" * 5000 + "]", "\ud800", "\x00", "٣"])
@pytest.mark.parametrize("name", ["i", "n", "o", "b", "s"])
def test_values_that_hurt_never_raise(name: str, text: str) -> None:
    arguments = parse_output(W(I("mk", P(name, text))), TOOLS).calls[0].arguments
    assert set(arguments) == {name}
    json.loads(parse_output(W(I("mk", P(name, text))), TOOLS).calls[0].arguments_json)
    if text == "٣" and name in "in":
        assert arguments == {name: 3}


# Values that a string parameter can carry (section 3.4 lists those it can't).
carried_strings = st.text(max_size=20).map(str.strip).filter(lambda text: text.lower() != "null" and "</" not in text)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | carried_strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(carried_strings, inner, max_size=3),
    max_leaves=6,
)
TYPED: dict[str, st.SearchStrategy[Any]] = {
    "string": carried_strings | st.none(),
    "integer": st.integers() | st.none(),
    "boolean": st.booleans() | st.none(),
    "object": st.dictionaries(carried_strings, json_values, max_size=3),
    "array": st.lists(json_values, max_size=3),
}
names = st.text(st.characters(exclude_characters="<>\"'", exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def typed_calls(draw: st.DrawFn) -> tuple[Tools, str, dict[str, Any]]:
    types = draw(st.dictionaries(names, st.sampled_from(sorted(TYPED)), max_size=4))
    name = draw(names)
    tool = {"name": name, "parameters": {"properties": {key: {"type": kind} for key, kind in types.items()}}}
    return Tools([tool]), name, {key: draw(TYPED[kind]) for key, kind in types.items()}


@given(typed_calls())
def test_what_the_prompt_writes_is_read_back(drawn: tuple[Tools, str, dict[str, Any]]) -> None:
    tools, name, arguments = drawn
    text = call_markup(name, arguments)
    parsed = parse_output(text, tools)
    assert [(call.name, call.arguments_json) for call in parsed.calls] == [
        (name, json.dumps(arguments, ensure_ascii=False))
    ]
    assert parsed.content == "\n"


@given(typed_calls(), st.randoms(use_true_random=False))
def test_the_order_of_properties_does_not_matter(
    drawn: tuple[Tools, str, dict[str, Any]], order: random.Random
) -> None:
    _, name, arguments = drawn
    kinds = [(key, {"type": "integer" if isinstance(value, int) else "string"}) for key, value in arguments.items()]
    text = call_markup(name, arguments)
    first = parse_output(text, Tools([{"name": name, "parameters": {"properties": dict(kinds)}}]))
    order.shuffle(kinds)
    second = parse_output(text, Tools([{"name": name, "parameters": {"properties": dict(kinds)}}]))
    assert first == second


def test_the_order_of_alternatives_matters() -> None:
    for kinds, value in ((["integer", "string"], 5), (["string", "integer"], "5")):
        schema = {"anyOf": [{"type": kind} for kind in kinds]}
        tools = Tools([{"name": "t", "parameters": {"properties": {"p": schema}}}])
        assert parse_output(W(I("t", P("p", "5"))), tools).calls[0].arguments == {"p": value}
