"""Absorbed attention of single tokens over latent rows: the decode cores of both layer kinds.

score[h, s] = scale · <q[h], row[s]>        out[h] = Σ_s softmax_s(score)[h, s] · (first C lanes of row[s])

A row is one position's [latent C | rope key R]; all heads share it as their key, and its latent as their value. In full
layers the rows are the selected positions of a paged pool, in sliding layers the last positions of a ring.

Assumes selected positions within the pages of their request. Several tokens of one request read its rows, each for
itself. Computed by one kernel where `one_pass` accepts the tensors, else by two (`two_pass`): other orders of the sums,
the same places of rounding. Source: text_model specification, sections 8, 9, 14 and 16.
"""

import torch
from torch import Tensor

from optimized.attention.one_pass import attend_pages, attend_ring, takes_pages, takes_ring
from optimized.attention.two_pass import attend_in_two_passes
from optimized.kernels.common import check_tensor

# T query tokens  H heads  C kv latent  R rope dim  L row [C | R]  K keys of a token  B requests  P pages of a request

# Tokens of one launch: bounds the workspace of weights (134 MB at 128 heads and 2048 keys in bfloat16).
MOST_TOKENS = 256


def _attend_rows(q_THL: Tensor, row_TKL: Tensor, is_live_TK: Tensor, scale: float, C: int) -> Tensor:
    """The definition: each query against its own rows; a query without live rows gives zeros. [T, H, C]."""
    wide = torch.promote_types(q_THL.dtype, torch.float32)
    # Unwritten rows may hold NaN, and 0 x NaN is NaN.
    row_TKL = torch.where(is_live_TK[..., None], row_TKL, 0.0).to(wide)
    score_THK = torch.einsum("thl,tkl->thk", q_THL.to(wide), row_TKL) * scale
    score_THK = score_THK.masked_fill(~is_live_TK[:, None], float("-inf"))
    weight_THK = score_THK.softmax(-1).masked_fill(~is_live_TK.any(-1)[:, None, None], 0.0)
    return torch.einsum("thk,tkc->thc", weight_THK, row_TKL[..., :C]).to(q_THL.dtype)


def sparse_attention_torch(
    q_THL: Tensor,
    pool: Tensor,
    selected_TK: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    scale: float,
    C: int,
    splits: int | None = None,
) -> Tensor:
    page_size = pool.shape[1]
    is_live_TK = selected_TK >= 0
    position_TK = torch.where(is_live_TK, selected_TK, 0).long()
    request_T1 = torch.where(is_live_TK.any(-1), request_T, 0).long()[:, None]
    page_TK = torch.where(is_live_TK, block_table_BP[request_T1, position_TK // page_size], 0).long()
    return _attend_rows(q_THL, pool[page_TK, position_TK % page_size], is_live_TK, scale, C)


def sparse_attention_triton(
    q_THL: Tensor,
    pool: Tensor,
    selected_TK: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    scale: float,
    C: int,
    splits: int | None = None,
) -> Tensor:
    """Each query attends to its selected rows of the paged pool.

    q_THL: float32 or bfloat16, each head [absorbed query C | rope R]; pool [pages, page_size, L] of that dtype, any
    page and row stride; selected_TK int32: absolute positions in any order, -1 for none anywhere in the list;
    block_table_BP int32: pages of each request; request_T int32, not used where nothing is selected. `splits`: parts of
    the keys, chosen from the shapes if none; another number gives other bits.
    Returns: out_THC in that dtype, dense; zeros where nothing is selected. Scores and sums are float32.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("q", q_THL, (None, None, None), torch.float32, torch.bfloat16)
    T, H, L = q_THL.shape
    check_tensor("pool", pool, (None, None, L), q_THL.dtype)
    check_tensor("selected", selected_TK, (T, None), torch.int32)
    check_tensor("block_table", block_table_BP, (None, None), torch.int32)
    check_tensor("request", request_T, (T,), torch.int32)
    out_THC = torch.empty(T, H, C, dtype=q_THL.dtype, device=q_THL.device)
    if takes_pages(q_THL, pool, C):
        attend_pages(q_THL, pool, selected_TK, block_table_BP, request_T, out_THC, scale, splits)
        return out_THC
    for start in range(0, T, MOST_TOKENS):
        tokens = slice(start, start + MOST_TOKENS)
        attend_in_two_passes(
            q_THL[tokens],
            pool,
            selected_TK[tokens],
            block_table_BP,
            request_T[tokens],
            out_THC[tokens],
            selected_TK.shape[1],
            scale,
            splits,
        )
    return out_THC


def ring_attention_torch(
    q_THL: Tensor,
    ring_pool: Tensor,
    ring_T: Tensor,
    positions_T: Tensor,
    window: int,
    scale: float,
    C: int,
    splits: int | None = None,
) -> Tensor:
    key_TW = positions_T.long()[:, None] - window + 1 + torch.arange(window, device=q_THL.device)
    ring_T1 = torch.where(positions_T < 0, 0, ring_T).long()[:, None]
    return _attend_rows(q_THL, ring_pool[ring_T1, key_TW % ring_pool.shape[1]], key_TW >= 0, scale, C)


def ring_attention_triton(
    q_THL: Tensor,
    ring_pool: Tensor,
    ring_T: Tensor,
    positions_T: Tensor,
    window: int,
    scale: float,
    C: int,
    splits: int | None = None,
) -> Tensor:
    """Each query attends to the last `window` positions of its request, its own among them.

    q_THL: float32 or bfloat16, each head [absorbed query C | rope R]; ring_pool [rings, ring_rows, L] of that dtype,
    any ring and row stride, position p in row p % ring_rows; ring_T, positions_T: int32; a token at a negative position
    sees nothing. Every row of the window must have been written: a ring has at least as many rows as the window or as
    its request. `splits`: as for `sparse_attention_triton`.
    Returns: out_THC in that dtype, dense; zeros where nothing is seen. Scores and sums are float32.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("q", q_THL, (None, None, None), torch.float32, torch.bfloat16)
    T, H, L = q_THL.shape
    check_tensor("ring_pool", ring_pool, (None, None, L), q_THL.dtype)
    check_tensor("ring", ring_T, (T,), torch.int32)
    check_tensor("positions", positions_T, (T,), torch.int32)
    out_THC = torch.empty(T, H, C, dtype=q_THL.dtype, device=q_THL.device)
    if takes_ring(q_THL, ring_pool, C, splits):
        attend_ring(q_THL, ring_pool, ring_T, positions_T, window, out_THC, scale, splits)
        return out_THC
    for start in range(0, T, MOST_TOKENS):
        tokens = slice(start, start + MOST_TOKENS)
        attend_in_two_passes(
            q_THL[tokens],
            ring_pool,
            positions_T[tokens],
            None,
            ring_T[tokens],
            out_THC[tokens],
            window,
            scale,
            splits,
        )
    return out_THC
