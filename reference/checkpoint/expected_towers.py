"""The tensors of the vision and audio towers. One file each in the release, and nothing else is in those files.

Names end in `.weight` or `.bias` except the vision router's two, `gate_weight` and `router_bias` (float32).
Source: checkpoint specification, sections 4 and 5.
"""

from collections.abc import Iterator

import torch

from reference.checkpoint.expected import Bucket, ExpectedTensor
from reference.config import AudioConfig, VisionConfig

SPEECH = "audio_encoder.dots_encoder.speech_encoder."
AUDIO_ADAPTER = "audio_encoder.audio_adapter.proj."
VISION = "vision_encoder."


def _bf16(name: str, shape: tuple[int, ...], bucket: Bucket) -> ExpectedTensor:
    return ExpectedTensor(name, shape, torch.bfloat16, bucket)


def _affine(name: str, shape: tuple[int, ...], bucket: Bucket) -> Iterator[ExpectedTensor]:
    """A weight and a bias of its first dim."""
    yield _bf16(f"{name}.weight", shape, bucket)
    yield _bf16(f"{name}.bias", shape[:1], bucket)


def vision_tensors(vision: VisionConfig) -> Iterator[ExpectedTensor]:
    """2,195 in the release: 42 blocks, of which the last 17 have 4 to 64 experts each."""
    D, patch = vision.embed_dim, vision.patch_size
    yield from _affine(f"{VISION}patch_embed.proj", (D, vision.num_channels, patch, patch), "vision")
    yield _bf16(f"{VISION}patch_embed.norm.weight", (D,), "vision")
    for block in range(vision.num_hidden_layers):
        yield from _vision_block(vision, f"{VISION}blocks.{block}.", vision.experts[block])
    yield _bf16(f"{VISION}post_trunk_norm.weight", (D,), "vision")
    # The adapter reads the patches of one merged square side by side.
    merged = D * vision.spatial_merge_size**2
    yield from _affine(f"{VISION}adapter.ln_q", (D,), "vision")
    yield from _affine(f"{VISION}adapter.mlp.0", (merged, merged), "vision")
    yield from _affine(f"{VISION}adapter.mlp.2", (vision.adapter_out_dim, merged), "vision")


def _vision_block(vision: VisionConfig, prefix: str, experts: int) -> Iterator[ExpectedTensor]:
    D, head_dim = vision.embed_dim, vision.embed_dim // vision.num_attention_heads
    shapes = {
        "norm_1.weight": (D,),
        "attn.qkv.weight": (3 * D, D),
        "attn.q_norm.weight": (head_dim,),
        "attn.k_norm.weight": (head_dim,),
        "attn.proj.weight": (D, D),
        "norm_2.weight": (D,),
    }
    if not experts:
        shapes |= _vision_mlp("mlp.", D, vision.intermediate_size)
    else:
        shapes["mlp.gate_weight"] = (experts, D)
        for expert in range(experts):
            shapes |= _vision_mlp(f"mlp.experts.{expert}.", D, vision.moe_intermediate_size)
    for name, shape in shapes.items():
        yield _bf16(prefix + name, shape, "vision")
    if experts:
        yield ExpectedTensor(f"{prefix}mlp.router_bias", (experts,), torch.float32, "vision")


def _vision_mlp(prefix: str, D: int, F: int) -> dict[str, tuple[int, ...]]:
    """fc1 is the gate, fc3 the up and fc2 the down projection."""
    return {f"{prefix}fc1.weight": (F, D), f"{prefix}fc3.weight": (F, D), f"{prefix}fc2.weight": (D, F)}


def audio_tensors(audio: AudioConfig) -> Iterator[ExpectedTensor]:
    """430 in the release: a convolution stem, 32 layers, an adapter. Positions are rotary: there is no table."""
    D, channels, F = audio.d_model, audio.downsample_hidden_size, audio.encoder_ffn_dim
    for number, inputs in ((1, 1), (2, channels), (3, channels)):
        yield from _affine(f"{SPEECH}conv2d{number}", (channels, inputs, 3, 3), "audio")
    yield _bf16(f"{SPEECH}conv_out.weight", (D, audio.conv_output_size), "audio")
    for layer in range(audio.encoder_layers):
        prefix = f"{SPEECH}layers.{layer}."
        yield _bf16(f"{prefix}self_attn_layer_norm.weight", (D,), "audio")
        yield from _affine(f"{prefix}self_attn.q_proj", (D, D), "audio")
        yield _bf16(f"{prefix}self_attn.k_proj.weight", (D, D), "audio")
        yield from _affine(f"{prefix}self_attn.v_proj", (D, D), "audio")
        yield from _affine(f"{prefix}self_attn.out_proj", (D, D), "audio")
        yield _bf16(f"{prefix}final_layer_norm.weight", (D,), "audio")
        # Packed: F gate rows, then F up rows.
        yield from _affine(f"{prefix}fc1", (2 * F, D), "audio")
        yield from _affine(f"{prefix}fc2", (D, F), "audio")
    yield _bf16(f"{SPEECH}layer_norm.weight", (D,), "audio")
    out = audio.adapter_out_dim
    yield from _affine(f"{AUDIO_ADAPTER}0", (D,), "audio")
    yield from _affine(f"{AUDIO_ADAPTER}1", (out, D), "audio")
    yield from _affine(f"{AUDIO_ADAPTER}3", (out, out), "audio")
