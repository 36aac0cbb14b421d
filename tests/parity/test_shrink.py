"""The smallest workload that still fails."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from parity.run import run_workload
from parity.runners.reference import ReferenceRunner
from parity.shrink import is_possible, smaller_workloads, smallest_failing
from parity.strategies import workloads
from parity.trace import TraceRecorder
from parity.workload import Draft, Step, Truncate, Workload
from reference.checkpoint import synthetic_tensors
from reference.config import slice_of, tiny

CONFIG = slice_of(tiny(), [1, 2])
RUNNER = ReferenceRunner(CONFIG, dict(synthetic_tensors(CONFIG)))


def has(workload: Workload, kind: type) -> bool:
    return any(isinstance(action, kind) for action in workload.actions)


def is_batched(workload: Workload) -> bool:
    return any(len(action.items) > 1 for action in workload.actions if isinstance(action, Step))


def smallest(line: str, fails) -> str:
    return smallest_failing(Workload.parse(line, 7), fails).text()


def test_what_is_needed_stays_and_all_else_goes() -> None:
    long = "p:a9 p:b14 d:a+b v:a4 t:a3 m:a3 f:a>c p:c7 x:b d:a+c m:c2"
    assert smallest(long, lambda workload: True) in ("p:a1", "p:b1", "p:c1")
    assert smallest(long, lambda workload: has(workload, Draft)) in ("p:a1 m:a1", "p:c1 m:c1")
    assert smallest(long, lambda workload: has(workload, Truncate)) in ("p:a2 t:a1", "p:a1 v:a1 t:a1")
    assert smallest(long, is_batched) in ("p:a1 p:b1 d:a+b", "p:a1 p:c1 d:a+c")
    assert smallest(long, lambda workload: workload.tokens >= 12) in ("p:b12", "p:a12")


def test_the_seed_and_chosen_tokens_stay() -> None:
    workload = replace(Workload.parse("p:a9 d:a", 7), chosen={("a", 0, 0): 5})
    found = smallest_failing(workload, lambda workload: workload.tokens >= 3)
    assert (found.text(), found.seed, found.chosen) == ("p:a3", 7, {("a", 0, 0): 5})


def test_nothing_is_run_twice_or_behind_the_end() -> None:
    seen: list[str] = []

    def fails(workload: Workload) -> bool:
        seen.append(workload.text())
        return False

    assert smallest("p:a9 d:a t:a1 d:a", fails) == "p:a9 d:a t:a1 d:a"
    assert len(seen) == len(set(seen)) > 5
    left = iter([True, True, False])
    line = smallest_failing(Workload.parse("p:a9 d:a d:a", 7), lambda workload: True, lambda: next(left)).text()
    assert Workload.parse(line).tokens < 11


@given(workloads(CONFIG.text, max_actions=6, max_tokens=30), st.randoms(use_true_random=False))
def test_every_smaller_workload_is_smaller_and_can_be_run(workload: Workload, random) -> None:
    smaller = list(smaller_workloads(workload))
    assert is_possible(workload.actions)
    for other in smaller:
        other.check()
        assert len(other.text()) < len(workload.text()) or other.tokens <= workload.tokens
        assert other.text() != workload.text()
    for other in random.sample(smaller, min(1, len(smaller))):
        assert run_workload(RUNNER, other, TraceRecorder()) == []
