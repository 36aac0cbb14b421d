"""What a configuration amounts to, as one record: schedule, geometries, parameters, tensors and cache.

active parameters = those whose weights are read for one token: all but the embedding tables (one row is looked up) and
                    all but K of the E experts of a layer; the output head counts, once, with the language bucket
cache, context T  = layers · rows(T) · row bytes, rows(T) = T in full layers, min(T, window + drafts) in sliding ones

Tensors come from the checkpoint's accounting and rows from the reference's own cache, so the figures are those of the
code that runs. Source: text_model specification, sections 3, 4 and 13; checkpoint specification, sections 2 and 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reference.cache import RequestCache, SlidingCache
from reference.checkpoint.accounting import LayerClass, account
from reference.checkpoint.expected import Bucket, ExpectedTensor, expected_tensors
from reference.checkpoint.folder import CheckpointFolder
from reference.config import GateType, LayerKind, MlaGeometry, NoteConfig, TextConfig, released, tiny
from reference.errors import NoteError

DEFAULT_CONTEXTS = (4096, 32768, 131072, 524288)
CACHE_DTYPE, CACHE_VALUE_BYTES = "bfloat16", 2

# What one unit of work is in each bucket: active parameters are counted for one of these.
_UNITS: dict[Bucket, str] = {"language": "token", "mtp": "drafted token", "vision": "patch", "audio": "frame"}
_ROUTED_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EMBEDDING_TABLES = ("model.embed_tokens.weight", "model.mtp.embed_tokens.weight")
_ROUTER_BIASES = (".e_score_correction_bias", ".router_bias")


class InspectError(NoteError):
    """There is nothing to inspect under that name, or the model cannot be what was asked."""


@dataclass(frozen=True)
class Geometry:
    """One kind of latent attention. Sizes in values; `visible_keys_at_most` counts keys of one query."""

    layer_kind: LayerKind
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    v_head_dim: int
    softmax_scale: float
    rope_theta: float
    q_latent_scale: float
    kv_latent_scale: float
    latent_row_values: int
    attention_output_values: int
    gate_type: GateType
    gate_values: int
    index_heads: int
    index_head_dim: int
    visible_keys_at_most: int


@dataclass(frozen=True)
class DtypeShare:
    """The tensors of one dtype."""

    dtype: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Part:
    """One part of the checkpoint. `router_bias_values` are not among the `parameters`."""

    name: str
    parameters: int
    router_bias_values: int
    active_parameters: int
    active_per: str
    tensors: int
    bytes: int
    by_dtype: tuple[DtypeShare, ...]


@dataclass(frozen=True)
class CacheUse:
    """What the layers of one kind hold for a request of `context_tokens`. `rows` are those of one layer."""

    context_tokens: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class CacheKind:
    """One kind of cached rows. `rows_at_most` is None where every token of the request stays."""

    name: str
    layers: int
    row_values: int
    row_bytes_all_layers: int
    rows_at_most: int | None
    uses: tuple[CacheUse, ...]


@dataclass(frozen=True)
class CacheTotal:
    context_tokens: int
    bytes: int


@dataclass(frozen=True)
class CachePlan:
    """The cache of one request. `growth_bytes_per_token` is what each token adds once the rings are full."""

    dtype: str
    draft_tokens_in_flight: int
    growth_bytes_per_token: int
    kinds: tuple[CacheKind, ...]
    totals: tuple[CacheTotal, ...]


@dataclass(frozen=True)
class VerifiedFolder:
    """A checkpoint folder whose index and headers hold exactly the tensors that its configuration asks for."""

    path: str
    weight_files: int
    indexer_rope_layout: str


@dataclass(frozen=True)
class Inspection:
    """Everything that `note-parity inspect` says. Raises: ValueError if the parts do not add up to the totals."""

    name: str
    total_parameters: int
    active_parameters_per_token: int
    total_tensors: int
    total_bytes: int
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    max_context_tokens: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    dense_intermediate_size: int
    sliding_window_tokens: int
    index_topk_keys: int
    schedule: tuple[LayerClass, ...]
    geometries: tuple[Geometry, ...]
    parts: tuple[Part, ...]
    by_dtype: tuple[DtypeShare, ...]
    cache: CachePlan
    folder: VerifiedFolder | None

    def __post_init__(self) -> None:
        sums = (
            ("tensors", self.total_tensors, sum(part.tensors for part in self.parts)),
            ("bytes", self.total_bytes, sum(share.bytes for part in self.parts for share in part.by_dtype)),
            ("parameters", self.total_parameters, sum(part.parameters for part in self.parts)),
        )
        for unit, total, found in sums:
            if total != found:
                raise ValueError(f"inspection of {self.name}: the parts hold {found} {unit}, the model {total}")


def inspect_model(target: str, contexts: Sequence[int] | None = None, draft_tokens: int = 4) -> Inspection:
    """Inspect `released`, `tiny`, the path of a `config.json`, or a checkpoint folder, which is verified from headers.

    `contexts` are request lengths in tokens to plan the cache for; by default those of DEFAULT_CONTEXTS that the model
    allows. `draft_tokens` may be in flight, and lengthen the sliding rings.
    Raises: InspectError for a target that does not exist or a context longer than the model's, ConfigError,
    CheckpointError listing every problem of a folder.
    """
    config, folder = _resolve(target)
    text = config.text
    tensors = expected_tensors(config)
    accounting = account(config, tensors.values())
    parts = tuple(_part(bucket, tensors.values(), config) for bucket in _UNITS)
    return Inspection(
        name=target,
        total_parameters=sum(t.numel for t in tensors.values() if not t.name.endswith(_ROUTER_BIASES)),
        active_parameters_per_token=parts[0].active_parameters,
        total_tensors=accounting.tensors,
        total_bytes=accounting.nbytes,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_hidden_layers=text.num_hidden_layers,
        max_context_tokens=text.max_position_embeddings,
        n_routed_experts=text.n_routed_experts,
        n_shared_experts=text.n_shared_experts,
        num_experts_per_tok=text.num_experts_per_tok,
        moe_intermediate_size=text.moe_intermediate_size,
        dense_intermediate_size=text.intermediate_size,
        sliding_window_tokens=text.sliding_window_size,
        index_topk_keys=text.index_topk,
        schedule=accounting.layer_classes,
        geometries=(_geometry("full_attention", text), _geometry("sliding_attention", text)),
        parts=tuple(part for part in parts if part.tensors),
        by_dtype=_by_dtype(tensors.values()),
        cache=plan_cache(text, _allowed_contexts(contexts, text), draft_tokens),
        folder=folder,
    )


def plan_cache(text: TextConfig, contexts: Sequence[int], draft_tokens: int) -> CachePlan:
    """Rows and bytes of one request's cache in bfloat16, by kind of row, for each request length in `contexts`."""
    full = [layer for layer in range(text.num_hidden_layers) if text.is_full(layer)]
    sliding = [layer for layer in range(text.num_hidden_layers) if not text.is_full(layer)]

    def every_row(tokens: int | None) -> int | None:
        return tokens

    def ring_rows(tokens: int | None) -> int:
        ring = RequestCache(text, draft_tokens, tokens).layers[sliding[0]]
        assert isinstance(ring, SlidingCache)
        return ring.size

    def draft_rows(tokens: int | None) -> int:
        return RequestCache(text, draft_tokens, tokens).draft.size

    kinds = tuple(
        _cache_kind(name, layers, row_values, rows_of, contexts)
        for name, layers, row_values, rows_of in (
            ("full latents", len(full), text.full.latent_row, every_row),
            ("index keys", len(full), text.index_head_dim, every_row),
            ("sliding rings", len(sliding), text.sliding.latent_row, ring_rows),
            ("draft ring", text.num_nextn_predict_layers, text.sliding.latent_row, draft_rows),
        )
        if layers
    )
    return CachePlan(
        dtype=CACHE_DTYPE,
        draft_tokens_in_flight=draft_tokens,
        growth_bytes_per_token=sum(kind.row_bytes_all_layers for kind in kinds if kind.rows_at_most is None),
        kinds=kinds,
        totals=tuple(
            CacheTotal(tokens, sum(kind.uses[index].bytes for kind in kinds)) for index, tokens in enumerate(contexts)
        ),
    )


def _cache_kind(
    name: str, layers: int, row_values: int, rows_of: Callable[[int | None], int | None], contexts: Sequence[int]
) -> CacheKind:
    """`rows_of` gives the rows of one layer for a request length, and for None those of a request without end."""
    row_bytes = layers * row_values * CACHE_VALUE_BYTES
    uses = tuple(CacheUse(tokens, rows, rows * row_bytes) for tokens in contexts if (rows := rows_of(tokens)))
    return CacheKind(name, layers, row_values, row_bytes, rows_of(None), uses)


def _resolve(target: str) -> tuple[NoteConfig, VerifiedFolder | None]:
    if target in ("released", "tiny"):
        return (released() if target == "released" else tiny()), None
    path = Path(target)
    if path.is_dir():
        folder = CheckpointFolder.open(path)
        return folder.config, VerifiedFolder(target, len(set(folder.index.files.values())), folder.indexer_rope_layout)
    if not path.exists():
        raise InspectError(
            f"{target}: no such file or folder; expected 'released', 'tiny', a config.json or a checkpoint folder"
        )
    return NoteConfig.from_json(path), None


def _allowed_contexts(contexts: Sequence[int] | None, text: TextConfig) -> list[int]:
    longest = text.max_position_embeddings
    if not contexts:
        return [tokens for tokens in DEFAULT_CONTEXTS if tokens <= longest] or [longest]
    for tokens in contexts:
        if not 1 <= tokens <= longest:
            raise InspectError(f"context of {tokens} tokens: the model takes 1 to max_position_embeddings = {longest}")
    return sorted(set(contexts))


def _geometry(kind: LayerKind, text: TextConfig) -> Geometry:
    is_full = kind == "full_attention"
    geometry: MlaGeometry = text.full if is_full else text.sliding

    def latent_scale(rank: int) -> float:
        return (text.hidden_size / rank) ** 0.5 if text.apply_mla_qkv_lora_rescale else 1.0

    return Geometry(
        layer_kind=kind,
        num_attention_heads=geometry.num_attention_heads,
        q_lora_rank=geometry.q_lora_rank,
        kv_lora_rank=geometry.kv_lora_rank,
        qk_nope_head_dim=geometry.qk_nope_head_dim,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        qk_head_dim=geometry.qk_head_dim,
        v_head_dim=geometry.v_head_dim,
        softmax_scale=geometry.softmax_scale,
        rope_theta=geometry.rope_theta,
        q_latent_scale=latent_scale(geometry.q_lora_rank),
        kv_latent_scale=latent_scale(geometry.kv_lora_rank),
        latent_row_values=geometry.latent_row,
        attention_output_values=geometry.value_width,
        gate_type=geometry.gate_type,
        gate_values=geometry.gate_width,
        index_heads=text.index_n_heads if is_full else 0,
        index_head_dim=text.index_head_dim if is_full else 0,
        visible_keys_at_most=text.index_topk if is_full else text.sliding_window_size,
    )


def _part(bucket: Bucket, tensors: Iterable[ExpectedTensor], config: NoteConfig) -> Part:
    own = [tensor for tensor in tensors if tensor.bucket == bucket]
    weights = [tensor for tensor in own if not tensor.name.endswith(_ROUTER_BIASES)]
    return Part(
        name=bucket,
        parameters=sum(tensor.numel for tensor in weights),
        router_bias_values=sum(tensor.numel for tensor in own) - sum(tensor.numel for tensor in weights),
        active_parameters=sum(tensor.numel for tensor in weights if _is_active(tensor, config)),
        active_per=_UNITS[bucket],
        tensors=len(own),
        bytes=sum(tensor.nbytes for tensor in own),
        by_dtype=_by_dtype(own),
    )


def _by_dtype(tensors: Iterable[ExpectedTensor]) -> tuple[DtypeShare, ...]:
    tensors_of: dict[str, list[ExpectedTensor]] = {}
    for tensor in tensors:
        tensors_of.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor)
    return tuple(DtypeShare(name, len(same), sum(t.nbytes for t in same)) for name, same in sorted(tensors_of.items()))


def _is_active(tensor: ExpectedTensor, config: NoteConfig) -> bool:
    """Experts of a layer are equally large, so the first K stand for any K that a token chooses."""
    if tensor.name in _EMBEDDING_TABLES:
        return False
    expert = _ROUTED_EXPERT.search(tensor.name)
    if expert is None:
        return True
    chooser = config.vision if tensor.bucket == "vision" else config.text
    return chooser is not None and int(expert[1]) < chooser.num_experts_per_tok
