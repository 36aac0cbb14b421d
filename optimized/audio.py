"""The speech encoder and its adapter over the chunks of many clips at once: features to text embeddings.

Chunks lie behind each other. In the stem there is a gap between them, which the masks keep at zero; in the layers there
is none, and attention is told where each starts. So a second of sound costs the same in any company, and nothing is
computed for padding but the gaps. The residual stream and what a sublayer adds to it travel apart until the next norm
joins them in one kernel. Lengths are known to the host: nothing waits for the device between features and embeddings.

Memory follows from two budgets: tokens that go through the layers together, and tokens in the stem, whose first
picture has half a megabyte for each. Source: audio specification, sections 6 to 9 and 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.audio_mel import DeviceMel, MelRows, mel_rows
from optimized.audio_rows import ChunkPlace, TokenRows, grouped, stage_observer, stem_rows, token_rows
from optimized.audio_weights import PackedAudio, SpeechLayerWeights, pack_audio
from optimized.device import Backend, Ops, choose
from optimized.errors import KernelInputError, NotSupportedError
from optimized.kernels.stem import STAGES, picture, stem_convolve
from optimized.observe import BatchObserver
from optimized.weights import State
from reference.config import AudioConfig
from reference.media.mel import Features
from reference.probe import is_observed, scope

# L frames at a stage of the stem  M mel bins  P rows of frequencies  C channels  T tokens  R token rows with gaps
# D model  H heads  X lanes of a head  F feed-forward lanes  O output

ENCODER_EPS, ADAPTER_EPS = 1e-6, 1e-5


@dataclass(frozen=True)
class AudioOptions:
    """Tokens (80 ms) that are in the layers and in the stem together. A chunk (750) always fits.

    30720 tokens have 0.6 GB of packed gates; 6144 in the stem have 1.5 GB behind the first convolution. The stem's
    tensors must stay below 2^31 elements, which 17000 tokens reach.
    """

    most_tokens: int = 30720
    most_stem_tokens: int = 6144


class AudioTower:
    """Packed weights and the chosen ops on one device. Raises: NotSupportedError for an odd number of rotated lanes."""

    def __init__(self, config: AudioConfig, weights: PackedAudio, ops: Ops, options: AudioOptions | None = None):
        self.config, self.weights, self.ops = config, weights, ops
        self.options = options or AudioOptions()
        self.head_dim = config.d_model // config.encoder_attention_heads
        rotated = int(self.head_dim * config.partial_rotary_factor)
        if rotated % 2:
            raise NotSupportedError(f"the audio tower rotates pairs of lanes: expected an even number, found {rotated}")
        self.device, self.dtype = weights.final_norm_D.device, weights.final_norm_D.dtype
        self._mel = DeviceMel(config, self.device, torch.promote_types(self.dtype, torch.float32))
        self._frequency_P = 1.0 / config.rope_theta ** (
            torch.arange(0, rotated, 2, dtype=torch.float32, device=self.device) / max(1, rotated)
        )

    @classmethod
    def from_state(
        cls,
        config: AudioConfig,
        state: State,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        backend: Backend | None = None,
        options: AudioOptions | None = None,
    ) -> AudioTower:
        """From a state dict of `reference.audio.AudioEncoder`. Raises: CheckpointError, NotSupportedError."""
        return cls(config, pack_audio(state, config, device, dtype), choose(device, backend), options)

    def embed(self, clips: Sequence[Features], names: Sequence[str] | None = None) -> list[Tensor]:
        """Features that were computed elsewhere to embeddings. Raises: SoundError for features of another shape."""
        return self(mel_rows(clips, self.config, self.device), names)

    def embed_sound(self, waveforms: Sequence[Tensor], names: Sequence[str] | None = None) -> list[Tensor]:
        """Samples to embeddings, with features computed on the device.

        waveforms: one channel each at the config's rate, float [S] on the CPU. Raises: SoundError, as `DeviceMel`.
        """
        return self(self._mel(waveforms), names)

    @torch.no_grad()
    def __call__(self, mel: MelRows, names: Sequence[str] | None = None) -> list[Tensor]:
        """The rows of each clip's placeholders, [tokens, O] in the dtype of the weights.

        `names`: of the clips, in what the probes show.
        Raises: KernelInputError for names of another number than the clips.
        """
        names = names or [f"clip {number}" for number in range(len(mel.chunks))]
        if len(names) != len(mel.chunks):
            raise KernelInputError(f"expected a name for each of {len(mel.chunks)} clips, found {len(names)}")
        owners = ((name, index) for name, count in zip(names, mel.chunks, strict=True) for index in range(count))
        chunks = [ChunkPlace(*owner, samples) for owner, samples in zip(owners, mel.samples, strict=True)]
        pieces = [torch.empty(0, self.config.adapter_out_dim, dtype=self.dtype, device=self.device)]
        frame = 0
        for batch in grouped(chunks, self.options.most_tokens):
            end = frame + (sum(chunk.tokens for chunk in batch) << STAGES)
            with scope("audio"):
                pieces.append(self._adapted(self._encoded(mel.mel_LM[frame:end], batch), batch))
            frame = end
        return list(torch.cat(pieces).split(mel.tokens))

    def _encoded(self, mel_LM: Tensor, batch: Sequence[ChunkPlace]) -> Tensor:
        """Stem, layers and final norm, [T, D]."""
        see = self._observer(batch, STAGES)
        pieces, frame = [], 0
        for group in grouped(batch, self.options.most_stem_tokens):
            end = frame + (sum(chunk.tokens for chunk in group) << STAGES)
            pieces.append(self._stem(mel_LM[frame:end], group))
            frame = end
        hidden_TD = see("stem", torch.cat(pieces))
        rows = token_rows(batch, self.device)
        cos_sin_TR = self.rotation(rows.positions_T)
        weights = self.weights
        normed_TD = self.ops.rms_norm(hidden_TD, weights.layers[0].attention_norm_D, ENCODER_EPS)
        next_norms = [*(layer.attention_norm_D for layer in weights.layers[1:]), weights.final_norm_D]
        for index, (layer, next_norm_D) in enumerate(zip(weights.layers, next_norms, strict=True)):
            with scope(f"layers.{index}"):
                see.only("input", hidden_TD)
                with scope("attn"):
                    attended_TD = self._attention(see("input", normed_TD), layer, rows, cos_sin_TR, see)
                hidden_TD, normed_TD = self.ops.add_rms_norm(hidden_TD, attended_TD, layer.ffn_norm_D, ENCODER_EPS)
                with scope("ffn"):
                    delta_TD = self._feed_forward(see("input", normed_TD), layer, see)
                hidden_TD, normed_TD = self.ops.add_rms_norm(hidden_TD, delta_TD, next_norm_D, ENCODER_EPS)
                see.only("output", hidden_TD)
        return see("final_norm", normed_TD)

    def rotation(self, positions_T: Tensor) -> Tensor:
        """[cos P | sin P] of each token in the dtype of the activations, as every implementation rounds them."""
        angle_TP = (positions_T.to(torch.float32)[:, None] * self._frequency_P).to(
            torch.promote_types(self.dtype, torch.float32)
        )
        return torch.cat((angle_TP.cos(), angle_TP.sin()), dim=-1).to(self.dtype)

    def _stem(self, mel_LM: Tensor, chunks: Sequence[ChunkPlace]) -> Tensor:
        """[T, D] of some chunks."""
        stem, ops = self.weights.stem, self.ops
        rows, token_T = stem_rows(chunks, self.device)
        if is_observed():
            self._observer(chunks, 0).only("mel", mel_LM)
            input_LM1 = picture(mel_LM, rows, self.dtype)[:, :, None]
            self._observer(chunks, 0, gap=1).only("stem.input", input_LM1, _channels_first)
        x_LPC = ops.stem_first(mel_LM, stem.first_C33, stem.first_bias_C, rows)
        self._show_stage(x_LPC, chunks, 1)
        for stage, (weight_C33C, bias_C) in enumerate(
            ((stem.second_C33C, stem.second_bias_C), (stem.third_C33C, stem.third_bias_C)), start=2
        ):
            x_LPC = ops.stem_activate_(stem_convolve(x_LPC, weight_C33C), bias_C, rows, stage)
            self._show_stage(x_LPC, chunks, stage)
        return F.linear(x_LPC.flatten(1)[token_T], stem.out_DX)

    def _show_stage(self, x_LPC: Tensor, chunks: Sequence[ChunkPlace], stage: int) -> None:
        if is_observed():
            self._observer(chunks, stage, gap=1).only(f"stem.conv{stage}", x_LPC, _channels_first)

    def _attention(
        self, x_TD: Tensor, layer: SpeechLayerWeights, rows: TokenRows, cos_sin_TR: Tensor, see: BatchObserver
    ) -> Tensor:
        H = self.config.encoder_attention_heads
        qkv_T3HX = F.linear(x_TD, layer.qkv_XD, layer.qkv_bias_X).unflatten(-1, (3, H, self.head_dim))
        # Queries and keys lie side by side: the rotation takes them for heads of one kind.
        self.ops.rotate_halves_(qkv_T3HX[:, :2].flatten(1, 2), cos_sin_TR)
        query_THX, key_THX, value_THX = (
            see(name, x_THX) for name, x_THX in zip(("query", "key", "value"), qkv_T3HX.unbind(1), strict=True)
        )
        core_THX = self.ops.varlen_attention(
            query_THX, key_THX, value_THX, rows.starts_B1, rows.longest, self.head_dim**-0.5
        )
        core_THX = see("core", core_THX)
        return see("output", F.linear(core_THX.flatten(1), layer.out_DD, layer.out_bias_D))

    def _feed_forward(self, x_TD: Tensor, layer: SpeechLayerWeights, see: BatchObserver) -> Tensor:
        activated_TF = see("activated", self.ops.swiglu(F.linear(x_TD, layer.gate_up_XD, layer.gate_up_bias_X)))
        return see("output", F.linear(activated_TF, layer.down_DF, layer.down_bias_D))

    def _adapted(self, x_TD: Tensor, batch: Sequence[ChunkPlace]) -> Tensor:
        """[T, O]"""
        see, adapter = self._observer(batch, STAGES), self.weights.adapter
        normed_TD = F.layer_norm(x_TD, x_TD.shape[1:], adapter.norm_D, adapter.norm_bias_D, ADAPTER_EPS)
        hidden_TO = F.gelu(F.linear(see("adapter.input", normed_TD), adapter.first_OD, adapter.first_bias_O))
        return see("adapted", F.linear(see("adapter.hidden", hidden_TO), adapter.last_OO, adapter.last_bias_O))

    def _observer(self, chunks: Sequence[ChunkPlace], stage: int, gap: int = 0) -> BatchObserver:
        if not is_observed():
            return BatchObserver(())
        return stage_observer(chunks, self.config, stage, gap, self.device)


def _channels_first(x_LPC: Tensor, _: object) -> Tensor:
    """As the probes have it."""
    return x_LPC.mT
