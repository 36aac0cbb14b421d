"""Other speech encoders on the weights of the optimized one, as peers: transformers' eager code, and the reference.

Both get features as pictures of whole chunks, as they want them, made beforehand. The reference takes one chunk after
the other, transformers all of them padded to the longest. What they return for the smaller call of the check is held
to its truth. Source: audio specification, sections 7 and 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from optimized.audio_mel import MelRows
from optimized.audio_weights import PackedAudio, unpack_audio
from optimized.bench.case import AbsentPeer, Peer
from reference.config import AudioConfig, released
from reference.media.mel import STRIDES, Features, token_count

# N chunks  M mel bins  L frames

# Relative to the truth: more than 32 layers of bfloat16 add up to, far less than a mistake in the maths.
DEPTH_LIMIT = 0.1
TRANSFORMERS = "transformers eager"
REFERENCE = "the reference, eager"
MODULE = "transformers.models.dots3_note"


@dataclass(frozen=True)
class AudioCall:
    mel: MelRows

    def features(self) -> Features:
        """All chunks as pictures as long as the longest one, [N, M, L]."""
        counts = [token_count(samples) << STRIDES for samples in self.mel.samples]
        rows_NLM = self.mel.mel_LM.new_zeros(len(counts), max(counts), self.mel.mel_LM.shape[1])
        for picture_LM, piece_LM in zip(rows_NLM, self.mel.mel_LM.split(counts), strict=True):
            picture_LM[: len(piece_LM)] = piece_LM
        return Features(rows_NLM.mT.contiguous(), self.mel.samples)


def reference_audio(config: AudioConfig, weights: PackedAudio, timed: AudioCall, few: AudioCall) -> Peer | AbsentPeer:
    """The reference in bfloat16."""
    from reference.audio import AudioEncoder

    with torch.device("meta"):
        reference = AudioEncoder(config)
    reference.load_state_dict(unpack_audio(weights), assign=True)
    reference.requires_grad_(False)
    return _peer(REFERENCE, reference, timed, few)


def transformers_audio(
    config: AudioConfig, weights: PackedAudio, timed: AudioCall, few: AudioCall
) -> Peer | AbsentPeer:
    """transformers 5.24's tower with its eager attention, on all chunks in one call."""
    if find_spec("transformers") is None or find_spec(MODULE) is None:
        return AbsentPeer(TRANSFORMERS, "not installed, or without dots3_note")
    configuration = import_module(f"{MODULE}.configuration_dots3_note")
    modeling = import_module(f"{MODULE}.modeling_dots3_note")
    dtype, device = weights.final_norm_D.dtype, weights.final_norm_D.device
    model = modeling.Dots3NoteAudioModel.from_pretrained(
        None,
        config=configuration.Dots3NoteAudioConfig(**replace(released(), audio=config).to_json()["audio_config"]),
        state_dict=unpack_audio(weights),
        dtype=dtype,
        attn_implementation="eager",
    )
    model.eval().to(device)

    def embed(clip: Features) -> Any:
        return model(clip.mel_NML.to(dtype), torch.tensor(clip.samples, device=clip.mel_NML.device)).pooler_output

    return _peer(TRANSFORMERS, embed, timed, few)


def _peer(name: str, embed: Callable[[Features], Tensor], timed: AudioCall, few: AudioCall) -> Peer:
    long, short = timed.features(), few.features()

    def call(clip: Features) -> Tensor:
        with torch.no_grad():
            return embed(clip)

    return Peer(name, lambda: call(long), lambda _: call(short), DEPTH_LIMIT)
