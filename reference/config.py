"""The configuration of Dots3 NOTE as frozen values, with the released model, a tiny one, and slices.

How the released JSON is read and written: `config_json`.
Source: text_model specification, sections 2 to 4; vision and audio specifications, section 1.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from reference.errors import ConfigError

LayerKind = Literal["full_attention", "sliding_attention"]
GateType = Literal["headwise", "elementwise"]


@dataclass(frozen=True)
class MlaGeometry:
    """Sizes of one kind of latent attention; full and sliding layers have one each."""

    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    gate_type: GateType

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """From the width of an expanded head, also where attention runs in the (wider) latent space."""
        return self.qk_head_dim**-0.5

    @property
    def latent_row(self) -> int:
        """Values cached for each token: the latent and the shared rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def value_width(self) -> int:
        return self.num_attention_heads * self.v_head_dim

    @property
    def gate_width(self) -> int:
        return self.num_attention_heads if self.gate_type == "headwise" else self.value_width


@dataclass(frozen=True)
class TextConfig:
    """The language model and its draft layer. Sizes in elements, `sliding_window_size` in tokens counting the query."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    layer_types: tuple[LayerKind, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    # attention
    full: MlaGeometry
    sliding: MlaGeometry
    sliding_window_size: int
    apply_mla_qkv_lora_rescale: bool
    # indexer of the full layers
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_rope_interleave: bool
    # feed-forward
    intermediate_size: int
    first_k_dense_replace: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    # draft (multi-token prediction) layers in the checkpoint
    num_nextn_predict_layers: int

    def is_full(self, layer: int) -> bool:
        """Full (indexed) attention; draft layers, past the end of `layer_types`, are sliding."""
        return layer < self.num_hidden_layers and self.layer_types[layer] == "full_attention"

    def is_moe(self, layer: int) -> bool:
        """Mixture of experts; draft layers are dense."""
        return self.first_k_dense_replace <= layer < self.num_hidden_layers

    def geometry(self, layer: int) -> MlaGeometry:
        return self.full if self.is_full(layer) else self.sliding

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size * self.n_shared_experts


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower. `experts[b]` counts the experts of block b; 0 means a dense block."""

    embed_dim: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    moe_intermediate_size: int
    num_channels: int
    patch_size: int
    spatial_merge_size: int
    rms_norm_eps: float
    experts: tuple[int, ...]
    num_experts_per_tok: int
    adapter_out_dim: int


@dataclass(frozen=True)
class AudioConfig:
    """The speech encoder. `sampling_rate` in Hz, `chunk_seconds` in seconds."""

    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    num_mel_bins: int
    max_source_positions: int
    downsample_hidden_size: int
    sampling_rate: int
    chunk_seconds: int
    rope_theta: float
    partial_rotary_factor: float
    adapter_out_dim: int

    @property
    def conv_output_size(self) -> int:
        """Width of the flattened convolution stem: channels times mel bins after three strides of two."""
        return self.downsample_hidden_size * ((self.num_mel_bins + 7) // 8)


@dataclass(frozen=True)
class NoteConfig:
    """The whole model. A tower that the JSON lacks is None. `unused` keeps entries that decide nothing here."""

    text: TextConfig
    vision: VisionConfig | None
    audio: AudioConfig | None
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    image_token_id: int
    video_token_id: int
    audio_token_id: int
    unused: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> NoteConfig:
        """Read a released-style config: an object already parsed, or the path of a `config.json`.

        Raises: ConfigError, naming the key, what it must be and what was found.
        """
        from reference.config_json import read_config  # imports this module's classes

        return read_config(source)

    def to_json(self) -> dict[str, Any]:
        """The flat JSON object that `from_json` reads back to an equal value."""
        from reference.config_json import write_config  # imports this module's classes

        return write_config(self)


def slice_of(config: NoteConfig, layers: Sequence[int], experts: int | None = None) -> NoteConfig:
    """The config of a slice: `layers` renumbered from 0 in the given order, `experts` routed experts kept.

    The draft layer and the towers stay as they are. Raises: ConfigError for a layer that does not exist or is named
    twice, a dense layer behind an expert layer (the format cannot say it), or fewer experts than a token chooses.
    """
    text = config.text
    for layer in layers:
        if not 0 <= layer < text.num_hidden_layers:
            raise ConfigError(
                f"slice: layer {layer} does not exist; the model has layers 0 to {text.num_hidden_layers - 1}"
            )
    if not layers or len(set(layers)) != len(layers):
        raise ConfigError(f"slice: layers must be distinct and at least one, found {list(layers)}")
    moe = [text.is_moe(layer) for layer in layers]
    if moe != sorted(moe):
        raise ConfigError(f"slice: dense layers must come before expert layers, found {list(layers)}")
    kept = text.n_routed_experts if experts is None else experts
    if not text.num_experts_per_tok <= kept <= text.n_routed_experts:
        raise ConfigError(
            f"slice: keep between num_experts_per_tok = {text.num_experts_per_tok} and "
            f"{text.n_routed_experts} experts, found {kept}"
        )
    sliced = dataclasses.replace(
        text,
        num_hidden_layers=len(layers),
        layer_types=tuple(text.layer_types[layer] for layer in layers),
        first_k_dense_replace=moe.count(False),
        n_routed_experts=kept,
    )
    # Reading it back refuses what cannot be: experts that fill no whole group, say.
    return NoteConfig.from_json(dataclasses.replace(config, text=sliced).to_json())


def _schedule(num_hidden_layers: int) -> tuple[LayerKind, ...]:
    return tuple("full_attention" if i < 2 or i % 4 == 1 else "sliding_attention" for i in range(num_hidden_layers))


def released() -> NoteConfig:
    """`dots-studio/dots3-note-prev`: 280 B parameters, 46 layers of which 13 are full."""
    text = TextConfig(
        hidden_size=5120,
        vocab_size=152064,
        num_hidden_layers=46,
        layer_types=_schedule(46),
        max_position_embeddings=524288,
        rms_norm_eps=1e-5,
        full=MlaGeometry(128, 1024, 512, 128, 64, 128, 8.0e7, "headwise"),
        sliding=MlaGeometry(64, 1024, 1024, 192, 64, 128, 5.0e4, "headwise"),
        sliding_window_size=513,
        apply_mla_qkv_lora_rescale=True,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=2048,
        indexer_rope_interleave=True,
        intermediate_size=13824,
        first_k_dense_replace=1,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        num_nextn_predict_layers=1,
    )
    vision = VisionConfig(
        embed_dim=1536,
        num_hidden_layers=42,
        num_attention_heads=24,
        intermediate_size=4224,
        moe_intermediate_size=2112,
        num_channels=3,
        patch_size=14,
        spatial_merge_size=2,
        rms_norm_eps=1e-5,
        experts=(0,) * 25 + tuple(range(4, 65, 4)) + (64,),
        num_experts_per_tok=2,
        adapter_out_dim=5120,
    )
    audio = AudioConfig(
        d_model=1280,
        encoder_layers=32,
        encoder_attention_heads=20,
        encoder_ffn_dim=5120,
        num_mel_bins=128,
        max_source_positions=6000,
        downsample_hidden_size=480,
        sampling_rate=16000,
        chunk_seconds=60,
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        adapter_out_dim=5120,
    )
    return NoteConfig(text, vision, audio, 151643, (151643, 151668), 151659, 151660, 151680, 151720)


def tiny() -> NoteConfig:
    """A text model of six layers in which every pair of sizes that a port could mix up differs.

    Heads, ranks, head widths, latent rows, thetas, window and top-k are all distinct, so that no swap is a no-op.
    """
    text = TextConfig(
        hidden_size=96,
        vocab_size=193,
        num_hidden_layers=6,
        layer_types=_schedule(6),
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        full=MlaGeometry(6, 32, 16, 12, 8, 10, 2.0e4, "headwise"),
        sliding=MlaGeometry(4, 24, 48, 15, 6, 11, 2.0e2, "headwise"),
        sliding_window_size=7,
        apply_mla_qkv_lora_rescale=True,
        index_n_heads=9,
        index_head_dim=22,
        index_topk=13,
        indexer_rope_interleave=True,
        intermediate_size=72,
        first_k_dense_replace=1,
        n_routed_experts=14,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=28,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        num_nextn_predict_layers=1,
    )
    return NoteConfig(text, None, None, 1, (1, 2), 0, 190, 191, 192)
