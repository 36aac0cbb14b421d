"""A folder of safetensors files: one file a forward pass, in the order of the file names; keys are the names.

What hooks on the modules of a PyTorch model write in ten lines. The ready mapping expects transformers' module names
with `.inputs.0` or `.output.0` behind: `model.layers.3.mlp.output.0`.
"""

from pathlib import Path

from parity.foreign.dump import ForeignDump, ForeignTensor, plain_files
from parity.manifest import refuse
from parity.trace_file import MappedTensor
from reference.checkpoint.header import DTYPES, read_header


def is_plain(path: Path) -> bool:
    return path.is_dir() and next(path.glob("*.safetensors"), None) is not None


def read_plain(path: Path) -> ForeignDump:
    """Raises: DumpError."""
    tensors = []
    for forward, file in enumerate(plain_files(path, ".safetensors")):
        header, problems = read_header(file)
        refuse(path, [str(problem) for problem in problems])
        for entry in header.values():
            dtype = DTYPES[entry.dtype]
            source = MappedTensor(file, entry.start, dtype, entry.shape)
            tensors.append(ForeignTensor(entry.name, forward, entry.shape, dtype, source))
    return ForeignDump("safetensors folder", "transformers", tuple(tensors))
