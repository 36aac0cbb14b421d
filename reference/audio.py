"""The speech encoder and its adapter, with the released tensor names as module tree: sound features to text embeddings.

stem      mask; three times: convolution (3x3, stride 2), GELU, mask; then each frame's channels to D     100 to 12.5 Hz
layers    h = x + attention(rms(x));  x = h + W2 (silu(gate) · up) + b2,  [gate | up] = W1 rms(h) + b1
adapter   W3 gelu(W1 layernorm(rms(x)) + b1) + b3

Each chunk (60 s) is on its own: attention sees all of the chunk and nothing else, and positions start again at 0.
The masks keep what lies behind the true samples at zero, so that a chunk does not depend on how it was filled up. A
token whose frames are all masked is still a token: it enters the layers as exact zeros, attends and is attended to.
All norms of the encoder have an epsilon of 1e-6 and the adapter's has 1e-5, whatever the config says of the text.
Source: audio specification, sections 5 to 11.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.config import AudioConfig
from reference.errors import ConfigError
from reference.layers.attention import attend
from reference.layers.norm import LayerNorm, RMSNorm
from reference.layers.rope import RotaryEmbedding
from reference.media.mel import HOP, STRIDES, Features, stage_frames, token_count
from reference.media.sound import SoundError
from reference.numerics import Numerics, at_least_float32
from reference.probe import probe, rows, scope

# N chunks  L frames at some stage of the stem  M mel bins  C channels  P rows of frequencies  T tokens of a chunk
# D model  H heads  X lanes of a head  F feed-forward lanes  O output

ENCODER_EPS, ADAPTER_EPS = 1e-6, 1e-5


@dataclass(frozen=True)
class Chunk:
    """One chunk of a clip: its true samples, and the frames that a full chunk has. Names its rows for the probes."""

    clip: str
    index: int
    samples: int
    full_frames: int

    def shown(self, name: str, value_LX: Tensor, stage: int) -> Tensor:
        """`probe` with rows that count frames behind `stage` convolutions from the start of the clip."""
        with rows(self.clip, self.positions(len(value_LX), stage), "prefill"):
            return probe(name, value_LX)

    def positions(self, count: int, stage: int) -> Tensor:
        return torch.arange(count) + self.index * -(-self.full_frames >> stage)


class SpeechAttention(nn.Module):
    """Bidirectional attention inside one chunk, [T, D] to [T, D]. The key projection alone has no bias.

    The first lanes of each head are rotated, in pairs (j, j + half of them); the text rotates neighbouring lanes.
    Every implementation rounds the table and rotates in the activation dtype, so there is no `Numerics` field for it.
    """

    def __init__(self, config: AudioConfig, numerics: Numerics):
        super().__init__()
        D = config.d_model
        self.num_heads = config.encoder_attention_heads
        head_dim = D // self.num_heads
        self.rotated = int(head_dim * config.partial_rotary_factor)
        if self.rotated % 2:
            raise ConfigError(
                f"audio_config: partial_rotary_factor {config.partial_rotary_factor} rotates {self.rotated} of "
                f"{head_dim} lanes, which must be an even number"
            )
        self.q_proj = nn.Linear(D, D)
        self.k_proj = nn.Linear(D, D, bias=False)
        self.v_proj = nn.Linear(D, D)
        self.out_proj = nn.Linear(D, D)
        self.rope = RotaryEmbedding(config.rope_theta, "activation", interleave=False)
        self.scale = head_dim**-0.5
        self.each_op = numerics.attention_rounding == "each_op"

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """`positions_T` count tokens from the start of the chunk."""
        query_THX = probe("query", self.rotate(self._heads(self.q_proj(x_TD)), positions_T))
        key_THX = probe("key", self.rotate(self._heads(self.k_proj(x_TD)), positions_T))
        value_THX = probe("value", self._heads(self.v_proj(x_TD)))
        query_HTX, key_HTX, value_HTX = (x_THX.transpose(0, 1) for x_THX in (query_THX, key_THX, value_THX))
        core_HTX = attend(query_HTX, key_HTX, value_HTX, self.visible(positions_T), self.scale, self.each_op)
        core_THX = probe("core", core_HTX.transpose(0, 1))
        return self.out_proj(core_THX.flatten(1))

    def _heads(self, x_TD: Tensor) -> Tensor:
        return x_TD.unflatten(-1, (self.num_heads, -1))

    def rotate(self, x_THX: Tensor, positions_T: Tensor) -> Tensor:
        rotated, passed = x_THX[..., : self.rotated], x_THX[..., self.rotated :]
        return torch.cat((self.rope(rotated, positions_T), passed), dim=-1)

    def visible(self, positions_T: Tensor) -> Tensor:
        """[T, T], which keys a query sees: all of the chunk."""
        return torch.ones(len(positions_T), len(positions_T), dtype=torch.bool, device=positions_T.device)


class SpeechLayer(nn.Module):
    """One layer, [T, D] to [T, D]. `final_layer_norm` is the norm before its feed-forward part."""

    def __init__(self, config: AudioConfig, numerics: Numerics):
        super().__init__()
        D = config.d_model
        self.self_attn_layer_norm = RMSNorm(D, ENCODER_EPS, numerics)
        self.self_attn = SpeechAttention(config, numerics)
        self.final_layer_norm = RMSNorm(D, ENCODER_EPS, numerics)
        # Packed: all gate lanes, then all up lanes.
        self.fc1 = nn.Linear(D, 2 * config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, D)
        self._activated = _multiply_then_round if numerics.swiglu_rounding == "once" else _round_then_multiply

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        x_TD = probe("input", x_TD)
        with scope("attn"):
            normed_TD = probe("input", self.self_attn_layer_norm(x_TD))
            h_TD = x_TD + probe("output", self.self_attn(normed_TD, positions_T))
        with scope("ffn"):
            normed_TD = probe("input", self.final_layer_norm(h_TD))
            activated_TF = probe("activated", self.activated(self.fc1(normed_TD)))
            ffn_TD = probe("output", self.fc2(activated_TF))
        return probe("output", h_TD + ffn_TD)

    def activated(self, packed_TF: Tensor) -> Tensor:
        """silu(gate) · up of packed rows [T, 2F]."""
        return self._activated(*packed_TF.chunk(2, dim=-1))


def _multiply_then_round(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    wide = at_least_float32(gate_TF.dtype)
    return (F.silu(gate_TF.to(wide)) * up_TF.to(wide)).to(gate_TF.dtype)


def _round_then_multiply(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    return F.silu(gate_TF) * up_TF


class SpeechEncoder(nn.Module):
    """Stem, layers and final norm of one chunk: features [M, L] to [T, D]."""

    def __init__(self, config: AudioConfig, numerics: Numerics):
        super().__init__()
        C = config.downsample_hidden_size
        self.conv2d1 = nn.Conv2d(1, C, 3, stride=2, padding=1)
        self.conv2d2 = nn.Conv2d(C, C, 3, stride=2, padding=1)
        self.conv2d3 = nn.Conv2d(C, C, 3, stride=2, padding=1)
        self.conv_out = nn.Linear(config.conv_output_size, config.d_model, bias=False)
        self.layers = nn.ModuleList(SpeechLayer(config, numerics) for _ in range(config.encoder_layers))
        self.layer_norm = RMSNorm(config.d_model, ENCODER_EPS, numerics)

    def forward(self, mel_ML: Tensor, chunk: Chunk) -> Tensor:
        # What lies behind a chunk's tokens is masked in every stage and seen by none of them, so it is left out.
        mel_ML = mel_ML[:, : token_count(chunk.samples) << STRIDES]
        mel_ML = chunk.shown("mel", mel_ML.mT, stage=0).mT
        hidden_TD = chunk.shown("stem", self.stem(mel_ML.to(self.conv_out.weight.dtype), chunk), STRIDES)
        with rows(chunk.clip, chunk.positions(len(hidden_TD), STRIDES), "prefill"):
            positions_T = torch.arange(len(hidden_TD), device=hidden_TD.device)
            for index, layer in enumerate(self.layers):
                with scope(f"layers.{index}"):
                    hidden_TD = layer(hidden_TD, positions_T)
            return probe("final_norm", self.layer_norm(hidden_TD))

    def stem(self, mel_ML: Tensor, chunk: Chunk) -> Tensor:
        """[T, D]. Frequency is the height and time the width of the picture that the convolutions see."""
        valid = stage_frames(chunk.samples)
        x_CPL = self._shown("stem.input", masked(mel_ML[None], valid[0]), chunk, 0)
        for stage, convolution in enumerate((self.conv2d1, self.conv2d2, self.conv2d3), start=1):
            # The mask follows the activation: GELU(bias) is not 0.
            x_CPL = masked(F.gelu(convolution(x_CPL)), valid[stage])
            x_CPL = self._shown(f"stem.conv{stage}", x_CPL, chunk, stage)
        return self.conv_out(flattened(x_CPL))

    @staticmethod
    def _shown(name: str, x_CPL: Tensor, chunk: Chunk, stage: int) -> Tensor:
        return chunk.shown(name, x_CPL.permute(2, 0, 1), stage).permute(1, 2, 0)


def masked(x_CPL: Tensor, valid: int) -> Tensor:
    """Zeros from frame `valid` on."""
    return x_CPL * (torch.arange(x_CPL.shape[-1], device=x_CPL.device) < valid)


def flattened(x_CPT: Tensor) -> Tensor:
    """[T, C · P]: the frequencies of the first channel, then those of the second, and so on."""
    return x_CPT.permute(2, 0, 1).flatten(1)


class AudioAdapter(nn.Module):
    """[T, D] to [T, O], into the residual stream of the text. Number 2 of `proj` has no tensor."""

    def __init__(self, config: AudioConfig):
        super().__init__()
        D, out = config.d_model, config.adapter_out_dim
        self.proj = nn.Sequential(LayerNorm(D, ADAPTER_EPS), nn.Linear(D, out), nn.GELU(), nn.Linear(out, out))

    def forward(self, x_TD: Tensor) -> Tensor:
        norm, first, activation, last = self.proj
        normed_TD = probe("adapter.input", norm(x_TD))
        hidden_TO = probe("adapter.hidden", activation(first(normed_TD)))
        return probe("adapted", last(hidden_TO))


class AudioEncoder(nn.Module):
    """`audio_encoder.` in the tensor names: features of a clip to one row for each of its audio placeholders.

    Build it under `torch.device("meta")` and fill it from a checkpoint. Its `Numerics` decide the rounding of norms,
    attention and SwiGLU; features are rounded to the dtype of the weights when they come in.
    Raises: ConfigError for an odd number of rotated lanes.
    """

    def __init__(self, config: AudioConfig, numerics: Numerics | None = None):
        super().__init__()
        self.config = config
        self.numerics = numerics or Numerics()
        self.dots_encoder = nn.ModuleDict({"speech_encoder": SpeechEncoder(config, self.numerics)})
        self.audio_adapter = AudioAdapter(config)

    def forward(self, features: Features, clip: str = "clip") -> Tensor:
        """[tokens of the clip, O] in the dtype of the weights. `clip` names it in what the probes show.

        Raises: SoundError for features of another shape than the config and their sample counts say.
        """
        embeddings = [self.adapted(*pair) for pair in zip(features.mel_NML, self._chunks(features, clip), strict=True)]
        return torch.cat(embeddings)

    def adapted(self, mel_ML: Tensor, chunk: Chunk) -> Tensor:
        """One chunk, [T, O]."""
        speech = cast(Callable[[Tensor, Chunk], Tensor], self.dots_encoder["speech_encoder"])
        with scope("audio"):
            hidden_TD = speech(mel_ML, chunk)
            with rows(chunk.clip, chunk.positions(len(hidden_TD), STRIDES), "prefill"):
                return self.audio_adapter(hidden_TD)

    def _chunks(self, features: Features, clip: str) -> list[Chunk]:
        full = self.config.sampling_rate * self.config.chunk_seconds
        N, M = features.mel_NML.shape[:2]
        if not N or len(features.samples) != N or self.config.num_mel_bins != M:
            raise SoundError(
                f"{clip}: expected features (chunks, {self.config.num_mel_bins}, frames) of {len(features.samples)} "
                f"chunks, found {tuple(features.mel_NML.shape)}"
            )
        frames = features.mel_NML.shape[2]
        for index, samples in enumerate(features.samples):
            needed = min(token_count(samples) << STRIDES, full // HOP)
            if not 0 < samples <= full or frames < needed:
                raise SoundError(
                    f"{clip}: chunk {index} has {samples} samples and {frames} frames; it must have 1 to {full} "
                    f"samples and at least {needed} frames"
                )
        return [Chunk(clip, index, samples, full // HOP) for index, samples in enumerate(features.samples)]


def tiny_audio() -> AudioConfig:
    """A speech encoder of three layers in which every pair of sizes that a port could mix up differs.

    27 mel bins are 14, 7 and 4 rows behind the convolutions. A chunk is 2 s: 200 frames, 25 tokens. The output has the
    width of the tiny text model.
    """
    return AudioConfig(
        d_model=60,
        encoder_layers=3,
        encoder_attention_heads=5,
        encoder_ffn_dim=44,
        num_mel_bins=27,
        max_source_positions=6000,
        downsample_hidden_size=9,
        sampling_rate=16000,
        chunk_seconds=2,
        rope_theta=300.0,
        partial_rotary_factor=0.5,
        adapter_out_dim=96,
    )
