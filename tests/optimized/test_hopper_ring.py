"""The decode core over rings for Hopper: emulated in numpy at small sizes, and compiled at the released one."""

import os
import subprocess
import sys

import pytest
import torch
from gluon_emulator import emulated, pointer
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, float64
from test_absorbed import int32, ringed
from torch import Tensor

from optimized.attention.absorbed import ring_attention_torch
from optimized.attention.combine import merge_parts_torch
from optimized.attention.one_pass import LOG2_E

hopper_ring = pytest.importorskip("optimized.attention.hopper_ring")
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu/test_attention_gpu.py runs the kernel itself")

HALF_C, HALF_R, BLOCK_H, BLOCK_K = 8, 2, 2, 4
SIZES = {"H": 2 * BLOCK_H, "C": 2 * HALF_C, "R": 2 * HALF_R}


def attend(
    q: Tensor, pool: Tensor, ring: Tensor, positions: Tensor, window: int, scale: float, C: int, parts: int
) -> Tensor:  # fmt: skip
    """As `ring_attention_torch`, in float64."""
    T, H, _ = q.shape
    tiles = max(1, -(-(window - 1) // BLOCK_K))
    keys_of_part = -(-tiles // parts) * BLOCK_K
    out = torch.full((parts, T, H, C), float("nan"), dtype=torch.float64)
    lse = torch.full((parts, T, H), float("nan"), dtype=torch.float64)
    emulated(hopper_ring, "attend_ring_kernel", (T * parts * (H // BLOCK_H), 1, 1))(
        *map(pointer, (q, pool, ring, positions, out, lse)), scale * LOG2_E, T, H, window, keys_of_part, parts,
        pool.shape[1], q.stride(0), q.stride(1), pool.stride(0), pool.stride(1),
        IS_PART=parts > 1, HALF_C=HALF_C, HALF_R=HALF_R, BLOCK_H=BLOCK_H, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return merge_parts_torch(out, lse)[0] if parts > 1 else out[0]


def check(arguments: tuple, parts: int) -> None:
    arguments = tuple(float64(*arguments))
    expected = ring_attention_torch(*arguments)
    torch.testing.assert_close(attend(*arguments, parts=parts), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("window", "ring_rows"), [(1, 1), (4, 4), (5, 8), (13, 13), (17, 20)])
def test_windows(window: int, ring_rows: int, parts: int) -> None:
    """Rings that wrap inside a tile, between two and not at all; NaN in every row that is not the window's."""
    check(ringed([0, window - 1, window, 5 * ring_rows + 3], ring_rows, window, torch.float32, **SIZES), parts)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_short_and_padded_rows(parts: int) -> None:
    arguments = ringed([0, 1, 3, 4, 5, 11, 30], 20, 17, torch.float32, **SIZES)
    arguments[2][0] = 2**31 - 1
    arguments[3][0] = -1
    check(arguments, parts)


@settings(max_examples=8)
@given(st.integers(1, 24), st.integers(0, 3), st.lists(st.integers(-1, 60), min_size=1, max_size=3), st.integers(1, 5))
def test_sweep(window: int, drafts: int, positions: list[int], parts: int) -> None:
    arguments = ringed([max(0, last) for last in positions], window + drafts, window, torch.float32, **SIZES)
    check((*arguments[:3], int32(positions), *arguments[4:]), parts)


COMPILING = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from optimized.attention.hopper import WARPS
from optimized.attention.hopper_ring import BLOCK_H, BLOCK_K, attend_ring_kernel
for is_part in (False, True):
    constants = {"IS_PART": is_part, "HALF_C": 512, "HALF_R": 32, "BLOCK_H": BLOCK_H, "BLOCK_K": BLOCK_K}
    types = {"q": "*bf16", "pool": "*bf16", "ring": "*i32", "position": "*i32", "lse": "*fp32", "scale_log2": "fp32"}
    types["out"] = "*fp32" if is_part else "*bf16"
    names = attend_ring_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = ("q", "pool", "out", "keys_of_part", "q_token", "q_head", "pool_ring", "pool_row")
    source = GluonASTSource(
        attend_ring_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS, "num_ctas": 2})
    ptx = compiled.asm["ptx"]
    (exchanged,) = (int(line.split("received[")[1].split("]")[0]) for line in ptx.splitlines() if "received[" in line)
    read = ptx[ptx.rindex("ld.shared.v4.f32 {other") :]
    assert 0 < read.index("bar.sync") < read.index("barrier.cluster.arrive"), "the other program may send too soon"
    print(compiled.metadata.shared, exchanged)
"""


def test_it_compiles_without_a_gpu_and_fits_the_shared_memory() -> None:
    """With the buffer of the exchanges, which Triton does not count; tiles lie behind it, aligned to 1024 bytes.

    There is one: a second copy of the exchange would wait at a counter of its own, which nobody makes.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILING], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    for line in run.stdout.splitlines():
        tiles, exchanged = map(int, line.split())
        assert tiles + exchanged <= 227 << 10
        assert exchanged % 1024 == 0
    assert len(run.stdout.splitlines()) == 2
