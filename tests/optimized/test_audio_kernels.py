"""The kernels of the audio tower against their twins: the stem around its convolutions, and the rotation of halves."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_good_as_eager, float64
from poison import assert_same_bytes, poisoned, random, surrounded
from torch import Tensor

from optimized.audio_rows import ChunkPlace, stem_rows
from optimized.errors import KernelInputError
from optimized.kernels.common import tl, triton
from optimized.kernels.gelu import gelu
from optimized.kernels.rotate_halves import rotate_halves_torch_, rotate_halves_triton_
from optimized.kernels.stem import (
    StemRows,
    picture,
    stem_activate_torch_,
    stem_activate_triton_,
    stem_convolve,
    stem_first_torch,
    stem_first_triton,
    valid_frames,
)
from reference.media.mel import stage_frames, token_count

EXAMPLES = 10 if DEVICE == "cpu" else 2
# One sample, no valid frame, one frame, whole tokens, a masked tail, odd counts at every stage.
LENGTHS = [1, 159, 160, 1279, 1280, 1281, 1440, 2561, 5000]


def rows_of(lengths: list[int]) -> StemRows:
    return stem_rows([ChunkPlace("clip", i, n) for i, n in enumerate(lengths)], torch.device(DEVICE))[0]


def features(lengths: list[int], M: int, seed: int = 0) -> Tensor:
    """NaN in every frame that is not valid, and around."""
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for samples in lengths:
        mel_LM = torch.randn(8 * token_count(samples), M, generator=generator)
        mel_LM[stage_frames(samples)[0] :] = float("nan")
        pieces.append(mel_LM)
    return surrounded(torch.cat(pieces).to(DEVICE))


def check_in_place(kernel, twin, x: Tensor, *arguments: object) -> Tensor:
    """What works in place gets a copy of its own each time."""
    out = kernel(x.clone(), *arguments)
    truth = twin(x.double(), *float64(*arguments))
    assert_as_good_as_eager(out, twin(x.clone(), *arguments), truth)
    return out


@triton.jit
def _gelu_kernel(x, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, gelu(tl.load(x + lane)))


def test_gelu_is_closer_than_the_librarys() -> None:
    """Against float64, over the whole range and where it hurts: far out, near 0, zeros of both signs."""
    x = torch.cat((torch.linspace(-12, 12, 16381), torch.tensor([0.0, -0.0, -1e4]))).to(DEVICE)
    out, truth = torch.empty_like(x), F.gelu(x.double())
    _gelu_kernel[(1,)](x, out, BLOCK=len(x))
    error, eager = ((value.double() - truth).abs() for value in (out, F.gelu(x)))
    assert error.max() <= 4e-7
    assert error.square().mean() <= 2 * eager.square().mean()
    assert error[x < 0].max() <= 1e-7


def test_chunks_lie_behind_each_other_with_gaps() -> None:
    rows, token_T = stem_rows([ChunkPlace("a", 0, 1281), ChunkPlace("b", 0, 1)], torch.device(DEVICE))
    assert rows.chunk_R.tolist() == [0, 0, 0, 1, 1]
    assert rows.first_B.tolist() == [0, 3]
    assert rows.frames_B.tolist() == [8, 0]
    assert token_T.tolist() == [0, 1, 3]
    assert valid_frames(rows, 3).tolist() == [True, False, False, False, False]
    assert valid_frames(rows, 0).tolist() == [True] * 8 + [False] * 32


def test_the_picture_shows_each_chunk_and_zeros() -> None:
    """Whatever lies where nothing is valid, NaN included, is not seen."""
    mel_LM = features(LENGTHS, 5)
    picture_LM = picture(mel_LM, rows_of(LENGTHS), torch.float32)
    start = source = 0
    for samples in LENGTHS:
        frames, end = stage_frames(samples)[0], start + 8 * (token_count(samples) + 1)
        assert torch.equal(picture_LM[start : start + frames], mel_LM[source : source + frames])
        assert not picture_LM[start + frames : end].any()
        start, source = end, source + 8 * token_count(samples)
    assert start == len(picture_LM)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "C"), [(5, 3), (16, 16), (27, 9), (1, 1)])
def test_stem_first(M: int, C: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(M)
    rows, mel_LM = rows_of(LENGTHS), features(LENGTHS, M)
    weight_C33 = torch.randn(C, 3, 3, generator=generator).to(DEVICE, dtype)
    bias_C = random(generator, C, dtype=dtype, device=DEVICE)
    out, eager = (poisoned(f)(mel_LM, weight_C33, bias_C, rows) for f in (stem_first_triton, stem_first_torch))
    # Features are rounded to the dtype of the weights before anything else: the truth starts from those.
    truth = stem_first_torch(mel_LM.to(dtype).double(), weight_C33.double(), bias_C.double(), rows)
    assert_as_good_as_eager(out, eager, truth)
    assert not out[~valid_frames(rows, 1)].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [2, 3])
def test_stem_activate(stage: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(stage)
    rows = rows_of(LENGTHS)
    x_LPC = torch.randn(len(valid_frames(rows, stage)), 5, 7, generator=generator).to(DEVICE, dtype)
    x_LPC[~valid_frames(rows, stage)] = float("nan")
    bias_C = random(generator, 7, dtype=dtype, device=DEVICE)
    out = check_in_place(stem_activate_triton_, stem_activate_torch_, x_LPC, bias_C, rows, stage)
    assert not out[~valid_frames(rows, stage)].any()


@settings(max_examples=EXAMPLES)
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=4), st.integers(1, 20), st.integers(0, 99))
def test_chunks_of_a_picture_are_those_of_pictures_of_their_own(lengths: list[int], M: int, seed: int) -> None:
    """In float64: two stages of the stem over all chunks, and over each with exactly its valid frames."""
    generator = torch.Generator().manual_seed(seed)
    first_C33, second_C33C = torch.randn(3, 3, 3, generator=generator), torch.randn(3, 3, 3, 3, generator=generator)
    bias_C = torch.randn(3, generator=generator).double()
    first_C33, second_C33C = first_C33.double(), second_C33C.double()
    rows, mel_LM = rows_of(lengths), features(lengths, M, seed).double()
    arguments = [x.to(DEVICE) for x in (first_C33, bias_C)]
    x_LPC = stem_first_torch(mel_LM, *arguments, rows)
    x_LPC = stem_activate_torch_(stem_convolve(x_LPC, second_C33C.to(DEVICE)), bias_C.to(DEVICE), rows, 2)
    start = source = 0
    for samples in lengths:
        v0, _, v2, _ = stage_frames(samples)
        if v0:
            own_CLP = mel_LM[source : source + v0].cpu()[None]
            own_CLP = F.gelu(F.conv2d(own_CLP, first_C33[:, None], bias_C, stride=2, padding=1))
            own_CLP = F.gelu(F.conv2d(own_CLP, second_C33C.permute(0, 3, 1, 2), bias_C, stride=2, padding=1))
            torch.testing.assert_close(x_LPC[start : start + v2].cpu(), own_CLP.permute(1, 2, 0))
        start += 2 * (token_count(samples) + 1)
        source += 8 * token_count(samples)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "X", "R"), [(1, 2, 2), (5, 12, 6), (40, 16, 8), (3, 7, 0), (70, 8, 8)])
def test_rotate_halves(H: int, X: int, R: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(H)
    x_THX = random(generator, 7, H, X, dtype=dtype, device=DEVICE)
    angles_TP = torch.rand(7, R // 2, generator=generator) * 6
    cos_sin_TR = surrounded(torch.cat((angles_TP.cos(), angles_TP.sin()), -1).to(DEVICE, dtype))
    out = check_in_place(rotate_halves_triton_, rotate_halves_torch_, x_THX, cos_sin_TR)
    assert_same_bytes(out[..., R:], x_THX[..., R:])


def test_rotation_pairs_lanes_half_of_the_width_apart() -> None:
    """By a quarter turn, lane 0 goes to lane 2 and lane 2 to minus lane 0."""
    x_THX = torch.arange(6.0, device=DEVICE).view(1, 1, 6)
    quarter = torch.tensor([[0.0, 1.0, 1.0, 0.0]], device=DEVICE)
    assert rotate_halves_triton_(x_THX, quarter).flatten().tolist() == [-2.0, 1.0, 0.0, 3.0, 4.0, 5.0]


def test_they_refuse_what_they_cannot_read() -> None:
    rows = rows_of([1281])
    weight, bias = torch.ones(4, 3, 3, device=DEVICE), torch.zeros(4, device=DEVICE)
    mel = torch.zeros(16, 5, device=DEVICE)
    with pytest.raises(KernelInputError, match=r"expected mel in torch.float32, found torch.float64"):
        stem_first_triton(mel.double(), weight, bias, rows)
    with pytest.raises(KernelInputError, match=r"expected weight \(any, 3, 3\), found \(4, 9\)"):
        stem_first_triton(mel, weight.flatten(1), bias, rows)
    with pytest.raises(KernelInputError, match="expected a dense weight"):
        stem_first_triton(mel, weight.transpose(0, 1).contiguous().transpose(0, 1), bias, rows)
    with pytest.raises(KernelInputError, match=r"expected x \(6, any, any\), found \(3, 2, 4\)"):
        stem_activate_triton_(torch.zeros(3, 2, 4, device=DEVICE), bias, rows, 2)
    with pytest.raises(KernelInputError, match="expected a dense x"):
        stem_activate_triton_(torch.zeros(6, 4, 4, device=DEVICE)[:, ::2], bias, rows, 2)
    with pytest.raises(KernelInputError, match=r"expected chunk in torch\.int32"):
        stem_first_triton(mel, weight, bias, rows._replace(chunk_R=rows.chunk_R.long()))
    with pytest.raises(KernelInputError, match="an even number of rotated lanes, at most 4, found 6"):
        rotate_halves_triton_(torch.zeros(2, 1, 4, device=DEVICE), torch.zeros(2, 6, device=DEVICE))
