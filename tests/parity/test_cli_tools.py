"""`note-parity parse-tools`: what it prints, events as JSON lines, and what it refuses."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from parity.cli_tools import READ_SIZE, parse_tools
from reference.tool_schema import NoToolCallError, ToolError

TOOLS = [{"function": {"name": "open", "parameters": {"properties": {"id": {"type": "integer"}}}}}]
BLOCK = '<dots_function_call><invoke name="open"><parameter name="id">7</parameter></invoke></dots_function_call>'
OUTPUT = f"<think>r</think>\r\nhé {BLOCK}\n<dots_function_call>x</dots_function_call>"
# The command alone, so that its errors arrive as they are raised.
app = typer.Typer()
app.command()(parse_tools)


@pytest.fixture
def tools(tmp_path: Path) -> str:
    (tmp_path / "tools.json").write_text(json.dumps({"tools": TOOLS}))
    return str(tmp_path / "tools.json")


def run(*arguments: str, text: str | bytes = OUTPUT) -> str:
    result = CliRunner().invoke(app, [*arguments], input=text)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_content_reasoning_calls_and_notices_are_printed(tools: str, tmp_path: Path) -> None:
    (tmp_path / "output.txt").write_bytes(OUTPUT.encode())
    shown = run(str(tmp_path / "output.txt"), "--tools", tools)
    assert shown.splitlines() == [
        "1 calls, 48 characters of content, 1 of reasoning, 1 notices",
        'call 0: "open" {"id": 7}',
        "no JSON call: the block is neither <invoke …> nor a JSON object with a name: 'x'",
        'reasoning: "r"',
        'content: "\\r\\nhé \\n<dots_function_call>x</dots_function_call>"',
    ]
    assert run("--tools", tools) == shown


def test_events_are_json_lines(tools: str) -> None:
    events = [json.loads(line) for line in run("--tools", tools, "--events").splitlines()]
    assert [event["event"] for event in events] == ["reasoning", "content", "call", "content", "content", "notice"]
    assert events[2] | {"id": ""} == {
        "event": "call", "index": 0, "id": "", "name": "open", "arguments": '{"id": 7}', "block": [21, 21 + len(BLOCK)],
    }  # fmt: skip
    assert events[2]["id"]


def test_a_long_text_is_read_piece_by_piece(tools: str) -> None:
    """A character of three bytes lies over each border of what is read at once."""
    text = "北" * READ_SIZE + BLOCK
    events = [json.loads(line) for line in run("--tools", tools, "--events", text=text).splitlines()]
    assert "".join(event["text"] for event in events[:-1]) == "北" * READ_SIZE
    assert events[-1]["name"] == "open"
    unfinished = "<dots_function_call>" + "x" * (2 * READ_SIZE)
    lines = run("--tools", tools, "--events", "--progress", text=unfinished).splitlines()
    assert sum(json.loads(line)["event"] == "progress" for line in lines) >= 2


def test_options_reach_the_parser(tools: str) -> None:
    assert run("--tools", tools, "--reasoning", "opened", text="r</think>x").startswith(
        "0 calls, 1 characters of content, 1 of"
    )
    assert run("--tools", tools, "--lenient", text=f"<dots_function_call>{BLOCK}").startswith("1 calls")
    body = '<dots_function_call>{"name": "open", "arguments": {"id": NaN}}</dots_function_call>'
    assert run("--tools", tools, text=body).startswith("0 calls")
    assert run("--tools", tools, "--non-finite", text=body).startswith("1 calls")


def test_half_a_surrogate_pair_can_be_printed(tools: str) -> None:
    body = r'<dots_function_call>{"name": "open", "arguments": {"id": "\ud83d"}}</dots_function_call>'
    assert r'call 0: "open" {"id": "\ud83d"}' in run("--tools", tools, text=body)


def test_what_cannot_be_read_is_named(tools: str, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="is not UTF-8: invalid start byte after byte 0"):
        run("--tools", tools, text=b"ab\xff")
    with pytest.raises(ToolError, match="is not UTF-8"):
        run("--tools", tools, text="é".encode()[:1])
    with pytest.raises(ToolError, match=r"absent\.txt: cannot be read"):
        run(str(tmp_path / "absent.txt"), "--tools", tools)
    with pytest.raises(ToolError, match=r"absent\.json: cannot be read"):
        run("--tools", str(tmp_path / "absent.json"))
    with pytest.raises(ToolError, match="--reasoning must be one of none, tagged, opened, found yes"):
        run("--tools", tools, "--reasoning", "yes")


def test_a_required_call_that_is_absent_is_an_error(tools: str) -> None:
    assert run("--tools", tools, "--required").startswith("1 calls")
    with pytest.raises(NoToolCallError, match="no block"):
        run("--tools", tools, "--required", text="text")
