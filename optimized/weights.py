"""The weights as the optimized path wants them, filled from the reference's state dict.

a_XD     rows [q_a Q | kv_a C | rope key R | gate H | index key J | index head weights I]: one product on an input
q_b_XQ   rows [queries H(N + R) | index queries I·J]: one product on a query latent
kv_b_YC  rows [key N | value V] a head, for the expanded form; w_uk_HNC and w_uv_HVC, for the absorbed one, are views
gate_up  rows [gate F | up F]; experts in stacks: see `moe`

Packing only moves values: every tensor of the state dict has a place in this storage, one table names them all, and
packing, unpacking and reloading go through it. So nothing else is derived from weights, and storage that a captured
graph reads can be filled again without another address. Source: text_model specification, sections 4, 6, 14 and 17.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from optimized.errors import NotSupportedError
from optimized.kernels.latent import AProjection, LatentWeights
from optimized.moe import PackedExperts, Place, empty_experts, expert_places
from reference.checkpoint.problems import Problem, refusal
from reference.config import TextConfig
from reference.numerics import Numerics

# D model  H heads  N nope dim  R rope dim  Q query latent  C kv latent  V value dim  F ffn width  W vocabulary
# I index heads  J index head dim  E experts  X, Y packed rows

State = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class New:
    """`new(*shape)` is storage without values."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's attention. `projection` says where the parts of `a_XD` lie; `latent` holds the norms."""

    projection: AProjection
    latent: LatentWeights
    a_XD: Tensor
    q_b_XQ: Tensor
    kv_b_YC: Tensor
    w_uk_HNC: Tensor
    w_uv_HVC: Tensor
    o_DX: Tensor


@dataclass(frozen=True)
class DenseWeights:
    """SwiGLU: gate_up_XD [2F, D], gate rows first; down_DF."""

    gate_up_XD: Tensor
    down_DF: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer; either `dense` or `experts` is None."""

    input_norm_D: Tensor
    attention: AttentionWeights
    post_norm_D: Tensor
    dense: DenseWeights | None
    experts: PackedExperts | None


@dataclass(frozen=True)
class DraftWeights:
    """The draft layer with an embedding table of its own; eh_X2D [D, 2D] takes [embedding | hidden state]."""

    embeddings_WD: Tensor
    enorm_D: Tensor
    hnorm_D: Tensor
    eh_X2D: Tensor
    layer: LayerWeights
    norm_D: Tensor


@dataclass(frozen=True)
class PackedText:
    """All weights of the text model on one device, in one dtype but for the routers' biases (at least float32)."""

    embeddings_WD: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_D: Tensor
    head_WD: Tensor
    draft: DraftWeights | None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for place in text_places(self).values() for piece in place.pieces)


def pack_text(
    state: State,
    config: TextConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    numerics: Numerics | None = None,
    indexer_rope_layout: Literal["leading", "tail"] = "leading",
) -> PackedText:
    """Copy a state dict (names as in `reference.text.TextModel`) into packed storage; no value changes.

    A tensor at a time, in any order: of an iterator that keeps none, no more than the storage and one source tensor
    exist at once.
    Raises: CheckpointError listing every tensor that is missing, unknown, given twice, without values, or of another
    shape or dtype (nothing is cast); NotSupportedError for what this code does not implement.
    """
    _refuse_unsupported(config, numerics, indexer_rope_layout)
    require_device(device)
    packed = empty_text(config, device, dtype)
    fill(text_places(packed), state)
    return packed


def require_device(device: torch.device | str) -> None:
    """Raises: NotSupportedError for CUDA where there is none, or a card beyond the last."""
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise NotSupportedError(f"device {device}: torch finds no CUDA device here")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise NotSupportedError(f"device {device}: torch finds {torch.cuda.device_count()} CUDA device(s) here")


def loaded_into(packed: PackedText, state: Mapping[str, Tensor]) -> PackedText:
    """Fill `packed` with other weights of the same model, at the same addresses. Returns `packed`.

    Raises: CheckpointError as `pack_text`, before any value has changed.
    """
    places = text_places(packed)
    inspection = _Inspection(places)
    for name, tensor in state.items():
        inspection.see(name, tensor)
    inspection.finish()
    fill(places, state)
    return packed


def unpack_text(packed: PackedText) -> dict[str, Tensor]:
    """The state dict that was packed, bit for bit, in tensors of its own."""
    return {name: torch.cat(place.pieces, place.dim) for name, place in text_places(packed).items()}


def empty_text(config: TextConfig, device: torch.device | str, dtype: torch.dtype) -> PackedText:
    """Storage without values, of the sizes of `config`."""

    new = New(torch.device(device), dtype)
    D, W = config.hidden_size, config.vocab_size
    draft = None
    if config.num_nextn_predict_layers:
        layer = _empty_layer(config, config.num_hidden_layers, new)
        draft = DraftWeights(new(W, D), new(D), new(D), new(D, 2 * D), layer, new(D))
    layers = tuple(_empty_layer(config, layer, new) for layer in range(config.num_hidden_layers))
    return PackedText(new(W, D), layers, new(D), new(W, D), draft)


def text_places(packed: PackedText) -> dict[str, Place]:
    """Where each tensor of the state dict lies in the storage: the one table of the layout."""
    places = {
        "model.embed_tokens.weight": whole(packed.embeddings_WD),
        "model.norm.weight": whole(packed.final_norm_D),
        "lm_head.weight": whole(packed.head_WD),
    }
    for index, layer in enumerate(packed.layers):
        places |= _layer_places(f"model.layers.{index}.", layer)
    if packed.draft is not None:
        prefix = f"model.layers.{len(packed.layers)}."
        places |= _layer_places(prefix, packed.draft.layer)
        places |= {
            "model.mtp.embed_tokens.weight": whole(packed.draft.embeddings_WD),
            f"{prefix}enorm.weight": whole(packed.draft.enorm_D),
            f"{prefix}hnorm.weight": whole(packed.draft.hnorm_D),
            f"{prefix}eh_proj.weight": whole(packed.draft.eh_X2D),
            f"{prefix}shared_head.norm.weight": whole(packed.draft.norm_D),
        }
    return places


def whole(view: Tensor) -> Place:
    """A tensor that lies in one piece."""
    return Place([view], 0)


def _layer_places(prefix: str, layer: LayerWeights) -> dict[str, Place]:
    places = {
        f"{prefix}input_layernorm.weight": whole(layer.input_norm_D),
        f"{prefix}post_attention_layernorm.weight": whole(layer.post_norm_D),
    }
    for name, view in _attention_views(layer.attention):
        places[f"{prefix}self_attn.{name}"] = whole(view)
    if layer.dense is not None:
        gate_FD, up_FD = layer.dense.gate_up_XD.chunk(2)
        for name, view in (("gate", gate_FD), ("up", up_FD), ("down", layer.dense.down_DF)):
            places[f"{prefix}mlp.{name}_proj.weight"] = whole(view)
    if layer.experts is not None:
        places |= {f"{prefix}mlp.{name}": place for name, place in expert_places(layer.experts).items()}
    return places


def _attention_views(weights: AttentionWeights) -> Iterator[tuple[str, Tensor]]:
    a, norms = weights.projection, weights.latent
    yield "q_a_proj.weight", weights.a_XD[: a.latent_at]
    yield "kv_a_proj_with_mqa.weight", weights.a_XD[a.latent_at : a.gate_at]
    yield "g_proj.weight", weights.a_XD[a.gate_at : a.index_key_at]
    yield "q_a_layernorm.weight", norms.query_norm_Q
    yield "kv_a_layernorm.weight", norms.latent_norm_C
    yield "k_rope_only_layernorm.weight", norms.rope_norm_R
    queries = len(weights.q_b_XQ) - a.index_heads * a.index_key
    yield "q_b_proj.weight", weights.q_b_XQ[:queries]
    yield "kv_b_proj.weight", weights.kv_b_YC
    yield "o_proj.weight", weights.o_DX
    if norms.index_norm_J is not None and norms.index_bias_J is not None:
        yield "indexer.wk.weight", weights.a_XD[a.index_key_at : a.index_heads_at]
        yield "indexer.weights_proj.weight", weights.a_XD[a.index_heads_at :]
        yield "indexer.wq_b.weight", weights.q_b_XQ[queries:]
        yield "indexer.k_norm.weight", norms.index_norm_J
        yield "indexer.k_norm.bias", norms.index_bias_J


def _empty_layer(config: TextConfig, layer: int, new: New) -> LayerWeights:
    D, F = config.hidden_size, config.intermediate_size
    dense, experts = None, None
    if config.is_moe(layer):
        experts = empty_experts(config, new.device, new.dtype)
    else:
        dense = DenseWeights(new(2 * F, D), new(D, F))
    return LayerWeights(new(D), _empty_attention(config, layer, new), new(D), dense, experts)


def _empty_attention(config: TextConfig, layer: int, new: New) -> AttentionWeights:
    geometry, D, is_full = config.geometry(layer), config.hidden_size, config.is_full(layer)
    H, Q, C = geometry.num_attention_heads, geometry.q_lora_rank, geometry.kv_lora_rank
    N, R, V = geometry.qk_nope_head_dim, geometry.qk_rope_head_dim, geometry.v_head_dim
    heads, J = (config.index_n_heads, config.index_head_dim) if is_full else (0, 0)
    projection = AProjection(Q, C, R, H, J, heads)
    is_rescaled = config.apply_mla_qkv_lora_rescale
    latent = LatentWeights(
        new(Q),
        new(C),
        new(R),
        query_scale=(D / Q) ** 0.5 if is_rescaled else 1.0,
        latent_scale=(D / C) ** 0.5 if is_rescaled else 1.0,
        index_norm_J=new(J) if is_full else None,
        index_bias_J=new(J) if is_full else None,
    )
    kv_b_YC = new(H * (N + V), C)
    w_uk_HNC, w_uv_HVC = kv_b_YC.unflatten(0, (H, N + V)).split((N, V), dim=1)
    q_b_XQ = new(H * (N + R) + heads * J, Q)
    return AttentionWeights(
        projection, latent, new(projection.width, D), q_b_XQ, kv_b_YC, w_uk_HNC, w_uv_HVC, new(D, H * V)
    )


@torch.no_grad()
def fill(places: Mapping[str, Place], state: State) -> None:
    """Copy `state` to its places until something is wrong; from there on only look for what else is.

    Raises: CheckpointError listing every tensor that is missing, unknown, given twice, or of another shape or dtype.
    """
    inspection = _Inspection(places)
    for name, tensor in state.items() if isinstance(state, Mapping) else state:
        inspection.see(name, tensor)
        if not inspection.problems:
            _copy(tensor, places[name])
        # The source may drop it before it makes the next one.
        del tensor
    inspection.finish()


def _copy(tensor: Tensor, place: Place) -> None:
    for piece, values in zip(place.pieces, tensor.chunk(len(place.pieces), place.dim), strict=True):
        piece.copy_(values)


class _Inspection:
    """Collects what is wrong with the tensors of a state dict, seen one by one."""

    def __init__(self, places: Mapping[str, Place]):
        self.places = places
        self.problems: list[Problem] = []
        self._missing = dict.fromkeys(places)

    def see(self, name: str, tensor: Tensor) -> None:
        found = _described(tensor.dtype, tensor.shape)
        if name not in self.places:
            self._add("unknown", name, found, "no tensor of this name")
            return
        if name not in self._missing:
            self._add("given twice", name, found, "one tensor of this name")
            return
        del self._missing[name]
        storage, expected = self.places[name].pieces[0], self._expected(name)
        if found != expected:
            self._add("wrong shape or dtype", name, found, expected)
        elif tensor.is_meta and not storage.is_meta:
            self._add("no values", name, "a tensor on the meta device", "one with values")

    def finish(self) -> None:
        """Raises: CheckpointError if anything was wrong or is missing."""
        for name in self._missing:
            self._add("missing", name, "nothing", self._expected(name))
        if self.problems:
            raise refusal("state dict", self.problems)

    def _expected(self, name: str) -> str:
        place = self.places[name]
        return _described(place.pieces[0].dtype, place.shape)

    def _add(self, kind: str, name: str, found: str, expected: str) -> None:
        self.problems.append(Problem(kind, "", name, found, expected))


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype} {tuple(shape)}"


def _refuse_unsupported(config: TextConfig, numerics: Numerics | None, rope_layout: str) -> None:
    facts = (
        ("attention_gate_type", config.full.gate_type, "headwise"),
        ("swa_attention_gate_type", config.sliding.gate_type, "headwise"),
        ("n_group", config.n_group, 1),
        ("indexer_rope_interleave", config.indexer_rope_interleave, True),
        ("indexer_rope_layout", rope_layout, "leading"),
        ("numerics", numerics or Numerics(), Numerics()),
    )
    problems = [f"{name} must be {wanted!r}, found {found!r}" for name, found, wanted in facts if found != wanted]
    if config.num_nextn_predict_layers > 1:
        problems.append(f"num_nextn_predict_layers must be 0 or 1, found {config.num_nextn_predict_layers}")
    if problems:
        raise NotSupportedError(f"the optimized path does not implement this; {'; '.join(problems)}")
