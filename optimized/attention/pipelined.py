"""Expanded attention on Hopper with overlapping products, for the released geometries: when it is taken, its launch.

A program takes 128 queries; tiles of 128 keys where two of them fit beside the queries (full layers), of 64 else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.attention.one_pass import has_hopper_kernels
from optimized.attention.selected_tiles import NO_TILES, SelectedTiles

# T query tokens  S key tokens  H heads  N nope dim  R rope dim  V value dim  X = N + R  Y = N + V  B requests

ROPE, VALUE = 64, 128
NOPES = (128, 192)
# Lanes of a key in one product.
LANES = 128
ALIGNED_BYTES = 16
# Fewer fill less than half of its smallest tile.
FEWEST_QUERIES = 64


def takes_pipelined(q_THX: Tensor, kv_SHY: Tensor, k_rope_SR: Tensor, N: int, max_queries: int) -> bool:
    """Whether the kernel of `hopper_expanded` runs here, is written for these tensors and has enough to do."""
    return (
        max_queries >= FEWEST_QUERIES
        and q_THX.dtype == torch.bfloat16
        and N in NOPES
        and (q_THX.shape[-1] - N, kv_SHY.shape[-1] - N) == (ROPE, VALUE)
        and len(kv_SHY) > 0
        and _has_aligned_rows(kv_SHY)
        and _has_aligned_rows(k_rope_SR)
        and has_hopper_kernels(q_THX.device)
    )


def pipelined_tiling(X: int) -> tuple[int, int]:
    """Queries and keys of a tile, for keys of X lanes: what fills the shared memory."""
    return 128, 128 if X <= 192 else 64


def attend_pipelined(
    q_THX: Tensor,
    kv_SHY: Tensor,
    k_rope_SR: Tensor,
    core_THV: Tensor,
    query_start_B1: Tensor,
    key_start_B1: Tensor,
    positions_T: Tensor,
    first_key_B: Tensor,
    selected: SelectedTiles | None,
    window: int,
    scale_log2: float,
    N: int,
    query_tiles: int,
) -> None:
    """Writes core_THV. Arguments as of `expanded_attention_triton`, with the selection as tiles of these sizes."""
    from optimized.attention.hopper import WARPS
    from optimized.attention.hopper_expanded import hopper_expanded_kernel, rows_of

    _, H, X = q_THX.shape
    S, _, Y = kv_SHY.shape
    R, V = X - N, Y - N
    block_T, block_S = pipelined_tiling(X)
    kv_key, kv_head, _ = kv_SHY.stride()
    width = (H - 1) * kv_head + Y
    n_rows = rows_of(kv_SHY, (S, width), kv_key, (block_S, LANES))
    v_rows = rows_of(kv_SHY, (S, width), kv_key, (block_S, V))
    r_rows = rows_of(k_rope_SR, (S, R), k_rope_SR.stride(0), (block_S, R))
    e_rows = rows_of(kv_SHY, (S, width), kv_key, (block_S, N - LANES)) if N > LANES else r_rows
    hopper_expanded_kernel[(query_tiles, H, len(first_key_B))](
        q_THX,
        n_rows,
        e_rows,
        r_rows,
        v_rows,
        core_THV,
        query_start_B1,
        key_start_B1,
        positions_T,
        first_key_B,
        *(selected or NO_TILES),
        scale_log2,
        window,
        H,
        0 if selected is None else selected.whole.shape[1],
        q_THX.stride(0),
        q_THX.stride(1),
        kv_head,
        N=LANES,
        E=N - LANES,
        R=R,
        V=V,
        BLOCK_T=block_T,
        BLOCK_S=block_S,
        HAS_SELECTION=selected is not None,
        num_warps=WARPS,
    )


def _has_aligned_rows(tensor: Tensor) -> bool:
    strides = (stride * tensor.element_size() for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % ALIGNED_BYTES == 0 and all(stride % ALIGNED_BYTES == 0 for stride in strides)
