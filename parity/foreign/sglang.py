"""SGLang's dumper: a folder of `.pt` files whose names are `key=value` pairs joined by `___`.

    step=0___rank=0___dump_index=7___name=layer_start__hidden_states___layer_id=3.pt
    forward_pass_id=1___rank=0___name=layer_start__hidden_states___dump_index=7___layer_id=3.pt     (older)

A file holds the tensor itself (older) or {"value": tensor, "meta": …}. `name` is what the caller of `dumper.dump`
wrote; with a `layer_id` it becomes `layers.{id}.{name}`. Tensors of the hooks on all modules are called
`non_intrusive__{module}.output` and lose that prefix. One rank is read: the first.
Written from the file names that SGLang's public source builds; other keys (`recompute_status`, parallel ranks) are
passed over. Its other dumper, which writes `Pass00000.pt` with a dict of tensors, is not read.
"""

import re
from pathlib import Path

from parity.foreign.dump import ForeignDump, ForeignTensor, plain_files, read_torch_file
from parity.manifest import DumpError

_HOOKED = "non_intrusive__"


def is_sglang(path: Path) -> bool:
    return path.is_dir() and next(path.glob("*name=*.pt"), None) is not None


def read_sglang(path: Path) -> ForeignDump:
    """Raises: DumpError for a file that is no tensor file, or a name without the pairs."""
    files = [(_tags(file), file) for file in plain_files(path, ".pt")]
    rank = min((_number(tags, "rank", file) for tags, file in files), default=0)
    # The dump index, not the file name, is the order of computation.
    files.sort(key=lambda pair: _number(pair[0], "dump_index", pair[1]))
    steps = [_number(tags, "step" if "step" in tags else "forward_pass_id", file) for tags, file in files]
    forwards = {step: number for number, step in enumerate(sorted(set(steps)))}
    tensors: list[ForeignTensor] = []
    other_ranks = not_tensors = 0
    for (tags, file), step in zip(files, steps, strict=True):
        if _number(tags, "rank", file) != rank:
            other_ranks += 1
        elif tensor := read_torch_file(file, _name(tags), forwards[step]):
            tensors.append(tensor)
        else:
            not_tensors += 1
    notes = [f"{other_ranks} files of other ranks than {rank}"] * bool(other_ranks)
    notes += [f"{not_tensors} files hold no tensor"] * bool(not_tensors)
    return ForeignDump("SGLang dumper", "sglang", tuple(tensors), notes=tuple(notes))


def _tags(file: Path) -> dict[str, str]:
    tags = dict(part.partition("=")[::2] for part in file.stem.split("___"))
    if not tags.get("name"):
        raise DumpError(f"{file}: expected a name such as step=0___rank=0___dump_index=1___name=embeddings.pt")
    return tags


def _number(tags: dict[str, str], key: str, file: Path) -> int:
    text = tags.get(key, "0")
    if text == "None":
        return 0
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise DumpError(f"{file}: {key}={text[:40]}, expected a number")
    return int(text)


def _name(tags: dict[str, str]) -> str:
    name, layer = tags["name"], tags.get("layer_id", "")
    if name.startswith(_HOOKED):
        hooked = name.removeprefix(_HOOKED)
        return f"{hooked}.0" if hooked.endswith(".output") else hooked
    return f"layers.{layer}.{name}" if re.fullmatch(r"[0-9]{1,9}", layer) else name
