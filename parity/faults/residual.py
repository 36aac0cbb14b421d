"""Section I: the residual stream, the final norm, the embedding and the head.

Source: text_model specification, sections 5.4 and 12.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parity.faults.fault import Fault, Patch, Weights, after_construction, scaled
from reference.config import NoteConfig, TextConfig
from reference.probe import probe, scope
from reference.text import DecoderLayer, TextModel

# T tokens  D model


def _norm_behind_sublayers(layer: Any, hidden_TD: Tensor, cache: Any) -> Tensor:
    hidden_TD = probe("input", hidden_TD)
    with scope("attn"):
        attention_TD = layer.self_attn(probe("input", hidden_TD), cache)
        hidden_TD = layer.input_layernorm(hidden_TD + attention_TD)
    with scope("ffn"):
        ffn_output_TD = probe("output", layer.mlp(probe("input", hidden_TD)))
    return probe("output", layer.post_attention_layernorm(hidden_TD + ffn_output_TD))


def _residual_from_normed(layer: Any, hidden_TD: Tensor, cache: Any) -> Tensor:
    hidden_TD = probe("input", hidden_TD)
    with scope("attn"):
        attn_input_TD = probe("input", layer.input_layernorm(hidden_TD))
        hidden_TD = attn_input_TD + layer.self_attn(attn_input_TD, cache)
    with scope("ffn"):
        ffn_input_TD = probe("input", layer.post_attention_layernorm(hidden_TD))
        ffn_output_TD = probe("output", layer.mlp(ffn_input_TD))
    return probe("output", ffn_input_TD + ffn_output_TD)


def _without_final_norm(model: Any, *_: Any) -> None:
    model.model.norm.forward = lambda hidden_TD: hidden_TD


def _final_norm_twice(model: Any, *_: Any) -> None:
    norm = model.model.norm.forward
    model.model.norm.forward = lambda hidden_TD: norm(norm(hidden_TD))


def _head_from_embedding(weights: Weights, config: NoteConfig) -> Weights:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}


def _scaled_embedding(weights: Weights, config: NoteConfig) -> Weights:
    return scaled("model.embed_tokens.", config.text.hidden_size**0.5)(weights, config)


def _scaled_down_attention(layer: Any, config: TextConfig, *_: Any, **__: Any) -> None:
    projection = layer.self_attn.o_proj.forward
    layer.self_attn.o_proj.forward = lambda gated: projection(gated) / config.routed_scaling_factor


RESIDUAL_FAULTS = (
    Fault(
        "post_norm_layout",
        says="each norm comes behind its sublayer and the sum in place of before them",
        visibility="V",
        first=("layers.{i}.attn.input",),
        visible_when="T = 1",
        source="analysis",
        patches=(Patch(DecoderLayer, "forward", lambda original: _norm_behind_sublayers),),
    ),
    Fault(
        "residual_from_normed",
        says="the residual stream goes on from the normed input of each sublayer",
        visibility="V",
        first=("layers.{i}.ffn.input",),
        visible_when="T = 1",
        source="analysis",
        patches=(Patch(DecoderLayer, "forward", lambda original: _residual_from_normed),),
    ),
    Fault(
        "final_norm_missing",
        says="the head reads the last layer's output without the final norm",
        visibility="V",
        first=("final_norm",),
        visible_when="T = 1",
        source="analysis",
        patches=(after_construction(TextModel, _without_final_norm),),
    ),
    Fault(
        "final_norm_twice",
        says="the final norm is applied twice",
        visibility="V",
        first=("final_norm",),
        visible_when="T = 1",
        source="vLLM comment on its draft layer",
        patches=(after_construction(TextModel, _final_norm_twice),),
    ),
    Fault(
        "tied_head",
        says="the head is the embedding table",
        visibility="V",
        first=("logits",),
        visible_when="T = 1",
        source="transformers 5.24 declares the tie and switches it off",
        weights=_head_from_embedding,
    ),
    Fault(
        "embed_scaled",
        says="embeddings are multiplied by the root of the model width",
        visibility="V",
        first=("embeddings",),
        visible_when="T = 1",
        source="analysis",
        weights=_scaled_embedding,
    ),
    Fault(
        "fp16_residual_trick",
        says="attention outputs are divided by routed_scaling_factor, as float16 would need, in a bfloat16 model",
        visibility="R",
        first=("layers.{i}.attn.output",),
        visible_when="routed_scaling_factor is not 1",
        source="vLLM generic layer",
        patches=(after_construction(DecoderLayer, _scaled_down_attention),),
    ),
)
