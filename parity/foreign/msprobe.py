"""msProbe (MindStudio Probe): `dump.json` beside `dump_tensor_data/`.

    {"task": "tensor", "level": "L0", "data": {
      "Module.model.layers.3.mlp.Dots3MLP.forward.0": {
        "input_args": [{"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": [6, 96], "Max": …, "Min": …,
                        "Mean": …, "Norm": …, "data_name": "Module.….forward.0.input.0.pt"}],
        "input_kwargs": {…}, "output": […]}}}

A name is the module's path, its class, the direction and how many times it was called before: that is the forward
pass. It becomes `model.layers.3.mlp.inputs.0` and `model.layers.3.mlp.output.0`. Backward passes, parameters and calls
of functions (`Functional.…`, `Torch.…`) are passed over. Where `task` is `statistics`, or a file is missing, the
numbers of `dump.json` are kept instead: the largest of |Max| and |Min|, Mean, and Norm over the root of the count.
Written from msProbe's public documentation. A path may be a rank's folder or a step's; steps are not joined.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parity.foreign.dump import ForeignDump, ForeignStatistics, ForeignTensor, read_torch_file
from parity.manifest import MAX_MANIFEST_BYTES, DumpError
from parity.statistics import MAX_ELEMENTS, Statistics
from reference.checkpoint.header import DTYPES, MAX_DIMS

DUMP_FILE, DATA_FOLDER = "dump.json", "dump_tensor_data"
_MODULE = re.compile(r"(?:Module|Cell)\.(?P<path>.+)\.[^.]+\.forward\.(?P<call>[0-9]{1,9})")
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}


def is_msprobe(path: Path) -> bool:
    return _folder(path) is not None


def read_msprobe(path: Path) -> ForeignDump:
    """Raises: DumpError for a `dump.json` that is none, and for a data name that leaves the folder."""
    folder = _folder(path)
    if folder is None:
        raise DumpError(f"{path}: has no {DUMP_FILE}")
    tensors: list[ForeignTensor] = []
    statistics: list[ForeignStatistics] = []
    passed_over = 0
    for entry_name, entry in _data(folder / DUMP_FILE).items():
        match = _MODULE.fullmatch(entry_name)
        if match is None or not isinstance(entry, Mapping):
            passed_over += 1
            continue
        for suffix, described in _arguments(entry):
            name, forward = f"{match['path']}.{suffix}", int(match["call"])
            tensor = _tensor(folder, described, name, forward)
            if tensor:
                tensors.append(tensor)
            elif known := _statistics(described, name, forward):
                statistics.append(known)
    notes = [f"{passed_over} entries that are no module's forward pass"] * bool(passed_over)
    return ForeignDump("msProbe", "msprobe", tuple(tensors), tuple(statistics), tuple(notes))


def _folder(path: Path) -> Path | None:
    """The folder of `dump.json`: the path, or the first rank below it."""
    candidates = [path, *sorted(path.glob("rank*")), *sorted(path.glob("step*/rank*"))] if path.is_dir() else []
    return next((folder for folder in candidates if (folder / DUMP_FILE).is_file()), None)


def _data(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DumpError(f"{path}: {path.stat().st_size} bytes; at most {MAX_MANIFEST_BYTES} are read")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path}: is not valid JSON: {error}") from error
    data = values.get("data") if isinstance(values, Mapping) else None
    if not isinstance(data, Mapping):
        raise DumpError(f"{path}: expected an object with an object 'data', as msProbe writes it")
    return data


def _arguments(entry: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """`inputs.0`, `inputs.hidden_states`, `output.0`, `output.0.1` (a tuple inside) and their descriptions."""
    for key, word in (("input_args", "inputs"), ("input_kwargs", "inputs"), ("output", "output")):
        values = entry.get(key)
        pairs = values.items() if isinstance(values, Mapping) else enumerate(_list(values))
        for name, value in pairs:
            if isinstance(value, Mapping):
                yield f"{word}.{name}", value
            else:
                for number, inner in enumerate(_list(value)):
                    if isinstance(inner, Mapping):
                        yield f"{word}.{name}.{number}", inner


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _tensor(folder: Path, described: Mapping[str, Any], name: str, forward: int) -> ForeignTensor | None:
    data_name = described.get("data_name")
    if not isinstance(data_name, str) or not data_name.endswith(".pt"):
        return None
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", data_name):
        raise DumpError(f"{folder / DUMP_FILE}: data_name {data_name[:200]!r}, expected the plain name of a file")
    path = folder / DATA_FOLDER / data_name
    if path.is_symlink():
        raise DumpError(f"{path}: is a link; a dump holds its own files")
    if not path.is_file():
        return None
    tensor = read_torch_file(path, name, forward)
    if tensor is not None and described.get("shape") != list(tensor.shape):
        raise DumpError(f"{path}: shape {list(tensor.shape)}, {DUMP_FILE} says {described.get('shape')!r:.80}")
    return tensor


def _statistics(described: Mapping[str, Any], name: str, forward: int) -> ForeignStatistics | None:
    shape, dtype = described.get("shape"), _DTYPES.get(str(described.get("dtype")))
    if not isinstance(shape, list) or not 0 < len(shape) <= MAX_DIMS or dtype is None:
        return None
    if not all(type(size) is int and 0 < size < MAX_ELEMENTS for size in shape) or math.prod(shape) >= MAX_ELEMENTS:
        raise DumpError(f"{name}: shape {shape!r:.80} in {DUMP_FILE}; no tensor is so large")
    count = math.prod(shape)
    ends = [abs(value) for key in ("Max", "Min") if (value := _number(described.get(key))) is not None]
    mean, norm = _number(described.get("Mean")), _number(described.get("Norm"))
    if norm is not None and norm < 0:
        return None
    known = Statistics(
        count=count,
        mean=mean,
        rms=norm / math.sqrt(count) if norm is not None else None,
        absmax=max(ends) if len(ends) == 2 else None,
    )
    return ForeignStatistics(name, forward, tuple(shape), dtype, known)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else None
