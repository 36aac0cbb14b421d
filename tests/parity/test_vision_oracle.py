"""The reference's vision tower agrees with transformers over drawn towers and drawn grids; mistakes are found.

exact      all rounding promoted to float64 in both: every value to 1e-10, every choice up to ties
float32    within the noise floor measured for the same inputs
bfloat16   under `VisionNumerics.transformers`: within the floor
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import event, example, given, settings, target
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from parity.faults.fault import Fault, applied
from parity.faults.verify_vision import verify_vision
from parity.faults.vision import VISION_FAULTS
from parity.report.check_text import print_check_report
from parity.runners import NotSupportedHere
from parity.runners.reference_vision import Values, VisionReferenceRunner, run_case
from parity.runners.transformers_vision import TransformersVisionRunner
from parity.schema_vision import VISION_PROBES, vision_pattern_of
from parity.vision_case import VisionCase, VisionCaseError
from parity.vision_check import (
    boundary_cases,
    check_vision,
    drawn_cases,
    report_of_vision_check,
    synthetic_vision_checkpoint,
    vision_cases,
)
from parity.vision_compare import VisionComparison, compare_vision, compare_vision_exact
from parity.vision_order import other_order
from reference.checkpoint import synthetic_tensors, write_checkpoint, write_synthetic
from reference.config import NoteConfig, VisionConfig, slice_of, tiny
from reference.errors import CheckpointError
from reference.vision import tiny_vision, tiny_with_vision
from reference.vision_numerics import VisionNumerics

pytest.importorskip("transformers", reason="the oracle needs transformers 5.24")

NUMERICS = VisionNumerics.preset("transformers")
IS_EXPLORING = settings.get_current_profile_name() == "explore"
CONFIG = tiny_with_vision()
WEIGHTS = dict(synthetic_tensors(CONFIG))
CASES = boundary_cases(tiny_vision())
FAULTS = {fault.id: fault for fault in VISION_FAULTS}
DTYPES = (torch.float32, torch.bfloat16)


# The oracle


@st.composite
def towers(draw: st.DrawFn) -> VisionConfig:
    """Small towers: every size, the pyramid, fewer experts than a patch chooses, other squares than 2 by 2."""
    heads, experts = (
        draw(st.integers(1, 4)),
        draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 11]), min_size=1, max_size=4)),
    )
    return dataclasses.replace(
        tiny_vision(),
        embed_dim=heads * draw(st.sampled_from([4, 8, 12])),
        num_hidden_layers=len(experts),
        num_attention_heads=heads,
        intermediate_size=draw(st.integers(1, 20)),
        moe_intermediate_size=draw(st.integers(1, 12)),
        patch_size=draw(st.integers(1, 5)),
        spatial_merge_size=draw(st.sampled_from([2, 1, 3])),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-2])),
        experts=tuple(experts),
        num_experts_per_tok=draw(st.integers(1, 4)),
        adapter_out_dim=draw(st.integers(1, 12)),
    )


@st.composite
def towers_and_cases(draw: st.DrawFn) -> tuple[VisionConfig, VisionCase]:
    vision = draw(towers())
    return vision, draw(vision_cases(vision, max_patches=80))


def note_config(vision: VisionConfig) -> NoteConfig:
    """A tower before the smallest text model: one dense layer of the adapter's width."""
    text = dataclasses.replace(
        slice_of(tiny(), [0]).text, hidden_size=vision.adapter_out_dim, vocab_size=3, num_nextn_predict_layers=0
    )
    return dataclasses.replace(tiny(), text=text, vision=vision)


@contextmanager
def folder_of(config: NoteConfig, seed: int = 0, **changed: Tensor) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    weights = dict(synthetic_tensors(config, seed)) | changed
    with TemporaryDirectory() as parent:
        write_checkpoint(Path(parent) / "folder", config, weights.items())
        yield Path(parent) / "folder", weights


def against_transformers(
    config: NoteConfig, folder: Path, weights: dict[str, Tensor], case: VisionCase, dtype: torch.dtype | None
) -> tuple[VisionComparison, Values]:
    """In `dtype`, or None: in exact mode."""
    port = TransformersVisionRunner(folder, dtype or torch.float64, exact=dtype is None)
    assert config.vision
    values = run_case(port, config.vision, case)
    assert not port.lower_precision_ops

    def reference(wanted: torch.dtype) -> VisionReferenceRunner:
        return VisionReferenceRunner(config, weights, wanted, NUMERICS, exact_mode=dtype is None)

    if dtype is None:
        return compare_vision_exact(reference, values, case), values
    return compare_vision(reference, values, dtype, case), values


def plain_reference(dtype: torch.dtype) -> VisionReferenceRunner:
    return VisionReferenceRunner(CONFIG, WEIGHTS, dtype)


def assert_agrees(found: VisionComparison) -> None:
    assert found.compared
    assert not found.is_different, f"{found.first}"
    assert not [result.name for result in found.probes if result.verdict == "missing" or result.missing_rows]


TINY_CASE = (tiny_vision(), VisionCase.parse("1x4x6 2x2x2 1x2x10"))
ONE_SQUARE = (tiny_vision(), VisionCase.parse("1x2x2"))
MANY = (tiny_vision(), VisionCase.parse("1x2x2 1x4x2 1x2x4 1x2x2 2x2x6"))
NO_MERGE = (dataclasses.replace(tiny_vision(), spatial_merge_size=1), VisionCase.parse("1x1x1 1x3x5"))
ALL_EXPERTS = (dataclasses.replace(tiny_vision(), num_experts_per_tok=12), VisionCase.parse("1x4x4"))


@settings(max_examples=1000 if IS_EXPLORING else 12)
@given(towers_and_cases())
@example(TINY_CASE)
@example(ONE_SQUARE)
@example(MANY)
@example(NO_MERGE)
@example(ALL_EXPERTS)
def test_logic_is_the_same_to_ten_digits(drawn: tuple[VisionConfig, VisionCase]):
    vision, case = drawn
    config = note_config(vision)
    with folder_of(config, case.seed) as (folder, weights):
        found, values = against_transformers(config, folder, weights, case, None)
    assert_agrees(found)
    assert {choice.verdict for choice in found.choices} <= {"tie"}
    assert {vision_pattern_of(name) for name in values} == {
        probe.pattern for probe in VISION_PROBES if any(vision.experts) or ".router." not in probe.pattern
    }
    target(found.worst_excess())
    event(f"merge {vision.spatial_merge_size}, {sum(map(bool, vision.experts))} blocks with experts")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=300 if IS_EXPLORING else 4)
@given(drawn=towers_and_cases())
@example(drawn=TINY_CASE)
@example(drawn=MANY)
def test_rounding_is_within_the_noise(dtype: torch.dtype, drawn: tuple[VisionConfig, VisionCase]):
    vision, case = drawn
    config = note_config(vision)
    with folder_of(config, case.seed) as (folder, weights):
        found, _ = against_transformers(config, folder, weights, case, dtype)
    assert_agrees(found)
    target(found.worst_excess())


def test_blocks_in_bfloat16_have_the_bits_of_transformers():
    """One frame, so that products have the same number of rows on both sides, each block from the same input.

    Left out: the patch projection, a convolution there, and the router's float32 values, which are not rounded.
    """
    with folder_of(CONFIG) as (folder, weights):
        found, _ = against_transformers(CONFIG, folder, weights, VisionCase.parse("1x8x8"), torch.bfloat16)
    isolated = [r for r in found.probes if r.view == "isolated" and ".blocks." in r.name and ".router." not in r.name]
    rounded = [r for r in isolated if r.name != "vision.blocks.0.input"]
    assert len(rounded) == 6 * 10 - 1
    assert [(r.name, r.verdict) for r in rounded if r.verdict != "bitwise equal"] == []


def test_exact_ties_of_experts_are_told_from_differences_and_the_run_goes_on():
    """Four experts have the same router row and the same, largest bias; three are chosen. transformers' top-k keeps no
    order among equals."""
    prefix = "vision_encoder.blocks.4.mlp."
    gate, bias = WEIGHTS[f"{prefix}gate_weight"].clone(), WEIGHTS[f"{prefix}router_bias"].clone()
    gate[[0, 1, 4, 6]], bias[[0, 1, 4, 6]] = gate[1].clone(), bias.max() + 1
    with folder_of(CONFIG, **{f"{prefix}gate_weight": gate, f"{prefix}router_bias": bias}) as (folder, weights):
        for dtype in (None, *DTYPES):
            found, values = against_transformers(CONFIG, folder, weights, VisionCase.parse("1x4x4 1x2x2"), dtype)
            assert_agrees(found)
            chosen = values["vision.blocks.4.ffn.router.expert_ids"]
            exchanged = [row for row, ids in enumerate(chosen.tolist()) if {*ids} != {0, 1, 4}]
            ties = [choice for choice in found.choices if choice.name.startswith("vision.blocks.4.")]
            assert sorted(choice.exchange.position for choice in ties) == exchanged
            assert {choice.verdict for choice in ties} <= {"tie"}


# The check


@pytest.fixture(scope="module")
def tiny_folder() -> Iterator[Path]:
    with synthetic_vision_checkpoint() as folder:
        yield folder


def test_the_check_agrees_and_prints_its_numbers(tiny_folder: Path):
    found, config = check_vision(tiny_folder, CASES[:3:2], ("exact", "bfloat16"))
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    print_check_report(report_of_vision_check(found, config), console)
    lines = console.export_text().splitlines()
    assert lines[0].startswith("AGREES  transformers 5.24 with reference: ")
    assert found.compared == 2 * 81 + 2 * 2 * 81
    assert (found.first_different, found.skipped) == (None, ())
    assert [level.level for level in found.levels] == ["exact", "bfloat16"]


def test_the_check_finds_a_mistake_names_its_place_and_how_to_repeat_it(tiny_folder: Path):
    with applied([FAULTS["vision_merge_order_column_major"]]):
        found, config = check_vision(tiny_folder, [VisionCase.parse("1x2x4", 3)], ("exact",))
    report = report_of_vision_check(found, config)
    assert report.headline.startswith("DIFFERENT  vision.merger.grouped")
    assert report.again == "note-parity check --tower vision --level exact --workload 1x2x4 --workload-seed 3"
    assert report.notes == (
        "vision.merger.grouped: same values, other order: actual patches are expected patches 0 2 1 3 4 6 5 7",
    )


def test_a_folder_without_a_tower_cannot_be_checked(tmp_path: Path):
    write_synthetic(tmp_path / "text", tiny())
    with pytest.raises(NotSupportedHere, match=r"no vision tower to check.*vision_config"):
        check_vision(tmp_path / "text")
    with pytest.raises(NotSupportedHere, match="no vision_config"):
        TransformersVisionRunner(tmp_path / "text", torch.float32)


def test_transformers_is_not_run_on_a_tower_that_lacks_a_tensor(tiny_folder: Path, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "folder"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["vision_encoder.post_trunk_norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"missing norm\.weight"):
        TransformersVisionRunner(folder, torch.float32)


# Cases


def test_a_case_is_its_line():
    case = VisionCase.parse("1x4x6 2x2x2", seed=5)
    assert case.grids == ((1, 4, 6), (2, 2, 2))
    assert (case.text(), case.tokens) == ("1x4x6 2x2x2", 32)
    pixels = case.pixels(tiny_vision())
    assert (pixels.shape, pixels.dtype) == ((32, 147), torch.float32)
    assert torch.equal(pixels, VisionCase.parse("1x4x6 2x2x2", 5).pixels(tiny_vision()))
    assert not torch.equal(pixels, VisionCase.parse("1x4x6 2x2x2", 6).pixels(tiny_vision()))


@pytest.mark.parametrize("line", ["", "4x6", "1x4x6,2x2x2", "1x4x-6", "0x2x2", "1x4xmany"])
def test_what_is_no_case_is_refused(line: str):
    with pytest.raises(VisionCaseError, match="grid"):
        VisionCase.parse(line)


def test_drawn_cases_are_the_same_for_the_same_seed_and_can_be_run():
    drawn = drawn_cases(tiny_vision(), 20, seed=1)
    assert drawn == drawn_cases(tiny_vision(), 20, seed=1)
    assert len(drawn) == 20
    assert all(height % 2 == width % 2 == 0 for case in drawn for _, height, width in case.grids)


# Mistakes


@pytest.mark.parametrize("fault", VISION_FAULTS, ids=lambda fault: fault.id)
def test_a_fault_is_seen_where_the_catalogue_says(fault: Fault):
    outcome = verify_vision(fault, CONFIG, WEIGHTS, CASES)
    assert outcome.is_as_expected, f"first at {outcome.first}, expected {fault.first}"
    assert {*fault.first} <= {probe.pattern for probe in VISION_PROBES}


def test_faults_leave_nothing_behind():
    case = CASES[2]
    before = run_case(VisionReferenceRunner(CONFIG, WEIGHTS, torch.float64), tiny_vision(), case)
    for fault in VISION_FAULTS:
        run_case(VisionReferenceRunner(CONFIG, WEIGHTS, torch.float64, faults=[fault]), tiny_vision(), CASES[0])
    after = run_case(VisionReferenceRunner(CONFIG, WEIGHTS, torch.float64), tiny_vision(), case)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("fault_id", ["vision_attention_across_images", "vision_rope_continues_across_images"])
def test_what_shows_with_a_second_image_does_not_show_with_one(fault_id: str):
    assert not verify_vision(FAULTS[fault_id], CONFIG, WEIGHTS, CASES[:2]).is_detected


@pytest.mark.parametrize("fault_id", ["vision_attention_across_frames", "vision_rope_temporal"])
def test_what_shows_with_a_second_frame_does_not_show_with_images(fault_id: str):
    assert not verify_vision(FAULTS[fault_id], CONFIG, WEIGHTS, CASES[:3]).is_detected


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in VISION_FAULTS if f.visibility != "N"], ids=lambda fault: fault.id)
def test_a_visible_fault_shows_in_bfloat16_too(fault: Fault):
    case = VisionCase.parse("2x4x6 1x6x2")
    port = VisionReferenceRunner(CONFIG, WEIGHTS, torch.bfloat16, faults=[fault])
    values = run_case(port, tiny_vision(), case)
    assert compare_vision(plain_reference, values, torch.bfloat16, case, ("isolated",)).is_different


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text())
def test_other_roundings_raise_no_alarm(dtype: torch.dtype, case: VisionCase):
    port = VisionReferenceRunner(CONFIG, WEIGHTS, dtype, NUMERICS)
    assert_agrees(compare_vision(plain_reference, run_case(port, tiny_vision(), case), dtype, case))


# Order


def test_rows_in_another_order_are_named_with_the_permutation():
    expected = torch.arange(12.0).view(6, 2) + 1
    assert other_order(expected, expected[[0, 2, 1, 3, 5, 4]], 1e-10) == (0, 2, 1, 3, 5, 4)
    assert other_order(expected, expected, 1e-10) is None
    assert other_order(expected, expected[[0, 0, 1, 3, 5, 4]], 1e-10) is None
    assert other_order(expected, expected.flip(0) * 1.1, 1e-10) is None
    assert other_order(expected, expected[:5], 1e-10) is None


def test_patches_in_raster_order_are_named_as_such():
    case = VisionCase.parse("1x2x4")
    port = VisionReferenceRunner(CONFIG, WEIGHTS, torch.float64, faults=[FAULTS["vision_patch_rows_raster"]])
    found = compare_vision_exact(plain_reference, run_case(port, tiny_vision(), case), case)
    assert found.orders[0].name == "vision.pixels"
    # Row 2 holds the third patch of the first line of patches, which is the first of the second square.
    assert found.orders[0].permutation == (0, 1, 4, 5, 2, 3, 6, 7)


# What a candidate lacks


def test_what_a_candidate_does_not_show_is_missing_and_the_rest_is_compared():
    case = CASES[1]
    values = run_case(VisionReferenceRunner(CONFIG, WEIGHTS, torch.float64), tiny_vision(), case)
    del values["vision.trunk"]
    values["vision.merged"] = values["vision.merged"][:-2]
    found = {result.name: result for result in compare_vision_exact(plain_reference, values, case).probes}
    assert (found["vision.trunk"].verdict, found["vision.trunk"].missing_rows) == ("missing", 60)
    assert (found["vision.merged"].verdict, found["vision.merged"].missing_rows) == ("bitwise equal", 2)


def test_a_tensor_of_another_width_is_different_and_not_a_crash():
    case = CASES[0]
    values = run_case(VisionReferenceRunner(CONFIG, WEIGHTS, torch.float64), tiny_vision(), case)
    values["vision.trunk"] = values["vision.trunk"][:, :-1]
    found = compare_vision(plain_reference, values, torch.float64, case, ("isolated",), draws=0)
    assert found.first is not None
    assert (found.first.name, found.first.excess) == ("vision.trunk", float("inf"))


# Views


def test_experts_in_another_order_are_the_same_choice_with_the_same_weights():
    case = CASES[1]
    values = run_case(VisionReferenceRunner(CONFIG, WEIGHTS, torch.float64), tiny_vision(), case)
    for name in values:
        if name.endswith(("router.expert_ids", "router.weights")):
            values[name] = values[name].flip(-1)
    found = compare_vision_exact(plain_reference, values, case)
    assert_agrees(found)
    assert not found.choices


def test_a_mistake_in_one_block_is_seen_behind_it_in_cascade_and_in_it_alone_when_isolated():
    case, name = CASES[1], "vision_encoder.blocks.1.mlp.fc2.weight"
    port = VisionReferenceRunner(CONFIG, WEIGHTS | {name: WEIGHTS[name] * 2}, torch.float64)
    values = run_case(port, tiny_vision(), case)
    found = compare_vision(plain_reference, values, torch.float64, case, draws=0)
    different = {
        view: [result.name for result in found.probes if result.view == view and result.verdict == "different"]
        for view in ("cascade", "isolated")
    }
    assert different["isolated"] == ["vision.blocks.1.ffn.output", "vision.blocks.1.output"]
    assert {"vision.blocks.2.attn.core", "vision.merged"} <= {*different["cascade"]}
    assert found.first is not None
    assert (found.first.name, found.first.factor) == ("vision.blocks.1.ffn.output", pytest.approx(2.0))
