"""Faults of what the speech encoder is given: channels, rates, the route through int16, chunks.

Source: audio specification, sections 2, 3 and 13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from parity.faults.fault import Fault, Patch
from reference.config import NoteConfig
from reference.media import mel, sound
from reference.media.mel import Features
from reference.media.sound import SAMPLING_RATE

# S samples  C channels  N chunks  L frames  M mel bins

MEL = ("audio.mel",)


def on_chunks(edit: Callable[[Tensor], Tensor]) -> Patch:
    """A patch that edits the true samples of every chunk."""
    return Patch(mel, "padded", lambda padded: lambda chunk_S, size: padded(edit(chunk_S), size))


def _interleaved(samples_SC: Tensor, rule: str = "mean") -> Tensor:
    return samples_SC.flatten()


def _nearest(samples_S: Tensor, rate: int, target: int = SAMPLING_RATE, resampler: str = "soxr") -> Tensor:
    count = max(1, len(samples_S) * target // rate)
    return samples_S[torch.arange(count) * rate // target]


def _not_resampled(samples_S: Tensor, rate: int, target: int = SAMPLING_RATE, resampler: str = "soxr") -> Tensor:
    return samples_S


def _through_int16(divisor: float) -> Callable[[Tensor], Tensor]:
    return lambda samples_S: (samples_S.clamp(-1.0, 1.0) * 32767.0).trunc() / divisor


def _to_peak(samples_S: Tensor) -> Tensor:
    return samples_S / samples_S.abs().max().clamp(min=1e-9)


def _pre_emphasis(samples_S: Tensor) -> Tensor:
    return torch.cat((samples_S[:1], samples_S[1:] - 0.97 * samples_S[:-1]))


def _repeated(chunk_S: Tensor, size: int) -> Tensor:
    return chunk_S.repeat(-(-size // len(chunk_S)))[:size]


def _half_chunks(config: NoteConfig) -> NoteConfig:
    assert config.audio
    return replace(config, audio=replace(config.audio, chunk_seconds=config.audio.chunk_seconds // 2))


def _sorted_chunks(features: Callable[..., Features]) -> Callable[..., Features]:
    def by_length(*args: object) -> Features:
        made = features(*args)
        order = sorted(range(len(made.samples)), key=lambda index: made.samples[index])
        return Features(made.mel_NML[order], tuple(made.samples[index] for index in order))

    return by_length


SOUND_FAULTS = (
    Fault(
        "audio_first_channel",
        says="channel 0 is taken in place of the mean of the channels",
        visibility="V",
        first=MEL,
        visible_when="two channels that differ; silence against sound where they have opposite phase",
        source="SGLang's server, an early transformers proposal",
        patches=(Patch(sound, "to_mono", lambda original: lambda samples_SC, rule="mean": samples_SC[:, 0]),),
    ),
    Fault(
        "audio_channels_interleaved",
        says="interleaved channels are read as one channel of twice the length",
        visibility="V",
        first=MEL,
        visible_when="two channels",
        source="analysis",
        patches=(Patch(sound, "to_mono", lambda original: _interleaved),),
    ),
    Fault(
        "audio_nearest_resampling",
        says="samples are picked in place of filtered, so that what is above 8 kHz folds back",
        visibility="V",
        first=MEL,
        visible_when="another rate than 16 kHz",
        source="analysis",
        patches=(Patch(sound, "resample", lambda original: _nearest),),
    ),
    Fault(
        "audio_rate_ignored",
        says="samples at another rate are taken for 16 kHz",
        visibility="V",
        first=MEL,
        visible_when="another rate than 16 kHz",
        source="transformers 5.24, which trusts a missing sampling_rate",
        patches=(Patch(sound, "resample", lambda original: _not_resampled),),
    ),
    Fault(
        "audio_int16_over_32767",
        says="the int16 samples of a video are divided by 32767 in place of 32768",
        visibility="V",
        first=MEL,
        visible_when="sound of a video: features 3e-5 too high",
        source="vLLM's route",
        patches=(Patch(sound, "through_int16", lambda original: _through_int16(32767.0)),),
    ),
    Fault(
        "audio_int16_not_scaled",
        says="the int16 samples of a video are not divided at all",
        visibility="V",
        first=MEL,
        visible_when="sound of a video: mel power nine decades too high",
        source="vLLM's route",
        patches=(Patch(sound, "through_int16", lambda original: _through_int16(1.0)),),
    ),
    Fault(
        "audio_int16_skipped",
        says="the sound of a video does not go through int16",
        visibility="V",
        first=MEL,
        visible_when="sound of a video",
        source="analysis",
        patches=(Patch(sound, "through_int16", lambda original: lambda samples_S: samples_S),),
    ),
    Fault(
        "waveform_bf16",
        says="the waveform is rounded to bfloat16 together with the other inputs",
        visibility="V",
        first=MEL,
        visible_when="any sound; a noise at -50 dB",
        source="vLLM, which carries the bits as int32 to prevent it",
        patches=(on_chunks(lambda samples_S: samples_S.to(torch.bfloat16).to(samples_S.dtype)),),
    ),
    Fault(
        "audio_peak_normalized",
        says="the waveform is scaled to a peak of 1",
        visibility="V",
        first=MEL,
        visible_when="a peak that is not 1",
        source="analysis",
        patches=(on_chunks(_to_peak),),
    ),
    Fault(
        "audio_pre_emphasis",
        says="high frequencies are emphasised before the spectrum, as other front ends do",
        visibility="V",
        first=MEL,
        visible_when="any sound",
        source="analysis",
        patches=(on_chunks(_pre_emphasis),),
    ),
    Fault(
        "audio_chunk_halved",
        says="the clip is cut into chunks of half the length (30 s, as Whisper's)",
        visibility="L",
        first=MEL,
        visible_when="a clip longer than half a chunk",
        source="analysis",
        config=_half_chunks,
    ),
    Fault(
        "audio_padded_by_repetition",
        says="a chunk is filled up with its own start in place of zeros",
        visibility="V",
        first=MEL,
        visible_when="a chunk that is not full",
        source="analysis",
        patches=(Patch(mel, "padded", lambda original: _repeated),),
    ),
    Fault(
        "segments_sorted",
        says="chunks are batched by length and their order is not restored",
        visibility="L",
        first=MEL,
        visible_when="a clip longer than a chunk, with a last one that is shorter",
        source="analysis",
        patches=(Patch(mel, "features", _sorted_chunks),),
    ),
)
