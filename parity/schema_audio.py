"""The names, dims and order of the tensors of the audio tower. Part of schema version 1.

Rows count from the start of a clip, across its chunks: frames of 10 ms for `mel` and `stem.input`, then of 20, 40 and
80 ms, the length of a token. Only what belongs to the tokens of a chunk is shown, masked frames included: 8 frames of
`mel` for each token. Heads before lanes; rotated lanes as the model has them, pairs (j, j + half).

Dims: L frames, T tokens, M mel bins, C channels of the stem, P rows of frequencies left, D width of the encoder, H
heads, X lanes of a head, F feed-forward lanes, O width of the text.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple


class AudioProbe(NamedTuple):
    """As `parity.schema.ProbeSpec`, field by field. `pattern` has {i} for a layer."""

    pattern: str
    dims: str
    meaning: str
    kind: Literal["values", "scores", "choice"] = "values"
    decided_by: str | None = None
    is_float32: bool = False


# In dataflow order.
BEFORE_LAYERS = (
    AudioProbe("audio.mel", "L M", "log-mel features, float32 in every model", is_float32=True),
    AudioProbe("audio.stem.input", "L C P", "features in the model's dtype, zero behind the valid frames"),
    AudioProbe("audio.stem.conv1", "L C P", "after the first convolution, its GELU and its mask"),
    AudioProbe("audio.stem.conv2", "L C P", "after the second"),
    AudioProbe("audio.stem.conv3", "T C P", "after the third"),
    AudioProbe("audio.stem", "T D", "after conv_out"),
)
LAYER = (
    AudioProbe("audio.layers.{i}.input", "T D", "residual stream that enters the layer"),
    AudioProbe("audio.layers.{i}.attn.input", "T D", "after self_attn_layer_norm"),
    AudioProbe("audio.layers.{i}.attn.query", "T H X", "queries, rotated"),
    AudioProbe("audio.layers.{i}.attn.key", "T H X", "keys, rotated"),
    AudioProbe("audio.layers.{i}.attn.value", "T H X", "values"),
    AudioProbe("audio.layers.{i}.attn.core", "T H X", "attention output of each head"),
    AudioProbe("audio.layers.{i}.attn.output", "T D", "after out_proj"),
    AudioProbe("audio.layers.{i}.ffn.input", "T D", "after final_layer_norm"),
    AudioProbe("audio.layers.{i}.ffn.activated", "T F", "silu(gate) times up"),
    AudioProbe("audio.layers.{i}.ffn.output", "T D", "after fc2"),
    AudioProbe("audio.layers.{i}.output", "T D", "residual stream that leaves the layer"),
)
AFTER_LAYERS = (
    AudioProbe("audio.final_norm", "T D", "after the encoder's last norm"),
    AudioProbe("audio.adapter.input", "T D", "after the adapter's LayerNorm"),
    AudioProbe("audio.adapter.hidden", "T O", "after the adapter's GELU"),
    AudioProbe("audio.adapted", "T O", "embeddings of the clip's placeholders"),
)
AUDIO_PROBES = BEFORE_LAYERS + LAYER + AFTER_LAYERS

AUDIO_FLOAT32 = frozenset(probe.pattern for probe in AUDIO_PROBES if probe.is_float32)
# Tensors between the parts: given these, stem, each layer, final norm and adapter run from their own input.
AUDIO_BOUNDARIES = frozenset({"audio.mel", "audio.stem", "audio.layers.{i}.output", "audio.final_norm"})

_RANK = {pattern: rank for rank, (pattern, *_) in enumerate(AUDIO_PROBES)}
_LAYER_NAME = re.compile(r"^audio\.layers\.(\d+)\.(.+)$")


@cache
def audio_pattern_of(name: str) -> str:
    """`audio.layers.3.attn.core` becomes `audio.layers.{i}.attn.core`."""
    match = _LAYER_NAME.match(name)
    return f"audio.layers.{{i}}.{match.group(2)}" if match else name


def audio_probe_of(name: str) -> AudioProbe | None:
    """What the schema says of a full name, or None for a name it does not know."""
    rank = _RANK.get(audio_pattern_of(name))
    return None if rank is None else AUDIO_PROBES[rank]


def audio_layer_of(name: str) -> int | None:
    """The layer index in `audio.layers.3.…`, else None."""
    match = _LAYER_NAME.match(name)
    return int(match.group(1)) if match else None


@cache
def audio_dataflow_key(name: str) -> tuple[int, int, int, str]:
    """Sort key: the order in which the tensors of one clip depend on each other; all before the text's."""
    match, rank = _LAYER_NAME.match(name), _RANK.get(audio_pattern_of(name), len(AUDIO_PROBES))
    if match:
        return -2, int(match.group(1)), rank, name
    return (-3 if rank < len(BEFORE_LAYERS) else -1), 0, rank, name
