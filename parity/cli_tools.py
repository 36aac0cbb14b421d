"""The subcommand `parse-tools`: the text a model wrote, into reasoning, content and calls. See `cli`."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from reference.tool_calls import Event, ParsedOutput, ReasoningMode

REASONING_MODES = ("none", "tagged", "opened")
# Bytes read at once: events of a pipe come as its pieces do.
READ_SIZE = 65_536


def parse_tools(
    tools: Annotated[
        Path, typer.Option(metavar="FILE", help="The tools: a JSON list, or a request with one under `tools`.")
    ],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="What the model wrote, UTF-8. [standard input]")
    ] = None,
    reasoning: Annotated[
        str,
        typer.Option(
            metavar="|".join(REASONING_MODES),
            help="none: thinking was off. tagged: the model writes <think>. opened: the prompt ended in <think>.",
        ),
    ] = "tagged",
    events: Annotated[
        bool, typer.Option("--events", help="Print JSON lines, one event each, as soon as it is certain.")
    ] = False,
    progress: Annotated[
        bool, typer.Option("--progress", help="With --events: also how long an unfinished block is, piece by piece.")
    ] = False,
    required: Annotated[bool, typer.Option("--required", help="An output without a valid call is an error.")] = False,
    lenient: Annotated[bool, typer.Option("--lenient", help="Skip opening tags that are repeated.")] = False,
    non_finite: Annotated[
        bool, typer.Option("--non-finite", help="Read NaN and infinities as numbers, as vLLM 0.33 does.")
    ] = False,
) -> None:
    """Find the tool calls in a model's output: content, reasoning, calls, and what was malformed.

    Whatever the text is, parsing does not fail: a block without a valid call is content.
    """
    from reference.tool_calls import ToolCallOptions, ToolCallStream, gathered
    from reference.tool_schema import ToolError, Tools

    if reasoning not in REASONING_MODES:
        raise ToolError(f"--reasoning must be one of {', '.join(REASONING_MODES)}, found {reasoning}")
    options = ToolCallOptions(
        reasoning=cast("ReasoningMode", reasoning),
        non_finite="number" if non_finite else "text",
        lenient=lenient,
        progress=progress,
    )
    stream = ToolCallStream(Tools.from_json(tools), options)
    found: list[Event] = []
    for chunk in _chunks(file):
        found += _shown(stream.feed(chunk), events)
    found += _shown(stream.finish(), events)
    parsed = gathered(found)
    if not events:
        _print(parsed)
    if required:
        parsed.required_calls()


def _chunks(file: Path | None) -> Iterator[str]:
    """The text in pieces of whole characters. Raises: ToolError if it cannot be read."""
    from reference.tool_schema import ToolError

    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    try:
        with nullcontext(cast(BufferedReader, sys.stdin.buffer)) if file is None else file.open("rb") as source:
            while data := source.read1(READ_SIZE):
                yield decoder.decode(data)
                done += len(data)
        decoder.decode(b"", final=True)
    except OSError as error:
        raise ToolError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ToolError(f"{file or 'standard input'}: is not UTF-8: {error.reason} after byte {done}") from error


def _shown(found: list[Event], is_wanted: bool) -> list[Event]:
    from reference.tool_values import json_text

    for event in found if is_wanted else ():
        typer.echo(json_text(_record(event)))
    return found


def _record(event: Event) -> dict[str, Any]:
    """An event as a JSON object; `arguments` is a JSON text, as in an engine's answer."""
    from reference.tool_calls import Call, Content, Notice, Progress, Reasoning

    match event:
        case Content(text):
            return {"event": "content", "text": text}
        case Reasoning(text):
            return {"event": "reasoning", "text": text}
        case Call():
            return {
                "event": "call",
                "index": event.index,
                "id": event.id,
                "name": event.name,
                "arguments": event.arguments_json,
                "block": list(event.block),
            }
        case Notice(kind, message):
            return {"event": "notice", "kind": kind, "message": message}
        case Progress(characters):
            return {"event": "progress", "characters": characters}


def _print(parsed: ParsedOutput) -> None:
    from reference.tool_values import json_text

    notices = f", {len(parsed.notices)} notices" if parsed.notices else ""
    typer.echo(
        f"{len(parsed.calls)} calls, {len(parsed.content):,} characters of content, "
        f"{len(parsed.reasoning):,} of reasoning{notices}"
    )
    for call in parsed.calls:
        typer.echo(f"call {call.index}: {json.dumps(call.name, ensure_ascii=False)} {call.arguments_json}")
    for notice in parsed.notices:
        typer.echo(f"{notice.kind}: {notice.message}")
    for name, text in (("reasoning", parsed.reasoning), ("content", parsed.content)):
        if text:
            typer.echo(f"{name}: {json_text(text)}")
