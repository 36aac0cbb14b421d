"""transformers' decoder layer on the weights of the optimized one, as a peer.

It gets views of the packed weights and copies of what is cached, in its own layout: it splits rotated lanes into halves
where the cache keeps neighbours together. Masks and rotation tables, which a model makes once for all its layers, are
made beforehand. In a decode step it starts from the same cache each time, and its growing by one row is part of the
time. Two variants: SDPA with grouped products, and eager attention with a loop over experts.
It chooses experts and keys itself, so rows differ where scores are close; hence the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from optimized.bench.case import AbsentPeer, Peer
from optimized.bench.peers_vision import FLIPPED_LIMIT, MODULE
from optimized.weights import PackedText, text_places
from reference.config import TextConfig, released

# B requests  T new tokens of each  D model  S cached rows  C kv latent  R rope dim  L = C + R  J index head dim

# Attention and experts.
VARIANTS = (("sdpa", "grouped_mm"), ("eager", "eager"))
PREFIX = "model.layers.0."
# What its config cannot take, or takes otherwise; see `_config`.
NOT_READ = ("architectures", "model_type", "vision_config", "audio_config", "rope_scaling")


@dataclass(frozen=True)
class LayerInputs:
    """hidden_BTD behind `seen` tokens of each request, of which latent rows and index keys are cached: S of them.

    Both are None where nothing is cached; a sliding layer has no index keys.
    """

    hidden_BTD: Tensor
    seen: int
    latents_BSL: Tensor | None
    index_keys_BSJ: Tensor | None


def transformers_layers(
    config: TextConfig, weights: PackedText, inputs: LayerInputs, checked: Callable[[Tensor], Tensor]
) -> list[Peer | AbsentPeer]:
    """`config` and `weights` of a model of one layer. `checked` takes the layer's output as [B · T, D]."""
    names = [f"transformers, {attention} and {experts}" for attention, experts in VARIANTS]
    if find_spec("transformers") is None or find_spec(MODULE) is None:
        return [AbsentPeer(name, "not installed, or without dots3_note") for name in names]
    peers: list[Peer | AbsentPeer] = []
    for name, (attention, experts) in zip(names, VARIANTS, strict=True):
        if experts == "grouped_mm" and not inputs.hidden_BTD.is_cuda:
            peers.append(AbsentPeer(name, "needs CUDA"))
            continue
        try:
            run = transformers_layer(config, weights, inputs, attention, experts)
            # The loop over experts asks the device which of them are chosen.
            waits = config.is_moe(0) and experts == "eager"
            peers.append(Peer(name, run, lambda out_BTD: checked(out_BTD.flatten(0, 1)), FLIPPED_LIMIT, waits))
        except Exception as error:  # of the package, or memory; the table has a place for it
            peers.append(AbsentPeer(name, f"{type(error).__name__}: {error}"))
    return peers


def transformers_layer(
    config: TextConfig, weights: PackedText, inputs: LayerInputs, attention: str, experts: str
) -> Callable[[], Tensor]:
    """A call that runs the layer and returns [B, T, D]; from the same cache each time."""
    modeling = import_module(f"{MODULE}.modeling_dots3_note")
    hidden_BTD = inputs.hidden_BTD
    read = _config(config, attention, experts)
    with torch.device("meta"):
        layer = modeling.Dots3NoteTextDecoderLayer(read, 0)
    layer.load_state_dict(_state(weights), assign=True)
    layer.eval()
    cache = None if inputs.latents_BSL is None else _cache(config, read, inputs, inputs.latents_BSL)
    position_1T = torch.arange(inputs.seen, inputs.seen + hidden_BTD.shape[1], device=hidden_BTD.device)[None]
    mask = _mask(config, read, hidden_BTD, cache, position_1T)
    kind = read.layer_types[0]
    with torch.device(hidden_BTD.device):
        rotary = modeling.Dots3NoteTextRotaryEmbedding(read)
    rotation = rotary(hidden_BTD.float() if config.is_full(0) else hidden_BTD, position_1T, kind)
    held = [dict(vars(kept)) for kept in cache.layers] if cache else []

    def run() -> Tensor:
        for kept, before in zip(cache.layers if cache else (), held, strict=True):
            vars(kept).update(before)
        with torch.no_grad():
            return layer(
                hidden_BTD,
                attention_mask=mask,
                position_ids=position_1T,
                cache=cache,
                use_cache=cache is not None,
                position_embeddings=rotation,
            )

    return run


def _config(config: TextConfig, attention: str, experts: str) -> Any:
    """transformers' own reading of the released layout, with the sizes of `config`."""
    configuration = import_module(f"{MODULE}.configuration_dots3_note")
    # No embedding is built; the released ids shall lie in the vocabulary.
    text = replace(config, vocab_size=released().text.vocab_size)
    values = replace(released(), text=text).to_json()
    for key in NOT_READ:
        values.pop(key, None)
    read = configuration.Dots3NoteTextConfig(**values)
    for kind, parameters in read.rope_parameters.items():
        # It takes int(head_dim · (rope / head_dim)), which falls one short for some sizes.
        sizes, factor = read.per_layer_config[kind], parameters["partial_rotary_factor"]
        if int(sizes.head_dim * factor) != sizes.qk_rope_head_dim:
            parameters["partial_rotary_factor"] = math.nextafter(factor, math.inf)
    read._attn_implementation, read._experts_implementation = attention, experts
    return read


def _state(weights: PackedText) -> dict[str, Tensor]:
    """The layer's weights under transformers' names: views, but for the router's in float32."""
    stack = weights.layers[0].experts
    state = {
        name.removeprefix(PREFIX): torch.cat(place.pieces, place.dim) if len(place.pieces) > 1 else place.pieces[0]
        for name, place in text_places(weights).items()
        if name.startswith(PREFIX) and ".experts." not in name
    }
    if stack is not None:
        state["mlp.gate.weight"] = stack.router_weight_ED.float()
        state["mlp.experts.gate_up_proj"] = stack.gate_up_EXD[: stack.routed]
        state["mlp.experts.down_proj"] = stack.down_EDF[: stack.routed]
    return state


def _cache(config: TextConfig, read: Any, inputs: LayerInputs, latents_BSL: Tensor) -> Any:
    """A dynamic cache that holds these rows."""
    cache = import_module("transformers").DynamicCache(config=read)
    geometry, (kept,) = config.geometry(0), cache.layers
    latent_BSC, rope_BSR = latents_BSL.split((geometry.kv_lora_rank, geometry.qk_rope_head_dim), dim=-1)
    kept.update(latent_BSC[:, None].contiguous(), _halves(rope_BSR)[:, None])
    if kept.is_sliding:
        kept.cumulative_length = inputs.seen
    if (keys_BSJ := inputs.index_keys_BSJ) is not None:
        R = config.full.qk_rope_head_dim
        kept.update_indexer(torch.cat((_halves(keys_BSJ[..., :R]), keys_BSJ[..., R:]), dim=-1))
    return cache


def _halves(x: Tensor) -> Tensor:
    """Even lanes, then odd ones."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def _mask(config: TextConfig, read: Any, hidden_BTD: Tensor, cache: Any, position_1T: Tensor) -> Any:
    masking = import_module("transformers.masking_utils")
    given = {
        "config": read,
        "inputs_embeds": hidden_BTD,
        "attention_mask": None,
        "cache": cache,
        "position_ids": position_1T,
    }
    if not config.is_full(0):
        return masking.create_sliding_window_causal_mask(**given)
    return masking.create_causal_mask(**given, allow_is_causal_skip=False)
