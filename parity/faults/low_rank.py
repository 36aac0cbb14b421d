"""Section C: the latents of queries, keys and values: their rescale, their two geometries and the order of their rows.

Source: text_model specification, sections 4 and 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from parity.faults.fault import Fault, Patch, Weights, after_construction
from parity.faults.norms import in_bfloat16, merged_row_path, right_kv_latent
from reference.config import MlaGeometry, NoteConfig, TextConfig
from reference.layers.indexer import Indexer
from reference.layers.mla import FullAttention, MlaAttention
from reference.layers.norm import RescaledRMSNorm, RMSNorm
from reference.numerics import at_least_float32

# T query tokens  S key tokens  H heads  X rows of one head  R rope dim  C kv latent

RowsOfHeads = Callable[[Tensor, MlaGeometry, TextConfig], Tensor]


def _drop_q_rescale(attention: Any, *_: Any) -> None:
    attention.q_a_layernorm.scale = 1.0


def _drop_kv_rescale(attention: Any, *_: Any) -> None:
    attention.kv_a_layernorm.scale = 1.0


def _invert_rescales(attention: Any, *_: Any) -> None:
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        norm.scale = 1.0 / norm.scale


def _square_rescales(attention: Any, *_: Any) -> None:
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        norm.scale = norm.scale**2


def _kv_scale_of_sliding(attention: Any, config: TextConfig, *_: Any) -> None:
    attention.kv_a_layernorm.scale = (config.hidden_size / config.sliding.kv_lora_rank) ** 0.5


def _scale_then_norm(norm: RescaledRMSNorm, x: Tensor) -> Tensor:
    return RMSNorm.forward(norm, x * norm.scale)


def _folded_in_bfloat16(norm: Any, x: Tensor) -> Tensor:
    weight = in_bfloat16(norm.weight.to(at_least_float32(x.dtype)) * norm.scale)
    return (norm.normalized(x) * weight).to(x.dtype)


def _scaled_rope_key(attention: Any, k_rope_TR: Tensor, positions_T: Tensor) -> Tensor:
    return attention.rope(attention.k_rope_only_layernorm(k_rope_TR), positions_T) * attention.kv_a_layernorm.scale


def _unrescaled_past(attention: Any, *_: Any) -> None:
    """Rows of earlier steps come out of the cache without the rescale; those of this step have it."""
    right, scale = attention.attention, attention.kv_a_layernorm.scale

    def mixed(q_nope_THN: Tensor, q_rope_THR: Tensor, kv_latent_SC: Tensor, *rest: Tensor) -> Tensor:
        past = len(kv_latent_SC) - len(q_nope_THN)
        kv_latent_SC = torch.cat((kv_latent_SC[:past] / scale, kv_latent_SC[past:]))
        return right(q_nope_THN, q_rope_THR, kv_latent_SC, *rest)

    attention.attention = mixed


def _reading_unrescaled_latent(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Not an edit of the weights: rounding them would be a change of its own."""

    def read(indexer: Indexer, attn_input_TD: Tensor, q_latent_TQ: Tensor, positions_T: Tensor) -> Any:
        scale = (attn_input_TD.shape[1] / q_latent_TQ.shape[1]) ** 0.5
        return forward(indexer, attn_input_TD, q_latent_TQ / scale, positions_T)

    return read


def _rows_edit(
    projection: str, rows_of: RowsOfHeads, kind: Literal["full", "sliding"] | None = None
) -> Callable[[Weights, NoteConfig], Weights]:
    """A weight edit: `rows_of` rearranges a head-major weight [H, X, …] of every layer, or of one kind."""

    def edit(weights: Weights, config: NoteConfig) -> Weights:
        text = config.text
        for layer in range(text.num_hidden_layers + text.num_nextn_predict_layers):
            if kind is not None and text.is_full(layer) != (kind == "full"):
                continue
            name, geometry = f"model.layers.{layer}.self_attn.{projection}.weight", text.geometry(layer)
            by_head = weights[name].unflatten(0, (geometry.num_attention_heads, -1))
            weights[name] = rows_of(by_head, geometry, text).flatten(0, 1)
        return weights

    return edit


def _values_first(weight_HXC: Tensor, geometry: MlaGeometry, text: TextConfig) -> Tensor:
    return weight_HXC.roll(-geometry.v_head_dim, dims=1)


def _rope_first(weight_HXC: Tensor, geometry: MlaGeometry, text: TextConfig) -> Tensor:
    return weight_HXC.roll(-geometry.qk_rope_head_dim, dims=1)


def _heads_of_other_kind(weight_HXC: Tensor, geometry: MlaGeometry, text: TextConfig) -> Tensor:
    """Head h starts where head h of the other geometry would; past the end it starts over."""
    H, X, _ = weight_HXC.shape
    other = text.sliding if geometry == text.full else text.full
    heads_H1, lanes_X = torch.arange(H)[:, None], torch.arange(X)
    return weight_HXC.flatten(0, 1)[(heads_H1 * other.qk_head_dim + lanes_X) % (H * X)]


def _nope_width_of_full(weight_HXC: Tensor, geometry: MlaGeometry, text: TextConfig) -> Tensor:
    """The rope lanes are taken where a full head has them; what lies behind them counts as nope lanes."""
    start, end = text.full.qk_nope_head_dim, text.full.qk_nope_head_dim + geometry.qk_rope_head_dim
    return torch.cat((weight_HXC[:, :start], weight_HXC[:, end:], weight_HXC[:, start:end]), dim=1)


LOW_RANK_FAULTS = (
    Fault(
        "drop_q_rescale",
        says="the query latent is not multiplied by sqrt(D / rank)",
        visibility="V",
        first=("layers.{i}.attn.q_latent",),
        visible_when="T = 1",
        source="vllm.cpp",
        patches=(after_construction(MlaAttention, _drop_q_rescale),),
    ),
    Fault(
        "drop_kv_rescale",
        says="the kv latent is not multiplied by sqrt(D / rank)",
        visibility="V",
        first=("layers.{i}.attn.kv_latent",),
        visible_when="T = 1",
        source="vllm.cpp",
        patches=(after_construction(MlaAttention, _drop_kv_rescale),),
    ),
    Fault(
        "rescale_before_norm",
        says="the rescale multiplies the input of the norm, which forgets it",
        visibility="V",
        first=("layers.{i}.attn.q_latent",),
        visible_when="T = 1",
        source="vllm.cpp",
        patches=(Patch(RescaledRMSNorm, "forward", lambda original: _scale_then_norm),),
    ),
    Fault(
        "lora_scale_from_wrong_rank",
        says="full layers rescale their kv latent by the rank of the sliding layers",
        visibility="V",
        first=("layers.{i}.attn.kv_latent",),
        visible_when="T = 1, a full layer",
        source="vllm.cpp",
        patches=(after_construction(FullAttention, _kv_scale_of_sliding),),
    ),
    Fault(
        "lora_scale_inverted",
        says="both latents are multiplied by sqrt(rank / D)",
        visibility="V",
        first=("layers.{i}.attn.q_latent",),
        visible_when="T = 1",
        source="analysis",
        patches=(after_construction(MlaAttention, _invert_rescales),),
    ),
    Fault(
        "rescale_rope_key",
        says="the whole cached row is multiplied by the kv rescale, its rope lanes too",
        visibility="V",
        first=("layers.{i}.attn.k_rope",),
        visible_when="T = 2",
        source="analysis",
        patches=(merged_row_path(right_kv_latent, _scaled_rope_key),),
    ),
    Fault(
        "rescale_folded_in_bf16",
        says="the rescale is folded into the norm weight, which is rounded to bfloat16 again",
        visibility="N",
        first=("layers.{i}.attn.q_latent",),
        visible_when="bit test",
        source="llama.cpp, ds4",
        patches=(Patch(RescaledRMSNorm, "forward", lambda original: _folded_in_bfloat16),),
    ),
    Fault(
        "rescale_twice",
        says="the weights were converted with the rescale folded in and the model multiplies again",
        visibility="V",
        first=("layers.{i}.attn.q_latent",),
        visible_when="T = 1",
        source="analysis",
        patches=(after_construction(MlaAttention, _square_rescales),),
    ),
    Fault(
        "rescale_after_cache",
        says="the kv latent is cached before its rescale, and rows that are read back never get it",
        visibility="C",
        first=("layers.{i}.attn.core",),
        visible_when="second step",
        source="analysis",
        patches=(after_construction(MlaAttention, _unrescaled_past),),
    ),
    Fault(
        "indexer_unrescaled_q",
        says="the indexer reads the query latent before its rescale, which scales all scores alike",
        visibility="I",
        first=("layers.{i}.attn.index.query",),
        visible_when="never without quantization",
        source="vllm.cpp",
        patches=(Patch(Indexer, "forward", _reading_unrescaled_latent),),
        hides_in=("layers.{i}.attn.index.query", "layers.{i}.attn.index.scores"),
    ),
    Fault(
        "kv_b_row_order",
        says="the rows of a head in kv_b_proj are read as values before keys",
        visibility="V",
        first=("layers.{i}.attn.core",),
        visible_when="T = 1",
        source="analysis",
        weights=_rows_edit("kv_b_proj", _values_first),
    ),
    Fault(
        "q_rope_leading",
        says="a query head is read with its rope lanes before its nope lanes",
        visibility="V",
        first=("layers.{i}.attn.q_nope",),
        visible_when="T = 1",
        source="vllm.cpp",
        weights=_rows_edit("q_b_proj", _rope_first),
    ),
    Fault(
        "swa_geometry_everywhere",
        says="query heads of full layers are cut out at the width of sliding heads",
        visibility="V",
        first=("layers.{i}.attn.q_nope",),
        visible_when="T = 1, a full layer",
        source="MLX notes",
        weights=_rows_edit("q_b_proj", _heads_of_other_kind, "full"),
    ),
    Fault(
        "full_geometry_everywhere",
        says="query heads of sliding layers are cut out at the width of full heads",
        visibility="V",
        first=("layers.{i}.attn.q_nope",),
        visible_when="T = 1, a sliding layer",
        source="MLX notes",
        weights=_rows_edit("q_b_proj", _heads_of_other_kind, "sliding"),
    ),
    Fault(
        "nope_192_as_128",
        says="the rope lanes of a sliding query head are taken behind the nope width of a full head",
        visibility="V",
        first=("layers.{i}.attn.q_nope",),
        visible_when="T = 1, a sliding layer",
        source="analysis",
        weights=_rows_edit("q_b_proj", _nope_width_of_full, "sliding"),
    ),
)
