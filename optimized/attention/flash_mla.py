"""Absorbed attention to selected rows of a paged pool through FlashMLA, an optional package, where that is faster.

FlashMLA attends to rows of one flat pool, so the positions that were selected are turned into such rows first:

row[t, k] = table[request of t, position[t, k] // P] · P + position[t, k] % P        P rows of a page; -1 for no key

It gives 64 heads of a token to a multiprocessor and does not split their keys: few tokens leave most multiprocessors
idle. No workspace and no schedule, nothing that depends on more than shapes, so that a captured graph can hold it.

H200, 128 heads, replay of a CUDA graph with a cold cache, finding the rows included (3 to 5 µs), µs:

tokens                      24    32    40    48    64    80    96   128   160   192   256   384   512
2048 keys, own kernel       80    68    93   117   110   185   187   208   302   305   399   627   825
           FlashMLA         72    73    75    75    78   137   140   147   205   211   276   407   537

With 1024 keys 64 against 52 at 64 tokens and 219 against 159 at 256, with 128 keys 20 against 19 and 61 against 49;
1024 rows of one prompt of 16384 tokens, warm, 1552 against 915. Below 40 tokens neither is always ahead.

Source of the package's interface: FlashMLA's own documentation of `flash_mla_sparse_fwd`.
"""

import torch
from torch import Tensor

from optimized.attention.absorbed import sparse_attention_triton
from optimized.kernels.common import check_tensor, next_power_of_2, overlap, tl, triton, wait_for_inputs
from optimized.packages import flash_mla_sparse

# T query tokens  H heads  C kv latent  R rope dim  L row [C | R]  K keys of a token  B requests  P pages of a request

C_LANES, ROW_LANES = 512, 576
HEADS = (64, 128)
# Lists are padded to whole pairs of the package's tiles of 64 keys.
KEYS_MULTIPLE = 128
# What its copies of 16 bytes need: strides in elements, addresses in bytes.
ALIGNED, ALIGNED_BYTES = 8, 16
# Of a list, what one step of the row kernel takes.
LARGEST_BLOCK = 2048
# Of 128 heads each; from here on it was faster with every number of keys.
FEWEST_TOKENS = 40


@triton.jit
def _pool_rows_kernel(
    selected, block_table, request, rows, lengths, K, row_K, page_size, selected_token, table_request,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    pages = block_table + tl.load(request + token).to(tl.int64) * table_request
    length = 0
    for start in range(0, row_K, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        position = tl.load(selected + token * selected_token + slot, mask=slot < K, other=-1)
        is_live = position >= 0
        page = tl.load(pages + position // page_size, mask=is_live, other=0)
        row = tl.where(is_live, page * page_size + position % page_size, -1)
        tl.store(rows + token * row_K + slot, row, mask=slot < row_K)
        length = tl.maximum(length, tl.max(tl.where(is_live, slot + 1, 0)))
    tl.store(lengths + token, tl.maximum(length, 1))


def pool_rows_torch(
    selected_TK: Tensor, block_table_BP: Tensor, request_T: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    K = selected_TK.shape[1]
    is_live_TK = selected_TK >= 0
    position_TK = selected_TK.clamp(min=0).long()
    request_T1 = torch.where(is_live_TK.any(-1), request_T, 0).long()[:, None]
    row_TK = block_table_BP[request_T1, position_TK // page_size] * page_size + position_TK % page_size
    row_TK = torch.where(is_live_TK, row_TK, -1).int()
    length_T = torch.where(is_live_TK, torch.arange(1, K + 1, device=selected_TK.device), 1).amax(-1).int()
    return torch.nn.functional.pad(row_TK, (0, -K % KEYS_MULTIPLE), value=-1), length_T


def pool_rows_triton(
    selected_TK: Tensor, block_table_BP: Tensor, request_T: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Where the selected positions lie in the pool seen as [pages · page_size, L].

    Arguments as of `sparse_attention_triton`, all int32. Returns int32: row_TK, -1 for no key and behind the K, a
    multiple of KEYS_MULTIPLE wide; length_T, up to which place of its list a token has keys, at least 1.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("selected", selected_TK, (None, None), torch.int32)
    check_tensor("block_table", block_table_BP, (None, None), torch.int32)
    T, K = selected_TK.shape
    check_tensor("request", request_T, (T,), torch.int32)
    row_K = triton.cdiv(K, KEYS_MULTIPLE) * KEYS_MULTIPLE
    row_TK, length_T = selected_TK.new_empty(T, row_K), selected_TK.new_empty(T)
    BLOCK = min(LARGEST_BLOCK, next_power_of_2(row_K))
    _pool_rows_kernel[(T,)](
        selected_TK, block_table_BP, request_T, row_TK, length_T, K, row_K, page_size,
        selected_TK.stride(0), block_table_BP.stride(0),
        BLOCK=BLOCK, num_warps=max(1, BLOCK // 256), **overlap(selected_TK.device),
    )  # fmt: skip
    return row_TK, length_T


def sparse_attention_package(
    q_THL: Tensor,
    pool: Tensor,
    selected_TK: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    scale: float,
    C: int,
    splits: int | None = None,
) -> Tensor:
    """As `sparse_attention_triton`, by FlashMLA where it takes the tensors and is faster, else by that.

    Other orders of the sums, so other bits. Raises: as there.
    """
    T, H, _ = q_THL.shape
    if splits is not None or not is_faster(T, H) or not takes(q_THL, pool, C):
        return sparse_attention_triton(q_THL, pool, selected_TK, block_table_BP, request_T, scale, C, splits)
    row_TK, length_T = pool_rows_triton(selected_TK, block_table_BP, request_T, pool.shape[1])
    return flash_mla_sparse(q_THL, pool.flatten(0, 1), row_TK, length_T, scale, C)


def takes(q_THL: Tensor, pool: Tensor, C: int) -> bool:
    """Whether FlashMLA computes this: bfloat16 at the released full geometry, pages one behind the other.

    What no kernel computes is left to the own one, which refuses it by name.
    """
    _, H, L = q_THL.shape
    return (
        q_THL.dtype == pool.dtype == torch.bfloat16
        and (C, L) == (C_LANES, ROW_LANES)
        and pool.shape[-1] == L
        and H in HEADS
        and q_THL.stride(-1) == pool.stride(-1) == 1
        and pool.stride(0) == pool.shape[1] * pool.stride(1)
        and all(stride % ALIGNED == 0 for stride in (*q_THL.stride()[:2], pool.stride(1)))
        and (q_THL.data_ptr() | pool.data_ptr()) % ALIGNED_BYTES == 0
    )


def is_faster(T: int, H: int) -> bool:
    """Whether FlashMLA, with the rows found for it, takes less time than the own kernel."""
    heads = T * H
    return heads >= FEWEST_TOKENS * HEADS[-1]
