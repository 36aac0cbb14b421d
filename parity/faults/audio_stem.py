"""Faults of the convolution stem: masks, token counts, convolutions. Source: audio specification, sections 5, 6, 13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import reference.audio
from parity.faults.fault import Fault, Patch, Weights, after_construction
from reference.audio import SpeechEncoder, flattened, masked
from reference.config import AudioConfig, NoteConfig
from reference.media.mel import HOP, STRIDES, stage_frames, token_count

# L frames  C channels  P rows of frequencies  T tokens  D model

MEL = ("audio.mel",)
INPUT = ("audio.stem.input",)
CONV1 = ("audio.stem.conv1",)
STEM = ("audio.stem",)


def _first_mask_only(x_CPL: Tensor, valid: int) -> Tensor:
    return masked(x_CPL, valid) if len(x_CPL) == 1 else x_CPL


def _frames(first: Callable[[int], int], halved: Callable[[int], int]) -> Patch:
    """Valid frames that start from `first(samples)` and are halved by `halved`."""

    def frames_of(samples: int) -> tuple[int, ...]:
        frames = [first(samples)]
        for _ in range(STRIDES):
            frames.append(halved(frames[-1]))
        return tuple(frames)

    return Patch(reference.audio, "stage_frames", lambda original: frames_of)


def _half_up(frames: int) -> int:
    return (frames + 1) // 2


def _tokens_of_frames(samples: int) -> int:
    return max(1, stage_frames(samples)[-1])


def _transposed_kernels(weights: Weights, config: NoteConfig) -> Weights:
    is_kernel = {name: ".conv2d" in name and name.endswith(".weight") for name in weights}
    return {name: tensor.mT.contiguous() if is_kernel[name] else tensor for name, tensor in weights.items()}


def without(pattern: str) -> Callable[[Weights, NoteConfig], Weights]:
    """A weight edit: zeros in place of every tensor of the tower whose name contains `pattern`."""

    def edit(weights: Weights, config: NoteConfig) -> Weights:
        is_gone = {name: name.startswith("audio_encoder.") and pattern in name for name in weights}
        return {name: torch.zeros_like(tensor) if is_gone[name] else tensor for name, tensor in weights.items()}

    return edit


def _in_pieces(encoder: SpeechEncoder, config: AudioConfig, *_: Any) -> None:
    """500 frames at a time where a chunk has 6000, each with its own edges."""
    piece = config.chunk_seconds * config.sampling_rate // HOP // 12
    whole = encoder.conv2d1.forward

    def pieces(x_CPL: Tensor) -> Tensor:
        return torch.cat([whole(part_CPL) for part_CPL in x_CPL.split(piece, dim=-1)], dim=-1)

    setattr(encoder.conv2d1, "forward", pieces)  # noqa: B010 - an attribute of the instance


def _causal(encoder: SpeechEncoder, *_: Any) -> None:
    """All padding of the time axis before the first frame."""
    for convolution in (encoder.conv2d1, encoder.conv2d2, encoder.conv2d3):
        convolution.padding = (1, 0)
        convolution.register_forward_pre_hook(lambda module, args: (F.pad(args[0], (2, 0)),))


def _scaled(stem: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scaled(encoder: SpeechEncoder, *args: Any) -> Tensor:
        x_TD = stem(encoder, *args)
        return x_TD * x_TD.shape[1] ** 0.5

    return scaled


def _with_sinusoids(stem: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def added(encoder: SpeechEncoder, *args: Any) -> Tensor:
        x_TD = stem(encoder, *args)
        T, D = x_TD.shape
        rates = 10000.0 ** (-torch.arange(D // 2, dtype=torch.float64) / (D // 2 - 1))
        angles = torch.arange(T, dtype=torch.float64)[:, None] * rates
        return x_TD + torch.cat((angles.sin(), angles.cos()), dim=1).to(x_TD.dtype)

    return added


def _frequency_major(x_CPT: Tensor) -> Tensor:
    return flattened(x_CPT.transpose(0, 1))


def _tanh_gelu(gelu: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, approximate="none": gelu(x, approximate="tanh")


def _mask_before_gelu(stem: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(encoder: SpeechEncoder, mel_ML: Tensor, chunk: Any) -> Tensor:
        valid = stage_frames(chunk.samples)
        x_CPL = encoder._shown("stem.input", masked(mel_ML[None], valid[0]), chunk, 0)
        for stage, convolution in enumerate((encoder.conv2d1, encoder.conv2d2, encoder.conv2d3), start=1):
            x_CPL = F.gelu(masked(convolution(x_CPL), valid[stage]))
            x_CPL = encoder._shown(f"stem.conv{stage}", x_CPL, chunk, stage)
        return encoder.conv_out(flattened(x_CPL))

    return forward


STEM_FAULTS = (
    Fault(
        "mask_stage0_only",
        says="the features are masked, and what the convolutions make of the padding is not",
        visibility="V",
        first=CONV1,
        visible_when="a chunk whose samples end in the middle of a token",
        source="analysis",
        patches=(Patch(reference.audio, "masked", lambda original: _first_mask_only),),
    ),
    Fault(
        "mask_missing",
        says="nothing is masked: the stem sees the features of silence behind the samples",
        visibility="V",
        first=INPUT,
        visible_when="a chunk whose samples end in the middle of a token",
        source="analysis",
        patches=(Patch(reference.audio, "masked", lambda original: lambda x_CPL, valid: x_CPL),),
    ),
    Fault(
        "mask_ceil_v0",
        says="a last hop that is not whole counts as a valid frame",
        visibility="V",
        first=INPUT,
        visible_when="samples that are no multiple of 160",
        source="analysis",
        patches=(_frames(lambda samples: -(-samples // HOP), _half_up),),
    ),
    Fault(
        "mask_floor_half",
        says="valid frames are halved with the fraction dropped",
        visibility="V",
        first=CONV1,
        visible_when="an odd number of valid frames",
        source="analysis",
        patches=(_frames(lambda samples: samples // HOP, lambda frames: frames // 2),),
    ),
    Fault(
        "mask_from_tokens",
        says="all eight frames of every token count as valid",
        visibility="V",
        first=INPUT,
        visible_when="a chunk whose samples end in the middle of a token",
        source="analysis",
        patches=(_frames(lambda samples: token_count(samples) << STRIDES, _half_up),),
    ),
    Fault(
        "drop_masked_token",
        says="a chunk has as many tokens as valid frames, so that a masked last token is left out",
        visibility="V",
        first=MEL,
        visible_when="1 to 159 samples more than a multiple of 1280, one length in eight: a row is missing",
        source="llama.cpp",
        patches=(Patch(reference.audio, "token_count", lambda original: _tokens_of_frames),),
    ),
    Fault(
        "gelu_tanh",
        says="GELU is its tanh approximation",
        visibility="N",
        first=CONV1,
        visible_when="any sound",
        source="analysis",
        patches=(Patch(F, "gelu", _tanh_gelu),),
    ),
    Fault(
        "stem_relu",
        says="the activation of the stem is ReLU",
        visibility="V",
        first=CONV1,
        visible_when="any sound",
        source="analysis",
        patches=(Patch(F, "gelu", lambda gelu: lambda x, approximate="none": F.relu(x)),),
    ),
    Fault(
        "flatten_freq_major",
        says="conv_out reads all channels of a frequency, then those of the next",
        visibility="V",
        first=STEM,
        visible_when="any sound",
        source="analysis",
        patches=(Patch(reference.audio, "flattened", lambda original: _frequency_major),),
    ),
    Fault(
        "freq_time_swapped",
        says="the convolutions see time as height and frequency as width",
        visibility="V",
        first=CONV1,
        visible_when="any sound",
        source="analysis",
        weights=_transposed_kernels,
    ),
    Fault(
        "stem_time_chunking",
        says="conv_chunksize splits the frames, and each piece has padding of its own",
        visibility="L",
        first=CONV1,
        visible_when="more than 500 frames (5 s)",
        source="analysis of a key that is read and never used",
        patches=(after_construction(SpeechEncoder, _in_pieces),),
    ),
    Fault(
        "stem_causal",
        says="the convolutions pad time on the left only",
        visibility="V",
        first=CONV1,
        visible_when="any sound",
        source="the use_causal branch of vLLM",
        patches=(after_construction(SpeechEncoder, _causal),),
    ),
    Fault(
        "stem_bias_missing",
        says="the convolutions have no bias",
        visibility="V",
        first=CONV1,
        visible_when="any sound",
        source="analysis",
        weights=without("speech_encoder.conv2d1.bias"),
    ),
    Fault(
        "stem_scaled",
        says="the stem's output is multiplied by the root of its width, as embeddings sometimes are",
        visibility="V",
        first=STEM,
        visible_when="any sound",
        source="analysis",
        patches=(Patch(SpeechEncoder, "stem", _scaled),),
    ),
    Fault(
        "stem_sinusoids",
        says="Whisper's sinusoids are added to the stem's output",
        visibility="V",
        first=STEM,
        visible_when="any sound",
        source="analysis",
        patches=(Patch(SpeechEncoder, "stem", _with_sinusoids),),
    ),
    Fault(
        "mask_before_gelu",
        says="the masks come before the activations, of which GELU(0) = 0 makes no difference",
        visibility="I",
        first=CONV1,
        visible_when="never",
        source="analysis",
        patches=(Patch(SpeechEncoder, "stem", _mask_before_gelu),),
    ),
)
