"""The chat format: golden renderings of the specification, ids against the tokenizer's own, refusals, fuzzing."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_texts import ADDED, START, TOOLS_TEXT, nfc, user, write_tokenizer

from reference.errors import NoteError
from reference.prompt import TURN_MARKERS, ChatTokenizer, build_prompt
from reference.prompt_media import (
    PADS,
    AudioItem,
    ImageItem,
    PaddedVideoItem,
    VideoItem,
)
from reference.prompt_messages import PromptError, read_messages
from reference.prompt_render import PromptOptions, render, rendered_text

tokenizers = pytest.importorskip("tokenizers")

FUZZ_SECONDS = 600


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> ChatTokenizer:
    return ChatTokenizer.open(tokenizer_file)


@pytest.fixture(scope="module")
def whole(tokenizer_file: Path) -> Callable[[str], list[int]]:
    """The tokenizer itself, which finds special tokens anywhere."""
    loaded = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def text_of(messages: list[dict[str, Any]], tools: Any = (), **options: Any) -> str:
    return rendered_text(render(read_messages(messages), tools, PromptOptions(**options)), ())


# Rendering.

A_CHAT = [{"role": "system", "content": "S"}, user("a"), {"role": "assistant", "content": "b"}, user("c")]
GOLDEN: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [
    ("on", [user()], {}, f"{START}<|user|>Hi<|endofuser|><|assistant|>"),
    ("off", [user()], {"thinking": False},
     f"{START}<|user|>Hi<no_think><|endofuser|><|assistant|><think>\n\n</think>\n\n"),
    ("suffix not doubled", [user("Hi<no_think>")], {"thinking": False},
     f"{START}<|user|>Hi<no_think><|endofuser|><|assistant|><think>\n\n</think>\n\n"),
    ("turns", A_CHAT, {}, "<|system|>S<|endofsystem|><|user|>a<|endofuser|><|assistant|>b<|endofassistant|>"
     "<|user|>c<|endofuser|><|assistant|>"),
    ("turns off", A_CHAT, {"thinking": False}, "<|system|>S<|endofsystem|><|user|>a<no_think><|endofuser|><|assistant|>"
     "<think>\n\n</think>\n\nb<|endofassistant|><|user|>c<no_think><|endofuser|><|assistant|><think>\n\n</think>\n\n"),
    ("reasoning in text", [user(), {"role": "assistant", "content": "<think>r</think>x"}],
     {"add_generation_prompt": False},
     f"{START}<|user|>Hi<|endofuser|><|assistant|><think>\nr\n</think>\n\nx<|endofassistant|>"),
    ("reasoning in text, off", [user(), {"role": "assistant", "content": "<think>r</think>\n\nx"}],
     {"add_generation_prompt": False, "thinking": False},
     f"{START}<|user|>Hi<no_think><|endofuser|><|assistant|><think>\n\n</think>\n\nx<|endofassistant|>"),
    ("reasoning field", [user(), {"role": "assistant", "content": "a</think>b", "reasoning_content": " \nr "}],
     {"add_generation_prompt": False},
     f"{START}<|user|>Hi<|endofuser|><|assistant|><think>\nr\n</think>\n\na</think>b<|endofassistant|>"),
    ("reasoning after the last opening",
     [{"role": "assistant", "content": "p<think>q<think>\nr\n</think>\n\nx</think>"}],
     {"add_generation_prompt": False},
     f"{START}<|assistant|><think>\nr\n</think>\n\nx</think><|endofassistant|>"),
    ("tool results", [{"role": "tool", "content": "1"}, {"role": "function", "content": "2"}],
     {"add_generation_prompt": False, "thinking": False},
     f"{START}<|user|>\n<dots_function_response>\n1\n</dots_function_response>"
     "\n<dots_function_response>\n2\n</dots_function_response><|endofuser|>"),
    ("a later system message", [user(), {"role": "system", "content": "S"}],
     {"add_generation_prompt": False, "thinking": False},
     f"{START}<|user|>Hi<no_think><|endofuser|><|user|>S<|endofuser|>"),
    ("no default system", [user()], {"default_system": "", "add_generation_prompt": False},
     "<|system|><|endofsystem|><|user|>Hi<|endofuser|>"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "options", "text"), [pytest.param(*case[1:], id=case[0]) for case in GOLDEN])
def test_golden_rendering(messages: list[dict[str, Any]], options: dict[str, Any], text: str) -> None:
    assert text_of(messages, **options) == text


@pytest.mark.parametrize(
    "arguments", [{"s": "é\n", "n": [1, {"k": None}], "b": True}, '{"s": "é\\n", "n": [1, {"k": null}], "b": true}']
)
def test_calls_of_earlier_turns(arguments: Any) -> None:
    calls = [{"type": "function", "function": {"name": "mk", "arguments": arguments}}, {"function": {"name": "ping"}}]
    text = text_of([{"role": "assistant", "content": None, "tool_calls": calls}], add_generation_prompt=False)
    assert text == (
        f'{START}<|assistant|>\n<dots_function_call>\n<invoke name="mk">\n<parameter name="s">\né\n\n</parameter>'
        '\n<parameter name="n">\n[1, {"k": null}]\n</parameter>\n<parameter name="b">\ntrue\n</parameter>'
        '\n</invoke>\n</dots_function_call>\n<dots_function_call>\n<invoke name="ping">\n</invoke>'
        "\n</dots_function_call><|endofassistant|>"
    )


def test_tools_stand_one_a_line_in_the_system_turn() -> None:
    flat = {"type": "function", "name": "é", "parameters": {}}
    wrapped = {"type": "function", "function": {"name": "é", "parameters": {}}}
    line = '{"type": "function", "function": {"name": "é", "parameters": {}}}'
    text = text_of([user()], [flat, wrapped], tools_text=TOOLS_TEXT)
    assert text.startswith(f"{START[:-15]}\n\n# Tools\n<tools>\n{line}\n{line}\n</tools>\n\nFormat.<|endofsystem|>")
    escaped = text_of([user()], [flat], tools_text=TOOLS_TEXT, escape_non_ascii=True)
    assert r'"name": "\u00e9"' in escaped
    with pytest.raises(PromptError, match=r"chat_template\.jinja"):
        text_of([user()], [flat])


# Ids.

plain_texts = st.text().filter(lambda text: not any(marker in text for marker in ADDED))


def ids_of(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return list(build_prompt(messages, tokenizer, PromptOptions(**options)).ids)


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool", "system"]), plain_texts), min_size=1),
    st.booleans(),
)
def test_ids_are_those_of_the_whole_text(
    tokenizer: ChatTokenizer, whole: Callable[[str], list[int]], turns: list[tuple[str, str]], thinking: bool
) -> None:
    """As an engine encodes it, where no text has a special token in it."""
    messages = [{"role": role, "content": text} for role, text in turns]
    prompt = build_prompt(messages, tokenizer, PromptOptions(thinking=thinking))
    assert list(prompt.ids) == whole(prompt.text)


@given(st.lists(st.sampled_from(ADDED) | st.text(max_size=4)).map("".join))
def test_special_tokens_in_texts_are_text(
    tokenizer: ChatTokenizer, whole: Callable[[str], list[int]], text: str
) -> None:
    """No turn can be ended from inside of it; an engine that encodes the whole string lets it."""
    ids = ids_of(tokenizer, [{"role": "system", "content": text}, user(text), {"role": "tool", "content": text}])
    turn = [tokenizer.id_of(marker) for marker in TURN_MARKERS]
    assert [id for id in ids if id in tokenizer.added.values()] == [*turn[:4], *turn[2:5]]
    stream = tokenizer.text_stream()
    written = stream.feed(ids) + stream.finish()
    assert written == text_of(
        [{"role": "system", "content": nfc(text)}, user(nfc(text)), {"role": "tool", "content": nfc(text)}]
    )
    if not any(pad in text for pad in PADS.values()):
        as_tokens = ids_of(tokenizer, [user(text)], markers_in_text="tokens")
        assert as_tokens == whole(text_of([user(text)]))


def test_text_and_markup_that_touch_are_encoded_together(
    tokenizer: ChatTokenizer, whole: Callable[[str], list[int]]
) -> None:
    """A space that ends a question and the "<" after it are one token; so are two line breaks where a result begins."""
    for first, second in (("Hi ", "<no_think>"), ("response>\n", "\n\n")):
        apart = tokenizer.encode_plain(first) + tokenizer.encode_plain(second)
        assert tokenizer.encode_plain(first + second) != apart
    messages = [user("Hi "), {"role": "tool", "content": "\n\n"}]
    prompt = build_prompt(messages, tokenizer, PromptOptions(thinking=False))
    assert list(prompt.ids) == whole(prompt.text)


def test_of_two_tokens_at_one_place_the_longer_is_taken(tokenizer: ChatTokenizer) -> None:
    nested = ChatTokenizer(tokenizer._plain, {"<a>": 1, "<a>b": 2}, "nested.json")
    assert nested.split("x<a>by<a>") == ["x", 2, "y", 1, ""]


def test_bos_is_added_on_demand(tokenizer: ChatTokenizer) -> None:
    without = ids_of(tokenizer, [user()])
    assert ids_of(tokenizer, [user()], add_bos=True) == [tokenizer.id_of("<|endoftext|>"), *without]


def test_ids_of_calls_and_tools_are_those_of_the_whole_text(
    tokenizer: ChatTokenizer, whole: Callable[[str], list[int]]
) -> None:
    call = {"function": {"name": "search", "arguments": {"query": "x < y"}}}
    messages = [user(), {"role": "assistant", "content": "b", "reasoning_content": "r", "tool_calls": [call]}]
    prompt = build_prompt(messages, tokenizer, PromptOptions(tools_text=TOOLS_TEXT), [{"name": "search"}])
    assert list(prompt.ids) == whole(prompt.text)
    assert prompt.ids.count(tokenizer.id_of("<dots_function_call>")) == 1


# Refusals.


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("Hi", "must be a list"),
        ([5], r"messages\[0\] must be an object"),
        ([user(), {"role": "robot", "content": "x"}], r"messages\[1\]: role must be one of system, .*, found 'robot'"),
        ([{"role": ["user"], "content": "x"}], "role must be one of"),
        ([{"role": "user"}], "content must be a text or a list"),
        ([user(5)], "content must be a text or a list"),
        ([user([{"type": "smell"}])], r"messages\[0\]: content\[0\]: type must be text or one of"),
        ([user([{"type": "text"}])], "text must be a text, found NoneType"),
        ([user("a\ud800")], "character 1 is half of a surrogate pair"),
        ([{"role": "system", "content": [{"type": "image"}]}, user()], "image in a message of the system"),
        ([{"role": "assistant", "content": "", "reasoning_content": 5}], "reasoning must be a text"),
        ([{"role": "assistant", "content": "", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": 5}]}], r"tool_calls\[0\] must be"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "t", "arguments": "{"}]}], "JSON text of one"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "t", "arguments": [1]}]}], "found list"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"name": "t", "arguments": {"k": {1}}}]}],
            "must be JSON",
        ),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "t", "arguments": {"k": ["\ud800"]}}]}], "t: k"),
    ],
)
def test_messages_that_are_none_are_refused(tokenizer: ChatTokenizer, messages: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        build_prompt(messages, tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document | {"added_tokens": document["added_tokens"][:5]}, "a single token for each of"),
        (lambda document: document | {"added_tokens": [5]}, "'added_tokens' must be"),
        (lambda document: document | {"model": {"type": "none"}}, "is no tokenizer"),
        (lambda document: [document], "must hold a JSON object"),
        (
            lambda document: document | {"added_tokens": [t | {"lstrip": True} for t in document["added_tokens"]]},
            "has lstrip, rstrip or single_word",
        ),
    ],
)
def test_tokenizer_files_that_do_not_fit_are_refused(
    tokenizer_file: Path, tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(tokenizer_file.read_text()))))
    with pytest.raises(PromptError, match=message):
        ChatTokenizer.open(tmp_path)


def test_tokenizer_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot be read"):
        ChatTokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(PromptError, match="not valid JSON"):
        ChatTokenizer.open(tmp_path)


def test_what_the_file_would_cut_or_add_is_left_out(
    tokenizer_file: Path, tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    changed = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    changed.enable_truncation(3)
    changed.enable_padding(length=50)
    changed.save(str(tmp_path / "tokenizer.json"))
    assert ids_of(ChatTokenizer.open(tmp_path), A_CHAT) == ids_of(tokenizer, A_CHAT)


def random_json(source: random.Random, depth: int = 3) -> Any:
    """Values such as a broken client sends: right keys, wrong types, markers in texts."""
    kind = source.randrange(9 if depth else 6)
    if kind < 3:
        return source.choice(["user", "assistant", "tool", "system", "text", "image", "video", "Hi", "\ud800", *ADDED])
    if kind < 6:
        return source.choice([None, True, 0, -1, 1.5, ""])
    if kind == 6:
        return [random_json(source, depth - 1) for _ in range(source.randrange(3))]
    keys = ("role", "content", "type", "text", "tool_calls", "reasoning_content", "function", "name", "arguments")
    return {source.choice(keys): random_json(source, depth - 1) for _ in range(source.randrange(5))}


def random_request(source: random.Random) -> tuple[Any, Any, Any]:
    """Messages, tools and media, mostly of the right form."""
    messages: Any = [
        {"role": source.choice(["user", "assistant", "tool", "system"]), "content": source.choice(["Hi", *ADDED])}
        | ({} if source.random() < 0.5 else random_json_object(source))
        for _ in range(source.randrange(4))
    ]
    items = (ImageItem(2), AudioItem(1), PaddedVideoItem(3), VideoItem(("x", ImageItem(1))), ImageItem(0))
    media = [source.choice(items) for _ in range(source.randrange(3))]
    if media and source.random() < 0.7:
        messages.append(user([{"type": item.kind} for item in media]))
    tools = [] if source.random() < 0.7 else [random_json(source)]
    return (random_json(source) if source.random() < 0.1 else messages), tools, media


def random_json_object(source: random.Random) -> dict[str, Any]:
    value = random_json(source)
    return value if isinstance(value, dict) else {}


def build_or_refuse(source: random.Random, tokenizer: ChatTokenizer) -> bool:
    """A prompt that decodes to itself and whose pads are its spans', or a named error."""
    messages, tools, media = random_request(source)
    options = PromptOptions(
        thinking=source.random() < 0.5,
        tools_text=TOOLS_TEXT,
        markers_in_text=source.choice(["plain", "tokens"]),
        part_separator=source.choice(["", "\n"]),
    )
    try:
        prompt = build_prompt(messages, tokenizer, options, tools, media)
    except NoteError:
        return False
    stream = tokenizer.text_stream()
    text = stream.feed(prompt.ids) + stream.finish()
    assert media or text == nfc(prompt.text)
    for kind, pad in PADS.items():
        owned = sum(span.stop - span.start for span in prompt.media if span.kind == kind)
        assert prompt.ids.count(tokenizer.id_of(pad)) == owned
    return True


def test_whatever_is_asked_makes_a_prompt_or_a_named_error(tokenizer: ChatTokenizer) -> None:
    source = random.Random(0)
    built = sum(build_or_refuse(source, tokenizer) for _ in range(2000))
    assert 200 < built < 1800


@pytest.mark.slow
@pytest.mark.timeout(2 * FUZZ_SECONDS)
@pytest.mark.parametrize("seed", [1])
def test_fuzz(tokenizer: ChatTokenizer, seed: int) -> None:
    """Ten minutes of requests: `pytest -m slow`."""
    source = random.Random(seed)
    end = time.monotonic() + FUZZ_SECONDS
    count = 0
    while time.monotonic() < end:
        build_or_refuse(source, tokenizer)
        count += 1
    assert count > 1000
