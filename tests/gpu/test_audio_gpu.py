"""The optimized audio tower on a GPU: the sweep through compiled kernels, released geometry, no wait for the device."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from kernel_checks import assert_as_good_as_eager, check_against_twin
from torch import Tensor

from optimized.attention.varlen import varlen_attention_torch, varlen_attention_triton
from optimized.audio import AudioTower
from optimized.audio_mel import DeviceMel, mel_rows
from optimized.audio_weights import unpack_audio
from optimized.bench.cases.audio import drawn_weights
from optimized.device import choose
from parity.audio_check import check_audio_sides, tiny_with_audio
from parity.audio_clips import ClipWorkload, boundary_clips
from parity.runners.optimized_audio import OptimizedAudio
from parity.runners.reference_audio import ReferenceAudio
from reference.audio import AudioEncoder
from reference.checkpoint import synthetic_tensors
from reference.config import released
from reference.media.mel import (
    FLOOR,
    Features,
    features,
    hann_window,
    mel_filter_bank,
    padded,
    power,
    reflected,
)

CONFIG = tiny_with_audio()
WEIGHTS = dict(synthetic_tensors(CONFIG))
TINY, RELEASED = CONFIG.audio, released().audio
assert TINY is not None
assert RELEASED is not None
TWO_LAYERS = dataclasses.replace(RELEASED, encoder_layers=2)
# A masked tail; one sample; more than a chunk.
SAMPLES = (16001, 1, 112000, 960_000 + 4000)


@pytest.mark.parametrize("level", ["exact", "bfloat16", "float32"])
@pytest.mark.parametrize("workload", boundary_clips(TINY), ids=ClipWorkload.text)
def test_the_sweep_agrees(workload: ClipWorkload, level: str) -> None:
    if "@" in workload.text():
        pytest.importorskip("soxr", reason="other rates need the extra `media`")

    def candidate(level: str) -> OptimizedAudio:
        dtype = torch.float64 if level == "exact" else getattr(torch, level)
        return OptimizedAudio(CONFIG, WEIGHTS, dtype, "cuda", "torch" if level == "exact" else "triton")

    found = check_audio_sides(
        lambda level: lambda dtype: ReferenceAudio(CONFIG, WEIGHTS, dtype), candidate, [workload], (level,)
    )
    assert found.compared
    assert found.first_different is None, found.first_different.comparison.first


def noise(samples: int) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * 0.1


def test_released_geometry_is_as_good_as_eager() -> None:
    weights = drawn_weights(TWO_LAYERS, "cuda")
    clips = [features(noise(samples), TWO_LAYERS) for samples in SAMPLES]
    out_TO = torch.cat(AudioTower(TWO_LAYERS, weights, choose("cuda")).embed(clips))

    def reference(dtype: torch.dtype) -> Tensor:
        encoder = AudioEncoder(TWO_LAYERS).cuda().to(dtype).requires_grad_(False)
        encoder.load_state_dict(unpack_audio(weights))
        wide = torch.promote_types(dtype, torch.float32)
        # Every side rounds features to bfloat16 first.
        pictures = [Features(clip.mel_NML.cuda().bfloat16().to(wide), clip.samples) for clip in clips]
        return torch.cat([encoder(picture) for picture in pictures])

    assert_as_good_as_eager(out_TO, reference(torch.bfloat16), reference(torch.float64))


def float32_steps(waveform_S: Tensor) -> Tensor:
    """What one rounding of a window's largest values does to Y, [L, M], of one chunk.

    A DFT errs by about eps · ‖window‖ in each frequency, whatever little is in it; so a mel bin S = Σ B |X|² errs by
    2 eps √(S · ΣB) ‖window‖ at most, and Y by a quarter of the logarithm's share of that.
    """
    bank_KM = mel_filter_bank(128, 16000)
    chunk_S = padded(waveform_S.double(), 960_000)
    windows_LW = reflected(chunk_S).unfold(0, 400, 160)[:-1] * hann_window(torch.float64)
    mel_LM = (power(windows_LW) @ bank_KM).clamp(min=FLOOR)
    share_LM = (windows_LW.square().sum(-1, keepdim=True) * bank_KM.sum(0) / mel_LM).sqrt()
    return 0.5 * math.log10(math.e) * torch.finfo(torch.float32).eps * (1.0 + share_LM)


@pytest.mark.parametrize("samples", [*SAMPLES[:3], 959_900, 960_000])
def test_features_err_no_more_than_the_cpus_in_steps_of_float32(samples: int) -> None:
    """A bin in which little is left by cancellation errs more, and another on each device: hence the steps."""
    waveform_S = noise(samples)
    waveform_S[samples // 2 :] *= 1e-3
    truth, eager = (
        mel_rows([features(waveform_S, RELEASED, dtype)], RELEASED, "cpu").mel_LM.double()
        for dtype in (torch.float64, torch.float32)
    )
    found = DeviceMel(RELEASED, "cuda")([waveform_S]).mel_LM.cpu().double()
    step_LM = float32_steps(waveform_S)[: len(truth)]
    error, noise_floor = (((value - truth) / step_LM).abs() for value in (found, eager))
    assert error.max() <= 2 * noise_floor.max() + 1
    assert error.square().mean().sqrt() <= 2 * noise_floor.square().mean().sqrt()


def test_nothing_waits_for_the_device() -> None:
    tower = AudioTower(TWO_LAYERS, drawn_weights(TWO_LAYERS, "cuda"), choose("cuda"))
    waveforms = [noise(samples) for samples in SAMPLES]
    plain = tower.embed_sound(waveforms)  # compiles
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = tower.embed_sound(waveforms)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))


@pytest.mark.parametrize(
    ("lengths", "H"),
    [([750, 750, 1, 63, 64, 65, 0, 131], 20), ([5184], 4), ([1] * 300 + [4096, 7], 3)],
    ids=["chunks", "image", "one-long"],
)
def test_varlen_attention(lengths: list[int], H: int) -> None:
    generator = torch.Generator("cuda").manual_seed(H)
    packed = torch.randn(sum(lengths), 3, H, 64, generator=generator, device="cuda").bfloat16()
    starts_B1 = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    arguments = (*packed.unbind(1), starts_B1, max(lengths), 0.125)
    check_against_twin(varlen_attention_triton, varlen_attention_torch, *arguments)
    assert torch.equal(varlen_attention_triton(*arguments), varlen_attention_triton(*arguments))
