"""The faults of sections A to E: each is seen where the catalogue says, or not at all, and leaves nothing behind."""

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from parity.faults.catalogue import CATALOGUE, SECTIONS
from parity.faults.fault import Fault, applied
from parity.faults.verify import verify
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.schema import PROBES
from parity.sweep import boundary_workloads
from parity.tolerance import EXACT_LIMIT, row_errors
from parity.trace import Trace
from parity.workload import Workload
from reference.checkpoint.synthetic import synthetic_tensors
from reference.config import tiny

FRONT = [fault for section in "ABCDE" for fault in SECTIONS[section]]
WORKLOADS = boundary_workloads(tiny().text)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads are slower than one at these sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in synthetic_tensors(tiny())}


def trace_of(weights: dict[str, Tensor], workload: Workload, *faults: Fault) -> Trace:
    return traced(ReferenceRunner(tiny(), weights, torch.float64, faults=faults), workload)


@pytest.fixture(scope="module")
def right_traces(weights) -> dict[Workload, Trace]:
    return {workload: trace_of(weights, workload) for workload in WORKLOADS}


def pairs(expected: Trace, actual: Trace, names: Iterable[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """The values of each table of `names`, in both traces."""
    for name in names:
        for request in expected.requests(name):
            yield expected.table(name, request).values, actual.table(name, request).values


@pytest.mark.parametrize("fault", FRONT, ids=lambda fault: fault.id)
def test_a_fault_is_seen_where_the_catalogue_says_and_nowhere_else(fault, weights):
    outcome = verify(fault, tiny(), weights, WORKLOADS)
    assert outcome.is_as_expected, f"first at {outcome.first}, expected {fault.first}"


VISIBLE = [fault for fault in FRONT if fault.visibility not in ("I", "R", "N")]


@pytest.mark.parametrize("fault", VISIBLE, ids=lambda fault: fault.id)
def test_a_visible_fault_reaches_the_logits(fault, weights, right_traces):
    """With no choice replayed: an index score that is off matters only if it changes what is selected."""
    for workload in WORKLOADS:
        right, faulty = right_traces[workload], trace_of(weights, workload, fault)
        logits = [name for name in right.names() if name.endswith("logits") and "router" not in name]
        errors = [row_errors(actual, expected).relative.max() for expected, actual in pairs(right, faulty, logits)]
        if max(errors) > EXACT_LIMIT:
            return
    pytest.fail("no logits changed in any workload")


@pytest.mark.parametrize("fault", FRONT, ids=lambda fault: fault.id)
def test_a_fault_is_undone(fault, weights, right_traces):
    before = [vars(patch.owner)[patch.attribute] for patch in fault.patches]
    weights_before = {name: tensor.clone() for name, tensor in weights.items()}
    shortest = WORKLOADS[-1]
    trace_of(weights, shortest, fault)
    assert [vars(patch.owner)[patch.attribute] for patch in fault.patches] == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_before.items())
    right, again = right_traces[shortest], trace_of(weights, shortest)
    assert right.names() == again.names()
    assert all(torch.equal(expected, actual) for expected, actual in pairs(right, again, right.names()))


def test_a_patch_is_undone_after_an_error():
    fault = CATALOGUE["rope_angle_bf16"]
    (patch,) = fault.patches
    before = vars(patch.owner)[patch.attribute]
    with pytest.raises(ZeroDivisionError), applied([fault]):
        raise ZeroDivisionError
    assert vars(patch.owner)[patch.attribute] is before


def test_ids_are_unique():
    assert len(CATALOGUE) == sum(len(faults) for faults in SECTIONS.values())


@pytest.mark.parametrize("fault", FRONT, ids=lambda fault: fault.id)
def test_the_text_of_a_fault(fault):
    patterns = {spec.pattern for spec in PROBES}
    assert set(fault.first) | set(fault.hides_in) <= patterns
    assert fault.first
    assert fault.says
    assert not fault.says.endswith(".")
    assert fault.visible_when
    assert fault.source
    assert fault.visibility in ("I", "R") or not fault.hides_in
    edits = (fault.config, fault.weights, fault.numerics, fault.listener)
    assert fault.patches or any(edit is not None for edit in edits)
