"""The vision tower's weights as the optimized path wants them, filled from the reference's state dict.

gate_up   rows [fc1 F | fc3 F]; down is fc2
experts   stacks, as the text model's: see `moe`; a block has as many as the pyramid gives it, and no shared one
fp8       the same in 8 bits, in their place: see `moe_fp8`; what is quantized cannot be unpacked

Names are those of the release without `vision_encoder.`. Packing only moves values, through one table, as in `weights`.
Source: vision specification, section 8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimized.moe import PackedExperts, Place
from optimized.moe_fp8 import Fp8Experts, quantize_experts
from optimized.weights import DenseWeights, New, State, fill, require_device, whole
from reference.config import VisionConfig

# D tower width  C channels  X rows of q, k and v, or 2F  H heads  J head dim  F ffn width  E experts
# G merged width  O output width


@dataclass(frozen=True)
class BlockWeights:
    """One block; one of `dense`, `experts` and `fp8` is not None. `qkv_XD` rows are [q D | k D | v D], head by head."""

    norm_1_D: Tensor
    qkv_XD: Tensor
    q_norm_J: Tensor
    k_norm_J: Tensor
    proj_DD: Tensor
    norm_2_D: Tensor
    dense: DenseWeights | None
    experts: PackedExperts | None
    fp8: Fp8Experts | None = None


@dataclass(frozen=True)
class MergerWeights:
    norm_D: Tensor
    norm_bias_D: Tensor
    first_GG: Tensor
    first_bias_G: Tensor
    last_OG: Tensor
    last_bias_O: Tensor


@dataclass(frozen=True)
class PackedVision:
    """All weights of the tower on one device, in one dtype but for the routers' biases (at least float32).

    patch_DCYX: kernel of the patches by channel, row and column; flattened, the matrix that multiplies a patch.
    """

    patch_DCYX: Tensor
    patch_bias_D: Tensor
    patch_norm_D: Tensor
    blocks: tuple[BlockWeights, ...]
    trunk_norm_D: Tensor
    merger: MergerWeights

    @property
    def nbytes(self) -> int:
        plain = sum(piece.nbytes for place in vision_places(self).values() for piece in place.pieces)
        return plain + sum(block.fp8.nbytes for block in self.blocks if block.fp8)


def pack_vision(state: State, config: VisionConfig, device: torch.device | str, dtype: torch.dtype) -> PackedVision:
    """Copy a state dict (names as in `reference.vision.VisionTower`) into packed storage; no value changes.

    A tensor at a time, in any order: of an iterator that keeps none, no more than the storage and one source tensor
    exist at once. Raises: CheckpointError as `weights.fill`; NotSupportedError for a device that is not there.
    """
    require_device(device)
    packed = empty_vision(config, device, dtype)
    fill(vision_places(packed), state)
    return packed


def quantized_vision(packed: PackedVision) -> PackedVision:
    """The same tower with its experts in 8 bits; everything else is shared. Blocks without experts stay as they are.

    Of a `packed` that nobody else holds the wide experts are let go block by block.
    """
    blocks, packed = list(packed.blocks), replace(packed, blocks=())
    for index, block in enumerate(blocks):
        if block.experts is not None:
            blocks[index] = replace(block, experts=None, fp8=quantize_experts(block.experts))
    return replace(packed, blocks=tuple(blocks))


def unpack_vision(packed: PackedVision) -> dict[str, Tensor]:
    """The state dict that was packed, bit for bit, in tensors of its own; without experts that were quantized."""
    return {name: torch.cat(place.pieces, place.dim) for name, place in vision_places(packed).items()}


def empty_vision(config: VisionConfig, device: torch.device | str, dtype: torch.dtype) -> PackedVision:
    """Storage without values, of the sizes of `config`."""
    new = New(torch.device(device), dtype)
    D, out = config.embed_dim, config.adapter_out_dim
    G = config.spatial_merge_size**2 * D
    blocks = tuple(_empty_block(config, experts, new) for experts in config.experts)
    merger = MergerWeights(new(D), new(D), new(G, G), new(G), new(out, G), new(out))
    patch_DCYX = new(D, config.num_channels, config.patch_size, config.patch_size)
    return PackedVision(patch_DCYX, new(D), new(D), blocks, new(D), merger)


def vision_places(packed: PackedVision) -> dict[str, Place]:
    """Where each tensor of the state dict lies in the storage: the one table of the layout."""
    merger = packed.merger
    places = {
        "patch_embed.proj.weight": whole(packed.patch_DCYX),
        "patch_embed.proj.bias": whole(packed.patch_bias_D),
        "patch_embed.norm.weight": whole(packed.patch_norm_D),
        "post_trunk_norm.weight": whole(packed.trunk_norm_D),
        "adapter.ln_q.weight": whole(merger.norm_D),
        "adapter.ln_q.bias": whole(merger.norm_bias_D),
        "adapter.mlp.0.weight": whole(merger.first_GG),
        "adapter.mlp.0.bias": whole(merger.first_bias_G),
        "adapter.mlp.2.weight": whole(merger.last_OG),
        "adapter.mlp.2.bias": whole(merger.last_bias_O),
    }
    for index, block in enumerate(packed.blocks):
        places |= {f"blocks.{index}.{name}": place for name, place in _block_places(block).items()}
    return places


def _block_places(block: BlockWeights) -> dict[str, Place]:
    places = {
        "norm_1.weight": whole(block.norm_1_D),
        "attn.qkv.weight": whole(block.qkv_XD),
        "attn.q_norm.weight": whole(block.q_norm_J),
        "attn.k_norm.weight": whole(block.k_norm_J),
        "attn.proj.weight": whole(block.proj_DD),
        "norm_2.weight": whole(block.norm_2_D),
    }
    if block.dense is not None:
        places |= _mlp_places("mlp", block.dense.gate_up_XD, block.dense.down_DF)
    routed = block.experts or block.fp8
    if routed is not None:
        places["mlp.gate_weight"] = whole(routed.router_weight_ED)
        places["mlp.router_bias"] = whole(routed.bias_E)
    if block.experts is not None:
        stacks = zip(block.experts.gate_up_EXD, block.experts.down_EDF, strict=True)
        for expert, (gate_up_XD, down_DF) in enumerate(stacks):
            places |= _mlp_places(f"mlp.experts.{expert}", gate_up_XD, down_DF)
    return places


def _mlp_places(prefix: str, gate_up_XD: Tensor, down_DF: Tensor) -> dict[str, Place]:
    gate_FD, up_FD = gate_up_XD.chunk(2)
    return {
        f"{prefix}.fc1.weight": whole(gate_FD),
        f"{prefix}.fc3.weight": whole(up_FD),
        f"{prefix}.fc2.weight": whole(down_DF),
    }


def _empty_block(config: VisionConfig, experts: int, new: New) -> BlockWeights:
    D, J = config.embed_dim, config.embed_dim // config.num_attention_heads
    dense, stacks = None, None
    if experts:
        stacks = _empty_experts(config, experts, new)
    else:
        dense = DenseWeights(new(2 * config.intermediate_size, D), new(D, config.intermediate_size))
    return BlockWeights(new(D), new(3 * D, D), new(J), new(J), new(D, D), new(D), dense, stacks)


def _empty_experts(config: VisionConfig, experts: int, new: New) -> PackedExperts:
    """The experts of one block, without values. The router's bias is at least float32, as it is stored."""
    D, F = config.embed_dim, config.moe_intermediate_size
    bias_E = torch.empty(experts, dtype=torch.promote_types(new.dtype, torch.float32), device=new.device)
    return PackedExperts(new(experts, D), bias_E, new(experts, 2 * F, D), new(experts, D, F), experts)
