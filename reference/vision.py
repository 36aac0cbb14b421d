"""The vision tower: patches of images and video frames to rows that stand beside text embeddings.

x = rms(pixels W_patchᵀ + b)
for each block:  x = x + attention(rms(x));  x = x + ffn(rms(x))
x = rms(x)
y = gelu([layer_norm(x) of the m² patches of a square, side by side] W_0ᵀ + b_0) W_2ᵀ + b_2

A frame is processed alone, from its pixels to its output rows: images never see each other, nor do the frames of a
video, and what stands beside an image in a call does not change one bit of it. Released names, without the prefix
`vision_encoder.`, are the module tree; the order of rows and the coordinates are in `layers.vision_grid`.
Source: vision specification, sections 1, 2 and 7.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.config import NoteConfig, VisionConfig, tiny
from reference.layers.norm import LayerNorm, RMSNorm
from reference.layers.vision_attention import VisionAttention, axial_angles
from reference.layers.vision_grid import Grid, Segment, VisionInputError, check_grids, patch_count, segments
from reference.layers.vision_moe import VisionMlp, VisionMoe
from reference.numerics import at_least_float32
from reference.probe import probe, rows, scope
from reference.vision_numerics import VisionNumerics

# N patches of a call  T patches of one frame  X values of a patch  D tower width  P pairs of lanes in a head
# M output rows of one frame  G = m² D width of a merged square  O output width


class PatchProjection(nn.Module):
    """A convolution whose stride is its kernel, on one patch at a time: a matrix product, [T, X] to [T, D].

    The values of a patch are ordered by channel (R, G, B), then row, then column, as the kernel's.
    """

    def __init__(self, config: VisionConfig):
        super().__init__()
        D, patch = config.embed_dim, config.patch_size
        self.weight = nn.Parameter(torch.zeros(D, config.num_channels, patch, patch))
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, pixels_TX: Tensor) -> Tensor:
        # Pixels come in float32 and are rounded to the activation dtype before the product.
        return F.linear(pixels_TX.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class VisionBlock(nn.Module):
    """One block, [T, D] to [T, D] for one frame. Its index decides whether it has experts, and how many."""

    def __init__(self, config: VisionConfig, block: int, numerics: VisionNumerics):
        super().__init__()
        D, eps, experts = config.embed_dim, config.rms_norm_eps, config.experts[block]
        self.norm_1 = RMSNorm(D, eps, numerics.of_norms)
        self.attn = VisionAttention(config, numerics)
        self.norm_2 = RMSNorm(D, eps, numerics.of_norms)
        self.mlp = VisionMoe(config, experts, numerics) if experts else VisionMlp(D, config.intermediate_size, numerics)

    def forward(self, hidden_TD: Tensor, angles_TP: Tensor) -> Tensor:
        hidden_TD = probe("input", hidden_TD)
        with scope("attn"):
            attn_input_TD = probe("input", self.norm_1(hidden_TD))
            hidden_TD = hidden_TD + self.attn(attn_input_TD, angles_TP)
        with scope("ffn"):
            ffn_input_TD = probe("input", self.norm_2(hidden_TD))
            ffn_output_TD = probe("output", self.mlp(ffn_input_TD))
        return probe("output", hidden_TD + ffn_output_TD)


class Merger(nn.Module):
    """`adapter.` in the tensor names: the patches of a square, normed one by one, become one row of the text's width.

    The norm is a LayerNorm with eps 1e-6, not the tower's eps; the activation is the exact (erf) GELU.
    """

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.patches_of_a_square = config.spatial_merge_size**2
        merged_width = self.patches_of_a_square * config.embed_dim
        self.ln_q = LayerNorm(config.embed_dim)
        self.mlp = nn.Sequential(
            nn.Linear(merged_width, merged_width), nn.GELU(), nn.Linear(merged_width, config.adapter_out_dim)
        )

    def normed(self, trunk_TD: Tensor) -> Tensor:
        return probe("normed", self.ln_q(trunk_TD))

    def forward(self, normed_TD: Tensor) -> Tensor:
        # Rows already come square by square: top left, top right, bottom left, bottom right.
        grouped_MG = probe("grouped", normed_TD.reshape(-1, self.patches_of_a_square * normed_TD.shape[-1]))
        first, _, last = self.mlp
        linear_MG = first(grouped_MG)
        wide_MG = linear_MG.to(at_least_float32(linear_MG.dtype))
        return last(probe("hidden", F.gelu(wide_MG).to(linear_MG.dtype)))


class VisionTower(nn.Module):
    """The tower and its merger. Build it under `torch.device("meta")` and fill it from a checkpoint, or parts of it."""

    def __init__(self, config: VisionConfig, numerics: VisionNumerics | None = None):
        super().__init__()
        self.config = config
        self.numerics = numerics or VisionNumerics()
        D, eps, norms = config.embed_dim, config.rms_norm_eps, self.numerics.of_norms
        self.patch_embed = nn.ModuleDict({"proj": PatchProjection(config), "norm": RMSNorm(D, eps, norms)})
        self.blocks = nn.ModuleList(
            VisionBlock(config, block, self.numerics) for block in range(config.num_hidden_layers)
        )
        self.post_trunk_norm = RMSNorm(D, eps, norms)
        self.adapter = Merger(config)

    def forward(self, pixels_NX: Tensor, grids: Sequence[Grid], request: str = "images") -> Tensor:
        """Output rows of all items, [N / m², O] in the activation dtype: item by item, frame by frame, in raster order.

        pixels_NX: normalised patches, float32, X = channels · patch_size², in the order of `layers.vision_grid`. grids:
        (frames, height, width) of each item, the latter in patches. Observed rows belong to `request`; the position of
        a patch is its row in the call, that of a merged row its row in the output.
        Raises: VisionInputError where pixels and grids do not fit.
        """
        self._check(pixels_NX, grids)
        frames = segments(grids, self.config.spatial_merge_size, pixels_NX.device)
        merged = [self._frame(pixels_NX[frame.rows], frame, request) for frame in frames]
        if not merged:
            return pixels_NX.new_zeros(0, self.config.adapter_out_dim, dtype=self.post_trunk_norm.weight.dtype)
        return torch.cat(merged)

    def _frame(self, pixels_TX: Tensor, frame: Segment, request: str) -> Tensor:
        positions_T = torch.arange(frame.start, frame.start + len(pixels_TX))
        with scope("vision"):
            with rows(request, positions_T, "prefill"):
                normed_TD = self._patch_rows(pixels_TX, frame.coordinates_T2)
            square = self.adapter.patches_of_a_square
            with rows(request, positions_T[::square] // square, "prefill"):
                with scope("merger"):
                    merged_MO = self.adapter(normed_TD)
                return probe("merged", merged_MO)

    def _patch_rows(self, pixels_TX: Tensor, coordinates_T2: Tensor) -> Tensor:
        """All that has one row a patch: up to the norm before the merge."""
        pixels_TX = probe("pixels", pixels_TX)
        projected_TD = probe("patch_proj", self.patch_embed["proj"](pixels_TX))
        hidden_TD = probe("patches", self.patch_embed["norm"](projected_TD))
        head_dim = self.config.embed_dim // self.config.num_attention_heads
        angles_TP = probe("rope.angles", axial_angles(coordinates_T2, head_dim))
        for index, block in enumerate(self.blocks):
            with scope(f"blocks.{index}"):
                hidden_TD = block(hidden_TD, angles_TP)
        trunk_TD = probe("trunk", self.post_trunk_norm(hidden_TD))
        with scope("merger"):
            return self.adapter.normed(trunk_TD)

    def _check(self, pixels_NX: Tensor, grids: Sequence[Grid]) -> None:
        check_grids(grids, self.config.spatial_merge_size)
        width = self.config.num_channels * self.config.patch_size**2
        shape = (patch_count(grids), width)
        if tuple(pixels_NX.shape) != shape:
            raise VisionInputError(
                f"pixels: expected {shape}, found {tuple(pixels_NX.shape)}: one row for each of the {shape[0]} patches "
                f"of the grids, of {self.config.num_channels} channels x {self.config.patch_size} x "
                f"{self.config.patch_size} pixels (a processor with two frames a patch makes rows twice as wide)"
            )


def tiny_vision() -> VisionConfig:
    """A tower of six blocks in which every pair of sizes that a port could mix up differs.

    Three dense blocks and three with 4, 7 and 12 experts, of which a patch chooses three: not the release's two, nor
    the side of a merged square. Twelve experts: sorted as text, 10 comes before 2.
    """
    return VisionConfig(
        embed_dim=80,
        num_hidden_layers=6,
        num_attention_heads=5,
        intermediate_size=56,
        moe_intermediate_size=36,
        num_channels=3,
        patch_size=7,
        spatial_merge_size=2,
        rms_norm_eps=1e-5,
        experts=(0, 0, 0, 4, 7, 12),
        num_experts_per_tok=3,
        adapter_out_dim=96,
    )


def tiny_with_vision() -> NoteConfig:
    """The tiny text model with the tiny tower before it."""
    return replace(tiny(), vision=tiny_vision())
