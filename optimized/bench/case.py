"""A row of the benchmark: an op at one shape, with everything that is needed to check it and to time it.

`Case.build` draws fresh random inputs and returns a `Problem`: closures over the same inputs for the op that ships, for
its twin on a few rows, and for other implementations. Building is separate, so that one problem is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from optimized.bench.floors import Work
from optimized.bench.judge import Triple
from optimized.bench.timing import Timing
from optimized.device import Backend, Ops, choose
from reference.config import TextConfig

# Error that a peer may have against the truth, relative to it. bfloat16 kernels err by 2e-3; those that quantize to
# fp8 by up to 4e-2; one that computes something else by tenths.
PEER_LIMIT = 1e-2
FP8_PEER_LIMIT = 8e-2

# Rows that are computed in float64: enough to see every tile edge, few enough to be quick.
CHECKED_ROWS = 8

Made = TypeVar("Made")


@dataclass(frozen=True)
class Peer:
    """Another implementation. `checked` brings what `run` returns into the rows and layout of the problem's truth.

    `waits`: it waits for the device on its way, so no graph can hold it.
    """

    name: str
    run: Callable[[], Any]
    checked: Callable[[Any], Tensor]
    limit: float = PEER_LIMIT
    waits: bool = False


@dataclass(frozen=True)
class AbsentPeer:
    """A peer that cannot be tried here, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Problem:
    """`check(ours())` computes eager and truth for some rows; peers are held to the truth of its first triple."""

    ours: Callable[[], Any]
    check: Callable[[Any], list[Triple]]
    peers: Sequence[Peer | AbsentPeer] = ()


@dataclass(frozen=True)
class Sizes:
    """Requests of a decode step, tokens they have seen, tokens of a prompt."""

    batches: tuple[int, ...] = (1, 16, 64, 256)
    contexts: tuple[int, ...] = (4096, 32768, 131072)
    prompts: tuple[int, ...] = (4096, 16384)
    page_size: int = 64

    @property
    def tokens(self) -> tuple[int, ...]:
        """Rows of an op that does not care where they come from."""
        return self.batches + self.prompts

    def timing(self, tokens: int) -> Timing:
        """Decode steps are graph replays; prefill is issued from Python."""
        return "graph" if tokens in self.batches else "events"


@dataclass(frozen=True)
class Case:
    """`op` is what `--ops` matches, `uses` the ops that it times (none: cuBLAS alone), `tokens` its rows.

    `work` is of the whole, or of pieces that run one behind the other. `packages`: it takes what the engine takes.
    """

    op: str
    shape: str
    tokens: int
    work: Work | tuple[Work, ...]
    timing: Timing
    build: Callable[[Inputs], Problem]
    uses: tuple[str, ...] = ()
    packages: bool = False

    @property
    def pieces(self) -> tuple[Work, ...]:
        return self.work if isinstance(self.work, tuple) else (self.work,)


@dataclass
class Inputs:
    """Where cases take their tensors and functions from. `kept` holds what many cases share."""

    config: TextConfig
    device: torch.device
    seed: int = 0
    backend: Backend | None = None
    dtype: torch.dtype = torch.bfloat16
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal values times `scale`, in the dtype of the activations unless another is asked for."""
        drawn = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return drawn.normal_(std=scale, generator=self.generator)

    def weight(self, *shape: int) -> Tensor:
        """Normal values that keep the size of what is multiplied with them along the last dim."""
        return self.randn(*shape, scale=shape[-1] ** -0.5)

    def uniform(self, *shape: int) -> Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, device=self.device, generator=self.generator)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, device=self.device, generator=self.generator)

    def keep(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` returns, made at the first call under this name."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def ops(self, packages: bool = False) -> Ops:
        """What ships; the own kernels, or what the engine takes where optional `packages` are let in."""
        return self.keep(f"ops, packages: {packages}", lambda: choose(self.device, self.backend, packages))

    def op(self, name: str) -> Callable[..., Any]:
        return getattr(self.ops(), name)

    def twin(self, name: str) -> Callable[..., Any]:
        return getattr(self.keep("twins", lambda: choose(self.device, "torch")), name)


def int32(values: Tensor) -> Tensor:
    return values.to(torch.int32)


def checked_rows(count: int, most: int = CHECKED_ROWS) -> list[int]:
    """Up to `most` rows, spread evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def triples(outputs: Any, twin: Callable[..., Any], *arguments: Any) -> list[Triple]:
    """`outputs` beside the twin on `arguments`, as they are and widened to float64. What is no tensor is skipped."""
    eager, truth = _tuple(twin(*arguments)), _tuple(twin(*(_widened(argument) for argument in arguments)))
    return [
        Triple(out, plain, wide)
        for out, plain, wide in zip(_tuple(outputs), eager, truth, strict=True)
        if isinstance(out, Tensor)
    ]


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_widened(inner) for inner in value))
    return value


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)
