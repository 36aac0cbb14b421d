"""What a synthetic checkpoint has beside its weights: a tokenizer of any text and id, stop ids, bounds of images."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.checkpoint import CheckpointFolder, write_synthetic
from reference.checkpoint.synthetic_chat import (
    PREPROCESSOR_FILE,
    TOKENIZER_FILE,
    chat_documents,
    has_room_for_text,
    smallest_vocabulary,
    special_ids,
)
from reference.config import released, tiny
from reference.errors import ConfigError
from reference.media.image_config import ImageConfig
from reference.media.image_size import CELL_PIXELS
from reference.model_tiny import tiny_note
from reference.prompt import BOS, TURN_MARKERS, ChatTokenizer, build_prompt
from reference.prompt_media import AROUND, PADS
from reference.prompt_stop import GENERATION_FILE, read_stop_ids

tokenizers = pytest.importorskip("tokenizers")
CONFIGS = {"tiny-note": tiny_note(), "released": released()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "folder"
    write_synthetic(path, tiny_note())
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.open(folder, tiny_note())


def test_the_folder_opens_and_has_all_that_generation_reads(folder: Path):
    assert CheckpointFolder.open(folder).config == tiny_note()
    assert read_stop_ids(folder) == tiny_note().eos_token_ids
    image = ImageConfig.from_json(folder / PREPROCESSOR_FILE, tiny_note().vision)
    assert image.bounds.max_pixels == 64 * CELL_PIXELS


@pytest.mark.parametrize("name", CONFIGS)
def test_special_tokens_stand_where_the_config_says(name: str):
    config = CONFIGS[name]
    ids = special_ids(config)
    assert {*ids} == {BOS, *TURN_MARKERS, *PADS.values(), *(m for pair in AROUND.values() for m in pair if m)}
    assert len(set(ids.values())) == len(ids)
    assert (ids[BOS], ids["<|endofassistant|>"]) == config.eos_token_ids
    stated = {"image": config.image_token_id, "audio": config.audio_token_id, "video": config.video_token_id}
    assert {kind: ids[PADS[kind]] for kind in PADS} == stated
    assert [ids[marker] for marker in AROUND["audio"]] == [config.audio_token_id - 2, config.audio_token_id - 1]
    read = tokenizers.Tokenizer.from_str(chat_documents(config)[TOKENIZER_FILE].decode())
    assert read.get_vocab_size() == config.text.vocab_size
    assert {marker: read.token_to_id(marker) for marker in ids} == ids


@given(st.text())
def test_any_text_comes_back(tokenizer: ChatTokenizer, text: str):
    text = text.encode("utf-8", "ignore").decode()
    ids = build_prompt([{"role": "user", "content": text}], tokenizer).ids
    stream = tokenizer.text_stream()
    assert text in stream.feed(ids) + stream.finish()


def test_every_id_has_a_text(tokenizer: ChatTokenizer):
    texts = [tokenizer.token(id) for id in range(tiny_note().text.vocab_size)]
    assert len(set(texts)) == len(texts)
    stream = tokenizer.text_stream()
    assert stream.feed([276]) == "~276~"


def test_bytes_are_the_same_each_time():
    assert chat_documents(tiny_note()) == chat_documents(tiny_note())


def test_without_room_there_is_no_tokenizer(tmp_path: Path):
    assert not has_room_for_text(tiny())
    assert chat_documents(tiny()) == {}
    write_synthetic(tmp_path / "folder", tiny())
    assert not (tmp_path / "folder" / TOKENIZER_FILE).exists()
    with pytest.raises(ConfigError, match=f"at least {smallest_vocabulary()} .* the config has 193"):
        special_ids(tiny())


def test_stated_ids_that_are_bytes_or_equal_make_no_tokenizer():
    assert not has_room_for_text(dataclasses.replace(tiny_note(), image_token_id=255))
    assert not has_room_for_text(dataclasses.replace(tiny_note(), image_token_id=tiny_note().video_token_id))
    assert GENERATION_FILE not in chat_documents(dataclasses.replace(tiny_note(), bos_token_id=1))


def test_the_released_bounds_are_kept_where_the_context_is_long(tmp_path: Path):
    (tmp_path / PREPROCESSOR_FILE).write_bytes(chat_documents(released())[PREPROCESSOR_FILE])
    assert ImageConfig.from_json(tmp_path / PREPROCESSOR_FILE, released().vision) == ImageConfig()
