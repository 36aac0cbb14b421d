"""Attention cores of a prompt from position 0, in expanded form, and over selected rows in the latent space.

The selection is random, so hardly a tile of keys is without a selected one: nothing can be skipped beyond the diagonal.
Dense peers compute all visible keys, which is another function where a selection applies: that row has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.bench.case import AbsentPeer, Case, Inputs, Peer, Problem, Sizes, checked_rows, int32, triples
from optimized.bench.floors import Work
from optimized.bench.paged import paged_rows
from optimized.bench.peers import fa3_prefill, flash_mla_sparse, flex_window
from optimized.bench.text_floors import absorbed_prefill, expanded_core
from reference.config import MlaGeometry, TextConfig

# A mask for every pair of query and key: 16 times the useful pairs at 16k tokens, and 2 GB with its scores.
MASKED_SDPA_TOKENS = 4096


def prefill_attention_cases(config: TextConfig, sizes: Sizes) -> Iterator[Case]:
    full, sliding, window = config.full, config.sliding, config.sliding_window_size
    for T in sizes.prompts:
        shape = f"T={T} {full.num_attention_heads} heads {full.qk_head_dim}/{full.v_head_dim}"
        causal = expanded_core(full, T)
        yield _case("expanded_attention.full.dense", shape, T, causal, _expanded(T, full, None, None))
        if config.index_topk < T:
            chosen = f"{shape}, {config.index_topk} selected"
            selected = _expanded(T, full, None, config.index_topk)
            # The dense form's floor: with a random selection every tile must be computed.
            yield _case("expanded_attention.full.selected", chosen, T, causal, selected)
            work = absorbed_prefill(config, T)
            sparse = _absorbed(T, config.index_topk, sizes.page_size)
            yield _case("sparse_attention.prefill", f"T={T} {config.index_topk} selected", T, work, sparse)
        shape = f"T={T} {sliding.num_attention_heads} heads {sliding.qk_head_dim}/{sliding.v_head_dim} window {window}"
        windowed = expanded_core(sliding, T, window)
        yield _case("expanded_attention.sliding", shape, T, windowed, _expanded(T, sliding, window, None))


def _case(op: str, shape: str, T: int, work: Work, build: Callable[[Inputs], Problem]) -> Case:
    return Case(op, shape, T, work, "events", build, (op.partition(".")[0],))


def _expanded(T: int, geometry: MlaGeometry, window: int | None, topk: int | None) -> Callable[[Inputs], Problem]:
    H, N, R, V = (
        geometry.num_attention_heads,
        geometry.qk_nope_head_dim,
        geometry.qk_rope_head_dim,
        geometry.v_head_dim,
    )
    scale = geometry.softmax_scale

    def build(given: Inputs) -> Problem:
        q_THX, kv_SHY, k_rope_SR = given.randn(T, H, N + R), given.randn(T, H, N + V), given.randn(T, R)
        positions_T = torch.arange(T, device=given.device, dtype=torch.int32)
        start_B1 = torch.tensor([0, T], device=given.device, dtype=torch.int32)
        zero_B = torch.zeros(1, device=given.device, dtype=torch.int32)
        selection_TW = None if topk is None else random_selection(given, positions_T, topk, "select_bits")
        attention, rows = given.op("expanded_attention"), checked_rows(T)

        def ours() -> Tensor:
            key_parts = (q_THX, kv_SHY, k_rope_SR, start_B1, start_B1, positions_T, zero_B)
            return attention(*key_parts, window, selection_TW, scale, N, T)

        def check(core_THV: Tensor) -> list[Any]:
            few_B1 = torch.tensor([0, len(rows)], device=given.device, dtype=torch.int32)
            few = (q_THX[rows], kv_SHY, k_rope_SR, few_B1, start_B1, positions_T[rows], zero_B)
            selected = None if selection_TW is None else selection_TW[rows]
            twin = given.twin("expanded_attention")
            return triples(core_THV[rows], twin, *few, window, selected, scale, N, len(rows))

        peers: list[Peer | AbsentPeer] = []
        if topk is None:
            peers = _dense_peers(q_THX, kv_SHY, k_rope_SR, scale, N, window, rows)
        return Problem(ours, check, peers)

    return build


def random_selection(given: Inputs, positions_T: Tensor, topk: int, op: str) -> Tensor:
    """What `select_keys` or `select_bits` (the twin) makes of random scores."""
    T = len(positions_T)
    return given.twin(op)(given.randn(T, T, dtype=torch.float32), positions_T, topk)


def _dense_peers(
    q_THX: Tensor, kv_SHY: Tensor, k_rope_SR: Tensor, scale: float, N: int, window: int | None, rows: list[int]
) -> list[Peer | AbsentPeer]:
    """On keys that were put together and values that were split off beforehand, which costs them nothing here."""
    T, H, _ = q_THX.shape
    k_SHX = torch.cat((kv_SHY[..., :N], k_rope_SR[:, None].expand(-1, H, -1)), dim=-1)
    v_SHV = kv_SHY[..., N:].contiguous()
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THX, k_SHX, v_SHV))

    def of_rows(out: Tensor) -> Tensor:
        return out[rows]

    def of_heads(out: Tensor) -> Tensor:
        return out[0].transpose(0, 1)[rows]

    peers: list[Peer | AbsentPeer] = [fa3_prefill(q_THX, k_SHX, v_SHV, scale, window, of_rows)]
    if window is None:
        dense = Peer("SDPA", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale), of_heads)
        return [*peers, dense]
    peers.append(flex_window(q, k, v, scale, window, of_heads))
    if T > MASKED_SDPA_TOKENS:
        return [*peers, AbsentPeer("SDPA with mask", f"the mask of {T} x {T} makes it 28 times slower")]
    position = torch.arange(T, device=q.device)
    visible_TS = (position <= position[:, None]) & (position > position[:, None] - window)
    masked = Peer(
        "SDPA with mask", lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=visible_TS, scale=scale), of_heads
    )
    return [*peers, masked]


def _absorbed(T: int, topk: int, page_size: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        geometry = given.config.full
        H, C, L = geometry.num_attention_heads, geometry.kv_lora_rank, geometry.latent_row
        scale = geometry.softmax_scale
        q_THL, latents = given.randn(T, H, L), paged_rows(given, 1, T, L, page_size)
        positions_T = torch.arange(T, device=given.device, dtype=torch.int32)
        selected_TK = random_selection(given, positions_T, topk, "select_keys")
        request_T = torch.zeros_like(positions_T)
        flat_TK = latents.flat_rows(selected_TK.clamp(min=0), request_T).masked_fill(selected_TK < 0, -1)
        attention, rows = given.op("sparse_attention"), checked_rows(T)

        def with_rows(chosen: Any) -> tuple[Any, ...]:
            keys = (latents.pool, selected_TK[chosen], latents.block_table_BP, request_T[chosen])
            return (q_THL[chosen], *keys, scale, C)

        every = slice(None)
        return Problem(
            lambda: attention(*with_rows(every)),
            lambda out_THC: triples(out_THC[rows], given.twin("sparse_attention"), *with_rows(rows)),
            [
                flash_mla_sparse(
                    q_THL, latents.pool.flatten(0, 1), int32(flat_TK), scale, C, lambda out_THC: out_THC[rows]
                )
            ],
        )

    return build
