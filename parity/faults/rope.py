"""Section D: rotary position embedding: which lanes form a pair, at which frequencies, from which positions.

Source: text_model specification, section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log
from typing import Any

import torch
from torch import Tensor

import reference.layers.mla
import reference.layers.rope
from parity.faults.configuration import with_scaled_logits
from parity.faults.fault import Fault, Patch, after_construction, geometry_edit
from parity.faults.norms import in_bfloat16
from reference.config import MlaGeometry, TextConfig
from reference.layers.indexer import Indexer
from reference.layers.mla import MlaAttention
from reference.layers.rope import RotaryEmbedding

# T query tokens  S key tokens  H heads  N nope dim  R rope dim

# YaRN's attention factor for a context stretched 40 times, as DeepSeek-V3 has it.
MSCALE = 0.1 * log(40.0) + 1.0


def _sliding_theta(indexer: Any, config: TextConfig, *_: Any) -> None:
    indexer.rope.theta = config.sliding.rope_theta


def _frequencies_of_head_dim(attention: Any, config: TextConfig, geometry: MlaGeometry, *_: Any) -> None:
    # theta^(-2j / head_dim) = (theta^(R / head_dim))^(-2j / R)
    attention.rope.theta = geometry.rope_theta ** (geometry.qk_rope_head_dim / geometry.qk_head_dim)


def _mscale(attention: Any, *_: Any) -> None:
    with_scaled_logits(attention, MSCALE**2)


def _rounded_angles(angles: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments: in_bfloat16(angles(*arguments))


def _rounded_table(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, cos, sin: rotate(x, in_bfloat16(cos), in_bfloat16(sin))


def _restarted(unrounded: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda rope, x, positions_T: unrounded(rope, x, positions_T - positions_T[0])


def _key_rotated_by_head(attention: Any, *_: Any) -> None:
    """Head h sees the rope key rotated by h positions more. Only the distance counts: its query goes back by h."""
    right = attention.attention

    def by_head(q_nope_THN: Tensor, q_rope_THR: Tensor, *keys: Tensor) -> Tensor:
        q_rope_HTR = q_rope_THR.transpose(0, 1)
        q_rope_HTR = attention.rope(q_rope_HTR, -torch.arange(len(q_rope_HTR), device=q_rope_HTR.device))
        return right(q_nope_THN, q_rope_HTR.transpose(0, 1), *keys)

    attention.attention = by_head


def _deinterleaved_key(attention: Any, *_: Any) -> None:
    right = attention.attention

    def mixed(q_nope_THN: Tensor, q_rope_THR: Tensor, kv_latent_SC: Tensor, k_rope_SR: Tensor, *rest: Tensor) -> Tensor:
        k_rope_SR = torch.cat((k_rope_SR[:, 0::2], k_rope_SR[:, 1::2]), dim=-1)
        return right(q_nope_THN, q_rope_THR, kv_latent_SC, k_rope_SR, *rest)

    attention.attention = mixed


ROPE_FAULTS = (
    Fault(
        "neox_rope",
        says="the main attention rotates lane j with lane j + R/2 in place of its neighbour",
        visibility="V",
        first=("layers.{i}.attn.q_rope",),
        visible_when="T = 2",
        source="vllm.cpp",
        patches=(Patch(reference.layers.mla, "RotaryEmbedding", lambda original: partial(original, interleave=False)),),
    ),
    Fault(
        "full_theta_on_swa",
        says="sliding layers rotate with the base of the full layers",
        visibility="V",
        first=("layers.{i}.attn.q_rope",),
        visible_when="T = 2, a sliding layer; grows with distance",
        source="vllm.cpp",
        config=lambda config: geometry_edit("sliding", rope_theta=config.text.full.rope_theta)(config),
    ),
    Fault(
        "swa_theta_on_full",
        says="full layers and their indexer rotate with the base of the sliding layers",
        visibility="V",
        first=("layers.{i}.attn.q_rope",),
        visible_when="T = 2, a full layer",
        source="analysis",
        config=lambda config: geometry_edit("full", rope_theta=config.text.sliding.rope_theta)(config),
    ),
    Fault(
        "swa_theta_on_indexer",
        says="the indexer rotates with the base of the sliding layers",
        visibility="L",
        first=("layers.{i}.attn.index.query",),
        visible_when="T > index_topk (index probes: T = 2)",
        source="analysis",
        patches=(after_construction(Indexer, _sliding_theta),),
    ),
    Fault(
        "yarn_mscale",
        says="a rope_scaling dictionary without scaling still multiplies the softmax scale by YaRN's mscale squared",
        visibility="V",
        first=("layers.{i}.attn.core",),
        visible_when="T = 2",
        source="vllm.cpp",
        patches=(after_construction(MlaAttention, _mscale),),
    ),
    Fault(
        "rope_dim_head_dim",
        says="the frequencies are spread over the width of the whole head in place of its rope lanes",
        visibility="V",
        first=("layers.{i}.attn.q_rope",),
        visible_when="T = 2",
        source="analysis",
        patches=(after_construction(MlaAttention, _frequencies_of_head_dim),),
    ),
    Fault(
        "rope_angle_bf16",
        says="the angle is rounded to bfloat16",
        visibility="L",
        first=("layers.{i}.attn.q_rope",),
        visible_when="T = 2; hopeless past a few hundred positions",
        source="analysis",
        patches=(Patch(reference.layers.rope, "angles", _rounded_angles),),
    ),
    Fault(
        "rope_trig_bf16",
        says="cosine and sine are rounded to bfloat16",
        visibility="N",
        first=("layers.{i}.attn.q_rope",),
        visible_when="bit test",
        source="transformers 5.24 (sliding layers), the older dots3_note_omni port (all layers)",
        patches=(Patch(reference.layers.rope, "rotate_neighbours", _rounded_table),),
    ),
    Fault(
        "rope_relative_position",
        says="positions start again at 0 in every step",
        visibility="C",
        first=("layers.{i}.attn.q_rope",),
        visible_when="second step",
        source="analysis",
        patches=(Patch(RotaryEmbedding, "unrounded", _restarted),),
    ),
    Fault(
        "rope_key_per_head",
        says="the shared rope key is rotated differently for each head",
        visibility="V",
        first=("layers.{i}.attn.core",),
        visible_when="T = 2",
        source="analysis",
        patches=(after_construction(MlaAttention, _key_rotated_by_head),),
    ),
    Fault(
        "rope_order_mismatch",
        says="queries keep rotated pairs in place while keys are stored de-interleaved",
        visibility="V",
        first=("layers.{i}.attn.core",),
        visible_when="T = 2",
        source="transformers 5.24 against the layout of the others",
        patches=(after_construction(MlaAttention, _deinterleaved_key),),
    ),
)
