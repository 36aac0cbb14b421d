"""Two layers of the released shape, full and sliding, both with experts, against transformers in float32.

Layers 1 and 2 of the release with every width of theirs: heads, ranks, head dims, model and expert width, window 513.
What is smaller than the release, and why that hides nothing:

experts           12 in place of 256, of which 8 are chosen: an expert more is the same code with other weights
vocabulary        512 in place of 152,064: a row of the tables is the same width, and 3 GB would say nothing on layers
draft layer       left out: transformers has none
towers            left out: this is the text model
index_topk        64 in place of 2,048: no weight has this size, and at 520 tokens nothing would be selected otherwise

520 tokens in two steps: position 513 is the first to lose a key to the window, and the second step reads the caches.
Weights are synthetic. Truth, noise floor and limits are those of every comparison; the reference has one layer in
memory at a time.
"""

import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parity.compare import compare
from parity.findings import Comparison
from parity.run import traced
from parity.runners.transformers import TransformersRunner
from parity.trace import Trace
from parity.workload import Workload
from reference.cache import RequestCache
from reference.checkpoint import (
    CheckpointFolder,
    drop_layer,
    empty_text_model,
    load_into,
    load_layer,
    write_synthetic,
)
from reference.config import NoteConfig, released, slice_of
from reference.numerics import Numerics
from reference.probe import probe, rows, scope
from reference.session import StepItem

pytest.importorskip("transformers", reason="the oracle needs transformers 5.24")

NUMERICS = Numerics.preset("transformers")
WORKLOAD = Workload.parse("p:a516 v:a4")
MAX_GIB = 10
MAX_SECONDS = 600


def two_layers() -> NoteConfig:
    config = slice_of(released(), [1, 2], experts=12)
    text = replace(config.text, vocab_size=512, index_topk=64, num_nextn_predict_layers=0)
    return replace(config, text=text, vision=None, audio=None)


class StreamedReference:
    """The reference as a runner that loads each layer when it is its turn, and drops it."""

    name = "reference"

    def __init__(self, folder: CheckpointFolder, dtype: torch.dtype):
        self.folder, self.config, self.dtype = folder, folder.config, dtype
        self.model = empty_text_model(folder, NUMERICS)
        self.caches: dict[str, RequestCache] = {}
        for name in ("model.embed_tokens", "model.norm", "lm_head"):
            load_into(self.model.get_submodule(name), folder, f"{name}.", dtype)

    @torch.no_grad()
    def step(self, items: Sequence[StepItem]) -> dict[str, Tensor]:
        return {item.request: self._run(item) for item in items}

    def free(self, request: str) -> None:
        del self.caches[request]

    def _run(self, item: StepItem) -> Tensor:
        cache = self.caches.setdefault(item.request, self.model.new_cache())
        token_ids_T = torch.tensor(item.token_ids)
        positions_T = cache.layers[0].next_positions(len(token_ids_T), token_ids_T.device)
        with rows(item.request, positions_T, item.kind):
            hidden_TD = probe("embeddings", self.model.embed(token_ids_T))
            for index, layer_cache in enumerate(cache.layers):
                layer = load_layer(self.model, self.folder, index, self.dtype)
                with scope(f"layers.{index}"):
                    hidden_TD = layer(hidden_TD, layer_cache)
                drop_layer(self.model, index)
            return self.model.logits(probe("final_norm", self.model.model.norm(hidden_TD)))


class Stopwatch:
    """Seconds and the peak of memory at the end of each stage."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}
        self._start = time.monotonic()

    def stage(self, name: str) -> None:
        now = time.monotonic()
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.stages[name] = {"seconds": now - self._start, "peak_gib": peak_gib}
        self._start = now


def oracle_trace(path: Path) -> Trace:
    """The oracle's model is gone when this returns."""
    return traced(TransformersRunner(path, torch.float32), WORKLOAD)


def run(path: Path) -> None:
    """Write the checkpoint, run both sides, and print one JSON object."""
    stopwatch = Stopwatch()
    write_synthetic(path, two_layers())
    stopwatch.stage("checkpoint written")
    oracle = oracle_trace(path)
    gc.collect()
    stopwatch.stage("transformers")
    folder = CheckpointFolder.open(path, NUMERICS)
    comparison = compare(
        lambda dtype: StreamedReference(folder, dtype), oracle, torch.float32, WORKLOAD, views=("cascade",)
    )
    stopwatch.stage("reference: truth and draws")
    print(json.dumps({"stages": stopwatch.stages} | _summary(comparison, oracle)))


def _summary(comparison: Comparison, oracle: Trace) -> dict:
    return {
        "first": comparison.first and comparison.first.name,
        "not_shown_by_reference": sorted(set(oracle.names()) - {result.name for result in comparison.probes}),
        "missing_rows": sum(result.missing_rows for result in comparison.probes),
        "probes": [[r.name, r.error, r.ratio, r.limit, r.rows] for r in comparison.probes],
        "choice_rows": comparison.choice_rows,
        "choices": [choice.verdict for choice in comparison.choices],
    }


@pytest.mark.slow
@pytest.mark.timeout(2 * MAX_SECONDS)
def test_layers_of_released_geometry_agree_with_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, whose peak of memory is measured."""
    result = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "checkpoint")],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    with capsys.disabled():
        print()
        for stage, used in found["stages"].items():
            print(f"{stage}: {used['seconds']:.0f} s, peak {used['peak_gib']:.1f} GiB so far")
        for name, error, ratio, limit, _ in found["probes"]:
            print(f"{name:34s} error {error:.2e}  {ratio:4.2f}x noise (limit {limit:.2f}x)")
        print(f"choices: {found['choice_rows']} rows, {len(found['choices'])} exchanged {found['choices']}")
    assert found["first"] is None
    # One full layer (indexer) and two with experts; 520 rows each.
    assert found["choice_rows"] == 3 * 520
    choices = {"layers.0.attn.index.selected", *(f"layers.{layer}.ffn.router.expert_ids" for layer in (0, 1))}
    assert set(found["not_shown_by_reference"]) == choices
    assert found["missing_rows"] == 0
    assert {rows for *_, rows in found["probes"]} == {520}
    assert "flip" not in found["choices"]
    assert sum(used["seconds"] for used in found["stages"].values()) < MAX_SECONDS
    assert max(used["peak_gib"] for used in found["stages"].values()) < MAX_GIB


if __name__ == "__main__":
    run(Path(sys.argv[1]))
