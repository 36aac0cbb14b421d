"""The names and dims under which intermediates of the vision tower are recorded and compared. Schema version 1.

Rows are the patches of a call in the order of its pixels (item, frame, then square by square; see
`reference.layers.vision_grid`), from `merger.grouped` on the output rows: squares in raster order. Heads come before
lanes, and the pairs of RoPE are halves of a head apart, as the model has them. An implementation that keeps patches in
raster order has to be brought into this order first.

Dims: T patches, M output rows, X values of a patch, D tower width, P pairs of lanes, H heads, J head dim, E experts,
K chosen, G merged width, O output width.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple


class VisionProbe(NamedTuple):
    """As `parity.schema.ProbeSpec`, field by field. `pattern` has {i} for a block."""

    pattern: str
    dims: str
    meaning: str
    kind: Literal["values", "scores", "choice"] = "values"
    decided_by: str | None = None
    is_float32: bool = False


_BLOCK = "vision.blocks.{i}."
_ROUTER = f"{_BLOCK}ffn.router."

# In dataflow order.
VISION_PROBES = (
    VisionProbe("vision.pixels", "T X", "normalised patches: channel, row, column", is_float32=True),
    VisionProbe("vision.patch_proj", "T D", "after the patch projection, bias added"),
    VisionProbe("vision.patches", "T D", "after the norm of the patches: what enters the first block"),
    VisionProbe("vision.rope.angles", "T P", "radians: those of the patch's row, then of its column", is_float32=True),
    VisionProbe(f"{_BLOCK}input", "T D", "residual stream that enters the block"),
    VisionProbe(f"{_BLOCK}attn.input", "T D", "after norm_1"),
    VisionProbe(f"{_BLOCK}attn.q", "T H J", "queries, normed, then rotated"),
    VisionProbe(f"{_BLOCK}attn.k", "T H J", "keys, normed, then rotated"),
    VisionProbe(f"{_BLOCK}attn.v", "T H J", "values"),
    VisionProbe(f"{_BLOCK}attn.core", "T H J", "attention output of each head"),
    VisionProbe(f"{_BLOCK}attn.output", "T D", "after proj"),
    VisionProbe(f"{_BLOCK}ffn.input", "T D", "after norm_2"),
    VisionProbe(f"{_ROUTER}logits", "T E", "router logits", is_float32=True),
    VisionProbe(f"{_ROUTER}scores", "T E", "sigmoid of the logits", is_float32=True),
    VisionProbe(f"{_ROUTER}choice", "T E", "scores plus router bias", is_float32=True),
    VisionProbe(f"{_ROUTER}expert_ids", "T K", "chosen experts, in any order", "choice", f"{_ROUTER}choice"),
    VisionProbe(f"{_ROUTER}weights", "T K", "weight of each chosen expert, in the order of expert_ids"),
    VisionProbe(f"{_BLOCK}ffn.output", "T D", "dense layer, or weighted sum of the chosen experts"),
    VisionProbe(f"{_BLOCK}output", "T D", "residual stream that leaves the block"),
    VisionProbe("vision.trunk", "T D", "after post_trunk_norm"),
    VisionProbe("vision.merger.normed", "T D", "after the merger's LayerNorm, patch by patch"),
    VisionProbe("vision.merger.grouped", "M G", "the patches of a square side by side: top left, top right, bottom"),
    VisionProbe("vision.merger.hidden", "M G", "after the first linear layer and its GELU"),
    VisionProbe("vision.merged", "M O", "output rows, of the text model's width"),
)

_RANK = {probe.pattern: rank for rank, probe in enumerate(VISION_PROBES)}
_NUMBERED = re.compile(r"^vision\.blocks\.(\d+)\.(.+)$")


@cache
def vision_pattern_of(name: str) -> str:
    """`vision.blocks.3.attn.q` becomes `vision.blocks.{i}.attn.q`."""
    match = _NUMBERED.match(name)
    return f"{_BLOCK}{match.group(2)}" if match else name


def vision_probe_of(name: str) -> VisionProbe | None:
    """What the schema says of a full name, or None for a name it does not know."""
    rank = _RANK.get(vision_pattern_of(name))
    return None if rank is None else VISION_PROBES[rank]


def vision_block_of(name: str) -> int | None:
    """The block in `vision.blocks.3.…`, else None."""
    match = _NUMBERED.match(name)
    return int(match.group(1)) if match else None


def vision_decided_by(name: str) -> str | None:
    """The full name of the scores that decide a choice: `….router.choice` for its `expert_ids`."""
    probe, block = vision_probe_of(name), vision_block_of(name)
    return probe.decided_by.replace("{i}", str(block)) if probe and probe.decided_by else None


@cache
def vision_dataflow_key(name: str) -> tuple[int, int, int, str]:
    """Sort key: patches, block after block, merger; within each in dataflow order. All before audio and text."""
    rank, block = _RANK.get(vision_pattern_of(name), len(VISION_PROBES)), vision_block_of(name)
    if block is not None:
        return -5, block, rank, name
    return (-6 if rank < _RANK[f"{_BLOCK}input"] else -4), 0, rank, name
