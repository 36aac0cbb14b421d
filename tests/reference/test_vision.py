"""The vision tower against the specification: formula, names, rows, company, choices, refusals."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import vision_formula
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference.layers.vision_attention
from reference.checkpoint import expected_tensors, synthetic_tensors, write_checkpoint, write_synthetic
from reference.checkpoint.load_vision import empty_vision_tower, load_vision_tower
from reference.config import NoteConfig, VisionConfig, released, tiny
from reference.errors import CheckpointError, ConfigError
from reference.layers.vision_grid import VisionInputError, coordinates, segments, split_by_item
from reference.layers.vision_moe import VisionMlp, VisionMoe
from reference.probe import Recorder, concatenated, listening
from reference.vision import Grid, VisionTower, tiny_vision, tiny_with_vision
from reference.vision_numerics import PRESETS, VisionNumerics

PREFIX = "vision_encoder."
# A few thousand terms in float64: far above their rounding, far below any other choice of angle, order or expert.
FLOAT64_BOUND = 1e-12
GRIDS: tuple[Grid, ...] = ((1, 4, 6), (2, 2, 2), (1, 2, 10), (1, 6, 6))


def weights_of(config: NoteConfig, seed: int = 0) -> dict[str, Tensor]:
    return {
        name.removeprefix(PREFIX): tensor for name, tensor in synthetic_tensors(config, seed) if name.startswith(PREFIX)
    }


TINY_WEIGHTS = weights_of(tiny_with_vision())


def tower_of(
    dtype: torch.dtype = torch.float64,
    numerics: VisionNumerics | None = None,
    weights: dict[str, Tensor] | None = None,
    config: VisionConfig | None = None,
) -> VisionTower:
    tower = VisionTower(config or tiny_vision(), numerics)
    tower.load_state_dict(weights or TINY_WEIGHTS)
    return tower.to(dtype).requires_grad_(False)


def pixels_of(grids: tuple[Grid, ...], seed: int = 0, config: VisionConfig | None = None) -> Tensor:
    vision = config or tiny_vision()
    width = vision.num_channels * vision.patch_size**2
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def probes(tower: VisionTower, pixels: Tensor, grids: tuple[Grid, ...]) -> dict[str, Tensor]:
    recorder = Recorder()
    with listening(recorder):
        tower(pixels, grids)
    return concatenated(recorder.observations)


# Names and files


def test_the_released_tower_has_2195_tensors_of_the_checkpoints_names_and_shapes():
    held = empty_vision_tower(released().vision).state_dict()
    expected = {name: t for name, t in expected_tensors(released()).items() if t.bucket == "vision"}
    assert len(held) == 2195
    assert {PREFIX + name: tuple(tensor.shape) for name, tensor in held.items()} == {
        name: t.shape for name, t in expected.items()
    }
    assert all(tensor.is_meta for tensor in held.values())
    per_block = Counter(name.split(".")[1] for name in held if name.startswith("blocks."))
    assert [per_block[str(block)] for block in range(42)] == [
        8 + 3 * experts if experts else 9 for experts in released().vision.experts
    ]


def test_a_cast_leaves_the_2432_bytes_of_router_bias_in_float32():
    tower = empty_vision_tower(released().vision).to(torch.bfloat16)
    wide = {name: t for name, t in tower.state_dict().items() if t.dtype != torch.bfloat16}
    assert {*wide} == {f"blocks.{block}.mlp.router_bias" for block in range(25, 42)}
    assert {t.dtype for t in wide.values()} == {torch.float32}
    assert sum(t.numel() * t.itemsize for t in wide.values()) == 2432


def test_router_biases_keep_their_values_through_bfloat16_and_widen_with_the_model():
    tower = tower_of(torch.bfloat16)
    for block in (3, 4, 5):
        assert torch.equal(tower.blocks[block].mlp.router_bias, TINY_WEIGHTS[f"blocks.{block}.mlp.router_bias"])
    assert tower.to(torch.float64).blocks[5].mlp.router_bias.dtype == torch.float64


def test_c47_experts_follow_the_pyramid_and_names_map_one_to_one():
    values = tiny_with_vision().to_json()
    values["vision_config"] |= {"num_hidden_layers": 4, "pyramid_num_routed": [-1, -1, 2, 4]}
    config = NoteConfig.from_json(values)
    tower = VisionTower(config.vision)
    assert [len(block.mlp.experts) if isinstance(block.mlp, VisionMoe) else 0 for block in tower.blocks] == [0, 0, 2, 4]
    assert {PREFIX + name for name in tower.state_dict()} == {
        name for name, t in expected_tensors(config).items() if t.bucket == "vision"
    }
    assert tower.to(torch.bfloat16).blocks[2].mlp.router_bias.dtype == torch.float32


def test_a_folder_loads_into_the_tower(tmp_path: Path):
    write_synthetic(tmp_path / "folder", tiny_with_vision())
    tower = load_vision_tower(tmp_path / "folder", dtype=None)
    held = tower.state_dict()
    assert held.keys() == TINY_WEIGHTS.keys()
    for name, tensor in TINY_WEIGHTS.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name], tensor)
    grids = GRIDS[:1]
    pixels = pixels_of(grids)
    assert torch.equal(tower(pixels, grids), tower_of(torch.bfloat16)(pixels, grids))


def test_a_folder_without_a_tower_or_without_one_expert_is_refused(tmp_path: Path):
    write_synthetic(tmp_path / "text", tiny())
    with pytest.raises(CheckpointError, match=r"no vision tower.*vision_config"):
        load_vision_tower(tmp_path / "text")
    name = f"{PREFIX}blocks.5.mlp.experts.11.fc2.weight"
    whole = ((other, tensor) for other, tensor in synthetic_tensors(tiny_with_vision()) if other != name)
    with pytest.raises(CheckpointError, match=r"blocks\.5\.mlp\.experts\.11\.fc2"):
        write_checkpoint(tmp_path / "lacks", tiny_with_vision(), whole)


# Values


@pytest.mark.parametrize("seed", [0, 1])
def test_every_named_value_is_that_of_the_formula(seed: int):
    weights = weights_of(tiny_with_vision(), seed)
    tower = tower_of(weights=weights)
    as_numpy = {name: tensor.double().numpy() for name, tensor in weights.items()}
    for _, height, width in GRIDS:
        grid = ((1, height, width),)
        pixels = pixels_of(grid, seed)
        expected = vision_formula.frame(as_numpy, tiny_vision(), pixels.double().numpy(), height, width)
        actual = probes(tower, pixels, grid)
        assert [name.removeprefix("vision.") for name in actual] == list(expected)
        for name, value in expected.items():
            found = actual[f"vision.{name}"].double().numpy()
            assert found.shape == value.shape, name
            # The last bit of a library's float32 power is its own.
            bound = 2e-7 if name == "rope.angles" else FLOAT64_BOUND
            assert np.abs(found - value).max() <= bound * max(1.0, np.abs(value).max()), name


def test_the_tiny_tower_uses_every_expert():
    named = probes(tower_of(), pixels_of(GRIDS), GRIDS)
    for block, experts in enumerate(tiny_vision().experts):
        if experts:
            assert named[f"vision.blocks.{block}.ffn.router.expert_ids"].unique().tolist() == [*range(experts)]


# Rows


def test_rows_are_squares_in_raster_order_and_patches_of_a_square_row_by_row():
    assert coordinates(4, 4, 2).tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3],
        [2, 0], [2, 1], [3, 0], [3, 1], [2, 2], [2, 3], [3, 2], [3, 3],
    ]  # fmt: skip


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_row_of_a_patch_is_the_formula_of_the_specification(high: int, wide: int, m: int):
    height, width = high * m, wide * m
    for row, (y, x) in enumerate(coordinates(height, width, m).tolist()):
        assert row == (y // m * (width // m) + x // m) * m * m + (y % m) * m + x % m


def test_frames_of_an_item_are_segments_with_the_same_coordinates():
    frames = segments([(2, 2, 4), (1, 4, 2)], 2)
    assert [(frame.start, frame.rows) for frame in frames] == [
        (0, slice(0, 8)),
        (8, slice(8, 16)),
        (16, slice(16, 24)),
    ]
    assert torch.equal(frames[0].coordinates_T2, frames[1].coordinates_T2)
    assert frames[2].coordinates_T2.max(0).values.tolist() == [3, 1]


def test_c48_features_that_are_their_own_index_come_together_square_by_square():
    """A grid of 2 x 4 patches through the merger: the left square, then the right one."""
    config = dataclasses.replace(tiny_vision(), embed_dim=4, num_attention_heads=1)
    recorder = Recorder()
    raster = {(y, x): 4 * y + x for y in range(2) for x in range(4)}
    features = torch.tensor([[raster[y, x]] * 4 for y, x in coordinates(2, 4, 2).tolist()], dtype=torch.float32)
    with listening(recorder):
        VisionTower(config).adapter(features)
    (grouped,) = recorder.values("grouped")
    assert grouped[:, ::4].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_c49_a_picture_of_448_by_336_pixels_has_192_rows():
    grid = (1, 336 // 14, 448 // 14)
    (rows,) = split_by_item(torch.zeros(192, 1), [grid], 2)
    assert len(rows) == 192
    config = dataclasses.replace(tiny_vision(), num_hidden_layers=1, experts=(0,))
    tower = VisionTower(config).requires_grad_(False)
    assert tower(pixels_of((grid,), config=config), [grid]).shape == (192, config.adapter_out_dim)


def test_observed_rows_are_rows_of_the_call_and_of_the_output():
    recorder = Recorder()
    with listening(recorder):
        tower_of()(pixels_of(GRIDS), GRIDS, request="a")
    for name, count in (("vision.blocks.0.attn.q", 24 + 8 + 20 + 36), ("vision.merged", 22)):
        seen = [o.rows for o in recorder.observations if o.name == name]
        assert {rows.request for rows in seen} == {"a"}
        assert torch.cat([rows.positions for rows in seen]).tolist() == [*range(count)]


# Company


@given(st.permutations(range(4)), st.sampled_from([torch.bfloat16, torch.float32]))
def test_an_image_has_the_same_bits_alone_and_beside_others_in_any_order(order: list[int], dtype: torch.dtype):
    tower = TOWERS[dtype]
    pixels = [pixels_of((grid,), seed) for seed, grid in enumerate(GRIDS)]
    grids = [GRIDS[item] for item in order]
    together = split_by_item(tower(torch.cat([pixels[item] for item in order]), grids), grids, 2)
    for item, rows in zip(order, together, strict=True):
        assert torch.equal(rows, tower(pixels[item], [GRIDS[item]]))


TOWERS = {dtype: tower_of(dtype) for dtype in (torch.bfloat16, torch.float32)}


def test_a_frame_has_the_same_bits_as_the_same_image():
    tower, pixels = TOWERS[torch.bfloat16], pixels_of(((3, 4, 6),))
    assert torch.equal(tower(pixels, [(3, 4, 6)]), tower(pixels, [(1, 4, 6)] * 3))


def test_watching_changes_no_bit_and_no_images_give_no_rows():
    tower, pixels = TOWERS[torch.bfloat16], pixels_of(GRIDS)
    assert torch.equal(probes(tower, pixels, GRIDS)["vision.merged"], tower(pixels, GRIDS))
    empty = tower(pixels[:0], [])
    assert (empty.shape, empty.dtype) == ((0, 96), torch.bfloat16)


def test_heads_in_groups_give_the_same_attention(monkeypatch: pytest.MonkeyPatch):
    tower, pixels = tower_of(), pixels_of(GRIDS)
    whole = tower(pixels, GRIDS)
    monkeypatch.setattr(reference.layers.vision_attention, "WORKSPACE_BYTES", 2 * 36 * 36 * 32)
    assert (tower(pixels, GRIDS) - whole).abs().max() <= FLOAT64_BOUND


# Experts


def routed(experts: int, bias: list[float], scores_alike: bool, chosen: int) -> tuple[list[int], list[float]]:
    """Ids and weights for one patch. The score of expert e is sigmoid(e), or the same for all."""
    config = dataclasses.replace(tiny_vision(), embed_dim=4, num_attention_heads=1, num_experts_per_tok=chosen)
    moe = VisionMoe(config, experts, VisionNumerics()).requires_grad_(False)
    if not scores_alike:
        moe.gate_weight[:, 0] = torch.arange(experts)
    moe.router_bias[:] = torch.tensor(bias)
    ids, weights = moe.route(torch.eye(4)[:1])
    return ids[0].tolist(), weights[0].tolist()


def test_ties_go_to_the_lower_id():
    assert routed(6, [0.0, 1.0, 0.0, 1.0, 1.0, 0.0], True, 2)[0] == [1, 3]


def test_the_bias_chooses_and_does_not_weigh():
    ids, weights = routed(3, [5.0, 0.0, 0.0], False, 2)
    assert ids == [0, 2]
    scores = torch.tensor([0.0, 2.0]).sigmoid()
    assert weights == pytest.approx((scores / scores.sum()).tolist())


def test_a_block_with_fewer_experts_than_a_patch_chooses_uses_all_of_them():
    ids, weights = routed(2, [0.0, 0.0], True, 3)
    assert ids == [0, 1]
    assert weights == pytest.approx([0.5, 0.5])


def test_fc2_leads_down_and_fc1_is_the_gate():
    mlp = VisionMlp(2, 1, VisionNumerics()).requires_grad_(False)
    mlp.fc1.weight[:] = torch.tensor([[1.0, 0.0]])
    mlp.fc3.weight[:] = torch.tensor([[0.0, 1.0]])
    mlp.fc2.weight[:] = torch.tensor([[1.0], [0.0]])
    expected = torch.nn.functional.silu(torch.tensor(3.0)) * 5
    assert mlp(torch.tensor([[3.0, 5.0]])).tolist() == [[pytest.approx(float(expected)), 0.0]]


# Numerics


def test_roundings_do_not_matter_in_float64():
    """And the second division of the vLLM way to combine changes nothing but its 1e-9."""
    pixels = pixels_of(GRIDS)
    plain = tower_of()(pixels, GRIDS)
    rounding = {
        "rms_norm_rounding": "twice",
        "attention_rounding": "each_op",
        "swiglu_rounding": "twice",
        "expert_combine": "activation",
    }
    for name, value in rounding.items():
        other = tower_of(numerics=VisionNumerics(**{name: value}))(pixels, GRIDS)
        assert (other - plain).abs().max() <= FLOAT64_BOUND, name
    divided = tower_of(numerics=VisionNumerics(expert_combine="divided"))(pixels, GRIDS)
    assert 0 < (divided - plain).abs().max() <= 1e-7


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"rms_norm_rounding": "twice"}, "vision.patches"),
        ({"rope_table": "bfloat16"}, "vision.blocks.0.attn.q"),
        ({"attention_rounding": "each_op"}, "vision.blocks.0.attn.core"),
        ({"swiglu_rounding": "twice"}, "vision.blocks.0.ffn.output"),
        ({"router_bias": "bfloat16"}, "vision.blocks.3.ffn.router.choice"),
        ({"weight_floor": 0.1}, "vision.blocks.3.ffn.router.weights"),
        ({"expert_combine": "activation"}, "vision.blocks.3.ffn.output"),
        ({"expert_combine": "divided"}, "vision.blocks.3.ffn.output"),
    ],
)
def test_a_field_first_shows_where_it_says(change: dict, first: str):
    pixels = pixels_of(GRIDS)
    plain = probes(TOWERS[torch.bfloat16], pixels, GRIDS)
    other = probes(tower_of(torch.bfloat16, VisionNumerics(**change)), pixels, GRIDS)
    assert next(name for name in plain if not torch.equal(plain[name], other[name])) == first


def test_the_bfloat16_table_errs_as_much_as_the_specification_says():
    angles = reference.layers.vision_attention.axial_angles(torch.tensor([[y, 0] for y in range(145)]), 64)
    assert (angles[:17].bfloat16().float() - angles[:17]).abs().max() == pytest.approx(0.014, abs=0.001)
    assert (angles.bfloat16().float() - angles).abs().max() == pytest.approx(0.232, abs=0.001)


def test_presets_have_names_and_unknown_values_are_refused():
    assert VisionNumerics.preset("default") == VisionNumerics()
    assert set(PRESETS) == {"default", "transformers", "vllm"}
    with pytest.raises(ConfigError, match="no vision numerics preset 'sglang'; there are default"):
        VisionNumerics.preset("sglang")
    with pytest.raises(ConfigError, match="'rope_table' must be 'float32' or 'bfloat16', found 'float16'"):
        VisionNumerics(rope_table="float16")  # type: ignore[arg-type]


# Refusals


@pytest.mark.parametrize("grid", [(1, 3, 4), (1, 4, 3), (0, 2, 2), (1, 0, 2)])
def test_a_grid_that_cannot_be_merged_is_refused(grid: Grid):
    with pytest.raises(VisionInputError, match=r"item 1: grid .* multiples of 2 patches"):
        tower_of()(pixels_of(GRIDS[:1]), [GRIDS[0], grid])


@pytest.mark.parametrize("grid", [(1, 2, 2, 2), (2, 2), (1, 2.0, 2), 4])
def test_a_grid_that_is_none_is_refused(grid: object):
    with pytest.raises(VisionInputError, match=r"item 1: expected a grid of three integers .*, found"):
        tower_of()(pixels_of(GRIDS[:1]), [GRIDS[0], grid])


def test_pixels_of_two_frames_a_patch_are_refused_by_their_width():
    wide = torch.zeros(24, 2 * 147)
    with pytest.raises(VisionInputError, match=r"expected \(24, 147\), found \(24, 294\).*two frames a patch"):
        tower_of()(wide, GRIDS[:1])
    with pytest.raises(VisionInputError, match=r"expected \(32, 147\), found \(24, 147\)"):
        tower_of()(torch.zeros(24, 147), GRIDS[:2])
