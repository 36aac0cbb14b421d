"""Synthetic checkpoints for any configuration: the same seed gives the same bytes on every machine.

    raw    64-bit integers of numpy's PCG64, seeded for each tensor by sha256(seed, name)
    bell   the sum of the four 16-bit parts of one raw integer, less its mean: nearly normal, at most 3.46 deviations
    value  bell (exact in float32) times the scale of its row and of its column, then rounded to the stored dtype

There is no library function in it whose last bit could differ, and any tensor can be made alone. The scales, which
decide what the model does, are in `recipes`.
Source: text_model specification, section 20; checkpoint specification, section 9, rule 8.
"""

import os
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference.checkpoint.expected import ExpectedTensor, expected_tensors
from reference.checkpoint.recipes import (
    Normal,
    NormWeight,
    Recipe,
    TextRecipes,
    channel_gains,
    seed_of,
)
from reference.checkpoint.recipes_towers import tower_recipe
from reference.checkpoint.synthetic_chat import chat_documents
from reference.checkpoint.write import DEFAULT_SHARD_BYTES, write_checkpoint
from reference.config import NoteConfig
from reference.layers.indexer import RopeLayout

# Four uniform 16-bit integers: mean of the sum, and its standard deviation sqrt(4 · (2^32 - 1) / 12).
BELL_MEAN, BELL_DEVIATION = 131070, 37837.227
# Values made at a time: small enough for the processor's cache, which makes it eight times faster.
BLOCK = 2**16


def synthetic_tensor(tensor: ExpectedTensor, config: NoteConfig, seed: int = 0) -> Tensor:
    """The values of one expected tensor of `config`, in its stored dtype. 130 to 350 MB/s on one EPYC core."""
    raw = np.random.PCG64(seed_of(seed, tensor.name))
    recipe = _recipe(tensor, config, seed)
    if isinstance(recipe, Normal):
        return _bell_shaped(raw, tensor, recipe)
    if isinstance(recipe, NormWeight):
        return torch.from_numpy(_norm_weight(raw, tensor.numel, recipe)).to(tensor.dtype)
    return torch.from_numpy(_router_bias(raw, tensor.numel)).to(tensor.dtype)


def synthetic_tensors(config: NoteConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint in reading order, made when asked for."""
    for tensor in expected_tensors(config).values():
        yield tensor.name, synthetic_tensor(tensor, config, seed)


def write_synthetic(
    folder: str | os.PathLike[str],
    config: NoteConfig,
    seed: int = 0,
    *,
    shards: int | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    indexer_rope_layout: RopeLayout | None = "leading",
) -> None:
    """Write a complete checkpoint, one tensor in memory at a time, and the files of `synthetic_chat` beside it.

    Raises: CheckpointError, ConfigError.
    """
    write_checkpoint(
        folder,
        config,
        synthetic_tensors(config, seed),
        shards=shards,
        max_shard_bytes=max_shard_bytes,
        indexer_rope_layout=indexer_rope_layout,
        documents=chat_documents(config),
    )


def _recipe(tensor: ExpectedTensor, config: NoteConfig, seed: int) -> Recipe:
    if tensor.bucket in ("language", "mtp"):
        return TextRecipes(config.text, seed).of(tensor.name)
    return tower_recipe(tensor, config, seed, channel_gains(seed, config.text.hidden_size))


def _bell_shaped(raw: np.random.PCG64, tensor: ExpectedTensor, recipe: Normal) -> Tensor:
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    matrix = values.view(len(values), -1)
    rows, width = matrix.shape
    scale_rows = np.broadcast_to(np.float32(np.asarray(recipe.rows) / BELL_DEVIATION), (rows,))
    scale_columns = np.broadcast_to(np.float32(recipe.columns), (width,))
    step = max(1, BLOCK // width)
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        bell = _bell(raw, (block.stop - start) * width).reshape(-1, width)
        scaled = bell * scale_rows[block, None] * scale_columns
        matrix[block] = torch.from_numpy(scaled)
    return values


def _bell(raw: np.random.PCG64, count: int) -> NDArray[np.float32]:
    """Integers of mean 0. The four parts are added in pairs, two sums in one 64-bit word at a time."""
    words = raw.random_raw(count)
    pairs = (words & np.uint64(0x0000FFFF0000FFFF)) + ((words >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF))
    sums = (pairs + (pairs >> np.uint64(32))) & np.uint64(0x3FFFF)
    return sums.astype(np.int32).astype(np.float32) - np.float32(BELL_MEAN)


def _norm_weight(raw: np.random.PCG64, width: int, recipe: NormWeight) -> NDArray[np.float32]:
    """mean · (0.5 + (rank + 0.5) / width), with the two lanes of a pair half the range apart."""
    half = width // 2
    ranks = np.full(width, width - 1)
    low = raw.random_raw(half).argsort(kind="stable")
    is_first_high = (raw.random_raw(half) & np.uint64(1)).astype(np.int64)
    ranks[: 2 * half : 2] = low + half * is_first_high
    ranks[1 : 2 * half : 2] = low + half * (1 - is_first_high)
    weights = (width + 2 * ranks + 1) * (recipe.mean / (2 * width))
    return (weights if recipe.gains is None else weights / recipe.gains).astype(np.float32)


def _router_bias(raw: np.random.PCG64, experts: int) -> NDArray[np.float32]:
    """6.8 + 0.25 · (rank + 0.5) / experts: neighbours are apart in float32, and fall together in bfloat16."""
    ranks = raw.random_raw(experts).argsort(kind="stable")
    return ((272 * experts + 10 * ranks + 5) * (1 / (40 * experts))).astype(np.float32)
