"""Fills modules from a checkpoint folder: a whole text model, a part of it, or one layer after the other.

Module parameter names are checkpoint names. Everything is verified before the first parameter is written; then each
tensor is mapped, converted into memory of its own, and put into the module, so there is never more than one tensor
above the module's own size. Build the module under `torch.device("meta")`, or its initial values count as well.
Source: checkpoint specification, section 8.
"""

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from reference.checkpoint.expected import Bucket
from reference.checkpoint.folder import CheckpointFolder
from reference.checkpoint.problems import Problem, refusal
from reference.checkpoint.selection import Selection, Source
from reference.numerics import Numerics, at_least_float32
from reference.text import TextModel

# In values; below, a fraction of a page more or less would matter and a hole does not.
OWN_PAGES_FROM = 2**17
_TEXT: tuple[Bucket, ...] = ("language", "mtp")


def load_into(
    module: nn.Module,
    folder: CheckpointFolder,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    scan_non_finite: bool = False,
    selection: Selection | None = None,
) -> None:
    """Replace every parameter and persistent buffer of `module` by the checkpoint's tensor `prefix` + its name.

    `dtype` is what the values are converted to (None: as stored); what is stored as float32, the routers' correction
    biases, stays at least float32. `selection` renumbers layers and experts. `scan_non_finite` first reads everything
    once to refuse NaN and infinity.
    Raises: CheckpointError that lists every name the checkpoint lacks or has in another shape, or every tensor that is
    not finite. The module is then untouched.
    """
    slots = module.state_dict(keep_vars=True)
    whole = selection or Selection(folder.config)
    sources = {name: whole.source(prefix + name) for name in slots}
    problems = [problem for name in slots for problem in _misfits(folder, prefix + name, slots[name], sources[name])]
    if scan_non_finite and not problems:
        problems = [problem for source in sources.values() for problem in _non_finite(folder, source)]
    if problems:
        raise refusal(folder.path, problems)
    for name, source in sources.items():
        stored = folder.tensor(source.name, source.rows)
        wanted = stored.dtype if dtype is None else dtype
        if stored.dtype == torch.float32:
            # 256 biases between 6.8 and 7.05 are 9 values in bfloat16: the routing would be another one.
            wanted = at_least_float32(wanted)
        _put(module, name, _copied(stored, wanted, torch.device(device)))


def _misfits(folder: CheckpointFolder, name: str, slot: Tensor, source: Source) -> list[Problem]:
    held = folder.tensors.get(source.name)
    if held is None:
        return [Problem("missing", "", source.name, f"only the module's {name}", "a tensor of that name")]
    file = folder.index.files[source.name]
    if held.bucket not in folder.buckets:
        return [Problem("deferred", file, source.name, f"bucket {held.bucket!r} deferred", "it among `buckets`")]
    shape = held.shape if source.rows is None else (len(source.rows), *held.shape[1:])
    if tuple(slot.shape) != shape:
        found = f"{tuple(slot.shape)} in the module"
        return [Problem("wrong shape", file, source.name, found, f"{shape} as in the checkpoint")]
    return []


def _non_finite(folder: CheckpointFolder, source: Source) -> list[Problem]:
    values = folder.tensor(source.name, source.rows)
    count = int(values.numel() - values.isfinite().sum())
    if not count:
        return []
    found = f"{count} of {values.numel()} values NaN or infinite"
    return [Problem("non-finite", folder.index.files[source.name], source.name, found, "finite weights")]


def _copied(stored: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy whose memory goes back to the system when it is dropped.

    The C library keeps the holes that dropped layers leave and cannot refill them with equal (aligned) tensors:
    loading layer after layer would take twice the memory. So large tensors get pages of their own.
    """
    if device.type != "cpu" or stored.numel() < OWN_PAGES_FROM or os.name != "posix":
        return stored.to(device=device, dtype=dtype, copy=True)
    pages = mmap.mmap(-1, stored.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(stored.shape).copy_(stored)


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    before = getattr(owner, leaf)
    if isinstance(before, nn.Parameter):
        value = nn.Parameter(value, requires_grad=before.requires_grad)
    setattr(owner, leaf, value)


def empty_text_model(
    folder: CheckpointFolder, numerics: Numerics | None = None, selection: Selection | None = None
) -> TextModel:
    """The folder's text model without weights (on the meta device), for `load_layer` or `load_into`."""
    config = selection.config if selection else folder.config
    with torch.device("meta"):
        return TextModel(config.text, numerics, folder.indexer_rope_layout)


def load_text_model(
    path: str | os.PathLike[str],
    numerics: Numerics | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    device: str | torch.device = "cpu",
    layers: Sequence[int] | None = None,
    experts: Sequence[int] | None = None,
    scan_non_finite: bool = False,
) -> TextModel:
    """Open a folder and build its text model, draft layer included; the towers are verified and left alone.

    `layers` and `experts` keep only those, renumbered from 0: the model is then the one of the slice.
    Raises: ConfigError, CheckpointError.
    """
    folder = CheckpointFolder.open(path, numerics, _TEXT)
    selection = Selection(folder.config, layers, experts)
    model = empty_text_model(folder, numerics, selection)
    load_into(model, folder, "", dtype, device, scan_non_finite, selection)
    return model


def load_layer(
    model: TextModel,
    folder: CheckpointFolder,
    layer: int,
    dtype: torch.dtype | None = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Fill one layer of a model that is larger than the memory, and return it; `drop_layer` gives it back.

    `layer` num_hidden_layers is the draft layer. Raises: CheckpointError.
    """
    module = model.model.layers[layer]
    load_into(module, folder, f"model.layers.{layer}.", dtype, device)
    return module


def drop_layer(model: TextModel, layer: int) -> None:
    """Free the weights of one layer."""
    model.model.layers[layer].to("meta")
