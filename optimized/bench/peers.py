"""Optional packages as peers. Each is imported only here; without it, or where it was built otherwise, it says why.

A peer is compared with the truth before it is timed, like everything else: a binary that loads is not one that works.
Source: performance specification, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from optimized import packages
from optimized.bench.case import FP8_PEER_LIMIT, AbsentPeer, Peer
from optimized.packages import FA3_DENSE, FA3_WINDOW, fa3_dense, fa3_window, status_of

# T query tokens  S key tokens  H heads  X query/key width  V value width  L latent row  C kv latent  K selected keys

Checked = Callable[[Any], Tensor]
Make = Callable[..., Peer | AbsentPeer]
# Largest value of float8_e4m3fn: what a row's largest value is scaled to.
FP8_MAX = 448.0


def _found(name: str, module: str) -> Callable[[Make], Make]:
    """A peer that is absent where its module is not installed, or where preparing its inputs fails, with the reason."""

    def decorate(make: Make) -> Make:
        @wraps(make)
        def peer(*arguments: Any, **options: Any) -> Peer | AbsentPeer:
            if find_spec(module) is None:
                return AbsentPeer(name, "not installed")
            try:
                return make(*arguments, **options)
            except Exception as error:  # a binary built for another torch fails in many ways
                return AbsentPeer(name, f"{type(error).__name__}: {error}")

        return peer

    return decorate


@_found("gather, fa3-fwd qv", "fa3_fwd_interface")
def fa3_latent_decode(
    gathered: Callable[[Callable[..., Tensor]], Callable[[], Tensor]], checked: Checked
) -> Peer | AbsentPeer:
    """FA3 with the query split in rope and latent lanes, on rows that `gathered` copies out of the pool each time."""
    interface = import_module("fa3_fwd_interface")

    def attend(q_BHL: Tensor, rows_BKL: Tensor, scale: float, C: int) -> Tensor:
        rows_BK1L = rows_BKL[:, :, None]
        out = interface.flash_attn_with_kvcache(
            q_BHL[:, None, :, C:],
            rows_BK1L[..., C:],
            rows_BK1L[..., :C],
            qv=q_BHL[:, None, :, :C],
            softmax_scale=scale,
            causal=False,
        )
        return (out[0] if isinstance(out, tuple) else out)[:, 0]

    return Peer("gather, fa3-fwd qv", gathered(attend), checked)


@_found("sgl-flash-mla sparse", "flash_mla")
def flash_mla_sparse(
    q_THL: Tensor, pool_RL: Tensor, flat_TK: Tensor, scale: float, C: int, checked: Checked
) -> Peer | AbsentPeer:
    """FlashMLA's sparse kernel on bfloat16 rows, read straight from the pool."""
    length_T = (flat_TK >= 0).sum(-1, dtype=torch.int32)

    def run() -> Tensor:
        return packages.flash_mla_sparse(q_THL, pool_RL, flat_TK, length_T, scale, C)

    return Peer("sgl-flash-mla sparse", run, checked)


def fa3_prefill(
    q_THX: Tensor, k_SHX: Tensor, v_SHV: Tensor, scale: float, window: int | None, checked: Checked
) -> Peer | AbsentPeer:
    """FA3 over one prompt from position 0: fa3-fwd without a window, tokenspeed-fa3 with one and with V padded."""
    package, attention = (FA3_DENSE, fa3_dense) if window is None else (FA3_WINDOW, fa3_window)
    status = status_of(package)
    if not status.works:
        return AbsentPeer(package.distribution, status.detail)
    start_B1 = torch.tensor([0, len(q_THX)], dtype=torch.int32, device=q_THX.device)
    T = len(q_THX)
    return Peer(
        package.distribution,
        lambda: attention(q_THX, k_SHX, v_SHV, start_B1, start_B1, T, T, scale, window),
        checked,
    )


@_found("fa3-fwd", "fa3_fwd_interface")
def fa3_sequences(
    q_THX: Tensor, k_THX: Tensor, v_THX: Tensor, starts_B1: Tensor, longest: int, scale: float, checked: Checked
) -> Peer | AbsentPeer:
    """FA3 over sequences that each see all of themselves and nothing else."""
    interface = import_module("fa3_fwd_interface")

    def run() -> Tensor:
        out = interface.flash_attn_varlen_func(
            q_THX, k_THX, v_THX, starts_B1, starts_B1, longest, longest, softmax_scale=scale, causal=False
        )
        return out[0] if isinstance(out, tuple) else out

    return Peer("fa3-fwd", run, checked)


@_found("flex_attention", "torch")
def flex_window(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, checked: Checked) -> Peer | AbsentPeer:
    """torch's compiled attention with the window as a block mask; q, k, v [1, H, T, lanes]. Compiles at first use."""
    if not q.is_cuda:
        return AbsentPeer("flex_attention", "needs CUDA")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window)

    T = q.shape[2]
    mask = create_block_mask(is_visible, None, None, T, T, device=q.device)
    compiled = torch.compile(flex_attention)
    return Peer("flex_attention", lambda: compiled(q, k, v, block_mask=mask, scale=scale), checked)


@_found("DeepGEMM fp8", "deep_gemm")
def deep_gemm_scores(
    query_TIJ: Tensor, weights_TI: Tensor, key_SJ: Tensor, positions_T: Tensor, checked: Checked
) -> Peer | AbsentPeer:
    """DeepGEMM's fp8 index scores of a prompt. Quantization is outside of its time: the cache would hold fp8 keys."""
    interface = import_module("deep_gemm")
    query_fp8, query_scale_TI = _fp8_rows(query_TIJ)
    key_fp8, key_scale_S = _fp8_rows(key_SJ)
    scaled_TI = weights_TI * query_scale_TI * query_TIJ.shape[-1] ** -0.5
    first_T = torch.zeros_like(positions_T)

    def run() -> Tensor:
        return interface.fp8_mqa_logits(
            query_fp8, (key_fp8, key_scale_S), scaled_TI, first_T, positions_T + 1, clean_logits=False
        )

    return Peer("DeepGEMM fp8", run, checked, FP8_PEER_LIMIT)


@_found("DeepGEMM fp8 paged", "deep_gemm")
def deep_gemm_paged_scores(
    query_TIJ: Tensor,
    weights_TI: Tensor,
    pool: Tensor,
    block_table_BP: Tensor,
    positions_T: Tensor,
    context: int,
    checked: Checked,
) -> Peer | AbsentPeer:
    """DeepGEMM's fp8 index scores of a decode step, through the block table; a page holds its keys, then the scales."""
    interface = import_module("deep_gemm")
    pages, page_size, J = pool.shape
    query_fp8, query_scale_TI = _fp8_rows(query_TIJ)
    key_fp8, key_scale = _fp8_rows(pool)
    packed = torch.cat((key_fp8.view(torch.uint8).flatten(1), key_scale.view(torch.uint8).flatten(1)), dim=1)
    packed = packed.view(pages, page_size, 1, J + 4)
    scaled_TI = weights_TI * query_scale_TI * J**-0.5
    length_B1 = positions_T[:, None] + 1
    processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
    schedule = interface.get_paged_mqa_logits_metadata(length_B1, page_size, processors)

    def run() -> Tensor:
        return interface.fp8_paged_mqa_logits(
            query_fp8[:, None], packed, scaled_TI, length_B1, block_table_BP, schedule, context, clean_logits=False
        )

    return Peer("DeepGEMM fp8 paged", run, checked, FP8_PEER_LIMIT)


def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x quantized to fp8 along its last dim, and the float32 scale of each row."""
    scale = x.float().abs().amax(-1, keepdim=True) / FP8_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale[..., 0]
