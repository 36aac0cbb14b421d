"""Absorbed attention in one kernel on Hopper, for the released geometries: when it is taken, how it is split, launched.

A launch fills the multiprocessors with one program each; over a ring, two of them work together as a cluster. Few
tokens are split into parts of their keys, which `combine` merges; how many parts depends on shapes alone, so that a
captured graph stays right while lengths change. Parts without a live key end at once.
"""

from functools import cache

import torch
from torch import Tensor

from optimized.attention.combine import merge_parts_triton
from optimized.kernels.common import HAS_TRITON, IS_INTERPRETED, next_power_of_2, triton

# T query tokens  H heads  C kv latent  R rope dim  L row [C | R]  K keys of a token  B requests  P pages of a request

MULTIPROCESSORS = 132
LOG2_E = 1.4426950408889634
TILE_KEYS = 64
# What a program's start and end take, and what a merge takes, in the time of one tile.
START_TILES, MERGE_TILES = 1.5, 2.0
PAGES_C, PAGES_BLOCK_H = 512, 64
RING_C, RING_BLOCK_H, RING_CLUSTER = 1024, 64, 2
ROPE = 64
# For fewer tokens two passes over a ring are faster: small tiles reach more multiprocessors.
FEWEST_RING_TOKENS = 32
# Vectors of 16 bytes, which Triton infers from strides that are multiples of 16.
ALIGNED = 16


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether this is a Hopper GPU, kernels are compiled for it, and this Triton has Gluon."""
    if not HAS_TRITON or IS_INTERPRETED or device.type != "cuda":
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from optimized.attention import hopper_pages, hopper_ring  # noqa: F401 - experimental: may be absent or renamed
    except (ImportError, AttributeError, TypeError):
        return False
    return True


def takes_pages(q_THL: Tensor, pool: Tensor, C: int) -> bool:
    return C == PAGES_C and _fits(q_THL, pool, C, PAGES_BLOCK_H)


def takes_ring(q_THL: Tensor, ring_pool: Tensor, C: int, splits: int | None) -> bool:
    """A given number of parts gives the same bits at every batch size."""
    is_worth_it = splits is not None or len(q_THL) >= FEWEST_RING_TOKENS
    return is_worth_it and C == RING_C and _fits(q_THL, ring_pool, C, RING_BLOCK_H)


def _fits(q_THL: Tensor, pool: Tensor, C: int, block_H: int) -> bool:
    _, H, L = q_THL.shape
    strides = (*q_THL.stride()[:2], *pool.stride()[:2])
    return (
        q_THL.dtype == torch.bfloat16
        and L == C + ROPE
        and H % block_H == 0
        and all(stride % ALIGNED == 0 for stride in strides)
        and (q_THL.data_ptr() | pool.data_ptr()) % ALIGNED == 0
        and has_hopper_kernels(q_THL.device)
    )


@cache
def parts_of_tiles(programs: int, tiles: int) -> int:
    """Into how many parts to split the `tiles` tiles of each of `programs` programs: what takes the least time."""

    def time(parts: int) -> float:
        rounds = triton.cdiv(programs * parts, MULTIPROCESSORS)
        return rounds * (triton.cdiv(tiles, parts) + START_TILES) + (MERGE_TILES if parts > 1 else 0.0)

    return min((parts for parts in range(1, tiles + 1)), key=time)


def attend_pages(
    q_THL: Tensor,
    pool: Tensor,
    selected_TK: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    out_THC: Tensor,
    scale: float,
    splits: int | None,
) -> None:
    """As `sparse_attention_triton`, into `out_THC`; the arguments must be those that `takes_pages` accepts."""
    from optimized.attention.hopper import WARPS
    from optimized.attention.hopper_pages import BLOCK_H, BLOCK_K, attend_pages_kernel

    (T, H, _), K = q_THL.shape, selected_TK.shape[1]
    keys_of_part, parts = _split(T * (H // BLOCK_H), K, splits)
    out, lse_PTH = _parts_of(out_THC, parts)
    attend_pages_kernel[(T * parts * (H // BLOCK_H),)](
        q_THL,
        pool,
        selected_TK,
        block_table_BP,
        request_T,
        out,
        lse_PTH,
        scale * LOG2_E,
        T,
        H,
        K,
        keys_of_part,
        parts,
        q_THL.stride(0),
        q_THL.stride(1),
        pool.stride(0),
        pool.stride(1),
        selected_TK.stride(0),
        block_table_BP.stride(0),
        PAGE_ROWS=pool.shape[1],
        IS_PART=parts > 1,
        C=PAGES_C,
        R=ROPE,
        BLOCK_H=BLOCK_H,
        BLOCK_K=BLOCK_K,
        BLOCK_PART=next_power_of_2(keys_of_part),
        num_warps=WARPS,
    )
    if lse_PTH is not None:
        merge_parts_triton(out, lse_PTH, out=out_THC)


def attend_ring(
    q_THL: Tensor,
    ring_pool: Tensor,
    ring_T: Tensor,
    positions_T: Tensor,
    window: int,
    out_THC: Tensor,
    scale: float,
    splits: int | None,
) -> None:
    """As `ring_attention_triton`, into `out_THC`; the arguments must be those that `takes_ring` accepts."""
    from optimized.attention.hopper import WARPS
    from optimized.attention.hopper_ring import BLOCK_H, BLOCK_K, attend_ring_kernel

    T, H, _ = q_THL.shape
    # A token's own key is a tile of its own, in the first part.
    keys_of_part, parts = _split(T * (H // BLOCK_H) * RING_CLUSTER, window - 1, splits)
    out, lse_PTH = _parts_of(out_THC, parts)
    attend_ring_kernel[(T * parts * (H // BLOCK_H),)](
        q_THL,
        ring_pool,
        ring_T,
        positions_T,
        out,
        lse_PTH,
        scale * LOG2_E,
        T,
        H,
        window,
        keys_of_part,
        parts,
        ring_pool.shape[1],
        q_THL.stride(0),
        q_THL.stride(1),
        ring_pool.stride(0),
        ring_pool.stride(1),
        IS_PART=parts > 1,
        HALF_C=RING_C // RING_CLUSTER,
        HALF_R=ROPE // RING_CLUSTER,
        BLOCK_H=BLOCK_H,
        BLOCK_K=BLOCK_K,
        num_warps=WARPS,
        num_ctas=RING_CLUSTER,
    )
    if lse_PTH is not None:
        merge_parts_triton(out, lse_PTH, out=out_THC)


def _split(programs: int, keys: int, splits: int | None) -> tuple[int, int]:
    """Keys of a part, whole tiles, and the number of parts."""
    tiles = max(1, triton.cdiv(keys, TILE_KEYS))
    parts = splits or parts_of_tiles(programs, tiles)
    keys_of_part = triton.cdiv(tiles, parts) * TILE_KEYS
    return keys_of_part, parts


def _parts_of(out_THC: Tensor, parts: int) -> tuple[Tensor, Tensor | None]:
    """Where the kernel writes: the output itself, or parts of it in float32 with their log-sum-exp."""
    if parts == 1:
        return out_THC, None
    T, H, C = out_THC.shape
    device = out_THC.device
    return (
        torch.empty(parts, T, H, C, dtype=torch.float32, device=device),
        torch.empty(parts, T, H, dtype=torch.float32, device=device),
    )
