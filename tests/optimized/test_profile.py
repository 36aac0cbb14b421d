"""Kernels of a replay are given to the probes that the same eager run passes."""

from __future__ import annotations

import pytest
import torch

from optimized.bench import profile
from optimized.bench.engine_steps import EngineSteps
from optimized.bench.profile import REST, launches, marks_of, places_of, profile_lines, spent
from optimized.bench.records import BenchError
from optimized.bench.slices import StepShape
from reference.config import tiny


def kernel(name: str, started: float, us: float, correlation: int, category: str = "kernel") -> dict:
    return {"cat": category, "name": name, "ts": started, "dur": us, "args": {"correlation": correlation}}


EVENTS = [
    {"cat": "user_annotation", "name": "probe embeddings", "ts": 12.0, "dur": 0.1, "args": {}},
    {"cat": "user_annotation", "name": "other", "ts": 12.5, "dur": 0.1, "args": {}},
    {"cat": "user_annotation", "name": "probe layers.0.attn.q_latent", "ts": 20.0, "dur": 0.1, "args": {}},
    *(
        {"cat": "cuda_driver", "name": "launch", "ts": issued, "args": {"correlation": number}}
        for number, issued in enumerate((5.0, 10.0, 15.0, 30.0))
    ),
    kernel("Memcpy HtoD (Pinned -> Device)", 40.0, 1.0, 0, "gpu_memcpy"),
    kernel("gemm<8>(int)", 60.0, 3.0, 2),
    kernel("_embed", 50.0, 2.0, 1),
    kernel("_choose", 70.0, 5.0, 3),
]  # fmt: skip


def test_a_kernel_belongs_to_the_first_probe_behind_its_launch() -> None:
    found = launches(EVENTS)
    assert [launch.name for launch in found] == ["_embed", "gemm<8>(int)", "_choose"]
    places = places_of(found, marks_of(EVENTS))
    assert places == ["embeddings", "layers.0.attn.q_latent", REST]
    parts = spent(places, [[launch, launch] for launch in found])
    assert [(part.probe, part.us) for part in parts] == [
        ("embeddings", 2.0),
        ("layers.0.attn.q_latent", 3.0),
        (REST, 5.0),
    ]
    assert profile_lines(parts)[0].split() == ["10.0", "us", "in", "3", "kernels"]
    assert profile_lines(parts)[2].endswith("gemm 3.0")


def test_a_step_passes_its_probes_though_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there are no kernels; the marks are those of every layer, and nothing runs otherwise for them."""
    names: list[str] = []

    def marked(call):
        with monkeypatch.context() as patch:
            patch.setattr(torch.profiler, "record_function", lambda name: names.append(name) or torch.no_grad())
            call()
        return []

    monkeypatch.setattr(profile, "traced", marked)
    assert EngineSteps(tiny(), device="cpu", backend="torch").profile(StepShape(2, 20)) == []
    of_layers = ("attn.input", "attn.q_latent", "ffn.input", "output")
    expected = {f"probe layers.{layer}.{name}" for layer in range(4) for name in of_layers}
    assert expected | {"probe embeddings", "probe final_norm", "probe logits"} <= set(names)


def test_other_kernels_in_the_replay_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [EVENTS, EVENTS]
    monkeypatch.setattr(profile, "traced", lambda call: runs.pop())
    with pytest.raises(BenchError, match=r"3 kernels eagerly and 0\.6 in a replay"):
        profile.profile_step(lambda see: None, lambda: None)
