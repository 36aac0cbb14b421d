"""The benchmark's row of a recorded vision call, at tiny widths on the CPU, by a clock that does not measure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimized.bench.case import Inputs
from optimized.bench.cases.vision import VisionShape, vision_cases
from optimized.bench.cases.vision_recorded import PEER, recorded_vision_cases
from optimized.bench.floors import Ceilings
from optimized.bench.records import OpRow
from optimized.bench.run import run_case
from optimized.vision_graphs import RecordedVision
from reference.config import released, tiny
from reference.vision import tiny_vision

# N patches  M output rows  X values of a patch  O output width


def recorded_row() -> OpRow:
    (case,) = recorded_vision_cases(tiny_vision(), [VisionShape("tiny", ((1, 2, 4),))])
    given = Inputs(tiny().text, torch.device("cpu"), backend="torch")
    return run_case(case, given, Ceilings(4.0, 4.0, 3.0, 700.0), lambda call, timing: 5.0)


def test_a_recorded_call_stands_beside_the_same_call_issued() -> None:
    row = recorded_row()
    assert (row.op, row.us) == ("vision_tower.recorded", 5.0), row.why
    (peer,) = row.peers
    assert (peer.name, peer.us) == (PEER, 5.0)
    assert row.agreement is not None
    assert row.agreement.is_green


def test_a_replay_with_other_rows_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RecordedVision.__call__

    def of_other_pixels(self: RecordedVision, pixels_NX: Tensor) -> Tensor:
        is_timed = len(pixels_NX) == 8
        return plain(self, pixels_NX.flip(0) if is_timed else pixels_NX)

    monkeypatch.setattr(RecordedVision, "__call__", of_other_pixels)
    assert recorded_row().is_red


def test_single_images_and_few_frames_are_recorded() -> None:
    vision = released().vision
    assert vision is not None
    found = [(case.tokens, case.work) for case in recorded_vision_cases(vision)]
    eager = {case.tokens: case.work for case in vision_cases(vision)}
    assert [tokens for tokens, _ in found] == [5184, 20736, 11648]
    assert all(eager[tokens] == work for tokens, work in found)
