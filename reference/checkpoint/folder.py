"""A checkpoint folder on disk: verified as a whole when it is opened, then read one memory-mapped tensor at a time.

Opening reads `config.json`, the index and all headers (5 MB for the release) and refuses with the list of all
problems; no byte of a tensor is read before. What opens is complete: no tensor is missing, cut short, of another shape
or dtype. Parts that the caller cannot use yet are deferred by bucket; they are verified and counted like the rest.
Source: checkpoint specification, section 8.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference.checkpoint.expected import BUCKETS, Bucket, ExpectedTensor, expected_tensors, too_many_draft_layers
from reference.checkpoint.index import Index, indexer_rope_layout, read_index
from reference.checkpoint.problems import refusal
from reference.checkpoint.verify import verify
from reference.config import NoteConfig
from reference.errors import CheckpointError
from reference.layers.indexer import RopeLayout
from reference.numerics import Numerics

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class CheckpointFolder:
    """An opened folder. `tensors` lists what it holds, in reading order; `index` says in which file.

    `indexer_rope_layout` says which lanes of an index head are rotated. `buckets` are the parts that may be read.
    """

    path: Path
    config: NoteConfig
    tensors: dict[str, ExpectedTensor]
    index: Index
    indexer_rope_layout: RopeLayout
    buckets: tuple[Bucket, ...]

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        numerics: Numerics | None = None,
        buckets: Iterable[Bucket] = BUCKETS,
    ) -> CheckpointFolder:
        """Verify a folder in the released layout.

        `numerics.missing_indexer_rope_layout` says what to do where the index has no layout. Buckets that are not in
        `buckets` are deferred: verified, counted, not read.
        Raises: ConfigError for the config; CheckpointError that lists every problem by file, tensor, found, expected.
        """
        folder = Path(path)
        index, problems = read_index(folder)
        config = NoteConfig.from_json(folder / CONFIG_FILE)
        _refuse_missing_draft_layers(folder, config, index)
        layout, layout_problems = indexer_rope_layout(index.metadata, numerics or Numerics())
        expected = expected_tensors(config)
        _, found = verify(folder, config, expected, index)
        problems += layout_problems + found
        if problems:
            raise refusal(folder, problems)
        return cls(folder, config, expected, index, layout, tuple(bucket for bucket in BUCKETS if bucket in {*buckets}))

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the shards."""
        return tuple(sorted(set(self.index.files.values())))

    @property
    def deferred(self) -> dict[Bucket, int]:
        """How many tensors of each bucket are there and not to be read."""
        counts = Counter(tensor.bucket for tensor in self.tensors.values())
        return {bucket: counts[bucket] for bucket in BUCKETS if bucket not in self.buckets and counts[bucket]}

    def tensor(self, name: str, rows: Sequence[int] | None = None) -> Tensor:
        """One tensor in its stored dtype; with `rows`, only those of its first dim, in that order (experts, say).

        Without `rows` it is mapped from the file: pages are read when touched, and belong to the file's cache.
        Raises: CheckpointError for a name that is not there, is deferred, or whose file has changed since.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        bucket = self.tensors[name].bucket
        if bucket not in self.buckets:
            raise CheckpointError(
                f"{self.path}: {name!r} belongs to the bucket {bucket!r}, which was deferred: open the folder with it"
            )
        file = self.path / self.index.files[name]
        try:
            with safe_open(file, framework="pt") as shard:
                stored = shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: {name!r} was there when the folder was opened: {error}") from error
        return stored if rows is None else stored[list(rows)]


def _refuse_missing_draft_layers(folder: Path, config: NoteConfig, index: Index) -> None:
    """`num_nextn_predict_layers` counts layers with weights, not how deep one drafts."""
    text = config.text
    if text.num_nextn_predict_layers <= 1:
        return
    numbers = {name.split(".")[2] for name in index.files if name.startswith("model.layers.") and name.count(".") > 2}
    held = sum(number.isdecimal() and int(number[:9]) >= text.num_hidden_layers for number in numbers)
    raise CheckpointError(f"{folder / CONFIG_FILE}: {too_many_draft_layers(text, held, 'the index')}")
