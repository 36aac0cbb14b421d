"""Log-mel features of sound, and how many frames and tokens a length of it gives.

A clip is cut into chunks of 60 s; the last is filled up with zeros. From there on each chunk is on its own:

    frame t     samples [160 t - 200, 160 t + 200) of the chunk, reflected at its edges, times a periodic Hann window
    power       P[t, k] = |DFT of frame t at k · 40 Hz|²,   t = 0 .. 5999 (the frame that starts at the end is dropped)
    mel         S[t, m] = sum over k of P[t, k] · B[k, m],  B: triangles on the Slaney scale, of equal area
    logarithm   L = log10(max(S, 1e-10));   L = max(L, g - 8) with g the maximum of the chunk;   Y = (L + 4) / 4

g is taken over all 6000 frames, those of the zeros included. Silence is Y = -1.5, not 0. All of it is float32 (the
bank is computed in float64 and rounded once), also where the encoder is bfloat16.
Source: audio specification, sections 1.3, 3, 4 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reference.config import AudioConfig
from reference.media.sound import SoundError, refuse_non_finite

# S samples  N chunks  L frames  K frequencies (0 to half the rate)  M mel bins

WINDOW = 400  # samples; also the length of the DFT
HOP = 160  # samples between frames
STRIDES = 3  # convolutions that halve the frames
SAMPLES_PER_TOKEN = HOP * 2**STRIDES
LOWEST_HZ, HIGHEST_HZ = 0.0, 8000.0
FLOOR = 1e-10  # of the mel power, before the logarithm
RANGE = 8.0  # powers of ten below the maximum of a chunk

# The Slaney scale: linear up to 1 kHz, which is mel 15, then 27 steps for each factor of 6.4.
LINEAR_HZ_PER_MEL = 200.0 / 3.0
BREAK_HZ, BREAK_MEL = 1000.0, 15.0
LOG_STEP = math.log(6.4) / 27.0


@dataclass(frozen=True)
class Features:
    """`mel_NML`: one [mel bins, frames] picture a chunk, float32. `samples`: of each chunk, before the zeros."""

    mel_NML: Tensor
    samples: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(token_count(samples) for samples in self.samples)


def features(samples_S: Tensor, config: AudioConfig, dtype: torch.dtype = torch.float32) -> Features:
    """Log-mel features of one clip.

    samples_S: one channel at `config.sampling_rate` Hz, float. `dtype`: of the computation and the result; float64 is
    the truth.
    Raises: SoundError for samples that are integers, of another shape, none, or not finite.
    """
    lengths = chunk_lengths(len(check_waveform(samples_S)), config)
    chunk_size = config.sampling_rate * config.chunk_seconds
    bank_KM = mel_filter_bank(config.num_mel_bins, config.sampling_rate).to(dtype)
    mel_LM = [log_mel(padded(chunk_S, chunk_size), bank_KM) for chunk_S in samples_S.to(dtype).split(chunk_size)]
    return Features(torch.stack([mel.mT.contiguous() for mel in mel_LM]), lengths)


def check_waveform(samples_S: Tensor) -> Tensor:
    """The samples, float [S] with S > 0. Raises: SoundError."""
    if samples_S.dim() != 1 or not samples_S.is_floating_point():
        raise SoundError(
            f"expected one channel of float samples (S,), found {tuple(samples_S.shape)} {samples_S.dtype}; "
            f"mix channels with `to_mono`, and divide int16 by 32768"
        )
    if not len(samples_S):
        raise SoundError("the waveform has no samples; at least one is needed")
    return refuse_non_finite(samples_S, "the waveform")


def padded(chunk_S: Tensor, chunk_size: int) -> Tensor:
    """A chunk with zeros behind it, [chunk_size]."""
    return F.pad(chunk_S, (0, chunk_size - len(chunk_S)))


def log_mel(chunk_S: Tensor, bank_KM: Tensor) -> Tensor:
    """One chunk with its zeros, as [L, M] in the dtype of the two."""
    frames_LS = reflected(chunk_S).unfold(0, WINDOW, HOP)[:-1]
    return compressed(power(frames_LS * hann_window(chunk_S.dtype)) @ bank_KM)


def reflected(chunk_S: Tensor) -> Tensor:
    """Half a window more on both sides, mirrored; the outermost samples themselves are not repeated."""
    return F.pad(chunk_S[None], (WINDOW // 2, WINDOW // 2), mode="reflect")[0]


def hann_window(dtype: torch.dtype) -> Tensor:
    """0.5 - 0.5 cos(2 pi n / 400): periodic, so its last sample is not 0. On the CPU, where its bits are the same."""
    return torch.hann_window(WINDOW, periodic=True, dtype=dtype)


def power(windowed_LS: Tensor) -> Tensor:
    """Squared magnitudes of the DFT, [L, K]; not scaled."""
    return torch.fft.rfft(windowed_LS).abs().square()


def compressed(mel_LM: Tensor) -> Tensor:
    """Power to Y: logarithm, floor below the loudest frame and bin of the chunk, and shift."""
    log_LM = mel_LM.clamp(min=FLOOR).log10()
    return (torch.maximum(log_LM, log_LM.max() - RANGE) + 4.0) / 4.0


def mel_of_hz(hz: float) -> float:
    return hz / LINEAR_HZ_PER_MEL if hz < BREAK_HZ else BREAK_MEL + math.log(hz / BREAK_HZ) / LOG_STEP


def hz_of_mel(mel_P: Tensor) -> Tensor:
    return torch.where(mel_P < BREAK_MEL, mel_P * LINEAR_HZ_PER_MEL, BREAK_HZ * ((mel_P - BREAK_MEL) * LOG_STEP).exp())


def corner_frequencies(num_mel_bins: int) -> Tensor:
    """Hz, float64 [M + 2], equally spaced in mel: triangle m rises from m to m + 1 and falls to m + 2."""
    lowest, highest = mel_of_hz(LOWEST_HZ), mel_of_hz(HIGHEST_HZ)
    return hz_of_mel(torch.linspace(lowest, highest, num_mel_bins + 2, dtype=torch.float64))


def mel_filter_bank(num_mel_bins: int, sampling_rate: int) -> Tensor:
    """B, float64 [K, M]. Straight lines in Hz, not in mel; each triangle has the area 1 (in 1 / Hz · Hz).

    A triangle narrower than the 40 Hz between two frequencies may miss all of them.
    """
    hz_K1 = torch.fft.rfftfreq(WINDOW, 1.0 / sampling_rate, dtype=torch.float64)[:, None]
    corner_P = corner_frequencies(num_mel_bins)
    left_M, peak_M, right_M = corner_P[:-2], corner_P[1:-1], corner_P[2:]
    rising_KM = (hz_K1 - left_M) / (peak_M - left_M)
    falling_KM = (right_M - hz_K1) / (right_M - peak_M)
    return torch.minimum(rising_KM, falling_KM).clamp(min=0.0) * area_norm(left_M, right_M)


def area_norm(left_M: Tensor, right_M: Tensor) -> Tensor:
    """Height that gives each triangle the area 1."""
    return 2.0 / (right_M - left_M)


def chunk_lengths(samples: int, config: AudioConfig) -> tuple[int, ...]:
    """True samples of each chunk; every one is full but the last."""
    chunk_size = config.sampling_rate * config.chunk_seconds
    full, rest = divmod(samples, chunk_size)
    return (chunk_size,) * full + ((rest,) if rest else ())


def stage_frames(samples: int) -> tuple[int, ...]:
    """Valid frames of a chunk: of its features, and behind each of the three convolutions."""
    frames = [samples // HOP]
    for _ in range(STRIDES):
        frames.append((frames[-1] + 1) // 2)
    return tuple(frames)


def token_count(samples: int) -> int:
    """Tokens of a chunk, ceil(samples / 1280). One more than its valid frames where 1 to 159 samples are left over."""
    return -(-samples // SAMPLES_PER_TOKEN)


def audio_tokens(samples: int, config: AudioConfig) -> int:
    """Tokens of a clip, and so placeholders in its prompt: the sum over its chunks."""
    return sum(token_count(length) for length in chunk_lengths(samples, config))


def check_placeholders(placeholders: int, samples: int, config: AudioConfig) -> None:
    """Raises: SoundError if a prompt has not as many audio placeholders as the clip has tokens."""
    tokens = audio_tokens(samples, config)
    if placeholders != tokens:
        raise SoundError(
            f"the prompt has {placeholders} audio placeholders, and {samples} samples "
            f"({samples / config.sampling_rate:.2f} s) give {tokens} tokens: write that many"
        )
