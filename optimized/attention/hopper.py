"""What the decode kernels for Hopper share: names that versions of Triton spell differently, and a few constants.

These kernels are written in Gluon, Triton's language below its automatic layouts and pipelines. Two things need it:
both products of a tile of keys read the same copy of its rows in shared memory, and share each product between the
warpgroups (Triton lets every warpgroup make all scores once a second product depends on them); and the next rows are
fetched into a buffer as soon as the product that read it ends. Gluon has no interpreter: these kernels are tested on
the GPU, the one over rings also emulated, and `two_pass` serves everywhere else. Source: PTX ISA, sections on wgmma and
cp.async.
"""

from optimized.kernels.common import HAS_TRITON, triton

if HAS_TRITON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
else:  # the kernels can be imported, and are not called
    gluon = gl = async_copy = fence_async_shared = warpgroup_mma = warpgroup_mma_wait = triton

# Triton 3.6 and 3.9.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# Below every exponent of a live key, and finite: the difference of two of them is 0, not NaN.
LOWEST = gl.constexpr(-3.0e38) if HAS_TRITON else -3.0e38
# From base 2 to the natural logarithm.
LN_2 = gl.constexpr(0.6931471805599453) if HAS_TRITON else 0.6931471805599453
# Elements in which the place of a row is counted: a 32-bit number then reaches 64 GB, and rows are known to be aligned.
UNIT = gl.constexpr(16) if HAS_TRITON else 16
WARPS = 8

__all__ = [
    "LN_2",
    "LOWEST",
    "UNIT",
    "WARPS",
    "async_copy",
    "barrier",
    "copy_async",
    "fence_async_shared",
    "gl",
    "gluon",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
