"""8-bit experts: the quantization against its definition, the kernels against the scheme in float64, the layer."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import DEVICE, assert_as_good_as_eager, check_against_twin
from torch import Tensor

from optimized.device import choose
from optimized.errors import KernelInputError, NotSupportedError
from optimized.kernels import experts_fp8, fp8
from optimized.kernels.common import HAS_TRITON
from optimized.kernels.experts import rows_per_tile, sort_rows_torch
from optimized.kernels.experts_fp8 import MOST_ROWS
from optimized.moe import PackedExperts
from optimized.moe_fp8 import Fp8Experts, fp8_moe, quantize_experts
from optimized.vision import Routing

# T tokens  D model  E experts  K chosen experts  F ffn width

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)


def packed_experts(E: int, D: int, F: int) -> PackedExperts:
    return PackedExperts(
        normal(E, D, seed=1, scale=D**-0.5),
        normal(E, seed=2, dtype=torch.float32, scale=0.1),
        normal(E, 2 * F, D, seed=3, scale=D**-0.5),
        normal(E, D, F, seed=4, scale=F**-0.5),
        E,
    )


def test_a_block_is_quantized_as_specified() -> None:
    w_RD = normal(130, 200, seed=0)
    q_RX, scale_GG = fp8.quantize_blocks(w_RD)
    assert q_RX.shape == (256, 256)
    assert scale_GG.shape == (2, 2)
    assert not q_RX[130:].float().any()
    assert not q_RX[:, 200:].float().any()
    for r in range(2):
        for c in range(2):
            block = w_RD[128 * r : 128 * r + 128, 128 * c : 128 * c + 128].float()
            scale = block.abs().max() / 448
            assert scale_GG[r, c] == scale
            expected = (block * (1 / scale)).to(torch.float8_e4m3fn)
            found = q_RX[128 * r : 128 * r + len(block), 128 * c : 128 * c + block.shape[1]]
            assert torch.equal(found.float(), expected.float())


def test_a_block_of_zeros_has_the_smallest_scale() -> None:
    q, scale = fp8.quantize_blocks(torch.zeros(3, 3))
    assert not q.float().any()
    assert scale.item() == pytest.approx(1e-4 / 448)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("T", "D"), [(1, 1), (3, 128), (2, 300), (5, 1536)])
def test_rows_are_quantized_alike(T: int, D: int, dtype: torch.dtype) -> None:
    x_TD = normal(T, D, seed=D, dtype=dtype)
    x_TD[0, 0] = 1000.0  # an outlier sends its neighbours below the normal numbers of e4m3
    x_TD[-1] *= 1e-3
    (q, scale), (expected_q, expected_scale) = fp8.quantize_rows_triton(x_TD), fp8.quantize_rows_torch(x_TD)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(q.float(), expected_q.float())
    zeros, smallest = fp8.quantize_rows_triton(torch.zeros(1, 5, dtype=dtype, device=DEVICE))
    assert not zeros.float().any()
    assert smallest.item() == pytest.approx(1e-10 / 448)


def widened(quantized: Fp8Experts) -> Fp8Experts:
    """With the router in float64."""
    router = {"router_weight_ED": quantized.router_weight_ED.double(), "bias_E": quantized.bias_E.double()}
    return replace(quantized, **router)


def inputs(T: int, E: int, K: int, D: int, F: int, tile_rows: int) -> tuple[Fp8Experts, Tensor, Tensor, object]:
    quantized = quantize_experts(packed_experts(E, D, F))
    ids_TK = torch.rand(T, E, generator=torch.Generator().manual_seed(T)).argsort(dim=1)[:, :K].int().to(DEVICE)
    weights_TK = torch.rand(T, K, generator=torch.Generator().manual_seed(T + 1)).to(DEVICE)
    return quantized, normal(T, D, seed=5), weights_TK, sort_rows_torch(ids_TK, E, tile_rows)


@needs_triton
@pytest.mark.parametrize(
    ("T", "E", "K", "D", "F"),
    [
        pytest.param(5, 4, 2, 80, 36, id="tiny"),
        pytest.param(19, 3, 2, 200, 130, id="two-groups"),
        pytest.param(1, 1, 1, 128, 128, id="one-of-everything"),
        pytest.param(0, 4, 2, 80, 36, id="empty"),
    ],
)
def test_products_are_as_good_as_the_twins(T: int, E: int, K: int, D: int, F: int) -> None:
    quantized, x_TD, weights_TK, plan = inputs(T, E, K, D, F, 16)
    rows = fp8.quantize_rows_torch(x_TD)
    gate_up, down = (
        (quantized.gate_up_EYX, quantized.gate_up_scale_EGG),
        (quantized.down_EXF, quantized.down_scale_EGG),
    )
    out, eager, truth = (
        f(*rows, *gate_up, plan, dtype)
        for f, dtype in (
            (experts_fp8.fp8_swiglu_triton, torch.bfloat16),
            (experts_fp8.fp8_swiglu_torch, torch.bfloat16),
            (experts_fp8.fp8_swiglu_torch, torch.float64),
        )
    )
    widened = [experts_fp8._widened_rows(*pair, torch.float64) for pair in (out, eager, truth)]
    assert_as_good_as_eager(widened[0].bfloat16(), widened[1].bfloat16(), widened[2])
    assert not widened[0][:, F:].any()
    out_TKD, eager_TKD, truth_TKD = (
        f(*eager, *down, weights_TK, plan, D, dtype)
        for f, dtype in (
            (experts_fp8.fp8_down_triton, torch.bfloat16),
            (experts_fp8.fp8_down_torch, torch.bfloat16),
            (experts_fp8.fp8_down_torch, torch.float64),
        )
    )
    assert_as_good_as_eager(out_TKD, eager_TKD, truth_TKD)


@needs_triton
def test_rows_are_added_and_divided() -> None:
    for T, K, D in ((3, 2, 80), (2, 1, 1030), (0, 2, 8)):
        weights_TK = torch.rand(T, K, generator=torch.Generator().manual_seed(D)).to(DEVICE)
        weights_TK[:1] = 0.0
        check_against_twin(
            experts_fp8.fp8_combine_triton, experts_fp8.fp8_combine_torch, normal(T, K, D, seed=T), weights_TK
        )


@needs_triton
def test_the_layer_is_the_scheme() -> None:
    quantized, x_TD = quantize_experts(packed_experts(5, 80, 36)), normal(12, 80, seed=6)
    routing = Routing(2)
    outputs = [
        fp8_moe(x, quantized, routing, choose(DEVICE, backend))[0] for x, backend in ((x_TD, "triton"), (x_TD, "torch"))
    ]
    wide = widened(quantized)
    truth, observed = fp8_moe(x_TD.double(), wide, routing, choose(DEVICE, "torch"), observe=True)
    assert observed is not None
    assert_as_good_as_eager(*outputs, truth)


@needs_triton
def test_tiles_are_no_larger_than_there_are() -> None:
    """As many rows for each expert as other experts stretch their tiles for."""
    T, E, K = 140, 2, 2
    assert rows_per_tile(T, K, E, torch.bfloat16) > MOST_ROWS
    quantized, x_TD = quantize_experts(packed_experts(E, 80, 36)), normal(T, 80, seed=6)
    out_TD, eager_TD = (fp8_moe(x_TD, quantized, Routing(K), choose(DEVICE, name))[0] for name in ("triton", "torch"))
    wide = widened(quantized)
    assert_as_good_as_eager(out_TD, eager_TD, fp8_moe(x_TD.double(), wide, Routing(K), choose(DEVICE, "torch"))[0])


def test_sums_of_weights_divide() -> None:
    """Twice the scaling factor gives the same output: the division takes it out again."""
    quantized, x_TD = quantize_experts(packed_experts(5, 80, 36)), normal(12, 80, seed=6).double()
    wide = widened(quantized)
    once, twice = (fp8_moe(x_TD, wide, Routing(2, scaling), choose(DEVICE, "torch"))[0] for scaling in (1.0, 2.0))
    assert torch.allclose(once, twice, rtol=1e-12, atol=0)


def test_released_bytes() -> None:
    """10,027,008 bytes and 2,448 of scales for an expert, at released widths."""
    found = quantize_experts(
        PackedExperts(*(torch.zeros(s) for s in ((1, 1536), (1,), (1, 4224, 1536), (1, 1536, 2112))), 1)
    )
    assert found.gate_up_EYX.shape == (1, 4352, 1536)
    assert found.gate_up_scale_EGG.shape == (1, 34, 12)
    assert found.down_EXF.shape == (1, 1536, 2176)
    assert found.down_scale_EGG.shape == (1, 12, 17)
    assert found.nbytes == 10_027_008 + 2_448


def test_what_is_not_there_is_refused() -> None:
    packed = packed_experts(3, 8, 4)
    with pytest.raises(NotSupportedError, match="shared"):
        quantize_experts(PackedExperts(packed.router_weight_ED, packed.bias_E, packed.gate_up_EXD, packed.down_EDF, 2))


@needs_triton
def test_other_activations_are_refused() -> None:
    quantized, x_TD, _, plan = inputs(3, 4, 2, 80, 36, 16)
    with pytest.raises(KernelInputError, match="bfloat16 activations"):
        experts_fp8.fp8_swiglu_triton(
            *fp8.quantize_rows_torch(x_TD), quantized.gate_up_EYX, quantized.gate_up_scale_EGG, plan, torch.float32
        )
