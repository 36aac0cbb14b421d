"""The names, dims and layouts under which intermediate tensors are recorded and compared. Schema version 1.

Public API: a name or layout that changes here changes every dump. Rows come first (`T`, one a token); everything is in
the layout of the reference: heads before lanes, RoPE pairs next to each other (interleaved in place), latents before
expansion.

Dims: T tokens, S keys, D model, H heads, N nope, R rope, Q query latent, C kv latent, V value, I index heads, J index
head dim, K chosen, E experts, G gate width, W vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from parity.schema_audio import audio_dataflow_key, audio_layer_of, audio_pattern_of, audio_probe_of
from parity.schema_vision import (
    vision_block_of,
    vision_dataflow_key,
    vision_decided_by,
    vision_pattern_of,
    vision_probe_of,
)

SCHEMA_VERSION = 1

# values: floating rows. scores: floating [T, S], -inf where a key is not visible. choice: sets of integers, -1: none.
Kind = Literal["values", "scores", "choice"]


@dataclass(frozen=True)
class ProbeSpec:
    """`pattern` is the name with {i} for a layer and {s} for a draft step. `decided_by` names a choice's scores.

    `is_float32`: the model's definition computes it in float32 also in a bfloat16 model; rounding it is a difference.
    """

    pattern: str
    dims: str
    meaning: str
    kind: Kind = "values"
    decided_by: str | None = None
    is_float32: bool = False

    @property
    def local_name(self) -> str:
        """The name inside its layer or draft step: `attn.q_latent`."""
        return re.sub(r"^(layers|mtp|cache)\.\{.\}\.", "", self.pattern)


_BLOCK = (
    ("input", "T D", "residual stream that enters the layer"),
    ("attn.input", "T D", "after input_layernorm"),
    ("attn.q_latent", "T Q", "query latent, normed and rescaled"),
    ("attn.q_nope", "T H N", "query lanes without rotation"),
    ("attn.q_rope", "T H R", "query lanes after rotation"),
    ("attn.kv_latent", "T C", "key/value latent, normed and rescaled, as cached"),
    ("attn.k_rope_unrotated", "T R", "shared rope key after its norm"),
    ("attn.k_rope", "T R", "shared rope key after rotation, as cached"),
    ("attn.core", "T H V", "attention output of each head, before the gate"),
    ("attn.gate", "T G", "sigmoid of the gate logits"),
    ("attn.output", "T D", "after o_proj"),
    ("ffn.input", "T D", "after post_attention_layernorm"),
    ("ffn.output", "T D", "dense layer, or routed plus shared experts"),
    ("output", "T D", "residual stream that leaves the layer"),
)
_INDEXER = (
    ProbeSpec("layers.{i}.attn.index.query", "T I J", "index queries, rotated"),
    ProbeSpec("layers.{i}.attn.index.key", "T J", "index key, normed and rotated, as cached"),
    ProbeSpec("layers.{i}.attn.index.head_weights", "T I", "signed head weights times I^-1/2"),
    ProbeSpec(
        "layers.{i}.attn.index.scores", "T S", "score of each key, -inf for later keys", "scores", is_float32=True
    ),
    ProbeSpec(
        "layers.{i}.attn.index.selected",
        "T K",
        "positions of the selected keys, ascending, -1 behind them",
        "choice",
        "layers.{i}.attn.index.scores",
    ),
)
_EXPERTS = (
    ProbeSpec("layers.{i}.ffn.router.logits", "T E", "router logits", is_float32=True),
    ProbeSpec("layers.{i}.ffn.router.scores", "T E", "sigmoid of the logits", is_float32=True),
    ProbeSpec(
        "layers.{i}.ffn.router.choice",
        "T E",
        "scores plus correction bias (-inf outside the chosen groups)",
        is_float32=True,
    ),
    ProbeSpec(
        "layers.{i}.ffn.router.expert_ids",
        "T K",
        "chosen experts, in any order",
        "choice",
        "layers.{i}.ffn.router.choice",
    ),
    ProbeSpec("layers.{i}.ffn.router.weights", "T K", "weight of each chosen expert, in the order of expert_ids"),
    ProbeSpec("layers.{i}.ffn.routed", "T D", "weighted sum of the chosen experts"),
    ProbeSpec("layers.{i}.ffn.shared", "T D", "shared expert"),
)


def _in_dataflow_order() -> tuple[ProbeSpec, ...]:
    block = [ProbeSpec(f"layers.{{i}}.{name}", dims, meaning) for name, dims, meaning in _BLOCK]
    names = [spec.local_name for spec in block]
    core, ffn_output = names.index("attn.core"), names.index("ffn.output")
    layer = (*block[:core], *_INDEXER, *block[core:ffn_output], *_EXPERTS, *block[ffn_output:])
    mtp = [ProbeSpec(f"mtp.{{s}}.{name}", dims, f"draft layer: {meaning}") for name, dims, meaning in _BLOCK]
    return (
        ProbeSpec("embeddings", "T D", "token embeddings"),
        *layer,
        ProbeSpec("final_norm", "T D", "after the final norm"),
        ProbeSpec("logits", "T W", "logits of the next token"),
        ProbeSpec("cache.{i}.kv_latent", "T C", "cached latents of the step's rows, read back"),
        ProbeSpec("cache.{i}.k_rope", "T R", "cached rope keys, read back"),
        ProbeSpec("cache.{i}.index_key", "T J", "cached index keys, read back"),
        ProbeSpec("mtp.{s}.eh_input", "T 2D", "normed embedding, then normed hidden state"),
        ProbeSpec("mtp.{s}.fused", "T D", "after eh_proj: what enters the draft layer"),
        *mtp,
        ProbeSpec("mtp.{s}.normed", "T D", "after shared_head.norm: what the head and the next draft step read"),
        ProbeSpec("mtp.{s}.logits", "T W", "logits of the token after the next"),
    )


PROBES = _in_dataflow_order()
_RANK = {spec.pattern: rank for rank, spec in enumerate(PROBES)}
_NUMBERED = re.compile(r"^(layers|cache|mtp)\.(\d+)\.(.+)$")
VISION, AUDIO = "vision.", "audio."
_GROUP_RANK = {"prompt.ids": -7, "embeddings": 0, "layers": 1, "final_norm": 2, "logits": 3, "cache": 4, "mtp": 5}


@cache
def pattern_of(name: str) -> str:
    """`layers.3.attn.gate` becomes `layers.{i}.attn.gate`."""
    if name.startswith(VISION):
        return vision_pattern_of(name)
    if name.startswith(AUDIO):
        return audio_pattern_of(name)
    match = _NUMBERED.match(name)
    if not match:
        return name
    group, _, rest = match.groups()
    return f"{group}.{{{'s' if group == 'mtp' else 'i'}}}.{rest}"


@cache
def spec_of(name: str) -> ProbeSpec | None:
    """What the schema says of a full name, or None for a name it does not know."""
    if name.startswith(VISION):
        probe = vision_probe_of(name)
        return ProbeSpec(*probe) if probe else None
    if name.startswith(AUDIO):
        heard = audio_probe_of(name)
        return ProbeSpec(*heard) if heard else None
    rank = _RANK.get(pattern_of(name))
    return None if rank is None else PROBES[rank]


def layer_of(name: str) -> int | None:
    """The layer index in `layers.3.…` and `audio.layers.3.…`, the block in `vision.blocks.3.…`, else None."""
    if name.startswith(VISION):
        return vision_block_of(name)
    if name.startswith(AUDIO):
        return audio_layer_of(name)
    match = _NUMBERED.match(name)
    return int(match.group(2)) if match and match.group(1) == "layers" else None


def decided_by(name: str) -> str | None:
    """The full name of the scores that decide a choice: `layers.3.attn.index.scores` for its `selected`."""
    if name.startswith(VISION):
        return vision_decided_by(name)
    spec, match = spec_of(name), _NUMBERED.match(name)
    if spec is None or spec.decided_by is None or match is None:
        return None
    return spec.decided_by.replace("{i}", match.group(2))


@cache
def dataflow_key(name: str) -> tuple[int, int, int, str]:
    """Sort key: the order in which the tensors of one step depend on each other."""
    if name.startswith(VISION):
        return vision_dataflow_key(name)
    if name.startswith(AUDIO):
        return audio_dataflow_key(name)
    match = _NUMBERED.match(name)
    group, number = (match.group(1), int(match.group(2))) if match else (name, 0)
    return _GROUP_RANK.get(group, 6), number, _RANK.get(pattern_of(name), len(PROBES)), name
