"""Reads `model.safetensors.index.json`: which file holds which tensor, and how the indexer's lanes lie.

Shards are interleaved (neighbouring tensors lie in different files), so every name is resolved through the index.
Source: checkpoint specification, sections 1 and 8; text_model specification, section 7.4.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.checkpoint.problems import Problem, refusal
from reference.errors import CheckpointError
from reference.layers.indexer import RopeLayout
from reference.numerics import Numerics

INDEX_FILE = "model.safetensors.index.json"
LAYOUTS: tuple[RopeLayout, ...] = ("leading", "tail")


@dataclass(frozen=True)
class Index:
    """`files` is the file of each tensor, by name; `metadata` is as it stands in the file."""

    files: Mapping[str, str]
    metadata: Mapping[str, Any]


def read_index(folder: Path) -> tuple[Index, list[Problem]]:
    """The index of a folder, without the entries that are problems.

    Raises: CheckpointError if there is no index (a download or conversion that was interrupted), or none to be read.
    """
    path = folder / INDEX_FILE
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "no such folder"
        raise CheckpointError(f"{folder}: {found}; name a checkpoint folder")
    if not path.is_file():
        files = sorted(entry.name for entry in folder.iterdir())
        raise CheckpointError(
            f"{folder}: has no {INDEX_FILE}, which is written last: an interrupted download or conversion, or not a "
            f"checkpoint; it holds {len(files)} files{''.join(f', {name}' for name in files[:5])}. Write it anew"
        )
    problems: list[Problem] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, count in Counter(name for name, _ in pairs).items():
            if count > 1:
                files = ", ".join(str(file) for key, file in pairs if key == name)
                problems.append(Problem("duplicate", INDEX_FILE, name, f"{count} times ({files:.200})", "once"))
        return dict(pairs)

    try:
        values = json.loads(path.read_bytes(), object_pairs_hook=object_of)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    weight_map, metadata = _objects(values)
    if weight_map is None or metadata is None:
        raise refusal(folder, [Problem("corrupt", INDEX_FILE, "", "other JSON", "objects weight_map and metadata")])
    shards: dict[str, str] = {}
    for name, file in weight_map.items():
        if _is_shard_name(file):
            shards[name] = file
        else:
            expected = "the name of a .safetensors file in the same folder"
            problems.append(Problem("unsafe file name", INDEX_FILE, name, f"{file!r:.200}", expected))
    return Index(shards, metadata), problems


def _objects(values: Any) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    parts = [values.get(key) for key in ("weight_map", "metadata")] if isinstance(values, dict) else [None, None]
    weight_map, metadata = (part if isinstance(part, dict) else None for part in parts)
    return weight_map, metadata


def _is_shard_name(file: Any) -> bool:
    """A path could point anywhere on the machine; a device or a hidden file is no shard."""
    if not isinstance(file, str) or not file.isprintable() or len(file) > 200:
        return False
    return file.endswith(".safetensors") and not file.startswith(".") and not set(file) & set("/\\:")


def indexer_rope_layout(metadata: Mapping[str, Any], numerics: Numerics) -> tuple[RopeLayout, list[Problem]]:
    """Which lanes of an index head are rotated. Where the index is silent, `numerics` decides or refuses."""
    layout, converted_from = metadata.get("indexer_rope_layout"), metadata.get("indexer_rope_converted_from")
    if layout in LAYOUTS:
        return layout, []
    if layout is None and converted_from is None and numerics.missing_indexer_rope_layout != "refuse":
        return numerics.missing_indexer_rope_layout, []
    expected = "'leading' or 'tail'"
    if layout is not None:
        found = f"indexer_rope_layout {layout!r:.80}"
    elif converted_from is not None:
        found = f"indexer_rope_converted_from {converted_from!r:.80} without indexer_rope_layout"
    else:
        found = "no indexer_rope_layout"
        expected += "; if you know it, say so with Numerics(missing_indexer_rope_layout=...)"
    return "leading", [Problem("indexer layout", INDEX_FILE, "", found, expected)]
