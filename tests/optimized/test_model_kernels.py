"""The whole model through its kernels, by the harness: the sweep's limits, three views, poison wherever nothing is.

Here the kernels are interpreted, so two short workloads stand for the sweep; `tests/gpu/test_engine_gpu.py` runs all of
it compiled. `test_engine` has the same comparison without rounding, through the twins.
"""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE

from parity.compare import compare
from parity.engine_check import OPTIONS
from parity.run import traced
from parity.runners.optimized import OptimizedRunner
from parity.runners.reference import ReferenceRunner
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors
from reference.config import tiny

CONFIG = tiny()
WEIGHTS = dict(synthetic_tensors(CONFIG))


@pytest.mark.parametrize(
    ("dtype", "line"),
    [
        # Ragged prefill across the window and the top-k, decode of both, drafts, verification, some taken back.
        (torch.bfloat16, "p:a15+b3 d:a+b m:a2 v:a3+b1 t:a1"),
        # A second chunk, which starts inside the window, beside a decode.
        (torch.float32, "p:a8+b1 p:a9+d:b m:b1"),
    ],
    ids=["bfloat16", "float32"],
)
def test_kernels_agree_with_the_reference(dtype: torch.dtype, line: str) -> None:
    def reference(wide: torch.dtype) -> ReferenceRunner:
        return ReferenceRunner(CONFIG, WEIGHTS, wide)

    workload = Workload.parse(line)
    port = OptimizedRunner(CONFIG, WEIGHTS, dtype, DEVICE, "triton", OPTIONS)
    comparison = compare(reference, traced(port, workload), dtype, workload, ("cascade", "isolated", "pinpoint"))
    assert comparison.compared
    assert not comparison.is_different, comparison.first
    assert not [choice for choice in comparison.choices if choice.verdict == "flip"]
