"""The whole vision tower at released geometry: images of 1 and of 4 million pixels, and the frames of a long video.

Weights are random; the time does not depend on them, but for how evenly experts are chosen. The check runs some small
images through the same weights beside the torch twins, in bfloat16 and in float64: one image of 4 million pixels has
scores of 82 GB in float64. A video is one of ten minutes at 1080p, as the budget solver samples it.
Floor: operations, attention included, at the rate of a dense bfloat16 product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from optimized.bench.case import Case, Inputs, Problem
from optimized.bench.floors import Work
from optimized.bench.judge import Triple
from optimized.bench.peers_vision import VisionCall, reference_vision, transformers_vision
from optimized.device import choose
from optimized.vision import VisionTower
from optimized.vision_weights import PackedVision, empty_vision, pack_vision, vision_places
from reference.config import VisionConfig
from reference.layers.vision_grid import Grid, patch_count
from reference.media.video_budget import frame_cap, sized_frame, solve

# N patches  M output rows  D tower width

USES = (
    "rms_norm", "add_rms_norm", "norm_rotate_heads_", "varlen_attention", "swiglu", "route", "sort_rows",
    "expert_swiglu", "expert_down", "combine",
)  # fmt: skip
# Of what is checked: odd numbers of squares, frames, one square alone.
CHECKED_GRIDS: tuple[Grid, ...] = ((1, 24, 26), (2, 8, 6), (1, 2, 2), (1, 12, 34))
# Prompt tokens that a request with a video has by default: 131,072 less a quarter.
PROMPT_TOKENS = 98_304


@dataclass(frozen=True)
class VisionShape:
    """One call: what it is in words, and its grids. Peers are timed beside one image: they take no batch faster."""

    name: str
    grids: tuple[Grid, ...]
    has_peers: bool = False


class VisionInputs(NamedTuple):
    """The tower whose weights are kept, the tower that is timed, its call, and the smaller call of the check."""

    drawn: VisionTower
    tower: VisionTower
    timed: VisionCall
    few: VisionCall


def video_grid(height: int, width: int, seconds: float, fps: float, patch: int) -> Grid:
    """Frames of a clip of so many pixels a side, and their sides in patches, as the budget solver plans them."""
    found = solve(height, width, fps, seconds, PROMPT_TOKENS, frame_cap(PROMPT_TOKENS))
    tall, wide = sized_frame(height, width, found.token_cap)
    return found.frames, tall // patch, wide // patch


def vision_shapes(vision: VisionConfig) -> tuple[VisionShape, ...]:
    """Sides in patches of 14 pixels: 72 is 1,008 pixels, the largest square image of the default bounds."""
    video = video_grid(1080, 1920, 600.0, 30.0, vision.patch_size)
    return (
        VisionShape("1 image of 1 MP", ((1, 72, 72),), has_peers=True),
        VisionShape("8 images of 1 MP", ((1, 72, 72),) * 8),
        VisionShape("1 image of 4 MP", ((1, 144, 144),), has_peers=True),
        VisionShape(f"8 frames of {video[1]}x{video[2]} patches", ((8, *video[1:]),), has_peers=True),
        VisionShape(f"{video[0]} frames of {video[1]}x{video[2]} patches, 10 minutes", (video,)),
    )


def tower_flops(vision: VisionConfig, grids: Sequence[Grid]) -> float:
    """A multiply-add counts as two. Router, norms and rotations are left out: a thousandth."""
    D, N = vision.embed_dim, patch_count(grids)
    pairs = sum(frames * (height * width) ** 2 for frames, height, width in grids)
    square = vision.spatial_merge_size**2
    per_patch = D * vision.num_channels * vision.patch_size**2
    for experts in vision.experts:
        chosen = min(vision.num_experts_per_tok, experts)
        width = chosen * vision.moe_intermediate_size if experts else vision.intermediate_size
        per_patch += 4 * D * D + 3 * D * width
    merger = square * D * (square * D + vision.adapter_out_dim) // square
    return 2 * N * (per_patch + merger) + 4 * D * pairs * vision.num_hidden_layers


def vision_cases(vision: VisionConfig, shapes: Sequence[VisionShape] | None = None) -> Iterator[Case]:
    nbytes = sum(piece.nbytes for piece in _pieces(empty_vision(vision, "meta", torch.bfloat16)))
    for shape in shapes or vision_shapes(vision):
        work = Work(nbytes, tower_flops(vision, shape.grids))
        yield Case("vision_tower", shape.name, patch_count(shape.grids), work, "events", _build(vision, shape), USES)


def drawn_tower(vision: VisionConfig, device: torch.device | str, seed: int = 0) -> VisionTower:
    """Random bfloat16 weights: matrices with a spread of 1 / sqrt of their width, norms about 1, small biases."""
    generator = torch.Generator(device).manual_seed(seed)
    packed = empty_vision(vision, device, torch.bfloat16)
    for name, place in vision_places(packed).items():
        for piece in place.pieces:
            if name.endswith("bias"):
                piece.normal_(0.0, 0.05, generator=generator)
            elif piece.dim() == 1:
                piece.normal_(1.0, 0.1, generator=generator)
            else:
                piece.normal_(0.0, piece[0].numel() ** -0.5, generator=generator)
    return VisionTower(vision, packed, choose(device))


def _build(vision: VisionConfig, shape: VisionShape) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        drawn, tower, timed, few = vision_inputs(vision, shape, given)

        def check(_: Tensor) -> list[Triple]:
            return [judged(drawn, few, tower(few.pixels_NX, few.grids))]

        makers = (transformers_vision, reference_vision) if shape.has_peers else ()
        peers = [make(drawn, timed, few) for make in makers]
        return Problem(lambda: tower(timed.pixels_NX, timed.grids), check, peers)

    return build


def vision_inputs(vision: VisionConfig, shape: VisionShape, given: Inputs) -> VisionInputs:
    drawn = given.keep("vision tower", lambda: drawn_tower(vision, given.device, given.seed))
    tower = VisionTower(vision, drawn.weights, choose(given.device, given.backend), drawn.options)
    width = vision.num_channels * vision.patch_size**2
    timed, few = (
        VisionCall(given.randn(patch_count(grids), width, dtype=torch.float32), grids)
        for grids in (shape.grids, CHECKED_GRIDS)
    )
    return VisionInputs(drawn, tower, timed, few)


def judged(drawn: VisionTower, few: VisionCall, out_MO: Tensor) -> Triple:
    """What some tower made of the smaller call, beside the twins on the same weights."""
    eager_MO = VisionTower(drawn.config, drawn.weights, choose(drawn.device, "torch"))(few.pixels_NX, few.grids)
    return Triple(out_MO, eager_MO, _widened(drawn.config, drawn)(few.pixels_NX, few.grids))


def _widened(vision: VisionConfig, drawn: VisionTower) -> VisionTower:
    """The torch twins with the same weights in float64, 55 GB of them when released."""
    places = vision_places(drawn.weights)
    state = ((name, place.pieces[0].double()) for name, place in places.items())
    packed = pack_vision(state, vision, drawn.device, torch.float64)
    return VisionTower(vision, packed, choose(drawn.device, "torch"))


def _pieces(packed: PackedVision) -> Iterator[Tensor]:
    return chain.from_iterable(place.pieces for place in vision_places(packed).values())
