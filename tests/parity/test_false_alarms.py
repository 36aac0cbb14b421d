"""No false alarm: implementations that differ by rounding only are never called different.

The same limits that detect the faults. Profile `ci`: 40 workloads; `explore`: 1,000.
"""

import pytest
import torch
from hypothesis import event, given, settings, target
from hypothesis import strategies as st

from parity.compare import compare, compare_exact
from parity.faults.controls import CONTROLS
from parity.faults.fault import Fault
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.strategies import workloads
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors
from reference.config import tiny

CONFIG = tiny()
WEIGHTS = dict(synthetic_tensors(CONFIG))
EXAMPLES = 1000 if settings.get_current_profile_name() == "explore" else 40


def reference(dtype: torch.dtype) -> ReferenceRunner:
    return ReferenceRunner(CONFIG, WEIGHTS, dtype)


@settings(max_examples=EXAMPLES)
@given(
    workload=workloads(CONFIG.text, max_actions=4, max_tokens=40),
    control=st.sampled_from(CONTROLS),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
)
def test_rounding_is_never_called_different(workload: Workload, control: Fault, dtype: torch.dtype) -> None:
    port = ReferenceRunner(CONFIG, WEIGHTS, dtype, faults=(control,))
    comparison = compare(reference, traced(port, workload), dtype, workload, views=("cascade", "pinpoint"))
    target(comparison.worst_excess())
    event(control.id)
    assert comparison.compared
    assert not comparison.is_different, comparison.first


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.id)
def test_controls_are_equal_without_rounding(control: Fault) -> None:
    workload = Workload.parse("p:a20+b3 d:a+b m:a3 v:a4 t:a3 d:a")
    port = ReferenceRunner(CONFIG, WEIGHTS, torch.float64, faults=(control,))
    comparison = compare_exact(reference, traced(port, workload), workload)
    assert not comparison.is_different, comparison.first
