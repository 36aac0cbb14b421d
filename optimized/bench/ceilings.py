"""What this card can do at most, measured in the same run as everything that is compared with it.

copy, read, write of 4 GiB, each larger than any cache; products of large bfloat16 matrices of random values (zeros are
a tenth faster); the replay of a graph with one tiny node. Source: performance specification, section 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.bench.floors import Ceilings
from optimized.bench.timing import ColdTimer
from optimized.kernels.common import tl, triton

STREAM_BYTES = 4 << 30
# M, N, K: the usual square, and the released o_proj at a prompt of 4096 tokens. The better of the two counts: the card
# lowers its clock under sustained products, and a ceiling that an op can pass is none.
GEMM_SHAPES = ((8192, 8192, 8192), (4096, 5120, 16384))
READ_BLOCK = 8192


@triton.jit
def _partial_sums_kernel(x_ptr, sums_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)  # [BLOCK]
    tl.store(sums_ptr + program, tl.sum(x, axis=0))


def read_all(x: Tensor) -> Tensor:
    """Sums of blocks of a flat int32 tensor: reads every element, writes next to nothing."""
    blocks = triton.cdiv(x.numel(), READ_BLOCK)
    sums = torch.empty(blocks, dtype=x.dtype, device=x.device)
    _partial_sums_kernel[(blocks,)](x, sums, x.numel(), BLOCK=READ_BLOCK, num_warps=8)
    return sums


def measure_ceilings(timer: ColdTimer, seed: int = 0) -> Ceilings:
    """Takes about a second and 8 GiB."""
    generator = torch.Generator("cuda").manual_seed(seed)
    copy_us, read_us, write_us = _streams_us(timer, generator)
    tiny = torch.ones(32, device="cuda")
    return Ceilings(
        copy_tb_s=2 * STREAM_BYTES / copy_us / 1e6,
        read_tb_s=STREAM_BYTES / read_us / 1e6,
        write_tb_s=STREAM_BYTES / write_us / 1e6,
        bf16_tflops=max(_gemm_tflops(timer, generator, *shape) for shape in GEMM_SHAPES),
        graph_node_us=timer(lambda: tiny.add_(1), "graph"),
    )


def _streams_us(timer: ColdTimer, generator: torch.Generator) -> tuple[float, float, float]:
    """Copy, read and write."""
    source = torch.empty(STREAM_BYTES // 4, dtype=torch.int32, device="cuda").random_(generator=generator)
    target = torch.empty_like(source)
    return (
        timer(lambda: target.copy_(source), "events"),
        timer(lambda: read_all(source), "events"),
        timer(lambda: target.fill_(7), "events"),
    )


def _gemm_tflops(timer: ColdTimer, generator: torch.Generator, M: int, N: int, K: int) -> float:
    a_MK, b_NK = (
        torch.empty(rows, K, dtype=torch.bfloat16, device="cuda").normal_(generator=generator) for rows in (M, N)
    )
    return 2 * M * N * K / timer(lambda: a_MK @ b_NK.mT, "events") / 1e6
