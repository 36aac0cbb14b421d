"""Faults of the encoder's layers and the adapter. Source: audio specification, sections 7, 8, 9 and 13."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference.audio
import reference.layers.rope
from parity.faults.audio_stem import without
from parity.faults.fault import Fault, Patch, Weights, after_construction
from reference.audio import AudioAdapter, AudioEncoder, Chunk, SpeechAttention, SpeechEncoder, SpeechLayer
from reference.config import NoteConfig
from reference.layers.norm import LayerNorm, RMSNorm
from reference.layers.rope import RotaryEmbedding
from reference.media.mel import STRIDES, Features, stage_frames
from reference.probe import probe, rows, scope

# T tokens  M mel bins  L frames  D model  H heads  X lanes of a head  F feed-forward lanes

_LAYER = "audio.layers.{i}."
QUERY, KEY, CORE = ((f"{_LAYER}attn.{part}",) for part in ("query", "key", "core"))
ACTIVATED = (f"{_LAYER}ffn.activated",)
ANY, SEVERAL = "any sound", "a clip longer than a chunk"


def _fault(fault_id: str, says: str, first: tuple[str, ...], *patches: Patch, when: str = ANY, **more: Any) -> Fault:
    return Fault(fault_id, says, "V", first, when, "analysis", patches=patches, **more)


def _attention(**attributes: Callable[[SpeechAttention], Any]) -> Patch:
    """A patch of attributes of every attention: `attributes[name](attention)`."""

    def edit(attention: SpeechAttention, *_: Any) -> None:
        for name, value in attributes.items():
            setattr(attention, name, value(attention))

    return after_construction(SpeechAttention, edit)


def _head_dim(attention: SpeechAttention) -> int:
    return attention.q_proj.out_features // attention.num_heads


def _last_lanes(attention: SpeechAttention, x_THX: Tensor, positions_T: Tensor) -> Tensor:
    passed, rotated = x_THX[..., : -attention.rotated], x_THX[..., -attention.rotated :]
    return torch.cat((passed, attention.rope(rotated, positions_T)), dim=-1)


def _queries_only(attention: SpeechAttention) -> Callable[..., Tensor]:
    """Rotates at every other call: queries come first."""
    rotate, calls = attention.rotate, count()
    return lambda x_THX, positions_T: x_THX if next(calls) % 2 else rotate(x_THX, positions_T)


def _text_theta(config: NoteConfig) -> NoteConfig:
    assert config.audio
    return replace(config, audio=replace(config.audio, rope_theta=config.text.full.rope_theta))


def _rounded_frequencies(frequencies: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rounded(*args: Any) -> Tensor:
        exact = frequencies(*args)
        return exact.to(torch.bfloat16).to(exact.dtype)

    return rounded


def _told_of_chunks(tell: Callable[[SpeechAttention, Chunk], None]) -> Patch:
    """Before a chunk runs, `tell` puts something of it where a patched attention finds it."""

    def make(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def told(encoder: SpeechEncoder, mel_ML: Tensor, chunk: Chunk) -> Tensor:
            for module in encoder.modules():
                if isinstance(module, SpeechAttention):
                    tell(module, chunk)
            return forward(encoder, mel_ML, chunk)

        return told

    return Patch(SpeechEncoder, "forward", make)


def _tell_valid(attention: SpeechAttention, chunk: Chunk) -> None:
    setattr(attention, "valid", stage_frames(chunk.samples)[-1])  # noqa: B010 - an attribute the class lacks


def _tell_start(attention: SpeechAttention, chunk: Chunk) -> None:
    setattr(attention, "start", int(chunk.positions(1, STRIDES)))  # noqa: B010


def _valid_keys(attention: Any, positions_T: Tensor) -> Tensor:
    return (positions_T < attention.valid).expand(len(positions_T), -1)


def _running_on(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda attention, x_THX, positions_T: rotate(attention, x_THX, positions_T + attention.start)


def _causal(attention: SpeechAttention, positions_T: Tensor) -> Tensor:
    return positions_T[:, None] >= positions_T


def _across_chunks(encoder: AudioEncoder, features: Features, clip: str = "clip") -> Tensor:
    """Stems one by one, then one sequence of all tokens, whose positions still start again at each chunk."""
    speech: Any = encoder.dots_encoder["speech_encoder"]
    parts, positions, labels = [], [], []
    with scope("audio"):
        for mel_ML, chunk in zip(features.mel_NML, encoder._chunks(features, clip), strict=True):
            kept_ML = chunk.shown("mel", mel_ML[:, : reference.audio.token_count(chunk.samples) << STRIDES].mT, 0).mT
            parts.append(chunk.shown("stem", speech.stem(kept_ML.to(speech.conv_out.weight.dtype), chunk), STRIDES))
            positions.append(torch.arange(len(parts[-1])))
            labels.append(chunk.positions(len(parts[-1]), STRIDES))
        hidden_TD, positions_T = torch.cat(parts), torch.cat(positions)
        with rows(clip, torch.cat(labels), "prefill"):
            for index, layer in enumerate(speech.layers):
                with scope(f"layers.{index}"):
                    hidden_TD = layer(hidden_TD, positions_T)
            return encoder.audio_adapter(probe("final_norm", speech.layer_norm(hidden_TD)))


def _key_bias(bias: Callable[[SpeechAttention], Tensor]) -> Patch:
    def edit(attention: SpeechAttention, *_: Any) -> None:
        attention.k_proj.register_forward_hook(lambda module, args, output: output + bias(attention).to(output.dtype))

    return after_construction(SpeechAttention, edit)


def _halves_swapped(layer: SpeechLayer, packed_TF: Tensor) -> Tensor:
    up_TF, gate_TF = packed_TF.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def _lanes_alternating(layer: SpeechLayer, packed_TF: Tensor) -> Tensor:
    return F.silu(packed_TF[:, 0::2]) * packed_TF[:, 1::2]


def _geglu(layer: SpeechLayer, packed_TF: Tensor) -> Tensor:
    gate_TF, up_TF = packed_TF.chunk(2, dim=-1)
    return F.gelu(gate_TF) * up_TF


def _centred(normalized: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda norm, x: normalized(norm, x - x.mean(-1, keepdim=True))


def _norm_last(layer: SpeechLayer, x_TD: Tensor, positions_T: Tensor) -> Tensor:
    x_TD = probe("input", x_TD)
    with scope("attn"):
        normed_TD = probe("input", layer.self_attn_layer_norm(x_TD))
        h_TD = x_TD + probe("output", layer.self_attn(normed_TD, positions_T))
    with scope("ffn"):
        ffn_TD = probe("output", layer.fc2(probe("activated", layer.activated(layer.fc1(probe("input", h_TD))))))
    return probe("output", layer.final_layer_norm(h_TD + ffn_TD))


def _swapped_norms(weights: Weights, config: NoteConfig) -> Weights:
    first, second = ".self_attn_layer_norm.", ".final_layer_norm."
    swapped = {name.replace(first, second): tensor for name, tensor in weights.items() if first in name}
    swapped |= {name.replace(second, first): tensor for name, tensor in weights.items() if second in name}
    return weights | swapped


def _without_last_norm(encoder: SpeechEncoder, *_: Any) -> None:
    setattr(encoder.layer_norm, "forward", lambda x_TD: x_TD)  # noqa: B010 - an attribute of the instance


def _adapter_norm(forward: Callable[[LayerNorm, Tensor], Tensor]) -> Patch:
    def edit(adapter: AudioAdapter, *_: Any) -> None:
        norm: Any = adapter.proj[0]
        norm.forward = lambda x_TD: forward(norm, x_TD)

    return after_construction(AudioAdapter, edit)


def _as_rms(norm: LayerNorm, x_TD: Tensor) -> Tensor:
    return x_TD * torch.rsqrt(x_TD.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight


def _adapter_tanh(adapter: AudioAdapter, *_: Any) -> None:
    adapter.proj[2] = nn.GELU(approximate="tanh")


ATTENTION_FAULTS = (
    _fault(
        "audio_rope_interleaved",
        "lanes 2j and 2j + 1 are rotated together, as in the text model",
        QUERY,
        _attention(rope=lambda attention: RotaryEmbedding(attention.rope.theta, "activation")),
        when="two tokens",
    ),
    _fault(
        "audio_rope_full_width",
        "all lanes of a head are rotated (a missing partial_rotary_factor read as 1)",
        QUERY,
        _attention(rotated=_head_dim),
        when="two tokens",
    ),
    _fault(
        "audio_rope_last_lanes",
        "the second half of each head is rotated in place of the first",
        QUERY,
        Patch(SpeechAttention, "rotate", lambda original: _last_lanes),
        when="two tokens",
    ),
    _fault("audio_rope_theta_text", "the base is that of a text layer", QUERY, config=_text_theta, when="two tokens"),
    _fault(
        "audio_rope_missing",
        "nothing is rotated",
        QUERY,
        Patch(SpeechAttention, "rotate", lambda original: lambda attention, x_THX, positions_T: x_THX),
        when="two tokens",
    ),
    _fault(
        "audio_keys_not_rotated",
        "queries are rotated and keys are not",
        KEY,
        _attention(rotate=_queries_only),
        when="two tokens",
    ),
    Fault(
        "audio_rope_packed_positions",
        says="positions run on from chunk to chunk; scores depend on differences only, so no embedding changes",
        visibility="N",
        first=QUERY,
        visible_when=SEVERAL,
        source="analysis",
        patches=(_told_of_chunks(_tell_start), Patch(SpeechAttention, "rotate", _running_on)),
    ),
    Fault(
        "audio_rope_bf16_frequencies",
        says="the frequencies are a buffer of the tower, which a cast to bfloat16 rounds",
        visibility="L",
        first=QUERY,
        visible_when="two tokens in float32; past a hundred in bfloat16, and an error of a radian at position 700",
        source="vLLM, which builds them again",
        patches=(Patch(reference.layers.rope, "frequencies", _rounded_frequencies),),
    ),
    Fault(
        "cross_segment_attention",
        says="one attention over all chunks of a clip",
        visibility="L",
        first=CORE,
        visible_when=SEVERAL,
        source="analysis",
        patches=(Patch(AudioEncoder, "forward", lambda original: _across_chunks),),
    ),
    _fault(
        "audio_causal_mask",
        "attention is causal",
        CORE,
        Patch(SpeechAttention, "visible", lambda original: _causal),
        when="two tokens",
    ),
    _fault(
        "attention_len_v3",
        "a masked last token is no key",
        CORE,
        _told_of_chunks(_tell_valid),
        Patch(SpeechAttention, "visible", lambda original: _valid_keys),
        when="1 to 159 samples more than a multiple of 1280",
    ),
    _fault(
        "k_bias_copied",
        "the key projection has the query's bias",
        KEY,
        _key_bias(lambda attention: attention.q_proj.bias),
    ),
    Fault(
        "k_bias_zero",
        says="the key projection has a bias of zeros",
        visibility="I",
        first=KEY,
        visible_when="never",
        source="analysis",
        patches=(_key_bias(lambda attention: torch.zeros(())),),
    ),
    _fault("audio_q_bias_missing", "the query projection has no bias", QUERY, weights=without("q_proj.bias")),
    _fault(
        "audio_v_bias_missing",
        "the value projection has no bias",
        (f"{_LAYER}attn.value",),
        weights=without("v_proj.bias"),
    ),
    _fault(
        "audio_out_bias_missing",
        "the output projection has no bias",
        (f"{_LAYER}attn.output",),
        weights=without("out_proj.bias"),
    ),
    _fault(
        "audio_scale_of_width",
        "scores are divided by the root of the model's width in place of a head's",
        CORE,
        _attention(scale=lambda attention: attention.q_proj.out_features**-0.5),
        when="two tokens",
    ),
)
LAYER_FAULTS = (
    _fault(
        "audio_swiglu_swapped",
        "SiLU is applied to the second half of fc1's output",
        ACTIVATED,
        Patch(SpeechLayer, "activated", lambda original: _halves_swapped),
    ),
    _fault(
        "audio_swiglu_interleaved",
        "gate and up lanes of fc1's output are taken to alternate",
        ACTIVATED,
        Patch(SpeechLayer, "activated", lambda original: _lanes_alternating),
    ),
    _fault(
        "audio_geglu",
        "the gate goes through GELU, Whisper's activation, in place of SiLU",
        ACTIVATED,
        Patch(SpeechLayer, "activated", lambda original: _geglu),
    ),
    _fault("audio_fc1_bias_missing", "fc1 has no bias", ACTIVATED, weights=without("fc1.bias")),
    _fault("audio_fc2_bias_missing", "fc2 has no bias", (f"{_LAYER}ffn.output",), weights=without("fc2.bias")),
    Fault(
        "audio_norm_eps_1e5",
        says="the norms of the encoder have the text's epsilon of 1e-5",
        visibility="N",
        first=(f"{_LAYER}attn.input",),
        visible_when="rows of small norm, such as those next to a masked token",
        source="analysis",
        patches=(Patch(reference.audio, "ENCODER_EPS", lambda original: 1e-5),),
    ),
    _fault(
        "audio_norm_layernorm",
        "the norms of the encoder subtract the mean",
        (f"{_LAYER}attn.input",),
        Patch(RMSNorm, "normalized", _centred),
    ),
    _fault(
        "audio_layer_norms_swapped",
        "self_attn_layer_norm and final_layer_norm have each other's weights",
        (f"{_LAYER}attn.input",),
        weights=_swapped_norms,
    ),
    _fault(
        "layer_final_norm_mixup",
        "final_layer_norm is taken for the last thing a layer does",
        (f"{_LAYER}ffn.input",),
        Patch(SpeechLayer, "forward", lambda original: _norm_last),
    ),
    _fault(
        "audio_last_norm_missing",
        "the encoder's last norm, layer_norm, is skipped",
        ("audio.final_norm",),
        after_construction(SpeechEncoder, _without_last_norm),
    ),
    _fault(
        "adapter_no_norm",
        "the adapter's norm is skipped",
        ("audio.adapter.input",),
        _adapter_norm(lambda norm, x_TD: x_TD),
    ),
    _fault(
        "adapter_rms",
        "the adapter's norm is an RMSNorm",
        ("audio.adapter.input",),
        _adapter_norm(_as_rms),
    ),
    Fault(
        "adapter_ln_eps_1e6",
        says="the adapter's norm has the encoder's epsilon of 1e-6",
        visibility="N",
        first=("audio.adapter.input",),
        visible_when="rows of small norm",
        source="analysis",
        patches=(Patch(reference.audio, "ADAPTER_EPS", lambda original: 1e-6),),
    ),
    Fault(
        "adapter_gelu_tanh",
        says="the adapter's GELU is its tanh approximation",
        visibility="N",
        first=("audio.adapter.hidden",),
        visible_when="any sound",
        source="analysis",
        patches=(after_construction(AudioAdapter, _adapter_tanh),),
    ),
    _fault(
        "adapter_bias_missing",
        "the last linear layer of the adapter has no bias",
        ("audio.adapted",),
        weights=without("audio_adapter.proj.3.bias"),
    ),
)
