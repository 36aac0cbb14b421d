"""The weights of the speech encoder as the optimized path wants them, filled from the reference's state dict.

first_C33      time before frequency: the picture has time as its height, so that a frame's values lie side by side
second, third  [channels out, time, frequency, channels in]: channels last, what the convolutions read
out_DX         X = rows of frequencies · C, channels last; the checkpoint has the channels first
qkv_XD         rows [query D | key D | value D], and their biases, zeros for the key, which has none
gate_up_XD     rows [gate F | up F], as in the checkpoint

Packing only moves values; one table says where each tensor of the state dict lies. Source: audio specification,
sections 6, 8 and 10.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.errors import NotSupportedError
from optimized.moe import Place
from optimized.weights import New, State, fill, require_device, whole
from reference.config import AudioConfig
from reference.numerics import Numerics

# C channels  D model  F feed-forward lanes  O output  X packed rows or lanes

ENCODER, ADAPTER = "dots_encoder.speech_encoder.", "audio_adapter.proj."


@dataclass(frozen=True)
class StemWeights:
    first_C33: Tensor
    first_bias_C: Tensor
    second_C33C: Tensor
    second_bias_C: Tensor
    third_C33C: Tensor
    third_bias_C: Tensor
    out_DX: Tensor


@dataclass(frozen=True)
class SpeechLayerWeights:
    attention_norm_D: Tensor
    qkv_XD: Tensor
    qkv_bias_X: Tensor
    out_DD: Tensor
    out_bias_D: Tensor
    ffn_norm_D: Tensor
    gate_up_XD: Tensor
    gate_up_bias_X: Tensor
    down_DF: Tensor
    down_bias_D: Tensor


@dataclass(frozen=True)
class AdapterWeights:
    norm_D: Tensor
    norm_bias_D: Tensor
    first_OD: Tensor
    first_bias_O: Tensor
    last_OO: Tensor
    last_bias_O: Tensor


@dataclass(frozen=True)
class PackedAudio:
    """All weights of the speech encoder and its adapter, on one device and in one dtype."""

    stem: StemWeights
    layers: tuple[SpeechLayerWeights, ...]
    final_norm_D: Tensor
    adapter: AdapterWeights


def pack_audio(
    state: State,
    config: AudioConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    numerics: Numerics | None = None,
) -> PackedAudio:
    """Copy a state dict (names as in `reference.audio.AudioEncoder`) into packed storage; no value changes.

    Raises: CheckpointError listing every tensor that is missing, unknown, given twice, without values, or of another
    shape or dtype (nothing is cast); NotSupportedError for other numerics than the default, or a
    device that is not there.
    """
    if numerics not in (None, Numerics()):
        raise NotSupportedError(f"the audio tower: numerics must be {Numerics()!r}, found {numerics!r}")
    require_device(device)
    packed = empty_audio(config, device, dtype)
    fill(audio_places(packed), state)
    return packed


def unpack_audio(packed: PackedAudio) -> dict[str, Tensor]:
    """The state dict that was packed, bit for bit, in tensors of its own."""
    return {name: torch.cat(place.pieces, place.dim) for name, place in audio_places(packed).items()}


def empty_audio(config: AudioConfig, device: torch.device | str, dtype: torch.dtype) -> PackedAudio:
    """Storage without values, of the sizes of `config`; only the key's bias is there: zeros."""
    new = New(torch.device(device), dtype)
    C, D, F, out = config.downsample_hidden_size, config.d_model, config.encoder_ffn_dim, config.adapter_out_dim
    P = config.conv_output_size // C
    stem = StemWeights(new(C, 3, 3), new(C), new(C, 3, 3, C), new(C), new(C, 3, 3, C), new(C), new(D, P * C))
    layers = tuple(
        SpeechLayerWeights(
            new(D),
            new(3 * D, D),
            new(3 * D).zero_(),
            new(D, D),
            new(D),
            new(D),
            new(2 * F, D),
            new(2 * F),
            new(D, F),
            new(D),
        )
        for _ in range(config.encoder_layers)
    )
    adapter = AdapterWeights(new(D), new(D), new(out, D), new(out), new(out, out), new(out))
    return PackedAudio(stem, layers, new(D), adapter)


def audio_places(packed: PackedAudio) -> dict[str, Place]:
    """Where each tensor of the state dict lies in the storage: the one table of the layout."""
    stem, adapter = packed.stem, packed.adapter
    C = len(stem.first_bias_C)
    views = {
        "conv2d1.weight": stem.first_C33.mT[:, None],
        "conv2d1.bias": stem.first_bias_C,
        "conv2d2.weight": stem.second_C33C.permute(0, 3, 2, 1),
        "conv2d2.bias": stem.second_bias_C,
        "conv2d3.weight": stem.third_C33C.permute(0, 3, 2, 1),
        "conv2d3.bias": stem.third_bias_C,
        "layer_norm.weight": packed.final_norm_D,
    }
    for index, layer in enumerate(packed.layers):
        prefix = f"layers.{index}."
        query_DD, key_DD, value_DD = layer.qkv_XD.chunk(3)
        query_bias_D, _, value_bias_D = layer.qkv_bias_X.chunk(3)
        views |= {
            f"{prefix}self_attn_layer_norm.weight": layer.attention_norm_D,
            f"{prefix}self_attn.q_proj.weight": query_DD,
            f"{prefix}self_attn.q_proj.bias": query_bias_D,
            f"{prefix}self_attn.k_proj.weight": key_DD,
            f"{prefix}self_attn.v_proj.weight": value_DD,
            f"{prefix}self_attn.v_proj.bias": value_bias_D,
            f"{prefix}self_attn.out_proj.weight": layer.out_DD,
            f"{prefix}self_attn.out_proj.bias": layer.out_bias_D,
            f"{prefix}final_layer_norm.weight": layer.ffn_norm_D,
            f"{prefix}fc1.weight": layer.gate_up_XD,
            f"{prefix}fc1.bias": layer.gate_up_bias_X,
            f"{prefix}fc2.weight": layer.down_DF,
            f"{prefix}fc2.bias": layer.down_bias_D,
        }
    places = {ENCODER + name: whole(view) for name, view in views.items()}
    # One piece a channel: its frequencies lie side by side in the checkpoint and C apart here.
    places[f"{ENCODER}conv_out.weight"] = Place(list(stem.out_DX.unflatten(1, (-1, C)).unbind(-1)), 1)
    ends = {"0": (adapter.norm_D, adapter.norm_bias_D), "1": (adapter.first_OD, adapter.first_bias_O)}
    ends["3"] = (adapter.last_OO, adapter.last_bias_O)
    for name, (weight, bias) in ends.items():
        places |= {f"{ADAPTER}{name}.weight": whole(weight), f"{ADAPTER}{name}.bias": whole(bias)}
    return places
