"""Reads and writes the released `config.json`.

The file is flat: text keys at the top level, `vision_config` and `audio_config` nested. It leaves out keys for which
related models default to something else (router groups, index RoPE pairing), so a key is either required here or one
of the few that may be absent; everything else is refused by name.
Source: text_model specification, section 2; vision and audio specifications, section 1.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from reference.config import AudioConfig, LayerKind, MlaGeometry, NoteConfig, TextConfig, VisionConfig
from reference.errors import ConfigError
from reference.json_reader import JsonReader

# Other spellings of the sparse ("full") layers found in converted configs.
_FULL_ALIASES = ("full_attention", "indexed_attention", "deepseek_sparse_attention")


def read_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> NoteConfig:
    """See `NoteConfig.from_json`."""
    values = _load_object(source)
    if isinstance(source, Mapping):
        return _read_note(values)
    try:
        return _read_note(values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _load_object(source: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    try:
        with open(source, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: is not valid JSON: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: must hold a JSON object, found {type(values).__name__}")
    return values


def _read_note(values: Mapping[str, Any]) -> NoteConfig:
    for wrapper in ("text_config", "llm_config", "thinker_config"):
        if wrapper in values:
            raise ConfigError(
                f"config: {wrapper!r} wraps the text keys; NOTE's config is flat, and a wrapped one's top level holds "
                f"nothing but defaults: pass the object with the text keys at its top level"
            )
    reader = JsonReader(values, "config")
    reader.choice("model_type", ("dots3_note",))
    reader.choice("architectures", (["Dots3NoteForCausalLM"],), ["Dots3NoteForCausalLM"])
    text = _read_text(reader)
    vision_reader, audio_reader = reader.section("vision_config"), reader.section("audio_config")
    vision = _read_vision(vision_reader) if vision_reader else None
    audio = _read_audio(audio_reader) if audio_reader else None
    for tower, name in ((vision, "vision_config"), (audio, "audio_config")):
        if tower and tower.adapter_out_dim != text.hidden_size:
            raise ConfigError(
                f"config: {name}: the adapter's output width must equal hidden_size {text.hidden_size}, "
                f"found {tower.adapter_out_dim}"
            )
    return NoteConfig(
        text=text,
        vision=vision,
        audio=audio,
        bos_token_id=reader.integer("bos_token_id", 151643, minimum=0),
        eos_token_ids=reader.integers("eos_token_id", (151643, 151668)),
        pad_token_id=reader.integer("pad_token_id", 151659, minimum=0),
        image_token_id=reader.integer("image_token_id", 151660, minimum=0),
        video_token_id=reader.integer("video_token_id", 151680, minimum=0),
        audio_token_id=reader.integer("audio_token_id", 151720, minimum=0),
        unused=reader.unread(),
    )


def _read_text(reader: JsonReader) -> TextConfig:
    _refuse_unsupported(reader)
    full = _read_geometry(reader, "", "rope_theta")
    sliding = _read_geometry(reader, "swa_", "swa_rope_theta")
    num_hidden_layers = reader.integer("num_hidden_layers")
    text = TextConfig(
        hidden_size=reader.integer("hidden_size"),
        vocab_size=reader.integer("vocab_size"),
        num_hidden_layers=num_hidden_layers,
        layer_types=_read_layer_types(reader, num_hidden_layers),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        full=full,
        sliding=sliding,
        sliding_window_size=reader.integer("sliding_window_size"),
        apply_mla_qkv_lora_rescale=reader.boolean("apply_mla_qkv_lora_rescale"),
        index_n_heads=reader.integer("index_n_heads"),
        index_head_dim=reader.integer("index_head_dim"),
        index_topk=reader.integer("index_topk"),
        indexer_rope_interleave=reader.boolean("indexer_rope_interleave", True),
        intermediate_size=reader.integer("intermediate_size"),
        first_k_dense_replace=reader.integer("first_k_dense_replace", minimum=0),
        n_routed_experts=reader.integer("n_routed_experts"),
        n_shared_experts=reader.integer("n_shared_experts"),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        moe_intermediate_size=reader.integer("moe_intermediate_size"),
        n_group=reader.integer("n_group", 1),
        topk_group=reader.integer("topk_group", 1),
        norm_topk_prob=reader.boolean("norm_topk_prob"),
        routed_scaling_factor=reader.number("routed_scaling_factor", 1.0),
        num_nextn_predict_layers=reader.integer("num_nextn_predict_layers", 1, minimum=0),
    )
    _check_sizes(reader, text)
    return text


def _read_geometry(reader: JsonReader, prefix: str, theta_key: str) -> MlaGeometry:
    heads = reader.integer(f"{prefix}num_attention_heads")
    if reader.integer(f"{prefix}num_key_value_heads", heads) != heads:
        raise ConfigError(f"config: '{prefix}num_key_value_heads' must equal '{prefix}num_attention_heads' ({heads})")
    return MlaGeometry(
        num_attention_heads=heads,
        q_lora_rank=reader.integer(f"{prefix}q_lora_rank"),
        kv_lora_rank=reader.integer(f"{prefix}kv_lora_rank"),
        qk_nope_head_dim=reader.integer(f"{prefix}qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer(f"{prefix}qk_rope_head_dim"),
        v_head_dim=reader.integer(f"{prefix}v_head_dim"),
        rope_theta=reader.number(theta_key),
        gate_type=reader.choice(f"{prefix}attention_gate_type", ("headwise", "elementwise")),
    )


def _read_layer_types(reader: JsonReader, num_hidden_layers: int) -> tuple[LayerKind, ...]:
    kinds = reader.strings("layer_types")
    if len(kinds) != num_hidden_layers:
        raise ConfigError(
            f"config: 'layer_types' must have num_hidden_layers = {num_hidden_layers} entries, found {len(kinds)}"
        )
    for layer, kind in enumerate(kinds):
        if kind != "sliding_attention" and kind not in _FULL_ALIASES:
            raise ConfigError(
                f"config: 'layer_types'[{layer}] must be 'sliding_attention' or one of {_FULL_ALIASES}, found {kind!r}"
            )
    return tuple("sliding_attention" if kind == "sliding_attention" else "full_attention" for kind in kinds)


def _refuse_unsupported(reader: JsonReader) -> None:
    """Read the switches for which only one value has ever existed in NOTE."""
    reader.choice("scoring_func", ("sigmoid",))
    reader.choice("topk_method", ("noaux_tc",))
    # What a null or absent key means is fixed by the weights: the rope-key norm and the indexer ship.
    reader.choice("k_rope_only_layernorm", (True, None), None)
    for key, only in (
        ("hidden_act", "silu"),
        ("normalization", "RMSNorm"),
        ("final_norm", "RMSNorm"),
        ("softmax_type", "vanilla"),
        ("use_dsa", True),
        ("use_sliding_window", True),
        ("attention_bias", False),
        ("use_dynamic_rsf", False),
        ("moe_gating_fp32", False),
        ("moe_layer_freq", 1),
        ("tie_word_embeddings", False),
    ):
        reader.choice(key, (only,), only)
    for key in ("moe_router_dtype", "quantization_config"):
        reader.choice(key, (None,), None)
    if reader.has("rope_scaling"):
        reader.choice("rope_scaling", (None, {"rope_type": "default"}, {"type": "default"}))


def _check_sizes(reader: JsonReader, text: TextConfig) -> None:
    for name, geometry in (("qk_rope_head_dim", text.full), ("swa_qk_rope_head_dim", text.sliding)):
        if geometry.qk_rope_head_dim % 2:
            raise ConfigError(f"config: {name!r} must be even (RoPE rotates pairs), found {geometry.qk_rope_head_dim}")
    if text.full.qk_rope_head_dim > text.index_head_dim:
        raise ConfigError(
            f"config: 'index_head_dim' must be at least qk_rope_head_dim {text.full.qk_rope_head_dim}, "
            f"found {text.index_head_dim}"
        )
    # The sliding head width is stored twice; `head_dim` is the sliding one as well (full layers ignore it).
    width = text.sliding.qk_head_dim
    for key in ("swa_head_dim", "head_dim"):
        if reader.integer(key, width) != width:
            raise ConfigError(f"config: {key!r} must be swa_qk_nope_head_dim + swa_qk_rope_head_dim = {width}")
    width = text.moe_intermediate_size
    if reader.integer("moe_shared_expert_intermediate_size", width) != width:
        raise ConfigError(f"config: 'moe_shared_expert_intermediate_size' must equal moe_intermediate_size {width}")
    if text.n_routed_experts % text.n_group or text.topk_group > text.n_group:
        raise ConfigError(
            f"config: n_group {text.n_group} must divide n_routed_experts {text.n_routed_experts}, "
            f"and topk_group {text.topk_group} must be at most n_group"
        )
    if text.n_group > 1 and text.n_routed_experts // text.n_group < 2:
        raise ConfigError("config: grouped routing ranks a group by its two best experts, so each group needs two")
    eligible = text.n_routed_experts // text.n_group * text.topk_group
    if text.num_experts_per_tok > eligible:
        raise ConfigError(
            f"config: 'num_experts_per_tok' {text.num_experts_per_tok} exceeds the {eligible} experts that can be "
            f"chosen; keep at least that many experts in a slice, or lower it explicitly"
        )


def _read_vision(reader: JsonReader) -> VisionConfig:
    for key, only in (
        ("temporal_patch_size", 1),
        ("use_bias", False),
        ("use_qk_norm", True),
        ("is_causal", False),
        ("post_norm", True),
        ("pre_pixel_shuffle", True),
        ("router_scoring_func", "sigmoid"),
        ("router_scale", 1.0),
        ("adapter_type", "patch_merger"),
    ):
        reader.choice(key, (only,), only)
    vision = VisionConfig(
        embed_dim=reader.integer("embed_dim"),
        num_hidden_layers=reader.integer("num_hidden_layers"),
        num_attention_heads=reader.integer("num_attention_heads"),
        intermediate_size=reader.integer("intermediate_size"),
        moe_intermediate_size=reader.integer("moe_intermediate_size"),
        num_channels=reader.integer("num_channels"),
        patch_size=reader.integer("patch_size"),
        spatial_merge_size=reader.integer("spatial_merge_size"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        experts=tuple(max(count, 0) for count in reader.integers("pyramid_num_routed")),
        num_experts_per_tok=int(reader.number("capacity_factor")),
        adapter_out_dim=reader.integer("adapter_out_dim"),
    )
    reader.choice("adapter_in_dim", (vision.embed_dim,), vision.embed_dim)
    reader.choice("adapter_merge_size", (vision.spatial_merge_size,), vision.spatial_merge_size)
    if vision.embed_dim % vision.num_attention_heads or vision.embed_dim // vision.num_attention_heads % 4:
        raise ConfigError(
            f"config: vision_config: embed_dim {vision.embed_dim} must be num_attention_heads "
            f"{vision.num_attention_heads} times a multiple of 4 (two-dimensional RoPE)"
        )
    if len(vision.experts) != vision.num_hidden_layers:
        raise ConfigError(
            f"config: vision_config: 'pyramid_num_routed' must have num_hidden_layers = {vision.num_hidden_layers} "
            f"entries, found {len(vision.experts)}"
        )
    return vision


def _read_audio(reader: JsonReader) -> AudioConfig:
    for key, only in (
        ("encoder_type", "dots"),
        ("merge_factor", 1),
        ("use_conv2d_stem", True),
        ("use_rope", True),
        ("use_rms_norm", True),
        ("use_causal", False),
    ):
        reader.choice(key, (only,), only)
    encoder = reader.section("whisper_config")
    if encoder is None:
        raise ConfigError("config: audio_config: required key 'whisper_config' (the encoder's sizes) is absent")
    encoder.choice("activation_function", ("swiglu",), "swiglu")
    rope = reader.section("rope_parameters") or JsonReader({}, "config: audio_config: rope_parameters")
    rope.choice("rope_type", ("default",), "default")
    audio = AudioConfig(
        d_model=encoder.integer("d_model"),
        encoder_layers=encoder.integer("encoder_layers"),
        encoder_attention_heads=encoder.integer("encoder_attention_heads"),
        encoder_ffn_dim=encoder.integer("encoder_ffn_dim"),
        num_mel_bins=encoder.integer("num_mel_bins"),
        max_source_positions=encoder.integer("max_source_positions"),
        downsample_hidden_size=reader.integer("downsample_hidden_size"),
        sampling_rate=reader.integer("sampling_rate"),
        chunk_seconds=reader.integer("chunk_seconds"),
        rope_theta=rope.number("rope_theta", 10000.0),
        partial_rotary_factor=rope.number("partial_rotary_factor", 0.5),
        adapter_out_dim=reader.integer("whisper_adapter_out_dim"),
    )
    reader.choice("whisper_adapter_in_dim", (audio.d_model,), audio.d_model)
    if audio.d_model % audio.encoder_attention_heads:
        raise ConfigError(
            f"config: audio_config: d_model {audio.d_model} must be a multiple of its "
            f"{audio.encoder_attention_heads} heads"
        )
    return audio


def write_config(config: NoteConfig) -> dict[str, Any]:
    """See `NoteConfig.to_json`."""
    text = config.text
    values: dict[str, Any] = {"architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note"}
    for name in (f.name for f in dataclasses.fields(TextConfig) if f.name not in ("full", "sliding", "layer_types")):
        values[name] = getattr(text, name)
    values["layer_types"] = list(text.layer_types)
    for prefix, geometry in (("", text.full), ("swa_", text.sliding)):
        sizes = dataclasses.asdict(geometry)
        gate_type = sizes.pop("gate_type")
        values.update({f"{prefix}{name}": value for name, value in sizes.items()})
        values[f"{prefix}num_key_value_heads"] = geometry.num_attention_heads
        values[f"{prefix}attention_gate_type"] = gate_type
    values |= {
        "head_dim": text.sliding.qk_head_dim,
        "swa_head_dim": text.sliding.qk_head_dim,
        "moe_shared_expert_intermediate_size": text.moe_intermediate_size,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "k_rope_only_layernorm": True,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "image_token_id": config.image_token_id,
        "video_token_id": config.video_token_id,
        "audio_token_id": config.audio_token_id,
    }
    if config.vision:
        values["vision_config"] = _write_vision(config.vision)
    if config.audio:
        values["audio_config"] = _write_audio(config.audio)
    return values | dict(config.unused)


def _write_vision(vision: VisionConfig) -> dict[str, Any]:
    values = dataclasses.asdict(vision)
    values["pyramid_num_routed"] = [count or -1 for count in values.pop("experts")]
    values["capacity_factor"] = values.pop("num_experts_per_tok")
    # In the released JSON `hidden_size` is the adapter's output width, a second copy.
    return values | {
        "hidden_size": vision.adapter_out_dim,
        "adapter_in_dim": vision.embed_dim,
        "adapter_merge_size": vision.spatial_merge_size,
        "adapter_type": "patch_merger",
        "temporal_patch_size": 1,
        "use_bias": False,
        "use_qk_norm": True,
        "is_causal": False,
        "post_norm": True,
        "pre_pixel_shuffle": True,
        "router_scoring_func": "sigmoid",
        "router_scale": 1.0,
    }


def _write_audio(audio: AudioConfig) -> dict[str, Any]:
    encoder = (
        "d_model",
        "encoder_layers",
        "encoder_attention_heads",
        "encoder_ffn_dim",
        "num_mel_bins",
        "max_source_positions",
    )
    return {
        "encoder_type": "dots",
        "whisper_config": {name: getattr(audio, name) for name in encoder} | {"activation_function": "swiglu"},
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": audio.rope_theta,
            "partial_rotary_factor": audio.partial_rotary_factor,
        },
        "downsample_hidden_size": audio.downsample_hidden_size,
        "sampling_rate": audio.sampling_rate,
        "chunk_seconds": audio.chunk_seconds,
        "whisper_adapter_in_dim": audio.d_model,
        "whisper_adapter_out_dim": audio.adapter_out_dim,
        "merge_factor": 1,
        "use_conv2d_stem": True,
        "use_rope": True,
        "use_rms_norm": True,
        "use_causal": False,
    }
