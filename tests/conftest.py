"""What every test run shares: Hypothesis profiles, the marker `slow`, GPU tests, threads.

Profiles (`--hypothesis-profile NAME`, default `ci`): `ci` is derandomised and bounded, `explore` is random, long and
keeps its failures, `debug` prints what it does. Tests marked `slow` run with `-m slow` or the profile `explore`; those
under `tests/gpu` run where CUDA is available. What was skipped for either reason is counted in the summary.
Without CUDA, Triton's kernels run in its interpreter.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Verbosity, settings

# `tests/` is on the path, for `strategies`, and its folders `reference/` and `parity/` would be taken for ours: an
# editable install is looked up after every folder of the path. A package on the path goes before a mere folder.
sys.path.insert(0, str(Path(__file__).parents[1]))

# Small products: more threads per worker cost more than they save, and xdist already runs one worker a core.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Read when Triton is imported, so before any test imports a kernel.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=30,
    deadline=None,
    # Drawing a config takes many small draws, and a model is built for each.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("debug", parent=settings.get_profile("ci"), max_examples=5, verbosity=Verbosity.verbose)
settings.load_profile("ci")

GPU_TESTS = Path(__file__).parent / "gpu"
SLOW_SKIPPED = "slow: run with `-m slow`, or `make explore`"
GPU_SKIPPED = "needs CUDA: this machine has no GPU that torch can use"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for_slow = settings.get_current_profile_name() == "explore" or "slow" in config.getoption("markexpr")
    for item in items:
        if item.get_closest_marker("slow") and not asked_for_slow:
            item.add_marker(pytest.mark.skip(reason=SLOW_SKIPPED))
        if GPU_TESTS in item.path.parents and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=GPU_SKIPPED))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report.longrepr[2] for report in terminalreporter.getreports("skipped")]
    for reason in (SLOW_SKIPPED, GPU_SKIPPED):
        if count := sum(reason in text for text in skipped):
            terminalreporter.write_line(f"not run: {count} tests ({reason})")
