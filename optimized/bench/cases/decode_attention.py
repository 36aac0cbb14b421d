"""Attention cores of a decode step, in the latent space: selected rows of pages, and the ring of a sliding layer.

Peers hold or gather contiguous rows: gathering is part of their time where a paged cache would need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.bench.case import AbsentPeer, Case, Inputs, Peer, Problem, Sizes, checked_rows, int32, triples
from optimized.bench.paged import PagedRows, paged_rows
from optimized.bench.peers import fa3_latent_decode, flash_mla_sparse
from optimized.bench.text_floors import BF16, absorbed_core
from reference.config import TextConfig

# Rows of a ring beside the window: room for tokens that are drafted.
DRAFT_ROWS = 3


def decode_attention_cases(config: TextConfig, sizes: Sizes) -> Iterator[Case]:
    context = sizes.contexts[0]
    for B in sizes.batches:
        keys = min(config.index_topk, context)
        yield Case(
            "sparse_attention.decode",
            f"B={B} {keys} of {context} keys",
            B,
            absorbed_core(config.full, B, keys, BF16.latent_row_bytes(config.full)),
            sizes.timing(B),
            _sparse(B, keys, context, sizes.page_size),
            ("sparse_attention",),
        )
    for B in sizes.batches:
        keys = min(config.sliding_window_size, context)
        yield Case(
            "ring_attention",
            f"B={B} {keys} keys",
            B,
            absorbed_core(config.sliding, B, keys, BF16.latent_row_bytes(config.sliding)),
            sizes.timing(B),
            _ring(B, context),
            ("ring_attention",),
        )


def plain_absorbed(q_BHL: Tensor, rows_BKL: Tensor, scale: float, C: int) -> Tensor:
    """softmax(scale · q rowsᵀ) rows[:C] with torch's batched products, [B, H, C]."""
    scores_BHK = torch.bmm(q_BHL, rows_BKL.mT).float() * scale
    return torch.bmm(scores_BHK.softmax(-1).to(rows_BKL.dtype), rows_BKL[..., :C])


def selected_positions(given: Inputs, T: int, keys: int, context: int) -> Tensor:
    """int32 [T, keys]: for each token other positions, ascending."""
    return int32(given.uniform(T, context).topk(keys, dim=-1).indices.sort(dim=-1).values)


def _sparse(B: int, keys: int, context: int, page_size: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        geometry = given.config.full
        H, C, L = geometry.num_attention_heads, geometry.kv_lora_rank, geometry.latent_row
        scale = geometry.softmax_scale
        q_THL = given.randn(B, H, L)
        latents = paged_rows(given, B, context, L, page_size)
        selected_TK = selected_positions(given, B, keys, context)
        request_T = torch.arange(B, device=given.device, dtype=torch.int32)
        flat_TK = latents.flat_rows(selected_TK, request_T)
        pool_RL = latents.pool.flatten(0, 1)
        sparse_attention, rows = given.op("sparse_attention"), checked_rows(B, 4)

        def gathered(attend: Callable[..., Tensor]) -> Callable[[], Tensor]:
            return lambda: attend(q_THL, pool_RL[flat_TK], scale, C)

        def of_rows(out_THC: Tensor) -> Tensor:
            return out_THC[rows]

        return Problem(
            lambda: sparse_attention(q_THL, latents.pool, selected_TK, latents.block_table_BP, request_T, scale, C),
            lambda out_THC: _sparse_check(given, out_THC, rows, q_THL, selected_TK, latents, scale, C),
            [
                Peer("torch gather, bmm", gathered(plain_absorbed), of_rows),
                fa3_latent_decode(gathered, of_rows),
                flash_mla_sparse(q_THL, pool_RL, int32(flat_TK), scale, C, of_rows),
            ],
        )

    return build


def _sparse_check(
    given: Inputs,
    out_THC: Tensor,
    rows: list[int],
    q_THL: Tensor,
    selected_TK: Tensor,
    latents: PagedRows,
    scale: float,
    C: int,
) -> list[Any]:
    few = latents.of_requests(rows)
    request_T = torch.arange(len(rows), device=given.device, dtype=torch.int32)
    twin = given.twin("sparse_attention")
    return triples(
        out_THC[rows], twin, q_THL[rows], few.pool, selected_TK[rows], few.block_table_BP, request_T, scale, C
    )


def _ring(B: int, context: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        geometry, window = given.config.sliding, given.config.sliding_window_size
        H, C, L = geometry.num_attention_heads, geometry.kv_lora_rank, geometry.latent_row
        scale = geometry.softmax_scale
        q_THL = given.randn(B, H, L)
        pool = given.randn(B, window + DRAFT_ROWS, L)
        ring_T = int32(given.permutation(B))
        positions_T = int32(context - 1 - torch.arange(B, device=given.device) % window)
        keys_TK = (positions_T[:, None] - torch.arange(min(window, context), device=given.device)).clamp(min=0)
        flat_TK = ring_T[:, None].long() * pool.shape[1] + keys_TK.long() % pool.shape[1]
        pool_RL = pool.flatten(0, 1)
        ring_attention, rows = given.op("ring_attention"), checked_rows(B, 4)

        def check(out_THC: Tensor) -> list[Any]:
            rings = pool[ring_T[rows].long()]
            own_T = torch.arange(len(rows), device=given.device, dtype=torch.int32)
            twin = given.twin("ring_attention")
            return triples(out_THC[rows], twin, q_THL[rows], rings, own_T, positions_T[rows], window, scale, C)

        def expanded() -> Tensor:
            rows_BKL = pool_RL[flat_TK][:, None].expand(-1, H, -1, -1)
            core = F.scaled_dot_product_attention(q_THL[:, :, None], rows_BKL, rows_BKL[..., :C], scale=scale)
            return core[:, :, 0]

        peers: list[Peer | AbsentPeer] = []
        if context > 2 * window:
            # Every query sees a whole window, so the peers need no mask.
            peers = [
                Peer("torch gather, bmm", lambda: plain_absorbed(q_THL, pool_RL[flat_TK], scale, C), lambda o: o[rows]),
                Peer("torch gather, SDPA on expanded views", expanded, lambda o: o[rows]),
            ]
        return Problem(lambda: ring_attention(q_THL, pool, ring_T, positions_T, window, scale, C), check, peers)

    return build
