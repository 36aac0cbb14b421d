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
from typing import NamedTuple

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

# S samples  B chunks  U hops, those between chunks included  H samples of a hop  W samples of a window
# L frames of tokens  K frequencies  M mel bins

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
    (mel_LM,) = uploaded((mel_LM,), torch.device(device))
    return MelRows(mel_LM, samples_B, tuple(len(clip.samples) for clip in clips))


class DeviceMel:
    """`DeviceMel(config, device)(waveforms)`: features computed on the device.

    Window and mel bank are made on the CPU, where their bits are the same everywhere. `dtype`: of the computation and
    the result; float64 is the truth.
    """

    def __init__(self, config: AudioConfig, device: torch.device | str, dtype: torch.dtype = torch.float32):
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self._window = hann_window(dtype).to(device)
        # Rounded to the features' dtype, as the definition has it.
        self._bank_KM = mel_filter_bank(config.num_mel_bins, config.sampling_rate).to(dtype).double().to(device)

    def __call__(self, waveforms: Sequence[Tensor]) -> MelRows:
        """waveforms: one channel each at the config's rate, float [S] on the CPU, where they are checked.

        Raises: SoundError for samples that are integers, of another shape, none, or not finite.
        """
        lengths = [chunk_lengths(len(_checked(samples_S)), self.config) for samples_S in waveforms]
        samples_B = tuple(samples for clip in lengths for samples in clip)
        pieces = [torch.empty(0, self.config.num_mel_bins, dtype=self.dtype, device=self.device)]
        if waveforms:
            # Large, so not through pinned memory of our own: the driver has read a waveform when its copy returns.
            samples_S = torch.cat([clip_S.to(self.device, self.dtype, non_blocking=True) for clip_S in waveforms])
            starts = [0, *accumulate(samples_B)]
            for first in range(0, len(samples_B), CHUNKS_AT_ONCE):
                chosen = samples_B[first : first + CHUNKS_AT_ONCE]
                pieces.append(self._features(samples_S[starts[first] : starts[first + len(chosen)]], chosen))
        return MelRows(torch.cat(pieces), samples_B, tuple(len(clip) for clip in lengths))

    def _features(self, samples_S: Tensor, lengths: Sequence[int]) -> Tensor:
        """Features of some chunks, whose samples lie one behind the other, [L, M]."""
        full = self.config.sampling_rate * self.config.chunk_seconds
        rows = _rows(lengths, full // HOP, self.device)
        log_UM = self._log_mel(_padded(samples_S, rows, full))
        count = len(log_UM)
        is_between_U = rows.frame_U[:count] >= rows.frames_U[:count]
        highest_U = log_UM.amax(-1).masked_fill(is_between_U, float("-inf"))
        highest_B = log_UM.new_full((len(lengths),), float("-inf"))
        highest_B.scatter_reduce_(0, rows.chunk_U[:count], highest_U, "amax")
        floor_L1 = (highest_B - RANGE)[rows.chunk_U[rows.row_L]][:, None]
        return (torch.maximum(log_UM[rows.row_L], floor_L1) + 4.0) / 4.0

    def _log_mel(self, padded_UH: Tensor) -> Tensor:
        """Of the windows that start with each row, as many as there are samples for, [U - 2, M]."""
        windows_UW = padded_UH.flatten().unfold(0, WINDOW, HOP)
        power_UK = torch.fft.rfft(windows_UW * self._window).abs().square()
        mel_UM = (power_UK.double() @ self._bank_KM).to(self.dtype)
        return mel_UM.clamp(min=FLOOR).log10()


class _Rows(NamedTuple):
    """One row of samples a hop, int64 on the device: the chunk of a row, its hop in the chunk, where the chunk's
    samples start, how many they are, how many windows it has; and the rows that are frames of tokens.
    """

    chunk_U: Tensor
    frame_U: Tensor
    sample_U: Tensor
    length_U: Tensor
    frames_U: Tensor
    row_L: Tensor


def _rows(lengths: Sequence[int], most_frames: int, device: torch.device) -> _Rows:
    tokens = [token_count(length) for length in lengths]
    frames = [min((count << STRIDES) + 2, most_frames) for count in tokens]
    frames_B, length_B = torch.tensor(frames), torch.tensor(lengths)
    hops_B = frames_B + WINDOW_HOPS - 1
    first_B = hops_B.cumsum(0) - hops_B
    chunk_U = torch.arange(len(lengths)).repeat_interleave(hops_B)
    frame_U = torch.arange(len(chunk_U)) - first_B[chunk_U]
    sample_U = (length_B.cumsum(0) - length_B)[chunk_U]
    # What a token has no frame for repeats the last frame there is.
    row_L = torch.cat(
        [
            first + torch.arange(count << STRIDES).clamp(max=most - 1)
            for first, count, most in zip(first_B.tolist(), tokens, frames, strict=True)
        ]
    )
    return _Rows(*uploaded((chunk_U, frame_U, sample_U, length_B[chunk_U], frames_B[chunk_U], row_L), device))


def _padded(samples_S: Tensor, rows: _Rows, full: int) -> Tensor:
    """[U, 160]: each chunk from half a window before its start on, mirrored at both edges of `full` samples."""
    lane_H = torch.arange(HOP, device=samples_S.device)
    place_UH = (rows.frame_U[:, None] * HOP - WINDOW // 2 + lane_H).abs()
    place_UH = torch.where(place_UH < full, place_UH, 2 * (full - 1) - place_UH)
    source_UH = (rows.sample_U[:, None] + place_UH).clamp(max=len(samples_S) - 1)
    return torch.where(place_UH < rows.length_U[:, None], samples_S[source_UH], 0.0)


def _checked(samples_S: Tensor) -> Tensor:
    """As the definition checks it. Where the sum is finite all samples are, which is thirty times quicker to see."""
    is_waveform = samples_S.dim() == 1 and samples_S.is_floating_point() and len(samples_S)
    return samples_S if is_waveform and samples_S.sum().isfinite() else check_waveform(samples_S)


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
