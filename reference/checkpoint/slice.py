"""Cuts a slice out of a checkpoint: some layers, some experts, the same bytes.

A slice of the real weights fits on a small machine and runs the same code: three layers (dense + full, MoE + full,
MoE + sliding) with 16 experts and the draft layer have 8 GB. It is not a small model, since its experts compete with
fewer others and its text means nothing: it serves to compare implementations with each other.
Source: checkpoint specification, section 9.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference.checkpoint.expected import expected_tensors
from reference.checkpoint.folder import CONFIG_FILE, CheckpointFolder
from reference.checkpoint.index import INDEX_FILE
from reference.checkpoint.selection import Selection
from reference.checkpoint.write import DEFAULT_SHARD_BYTES, CheckpointWriter

SLICE_FILE = "slice.json"
# What a runner needs beside the weights, copied where the source has it.
SIDE_FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)


def cut_slice(
    source: CheckpointFolder,
    target: str | os.PathLike[str],
    layers: Sequence[int],
    experts: Sequence[int] | None = None,
    with_mtp: bool = True,
    with_towers: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a checkpoint of the given `layers` and `experts` (None: all), renumbered in the given order.

    `slice.json` says what was cut: layers, experts, and for every tensor the source's name and the sha256 of the bytes
    copied; and from what: the sha256 of the source's config and index. One tensor is in memory at a time.
    Raises: ConfigError for a slice that cannot be (see `Selection`); CheckpointError for a target that holds a
    checkpoint, or a deferred bucket.
    """
    selection = Selection(source.config, layers, experts, with_mtp, with_towers)
    origin = source.index.metadata.get("indexer_rope_converted_from")
    with CheckpointWriter(
        target,
        selection.config,
        max_shard_bytes=max_shard_bytes,
        indexer_rope_layout=source.indexer_rope_layout,
        indexer_rope_converted_from=origin,
    ) as writer:
        copied = {}
        for name in expected_tensors(selection.config):
            taken = selection.source(name)
            tensor = source.tensor(taken.name, taken.rows)
            writer.add(name, tensor)
            copied[name] = {"source": taken.name, "sha256": _sha256_of(tensor)}
        for side_file in SIDE_FILES:
            if (source.path / side_file).is_file():
                writer.add_document(side_file, (source.path / side_file).read_bytes())
        record: dict[str, Any] = {
            "source": {name: _sha256(source, name) for name in (CONFIG_FILE, INDEX_FILE)},
            "layers": list(selection.layers),
            "experts": list(selection.experts),
            "with_mtp": with_mtp,
            "with_towers": with_towers,
            "tensors": copied,
        }
        writer.add_document(SLICE_FILE, (json.dumps(record, indent=1) + "\n").encode())


def _sha256(source: CheckpointFolder, name: str) -> str:
    return hashlib.sha256((source.path / name).read_bytes()).hexdigest()


def _sha256_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().data).hexdigest()
