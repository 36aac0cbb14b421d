"""NaN around and under what a kernel touches: reads past an end, and outputs that were not written, then show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def surrounded(x: Tensor, room: int = 1) -> Tensor:
    """The same values as a view inside a larger tensor: NaN (or huge ids) before and behind, in every dim.

    A `room` of 1 leaves nothing aligned; 16 keeps strides and addresses that a compiled kernel reads as vectors.
    """
    hostile = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    around = torch.full([size + 2 * room for size in x.shape], hostile, dtype=x.dtype, device=x.device)
    return around[tuple(slice(room, -room) for _ in x.shape)].copy_(x)


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within, `torch.empty` is filled with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def poisoned(kernel: Callable) -> Callable:
    """The kernel, with every output poisoned before it is written."""

    def run(*arguments: object, **options: object) -> object:
        with poisoned_empty():
            return kernel(*arguments, **options)

    return run


def assert_same_bytes(first: Tensor, second: Tensor) -> None:
    """Equal, NaN equal to NaN."""
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype, device: str, room: int = 1) -> Tensor:
    """Normal draws of a CPU generator, so that every device sees the same values; surrounded by poison."""
    return surrounded(torch.randn(*shape, generator=generator).to(device, dtype), room)
