"""What both kinds of attention do first: one projection of the layer's input, latents into the cache, queries.

a       = x W_aᵀ            q_a, kv_a, gate, index key and index head weights in one product
latents = norms, rescale and RoPE of a, written to the cache; the query latent stays
q       = q_latent W_qbᵀ    queries and index queries in one product

Queries are rotated in place, but for the rows that a step absorbs for sure: those are rotated on the way into the
latent space (`absorbed_queries`), which saves a launch. Where a listener looks, all rows are rotated here, with the
same bytes.

Source: text_model specification, sections 6 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.device import Ops
from optimized.kernels.parts import whole
from optimized.observe import BatchObserver
from optimized.weights import AttentionWeights
from reference.config import MlaGeometry, TextConfig
from reference.probe import is_observed

# T tokens  D model  H heads  N nope dim  R rope dim  C kv latent  V value dim  L = C + R  X = N + R
# I index heads  J index head dim


@dataclass(frozen=True)
class LayerContext:
    """What a layer needs besides its input: sizes, weights, ops, the observer, and the step's rotation."""

    config: TextConfig
    geometry: MlaGeometry
    weights: AttentionWeights
    ops: Ops
    see: BatchObserver
    cos_sin_TR: Tensor


@dataclass(frozen=True)
class Front:
    """`latent_TL` are the new rows as cached; gate logits and index parts may be views of the projections.

    Queries and index queries of the first `unrotated` rows still lack their rotation, see `absorbed_queries`.
    """

    q_THX: Tensor
    gate_TH: Tensor
    latent_TL: Tensor
    index_query_TIJ: Tensor | None
    head_weights_TI: Tensor | None
    unrotated: int


def project(
    x_TD: Tensor,
    layer: LayerContext,
    latent_pool: Tensor,
    latent_slot_T: Tensor,
    index_pool: Tensor | None = None,
    absorbed: int = 0,
) -> Front:
    """Project all rows, write those with a slot to the pools, rotate the queries behind the first `absorbed` rows."""
    weights, geometry, config, see = layer.weights, layer.geometry, layer.config, layer.see
    new = layer.ops.write_latents(
        layer.ops.product_parts(x_TD, weights.a_XD),
        weights.projection,
        weights.latent,
        config.rms_norm_eps,
        layer.cos_sin_TR,
        latent_pool,
        latent_slot_T,
        index_pool,
        None if index_pool is None else latent_slot_T,
        is_observed(),
    )
    q_latent_TQ = see("q_latent", new.q_latent_TQ)
    q_TX = layer.ops.product(q_latent_TQ, weights.q_b_XQ)
    H, X = geometry.num_attention_heads, geometry.qk_head_dim
    q_THX = q_TX[:, : H * X].unflatten(1, (H, X))
    index_query_TIJ = None
    if index_pool is not None:
        index_query_TIJ = q_TX[:, H * X :].unflatten(1, (config.index_n_heads, config.index_head_dim))
    unrotated = 0 if is_observed() else absorbed
    if unrotated < len(x_TD):
        rest = slice(unrotated, None)
        index_rest_TIJ = None if index_query_TIJ is None else index_query_TIJ[rest]
        layer.ops.rotate_queries_(q_THX[rest], layer.cos_sin_TR[rest], index_rest_TIJ)
    if is_observed():
        _show(q_THX, new.latent_TL, new.k_rope_unrotated_TR, geometry, see)
        if index_query_TIJ is not None:
            index_query_TIJ = see("index.query", index_query_TIJ)
            see.only("index.key", new.index_key_TJ)
            see.only("index.head_weights", new.head_weights_TI)
    return Front(q_THX, new.gate_TH, new.latent_TL, index_query_TIJ, new.head_weights_TI, unrotated)


def absorbed_queries(rows: slice, front: Front, layer: LayerContext) -> Tensor:
    """q_THL of these rows, all of them unrotated or none; in the first case their index queries are rotated too."""
    cos_sin_TR = index_query_TIJ = None
    if rows.stop <= front.unrotated:
        cos_sin_TR = layer.cos_sin_TR[rows]
        index_query_TIJ = None if front.index_query_TIJ is None else front.index_query_TIJ[rows]
    return layer.ops.absorb_queries(front.q_THX[rows], layer.weights.w_uk_HNC, cos_sin_TR, index_query_TIJ)


def _show(q_THX: Tensor, latent_TL: Tensor, unrotated_TR: Tensor, geometry: MlaGeometry, see: BatchObserver) -> None:
    N, C = geometry.qk_nope_head_dim, geometry.kv_lora_rank
    see.only("q_nope", q_THX[..., :N])
    see.only("q_rope", q_THX[..., N:])
    see.only("kv_latent", latent_TL[:, :C])
    see.only("k_rope_unrotated", unrotated_TR)
    see.only("k_rope", latent_TL[:, C:])


@dataclass(frozen=True)
class Back:
    """Attended rows in the order of the step: gated_TX [T, H V]; core and gate when observed."""

    gated_TX: Tensor
    core_THV: Tensor | None
    gate_TH: Tensor | None


def finish(parts: list[Back], layer: LayerContext) -> Tensor:
    """o_proj of all parts, [S, T, D]: in parts again, which the next norm adds up (see `kernels.parts`)."""
    gated_TX = _joined([part.gated_TX for part in parts])
    if is_observed():
        layer.see.only("core", _joined([part.core_THV for part in parts if part.core_THV is not None]))
        layer.see.only("gate", _joined([part.gate_TH for part in parts if part.gate_TH is not None]))
    output_STD = layer.ops.product_parts(gated_TX, layer.weights.o_DX)
    if is_observed():
        return layer.see("output", whole(output_STD, gated_TX.dtype))[None]
    return output_STD


def absorbed_rows(rows: slice, front: Front, attended_THC: Tensor, layer: LayerContext) -> Back:
    """Un-absorb and gate the attended latents of these rows."""
    return Back(*layer.ops.unabsorb_gate(attended_THC, layer.weights.w_uv_HVC, front.gate_TH[rows], is_observed()))


def expanded_keys(latent_pool: Tensor, front: Front, source_S: Tensor, layer: LayerContext) -> tuple[Tensor, Tensor]:
    """Gathered keys in expanded form: kv_SHY, each head [k_nope N | v V], and k_rope_SR, a view."""
    C, H = layer.geometry.kv_lora_rank, layer.geometry.num_attention_heads
    keys_SL = layer.ops.gather_rows(latent_pool, front.latent_TL, source_S)
    kv_SHY = (keys_SL[:, :C] @ layer.weights.kv_b_YC.T).unflatten(1, (H, -1))
    return kv_SHY, keys_SL[:, C:]


def gated(rows: slice, front: Front, core_THV: Tensor, layer: LayerContext) -> Back:
    """Gate the attended values of these rows."""
    gated_TX, gate_TH = layer.ops.gate_heads(core_THV, front.gate_TH[rows], is_observed())
    return Back(gated_TX, core_THV, gate_TH)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
