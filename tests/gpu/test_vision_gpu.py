"""The optimized vision tower on a GPU: the sweep through compiled kernels, released geometry, no waits, replays."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_checks import assert_as_good_as_eager

from optimized.bench.cases.vision import drawn_tower
from optimized.device import choose
from optimized.vision import VisionOptions, VisionTower
from optimized.vision_graphs import RecordedVision
from optimized.vision_weights import unpack_vision
from parity.engine_vision import VisionOptimizedRunner
from parity.runners.reference_vision import VisionReferenceRunner, run_case
from parity.vision_case import VisionCase
from parity.vision_check import boundary_cases
from parity.vision_compare import compare_vision
from reference.checkpoint import synthetic_tensors
from reference.config import released
from reference.vision import VisionTower as ReferenceTower
from reference.vision import tiny_vision, tiny_with_vision

CONFIG = tiny_with_vision()
WEIGHTS = dict(synthetic_tensors(CONFIG))
RELEASED = released().vision
assert RELEASED is not None
# One block of each kind, at released widths.
THREE_BLOCKS = dataclasses.replace(RELEASED, num_hidden_layers=3, experts=(0, 4, 64))
GRIDS = [(1, 12, 16), (2, 8, 6), (1, 2, 2), (1, 30, 34)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", boundary_cases(tiny_vision()), ids=VisionCase.text)
def test_the_sweep_agrees(case: VisionCase, dtype: torch.dtype) -> None:
    runner = VisionOptimizedRunner(CONFIG, WEIGHTS, dtype, "cuda", "triton")
    values = {name: value.cpu() for name, value in run_case(runner, tiny_vision(), case).items()}
    found = compare_vision(lambda wanted: VisionReferenceRunner(CONFIG, WEIGHTS, wanted), values, dtype, case)
    assert found.compared
    assert not found.is_different, found.first


def test_released_geometry_is_as_good_as_eager() -> None:
    """Against float64, by the rows of which no expert is chosen within rounding of another."""
    tower = drawn_tower(THREE_BLOCKS, "cuda")
    pixels = torch.randn(sum(t * h * w for t, h, w in GRIDS), 588, device="cuda")
    out_MO = tower(pixels, GRIDS)
    state = unpack_vision(tower.weights)
    eager_MO, truth_MO = (_reference(state, pixels, dtype) for dtype in (torch.bfloat16, torch.float64))
    errors = [(value.double() - truth_MO).norm(dim=1) / truth_MO.norm(dim=1) for value in (out_MO, eager_MO)]
    is_clear_M = torch.maximum(*errors) < 4 * errors[1].median()
    assert is_clear_M.float().mean() > 0.8
    assert_as_good_as_eager(out_MO[is_clear_M], eager_MO[is_clear_M], truth_MO[is_clear_M])


def _reference(state: dict[str, torch.Tensor], pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.device("meta"):
        tower = ReferenceTower(THREE_BLOCKS)
    wide = torch.promote_types(dtype, torch.float32)
    cast = {name: value.to(wide if name.endswith("router_bias") else dtype) for name, value in state.items()}
    tower.load_state_dict(cast, assign=True)
    with torch.no_grad():
        return tower(pixels.to(wide), GRIDS)


def test_nothing_waits_for_the_device() -> None:
    tower = VisionTower(THREE_BLOCKS, drawn_tower(THREE_BLOCKS, "cuda").weights, choose("cuda"), VisionOptions(400))
    grids = [(1, 12, 16), (4, 8, 6), (1, 2, 2)]
    pixels = torch.randn(388, 588, device="cuda")
    expected = tower(pixels, grids)  # compiles
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = tower(pixels, grids)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(out, expected)


def test_replays_are_the_call() -> None:
    """Bitwise: the same kernels on other pixels, which choose other experts."""
    tower = drawn_tower(THREE_BLOCKS, "cuda")
    grids = [(1, 12, 16), (4, 8, 6), (1, 2, 2)]
    recorded = RecordedVision(tower, grids)
    for _ in range(3):
        pixels = torch.randn(388, 588, device="cuda")
        assert torch.equal(recorded(pixels), tower(pixels, grids))
