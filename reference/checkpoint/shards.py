"""Where each tensor of a checkpoint goes: which file, and which bytes of it.

Both follow from the tensors' sizes alone, so all headers can be written before the first tensor exists, and tensors can
arrive in any order. As in the release, the layers of the text are spread over all shards (from the largest tensor to
the smallest, each goes to the emptiest shard, the first of those that are equal), and each tower has a file of its own.
Source: checkpoint specification, section 1.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heapreplace

from reference.checkpoint.accounting import DTYPE_NAMES
from reference.checkpoint.expected import ExpectedTensor
from reference.errors import CheckpointError

TOWER_FILES = {"vision": "model-vision.safetensors", "audio": "model-audio.safetensors"}


@dataclass(frozen=True)
class Shard:
    """One file: its header as bytes, and where each tensor starts, counted from the beginning of the file."""

    name: str
    header: bytes
    starts: dict[str, int]
    size: int


def plan(tensors: Iterable[ExpectedTensor], max_shard_bytes: int, shards: int | None = None) -> list[Shard]:
    """Distribute tensors over as few shards as keep below `max_shard_bytes` each, or over exactly `shards`.

    A tensor larger than the limit gets a shard to itself. The towers' files are not limited.
    Raises: CheckpointError unless both numbers are positive.
    """
    if max_shard_bytes < 1 or (shards is not None and shards < 1):
        raise CheckpointError(f"at least one shard of at least one byte is needed, found {shards}, {max_shard_bytes}")
    held = [*tensors]
    text = [tensor for tensor in held if tensor.bucket not in TOWER_FILES]
    count = min(shards or -(-_nbytes(text) // max_shard_bytes), len(text))
    groups = _interleaved(text, count)
    while shards is None and any(len(group) > 1 and _nbytes(group) > max_shard_bytes for group in groups):
        count += 1
        groups = _interleaved(text, count)
    named = {f"model-{k:05}-of-{count:05}.safetensors": group for k, group in enumerate(groups, start=1)}
    for bucket, file in TOWER_FILES.items():
        named[file] = [tensor for tensor in held if tensor.bucket == bucket]
    return [_shard(name, group) for name, group in named.items() if group]


def _nbytes(tensors: list[ExpectedTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _interleaved(tensors: list[ExpectedTensor], count: int) -> list[list[ExpectedTensor]]:
    groups: list[list[ExpectedTensor]] = [[] for _ in range(count)]
    fill = [(0, number) for number in range(count)]
    heapify(fill)
    for tensor in sorted(tensors, key=lambda tensor: -tensor.nbytes):
        size, number = fill[0]
        groups[number].append(tensor)
        heapreplace(fill, (size + tensor.nbytes, number))
    return groups


def _shard(name: str, tensors: list[ExpectedTensor]) -> Shard:
    # float32 first: a mapped tensor must start at a multiple of its item size.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    entries, starts, position = {}, {}, 0
    for tensor in ordered:
        starts[tensor.name], end = position, position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {tensor: len(header) + start for tensor, start in starts.items()}
    return Shard(name, header, offsets, len(header) + position)
