"""No false alarm: implementations that differ by rounding only are never called different.

The same limits that detect the faults, in every view and at every level of dump. Profile `ci`: 100 workloads;
`explore`: 1,000 in ten shards, which `-n` spreads over cores.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import event, given, seed, settings, target
from hypothesis import strategies as st

from parity.compare import compare, compare_exact
from parity.faults.controls import CONTROLS
from parity.faults.fault import Fault
from parity.findings import View
from parity.plain_steps import plain_steps
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.schema import decided_by, pattern_of
from parity.strategies import workloads
from parity.trace import InMemory, Trace
from parity.workload import Draft, Truncate, Workload
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.session import Session

CONFIG = tiny()
WEIGHTS = dict(synthetic_tensors(CONFIG))
MAX_ACTIONS, MAX_TOKENS = 4, 40
# Of 100 workloads each, every shard with a seed of its own.
SHARDS = 10 if settings.get_current_profile_name() == "explore" else 1
MODELS = {dtype: ReferenceRunner(CONFIG, WEIGHTS, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)}
# What a dump shows: everything, what leaves each layer, or the logits.
LEVELS: dict[str, Callable[[str], bool]] = {
    "all probes": lambda name: True,
    "layer outputs": lambda name: pattern_of(name) in ("embeddings", "layers.{i}.output", "final_norm", "logits"),
    "logits only": lambda name: name == "logits",
}


def reference(dtype: torch.dtype) -> ReferenceRunner:
    """One model a dtype: building it takes as long as running it."""
    MODELS[dtype].session = Session(MODELS[dtype].model)
    return MODELS[dtype]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_rounding_is_never_called_different(shard: int) -> None:
    @seed(shard)
    @settings(max_examples=100)
    @given(
        workload=workloads(CONFIG.text, MAX_ACTIONS, MAX_TOKENS),
        control=st.sampled_from(CONTROLS),
        dtype=st.sampled_from((torch.bfloat16, torch.float32)),
        view=st.sampled_from(("pinpoint", "cascade")),
        level=st.sampled_from(("all probes", "all probes", *LEVELS)),
    )
    def sweep(workload: Workload, control: Fault, dtype: torch.dtype, view: View, level: str) -> None:
        recorded = traced(ReferenceRunner(CONFIG, WEIGHTS, dtype, faults=(control,)), workload)
        port = Trace([entry for entry in recorded.entries() if LEVELS[level](entry.name)])
        comparison = compare(reference, port, dtype, workload, views=(view,))
        target(comparison.worst_excess())
        event(f"control: {control.id}")
        event(f"level: {level}")
        for reached in reached_by(workload):
            event(f"reached: {reached}")
        assert comparison.compared
        assert not comparison.is_different, comparison.first

    sweep()


@pytest.mark.parametrize("shown", ["", "ab", "abc"], ids=["hidden", "hidden of c", "hidden in a row of c"])
def test_a_hidden_choice_that_no_draw_exchanges_is_none(shown: str) -> None:
    """A row of `c` has two experts closer than the noise of their scores, and all draws happen to agree on one."""
    control = next(control for control in CONTROLS if control.id == "transformers_rounding")
    workload = Workload.parse("p:a12+b v:a3+p:c2+p:b t:a1 t:a1", seed=1)
    recorded = traced(ReferenceRunner(CONFIG, WEIGHTS, torch.bfloat16, faults=(control,)), workload)
    entries = [entry for entry in recorded.entries() if LEVELS["layer outputs"](entry.name)]
    for entry in recorded.entries():
        if decided_by(entry.name) and entry.request in shown:
            # Of `c`, position 0 alone.
            count = 1 if entry.request == "c" else len(entry.positions)
            rows = InMemory(entry.source.load()[:count])
            entries.append(replace(entry, positions=entry.positions[:count], source=rows))
    port = Trace(entries)
    comparison = compare(reference, port, torch.bfloat16, workload, views=("pinpoint",))
    assert not comparison.is_different, comparison.first


def reached_by(workload: Workload) -> list[str]:
    """What of the model's machinery the workload uses."""
    steps = [step for step in plain_steps(workload, CONFIG.text.vocab_size) if step.kind != "draft"]
    longest = max(len(step.history) + len(step.token_ids) for step in steps)
    window, drafts = CONFIG.text.sliding_window_size, Session(MODELS[torch.float64].model).max_draft_tokens
    found = {
        "window": longest > window,
        "top-k": longest > CONFIG.text.index_topk,
        "ring wrap": longest > window + drafts,
        "drafts": any(isinstance(action, Draft) for action in workload.actions),
        "taken back": any(isinstance(action, Truncate) for action in workload.actions),
    }
    return [name for name, is_reached in found.items() if is_reached]


def test_the_sweep_reaches_what_it_should() -> None:
    """Of the workloads that are drawn, 4 in 100 at least reach each part of the machinery."""
    counts: Counter[str] = Counter()

    @settings(max_examples=400, database=None)
    @given(workload=workloads(CONFIG.text, MAX_ACTIONS, MAX_TOKENS))
    def draw(workload: Workload) -> None:
        counts.update(reached_by(workload))

    draw()
    assert all(counts[part] >= 16 for part in ("window", "top-k", "ring wrap", "drafts", "taken back")), counts


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.id)
def test_controls_are_equal_without_rounding(control: Fault) -> None:
    workload = Workload.parse("p:a20+b3 d:a+b m:a3 v:a4 t:a3 d:a")
    port = ReferenceRunner(CONFIG, WEIGHTS, torch.float64, faults=(control,))
    comparison = compare_exact(reference, traced(port, workload), workload)
    assert not comparison.is_different, comparison.first
