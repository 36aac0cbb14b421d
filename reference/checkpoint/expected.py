"""The tensors a checkpoint must hold, from its configuration alone: name, shape, dtype and bucket of each.

The released configuration gives 38,006 tensors and 576,886,825,984 bytes. Linear weights are [out, in]; everything is
bfloat16 except the correction biases of the routers, which are float32. The towers' tensors: `expected_towers`.
Source: checkpoint specification, sections 3 to 5; text_model specification, sections 4 and 17.1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import torch

from reference.config import NoteConfig, TextConfig
from reference.errors import ConfigError

Bucket = Literal["language", "mtp", "vision", "audio"]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)

# 26 times the release. A config that asks for more is a typing error, and listing its tensors would fill the memory.
MAX_TENSORS = 1_000_000


@dataclass(frozen=True)
class ExpectedTensor:
    """One tensor of a checkpoint. `bucket` says which part of the model it belongs to."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bucket: Bucket

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def expected_tensors(config: NoteConfig) -> dict[str, ExpectedTensor]:
    """Every tensor by name, in reading order: embedding, layers, norm, head, draft layer, vision, audio.

    Raises: ConfigError for more than one draft layer, or for an implausible number of tensors.
    """
    from reference.checkpoint.expected_towers import audio_tensors, vision_tensors  # built from this module's class

    if config.text.num_nextn_predict_layers > 1:
        raise ConfigError(f"config: {too_many_draft_layers(config.text, 1, 'the checkpoint format')}")
    _refuse_implausible(config)
    tensors = [*_language(config.text)]
    if config.text.num_nextn_predict_layers:
        tensors += _mtp(config.text)
    if config.vision:
        tensors += vision_tensors(config.vision)
    if config.audio:
        tensors += audio_tensors(config.audio)
    return {tensor.name: tensor for tensor in tensors}


def too_many_draft_layers(text: TextConfig, held: int, holder: str) -> str:
    """Why `num_nextn_predict_layers` cannot be what it is, with both numbers and the way out."""
    return (
        f"num_nextn_predict_layers is {text.num_nextn_predict_layers}, but {holder} holds {held} draft layer"
        f"{'s' * (held != 1)}: set it to {min(held, 1)}; drafting k tokens deep means driving that one layer k times"
    )


def _refuse_implausible(config: NoteConfig) -> None:
    text, vision, audio = config.text, config.vision, config.audio
    at_most = text.num_hidden_layers * (3 * text.n_routed_experts + 25)
    at_most += 3 * sum(vision.experts) + 12 * vision.num_hidden_layers if vision else 0
    at_most += 13 * audio.encoder_layers if audio else 0
    if at_most > MAX_TENSORS:
        raise ConfigError(
            f"config: num_hidden_layers, n_routed_experts and the towers' sizes ask for about {at_most} tensors; "
            f"at most {MAX_TENSORS} are plausible (the release has 38006)"
        )


def _weights(prefix: str, shapes: Mapping[str, tuple[int, ...]], bucket: Bucket) -> Iterator[ExpectedTensor]:
    for name, shape in shapes.items():
        yield ExpectedTensor(f"{prefix}{name}.weight", shape, torch.bfloat16, bucket)


def _language(text: TextConfig) -> Iterator[ExpectedTensor]:
    D, vocabulary = text.hidden_size, text.vocab_size
    yield from _weights("model.", {"embed_tokens": (vocabulary, D)}, "language")
    for layer in range(text.num_hidden_layers):
        yield from _layer(text, layer, "language")
    yield from _weights("", {"model.norm": (D,), "lm_head": (vocabulary, D)}, "language")


def _mtp(text: TextConfig) -> Iterator[ExpectedTensor]:
    """The draft layer follows the last backbone layer in number. It has a table of its own and borrows the head."""
    D, layer = text.hidden_size, text.num_hidden_layers
    yield from _weights("model.mtp.", {"embed_tokens": (text.vocab_size, D)}, "mtp")
    prefix = f"model.layers.{layer}."
    yield from _weights(prefix, {"enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D)}, "mtp")
    yield from _layer(text, layer, "mtp")
    yield from _weights(prefix, {"shared_head.norm": (D,)}, "mtp")


def _layer(text: TextConfig, layer: int, bucket: Bucket) -> Iterator[ExpectedTensor]:
    D, prefix = text.hidden_size, f"model.layers.{layer}."
    yield from _weights(prefix, {"input_layernorm": (D,)}, bucket)
    yield from _attention(text, layer, bucket)
    yield from _weights(prefix, {"post_attention_layernorm": (D,)}, bucket)
    if text.is_moe(layer):
        yield from _moe(text, f"{prefix}mlp.", bucket)
    else:
        yield from _mlp(f"{prefix}mlp.", D, text.intermediate_size, bucket)


def _attention(text: TextConfig, layer: int, bucket: Bucket) -> Iterator[ExpectedTensor]:
    geometry = text.geometry(layer)
    D, H = text.hidden_size, geometry.num_attention_heads
    Q, C, R = geometry.q_lora_rank, geometry.kv_lora_rank, geometry.qk_rope_head_dim
    prefix = f"model.layers.{layer}.self_attn."
    shapes = {
        "q_a_proj": (Q, D),
        "q_a_layernorm": (Q,),
        "q_b_proj": (H * geometry.qk_head_dim, Q),
        "kv_a_proj_with_mqa": (C + R, D),
        "kv_a_layernorm": (C,),
        "k_rope_only_layernorm": (R,),
        "kv_b_proj": (H * (geometry.qk_nope_head_dim + geometry.v_head_dim), C),
        "g_proj": (geometry.gate_width, D),
        "o_proj": (D, geometry.value_width),
    }
    yield from _weights(prefix, shapes, bucket)
    if text.is_full(layer):
        I, J = text.index_n_heads, text.index_head_dim  # noqa: E741
        shapes = {"wq_b": (I * J, Q), "wk": (J, D), "k_norm": (J,), "weights_proj": (I, D)}
        yield from _weights(f"{prefix}indexer.", shapes, bucket)
        yield ExpectedTensor(f"{prefix}indexer.k_norm.bias", (J,), torch.bfloat16, bucket)


def _mlp(prefix: str, D: int, F: int, bucket: Bucket) -> Iterator[ExpectedTensor]:
    yield from _weights(prefix, {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}, bucket)


def _moe(text: TextConfig, prefix: str, bucket: Bucket) -> Iterator[ExpectedTensor]:
    """`gate` is the router, `gate_proj` a projection: a prefix match on `mlp.gate` would catch both."""
    D, E = text.hidden_size, text.n_routed_experts
    yield from _weights(prefix, {"gate": (E, D)}, bucket)
    yield ExpectedTensor(f"{prefix}gate.e_score_correction_bias", (E,), torch.float32, bucket)
    for expert in range(E):
        yield from _mlp(f"{prefix}experts.{expert}.", D, text.moe_intermediate_size, bucket)
    yield from _mlp(f"{prefix}shared_experts.", D, text.shared_intermediate_size, bucket)
