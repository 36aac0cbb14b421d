"""Latent attention over a set of visible keys, in its two equal forms.

expanded:  k = [W_UK c, k_rope], v = W_UV c for each key and head;  o = softmax(scale · q kᵀ) v
absorbed:  <q_nope, W_UK c> = <W_UKᵀ q_nope, c>, so each head attends in the latent space itself, with one shared key
           [c, k_rope] of width C + R and value c;  o = W_UV (softmax(…) c)

Without rounding both give the same; the scale comes from the expanded width N + R in both.
Source: text_model specification, sections 8, 9 and 14.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from reference.config import MlaGeometry
from reference.numerics import Numerics, at_least_float32

# T query tokens  S key tokens  H heads  N nope dim  R rope dim  C kv latent  V value dim


def masked_softmax(scores_HTS: Tensor, visible_TS: Tensor) -> Tensor:
    """Softmax over the visible keys, at least float32. A row without any visible key is all zeros, not NaN."""
    wide = scores_HTS.to(at_least_float32(scores_HTS.dtype)).masked_fill(~visible_TS, float("-inf"))
    return wide.softmax(-1).masked_fill(~visible_TS.any(-1, keepdim=True), 0.0)


def attend(
    query_HTX: Tensor, key_HSX: Tensor, value_HSV: Tensor, visible_TS: Tensor, scale: float, each_op: bool
) -> Tensor:
    """softmax(scale · q kᵀ) v, [H, T, V], in the dtype of `value_HSV`.

    `each_op` rounds scores and probabilities to that dtype on the way; otherwise float32 runs through to the end.
    """
    dtype = value_HSV.dtype
    work = dtype if each_op else at_least_float32(dtype)
    scores_HTS = (query_HTX.to(work) @ key_HSX.to(work).mT) * scale
    probabilities_HTS = masked_softmax(scores_HTS, visible_TS).to(work)
    return (probabilities_HTS @ value_HSV.to(work)).to(dtype)


class LatentAttention:
    """The attention core of one layer kind: queries against cached latents, [T, H, V] out.

    Works in groups of heads and blocks of queries so that expanded keys and scores stay within `workspace_bytes`.
    """

    def __init__(self, geometry: MlaGeometry, numerics: Numerics, workspace_bytes: int):
        self.geometry = geometry
        self.each_op = numerics.attention_rounding == "each_op"
        self.workspace_bytes = workspace_bytes
        self._of_heads = self._expanded if numerics.attention_form == "expanded" else self._absorbed

    def __call__(
        self,
        q_nope_THN: Tensor,
        q_rope_THR: Tensor,
        kv_latent_SC: Tensor,
        k_rope_SR: Tensor,
        kv_b_weight: Tensor,
        visible_TS: Tensor,
    ) -> Tensor:
        """`kv_b_weight` [H * (N + V), C] is head-major, each head [key rows N | value rows V]."""
        S = visible_TS.shape[1]
        outputs_HTV = []
        for heads in self._head_groups(S):
            weight = kv_b_weight.unflatten(0, (self.geometry.num_attention_heads, -1))[heads]
            queries_HTX = (q_nope_THN[:, heads].transpose(0, 1), q_rope_THR[:, heads].transpose(0, 1))
            outputs_HTV.append(self._of_heads(*queries_HTX, kv_latent_SC, k_rope_SR, weight, visible_TS))
        return torch.cat(outputs_HTV).transpose(0, 1)

    def _expanded(
        self,
        q_nope_HTN: Tensor,
        q_rope_HTR: Tensor,
        kv_latent_SC: Tensor,
        k_rope_SR: Tensor,
        weight_HXC: Tensor,
        visible_TS: Tensor,
    ) -> Tensor:
        H, N, V = len(weight_HXC), self.geometry.qk_nope_head_dim, self.geometry.v_head_dim
        expanded_SHX = F.linear(kv_latent_SC, weight_HXC.flatten(0, 1)).unflatten(-1, (H, N + V))
        k_nope_HSN, value_HSV = expanded_SHX.transpose(0, 1).split((N, V), dim=-1)
        key_HSX = torch.cat((k_nope_HSN, k_rope_SR.expand(H, -1, -1)), dim=-1)
        query_HTX = torch.cat((q_nope_HTN, q_rope_HTR), dim=-1)
        return self._in_blocks(query_HTX, key_HSX, value_HSV, visible_TS)

    def _absorbed(
        self,
        q_nope_HTN: Tensor,
        q_rope_HTR: Tensor,
        kv_latent_SC: Tensor,
        k_rope_SR: Tensor,
        weight_HXC: Tensor,
        visible_TS: Tensor,
    ) -> Tensor:
        N, V = self.geometry.qk_nope_head_dim, self.geometry.v_head_dim
        key_rows_HNC, value_rows_HVC = weight_HXC.split((N, V), dim=1)
        query_HTX = torch.cat((q_nope_HTN @ key_rows_HNC, q_rope_HTR), dim=-1)
        key_SX = torch.cat((kv_latent_SC, k_rope_SR), dim=-1)
        latent_HTC = self._in_blocks(query_HTX, key_SX[None], kv_latent_SC[None], visible_TS)
        return latent_HTC @ value_rows_HVC.mT

    def _in_blocks(self, query_HTX: Tensor, key_HSX: Tensor, value_HSV: Tensor, visible_TS: Tensor) -> Tensor:
        H, T = query_HTX.shape[:2]
        # Scores, masked scores, probabilities, and one spare of eight bytes a value.
        block = max(1, self.workspace_bytes // (visible_TS.shape[1] * H * 32))
        scale = self.geometry.softmax_scale
        return torch.cat(
            [
                attend(query_HTX[:, rows], key_HSX, value_HSV, visible_TS[rows], scale, self.each_op)
                for rows in (slice(start, start + block) for start in range(0, T, block))
            ],
            dim=1,
        )

    def _head_groups(self, key_count: int) -> Iterator[slice]:
        geometry = self.geometry
        # Expanded keys and values of one head, twice: as computed, and widened for the products.
        head_bytes = key_count * (geometry.qk_head_dim + geometry.v_head_dim) * 16
        group = max(1, self.workspace_bytes // head_bytes)
        for start in range(0, geometry.num_attention_heads, group):
            yield slice(start, min(start + group, geometry.num_attention_heads))
