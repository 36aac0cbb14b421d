"""Writes a checkpoint folder in the released layout: interleaved shards, tower files, config, index.

Tensors come one at a time in any order and go straight to their place: one tensor is in memory, no more. Every file is
written under a temporary name. When all is complete the files are renamed, the index last: what is interrupted has no
index, and a folder without index does not open.
Source: checkpoint specification, sections 1 and 8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from reference.checkpoint.expected import expected_tensors
from reference.checkpoint.folder import CONFIG_FILE
from reference.checkpoint.index import INDEX_FILE
from reference.checkpoint.problems import Problem, refusal
from reference.checkpoint.shards import plan
from reference.config import NoteConfig
from reference.errors import CheckpointError
from reference.layers.indexer import RopeLayout

# The release has 131 text shards of 4.3 GB.
DEFAULT_SHARD_BYTES = 4_500_000_000
PARTIAL = ".partial"


class CheckpointWriter:
    """Use as a context manager: `add` every tensor of the config once; leaving it completes the folder or undoes it.

    `indexer_rope_layout` goes into the index's metadata (None: leave it out), like `indexer_rope_converted_from`.
    Raises on entry: CheckpointError if the folder already holds a checkpoint, which is left as it is.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: NoteConfig,
        *,
        shards: int | None = None,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        indexer_rope_layout: RopeLayout | None = "leading",
        indexer_rope_converted_from: RopeLayout | None = None,
    ):
        self._folder = Path(folder)
        self._config = config
        self._missing = expected_tensors(config)
        self._total_size = sum(tensor.nbytes for tensor in self._missing.values())
        self._shards = plan(self._missing.values(), max_shard_bytes, shards)
        self._files = {name: shard.name for shard in self._shards for name in shard.starts}
        self._starts = {name: start for shard in self._shards for name, start in shard.starts.items()}
        self._documents: dict[str, bytes] = {CONFIG_FILE: _json(config.to_json())}
        layout = {
            "indexer_rope_layout": indexer_rope_layout,
            "indexer_rope_converted_from": indexer_rope_converted_from,
        }
        metadata = {"total_size": self._total_size} | {key: value for key, value in layout.items() if value}
        self._index = _json({"metadata": metadata, "weight_map": dict(sorted(self._files.items()))})

    def __enter__(self) -> CheckpointWriter:
        if (self._folder / INDEX_FILE).exists():
            raise CheckpointError(f"{self._folder}: already holds a checkpoint; write to another folder or remove it")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_partial()
            for shard in self._shards:
                with self._partial(shard.name).open("wb") as file:
                    file.write(shard.header)
                    file.truncate(shard.size)
        except OSError as error:
            self._remove_partial()
            raise self._cannot_write(error) from error
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, byte for byte. Raises: CheckpointError if it is not the expected one, or comes twice."""
        if name not in self._missing:
            found = "it a second time" if name in self._files else "a name that is not the model's"
            raise refusal(self._folder, [Problem("not expected", self._files.get(name, ""), name, found, "none")])
        expected = self._missing[name]
        if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
            found, right = f"{tensor.dtype} {tuple(tensor.shape)}", f"{expected.dtype} {expected.shape}"
            raise refusal(self._folder, [Problem("wrong tensor", self._files[name], name, found, right)])
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        try:
            with self._partial(self._files[name]).open("r+b") as file:
                file.seek(self._starts[name])
                file.write(values.data)
        except OSError as error:
            raise self._cannot_write(error) from error
        del self._missing[name]

    def add_document(self, name: str, content: bytes) -> None:
        """A small file to appear beside the shards, before the index does."""
        self._documents[name] = content

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            self._remove_partial()

    def _complete(self) -> None:
        if self._missing:
            problems = [
                Problem("missing", self._files[name], name, "nothing written", f"{tensor.dtype} {tensor.shape}")
                for name, tensor in self._missing.items()
            ]
            raise refusal(self._folder, problems)
        try:
            for name, content in (*self._documents.items(), (INDEX_FILE, self._index)):
                self._partial(name).write_bytes(content)
            for name in (*(shard.name for shard in self._shards), *self._documents, INDEX_FILE):
                self._partial(name).replace(self._folder / name)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _partial(self, name: str) -> Path:
        return self._folder / (name + PARTIAL)

    def _remove_partial(self) -> None:
        """Also what an earlier run that was killed has left."""
        for path in self._folder.glob(f"*{PARTIAL}"):
            path.unlink()

    def _cannot_write(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._folder}: cannot be written: {error.strerror}")


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def write_checkpoint(
    folder: str | os.PathLike[str],
    config: NoteConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shards: int | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    indexer_rope_layout: RopeLayout | None = "leading",
    indexer_rope_converted_from: RopeLayout | None = None,
    documents: Mapping[str, bytes] | None = None,
) -> None:
    """Write `tensors`, which must be exactly those of the config, in any order, in the stored dtypes.

    `documents`: small files beside them, by name.

    Streaming: with a generator, one tensor is in memory at a time. Either the folder becomes complete, or no index
    appears in it. Raises: CheckpointError, ConfigError.
    """
    with CheckpointWriter(
        folder,
        config,
        shards=shards,
        max_shard_bytes=max_shard_bytes,
        indexer_rope_layout=indexer_rope_layout,
        indexer_rope_converted_from=indexer_rope_converted_from,
    ) as writer:
        for name, content in (documents or {}).items():
            writer.add_document(name, content)
        for name, tensor in tensors:
            writer.add(name, tensor)
