"""The optimized vision tower: packing, its own kernel, batches and cuts, and every probe against the reference.

exact      torch twins in float64: every named tensor to 1e-10
float32    within the measured floor, with torch twins over drawn towers and interpreted kernels at tiny shapes
bfloat16
"""

import dataclasses
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_good_as_eager, check_against_twin
from torch import Tensor

from optimized import vision_weights
from optimized.bench import peers_vision
from optimized.bench.case import Inputs
from optimized.bench.cases import vision as bench
from optimized.bench.floors import Ceilings
from optimized.bench.records import OpRow
from optimized.bench.run import run_case as run_row
from optimized.device import choose
from optimized.errors import KernelInputError, NotSupportedError, PlanError
from optimized.kernels.common import HAS_TRITON
from optimized.kernels.vision_heads import norm_rotate_heads_torch_, norm_rotate_heads_triton_
from optimized.moe import PackedExperts
from optimized.moe_fp8 import Fp8Experts
from optimized.vision import VisionOptions, VisionTower
from optimized.vision_graphs import RecordedVision
from optimized.vision_plan import upload, vision_runs
from optimized.vision_weights import empty_vision, pack_vision, quantized_vision, unpack_vision
from parity.engine_vision import VisionOptimizedRunner
from parity.runners.reference_vision import Values, VisionReferenceRunner, run_case
from parity.schema_vision import VISION_PROBES, vision_pattern_of
from parity.vision_case import VisionCase
from parity.vision_check import boundary_cases, check_vision, synthetic_vision_checkpoint, vision_cases
from parity.vision_compare import VisionComparison, compare_vision, compare_vision_exact
from reference.checkpoint import synthetic_tensors
from reference.checkpoint.expected_towers import VISION
from reference.config import NoteConfig, VisionConfig, released, slice_of, tiny
from reference.errors import CheckpointError
from reference.layers.vision_grid import VisionInputError, coordinates
from reference.vision import tiny_vision, tiny_with_vision
from reference.vision_numerics import VisionNumerics

# T patches  H heads  J head dim

CONFIG = tiny_with_vision()
assert CONFIG.vision is not None
VISION_CONFIG = CONFIG.vision
WEIGHTS = dict(synthetic_tensors(CONFIG))
STATE = {name.removeprefix(VISION): tensor for name, tensor in WEIGHTS.items() if name.startswith(VISION)}
CASES = boundary_cases(VISION_CONFIG)
IS_EXPLORING = settings.get_current_profile_name() == "explore"
# For interpreted kernels: two images of other shapes, and one block of each kind.
SMALL = VisionCase.parse("1x2x2 1x4x2")
SMALL_TOWER = dataclasses.replace(tiny_vision(), num_hidden_layers=2, experts=(0, 5))

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def note_config(vision: VisionConfig) -> NoteConfig:
    """A tower before the smallest text model: one dense layer of the adapter's width."""
    text = dataclasses.replace(
        slice_of(tiny(), [0]).text, hidden_size=vision.adapter_out_dim, vocab_size=3, num_nextn_predict_layers=0
    )
    return dataclasses.replace(tiny(), text=text, vision=vision)


def tower(options: VisionOptions | None = None, dtype: torch.dtype = torch.float64) -> VisionTower:
    state = {
        name: tensor.to(torch.promote_types(dtype, torch.float32) if name.endswith("router_bias") else dtype)
        for name, tensor in STATE.items()
    }
    return VisionTower.from_state(VISION_CONFIG, state, dtype, "cpu", "torch", options)


def compared(
    config: NoteConfig, case: VisionCase, dtype: torch.dtype, device: str, backend: str | None
) -> tuple[VisionComparison, Values]:
    weights = WEIGHTS if config is CONFIG else dict(synthetic_tensors(config, case.seed))
    runner = VisionOptimizedRunner(config, weights, dtype, device, backend)
    assert config.vision is not None
    values = {name: value.cpu() for name, value in run_case(runner, config.vision, case).items()}

    def reference(wanted: torch.dtype) -> VisionReferenceRunner:
        return VisionReferenceRunner(config, weights, wanted)

    if dtype == torch.float64:
        return compare_vision_exact(reference, values, case), values
    return compare_vision(reference, values, dtype, case), values


def assert_agrees(found: VisionComparison) -> None:
    assert found.compared
    assert not found.is_different, f"{found.first}"
    assert not [result.name for result in found.probes if result.verdict == "missing" or result.missing_rows]


# Against the reference


@st.composite
def towers_and_cases(draw: st.DrawFn) -> tuple[VisionConfig, VisionCase]:
    """Small towers of every size, other squares than 2 by 2, fewer experts than a patch chooses; grids for them."""
    heads = draw(st.integers(1, 4))
    experts = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 11]), max_size=3))
    vision = dataclasses.replace(
        tiny_vision(),
        embed_dim=heads * draw(st.sampled_from([4, 8, 12])),
        num_hidden_layers=len(experts),
        num_attention_heads=heads,
        intermediate_size=draw(st.integers(1, 20)),
        moe_intermediate_size=draw(st.integers(1, 12)),
        patch_size=draw(st.integers(1, 5)),
        spatial_merge_size=draw(st.sampled_from([2, 1, 3])),
        experts=tuple(experts),
        num_experts_per_tok=draw(st.integers(1, 4)),
        adapter_out_dim=draw(st.integers(1, 12)),
    )
    return vision, draw(vision_cases(vision, max_patches=80))


@settings(max_examples=1000 if IS_EXPLORING else 20)
@given(towers_and_cases())
@example((tiny_vision(), VisionCase.parse("1x2x2")))
@example((tiny_vision(), VisionCase.parse("1x2x2 1x4x2 1x2x4 1x2x2 2x2x6")))
@example((dataclasses.replace(tiny_vision(), spatial_merge_size=1), VisionCase.parse("1x1x1 1x3x5")))
def test_logic_is_the_same_to_ten_digits(drawn: tuple[VisionConfig, VisionCase]) -> None:
    vision, case = drawn
    assert_agrees(compared(note_config(vision), case, torch.float64, "cpu", "torch")[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=VisionCase.text)
def test_twins_are_within_the_floor(case: VisionCase, dtype: torch.dtype) -> None:
    found, values = compared(CONFIG, case, dtype, "cpu", "torch")
    assert_agrees(found)
    patterns = {vision_pattern_of(name) for name in values}
    assert patterns == {probe.pattern for probe in VISION_PROBES}


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_are_within_the_floor(dtype: torch.dtype) -> None:
    assert_agrees(compared(note_config(SMALL_TOWER), SMALL, dtype, DEVICE, "triton")[0])


def test_the_check_takes_the_optimized_tower() -> None:
    with synthetic_vision_checkpoint() as folder:
        found, _ = check_vision(folder, [SMALL], candidate="optimized", backend="torch")
    assert found.compared
    assert found.first_different is None


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (("blocks.1.mlp.fc1.weight", "blocks.1.mlp.fc3.weight"), "vision.blocks.1.ffn.output"),
        (("blocks.2.attn.q_norm.weight", "blocks.2.attn.k_norm.weight"), "vision.blocks.2.attn.q"),
        (("blocks.4.mlp.experts.2.fc2.weight", "blocks.4.mlp.experts.3.fc2.weight"), "vision.blocks.4.ffn.output"),
        (("patch_embed.norm.weight", "post_trunk_norm.weight"), "vision.patches"),
    ],
)
def test_the_comparison_sees_where_a_tower_is_spoiled(spoil: tuple[str, str], where: str) -> None:
    """Two tensors of one shape change places on the way into the packed storage."""
    first, second = (VISION + name for name in spoil)
    swapped = WEIGHTS | {first: WEIGHTS[second], second: WEIGHTS[first]}
    values = run_case(VisionOptimizedRunner(CONFIG, swapped, torch.float64, "cpu", "torch"), VISION_CONFIG, CASES[2])
    found = compare_vision_exact(lambda wanted: VisionReferenceRunner(CONFIG, WEIGHTS, wanted), values, CASES[2])
    assert found.first is not None
    assert found.first.name == where


# Batches


@pytest.mark.parametrize("budget", [16, 24, 41, 65536])
def test_where_a_call_is_cut_changes_nothing(budget: int) -> None:
    case = VisionCase.parse("1x4x4 3x2x2 1x2x6 1x4x6")
    pixels = case.pixels(VISION_CONFIG).double()
    whole = tower()(pixels, case.grids)
    budget = max(budget, 24)
    assert torch.allclose(tower(VisionOptions(budget))(pixels, case.grids), whole, rtol=0, atol=1e-12)
    values = run_case(_Runner(tower(VisionOptions(budget))), VISION_CONFIG, case)
    alone = run_case(_Runner(tower()), VISION_CONFIG, case)
    assert values.keys() == alone.keys()
    for name, value in values.items():
        assert torch.allclose(value.double(), alone[name].double(), rtol=0, atol=1e-12), name


class _Runner:
    """A tower as `run_case` wants it."""

    def __init__(self, tower: VisionTower):
        self.embed, self.name, self.dtype = tower, "optimized", tower.dtype


def test_images_in_any_order_equal_each_alone() -> None:
    grids = ((1, 4, 6), (2, 2, 2), (1, 2, 10), (1, 2, 2))
    pixels = [VisionCase((grid,), seed).pixels(VISION_CONFIG).double() for seed, grid in enumerate(grids)]
    alone = [tower()(pixels_TX, [grid]) for pixels_TX, grid in zip(pixels, grids, strict=True)]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        together = tower()(torch.cat([pixels[i] for i in order]), [grids[i] for i in order])
        assert torch.allclose(together, torch.cat([alone[i] for i in order]), rtol=0, atol=1e-12)


def test_watching_changes_no_bit() -> None:
    case = CASES[2]
    for dtype in (torch.bfloat16, torch.float64):
        watched = run_case(_Runner(tower(dtype=dtype)), VISION_CONFIG, case)["vision.merged"]
        assert torch.equal(tower(dtype=dtype)(case.pixels(VISION_CONFIG), case.grids), watched)


def test_a_call_without_images_has_no_rows() -> None:
    assert tower()(torch.empty(0, 147), []).shape == (0, VISION_CONFIG.adapter_out_dim)


def test_runs_are_cut_between_frames() -> None:
    runs = vision_runs([(1, 4, 4), (3, 2, 2), (1, 2, 6)], 2, 24)
    assert [run.sizes for run in runs] == [((4, 4), (2, 2), (2, 2)), ((2, 2), (2, 6))]
    assert [run.start for run in runs] == [0, 24]
    assert [run.longest for run in runs] == [16, 12]
    frames = upload(runs[0], 2, torch.device("cpu"))
    assert frames.starts_B1.tolist() == [0, 16, 20, 24]
    expected = torch.cat([coordinates(*size, 2) for size in runs[0].sizes]).T
    assert torch.equal(frames.coordinates_2N.long(), expected)


def test_a_frame_beyond_the_budget_is_refused() -> None:
    with pytest.raises(PlanError, match=r"item 1: a frame of 4 x 6 = 24 patches exceeds the budget of 20"):
        tower(VisionOptions(20))(torch.zeros(28, 147), [(1, 2, 2), (1, 4, 6)])


def test_pixels_must_fit_the_grids() -> None:
    with pytest.raises(VisionInputError, match=r"expected \(4, 147\).*found \(8, 147\)"):
        tower()(torch.zeros(8, 147), [(1, 2, 2)])
    with pytest.raises(VisionInputError, match="item 0"):
        tower()(torch.zeros(3, 147), [(1, 1, 3)])


def test_a_recorded_call_is_the_call() -> None:
    case = VisionCase.parse("1x4x4 2x2x2")
    recorded = RecordedVision(tower(), case.grids)
    for seed in range(2):
        pixels = VisionCase(case.grids, seed).pixels(VISION_CONFIG)
        assert torch.equal(recorded(pixels), tower()(pixels, case.grids))
    with pytest.raises(VisionInputError, match=r"expected \(24, 147\) as recorded, found \(4, 147\)"):
        recorded(pixels[:4])
    with pytest.raises(PlanError, match="one run"):
        RecordedVision(tower(VisionOptions(20)), case.grids)
    with pytest.raises(PlanError, match="found 0 in 0 runs"):
        RecordedVision(tower(), [])


# Weights


def test_packing_moves_every_value() -> None:
    packed = pack_vision(STATE, VISION_CONFIG, "cpu", torch.bfloat16)
    unpacked = unpack_vision(packed)
    assert unpacked.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert torch.equal(unpacked[name], tensor), name
    assert packed.nbytes == sum(tensor.nbytes for tensor in STATE.values())


def test_wrong_tensors_are_named() -> None:
    broken = {name: tensor for name, tensor in STATE.items() if name != "blocks.3.mlp.gate_weight"}
    broken["blocks.0.attn.qkv.weight"] = broken["blocks.0.attn.qkv.weight"][:-1]
    with pytest.raises(CheckpointError) as caught:
        pack_vision(broken, VISION_CONFIG, "cpu", torch.bfloat16)
    assert "blocks.3.mlp.gate_weight" in str(caught.value)
    assert "blocks.0.attn.qkv.weight" in str(caught.value)


def test_other_numerics_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="default numerics"):
        VisionTower.from_state(
            VISION_CONFIG, STATE, torch.bfloat16, "cpu", "torch", numerics=VisionNumerics.preset("vllm")
        )


def test_the_router_bias_stays_wide() -> None:
    packed = empty_vision(VISION_CONFIG, "cpu", torch.bfloat16)
    biases = [block.experts.bias_E.dtype for block in packed.blocks if block.experts]
    assert biases == [torch.float32] * 3
    assert choose("cpu", "torch").choices["norm_rotate_heads_"].backend == "torch"


# Experts in 8 bits


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_a_tower_with_8_bit_experts_is_the_scheme(backend: str) -> None:
    """As good as the twins, against the same quantization in float64; and not what the unquantized tower is."""
    state = {
        name.removeprefix(VISION): tensor
        for name, tensor in synthetic_tensors(note_config(SMALL_TOWER))
        if name.startswith(VISION)
    }
    pixels = SMALL.pixels(SMALL_TOWER)

    def run(dtype: torch.dtype, backend: str, options: VisionOptions) -> Tensor:
        cast = {name: tensor.to(torch.promote_types(tensor.dtype, dtype)) for name, tensor in state.items()}
        return VisionTower.from_state(SMALL_TOWER, cast, dtype, DEVICE, backend, options)(pixels, SMALL.grids)

    options = VisionOptions(fp8_experts=True)
    truth, eager = run(torch.float64, "torch", options), run(torch.bfloat16, "torch", options)
    assert_as_good_as_eager(run(torch.bfloat16, backend, options), eager, truth)
    wide = run(torch.float64, "torch", VisionOptions())
    assert 1e-4 < (wide - truth).norm() / wide.norm() < 0.1


def test_a_quantized_tower_holds_no_wide_experts() -> None:
    packed = quantized_vision(pack_vision(STATE, VISION_CONFIG, "cpu", torch.bfloat16))
    assert all(block.experts is None for block in packed.blocks)
    assert [block.fp8.routed for block in packed.blocks if block.fp8] == [4, 7, 12]
    names = unpack_vision(packed)
    assert not any(".experts." in name for name in names)
    assert packed.nbytes > sum(tensor.nbytes for tensor in names.values())


def test_wide_experts_are_let_go_one_block_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[weakref.ref[Tensor]] = []
    held = []
    quantize = vision_weights.quantize_experts

    def watched(packed: PackedExperts) -> Fp8Experts:
        held.append(sum(stack() is not None for stack in stacks))
        stacks.append(weakref.ref(packed.gate_up_EXD))
        return quantize(packed)

    monkeypatch.setattr(vision_weights, "quantize_experts", watched)
    quantized_vision(empty_vision(VISION_CONFIG, "cpu", torch.bfloat16))
    assert held == [0, 0, 0]


# The benchmark


def test_the_work_is_the_specifications() -> None:
    vision = released().vision
    assert vision is not None
    (grid,) = grids = ((1, 72, 72),)
    attention = 4 * 1536 * (grid[1] * grid[2]) ** 2 * 42
    trunk, merger = 2 * 5184 * (1.2145e9 + 588 * 1536), 2 * 1296 * 69.2e6
    assert bench.tower_flops(vision, grids) == pytest.approx(attention + trunk + merger, rel=1e-3)
    assert bench.video_grid(1080, 1920, 600.0, 30.0, 14) == (259, 28, 52)
    assert [case.tokens for case in bench.vision_cases(vision)] == [5184, 41472, 20736, 11648, 377104]


def tiny_row() -> OpRow:
    """At tiny widths on the CPU, by a clock that does not measure."""
    (case,) = bench.vision_cases(tiny_vision(), [bench.VisionShape("tiny", ((1, 2, 4),), has_peers=True)])
    given = Inputs(CONFIG.text, torch.device("cpu"), backend="torch")
    return run_row(case, given, Ceilings(4.0, 4.0, 3.0, 700.0), lambda call, timing: 5.0)


def test_a_row_of_the_benchmark_is_checked_and_has_peers() -> None:
    pytest.importorskip("transformers.models.dots3_note", reason="the peer needs transformers 5.24")
    row = tiny_row()
    assert row.us == 5.0, row.why
    assert [(peer.name, peer.us) for peer in row.peers] == [("transformers eager", 5.0), ("the reference, eager", 5.0)]
    assert row.agreement is not None
    assert all(peer.error < 4 * row.agreement.noise for peer in row.peers), row.peers


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_vision, "find_spec", lambda name: None)
    assert [peer.why[:13] for peer in tiny_row().peers] == ["not installed", ""]


# The kernel


def heads_inputs(T: int, H: int, J: int, dtype: torch.dtype, apart: int = 0) -> tuple[Tensor, ...]:
    """qkv with NaN between the rows of patches, two norm weights that differ inside a pair, cos and sin."""
    generator = torch.Generator().manual_seed(T * 100 + H)
    storage = torch.full((T, 3 * H * J + apart), float("nan"))
    storage[:, : 3 * H * J] = torch.randn(T, 3 * H * J, generator=generator)
    qkv = storage.to(DEVICE, dtype)[:, : 3 * H * J].unflatten(1, (3, H, J))
    norms = [(1 + torch.randn(J, generator=generator) / 4).to(DEVICE, dtype) for _ in range(2)]
    angles = 20 * torch.rand(T, J // 2, generator=generator)
    return qkv, *norms, torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "H", "J", "apart"),
    [
        pytest.param(1, 1, 2, 0, id="smallest"),
        pytest.param(3, 5, 16, 8, id="tiny"),
        pytest.param(2, 3, 12, 4, id="odd"),
        pytest.param(2, 24, 64, 0, id="released"),
    ],
)
def test_heads_are_normed_and_turned(T: int, H: int, J: int, apart: int, dtype: torch.dtype) -> None:
    def changed(change: Callable[..., None], qkv: Tensor, *rest: Tensor) -> Tensor:
        copy = torch.empty_strided(qkv.shape, qkv.stride(), dtype=qkv.dtype, device=qkv.device).copy_(qkv)
        change(copy, *rest, eps=1e-5)
        return copy

    arguments = heads_inputs(T, H, J, dtype, apart)
    check_against_twin(
        partial(changed, norm_rotate_heads_triton_), partial(changed, norm_rotate_heads_torch_), *arguments
    )
    after = arguments[0].clone()
    norm_rotate_heads_triton_(after, *arguments[1:], eps=1e-5)
    assert torch.equal(after[:, 2], arguments[0][:, 2])


@needs_triton
def test_heads_of_another_layout_are_refused() -> None:
    qkv, q_norm, k_norm, cos_sin = heads_inputs(2, 3, 8, torch.float32)
    with pytest.raises(KernelInputError, match="cos_sin"):
        norm_rotate_heads_triton_(qkv, q_norm, k_norm, cos_sin[:1], 1e-5)
    with pytest.raises(KernelInputError, match="strides"):
        norm_rotate_heads_triton_(qkv.transpose(1, 2).contiguous().transpose(1, 2), q_norm, k_norm, cos_sin, 1e-5)
