"""FlashMLA as the decode core of the full layers: at released sizes, in graphs, in the engine. Needs the package."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_checks import check_against_twin
from test_attention_gpu import sparse_arguments
from test_packages import wide_latents

from optimized.attention import flash_mla
from optimized.attention.absorbed import sparse_attention_torch
from optimized.attention.flash_mla import sparse_attention_package
from optimized.bench.timing import captured
from optimized.device import choose
from optimized.packages import FLASH_MLA, status_of
from parity.engine_check import OPTIONS, check_optimized
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors

STATUS = status_of(FLASH_MLA)
pytestmark = pytest.mark.skipif(not STATUS.works, reason=f"{STATUS.distribution}: {STATUS.detail}")


@pytest.fixture(autouse=True)
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package does whatever it can, at every size; the own kernel nothing."""
    monkeypatch.setattr(flash_mla, "is_faster", lambda T, H: True)
    monkeypatch.setattr(flash_mla, "sparse_attention_triton", None)


def test_it_is_chosen() -> None:
    assert choose("cuda", packages=True).choices["sparse_attention"].backend == "package"
    assert choose("cuda").choices["sparse_attention"].backend == "triton"


@pytest.mark.parametrize(("B", "context"), [(1, 4096), (64, 2560), (3, 1500), (70, 200)])
def test_it_is_as_good_as_the_twin(B: int, context: int) -> None:
    """Ends that differ; whatever was not written is NaN."""
    arguments = sparse_arguments(B, context)
    check_against_twin(sparse_attention_package, sparse_attention_torch, *arguments)
    assert torch.equal(sparse_attention_package(*arguments), sparse_attention_package(*arguments))


def test_replays_read_the_lists_and_pages_of_the_moment() -> None:
    """C39: captured without keys in some rows, replayed with other lists, requests and pages."""
    arguments, others = sparse_arguments(5, 3000), sparse_arguments(5, 3000)
    q, pool, selected, table, request, *rest = (
        value.clone() if isinstance(value, torch.Tensor) else value for value in arguments
    )
    selected[1:3], request[1:3] = -1, 2**31 - 1
    out = torch.empty_like(q[..., :512])
    graph = captured(lambda: out.copy_(sparse_attention_package(q, pool, selected, table, request, *rest)))
    graph.replay()
    assert not out[1:3].any()
    moved = torch.arange(len(pool), device=pool.device).flip(0)
    q.copy_(others[0].flip(0))
    pool.copy_(others[1][moved])
    selected.copy_(others[2].flip(0))
    table.copy_(len(pool) - 1 - others[3])
    request.copy_(others[4].flip(0))
    graph.replay()
    assert torch.equal(out, sparse_attention_package(*others).flip(0))


def test_nothing_waits_for_the_device() -> None:
    arguments = sparse_arguments(4, 500)
    sparse_attention_package(*arguments)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sparse_attention_package(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("graphs", [False, True])
def test_the_engine_agrees_with_the_reference(graphs: bool) -> None:
    config = wide_latents()
    workload = Workload.parse("p:a20+b9 d:a+b m:a2 v:a3 t:a1 d:a+b")
    options = replace(OPTIONS, graphs=graphs)
    report = check_optimized(config, dict(synthetic_tensors(config)), [workload], ("bfloat16",), "cuda", None, options)
    assert report.compared
    assert report.first_different is None, report.first_different.comparison.first
