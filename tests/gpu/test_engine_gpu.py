"""The engine on a GPU: the sweep against the reference through compiled kernels, at tiny and at released geometry, and
a request of 128k tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from optimized.bench.engine_steps import drawn_weights
from optimized.engine import Engine, EngineOptions
from optimized.plan_spans import StepLimits
from parity.engine_check import OPTIONS, check_optimized
from parity.sweep import boundary_workloads
from parity.workload import Workload
from reference.checkpoint import expected_tensors, synthetic_tensors
from reference.config import NoteConfig, released, slice_of, tiny
from reference.session import StepItem

CONFIG = tiny()
WEIGHTS = dict(synthetic_tensors(CONFIG))
CONTEXT = 131_072
PAGE_SIZE = 64


@pytest.mark.parametrize("level", ["bfloat16", "float32"])
@pytest.mark.parametrize("workload", boundary_workloads(CONFIG.text), ids=lambda workload: f"seed {workload.seed}")
def test_the_sweep_agrees(workload: Workload, level: str) -> None:
    report = check_optimized(CONFIG, WEIGHTS, [workload], (level,), "cuda", "triton")
    assert report.compared
    assert report.first_different is None, report.first_different.comparison.first


def drawn(config: NoteConfig) -> Iterator[tuple[str, Tensor]]:
    """Random weights of a checkpoint, by torch: numpy's exact ones would take minutes at these sizes."""
    generator = torch.Generator().manual_seed(0)
    for expected in expected_tensors(config).values():
        noise = torch.randn(expected.shape, generator=generator)
        value = noise * expected.shape[-1] ** -0.5 if len(expected.shape) > 1 else 1 + 0.1 * noise
        yield expected.name, value.to(expected.dtype)


def test_released_geometry_agrees() -> None:
    """Released heads and widths in a layer of each kind and the draft layer; a short window and top-k, few experts.

    Prompts run eagerly, everything else from recordings.
    """
    config = slice_of(released(), (0, 1, 2), experts=12)
    text = replace(config.text, vocab_size=1024, sliding_window_size=17, index_topk=24)
    config = replace(config, text=text, vision=None, audio=None)
    workload = Workload.parse("p:a30+b9 d:a+b m:a2 v:a3 t:a1 d:a+b")
    options = replace(OPTIONS, pages=64, limits=StepLimits(64, 2**28, 2**22), graphs=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        report = check_optimized(config, dict(drawn(config)), [workload], ("bfloat16",), "cuda", "triton", options)
    finally:
        torch.set_num_threads(threads)
    assert report.compared
    assert report.first_different is None, report.first_different.comparison.first


def test_nothing_of_a_step_waits_for_the_device() -> None:
    engine = Engine.from_packed(CONFIG.text, drawn_weights(CONFIG.text, "cuda"), torch.bfloat16, "cuda")
    prompts = [StepItem("a", tuple(range(40)), "prefill"), StepItem("b", (1, 2, 3), "prefill")]
    engine.step(prompts)  # compiles
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step([StepItem("c", tuple(range(30)), "prefill"), StepItem("a", (5,), "decode")])
        engine.draft("a", 7, 2)
        engine.step([StepItem("a", (7, 8, 9), "verify"), StepItem("b", (4,), "decode")], last_only=True)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_a_request_of_128k_tokens_decodes() -> None:
    """Attention caches of the released model, all 46 layers; few experts, so that the weights are quickly drawn."""
    config = slice_of(released(), range(46), experts=8).text
    options = EngineOptions(pages=CONTEXT // PAGE_SIZE + 1, page_size=PAGE_SIZE, requests=1)
    engine = Engine.from_packed(config, drawn_weights(config, "cuda"), torch.bfloat16, "cuda", options=options)
    print(engine.pools.summary(CONTEXT))
    assert engine.pools.bytes_per_token() == 13 * (576 + 128) * 2
    for pool in (engine.pools.latents, engine.pools.index_keys, engine.pools.rings):
        pool.normal_()
    engine.pools.open("long")
    engine.pools.grow("long", CONTEXT - 1)
    engine.adopt("long", [1] * (CONTEXT - 1))
    logits = engine.step([StepItem("long", (2,), "decode")])["long"]
    assert logits.shape == (1, config.vocab_size)
    assert logits.isfinite().all()
