"""The tool-call format: a model's output, whole or as it comes, into reasoning, content and calls.

    output = [ "<think>" reasoning "</think>" ] { text | "<dots_function_call>" body "</dots_function_call>" }

One automaton reads it. In each state one tag is awaited; what comes before the tag belongs to the state, and only the
end of a chunk that may be the beginning of the tag is held back:

    state       awaits       what passes is
    REASONING   </think>     reasoning
    TEXT        OPEN         content
    BLOCK       CLOSE        kept, and read when the block is closed
    TOO_LONG    CLOSE        content: a block past `max_block`, so that memory is bounded

Hence the result does not depend on how the text is cut, nothing emitted is ever taken back, every character is looked
at once (the held ones again), and nothing is lost: content plus the blocks that gave calls is the input. Blocks without
a valid call, unfinished ones and closing tags alone are content, tags included. vLLM's content is less: `vllm_content`.
Source: tool-call specification, sections 4 to 6; its contract, not the engines' where they lose text or depend on cuts.
"""

from __future__ import annotations

import enum
import io
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from reference import tool_scan
from reference.tool_block import Notice, read_block
from reference.tool_scan import CLOSE, OPEN, THINK_CLOSE, THINK_OPEN, held_back
from reference.tool_schema import NoToolCallError, ToolError, Tools
from reference.tool_values import NonFinite, json_text

# Where reasoning begins. `none`: thinking was off, all is answer. `tagged`: the model writes <think> first; an output
# that does not begin with it (after whitespace) is all answer. `opened`: the prompt ended inside of <think>.
ReasoningMode = Literal["none", "tagged", "opened"]


@dataclass(frozen=True)
class ToolCallOptions:
    """How an output is read. The defaults are the contract; the others exist for comparing with engines."""

    reasoning: ReasoningMode = "none"
    non_finite: NonFinite = "text"
    lenient: bool = False
    # Events that say how long an open block is, so that a client sees life during a long argument.
    progress: bool = False
    # Characters of a block's body. 32 a token at the model's context of 524,288: no output of the model is so long.
    max_block: int = 32 * 524_288


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Progress:
    """`characters` of the open block so far. Depends on the cuts, and carries nothing of the result."""

    characters: int


@dataclass(frozen=True)
class Call:
    """A valid call. `index` counts over the whole output from 0; `block` is where its block stands, [start, stop)."""

    index: int
    name: str
    arguments: dict[str, Any]
    block: tuple[int, int]
    id: str = field(compare=False)

    @property
    def arguments_json(self) -> str:
        """One JSON object: separators ", " and ": ", characters not escaped, keys in order of appearance."""
        return json_text(self.arguments)


Event = Content | Reasoning | Call | Notice | Progress


@dataclass(frozen=True)
class ParsedOutput:
    """All of an output. `reasoning` and `content` are exactly as written, whitespace included."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]
    notices: tuple[Notice, ...]

    @property
    def finish_reason(self) -> Literal["tool_calls", "stop"]:
        return "tool_calls" if self.calls else "stop"

    @property
    def truncated_tool_call(self) -> bool:
        """The output ended inside of a block."""
        return any(notice.kind == "unclosed block" for notice in self.notices)

    @property
    def truncated_reasoning(self) -> bool:
        """The output ended before the reasoning did."""
        return any(notice.kind == "unclosed reasoning" for notice in self.notices)

    def required_calls(self) -> tuple[Call, ...]:
        """The calls, where the request required one. Raises: NoToolCallError if there is none."""
        if not self.calls:
            found = "; ".join(notice.message for notice in self.notices) or "no block"
            raise NoToolCallError(f"a tool call was required, and the output has no valid one: {found}")
        return self.calls


def parse_output(
    output: str, tools: Tools, options: ToolCallOptions | None = None, new_id: Callable[[], str] | None = None
) -> ParsedOutput:
    """Read a whole output. Never raises on any text; time is linear in its length."""
    stream = ToolCallStream(tools, options, new_id)
    return gathered([*stream.feed(output), *stream.finish()])


def gathered(events: Iterable[Event]) -> ParsedOutput:
    """The result that a stream's events add up to."""
    kept = list(events)
    return ParsedOutput(
        reasoning="".join(event.text for event in kept if isinstance(event, Reasoning)),
        content="".join(event.text for event in kept if isinstance(event, Content)),
        calls=tuple(event for event in kept if isinstance(event, Call)),
        notices=tuple(event for event in kept if isinstance(event, Notice)),
    )


def vllm_content(output: str, calls: Sequence[Call]) -> str | None:
    """The content that vLLM's batch parser returns for an output (without reasoning) from which it took `calls`.

    Without a valid call, the output as it is; with one, the trimmed text before the first block, None if empty.
    """
    return output[: output.find(OPEN)].strip() or None if calls else output


class _State(enum.Enum):
    START = enum.auto()
    REASONING = enum.auto()
    TEXT = enum.auto()
    BLOCK = enum.auto()
    TOO_LONG = enum.auto()


_AWAITED = {
    _State.REASONING: THINK_CLOSE,
    _State.TEXT: OPEN,
    _State.BLOCK: CLOSE,
    _State.TOO_LONG: CLOSE,
}


class ToolCallStream:
    """Reads an output as it comes: `feed` any pieces of it, then `finish`. Text, so whole characters only."""

    def __init__(self, tools: Tools, options: ToolCallOptions | None = None, new_id: Callable[[], str] | None = None):
        """`new_id` makes the opaque id of each call; by default a random one."""
        self._tools = tools
        self._options = options or ToolCallOptions()
        self._new_id = new_id or _random_id
        self._state = _State.TEXT if self._options.reasoning == "none" else _State.START
        self._held = ""
        self._held_at = 0
        self._calls = 0
        self._block_at = 0
        self._block = io.StringIO(newline="")
        self._block_length = 0
        self._is_finished = False

    def feed(self, chunk: str) -> list[Event]:
        """The events that the next piece of text completes. Raises: ToolError after `finish`."""
        if self._is_finished:
            raise ToolError("the stream is finished: a new output needs a new ToolCallStream")
        events: list[Event] = []
        text = self._held + chunk
        at = self._begin(text, events) if self._state is _State.START else 0
        while self._state is not _State.START:
            tag = _AWAITED[self._state]
            found = tool_scan.find(text, tag, at, len(text))
            if found < 0:
                break
            self._pass(text[at:found], events)
            at = found + len(tag)
            self._meet(self._held_at + found, events)
        rest = at
        if self._state is not _State.START:
            rest = len(text) - held_back(text, _AWAITED[self._state], at)
            self._pass(text[at:rest], events)
        self._held = text[rest:]
        self._held_at += rest
        if self._options.progress and self._state is _State.BLOCK:
            events.append(Progress(self._block_length))
        return events

    def finish(self) -> list[Event]:
        """The events that the end of the output completes. Raises: ToolError if called twice."""
        if self._is_finished:
            raise ToolError("the stream is finished already")
        self._is_finished = True
        events: list[Event] = []
        if self._state is _State.START:
            self._state = self._after_start()
        self._pass(self._held, events)
        if self._state is _State.BLOCK:
            events.append(Content(OPEN + self._block.getvalue()))
        if self._state in (_State.BLOCK, _State.TOO_LONG):
            message = f"the block that begins at character {self._block_at} has no {CLOSE}: kept as content"
            events.append(Notice("unclosed block", message))
        if self._state is _State.REASONING:
            events.append(Notice("unclosed reasoning", f"the output ends before {THINK_CLOSE}: it has no answer"))
        return events

    def _begin(self, text: str, events: list[Event]) -> int:
        """Skip whitespace and <think>; leave START once it is clear whether <think> is there. Returns where to go on.

        Whitespace before <think> belongs to what would be there without it: content, or reasoning if opened.
        """
        at = len(text) - len(text.lstrip())
        if at:
            space = text[:at]
            events.append(Content(space) if self._after_start() is _State.TEXT else Reasoning(space))
        if text.startswith(THINK_OPEN, at):
            self._state = _State.REASONING
            return at + len(THINK_OPEN)
        if len(text) - at >= len(THINK_OPEN) or not THINK_OPEN.startswith(text[at:]):
            self._state = self._after_start()
        return at

    def _after_start(self) -> _State:
        return _State.REASONING if self._options.reasoning == "opened" else _State.TEXT

    def _pass(self, text: str, events: list[Event]) -> None:
        """Text before the awaited tag."""
        if not text:
            return
        if self._state is _State.REASONING:
            events.append(Reasoning(text))
        elif self._state is _State.BLOCK:
            self._block.write(text)
            self._block_length += len(text)
            if self._block_length > self._options.max_block:
                self._give_up_block(events)
        else:
            events.append(Content(text))

    def _meet(self, at: int, events: list[Event]) -> None:
        """The awaited tag, which begins at character `at` of the output."""
        if self._state is _State.TEXT:
            self._state = _State.BLOCK
            self._block_at, self._block, self._block_length = at, io.StringIO(newline=""), 0
            return
        if self._state is _State.BLOCK:
            self._close_block(at + len(CLOSE), events)
        elif self._state is _State.TOO_LONG:
            events.append(Content(CLOSE))
        self._state = _State.TEXT

    def _close_block(self, stop: int, events: list[Event]) -> None:
        body = self._block.getvalue()
        self._block.close()
        found, notices = read_block(body, self._tools, self._options.non_finite, self._options.lenient)
        for call in found:
            block = (self._block_at, stop)
            events.append(Call(self._calls, call.name, call.arguments, block, self._new_id()))
            self._calls += 1
        if not found:
            events.append(Content(f"{OPEN}{body}{CLOSE}"))
        events.extend(notices)

    def _give_up_block(self, events: list[Event]) -> None:
        limit = self._options.max_block
        message = f"the block that begins at character {self._block_at} has more than {limit} characters: content"
        events += [Content(OPEN + self._block.getvalue()), Notice("block too long", message)]
        self._block.close()
        self._state = _State.TOO_LONG


def _random_id() -> str:
    return f"call_{uuid.uuid4().hex}"
