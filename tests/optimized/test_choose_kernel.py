"""Tokens chosen on the device are the reference's, noise and ties included; tokens are fed by row."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.choose import (
    choose_tokens_torch,
    choose_tokens_triton,
    feed_tokens_torch,
    feed_tokens_triton,
)
from reference.sampling import Sampling, choose, signed


def arguments(T: int, W: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T * W)
    logits_TW = torch.randn(T, W, generator=generator).mul(3).to(dtype)
    position_T = torch.randint(2**31, (T,), generator=generator)
    seed_T = torch.tensor([signed(2**64 - 1 - 7 * t) for t in range(T)])
    temperature_T = torch.tensor([(0.0, 0.7, 1.0, 40.0)[t % 4] for t in range(T)], dtype=torch.float64)
    return tuple(tensor.to(DEVICE) for tensor in (logits_TW, position_T, seed_T, temperature_T))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "W"), [(1, 1), (3, 7), (5, 1024), (4, 1025), (6, 5000)])
def test_the_token_is_the_reference_s(T: int, W: int, dtype: torch.dtype) -> None:
    logits_TW, position_T, seed_T, temperature_T = arguments(T, W, dtype)
    expected = []
    for t in range(T):
        sampling = Sampling(float(temperature_T[t]), 1.0, int(seed_T[t]))
        expected += choose(logits_TW[t : t + 1].cpu(), [int(position_T[t])], sampling)
    for function in (choose_tokens_torch, choose_tokens_triton):
        out_T = torch.full((T,), -7, device=DEVICE)
        function(logits_TW, position_T, seed_T, temperature_T, out_T)
        assert out_T.tolist() == expected


def test_equal_logits_go_to_the_lower_id_across_parts() -> None:
    logits_TW = torch.zeros(3, 4000, device=DEVICE)
    logits_TW[1, 1500:] = 1.0
    logits_TW[2] = float("-inf")
    logits_TW[2, 3999] = -3.0
    zeros_T = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    out_T = torch.empty_like(zeros_T)
    choose_tokens_triton(logits_TW, zeros_T, zeros_T, zeros_T.double(), out_T)
    assert out_T.tolist() == [0, 1500, 3999]


def test_a_row_of_nan_chooses_some_token() -> None:
    """A padding row may hold anything, and what is chosen for it must be an id."""
    logits_TW = torch.full((1, 100), float("nan"), device=DEVICE)
    zero_T = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    out_T = torch.full((1,), -7, device=DEVICE)
    choose_tokens_triton(logits_TW, zero_T, zero_T, zero_T.double(), out_T)
    assert 0 <= out_T.item() < 100


def test_rows_are_fed_from_their_sources() -> None:
    ids_T, chosen_R = torch.arange(300, device=DEVICE), torch.arange(1000, 1400, device=DEVICE)
    source_T = torch.full((300,), -1, dtype=torch.int32, device=DEVICE)
    source_T[7], source_T[299] = 399, 0
    expected = ids_T.clone()
    expected[7], expected[299] = 1399, 1000
    for function in (feed_tokens_torch, feed_tokens_triton):
        assert torch.equal(function(ids_T, source_T, chosen_R), expected)


def test_other_dtypes_are_refused() -> None:
    logits_TW, position_T, seed_T, temperature_T = arguments(2, 8, torch.float32)
    with pytest.raises(KernelInputError, match="temperatures"):
        choose_tokens_triton(logits_TW, position_T, seed_T, temperature_T.float(), seed_T.clone())
    with pytest.raises(KernelInputError, match="sources"):
        feed_tokens_triton(position_T, position_T, seed_T)
