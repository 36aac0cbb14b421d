"""The output gate, and the way back out of the latent space.

core[t, h]  = W_UV[h] o_latent[t, h]                               rounded to the dtype, as the reference's core is
gated[t, h] = core[t, h] · sigmoid(gate[t, h])                     rounded once; the gate stays float32

unabsorb_gate is one product a head with the gate in its epilogue: a program makes a [BLOCK_T, BLOCK_V] tile of a head,
so that a decode step reads W_UV once, from all processors. gate_heads is the gate alone, for a core that was made
head by head. Sums are float32. Tokens and heads may lie apart (any strides), lanes are dense; the gate is one logit a
head. Source: text_model specification, section 10; DeepSeek-V2 report, section 2.1.2 (absorption).

H200, bfloat16, inside a CUDA graph, weights cold, unabsorb_gate at T = 1 / 16 / 64 / 256: full layers
7.1 / 7.3 / 7.7 / 19 µs, sliding 7.2 / 7.3 / 8.1 / 18 µs. gate_heads of 4096 tokens, 128 heads: 66 µs (floor 58).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimized.kernels.common import (
    check_tensor,
    dot,
    next_power_of_2,
    overlap,
    round_to,
    tile,
    tl,
    triton,
    wait_for_inputs,
    widen,
)

# T tokens  H heads  C kv latent  V value dim

GATED_ROWS = 16


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _unabsorb_gate_kernel(
    o_latent, weight, gate, gated, core, gates, T, C, V, H, o_token, o_head, weight_head, weight_row, gate_token,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, WIDEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    head = tl.program_id(2).to(tl.int64)
    token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane_V = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token_T = token_T < T
    is_lane_1V = (lane_V < V)[None, :]
    o_T1 = o_latent + token_T[:, None] * o_token + head * o_head
    weight_1V = weight + head * weight_head + lane_V.to(tl.int64)[None, :] * weight_row

    sums_TV = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for start in range(0, C, BLOCK_C):
        lane_C = start + tl.arange(0, BLOCK_C)
        o_TC = tl.load(o_T1 + lane_C[None, :], mask=is_token_T[:, None] & (lane_C < C)[None, :], other=0)
        weight_CV = tl.load(weight_1V + lane_C[:, None], mask=(lane_C < C)[:, None] & is_lane_1V, other=0)
        sums_TV = dot(o_TC, weight_CV, sums_TV, WIDEN)

    logits_T = tl.load(gate + token_T * gate_token + head, mask=is_token_T, other=0).to(tl.float32)
    gate_T = _sigmoid(logits_T)
    core_TV = round_to(sums_TV, gated)
    out_TV = (token_T[:, None] * H + head) * V + lane_V[None, :]
    inside_TV = is_token_T[:, None] & is_lane_1V
    tl.store(gated + out_TV, round_to(core_TV.to(tl.float32) * gate_T[:, None], gated), mask=inside_TV)
    if core is not None:
        tl.store(core + out_TV, core_TV, mask=inside_TV)
        if tl.program_id(1) == 0:
            tl.store(gates + token_T * H + head, gate_T, mask=is_token_T)


@triton.jit
def _gate_heads_kernel(
    core, gate, gated, gates, rows, H, V, core_token, core_head, gate_token, ROWS: tl.constexpr, BLOCK_V: tl.constexpr
):
    row_M = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # M = (T H)
    token_M, head_M = row_M // H, row_M % H
    is_row_M = row_M < rows
    gate_M = _sigmoid(tl.load(gate + token_M * gate_token + head_M, mask=is_row_M, other=0).to(tl.float32))
    lane_V = tl.arange(0, BLOCK_V)
    inside_MV = is_row_M[:, None] & (lane_V < V)[None, :]
    core_M1 = core + token_M[:, None] * core_token + head_M[:, None] * core_head
    core_MV = tl.load(core_M1 + lane_V[None, :], mask=inside_MV, other=0).to(tl.float32)
    tl.store(gated + row_M[:, None] * V + lane_V[None, :], round_to(core_MV * gate_M[:, None], gated), mask=inside_MV)
    if gates is not None:
        tl.store(gates + row_M, gate_M, mask=is_row_M)


class UnabsorbTiles(NamedTuple):
    """Block sizes of a launch, from the shapes alone."""

    tokens: int
    values: int
    latents: int
    warps: int
    stages: int


def unabsorb_tiles(T: int, H: int, V: int, C: int, is_wide: bool) -> UnabsorbTiles:
    """Few tokens: about 256 programs, two a processor, share the weight. Many: 64 or 128 rows for wgmma."""
    tokens = tile(T)
    if is_wide:
        return UnabsorbTiles(min(tokens, 64), tile(V, largest=64), tile(C, largest=32), 4, 2)
    if tokens < 64:
        return UnabsorbTiles(tokens, tile(min(V, H * V // 256), largest=64), tile(C), 4, 4)
    if tokens < 128:
        return UnabsorbTiles(tokens, tile(V, largest=64), tile(C), 4, 3)
    return UnabsorbTiles(tokens, tile(V), tile(C, largest=64), 8, 3)


def gate_heads_torch(core_THV: Tensor, gate_TH: Tensor, observe: bool = False) -> tuple[Tensor, Tensor | None]:
    wide = torch.promote_types(core_THV.dtype, torch.float32)
    gate = gate_TH.to(wide).sigmoid()
    gated = (core_THV.to(wide) * gate[..., None]).to(core_THV.dtype)
    return gated.flatten(1), gate if observe else None


def gate_heads_triton(core_THV: Tensor, gate_TH: Tensor, observe: bool = False) -> tuple[Tensor, Tensor | None]:
    """core · sigmoid(gate), by head.

    core_THV: float32 or bfloat16; gate_TH: logits in the same dtype.
    Returns: gated [T, H V] in that dtype, dense; and the gate, float32 [T, H], when observed.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("core", core_THV, (None, None, None), torch.float32, torch.bfloat16)
    T, H, V = core_THV.shape
    check_tensor("gate", gate_TH, (T, H), core_THV.dtype)
    gated = torch.empty(T, H * V, dtype=core_THV.dtype, device=core_THV.device)
    gates = torch.empty(T, H, dtype=torch.float32, device=core_THV.device) if observe else None
    _gate_heads_kernel[(triton.cdiv(T * H, GATED_ROWS),)](
        core_THV, gate_TH, gated, gates, T * H, H, V, *core_THV.stride()[:2], gate_TH.stride(0),
        ROWS=GATED_ROWS, BLOCK_V=next_power_of_2(V), num_warps=4,
    )  # fmt: skip
    return gated, gates


def unabsorb_gate_torch(
    o_latent_THC: Tensor, w_uv_HVC: Tensor, gate_TH: Tensor, observe: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    wide = torch.promote_types(o_latent_THC.dtype, torch.float32)
    core_THV = torch.einsum("thc,hvc->thv", o_latent_THC.to(wide), w_uv_HVC.to(wide)).to(o_latent_THC.dtype)
    gated, gate = gate_heads_torch(core_THV, gate_TH, observe)
    return gated, core_THV if observe else None, gate


def unabsorb_gate_triton(
    o_latent_THC: Tensor, w_uv_HVC: Tensor, gate_TH: Tensor, observe: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """W_UV o_latent · sigmoid(gate), by head.

    o_latent_THC: attention output in the latent space, float32 or bfloat16; w_uv_HVC, gate_TH (logits): the same dtype.
    Returns: gated [T, H V] in that dtype, dense; and when observed core_THV, same dtype, and the gate, float32 [T, H].
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("o_latent", o_latent_THC, (None, None, None), torch.float32, torch.bfloat16)
    T, H, C = o_latent_THC.shape
    dtype, device = o_latent_THC.dtype, o_latent_THC.device
    check_tensor("w_uv", w_uv_HVC, (H, None, C), dtype)
    V = w_uv_HVC.shape[1]
    check_tensor("gate", gate_TH, (T, H), dtype)
    gated = torch.empty(T, H * V, dtype=dtype, device=device)
    core_THV = torch.empty(T, H, V, dtype=dtype, device=device) if observe else None
    gates = torch.empty(T, H, dtype=torch.float32, device=device) if observe else None
    tiles = unabsorb_tiles(T, H, V, C, widen(dtype))
    _unabsorb_gate_kernel[(triton.cdiv(T, tiles.tokens), triton.cdiv(V, tiles.values), H)](
        o_latent_THC, w_uv_HVC, gate_TH, gated, core_THV, gates, T, C, V, H,
        *o_latent_THC.stride()[:2], *w_uv_HVC.stride()[:2], gate_TH.stride(0),
        BLOCK_T=tiles.tokens, BLOCK_V=tiles.values, BLOCK_C=tiles.latents, WIDEN=widen(dtype),
        num_warps=tiles.warps, num_stages=tiles.stages, **overlap(device),
    )  # fmt: skip
    return gated, core_THV, gates
