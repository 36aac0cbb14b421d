"""What the kernel files share: Triton if it is installed, one matrix product for every dtype, checks of host wrappers.

Kernels compute in float32 and round once when they store. Products of bfloat16 tiles run on tensor cores with float32
sums; float32 tiles are multiplied in full float32. Triton's interpreter multiplies bfloat16 wrongly, so there
tiles are widened first: the same values, since a bfloat16 product is exact in float32.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from optimized.errors import KernelInputError

try:
    import triton
    import triton.language as tl
except ImportError:  # the torch twins need no triton

    class _Absent:
        """Lets kernel files be imported: decorating leaves the function as it is, every name exists."""

        constexpr = Any

        def __getattr__(self, name: str) -> Any:
            return _Absent()

        def __call__(self, *arguments: Any, **_: Any) -> Any:
            return arguments[0] if arguments else self

    triton = tl = _Absent()
    HAS_TRITON = False
else:
    HAS_TRITON = True

# Triton decides at its own import whether kernels are interpreted on the CPU.
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter also drops the low bits of a float32 that becomes a bfloat16, where compiled code rounds.
TRUNCATES = tl.constexpr(IS_INTERPRETED) if HAS_TRITON else False


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """The first thing that a kernel launched with `overlap` does; before it, nothing may be read or written."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that begins with `wait_for_inputs` and takes OVERLAPS.

    From Hopper on it is launched while the kernel in front of it still runs, and waits there until all that this one
    wrote can be seen (programmatic dependent launch). Inside a graph on an H200: 40 norms of one row in 47 µs instead
    of 65, 20 norms and 20 products of 52 MB in 313 instead of 339; a decode step of the four-layer slice (least of 20
    replays) in 1195 / 4292 / 8422 / 11061 µs instead of 1227 / 4307 / 8451 / 11131 at 1 / 16 / 64 / 256 requests.
    Letting the next kernel in before the end gained nothing further.
    """
    if IS_INTERPRETED or device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


@triton.jit
def dot(a, b, sums, WIDEN: tl.constexpr):
    """sums + a b, float32. `WIDEN` (see `widen`) multiplies in full float32."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums)


@triton.jit
def round_to(x, pointer):
    """float32 `x` in the dtype that is stored at `pointer`, to nearest even."""
    if pointer.dtype.element_ty == tl.float32:
        return x
    elif TRUNCATES:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x).to(pointer.dtype.element_ty)
    else:
        return x.to(pointer.dtype.element_ty)


def widen(dtype: torch.dtype) -> bool:
    """Whether `dot` has to widen tiles of this dtype: float32 to avoid tf32, everything in the interpreter."""
    return IS_INTERPRETED or dtype == torch.float32


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tile(n: int, smallest: int = 16, largest: int = 128) -> int:
    """A power of two for a block that covers `n`: at least `smallest` (a dot needs 16), at most `largest`."""
    return max(smallest, min(largest, next_power_of_2(n)))


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int | None], *dtypes: torch.dtype, last_dim_dense: bool = True
) -> None:
    """Raises: KernelInputError unless `tensor` has this shape (None: any size) and one of the dtypes (none: any)."""
    found = tuple(tensor.shape)
    sizes = list(zip(shape, found, strict=False))
    if len(found) != len(shape) or any(want not in (None, size) for want, size in sizes):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise KernelInputError(f"expected {name} ({wanted}), found {found}")
    if dtypes and tensor.dtype not in dtypes:
        raise KernelInputError(f"expected {name} in {' or '.join(map(str, dtypes))}, found {tensor.dtype}")
    if last_dim_dense and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelInputError(f"expected {name} with a dense last dim, found strides {tensor.stride()}")
