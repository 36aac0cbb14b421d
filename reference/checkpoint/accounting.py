"""Adds up the tensors of a checkpoint: by bucket, by dtype, and by class of layer with the evidence for each class.

The classes are read off the tensors, not off the config: layers with the same tensor names, shapes and dtypes are one
class, an indexer makes it full, experts make it MoE, `eh_proj` makes it the draft layer. The release has four.
Source: checkpoint specification, sections 2 and 3; text_model specification, section 3.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from reference.checkpoint.expected import BUCKETS, Bucket, ExpectedTensor, expected_tensors
from reference.config import NoteConfig, TextConfig

_LAYERS = "model.layers."


@dataclass(frozen=True)
class BucketTotal:
    """One part of the model: how many tensors, values and bytes it has."""

    bucket: Bucket
    tensors: int
    values: int
    nbytes: int


@dataclass(frozen=True)
class LayerClass:
    """Layers that have the same tensors. `letter` A to D is the specification's name, in order of first appearance.

    `kind` is one of `dense+full`, `dense+sliding`, `MoE+full`, `MoE+sliding`, `draft`; `evidence` explains
    `q_b_proj_rows` as heads times head width. `tensors` and `nbytes` are those of one layer.
    """

    letter: str
    kind: str
    layers: tuple[int, ...]
    tensors: int
    nbytes: int
    q_b_proj_rows: int
    evidence: str


@dataclass(frozen=True)
class Accounting:
    """The totals of a checkpoint. `dtypes` counts tensors by safetensors dtype name."""

    buckets: tuple[BucketTotal, ...]
    layer_classes: tuple[LayerClass, ...]
    dtypes: dict[str, int]

    @property
    def tensors(self) -> int:
        return sum(total.tensors for total in self.buckets)

    @property
    def nbytes(self) -> int:
        return sum(total.nbytes for total in self.buckets)


DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def account(config: NoteConfig, tensors: Iterable[ExpectedTensor] | None = None) -> Accounting:
    """Add up `tensors`; without them, those that the config promises. Raises: see `expected_tensors`."""
    held = [*(expected_tensors(config).values() if tensors is None else tensors)]
    return Accounting(
        tuple(_bucket_total(bucket, held) for bucket in BUCKETS),
        _layer_classes(config.text, held),
        dict(Counter(DTYPE_NAMES[tensor.dtype] for tensor in held)),
    )


def _bucket_total(bucket: Bucket, tensors: list[ExpectedTensor]) -> BucketTotal:
    part = [tensor for tensor in tensors if tensor.bucket == bucket]
    return BucketTotal(bucket, len(part), sum(t.numel for t in part), sum(t.nbytes for t in part))


def _layer_classes(text: TextConfig, tensors: list[ExpectedTensor]) -> tuple[LayerClass, ...]:
    by_layer: dict[int, dict[str, ExpectedTensor]] = {}
    for tensor in tensors:
        if tensor.name.startswith(_LAYERS):
            number, _, rest = tensor.name.removeprefix(_LAYERS).partition(".")
            by_layer.setdefault(int(number), {})[rest] = tensor
    groups: dict[frozenset[tuple[str, tuple[int, ...], torch.dtype]], list[int]] = {}
    for layer, held in sorted(by_layer.items()):
        signature = frozenset((rest, tensor.shape, tensor.dtype) for rest, tensor in held.items())
        groups.setdefault(signature, []).append(layer)
    return tuple(
        _layer_class(chr(ord("A") + number), text, layers, by_layer[layers[0]])
        for number, layers in enumerate(groups.values())
    )


def _layer_class(letter: str, text: TextConfig, layers: list[int], held: dict[str, ExpectedTensor]) -> LayerClass:
    is_full = any(rest.startswith("self_attn.indexer.") for rest in held)
    is_moe = any(rest.startswith("mlp.experts.") for rest in held)
    kind = "draft" if "eh_proj.weight" in held else f"{'MoE' if is_moe else 'dense'}+{'full' if is_full else 'sliding'}"
    rows = held["self_attn.q_b_proj.weight"].shape[0]
    return LayerClass(
        letter, kind, tuple(layers), len(held), sum(t.nbytes for t in held.values()), rows, _evidence(text, rows)
    )


def _evidence(text: TextConfig, rows: int) -> str:
    """Which geometry has that many query rows, and how they come about."""
    for name, geometry in (("full", text.full), ("sliding", text.sliding)):
        heads, nope, rope = geometry.num_attention_heads, geometry.qk_nope_head_dim, geometry.qk_rope_head_dim
        if rows == heads * (nope + rope):
            return f"q_b_proj has {rows} rows = {heads} heads x ({nope} nope + {rope} rope): {name} geometry"
    return f"q_b_proj has {rows} rows, which neither geometry explains"
