"""Without Triton everything imports, and the torch twins run."""

from __future__ import annotations

import subprocess
import sys

RUN = """
import pkgutil, sys
from importlib import import_module

sys.modules["triton"] = None

import torch
import optimized

for module in pkgutil.walk_packages(optimized.__path__, "optimized."):
    import_module(module.name)

from optimized.device import choose
from optimized.engine import Engine
from optimized.errors import NotSupportedError
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.session import StepItem

weights = {name: tensor.float() for name, tensor in synthetic_tensors(tiny())}
engine = Engine.from_state(tiny().text, weights, torch.float32, "cpu")
assert {choice.reason for choice in engine.text.ops.choices.values()} == {"triton is not installed"}
logits = engine.step([StepItem("a", tuple(range(20)), "prefill"), StepItem("b", (1,), "decode")])
assert all(logits_TW.isfinite().all() for logits_TW in (*logits.values(), engine.draft("a", 5, 3)))
try:
    choose("cpu", "triton")
except NotSupportedError as refusal:
    print(refusal)
"""


def test_everything_imports_and_runs_its_twins() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "no op can take triton on cpu: triton is not installed; ask for torch, or for no backend\n"
