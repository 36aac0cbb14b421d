"""A dump is compared with a golden one pair of tables at a time, however large both are; so it is by a judge."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity.judge import Judge
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.tolerance import DRAWS, FALSE_ALARM_RATE
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors
from reference.config import tiny

WRITE = """
import sys
from pathlib import Path
import torch
from parity.golden_file import GOLDEN_FILE, Golden, ValueTable, write_part, write_record
from parity.manifest import Producer
from parity.tolerance import Floor
from parity.trace import Entry, InMemory
from parity.trace_file import TraceWriter

folder, layers, rows, width = Path(sys.argv[1]), *map(int, sys.argv[2:])
keys = tuple((position, 0) for position in range(rows))
noise = torch.full((rows,), 1e-3, dtype=torch.float64)
parts = []
(folder / "golden").mkdir()
with TraceWriter(folder / "dump", Producer(engine="test"), torch.float32) as dump:
    for layer in range(layers):
        name = f"layers.{layer}.output"
        truth = torch.randn(rows, width, generator=torch.Generator().manual_seed(layer))
        table = ValueTable(keys, truth, Floor(noise, 0.1, 2e-3))
        part = write_part(folder / "golden", f"layer.{layer}.safetensors", {(name, "a"): table}, {}, torch.bfloat16)
        parts.append(part)
        error = 1.0 if layer == layers - 2 else 1e-3
        dump.keep(Entry(name, "a", 0, "prefill", range(rows), InMemory(truth * (1 + error))))
record = Golden.open("tiny").record
write_record(folder / "golden", record.model_copy(update={"parts": parts, "workload": f"p:a{rows}"}), GOLDEN_FILE)
"""

COMPARE = """
import sys
from pathlib import Path
from parity.golden_compare import compare_to_golden
from parity.golden_file import Golden
from parity.trace_file import open_trace

folder = Path(sys.argv[1])
before = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
comparison = compare_to_golden(Golden.open(folder / "golden"), open_trace(folder / "dump"))
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
print(comparison.compared, comparison.first.name, before, peak)
"""

JUDGE = """
import dataclasses, gc, sys
import torch
from parity.judge import Judge
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.trace import Trace
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors
from reference.config import tiny

config, workload = tiny(), Workload.parse("p:a64")
config = dataclasses.replace(config, text=dataclasses.replace(config.text, vocab_size=100_000))
weights = dict(synthetic_tensors(config))
reference = lambda dtype: ReferenceRunner(config, weights, dtype)
(logits,) = [e for e in traced(reference(torch.bfloat16), workload).entries() if e.name == "logits"]
logits.source.tensor[:] *= float(sys.argv[1])
judge = Judge(reference, Trace([logits]), torch.bfloat16, workload, "cascade", 8, 1e-6)

def resident(word):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(word))

gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = resident("VmRSS:")
(result,) = judge.probes()
print(result.verdict.replace(" ", "-"), logits.source.load().nbytes, resident("VmHWM:") - before)
"""


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    # Large blocks go back to the system when they are freed, so that the peak is of what was in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("layers", "rows", "width", "limit"),
    [
        pytest.param(64, 200, 5120, None, id="262 MB each"),
        pytest.param(62, 1600, 5120, 10**9, id="2 GB each", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_comparing_takes_little_memory(tmp_path: Path, layers: int, rows: int, width: int, limit: int | None) -> None:
    """262 MB: half of one side above what the imports take. 2 GB: less than 1 GB in all."""
    try:
        run(WRITE, tmp_path, layers, rows, width)
        compared, first, before, peak = run(COMPARE, tmp_path).split()
    finally:
        shutil.rmtree(tmp_path)
    print(f"{layers * rows * width * 4} bytes each: peak {int(peak) / 1e6:.0f} MB, {int(before) / 1e6:.0f} MB before")
    assert int(compared) == layers
    assert first == f"layers.{layers - 2}.output"
    assert int(peak) < (limit or int(before) + layers * rows * width * 2)


def test_a_judge_builds_each_model_once() -> None:
    """Also where hidden choices are unclear, which takes another run of the truth: no second model lies beside it."""
    weights = dict(synthetic_tensors(tiny()))
    workload = Workload.parse("p:a20")
    port = traced(ReferenceRunner(tiny(), weights, torch.bfloat16), workload, patterns=("logits",))
    built = []

    def reference(dtype: torch.dtype) -> ReferenceRunner:
        built.append(dtype)
        return ReferenceRunner(tiny(), weights, dtype)

    judge = Judge(reference, port, torch.bfloat16, workload, "cascade", DRAWS, FALSE_ALARM_RATE)
    assert judge._exchanged is not None
    assert built == [torch.float64, torch.bfloat16]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "bitwise-equal"), (1000.0, "different")])
def test_judging_takes_little_memory_beside_the_runs(factor: float, verdict: str) -> None:
    """Beside the traces of its nine runs, a few times the largest table of the dump. Nothing is in float64 as a whole,
    which would be four times the table for each side and each step of the arithmetic."""
    found, table, peak = run(JUDGE, factor).split()
    print(f"a table of {int(table) / 1e6:.0f} MB: {int(peak) / 1e6:.0f} MB while it is judged")
    assert found == verdict
    assert int(peak) < 6 * int(table)
