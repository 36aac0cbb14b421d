"""Section B: the RMSNorms, their epsilon, their precision and what they are applied to.

Source: text_model specification, sections 5.1 and 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.faults.configuration import DEFAULT_EPS, without_rope_key_norm
from parity.faults.fault import Fault, Patch, Weights, after_construction, text_edit
from reference.config import NoteConfig
from reference.layers.mla import MlaAttention
from reference.layers.norm import RMSNorm
from reference.numerics import at_least_float32
from reference.probe import probe

# T query tokens  D model  R rope dim  C kv latent  X = C + R lanes of a merged row


def in_bfloat16(x: Tensor) -> Tensor:
    """`x` rounded to bfloat16, in its own dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def _eps_outside(norm: RMSNorm, x: Tensor) -> Tensor:
    wide = x.to(at_least_float32(x.dtype))
    return wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + norm.eps)


def _bfloat16_mean(norm: RMSNorm, x: Tensor) -> Tensor:
    wide = x.to(at_least_float32(x.dtype))
    total = torch.zeros_like(wide[..., :1])
    for lane in in_bfloat16(wide).square().split(1, dim=-1):
        total = in_bfloat16(total + in_bfloat16(lane))
    return wide * torch.rsqrt(in_bfloat16(total / x.shape[-1]) + norm.eps)


def _rounded_before_weight(normalized: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda norm, x: in_bfloat16(normalized(norm, x))


def _zero_centered(weights: Weights, config: NoteConfig) -> Weights:
    # The indexer's k_norm is a LayerNorm, whose weight stays as it is.
    is_rms = {name: name.endswith("norm.weight") and "k_norm" not in name for name in weights}
    return {name: tensor + 1.0 if is_rms[name] else tensor for name, tensor in weights.items()}


def _swapped_norms(weights: Weights, config: NoteConfig) -> Weights:
    before, after = "input_layernorm", "post_attention_layernorm"
    swapped = {name.replace(before, after): tensor for name, tensor in weights.items() if before in name}
    swapped |= {name.replace(after, before): tensor for name, tensor in weights.items() if after in name}
    return weights | swapped


def _final_norm_in_draft(weights: Weights, config: NoteConfig) -> Weights:
    draft_norm = f"model.layers.{config.text.num_hidden_layers}.shared_head.norm.weight"
    return weights | {draft_norm: weights["model.norm.weight"]}


def merged_row_path(
    kv_latent: Callable[[Any, Tensor], Tensor], k_rope: Callable[[Any, Tensor, Tensor], Tensor]
) -> Patch:
    """A patch of what is cached: from the merged row of `kv_a_proj_with_mqa`, without an unrotated rope key to show.

    `kv_latent(attention, row_TX)` gives the latent, `k_rope(attention, k_rope_TR, positions_T)` the rope key.
    """

    def latent(attention: Any, attn_input_TD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        row_TX = attention.kv_a_proj_with_mqa(attn_input_TD)
        kv_latent_TC = probe("kv_latent", kv_latent(attention, row_TX))
        k_rope_TR = row_TX[:, attention.geometry.kv_lora_rank :]
        return kv_latent_TC, probe("k_rope", k_rope(attention, k_rope_TR, positions_T))

    return Patch(MlaAttention, "_latent", lambda original: latent)


def right_kv_latent(attention: Any, row_TX: Tensor) -> Tensor:
    return attention.kv_a_layernorm(row_TX[:, : attention.geometry.kv_lora_rank])


def _norm_over_row(attention: Any, row_TX: Tensor) -> Tensor:
    norm = attention.kv_a_layernorm
    latent_TC = norm.normalized(row_TX)[:, : attention.geometry.kv_lora_rank]
    return (latent_TC * norm.weight * norm.scale).to(row_TX.dtype)


def _right_rope_key(attention: Any, k_rope_TR: Tensor, positions_T: Tensor) -> Tensor:
    return attention.rope(attention.k_rope_only_layernorm(k_rope_TR), positions_T)


def _rope_then_norm(attention: Any, k_rope_TR: Tensor, positions_T: Tensor) -> Tensor:
    return attention.k_rope_only_layernorm(attention.rope(k_rope_TR, positions_T))


def _rope_without_norm(attention: Any, k_rope_TR: Tensor, positions_T: Tensor) -> Tensor:
    return attention.rope(k_rope_TR, positions_T)


def _without_q_norm(attention: Any, *_: Any) -> None:
    attention.q_a_layernorm.forward = lambda x: x


NORM_FAULTS = (
    Fault(
        "eps_outside_sqrt",
        says="epsilon is added to the root of the mean square in place of the mean square",
        visibility="N",
        first=("layers.{i}.attn.input",),
        visible_when="T = 1, rows of small norm",
        source="vllm.cpp",
        patches=(Patch(RMSNorm, "normalized", lambda original: _eps_outside),),
    ),
    Fault(
        "eps_1e6_everywhere",
        says="every RMSNorm has an epsilon of 1e-6",
        visibility="N",
        first=("layers.{i}.attn.input",),
        visible_when="T = 1",
        source="analysis",
        config=text_edit(rms_norm_eps=DEFAULT_EPS),
    ),
    Fault(
        "zero_centered_norm",
        says="the weight of an RMSNorm is applied as 1 + weight",
        visibility="V",
        first=("layers.{i}.attn.input",),
        visible_when="T = 1",
        source="MLX notes",
        weights=_zero_centered,
    ),
    Fault(
        "norm_in_bf16",
        says="the mean of squares is accumulated in bfloat16",
        visibility="V",
        first=("layers.{i}.attn.input",),
        visible_when="T = 1",
        source="analysis",
        patches=(Patch(RMSNorm, "normalized", lambda original: _bfloat16_mean),),
    ),
    Fault(
        "norm_round_order",
        says="the normed row is rounded to bfloat16 before it is multiplied by the weight",
        visibility="N",
        first=("layers.{i}.attn.input",),
        visible_when="bit test",
        source="transformers 5.24 against vLLM kernels",
        patches=(Patch(RMSNorm, "normalized", _rounded_before_weight),),
    ),
    Fault(
        "k_rope_norm_dropped",
        says="the shared rope key is not normed",
        visibility="V",
        first=("layers.{i}.attn.k_rope_unrotated",),
        visible_when="T = 2",
        source="vllm.cpp",
        patches=(after_construction(MlaAttention, without_rope_key_norm),),
    ),
    Fault(
        "k_rope_norm_after_rope",
        says="the shared rope key is rotated first and normed after that",
        visibility="V",
        first=("layers.{i}.attn.k_rope",),
        visible_when="T = 2, unequal norm weights within a pair",
        source="vllm.cpp",
        patches=(merged_row_path(right_kv_latent, _rope_then_norm),),
    ),
    Fault(
        "k_rope_norm_skipped_by_fusion",
        says="a fused kernel rotates the rope key straight from the merged row, past its norm",
        visibility="V",
        first=("layers.{i}.attn.k_rope",),
        visible_when="T = 2",
        source="vllm.cpp",
        patches=(merged_row_path(right_kv_latent, _rope_without_norm),),
    ),
    Fault(
        "kv_norm_over_576",
        says="the norm of the kv latent takes its mean square over the latent and the rope lanes together",
        visibility="V",
        first=("layers.{i}.attn.kv_latent",),
        visible_when="T = 1",
        source="analysis",
        patches=(merged_row_path(_norm_over_row, _right_rope_key),),
    ),
    Fault(
        "q_norm_missing",
        says="q_a_layernorm is skipped, with its rescale",
        visibility="V",
        first=("layers.{i}.attn.q_latent",),
        visible_when="T = 1",
        source="analysis",
        patches=(after_construction(MlaAttention, _without_q_norm),),
    ),
    Fault(
        "swap_norm_weights",
        says="input_layernorm and post_attention_layernorm have each other's weights",
        visibility="V",
        first=("layers.{i}.attn.input",),
        visible_when="T = 1",
        source="analysis",
        weights=_swapped_norms,
    ),
    Fault(
        "mtp_final_norm_swapped",
        says="the draft layer ends in the backbone's final norm in place of its own shared_head.norm",
        visibility="M",
        first=("mtp.{s}.normed",),
        visible_when="one draft",
        source="tokenspeed comment",
        weights=_final_norm_in_draft,
    ),
)
