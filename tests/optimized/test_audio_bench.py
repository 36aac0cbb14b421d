"""The audio rows of the benchmark, as far as they go without a GPU: every case at tiny sizes, operations by hand."""

import pytest
import torch
from kernel_checks import DEVICE

from optimized.bench.case import Inputs
from optimized.bench.cases.audio import (
    AudioShape,
    audio_cases,
    audio_flops,
    audio_shapes,
    sequence_attention_cases,
)
from optimized.bench.floors import Ceilings
from optimized.bench.run import run_case
from reference.audio import tiny_audio
from reference.config import released, tiny

CEILINGS = Ceilings(copy_tb_s=4.27, read_tb_s=4.62, write_tb_s=3.37, bf16_tflops=790)
CASES = [
    *audio_cases(tiny_audio(), [AudioShape("two clips", (33281, 1)), AudioShape("one clip", (2000,))]),
    *sequence_attention_cases([(3, 17, 2, 16)]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.shape}".replace(" ", "-"))
def test_every_case_builds_checks_and_compares_its_peers(case) -> None:
    calls = []

    def stopped(call, timing) -> float:
        calls.append(call())
        return 3.0

    # The kernels have tests of their own; interpreted, a whole tower takes a minute.
    backend = "torch" if case.op.startswith("audio_tower") and DEVICE == "cpu" else None
    row = run_case(case, Inputs(tiny().text, torch.device(DEVICE), backend=backend), CEILINGS, stopped)
    assert row.why == ""
    assert row.agreement.is_green
    assert len(calls) == 1 + sum(peer.us is not None for peer in row.peers)
    for peer in row.peers:
        assert peer.us is not None or peer.why.startswith(("not installed", "needs CUDA")), peer


def test_operations_of_the_released_encoder() -> None:
    """A full chunk, part by part from the specification's sizes."""
    frames = {1: 3000 * 64, 2: 1500 * 32, 3: 750 * 16}
    stem = 2 * 9 * (frames[1] * 480 + frames[2] * 480**2 + frames[3] * 480**2) + 2 * 750 * 7680 * 1280
    layer = 2 * 750 * (4 * 1280**2 + 3 * 1280 * 5120) + 4 * 750**2 * 1280
    adapter = 2 * 750 * (1280 * 5120 + 5120**2)
    assert audio_flops(released().audio, [960_000]) == stem + 32 * layer + adapter
    minutes, utterances, clip = audio_shapes(released().audio)
    assert minutes.chunks(released().audio) == ((960_000,) * 30,)
    assert len(utterances.clips) == 100
    assert clip.clips == (160_000,)
