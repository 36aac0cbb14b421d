"""Faults of the log-mel features. Source: audio specification, sections 4 and 13; cases C56 and C57."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.faults.audio_sound import MEL
from parity.faults.fault import Fault, Patch
from reference.config import AudioConfig
from reference.media import mel
from reference.media.mel import (
    FLOOR,
    HOP,
    RANGE,
    WINDOW,
    Features,
    chunk_lengths,
    corner_frequencies,
    mel_filter_bank,
    mel_of_hz,
    padded,
    power,
    reflected,
)

# S samples  L frames  K frequencies  M mel bins


def _htk_mel_of_hz(hz: float) -> float:
    return 2595.0 * math.log10(1.0 + hz / 700.0)


def _htk_hz_of_mel(mel_P: Tensor) -> Tensor:
    return 700.0 * (10.0 ** (mel_P / 2595.0) - 1.0)


def _triangles_in_mel(num_mel_bins: int, sampling_rate: int) -> Tensor:
    hz_K = torch.fft.rfftfreq(WINDOW, 1.0 / sampling_rate, dtype=torch.float64)
    mel_K1 = torch.tensor([mel_of_hz(hz) for hz in hz_K.tolist()], dtype=torch.float64)[:, None]
    hz_P = corner_frequencies(num_mel_bins)
    mel_P = torch.tensor([mel_of_hz(hz) for hz in hz_P.tolist()], dtype=torch.float64)
    rising_KM = (mel_K1 - mel_P[:-2]) / (mel_P[1:-1] - mel_P[:-2])
    falling_KM = (mel_P[2:] - mel_K1) / (mel_P[2:] - mel_P[1:-1])
    return torch.minimum(rising_KM, falling_KM).clamp(min=0.0) * 2.0 / (hz_P[2:] - hz_P[:-2])


def _zero_edges(chunk_S: Tensor) -> Tensor:
    return F.pad(chunk_S, (WINDOW // 2, WINDOW // 2))


def _windowed(chunk_S: Tensor) -> Tensor:
    """All 6001 frames, times the window."""
    return reflected(chunk_S).unfold(0, WINDOW, HOP) * mel.hann_window(chunk_S.dtype)


def _first_frame_dropped(chunk_S: Tensor, bank_KM: Tensor) -> Tensor:
    return mel.compressed(power(_windowed(chunk_S)[1:]) @ bank_KM)


def _dropped_after_maximum(chunk_S: Tensor, bank_KM: Tensor) -> Tensor:
    return mel.compressed(power(_windowed(chunk_S)) @ bank_KM)[:-1]


def _magnitude(windowed_LS: Tensor) -> Tensor:
    return torch.fft.rfft(windowed_LS).abs()


def _compressed(
    floor: float = FLOOR,
    span: float = RANGE,
    logarithm: Callable[[Tensor], Tensor] = torch.log10,
    shift: float = 4.0,
    divisor: float = 4.0,
) -> Patch:
    """Power to Y with something else in one place."""

    def compressed(mel_LM: Tensor) -> Tensor:
        log_LM = logarithm(mel_LM.clamp(min=floor))
        return (torch.maximum(log_LM, log_LM.max() - span) + shift) / divisor

    return Patch(mel, "compressed", lambda original: compressed)


def _per_clip(make: Callable[[list[Tensor], int, Tensor], list[Tensor]]) -> Patch:
    """A patch of `features`: `make(chunks, chunk size, bank)` gives Y of all chunks, [L, M] each."""

    def features(samples_S: Tensor, config: AudioConfig, dtype: torch.dtype = torch.float32) -> Features:
        size = config.sampling_rate * config.chunk_seconds
        bank_KM = mel_filter_bank(config.num_mel_bins, config.sampling_rate).to(dtype)
        made = make(list(samples_S.to(dtype).split(size)), size, bank_KM)
        return Features(torch.stack([mel_LM.mT for mel_LM in made]), chunk_lengths(len(samples_S), config))

    return Patch(mel, "features", lambda original: features)


def _log(chunk_S: Tensor, bank_KM: Tensor) -> Tensor:
    return (power(_windowed(chunk_S)[:-1]) @ bank_KM).clamp(min=FLOOR).log10()


def _limited(log_LM: Tensor, maximum: Tensor) -> Tensor:
    return (torch.maximum(log_LM, maximum - RANGE) + 4.0) / 4.0


def _clip_maximum(chunks: list[Tensor], size: int, bank_KM: Tensor) -> list[Tensor]:
    logs = [_log(padded(chunk_S, size), bank_KM) for chunk_S in chunks]
    maximum = torch.stack([log_LM.max() for log_LM in logs]).max()
    return [_limited(log_LM, maximum) for log_LM in logs]


def _valid_maximum(chunks: list[Tensor], size: int, bank_KM: Tensor) -> list[Tensor]:
    logs = [_log(padded(chunk_S, size), bank_KM) for chunk_S in chunks]
    counts = [max(1, len(chunk_S) // HOP) for chunk_S in chunks]
    return [_limited(log_LM, log_LM[:count].max()) for log_LM, count in zip(logs, counts, strict=True)]


def _unpadded(fill: Callable[[Tensor], float]) -> Callable[[list[Tensor], int, Tensor], list[Tensor]]:
    """Features of the true samples alone, then filled up with `fill(features)`."""

    def make(chunks: list[Tensor], size: int, bank_KM: Tensor) -> list[Tensor]:
        made = []
        for chunk_S in chunks:
            log_LM = _log(padded(chunk_S, max(len(chunk_S), WINDOW)), bank_KM)
            valid_LM = _limited(log_LM, log_LM.max())[: len(chunk_S) // HOP]
            value = fill(valid_LM) if len(valid_LM) else -1.5
            made.append(F.pad(valid_LM, (0, 0, 0, size // HOP - len(valid_LM)), value=value))
        return made

    return make


def _in_bfloat16(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rounded(*args: object) -> Tensor:
        exact = make(*args)
        return exact.to(torch.bfloat16).to(exact.dtype)

    return rounded


def _fault(fault_id: str, says: str, *patches: Patch, when: str = "any sound", source: str = "analysis") -> Fault:
    return Fault(fault_id, says, "V", MEL, when, source, patches=patches)


MEL_FAULTS = (
    _fault(
        "mel_htk_scale",
        "the filter bank is spaced on the HTK scale in place of Slaney's",
        Patch(mel, "mel_of_hz", lambda original: _htk_mel_of_hz),
        Patch(mel, "hz_of_mel", lambda original: _htk_hz_of_mel),
    ),
    _fault(
        "mel_no_area_norm",
        "the triangles of the filter bank all have the height 1 in place of the area 1",
        Patch(mel, "area_norm", lambda original: lambda left_M, right_M: torch.ones_like(left_M)),
    ),
    _fault(
        "mel_triangles_in_mel",
        "the sides of the filters are straight in mel in place of Hz",
        Patch(mel, "mel_filter_bank", lambda original: _triangles_in_mel),
    ),
    _fault(
        "mel_bank_bf16",
        "the filter bank is a buffer of the tower, which a cast to bfloat16 rounds",
        Patch(mel, "mel_filter_bank", _in_bfloat16),
        source="vLLM, which makes it after the cast",
    ),
    _fault(
        "hann_symmetric",
        "the window is symmetric in place of periodic",
        Patch(mel, "hann_window", lambda original: lambda dtype: torch.hann_window(WINDOW, False, dtype=dtype)),
    ),
    _fault(
        "hann_bf16",
        "the window is a buffer of the tower, which a cast to bfloat16 rounds",
        Patch(mel, "hann_window", _in_bfloat16),
        source="vLLM, which makes it after the cast",
    ),
    _fault(
        "stft_constant_pad",
        "the edges of a chunk are filled up with zeros in place of reflected",
        Patch(mel, "reflected", lambda original: _zero_edges),
        when="sound in the first or last 200 samples of a chunk",
        source="faster-whisper #1084",
    ),
    _fault(
        "stft_not_centred",
        "frame t begins at sample 160 t in place of having its middle there",
        Patch(mel, "reflected", lambda original: lambda chunk_S: F.pad(chunk_S, (0, WINDOW))),
    ),
    _fault(
        "first_frame_dropped",
        "the first frame is dropped in place of the last, so that all stand one too early",
        Patch(mel, "log_mel", lambda original: _first_frame_dropped),
    ),
    Fault(
        "last_frame_dropped_late",
        says="the last frame is dropped after the maximum of the chunk has been taken",
        visibility="L",
        first=MEL,
        visible_when="a full chunk whose last samples are its loudest",
        source="TensorRT-Model-Connect #1282",
        patches=(Patch(mel, "log_mel", lambda original: _dropped_after_maximum),),
    ),
    _fault(
        "magnitude_not_power",
        "the magnitude of the spectrum is not squared",
        Patch(mel, "power", lambda original: _magnitude),
    ),
    _fault(
        "stft_normalized",
        "the spectrum is divided by the root of the window's length",
        Patch(mel, "power", lambda original: lambda windowed_LS: original(windowed_LS) / WINDOW),
    ),
    _fault("natural_log", "the logarithm is the natural one", _compressed(logarithm=torch.log)),
    _fault("mel_floor_1e5", "the floor under the mel power is 1e-5", _compressed(floor=1e-5), when="quiet sound"),
    _fault(
        "log_of_shifted",
        "1e-10 is added to the mel power in place of a floor under it",
        _compressed(floor=-math.inf, logarithm=lambda mel_LM: (mel_LM + FLOOR).log10()),
    ),
    _fault("mel_range_missing", "nothing is raised to 8 decades below the maximum", _compressed(span=math.inf)),
    _fault("mel_affine_missing", "the last step, (L + 4) / 4, is left out", _compressed(shift=0.0, divisor=1.0)),
    Fault(
        "batch_global_max",
        says="the maximum is taken over all chunks of the clip",
        visibility="L",
        first=MEL,
        visible_when="a clip of several chunks, one quieter than the other",
        source="mlx.voxtral #5",
        patches=(_per_clip(_clip_maximum),),
    ),
    _fault(
        "max_of_valid_frames",
        "the maximum leaves out the frames behind the last whole hop",
        _per_clip(_valid_maximum),
        when="a chunk that is not full and loudest at its very end",
        source="llama.cpp",
    ),
    _fault(
        "max_before_pad",
        "the spectrum is that of the true samples, reflected at their end, and silence is appended to the features",
        _per_clip(_unpadded(lambda valid_LM: float(valid_LM.min()))),
        when="a chunk that is not full",
    ),
    _fault(
        "features_zero_padded",
        "zeros are appended to the features of the true samples",
        _per_clip(_unpadded(lambda valid_LM: 0.0)),
        when="a chunk that is not full",
        source="TensorRT-Model-Connect #1282",
    ),
)
