"""Ids back to text as they come, and the ids at which a generation stops."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_texts import write_tokenizer

from reference.errors import ConfigError
from reference.prompt import ChatTokenizer
from reference.prompt_messages import PromptError
from reference.prompt_stop import read_stop_ids
from reference.prompt_tokens import token_bytes

tokenizers = pytest.importorskip("tokenizers")


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


@pytest.mark.parametrize("text", ["😀", "a é北京 \u0301", "</think>x", "\ufffd\ufffd"])
def test_s8_characters_come_whole(tokenizer: ChatTokenizer, text: str) -> None:
    """The small vocabulary cuts an emoji into four tokens."""
    ids = tokenizer.encode_plain(text)
    stream = tokenizer.text_stream()
    pieces = [stream.feed([id]) for id in ids]
    assert "".join(pieces) + stream.finish() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    if text == "😀":
        assert (len(ids), pieces) == (4, ["", "", "", "😀"])
    cut = tokenizer.text_stream()
    cut.feed(tokenizer.encode_plain("😀")[:2])
    assert cut.finish() == "\ufffd"


@given(st.lists(st.integers(0, 300)))
def test_a_stream_of_ids_is_what_the_tokenizer_decodes(tokenizer: ChatTokenizer, ids: list[int]) -> None:
    known = [id for id in ids if tokenizer._plain.id_to_token(id) or id in tokenizer.added.values()]
    stream = tokenizer.text_stream()
    text = "".join(stream.feed([id]) for id in known) + stream.finish()
    assert text == b"".join(token_bytes(tokenizer.token(id)) for id in known).decode(errors="replace")


def test_special_tokens_stay_in_the_text(tokenizer: ChatTokenizer, whole: Callable[[str], list[int]]) -> None:
    text = "<think>r</think><dots_function_call>é<|endofassistant|>"
    assert tokenizer.text_stream().feed(whole(text)) == text
    with pytest.raises(PromptError, match="has no token 100000"):
        tokenizer.token(100_000)


def test_stop_ids_are_those_of_the_generation_config(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [151643, 151668, 151643]}')
    assert read_stop_ids(tmp_path) == (151643, 151668)
    path.write_text('{"eos_token_id": 7}')
    assert read_stop_ids(tmp_path) == (7,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: .*; without it the stop ids are not known"),
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "required key 'eos_token_id' is absent"),
        ('{"eos_token_id": []}', "at least one id"),
        ('{"eos_token_id": [-1]}', "none negative"),
        ('{"eos_token_id": [true]}', "a list of integers"),
        ('{"eos_token_id": "7"}', "a list of integers"),
    ],
)
def test_stop_ids_that_are_not_stated_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_stop_ids(tmp_path)
