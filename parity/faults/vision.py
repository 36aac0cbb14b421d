"""The vision tower, first part: patches, their order and coordinates, rotation, attention, merger.

Source: vision specification, sections 2 to 5, 7 and 12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import reference.layers.vision_attention
import reference.vision
from parity.faults.fault import Patch, Weights, after_construction
from parity.faults.vision_moe import VISION_MOE_FAULTS, vision_fault
from reference.config import NoteConfig
from reference.layers import rope
from reference.layers.vision_attention import THETA, VisionAttention, VisionRope
from reference.layers.vision_grid import Grid, Segment
from reference.probe import Override, probe
from reference.vision import Merger, VisionTower

# T patches of one frame  D tower width  H heads  J head dim  P pairs of lanes  G merged width

PIXELS, PROJECTED, PATCHES, ANGLES = "vision.pixels", "vision.patch_proj", "vision.patches", "vision.rope.angles"
Q, K, CORE, FFN = (f"vision.blocks.{{i}}.{name}" for name in ("attn.q", "attn.k", "attn.core", "ffn.output"))
TRUNK, NORMED, GROUPED, HIDDEN = "vision.trunk", "vision.merger.normed", "vision.merger.grouped", "vision.merger.hidden"
# The text model's base of full layers.
TEXT_THETA = 8.0e7
# Kept here, for a patch takes its place.
_RIGHT_ROTATION = rope.rotate_halves
SECOND_ITEM, SECOND_FRAME = "two items in a call", "an item of two frames"


def _frames_edited(edit: Callable[[list[Segment], list[Grid], int], list[Segment]]) -> Patch:
    """A patch of what frames there are: `edit(frames, grids, merge)` of the right ones."""

    def make(segments: Callable[..., list[Segment]]) -> Callable[..., list[Segment]]:
        return lambda grids, merge, device=None: edit(segments(grids, merge, device), list(grids), merge)

    return Patch(reference.vision, "segments", make)


def _coordinates_edited(edit: Callable[[Tensor, int], Tensor]) -> Patch:
    """`edit(coordinates_T2, merge)` of every frame."""
    return _frames_edited(
        lambda frames, grids, merge: [
            replace(frame, coordinates_T2=edit(frame.coordinates_T2, merge)) for frame in frames
        ]
    )


def _raster(coordinates_T2: Tensor) -> Tensor:
    """The rows of a frame in raster order."""
    return (coordinates_T2[:, 0] * (coordinates_T2[:, 1].max() + 1) + coordinates_T2[:, 1]).argsort()


def _rows_in_raster_order(run_frame: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def frame(tower: VisionTower, pixels_TX: Tensor, frame: Segment, request: str) -> Tensor:
        return run_frame(tower, pixels_TX[_raster(frame.coordinates_T2)], frame, request)

    return frame


def _shifted_down(frames: list[Segment], shifts: list[int]) -> list[Segment]:
    return [
        replace(frame, coordinates_T2=frame.coordinates_T2 + torch.tensor([shift, 0]))
        for frame, shift in zip(frames, shifts, strict=True)
    ]


def _frame_number_added(frames: list[Segment], grids: list[Grid], merge: int) -> list[Segment]:
    return _shifted_down(frames, [number for count, _, _ in grids for number in range(count)])


def _not_reset(frames: list[Segment], grids: list[Grid], merge: int) -> list[Segment]:
    """The rows of a second item go on where those of the first ended."""
    before = [sum(height for _, height, _ in grids[:item]) for item in range(len(grids))]
    return _shifted_down(
        frames, [shift for shift, (count, _, _) in zip(before, grids, strict=True) for _ in range(count)]
    )


def _joined(frames: list[Segment]) -> Segment:
    return Segment(frames[0].start, torch.cat([frame.coordinates_T2 for frame in frames]))


def _one_sequence(frames: list[Segment], grids: list[Grid], merge: int) -> list[Segment]:
    return [_joined(frames)]


def _items_whole(frames: list[Segment], grids: list[Grid], merge: int) -> list[Segment]:
    joined, left = [], frames
    for count, _, _ in grids:
        joined.append(_joined(left[:count]))
        left = left[count:]
    return joined


def _angles(edit: Callable[[Tensor, int], Tensor]) -> Patch:
    """`edit(coordinates_T2, head_dim)` in place of the angles."""
    return Patch(reference.vision, "axial_angles", lambda original: edit)


def _frequencies_of_whole_head(coordinates_T2: Tensor, head_dim: int) -> Tensor:
    axes = (rope.angles(axis_T, THETA, head_dim)[:, : head_dim // 4] for axis_T in coordinates_T2.unbind(1))
    return torch.cat(list(axes), dim=-1)


def _rotated_in_sections(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    sides = zip(*(part.chunk(2, dim=-1) for part in (x, cos, sin)), strict=True)
    return torch.cat([_RIGHT_ROTATION(*side) for side in sides], dim=-1)


def _bfloat16_table(rotation: VisionRope, *_: Any) -> None:
    rotation._cos_sin = reference.layers.vision_attention._of_bfloat16_table


def _attention(turned: Callable[[VisionAttention, Any, Tensor, Tensor], Tensor]) -> Patch:
    """A patch of how queries and keys are made: `turned(attention, norm, x_THJ, angles_TP)`."""

    def forward(attention: VisionAttention, x_TD: Tensor, angles_TP: Tensor) -> Tensor:
        q_THJ, k_THJ, v_THJ = attention.qkv(x_TD).unflatten(-1, (3, attention.heads, -1)).unbind(1)
        q_THJ = probe("q", turned(attention, attention.q_norm, q_THJ, angles_TP))
        k_THJ = probe("k", turned(attention, attention.k_norm, k_THJ, angles_TP))
        core_THJ = probe("core", attention.core(q_THJ, k_THJ, probe("v", v_THJ)))
        return probe("output", attention.proj(core_THJ.flatten(1)))

    return Patch(VisionAttention, "forward", lambda original: forward)


def _norm_after_rope(attention: VisionAttention, norm: Any, x_THJ: Tensor, angles_TP: Tensor) -> Tensor:
    return norm(attention.rope(x_THJ, angles_TP))


def _norm_over_width(attention: VisionAttention, norm: Any, x_THJ: Tensor, angles_TP: Tensor) -> Tensor:
    normed_THJ = norm.normalized(x_THJ.flatten(1)).view_as(x_THJ)
    return attention.rope((normed_THJ * norm.weight).to(x_THJ.dtype), angles_TP)


def _norm_missing(attention: VisionAttention, norm: Any, x_THJ: Tensor, angles_TP: Tensor) -> Tensor:
    return attention.rope(x_THJ, angles_TP)


def _causal(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attended(q_HTJ: Tensor, k_HTJ: Tensor, v_HTJ: Tensor, visible_TT: Tensor, *args: Any) -> Tensor:
        return attend(q_HTJ, k_HTJ, v_HTJ, visible_TT.tril(), *args)

    return attended


def _in_quarters(core: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Lengths of merged rows in place of patches: a frame falls into four pieces."""

    def split_core(attention: VisionAttention, *qkv: Tensor) -> Tensor:
        pieces = zip(*(x_THJ.chunk(4) for x_THJ in qkv), strict=True)
        return torch.cat([core(attention, *piece) for piece in pieces])

    return split_core


def _scaled_to(power: int) -> Patch:
    """The softmax scale to this power."""

    def edit(attention: VisionAttention, *_: Any) -> None:
        attention.scale **= power

    return after_construction(VisionAttention, edit)


def _unnormed(part: Callable[[VisionTower], Any]) -> Patch:
    def edit(tower: VisionTower, *_: Any) -> None:
        part(tower).forward = lambda x: x

    return after_construction(VisionTower, edit)


def _normed_by(norm: Callable[[Merger, Tensor], Tensor]) -> Patch:
    return Patch(Merger, "normed", lambda original: lambda merger, trunk_TD: probe("normed", norm(merger, trunk_TD)))


def _normed_together(merger: Merger, trunk_TD: Tensor) -> Tensor:
    square = merger.patches_of_a_square
    weight, bias = merger.ln_q.weight.repeat(square), merger.ln_q.bias.repeat(square)
    return F.layer_norm(trunk_TD.reshape(-1, len(weight)), weight.shape, weight, bias, merger.ln_q.eps).view_as(
        trunk_TD
    )


def _rms_normed(merger: Merger, trunk_TD: Tensor) -> Tensor:
    return F.rms_norm(trunk_TD, merger.ln_q.weight.shape, merger.ln_q.weight, merger.ln_q.eps)


def _column_by_column(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def merged(merger: Merger, normed_TD: Tensor) -> Tensor:
        side = round(merger.patches_of_a_square**0.5)
        return forward(merger, normed_TD.unflatten(0, (-1, side, side)).transpose(1, 2).flatten(0, 2))

    return merged


def _eps(owner: type, part: Callable[[Any], Any], eps: float) -> Patch:
    def edit(module: Any, *_: Any) -> None:
        part(module).eps = eps

    return after_construction(owner, edit)


def _tensors(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[Weights, NoteConfig], Weights]:
    def edit(weights: Weights, config: NoteConfig) -> Weights:
        return {name: change(tensor) if name.endswith(suffix) else tensor for name, tensor in weights.items()}

    return edit


def _qkv_by_head(weights: Weights, config: NoteConfig) -> Weights:
    assert config.vision
    heads = config.vision.num_attention_heads

    def read(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    return _tensors("attn.qkv.weight", read)(weights, config)


def _half_as_wide_heads(config: NoteConfig) -> NoteConfig:
    assert config.vision
    return replace(config, vision=replace(config.vision, num_attention_heads=2 * config.vision.num_attention_heads))


def _half_of_head_norms(weights: Weights, config: NoteConfig) -> Weights:
    return {
        name: tensor[: len(tensor) // 2] if name.endswith((".q_norm.weight", ".k_norm.weight")) else tensor
        for name, tensor in weights.items()
    }


def _bgr(config: NoteConfig) -> Override:
    assert config.vision
    channels = config.vision.num_channels
    return Override(PIXELS, lambda pixels_TX, rows: pixels_TX.unflatten(-1, (channels, -1)).flip(-2).flatten(-2))


VISION_FAULTS = (
    vision_fault(
        "vision_channel_order_bgr",
        "the channels of a patch come as blue, green, red",
        PIXELS,
        listener=_bgr,
    ),
    vision_fault(
        "vision_patch_channels_last",
        "the values of a patch are ordered by row, column and channel",
        PROJECTED,
        weights=_tensors("patch_embed.proj.weight", lambda w: w.permute(0, 2, 3, 1).reshape(w.shape)),
    ),
    vision_fault(
        "vision_patch_bias_missing",
        "use_bias = false is applied to the patch projection, which has a bias",
        PROJECTED,
        weights=_tensors("patch_embed.proj.bias", torch.zeros_like),
    ),
    vision_fault(
        "vision_patch_norm_missing",
        "patches enter the first block without their norm",
        PATCHES,
        patches=(_unnormed(lambda tower: tower.patch_embed["norm"]),),
    ),
    vision_fault(
        "vision_patch_rows_raster",
        "the processor emits patches in raster order, the tower takes them square by square",
        PIXELS,
        visibility="L",
        visible_when="a frame wider than one square and more than one patch high",
        patches=(Patch(VisionTower, "_frame", _rows_in_raster_order),),
    ),
    vision_fault(
        "vision_rope_positions_raster",
        "coordinates are in raster order, the rows are not: pre_pixel_shuffle is false in the tower",
        ANGLES,
        "vLLM and SGLang, default of their config classes",
        visibility="L",
        visible_when="a frame wider than one square and more than one patch high",
        patches=(_coordinates_edited(lambda coordinates_T2, merge: coordinates_T2[_raster(coordinates_T2)]),),
    ),
    vision_fault(
        "vision_rope_axes_swapped",
        "the column turns the first half of the pairs, the row the second",
        ANGLES,
        patches=(_coordinates_edited(lambda coordinates_T2, merge: coordinates_T2.flip(1)),),
    ),
    vision_fault(
        "vision_rope_merged_units",
        "coordinates count squares in place of patches",
        ANGLES,
        patches=(_coordinates_edited(lambda coordinates_T2, merge: coordinates_T2 // merge),),
    ),
    vision_fault(
        "vision_rope_temporal",
        "the number of the frame is added to the row",
        ANGLES,
        visibility="L",
        visible_when=SECOND_FRAME,
        patches=(_frames_edited(_frame_number_added),),
    ),
    vision_fault(
        "vision_rope_continues_across_images",
        "coordinates are not reset at the next item",
        ANGLES,
        visibility="L",
        visible_when=SECOND_ITEM,
        patches=(_frames_edited(_not_reset),),
    ),
    vision_fault(
        "vision_rope_freq_dim64",
        "frequencies fall over all lanes of a head in place of half of them",
        ANGLES,
        patches=(_angles(_frequencies_of_whole_head),),
    ),
    vision_fault(
        "vision_rope_text_theta",
        "patches are turned with the base of the text model",
        ANGLES,
        patches=(Patch(reference.layers.vision_attention, "THETA", lambda original: TEXT_THETA),),
    ),
    vision_fault(
        "vision_rope_bf16_table",
        "angles, cos and sin are rounded to bfloat16",
        Q,
        "vLLM and SGLang, whose whole tower is cast",
        visibility="N",
        visible_when="grows with the frame",
        patches=(after_construction(VisionRope, _bfloat16_table),),
    ),
    vision_fault(
        "vision_rope_interleaved",
        "neighbouring lanes are a pair, as in the text model",
        Q,
        patches=(Patch(rope, "rotate_halves", lambda original: rope.rotate_neighbours),),
    ),
    vision_fault(
        "vision_rope_sections",
        "each axis has half of the lanes, and pairs inside that half",
        Q,
        patches=(Patch(rope, "rotate_halves", lambda original: _rotated_in_sections),),
    ),
    vision_fault(
        "vision_norm_after_rope",
        "queries and keys are rotated before they are normed",
        Q,
        visibility="L",
        visible_when="norm weights that differ within a rotated pair",
        patches=(_attention(_norm_after_rope),),
    ),
    vision_fault(
        "vision_qk_norm_over_width",
        "queries and keys are normed over all heads together",
        Q,
        patches=(_attention(_norm_over_width),),
    ),
    vision_fault(
        "vision_qk_norm_missing",
        "queries and keys are not normed",
        Q,
        patches=(_attention(_norm_missing),),
    ),
    vision_fault(
        "vision_qkv_interleaved",
        "the rows of qkv are read head by head, each with its query, key and value",
        Q,
        weights=_qkv_by_head,
    ),
    vision_fault(
        "vision_heads_12",
        "another number of heads, with the same shapes of all projections",
        ANGLES,
        "dots.ocr has 12 heads of 128",
        config=_half_as_wide_heads,
        weights=_half_of_head_norms,
    ),
    vision_fault(
        "vision_attention_across_images",
        "all rows of a call attend to each other",
        CORE,
        visibility="L",
        visible_when=SECOND_ITEM,
        patches=(_frames_edited(_one_sequence),),
    ),
    vision_fault(
        "vision_attention_across_frames",
        "the frames of an item attend to each other",
        CORE,
        visibility="L",
        visible_when=SECOND_FRAME,
        patches=(_frames_edited(_items_whole),),
    ),
    vision_fault(
        "vision_attention_causal",
        "a patch sees only the patches before it",
        CORE,
        patches=(Patch(reference.layers.vision_attention, "attend", _causal),),
    ),
    vision_fault(
        "vision_cu_seqlens_merged",
        "lengths of sequences are counted in merged rows",
        CORE,
        patches=(Patch(VisionAttention, "core", _in_quarters),),
    ),
    vision_fault(
        "vision_softmax_scale_missing",
        "scores are not divided by the root of the head's width",
        CORE,
        patches=(_scaled_to(0),),
    ),
    vision_fault(
        "vision_softmax_scale_twice",
        "scores are divided by the head's width",
        CORE,
        patches=(_scaled_to(2),),
    ),
    vision_fault(
        "vision_post_trunk_norm_missing",
        "the trunk's output is not normed",
        TRUNK,
        patches=(_unnormed(lambda tower: tower.post_trunk_norm),),
    ),
    vision_fault(
        "vision_post_norm_eps",
        "the norm of the trunk has the eps of the merger",
        TRUNK,
        visibility="N",
        visible_when="hardly: the merger's LayerNorm takes a factor of a row away again",
        patches=(_eps(VisionTower, lambda tower: tower.post_trunk_norm, 1e-6),),
    ),
    vision_fault(
        "vision_merge_before_norm",
        "the patches of a square are normed together",
        NORMED,
        "pixel_shuffle_mlp of the related towers",
        patches=(_normed_by(_normed_together),),
    ),
    vision_fault(
        "vision_merger_eps",
        "the merger's LayerNorm has the eps of the tower",
        NORMED,
        "an older dots.ocr graph of llama.cpp",
        visibility="N",
        visible_when="rows of small variance",
        patches=(_eps(Merger, lambda merger: merger.ln_q, 1e-5),),
    ),
    vision_fault(
        "vision_merger_rmsnorm",
        "the merger's norm takes no mean off and adds no bias",
        NORMED,
        patches=(_normed_by(_rms_normed),),
    ),
    vision_fault(
        "vision_merger_bias_dropped",
        "the bias of the merger's norm is left out",
        NORMED,
        weights=_tensors("adapter.ln_q.bias", torch.zeros_like),
    ),
    vision_fault(
        "vision_merge_order_column_major",
        "the patches of a square are taken column by column",
        GROUPED,
        "mobius issue 130",
        patches=(Patch(Merger, "forward", _column_by_column),),
    ),
    vision_fault(
        "vision_gelu_tanh",
        "the merger's activation is the tanh approximation of gelu",
        HIDDEN,
        "an older dots.ocr graph of llama.cpp",
        visibility="N",
        visible_when="an error of 1e-3",
        patches=(Patch(F, "gelu", lambda gelu: partial(gelu, approximate="tanh")),),
    ),
    *VISION_MOE_FAULTS,
)
