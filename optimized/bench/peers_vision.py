"""Other towers on the weights of the optimized one, as peers: transformers' eager code, and this project's reference.

Both take views of the packed weights where they can, so that a peer costs no second copy of 13.7 GB. What they return
for the smaller call of the check is held to its truth: of experts that are chosen within rounding of each other another
one may be taken, after which rows differ by tenths; hence the limit.
Source: vision specification, section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from optimized.bench.case import AbsentPeer, Peer
from optimized.vision import VisionTower
from optimized.vision_weights import vision_places
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
    from transformers.models.dots3_note.configuration_dots3_note import Dots3NoteVisionConfig
    from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteVisionModel

    config = replace(released(), vision=tower.config).to_json()["vision_config"]
    model = Dots3NoteVisionModel.from_pretrained(
        None,
        config=Dots3NoteVisionConfig(**config),
        state_dict={name: place.pieces[0] for name, place in vision_places(tower.weights).items()},
        dtype=tower.dtype,
        device_map=tower.device,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()

    def embed(pixels_NX: Tensor, grids: Sequence[Grid]) -> Any:
        return model(pixels_NX, torch.tensor(grids, device=pixels_NX.device)).pooler_output

    return _peer(TRANSFORMERS, embed, timed, few)


def _peer(name: str, embed: Callable[..., Any], timed: VisionCall, few: VisionCall) -> Peer:
    def call(asked: VisionCall) -> Any:
        with torch.no_grad():
            return embed(asked.pixels_NX, asked.grids)

    return Peer(name, lambda: call(timed), lambda _: call(few), FLIPPED_LIMIT)
