"""Log-mel features of many clips on the device, each chunk with no more frames than its tokens need.

The same steps as the definition's (`reference.media.mel`): reflected edges, Hann window, DFT, mel bank, logarithm,
floor below the chunk's maximum. Only their order in memory differs. A chunk's frames end two behind its tokens: from
there on every window holds zeros, whose logarithm is the least there is, so that the maximum over all frames of the
chunk is the one over these. All chunks lie in one row of samples, cut every 10 ms; windows across two are left out.

Float32, as the definition; the sums of the mel bank in float64, which no TF32 switch reaches. The library's DFT has
another order of sums on every device, so features agree within float32 rounding, not bit for bit.
Source: audio specification, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from optimized.audio_rows import uploaded
from reference.config import AudioConfig
from reference.media.mel import (
    FLOOR,
    HOP,
    RANGE,
    STRIDES,
    WINDOW,
    Features,
    check_waveform,
    chunk_lengths,
    hann_window,
    mel_filter_bank,
    token_count,
)
from reference.media.sound import SoundError

# S samples  B chunks  U frames of a group, those between chunks included  L frames of tokens  K frequencies  M mel bins

# Chunks whose spectra are in memory together: 0.6 GB at 60 s.
CHUNKS_AT_ONCE = 16
# Whole hops that a window reaches behind the start of its own.
WINDOW_HOPS = -(-WINDOW // HOP)


@dataclass(frozen=True)
class MelRows:
    """Features of the chunks of some clips, one behind the other: 8 frames for each token.

    mel_LM: float; what lies behind a chunk's valid frames is finite and read by nothing. `samples`: of each chunk.
    `chunks`: of each clip.
    """

    mel_LM: Tensor
    samples: tuple[int, ...]
    chunks: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of each clip."""
        ends = [0, *accumulate(self.chunks)]
        counts = [token_count(samples) for samples in self.samples]
        return tuple(sum(counts[start:end]) for start, end in pairwise(ends))


def mel_rows(clips: Sequence[Features], config: AudioConfig, device: torch.device | str) -> MelRows:
    """Features that were computed elsewhere, as rows on the device; their dtype stays.

    Raises: SoundError for features of another shape than the config and their sample counts say.
    """
    pieces = []
    for number, clip in enumerate(clips):
        _check_features(clip, config, f"clip {number}")
        for mel_ML, samples in zip(clip.mel_NML, clip.samples, strict=True):
            frames = token_count(samples) << STRIDES
            mel_LM = mel_ML[:, :frames].mT
            pieces += [mel_LM, mel_LM.new_zeros(frames - len(mel_LM), config.num_mel_bins)]
    samples_B = tuple(samples for clip in clips for samples in clip.samples)
    mel_LM = torch.cat(pieces) if pieces else torch.zeros(0, config.num_mel_bins)
    return MelRows(mel_LM.to(device), samples_B, tuple(len(clip.samples) for clip in clips))


def device_mel(
    waveforms: Sequence[Tensor],
    config: AudioConfig,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> MelRows:
    """Features of clips, computed on the device.

    waveforms: one channel each at `config.sampling_rate` Hz, float [S] on the CPU, where they are checked.
    Raises: SoundError for samples that are integers, of another shape, none, or not finite.
    """
    device = torch.device(device)
    lengths = [chunk_lengths(len(check_waveform(samples_S)), config) for samples_S in waveforms]
    samples_B = tuple(samples for clip in lengths for samples in clip)
    bank = _Bank(config, device, dtype)
    pieces = []
    if waveforms:
        (samples_S,) = uploaded((torch.cat([samples_S.to(dtype) for samples_S in waveforms]),), device)
        starts = [0, *accumulate(samples_B)]
        for first in range(0, len(samples_B), CHUNKS_AT_ONCE):
            chosen = samples_B[first : first + CHUNKS_AT_ONCE]
            pieces.append(_features(samples_S[starts[first] : starts[first + len(chosen)]], chosen, config, bank))
    empty_LM = torch.zeros(0, config.num_mel_bins, dtype=dtype, device=device)
    return MelRows(torch.cat([empty_LM, *pieces]), samples_B, tuple(len(clip) for clip in lengths))


class _Bank:
    """Window and mel bank on a device. Both are computed on the CPU, where their bits are the same."""

    def __init__(self, config: AudioConfig, device: torch.device, dtype: torch.dtype):
        self.window = hann_window(dtype).to(device)
        # Rounded to the features' dtype, as the definition has it.
        self.bank_KM = mel_filter_bank(config.num_mel_bins, config.sampling_rate).to(dtype).double().to(device)


def _features(samples_S: Tensor, lengths: Sequence[int], config: AudioConfig, bank: _Bank) -> Tensor:
    """Features of some chunks, whose samples lie one behind the other, [L, M]."""
    device, full = samples_S.device, config.sampling_rate * config.chunk_seconds
    tokens_B = torch.tensor([token_count(length) for length in lengths])
    frames_B = ((tokens_B << STRIDES) + 2).clamp(max=full // HOP)
    hops_B = frames_B + WINDOW_HOPS - 1
    length_B = torch.tensor(lengths)
    hop_B = hops_B.cumsum(0) - hops_B
    sample_B = length_B.cumsum(0) - length_B
    chunk_U = torch.arange(len(lengths)).repeat_interleave(hops_B)
    own_U = torch.arange(len(chunk_U)) - hop_B[chunk_U]
    # What a token has no frame for stays the last frame there is.
    rows_L = torch.cat(
        [
            first + torch.arange(int(tokens) << STRIDES).clamp(max=int(frames) - 1)
            for first, tokens, frames in zip(hop_B.tolist(), tokens_B, frames_B, strict=True)
        ]
    )
    vectors = (chunk_U, own_U, sample_B[chunk_U], length_B[chunk_U], frames_B[chunk_U], rows_L)
    chunk_U, own_U, sample_U, length_U, frames_U, rows_L = uploaded(vectors, device)

    lane_S = torch.arange(HOP, device=device)
    place_UH = (own_U[:, None] * HOP - WINDOW // 2 + lane_S).abs()
    place_UH = torch.where(place_UH < full, place_UH, 2 * (full - 1) - place_UH)
    source_UH = (sample_U[:, None] + place_UH).clamp(max=len(samples_S) - 1)
    padded_UH = torch.where(place_UH < length_U[:, None], samples_S[source_UH], 0.0)
    windows_UW = padded_UH.flatten().unfold(0, WINDOW, HOP)
    power_UK = torch.fft.rfft(windows_UW * bank.window).abs().square()
    mel_UM = (power_UK.double() @ bank.bank_KM).to(samples_S.dtype)
    log_UM = mel_UM.clamp(min=FLOOR).log10()

    count = len(log_UM)
    highest_U = log_UM.amax(-1).masked_fill(own_U[:count] >= frames_U[:count], float("-inf"))
    highest_B = log_UM.new_full((len(lengths),), float("-inf"))
    highest_B.scatter_reduce_(0, chunk_U[:count], highest_U, "amax")
    log_LM = log_UM[rows_L]
    floor_L1 = (highest_B - RANGE)[chunk_U[rows_L]][:, None]
    return (torch.maximum(log_LM, floor_L1) + 4.0) / 4.0


def _check_features(clip: Features, config: AudioConfig, name: str) -> None:
    full = config.sampling_rate * config.chunk_seconds
    N, M, frames = clip.mel_NML.shape
    if not N or len(clip.samples) != N or config.num_mel_bins != M:
        raise SoundError(
            f"{name}: expected features (chunks, {config.num_mel_bins}, frames) of {len(clip.samples)} chunks, found "
            f"{tuple(clip.mel_NML.shape)}"
        )
    for index, samples in enumerate(clip.samples):
        needed = min(token_count(samples) << STRIDES, full // HOP)
        if not 0 < samples <= full or frames < needed:
            raise SoundError(
                f"{name}: chunk {index} has {samples} samples and {frames} frames; it must have 1 to {full} samples "
                f"and at least {needed} frames"
            )
