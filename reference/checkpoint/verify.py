"""Compares a folder's index and headers with what its configuration promises. Reads no tensor bytes.

One exception: a correction bias stored as bfloat16 is already refused, and is then read to say what the rounding cost.
Source: checkpoint specification, section 8; the numbers in comments are its refusals.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from reference.checkpoint.accounting import DTYPE_NAMES
from reference.checkpoint.expected import ExpectedTensor
from reference.checkpoint.header import HeaderEntry, read_header
from reference.checkpoint.index import INDEX_FILE, Index
from reference.checkpoint.problems import Problem
from reference.config import NoteConfig

_NO_FP8 = "FP8 checkpoints are not supported yet"


def verify(
    folder: Path, config: NoteConfig, expected: Mapping[str, ExpectedTensor], index: Index
) -> tuple[dict[str, HeaderEntry], list[Problem]]:
    """The header entry of every tensor, and everything that is wrong with the folder."""
    problems = _names(config, expected, index)
    mapped: dict[str, list[str]] = {}
    for name, file in index.files.items():
        mapped.setdefault(file, []).append(name)
    held: dict[str, HeaderEntry] = {}
    holder: dict[str, str] = {}
    for file, names in sorted(mapped.items()):
        entries, found = read_header(folder / file)
        problems += [_with_first_tensor(problem, names, expected) for problem in found]
        if not found:
            problems += _membership(file, entries, names)
        for name, entry in entries.items():
            if name in holder:
                problems.append(Problem("duplicate", file, name, f"it also in {holder[name]}", "it in one file"))
            holder.setdefault(name, file)
            if name in expected:
                problems += _shape_and_dtype(folder / file, entry, expected[name], truncated=bool(found))
        held |= entries
    problems += _strays(folder, mapped)
    if not problems:
        problems += _total_size(index, sum(entry.nbytes for entry in held.values()))
    return held, problems


def _names(config: NoteConfig, expected: Mapping[str, ExpectedTensor], index: Index) -> list[Problem]:
    """1, 2, 9, 11, 13: the names of the index against those of the config."""
    problems = []
    for name in expected.keys() - index.files.keys():
        tensor = expected[name]
        right = f"{DTYPE_NAMES[tensor.dtype]} {tensor.shape}"
        problems.append(Problem("missing", INDEX_FILE, name, "no such name", right))
    for name in index.files.keys() - expected.keys():
        weight = name.removesuffix("_scale_inv").removesuffix("_scale")
        if weight != name and weight in expected:
            found = f"a scale for the {DTYPE_NAMES[expected[weight].dtype]} tensor {weight}"
            problems.append(Problem("scale without fp8 weight", index.files[name], name, found, f"none; {_NO_FP8}"))
        else:
            right = _what_is_right(config, name)
            problems.append(Problem("unexpected", index.files[name], name, "a name that is not the model's", right))
    return sorted(problems, key=lambda problem: problem.tensor)


def _what_is_right(config: NoteConfig, name: str) -> str:
    text = config.text
    parts = name.split(".")
    if parts[:2] == ["model", "layers"] and len(parts) > 3 and parts[2].isdecimal():
        layer = int(parts[2][:9])
        if layer >= text.num_hidden_layers + text.num_nextn_predict_layers:
            draft = (
                f" and draft layer {text.num_hidden_layers}" if text.num_nextn_predict_layers else ", no draft layer"
            )
            return f"layers 0 to {text.num_hidden_layers - 1}{draft}"
        if "indexer" in parts and not text.is_full(layer):
            return f"no indexer, since layer {layer} is sliding"
        if "experts" in parts:
            return f"experts 0 to {text.n_routed_experts - 1}" if text.is_moe(layer) else f"layer {layer} to be dense"
    for prefix, tower, section in (
        ("vision_encoder.", config.vision, "vision_config"),
        ("audio_encoder.", config.audio, "audio_config"),
    ):
        if name.startswith(prefix) and tower is None:
            return f"none, since the config has no {section}"
    return "none"


def _with_first_tensor(problem: Problem, names: list[str], expected: Mapping[str, ExpectedTensor]) -> Problem:
    """A file that cannot be read at all: name the first tensor it takes along, and the bytes that its tensors need."""
    if problem.tensor:
        return problem
    mapped = set(names)
    known = [name for name in expected if name in mapped] or names
    needed = sum(expected[name].nbytes for name in known if name in expected)
    right = f"{problem.expected}; {len(known)} tensors of {needed} bytes belong into this file"
    return Problem(problem.kind, problem.file, known[0], problem.found, right)


def _membership(file: str, entries: Mapping[str, HeaderEntry], names: list[str]) -> list[Problem]:
    """1 and 7: the file holds exactly the tensors that the index looks for in it."""
    missing = [Problem("missing", file, name, "no such tensor in the file", "it there") for name in names]
    missing = [problem for problem in missing if problem.tensor not in entries]
    extra = sorted(entries.keys() - set(names))
    return missing + [
        Problem("index disagrees", file, name, "it in this file", "what the index says") for name in extra
    ]


def _shape_and_dtype(path: Path, entry: HeaderEntry, expected: ExpectedTensor, truncated: bool) -> list[Problem]:
    """4 and 5."""
    problems = []
    if entry.shape != expected.shape:
        problems.append(Problem("wrong shape", path.name, entry.name, str(entry.shape), str(expected.shape)))
    right = DTYPE_NAMES[expected.dtype]
    if entry.dtype != right:
        found = entry.dtype
        if found == "BF16" and not truncated:
            found = f"BF16, of whose {prod(entry.shape)} values {_distinct_values(path, entry)} are distinct"
        if found.startswith("F8"):
            right += f"; {_NO_FP8}"
        problems.append(Problem("wrong dtype", path.name, entry.name, found, right))
    return problems


def _distinct_values(path: Path, entry: HeaderEntry) -> int:
    """How many of the router's biases the rounding to bfloat16 left apart."""
    with path.open("rb") as file:
        file.seek(entry.start)
        return len(np.unique(np.frombuffer(file.read(entry.nbytes), dtype="<u2")))


def _strays(folder: Path, mapped: Mapping[str, list[str]]) -> list[Problem]:
    """7: a shard that the index does not know is left from something else, and the folder from two things."""
    strays = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in mapped)
    return [Problem("index disagrees", name, "", "a file the index does not mention", "none") for name in strays]


def _total_size(index: Index, held: int) -> list[Problem]:
    """8."""
    total = index.metadata.get("total_size")
    if type(total) is int and total == held:
        return []
    return [Problem("total size", INDEX_FILE, "", f"metadata.total_size {total!r:.80}", f"{held}, the tensors' bytes")]
