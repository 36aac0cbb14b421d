"""The vision tower over many images and frames at once.

x = rms(pixels W_patchᵀ + b);  for each block: x = x + attention(rms(x)), x = x + ffn(rms(x));  x = rms(x)
y = gelu([layer_norm(x) of the m² patches of a square, side by side] W_0ᵀ + b_0) W_2ᵀ + b_2

All patches of a run lie behind each other; attention alone knows where a frame begins. The residual stream and what is
added to it travel apart until the next norm joins them in one kernel, as in `text`. Everything named in the vision
schema is shown under the reference's names, with the rows of the whole call.
Source: vision specification, sections 2 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.device import Backend, Ops, choose
from optimized.errors import NotSupportedError
from optimized.moe import moe
from optimized.moe_fp8 import fp8_moe
from optimized.observe import BatchObserver, Segment
from optimized.vision_plan import FramesOnDevice, VisionRun, upload, vision_runs
from optimized.vision_weights import BlockWeights, PackedVision, State, pack_vision, quantized_vision
from reference.config import VisionConfig
from reference.layers.vision_grid import Grid, VisionInputError, patch_count
from reference.probe import is_observed, scope
from reference.vision_numerics import VisionNumerics

# N patches of a call  T patches of a run  X values of a patch  D tower width  H heads  J head dim  P = J/2 pairs
# M output rows of a run  G merged width  O output width

THETA = 10000.0
UNSEEN = BatchObserver(())
# Of the merger's LayerNorm, whatever the config's eps is.
MERGER_EPS = 1e-6


@dataclass(frozen=True)
class VisionOptions:
    """`most_patches`: how many patches are in memory at once; when released, each has some 40 kB of intermediates.

    `fp8_experts`: weights and activations of the experts in 8 bits, which changes the result (see `moe_fp8`).
    """

    most_patches: int = 65536
    fp8_experts: bool = False


class Routing(NamedTuple):
    """What `moe` asks of a config: weights add up to 1."""

    num_experts_per_tok: int
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True


class VisionTower:
    """The tower and its merger on one device: packed weights and the chosen ops."""

    def __init__(self, config: VisionConfig, weights: PackedVision, ops: Ops, options: VisionOptions | None = None):
        self.config, self.weights, self.ops = config, weights, ops
        self.options = options or VisionOptions()
        self.dtype, self.device = weights.trunk_norm_D.dtype, weights.trunk_norm_D.device
        self.heads = config.num_attention_heads
        self.head_dim = config.embed_dim // self.heads
        self._square = config.spatial_merge_size**2
        exponents_F = torch.arange(0, self.head_dim // 2, 2, dtype=torch.float32, device=self.device)
        self._frequency_F = 1.0 / THETA ** (exponents_F / (self.head_dim // 2))

    @classmethod
    def from_state(
        cls,
        config: VisionConfig,
        state: State,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        backend: Backend | None = None,
        options: VisionOptions | None = None,
        numerics: VisionNumerics | None = None,
    ) -> VisionTower:
        """Pack a state dict with the reference's names, in `dtype`; router biases are at least float32.

        Raises: CheckpointError for other tensors than these, NotSupportedError for a backend that cannot run here or
        numerics other than the default.
        """
        if (numerics or VisionNumerics()) != VisionNumerics():
            raise NotSupportedError(f"the optimized tower has the default numerics only, found {numerics}")
        ops = choose(device, backend)
        if options and options.fp8_experts:
            return cls(config, quantized_vision(pack_vision(state, config, device, dtype)), ops, options)
        return cls(config, pack_vision(state, config, device, dtype), ops, options)

    @torch.no_grad()
    def __call__(self, pixels_NX: Tensor, grids: Sequence[Grid], request: str = "images") -> Tensor:
        """Output rows of all items, [N / m², O] in the weights' dtype: item by item, frame by frame, in raster order.

        pixels_NX: normalised patches, float32, on any device, X = channels · patch_size², in the order of
        `reference.layers.vision_grid`. grids: (frames, height, width) of each item, the latter in patches; host
        integers, so that nothing waits for the device. Runs of `most_patches` keep memory bounded.
        Raises: VisionInputError where pixels and grids do not fit, PlanError for a frame beyond `most_patches`.
        """
        runs = vision_runs(grids, self.config.spatial_merge_size, self.options.most_patches)
        shape = (patch_count(grids), self.config.num_channels * self.config.patch_size**2)
        if tuple(pixels_NX.shape) != shape:
            raise VisionInputError(f"pixels: expected {shape}, a row for each patch, found {tuple(pixels_NX.shape)}")
        merged = torch.empty(
            shape[0] // self._square, self.config.adapter_out_dim, dtype=self.dtype, device=self.device
        )
        for run in runs:
            pixels_TX = pixels_NX[run.start : run.start + run.patches].to(self.device, non_blocking=True)
            first = run.start // self._square
            merged[first : first + run.patches // self._square] = self._run(pixels_TX, run, request)
        return merged

    def _run(self, pixels_TX: Tensor, run: VisionRun, request: str) -> Tensor:
        frames = upload(run, self.config.spatial_merge_size, self.device)
        pixels_TX = pixels_TX.to(self.device, non_blocking=True)
        see_patches = self._observer(request, run.start, run.patches)
        see_merged = self._observer(request, run.start // self._square, run.patches // self._square)
        return self.rows(pixels_TX, frames, see_patches, see_merged)

    def rows(
        self,
        pixels_TX: Tensor,
        frames: FramesOnDevice,
        see_patches: BatchObserver = UNSEEN,
        see_merged: BatchObserver = UNSEEN,
    ) -> Tensor:
        """Output rows of the frames of one run, from what is on the device; neither waits for it nor uploads."""
        with scope("vision"):
            trunk_TD = self._trunk(pixels_TX, frames, see_patches)
            return see_merged("merged", self._merged(trunk_TD, see_patches, see_merged))

    def _observer(self, request: str, start: int, rows: int) -> BatchObserver:
        if not is_observed():
            return UNSEEN
        positions = torch.arange(start, start + rows, device=self.device)
        return BatchObserver([Segment(request, "prefill", 0, rows, positions)])

    def _trunk(self, pixels_TX: Tensor, frames: FramesOnDevice, see: BatchObserver) -> Tensor:
        """All blocks and the norm behind them, [T, D]."""
        eps, weights, ops = self.config.rms_norm_eps, self.weights, self.ops
        pixels_TX = see("pixels", pixels_TX)
        # Pixels are rounded to the activation dtype before the product.
        patches_TD = F.linear(pixels_TX.to(self.dtype), weights.patch_DCYX.flatten(1), weights.patch_bias_D)
        hidden_TD = see("patches", ops.rms_norm(see("patch_proj", patches_TD), weights.patch_norm_D, eps))
        cos_sin_TJ = self._cos_sin(frames, see)
        delta_TD: Tensor | None = None
        for index, block in enumerate(weights.blocks):
            if delta_TD is None:
                normed_TD = ops.rms_norm(hidden_TD, block.norm_1_D, eps)
            else:
                hidden_TD, normed_TD = self._output(index - 1, hidden_TD, delta_TD, block.norm_1_D, see)
            with scope(f"blocks.{index}"):
                hidden_TD, delta_TD = self._block(block, hidden_TD, normed_TD, frames, cos_sin_TJ, see)
        if delta_TD is None:
            return see("trunk", ops.rms_norm(hidden_TD, weights.trunk_norm_D, eps))
        _, normed_TD = self._output(len(weights.blocks) - 1, hidden_TD, delta_TD, weights.trunk_norm_D, see)
        return see("trunk", normed_TD)

    def _cos_sin(self, frames: FramesOnDevice, see: BatchObserver) -> Tensor:
        """[cos P | sin P] of each patch, at least float32: angles of its row, then those of its column."""
        angles_2TF = frames.coordinates_2N.to(torch.float32)[..., None] * self._frequency_F
        angles_TP = see("rope.angles", torch.cat(tuple(angles_2TF), dim=-1))
        angles_TP = angles_TP.to(torch.promote_types(self.dtype, torch.float32))
        return torch.cat((angles_TP.cos(), angles_TP.sin()), dim=-1)

    def _block(
        self,
        block: BlockWeights,
        hidden_TD: Tensor,
        normed_TD: Tensor,
        frames: FramesOnDevice,
        cos_sin_TJ: Tensor,
        see: BatchObserver,
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream behind the attention, and what the feed-forward adds to it."""
        see.only("input", hidden_TD)
        with scope("attn"):
            normed_TD = see("input", normed_TD)
            qkv_T3HJ = (normed_TD @ block.qkv_XD.T).view(-1, 3, self.heads, self.head_dim)
            self.ops.norm_rotate_heads_(qkv_T3HJ, block.q_norm_J, block.k_norm_J, cos_sin_TJ, self.config.rms_norm_eps)
            q_THJ, k_THJ, v_THJ = (see(name, x_THJ) for name, x_THJ in zip("qkv", qkv_T3HJ.unbind(1), strict=True))
            core_THJ = self.ops.varlen_attention(
                q_THJ, k_THJ, v_THJ, frames.starts_B1, frames.longest, self.head_dim**-0.5
            )
            attended_TD = see("output", see("core", core_THJ).flatten(1) @ block.proj_DD.T)
        hidden_TD, normed_TD = self.ops.add_rms_norm(hidden_TD, attended_TD, block.norm_2_D, self.config.rms_norm_eps)
        with scope("ffn"):
            return hidden_TD, see("output", self._feed_forward(block, see("input", normed_TD), see))

    def _feed_forward(self, block: BlockWeights, x_TD: Tensor, see: BatchObserver) -> Tensor:
        if block.dense is not None:
            return self.ops.swiglu(x_TD @ block.dense.gate_up_XD.T) @ block.dense.down_DF.T
        chosen = self.config.num_experts_per_tok
        if block.fp8 is not None:
            routing = Routing(min(chosen, block.fp8.routed))
            output_TD, observed = fp8_moe(x_TD, block.fp8, routing, self.ops, is_observed())
        else:
            assert block.experts is not None
            routing = Routing(min(chosen, block.experts.routed))
            output_TD, observed = moe(x_TD, block.experts, routing, self.ops, is_observed())
        if observed is not None:
            with scope("router"):
                see.only("logits", observed.logits_TE)
                see.only("scores", observed.scores_TE)
                see.only("choice", observed.choice_TE)
                see.only("expert_ids", observed.expert_ids_TK.long())
                see.only("weights", observed.weights_TK)
        return output_TD

    def _output(
        self, index: int, hidden_TD: Tensor, delta_TD: Tensor, norm_D: Tensor, see: BatchObserver
    ) -> tuple[Tensor, Tensor]:
        """Join the stream and what block `index` adds; returns the block's output and its norm."""
        hidden_TD, normed_TD = self.ops.add_rms_norm(hidden_TD, delta_TD, norm_D, self.config.rms_norm_eps)
        with scope(f"blocks.{index}"):
            see.only("output", hidden_TD)
        return hidden_TD, normed_TD

    def _merged(self, trunk_TD: Tensor, see_patches: BatchObserver, see_merged: BatchObserver) -> Tensor:
        merger = self.weights.merger
        with scope("merger"):
            width = (trunk_TD.shape[-1],)
            normed_TD = F.layer_norm(trunk_TD, width, merger.norm_D, merger.norm_bias_D, MERGER_EPS)
            normed_TD = see_patches("normed", normed_TD)
            # Rows already come square by square: top left, top right, bottom left, bottom right.
            grouped_MG = see_merged("grouped", normed_TD.reshape(-1, self._square * width[0]))
            hidden_MG = F.gelu(F.linear(grouped_MG, merger.first_GG, merger.first_bias_G))
            return F.linear(see_merged("hidden", hidden_MG), merger.last_OG, merger.last_bias_O)
