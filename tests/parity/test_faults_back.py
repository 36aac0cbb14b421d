"""The faults of sections F to K: each is seen where the catalogue says, or not at all, and leaves nothing behind."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parity.faults.attention import ATTENTION_FAULTS
from parity.faults.draft import DRAFT_FAULTS
from parity.faults.fault import Fault, text_edit
from parity.faults.loading import LOADING_FAULTS
from parity.faults.moe import MOE_FAULTS
from parity.faults.residual import RESIDUAL_FAULTS
from parity.faults.verify import verify
from parity.faults.window import WINDOW_FAULTS
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.schema import PROBES, pattern_of
from parity.sweep import boundary_workloads
from parity.tolerance import EXACT_LIMIT, row_errors
from parity.trace import Trace
from parity.workload import Workload
from reference.checkpoint.synthetic import synthetic_tensors
from reference.config import NoteConfig, slice_of, tiny
from reference.numerics import Numerics

BACK = (
    *WINDOW_FAULTS,
    *ATTENTION_FAULTS,
    *MOE_FAULTS,
    *RESIDUAL_FAULTS,
    *DRAFT_FAULTS,
    *LOADING_FAULTS,
)
BY_ID = {fault.id: fault for fault in BACK}
WORKLOADS = boundary_workloads(tiny().text)
SHORTEST = Workload.parse("p:a2 m:a1")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads are slower than one at these sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def weights_of(config: NoteConfig) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in synthetic_tensors(config)}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return weights_of(tiny())


def trace_of(
    weights: dict[str, Tensor], workload: Workload, *faults: Fault, dtype=torch.float64, numerics=None
) -> Trace:
    return traced(ReferenceRunner(tiny(), weights, dtype, numerics, faults=faults), workload)


@pytest.fixture(scope="module")
def right_traces(weights) -> dict[Workload, Trace]:
    return {workload: trace_of(weights, workload) for workload in (*WORKLOADS, SHORTEST)}


def pairs(expected: Trace, actual: Trace, names: Iterable[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """The values of each table of `names`, in both traces."""
    for name in names:
        for request in expected.requests(name):
            yield expected.table(name, request).values, actual.table(name, request).values


def is_bitwise_equal(expected: Trace, actual: Trace) -> bool:
    same_names = expected.names() == actual.names()
    return same_names and all(torch.equal(left, right) for left, right in pairs(expected, actual, expected.names()))


@pytest.mark.parametrize("fault", BACK, ids=lambda fault: fault.id)
def test_a_fault_is_seen_where_the_catalogue_says_and_nowhere_else(fault, weights):
    # A rounding shows in any workload, and its floor takes many runs: the shortest first.
    workloads = sorted(WORKLOADS, key=lambda workload: workload.tokens) if fault.visibility == "N" else WORKLOADS
    outcome = verify(fault, tiny(), weights, workloads)
    assert outcome.is_as_expected, f"first at {outcome.first}, expected {fault.first}"


@pytest.mark.parametrize("fault", BACK, ids=lambda fault: fault.id)
def test_a_fault_is_undone(fault, weights, right_traces):
    before = [vars(patch.owner)[patch.attribute] for patch in fault.patches]
    weights_before = {name: tensor.clone() for name, tensor in weights.items()}
    trace_of(weights, SHORTEST, fault)
    assert [vars(patch.owner)[patch.attribute] for patch in fault.patches] == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_before.items())
    assert is_bitwise_equal(right_traces[SHORTEST], trace_of(weights, SHORTEST))


VISIBLE = [fault for fault in BACK if fault.visibility not in ("I", "R", "N")]


@pytest.mark.parametrize("fault", VISIBLE, ids=lambda fault: fault.id)
def test_a_visible_fault_reaches_the_logits(fault, weights, right_traces):
    """With no choice replayed: a choice score that is off matters only if it changes what is chosen."""
    for workload in WORKLOADS:
        right, faulty = right_traces[workload], trace_of(weights, workload, fault)
        logits = [name for name in right.names() if name.endswith("logits") and "router" not in name]
        for expected, actual in pairs(right, faulty, logits):
            if expected.shape != actual.shape or row_errors(actual, expected).relative.max() > EXACT_LIMIT:
                return
    pytest.fail("no logits changed in any workload")


OTHER_CONFIGS = {
    "routed_scale_twice": text_edit(routed_scaling_factor=2.5)(tiny()),
    "fp16_residual_trick": text_edit(routed_scaling_factor=2.5)(tiny()),
    "layer46_literal": slice_of(tiny(), (0, 1, 2)),
}


def test_every_fault_that_the_released_config_hides_has_a_config_that_shows_it():
    assert set(OTHER_CONFIGS) == {fault.id for fault in BACK if fault.visibility == "R"}


@pytest.mark.parametrize("fault_id", OTHER_CONFIGS)
def test_what_the_released_config_hides_another_one_shows(fault_id):
    config = OTHER_CONFIGS[fault_id]
    outcome = verify(BY_ID[fault_id], config, weights_of(config), WORKLOADS[:1])
    assert outcome.first is not None
    assert pattern_of(outcome.first) in BY_ID[fault_id].first


def test_a_sigmoid_in_bfloat16_has_the_bits_of_a_rounded_one(weights):
    """`gate_sigmoid_bf16` is invisible in bfloat16 too, against a gate that is rounded before the product."""
    twice = Numerics(gate_rounding="twice")
    right = trace_of(weights, WORKLOADS[0], dtype=torch.bfloat16, numerics=twice)
    faulty = trace_of(weights, WORKLOADS[0], BY_ID["gate_sigmoid_bf16"], dtype=torch.bfloat16, numerics=twice)
    assert is_bitwise_equal(right, faulty)


def test_a_float32_router_shows_against_a_rounded_one(weights):
    """`router_fp32` is a fault only where the other side rounds."""
    rounded = Numerics(router_dtype="activation")
    right = trace_of(weights, SHORTEST, dtype=torch.bfloat16, numerics=rounded)
    faulty = trace_of(weights, SHORTEST, BY_ID["router_fp32"], dtype=torch.bfloat16, numerics=rounded)
    first = next(iter(pairs(right, faulty, ["layers.1.ffn.router.logits"])))
    assert not torch.equal(first[0].float(), first[1].float())


def test_ids_are_unique():
    assert len(BY_ID) == len(BACK)


@pytest.mark.parametrize("fault", BACK, ids=lambda fault: fault.id)
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


def test_patches_work_under_every_preset(weights):
    """A fault that replaces a function must find it in use whatever the numerics: here gates and activations."""
    numerics = replace(Numerics.preset("transformers"), index_dtype="activation")
    right = trace_of(weights, SHORTEST, numerics=numerics)
    for fault_id, name in (("gate_hard_step", "layers.0.attn.gate"), ("gelu_for_silu", "layers.0.ffn.output")):
        faulty = trace_of(weights, SHORTEST, BY_ID[fault_id], numerics=numerics)
        expected, actual = next(iter(pairs(right, faulty, [name])))
        assert row_errors(actual, expected).relative.max() > EXACT_LIMIT
