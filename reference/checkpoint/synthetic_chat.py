"""What a checkpoint has beside its weights, made up for a synthetic one: tokenizer, stop ids, bounds of images.

    ids 0 to 255      one byte each, in the order of GPT-2's printable alphabet, without merges
    special tokens    where the config states an id; a sound's delimiters right before its pad (start, end, pad); all
                      others directly behind the bytes
    all other ids     tokens `~N~` that no text is split into, so that whatever a model writes can be shown

Every text has ids, and every id has a text. The file is in the format of the package `tokenizers`, which is not needed
to write it.
Source: multimodal prompt specification, sections 1 and 4; image_video specification, section 1.
"""

from __future__ import annotations

import json
from typing import Any

from reference.config import NoteConfig
from reference.errors import ConfigError
from reference.media.image_config import CLIP_MEAN, CLIP_STD
from reference.media.image_size import CELL_PIXELS, MERGE, PATCH, PixelBounds
from reference.prompt import BOS, TOKENIZER_FILE, TURN_MARKERS
from reference.prompt_media import AROUND, PADS
from reference.prompt_messages import MediaKind
from reference.prompt_render import END_OF_ASSISTANT
from reference.prompt_stop import GENERATION_FILE
from reference.prompt_tokens import BYTE_OF_CHARACTER

PREPROCESSOR_FILE = "preprocessor_config.json"
BYTES = 256
# An image may take this part of the context, so that a short one has room for several.
IMAGES_IN_CONTEXT = 64


def chat_documents(config: NoteConfig) -> dict[str, bytes]:
    """Files by name, for `generate` and for other implementations; the same bytes for the same config.

    `tokenizer.json` and `generation_config.json` need a vocabulary for all bytes and special tokens: a config that has
    none gets none. `preprocessor_config.json` comes with a tower that takes the released patches.
    """
    documents: dict[str, Any] = {}
    if has_room_for_text(config):
        ids = special_ids(config)
        documents[TOKENIZER_FILE] = _tokenizer(config.text.vocab_size, ids)
        stop = dict.fromkeys((ids[BOS], ids[END_OF_ASSISTANT]))
        documents[GENERATION_FILE] = {"bos_token_id": ids[BOS], "eos_token_id": list(stop)}
    if config.vision and (config.vision.patch_size, config.vision.spatial_merge_size) == (PATCH, MERGE):
        documents[PREPROCESSOR_FILE] = _preprocessor(config.text.max_position_embeddings)
    return {name: (json.dumps(values, ensure_ascii=False) + "\n").encode() for name, values in documents.items()}


def has_room_for_text(config: NoteConfig) -> bool:
    """Whether the vocabulary holds all bytes and special tokens, and the stated ids leave the bytes alone."""
    stated = _stated_ids(config).values()
    fits = all(BYTES <= id < config.text.vocab_size for id in stated) and len(set(stated)) == len(stated)
    return fits and config.text.vocab_size >= smallest_vocabulary()


def smallest_vocabulary() -> int:
    return BYTES + len(_specials())


def special_ids(config: NoteConfig) -> dict[str, int]:
    """The special tokens of the chat format. Raises: ConfigError for a vocabulary that has no room for them."""
    if not has_room_for_text(config):
        raise ConfigError(
            f"a tokenizer needs a vocabulary of at least {smallest_vocabulary()} and special ids from {BYTES} on; the "
            f"config has {config.text.vocab_size} and {_stated_ids(config)}"
        )
    found = _stated_ids(config)
    start, end = AROUND["audio"]
    for marker, id in ((start, config.audio_token_id - 2), (end, config.audio_token_id - 1)):
        if id >= BYTES and id not in found.values():
            found[marker] = id
    free = (id for id in range(BYTES, config.text.vocab_size) if id not in set(found.values()))
    return {marker: found[marker] if marker in found else next(free) for marker in _specials()}


def _specials() -> tuple[str, ...]:
    around = [marker for pair in AROUND.values() for marker in pair if marker]
    return (BOS, *TURN_MARKERS, *around, *PADS.values())


def _stated_ids(config: NoteConfig) -> dict[str, int]:
    pads: dict[MediaKind, int] = {
        "image": config.image_token_id,
        "audio": config.audio_token_id,
        "video": config.video_token_id,
    }
    found = {BOS: config.bos_token_id} | {PADS[kind]: id for kind, id in pads.items()}
    others = [id for id in config.eos_token_ids if id != config.bos_token_id]
    return found | ({END_OF_ASSISTANT: others[0]} if others else {})


def _tokenizer(vocabulary: int, specials: dict[str, int]) -> dict[str, Any]:
    named = {id: text for text, id in specials.items()}
    characters = sorted(BYTE_OF_CHARACTER)
    texts = [*characters, *(named.get(id, f"~{id}~") for id in range(BYTES, vocabulary))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": named[id], **plain, "special": True} for id in sorted(named)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: id for id, text in enumerate(texts)},
            "merges": [],
        },
    }


def _preprocessor(context: int) -> dict[str, Any]:
    """Bounds as the release has them, less where the context is short."""
    released = PixelBounds()
    largest = min(released.max_pixels, max(released.min_pixels, context // IMAGES_IN_CONTEXT * CELL_PIXELS))
    return {
        "vision_config": {
            "patch_size": PATCH,
            "merge_size": MERGE,
            "temporal_patch_size": 1,
            "pre_pixel_shuffle": True,
            "min_pixels": released.min_pixels,
            "max_pixels": largest,
            "image_mean": list(CLIP_MEAN),
            "image_std": list(CLIP_STD),
        }
    }
