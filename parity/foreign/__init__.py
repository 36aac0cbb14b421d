"""Readers of the dumps of other tools, and the mapping that each one starts from.

A reader turns a folder or a file into a `ForeignDump`: the tensors under the names that the tool gave them, lazily
loaded. What the names mean is said by a mapping (`parity.mapping`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from parity.foreign.dump import ForeignDump
from parity.foreign.llama_cpp import is_llama_cpp, read_llama_cpp
from parity.foreign.msprobe import is_msprobe, read_msprobe
from parity.foreign.native import is_native, read_native
from parity.foreign.plain import is_plain, read_plain
from parity.foreign.sglang import is_sglang, read_sglang
from parity.manifest import DumpError

# Format, how to tell it, how to read it. Our own manifest goes before the safetensors files that it describes.
FORMATS: tuple[tuple[str, Callable[[Path], bool], Callable[[Path], ForeignDump]], ...] = (
    ("native", is_native, read_native),
    ("msprobe", is_msprobe, read_msprobe),
    ("sglang", is_sglang, read_sglang),
    ("plain", is_plain, read_plain),
    ("llama_cpp", is_llama_cpp, read_llama_cpp),
)


def format_of(path: str | os.PathLike[str]) -> str:
    """Which tool's dump this is. Raises: DumpError if it is none that is known."""
    where = Path(path)
    for name, is_this, _ in FORMATS:
        if is_this(where):
            return name
    raise DumpError(
        f"{where}: not a dump that is known; expected a folder with manifest.json, msProbe's dump.json, SGLang's "
        f"name=….pt files or .safetensors files, or a text file printed by llama.cpp's eval-callback"
    )


def read_foreign(path: str | os.PathLike[str]) -> ForeignDump:
    """Read a dump by its format. Raises: DumpError."""
    name = format_of(path)
    return next(read for known, _, read in FORMATS if known == name)(Path(path))
