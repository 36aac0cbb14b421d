"""A full layer's attention over a ragged batch: index scores, the selection, and the core in the form the plan chose.

absorbed   each row attends to the rows selected for it, read through the block table
expanded   all keys of an item are gathered and expanded once; the selection is a mask of bits

A group whose rows all see at most index_topk keys selects nothing: every visible key is taken.
Source: text_model specification, sections 7, 8 and 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optimized.attention.front import (
    Back,
    Front,
    LayerContext,
    absorbed_queries,
    absorbed_rows,
    expanded_keys,
    finish,
    gated,
    project,
)
from optimized.attention.shown import ShownSelection, keys_of_bits
from optimized.step import DeviceStep, FullGroup, KeyGroup, PagedRows, RowBlock
from reference.probe import is_observed

# T tokens  S keys  D model  K selected keys  W words of 32 bits


@dataclass(frozen=True)
class FullPools:
    """The paged pools of one full layer: latents [pages, page_size, L] and index keys [pages, page_size, J]."""

    latent: Tensor
    index_key: Tensor


def full_attention(x_TD: Tensor, layer: LayerContext, pools: FullPools, step: DeviceStep) -> Tensor:
    """[S, T, D], parts of what the layer adds, from its normed input; `step` must have pages."""
    assert step.pages is not None
    front = project(x_TD, layer, pools.latent, step.pages.page_slot_T, pools.index_key, step.decode_rows)
    core = _FullCore(layer, pools, step, step.pages, front)
    groups = [step.pages.decode] if step.pages.decode else []
    parts = [part for group in (*groups, *step.pages.prefill) for part in core.of_group(group)]
    if core.shown:
        core.shown.show()
    return finish(parts, layer)


class _FullCore:
    """The attention core of one layer in one step."""

    def __init__(self, layer: LayerContext, pools: FullPools, step: DeviceStep, pages: PagedRows[Tensor], front: Front):
        self.layer, self.pools, self.step, self.pages, self.front = layer, pools, step, pages, front
        self.topk = layer.config.index_topk
        self.shown = ShownSelection(layer) if is_observed() else None

    def of_group(self, group: FullGroup[Tensor]) -> list[Back]:
        if group.expanded is None:
            return [self._absorbed(group, block) for block in group.blocks]
        keys = expanded_keys(self.pools.latent, self.front, group.expanded.source_S, self.layer)
        return [self._expanded(group, group.expanded, block, *keys) for block in group.blocks]

    def _absorbed(self, group: FullGroup[Tensor], block: RowBlock[Tensor]) -> Back:
        rows, geometry = slice(block.start, block.stop), self.layer.geometry
        positions_T = self.step.positions_T[rows]
        q_THL = absorbed_queries(rows, self.front, self.layer)
        scores_TS = self._scores(group, block)
        if group.selects:
            selected_TK = self.layer.ops.select_keys(scores_TS, positions_T, self.topk)
        else:
            selected_TK = _all_keys(positions_T, group.keys)
        if self.shown:
            self.shown.add(positions_T, scores_TS, selected_TK)
        attended_THC = self.layer.ops.sparse_attention(
            q_THL,
            self.pools.latent,
            selected_TK,
            self.pages.block_table_BP,
            self.step.request_T[rows],
            geometry.softmax_scale,
            geometry.kv_lora_rank,
        )
        return absorbed_rows(rows, self.front, attended_THC, self.layer)

    def _expanded(
        self,
        group: FullGroup[Tensor],
        keys: KeyGroup[Tensor],
        block: RowBlock[Tensor],
        kv_SHY: Tensor,
        k_rope_SR: Tensor,
    ) -> Back:
        rows, geometry = slice(block.start, block.stop), self.layer.geometry
        positions_T = self.step.positions_T[rows]
        scores_TS = self._scores(group, block)
        bits_TW = self.layer.ops.select_bits(scores_TS, positions_T, self.topk) if group.selects else None
        if self.shown:
            all_TK = _all_keys(positions_T, group.keys)
            self.shown.add(positions_T, scores_TS, all_TK if bits_TW is None else keys_of_bits(bits_TW, self.topk))
        core_THV = self.layer.ops.expanded_attention(
            self.front.q_THX[rows],
            kv_SHY,
            k_rope_SR,
            block.query_start_B1,
            keys.key_start_B1,
            positions_T,
            keys.first_key_B,
            None,
            bits_TW,
            geometry.softmax_scale,
            geometry.qk_nope_head_dim,
            block.max_queries,
        )
        return gated(rows, self.front, core_THV, self.layer)

    def _scores(self, group: FullGroup[Tensor], block: RowBlock[Tensor]) -> Tensor | None:
        """float32 [rows, keys], not written behind a row's position. None where nobody selects or looks.

        Rows that take every key that they see have scores only if somebody looks.
        """
        if not group.selects and not self.shown:
            return None
        front, rows = self.front, slice(block.start, block.stop)
        assert front.index_query_TIJ is not None
        assert front.head_weights_TI is not None
        runs: dict[str, Any] = {}
        if group is not self.pages.decode:
            runs = {"query_start_B1": block.query_start_B1, "max_queries": block.max_queries}
        shape = (block.stop - block.start, group.keys)
        return self.layer.ops.index_scores(
            front.index_query_TIJ[rows],
            front.head_weights_TI[rows],
            self.pools.index_key,
            self.pages.block_table_BP,
            self.step.request_T[rows],
            self.step.positions_T[rows],
            torch.empty(shape, dtype=torch.promote_types(front.q_THX.dtype, torch.float32), device=front.q_THX.device),
            unscored=0 if self.shown else self.topk,
            **runs,
        )


def _all_keys(positions_T: Tensor, keys: int) -> Tensor:
    """int32 [T, keys]: every key up to each row's position, -1 behind them."""
    key_S = torch.arange(keys, dtype=torch.int32, device=positions_T.device)
    return torch.where(key_S <= positions_T[:, None], key_S, -1)
