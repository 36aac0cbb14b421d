"""A sliding layer's attention over a ragged batch: decode rows from the rings, prefill rows from gathered keys.

Decode rows are written first and attend absorbed. A prefill chunk gathers the window - 1 rows before it, expands them
with its own, attends, and only then writes its last rows: it may be longer than the ring.
Source: text_model specification, sections 9, 14 and 15.
"""

from __future__ import annotations

from torch import Tensor

from optimized.attention.front import (
    Back,
    LayerContext,
    absorbed_queries,
    absorbed_rows,
    expanded_keys,
    finish,
    gated,
    project,
)
from optimized.step import DeviceStep

# T tokens  D model


def sliding_attention(x_TD: Tensor, layer: LayerContext, ring_pool: Tensor, step: DeviceStep) -> Tensor:
    """[S, T, D], parts of what the layer adds, from its normed input; `step` says which rings its rows belong to."""
    geometry, ops, ring = layer.geometry, layer.ops, step.ring
    window, scale, C = layer.config.sliding_window_size, geometry.softmax_scale, geometry.kv_lora_rank
    front = project(x_TD, layer, ring_pool, ring.ring_slot_T, absorbed=step.decode_rows)
    parts: list[Back] = []
    if step.decode_rows:
        rows = slice(0, step.decode_rows)
        q_THL = absorbed_queries(rows, front, layer)
        attended_THC = ops.ring_attention(q_THL, ring_pool, ring.ring_T[rows], step.positions_T[rows], window, scale, C)
        parts.append(absorbed_rows(rows, front, attended_THC, layer))
    for group in ring.prefill:
        rows = slice(group.start, group.stop)
        kv_SHY, k_rope_SR = expanded_keys(ring_pool, front, group.source_S, layer)
        core_THV = ops.expanded_attention(
            front.q_THX[rows],
            kv_SHY,
            k_rope_SR,
            group.query_start_B1,
            group.key_start_B1,
            step.positions_T[rows],
            group.first_key_B,
            window,
            None,
            scale,
            geometry.qk_nope_head_dim,
            group.max_queries,
        )
        parts.append(gated(rows, front, core_THV, layer))
    if ring.prefill:
        ops.store_rows(front.latent_TL, ring_pool, ring.kept_slot_T)
    return finish(parts, layer)
