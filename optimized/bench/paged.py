"""Paged rows for the benchmark: pages in random order, and the pages of a few requests cut out for a check."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.bench.case import Inputs, int32

# B requests  P pages of a request  L values of a row  T tokens  S positions


@dataclass(frozen=True)
class PagedRows:
    """pool [pages, page_size, L] and block_table_BP int32: `context` rows of each of B requests."""

    pool: Tensor
    block_table_BP: Tensor

    def of_requests(self, requests: list[int]) -> PagedRows:
        """Only these requests, renumbered from 0, with their pages copied: small enough to be widened to float64."""
        pages_BP = self.block_table_BP[requests].long()
        block_table_BP = torch.arange(pages_BP.numel(), device=self.pool.device).view_as(pages_BP)
        return PagedRows(self.pool[pages_BP.flatten()], int32(block_table_BP))

    def flat_rows(self, positions_TK: Tensor, request_T: Tensor) -> Tensor:
        """Row of the pool seen as [rows, L] of each position of each token's request, int64."""
        page_size = self.pool.shape[1]
        pages_TP = self.block_table_BP[request_T.long()].long()
        positions_TK = positions_TK.long()
        return pages_TP.gather(-1, positions_TK // page_size) * page_size + positions_TK % page_size

    def by_position(self, context: int) -> Tensor:
        """[B, context, L], copied in the order of positions: what a peer without paging would hold."""
        return self.pool[self.block_table_BP.long()].flatten(1, 2)[:, :context].contiguous()


def paged_rows(given: Inputs, requests: int, context: int, width: int, page_size: int) -> PagedRows:
    pages = -(-context // page_size)
    pool = given.randn(requests * pages, page_size, width)
    return PagedRows(pool, int32(given.permutation(requests * pages).view(requests, pages)))
