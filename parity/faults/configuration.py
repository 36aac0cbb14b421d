"""Section A: keys of the configuration that are absent, defaulted or read as something else.

What the released JSON leaves out (`n_group`, `num_nextn_predict_layers`, `indexer_rope_interleave`) gets the default of
a related family; what it has is looked for in the wrong place.
Source: text_model specification, section 2.3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity.faults.fault import Fault, Patch, Weights, after_construction, geometry_edit, text_edit
from reference.config import NoteConfig, TextConfig
from reference.layers.indexer import Indexer, IndexRows
from reference.layers.mla import FullAttention, MlaAttention
from reference.probe import Rows

# T query tokens  S key tokens  E experts  H heads

# What loaders fall back to for a RoPE base and a norm's epsilon that they do not find.
DEFAULT_THETA = 1.0e4
DEFAULT_EPS = 1.0e-6


def _grouped(config: NoteConfig) -> NoteConfig:
    """Eight groups, or the most that divide the experts with two experts in each; half of the groups are kept."""
    experts = config.text.n_routed_experts
    groups = max(count for count in range(1, 9) if experts % count == 0 and experts // count >= 2)
    return text_edit(n_group=groups, topk_group=max(1, groups // 2))(config)


def _without_draft_tensors(weights: Weights, config: NoteConfig) -> Weights:
    prefixes = (f"model.layers.{config.text.num_hidden_layers}.", "model.mtp.")
    return {name: torch.zeros_like(t) if name.startswith(prefixes) else t for name, t in weights.items()}


def _all_defaults(config: NoteConfig) -> NoteConfig:
    text = config.text
    return text_edit(
        rms_norm_eps=DEFAULT_EPS,
        full=replace(text.full, rope_theta=DEFAULT_THETA),
        sliding=replace(text.sliding, rope_theta=DEFAULT_THETA),
        apply_mla_qkv_lora_rescale=False,
        norm_topk_prob=False,
    )(config)


def without_rope_key_norm(attention: Any, *_: Any) -> None:
    """Edit of a built attention: the shared rope key passes its norm unchanged."""
    attention.k_rope_only_layernorm.forward = lambda x: x


def with_scaled_logits(attention: Any, factor: float) -> None:
    """Edit of a built attention: its softmax sees the logits times `factor`."""
    right = attention.attention

    def scaled(q_nope_THN: Tensor, q_rope_THR: Tensor, *keys: Tensor) -> Tensor:
        return right(q_nope_THN * factor, q_rope_THR * factor, *keys)

    attention.attention = scaled


def _scale_from_head_dim(attention: Any, config: TextConfig, *_: Any) -> None:
    # The JSON's `head_dim` is the width of a sliding head.
    with_scaled_logits(attention, (config.full.qk_head_dim / config.sliding.qk_head_dim) ** 0.5)


def _is_full_by_index(config: TextConfig, layer: int) -> bool:
    return layer < config.num_hidden_layers and (layer < 2 or layer % 4 == 1)


def _causal_keys(
    indexer: Indexer, rows: IndexRows, positions_T: Tensor, key_SJ: Tensor, workspace_bytes: int
) -> Tensor:
    return torch.arange(len(key_SJ), device=key_SJ.device) <= positions_T[:, None]


class _SoftmaxScores:
    """Listener: router scores are the softmax of the logits over the experts."""

    def __init__(self) -> None:
        self._logits_TE: Tensor | None = None

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        if name.endswith(".router.logits"):
            self._logits_TE = value
        if name.endswith(".router.scores") and self._logits_TE is not None:
            return self._logits_TE.to(value.dtype).softmax(-1)
        return value


CONFIGURATION_FAULTS = (
    Fault(
        "grouped_router_8_4",
        says="absent n_group and topk_group are read as 8 and 4, so that a token chooses within half of the groups",
        visibility="V",
        first=("layers.{i}.ffn.router.choice",),
        visible_when="T = 1, a layer with experts",
        source="vLLM config comment, vllm.cpp",
        config=_grouped,
    ),
    Fault(
        "indexer_rope_neox",
        says="absent indexer_rope_interleave is read as false, so that the indexer rotates lane j with lane j + R/2",
        visibility="L",
        first=("layers.{i}.attn.index.query",),
        visible_when="T > index_topk (index probes: T = 2)",
        source="vLLM config comment, vllm.cpp; llama.cpp as published",
        config=text_edit(indexer_rope_interleave=False),
    ),
    Fault(
        "nextn_zero",
        says="absent num_nextn_predict_layers is read as 0, so that no tensor of the draft layer is loaded",
        visibility="M",
        first=("mtp.{s}.eh_input",),
        visible_when="one draft",
        source="vllm.cpp",
        weights=_without_draft_tensors,
    ),
    Fault(
        "window_default_512",
        says="a missing sliding_window_size falls back to 512, one less than released",
        visibility="L",
        first=("layers.{i}.attn.core",),
        visible_when="T >= window",
        source="transformers 5.24 and SGLang defaults",
        config=lambda config: text_edit(sliding_window_size=config.text.sliding_window_size - 1)(config),
    ),
    Fault(
        "swa_theta_default",
        says="a missing swa_rope_theta falls back to 10000",
        visibility="V",
        first=("layers.{i}.attn.q_rope",),
        visible_when="T = 2, a sliding layer",
        source="SGLang default, vllm.cpp",
        config=geometry_edit("sliding", rope_theta=DEFAULT_THETA),
    ),
    Fault(
        "rescale_flag_default_off",
        says="apply_mla_qkv_lora_rescale is absent or a string and counts as false, so that no latent is rescaled",
        visibility="V",
        first=("layers.{i}.attn.q_latent",),
        visible_when="T = 1",
        source="llama.cpp default, vllm.cpp",
        config=text_edit(apply_mla_qkv_lora_rescale=False),
    ),
    Fault(
        "rope_norm_null_is_off",
        says="k_rope_only_layernorm: null is read as no norm on the shared rope key",
        visibility="V",
        first=("layers.{i}.attn.k_rope_unrotated",),
        visible_when="T = 2",
        source="transformers 5.24 history",
        patches=(after_construction(MlaAttention, without_rope_key_norm),),
    ),
    Fault(
        "scale_from_head_dim",
        says="the softmax scale of full layers comes from head_dim, which is the width of a sliding head",
        visibility="V",
        first=("layers.{i}.attn.core",),
        visible_when="T = 2, a full layer",
        source="llama.cpp pops the key",
        patches=(after_construction(FullAttention, _scale_from_head_dim),),
    ),
    Fault(
        "wrapped_config_defaults",
        says="text keys are sought at the top level of a wrapped config, so that every one of them is a default",
        visibility="V",
        first=("layers.{i}.attn.input",),
        visible_when="T = 1",
        source="vllm.cpp",
        config=_all_defaults,
    ),
    Fault(
        "schedule_from_index",
        says="the kind of a layer follows from its index modulo 4 in place of layer_types",
        visibility="R",
        first=("layers.{i}.attn.q_latent",),
        visible_when="a slice with renumbered layers",
        source="analysis",
        patches=(Patch(TextConfig, "is_full", lambda original: _is_full_by_index),),
    ),
    Fault(
        "full_attention_literal",
        says="the layer kind is compared with another literal, so that full layers attend densely without an indexer",
        visibility="L",
        first=("layers.{i}.attn.core",),
        visible_when="T > index_topk",
        source="transformers 5.24 normalisation, MLX notes",
        patches=(Patch(Indexer, "visible_keys", lambda original: _causal_keys),),
    ),
    Fault(
        "softmax_scoring",
        says="router scores are a softmax over the experts in place of a sigmoid",
        visibility="V",
        first=("layers.{i}.ffn.router.scores",),
        visible_when="T = 1, a layer with experts",
        source="vllm.cpp",
        listener=lambda config: _SoftmaxScores(),
    ),
    Fault(
        "routed_scale_2_5",
        says="routed_scaling_factor is DeepSeek-V3's 2.5",
        visibility="V",
        first=("layers.{i}.ffn.router.weights",),
        visible_when="T = 1, a layer with experts",
        source="vllm.cpp (with 1.7)",
        config=text_edit(routed_scaling_factor=2.5),
    ),
    Fault(
        "topk_default_6",
        says="num_experts_per_tok falls back to 6 of 8",
        visibility="V",
        first=("layers.{i}.ffn.router.expert_ids",),
        visible_when="T = 1, a layer with experts",
        source="vllm.cpp",
        config=lambda config: text_edit(num_experts_per_tok=max(1, config.text.num_experts_per_tok * 6 // 8))(config),
    ),
)
