"""The least time of an op: it must move its bytes and do its operations, and the slower of the two decides.

floor = max(bytes / read bandwidth, operations / rate of the tensor cores)

Every weight and cached row is read once. A multiply-add counts as two operations. Activations are left out where they
are small beside the weights: inside a model they are still in the L2 cache.
Source: performance specification, sections 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Rate = Literal["bf16", "fp8"]
Bound = Literal["bytes", "math"]


@dataclass(frozen=True)
class Ceilings:
    """What this card was measured to do: bandwidths in TB/s (1e12 bytes), rates in TFLOP/s, times in microseconds.

    `copy_tb_s` counts bytes read and written. `fp8_tflops` is None where it was not measured. `graph_node_us` is the
    replay of a graph with one tiny node, which every time of a small op in this report contains.
    """

    copy_tb_s: float
    read_tb_s: float
    write_tb_s: float
    bf16_tflops: float
    fp8_tflops: float | None = None
    graph_node_us: float | None = None

    def tflops(self, rate: Rate) -> float:
        if rate == "bf16":
            return self.bf16_tflops
        # Without its own measurement: the tensor cores take twice as many fp8 operands a cycle.
        return self.fp8_tflops if self.fp8_tflops is not None else 2 * self.bf16_tflops


@dataclass(frozen=True)
class Work:
    """What an op cannot avoid: `bytes` of device memory moved and `flops` at `rate`."""

    bytes: float
    flops: float
    rate: Rate = "bf16"


@dataclass(frozen=True)
class Floor:
    """Microseconds, and which of the two decided."""

    us: float
    bound: Bound


def floor(work: Work, ceilings: Ceilings) -> Floor:
    bytes_us = work.bytes / (ceilings.read_tb_s * 1e6)
    math_us = work.flops / (ceilings.tflops(work.rate) * 1e6)
    return Floor(bytes_us, "bytes") if bytes_us >= math_us else Floor(math_us, "math")


def floor_of_all(works: Iterable[Work], ceilings: Ceilings) -> Floor:
    """Of pieces one behind the other; the bound is that of most of the time."""
    floors = [floor(work, ceilings) for work in works]
    total = sum(least.us for least in floors)
    by_bytes = sum(least.us for least in floors if least.bound == "bytes")
    return Floor(total, "bytes" if 2 * by_bytes >= total else "math")


def gemm(tokens: int, outputs: int, inputs: int, weight_bytes: int = 2, rate: Rate = "bf16") -> Work:
    """x [tokens, inputs] times a weight [outputs, inputs]: the weight is read, the activations are left out."""
    return Work(outputs * inputs * weight_bytes, 2 * tokens * outputs * inputs, rate)


def distinct_experts(tokens: int, experts: int, chosen: int) -> float:
    """How many experts `tokens` tokens are expected to read if each chooses `chosen` of `experts` evenly."""
    return experts * (1 - (1 - chosen / experts) ** tokens)


def causal_pairs(tokens: int, most: int | None = None) -> int:
    """Pairs of query and key of a prompt from position 0, where a query sees at most `most` keys, itself included."""
    full = tokens if most is None else min(tokens, most)
    return full * (full + 1) // 2 + (tokens - full) * full
