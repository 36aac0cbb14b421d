"""Other towers on the weights of the optimized one, as peers: transformers' eager code, and this project's reference.

Both take views of the packed weights where they can, so that a peer costs no second copy of 13.7 GB. What they return
for the smaller call of the check is held to its truth: of experts that are chosen within rounding of each other another
one may be taken, after which rows differ by tenths; hence the limit.
Source: vision specification, section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from optimized.bench.case import AbsentPeer, Peer
from optimized.vision import VisionTower
from optimized.vision_weights import PackedVision, vision_places
from reference.config import released
from reference.layers.vision_grid import Grid

# N patches  X values of a patch

# Relative to the truth, of all rows together; what a mistake in the maths gives is of order 1.
FLIPPED_LIMIT = 0.3
TRANSFORMERS = "transformers eager"
REFERENCE = "the reference, eager"
MODULE = "transformers.models.dots3_note"


@dataclass(frozen=True)
class VisionCall:
    pixels_NX: Tensor
    grids: Sequence[Grid]


def reference_vision(tower: VisionTower, timed: VisionCall, few: VisionCall) -> Peer | AbsentPeer:
    """The reference in bfloat16, a frame at a time."""
    from reference.vision import VisionTower as Reference

    with torch.device("meta"):
        reference = Reference(tower.config)
    state = {name: place.pieces[0] for name, place in vision_places(tower.weights).items()}
    reference.load_state_dict(state, assign=True)
    reference.requires_grad_(False)
    return _peer(REFERENCE, reference, timed, few)


def transformers_vision(tower: VisionTower, timed: VisionCall, few: VisionCall) -> Peer | AbsentPeer:
    """transformers 5.24's tower with its eager attention and experts, on all images in one call."""
    if find_spec("transformers") is None or find_spec(MODULE) is None:
        return AbsentPeer(TRANSFORMERS, "not installed, or without dots3_note")
    configuration = import_module(f"{MODULE}.configuration_dots3_note")
    modeling = import_module(f"{MODULE}.modeling_dots3_note")
    config = configuration.Dots3NoteVisionConfig(**replace(released(), vision=tower.config).to_json()["vision_config"])
    with torch.device("meta"):
        model = modeling.Dots3NoteVisionModel._from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
    model.load_state_dict(_transformers_state(tower.weights), assign=True)
    with torch.device(tower.device):
        # Its frequencies are no part of a state dict.
        model.rotary_pos_emb = type(model.rotary_pos_emb)(model.config)
    model.eval()

    def embed(pixels_NX: Tensor, grids: Sequence[Grid]) -> Any:
        return model(pixels_NX, torch.tensor(grids, device=pixels_NX.device)).pooler_output

    return _peer(TRANSFORMERS, embed, timed, few)


def _transformers_state(packed: PackedVision) -> dict[str, Tensor]:
    """The packed weights under transformers' names, without a copy but for the routers' weights in float32."""
    merger = packed.merger
    state = {
        "patch_embed.proj.weight": packed.patch_DCYX,
        "patch_embed.proj.bias": packed.patch_bias_D,
        "patch_embed.norm.weight": packed.patch_norm_D,
        "norm.weight": packed.trunk_norm_D,
        "merger.ln_q.weight": merger.norm_D,
        "merger.ln_q.bias": merger.norm_bias_D,
        "merger.mlp.0.weight": merger.first_GG,
        "merger.mlp.0.bias": merger.first_bias_G,
        "merger.mlp.2.weight": merger.last_OG,
        "merger.mlp.2.bias": merger.last_bias_O,
    }
    for index, block in enumerate(packed.blocks):
        found = {
            "norm1.weight": block.norm_1_D,
            "norm2.weight": block.norm_2_D,
            "attn.qkv.weight": block.qkv_XD,
            "attn.proj.weight": block.proj_DD,
            "attn.q_norm.weight": block.q_norm_J,
            "attn.k_norm.weight": block.k_norm_J,
        }
        if block.dense is not None:
            found["mlp.gate_proj.weight"], found["mlp.up_proj.weight"] = block.dense.gate_up_XD.chunk(2)
            found["mlp.down_proj.weight"] = block.dense.down_DF
        if block.experts is not None:
            found["mlp.gate.weight"] = block.experts.router_weight_ED.float()
            found["mlp.e_score_correction_bias"] = block.experts.bias_E
            found["mlp.experts.gate_up_proj"] = block.experts.gate_up_EXD
            found["mlp.experts.down_proj"] = block.experts.down_EDF
        state |= {f"blocks.{index}.{name}": tensor for name, tensor in found.items()}
    return state


def _peer(name: str, embed: Callable[..., Any], timed: VisionCall, few: VisionCall) -> Peer:
    def call(asked: VisionCall) -> Any:
        with torch.no_grad():
            return embed(asked.pixels_NX, asked.grids)

    return Peer(name, lambda: call(timed), lambda _: call(few), FLIPPED_LIMIT)
