"""transformers' own preprocessing of a request: text and files to ids, pixels and mel features.

Its processor class finds the placeholders, counts and repeats them, and calls its tokenizer, image processor and
feature extractor. The text is the rendered chat with one placeholder an item. What it does not have: the chat template
(a file of the checkpoint), resampling, and the interleaved layout of a video.
"""

from __future__ import annotations

import io
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.exact import exact
from parity.multimodal_requests import Folder, MadeRequest
from parity.runners import NotSupportedHere
from parity.runners.transformers import quiet, require_transformers
from reference.prompt import TOKENIZER_FILE


@dataclass(frozen=True)
class Processed:
    """ids_T int64; pixels_PX float32, None without images; mel_NML of all chunks, None without sound."""

    ids_T: Tensor
    pixels_PX: Tensor | None
    mel_NML: Tensor | None


class TransformersProcessing:
    """Made once for a folder; `is_exact` promotes the features to float64.

    Raises: RunnerUnavailable without transformers, NotSupportedHere for a folder that lacks a tower.
    """

    def __init__(self, folder: Folder, is_exact: bool = False):
        require_transformers()
        if folder.config.audio is None or folder.config.vision is None:
            raise NotSupportedHere(f"{folder.path}: transformers' processor needs both towers; the config lacks one")
        self._exact = is_exact
        with quiet(), self._precision():
            self._processor = _processor(folder)

    def __call__(self, request: MadeRequest) -> Processed:
        """A request without video."""
        from PIL import Image

        given: dict[str, Any] = {"text": [request.prompt.text], "return_tensors": "pt"}
        if request.images:
            given["images"] = [Image.open(io.BytesIO(file)) for file in request.images]
        if request.waveforms:
            given["audio"] = [waveform_S.numpy() for waveform_S in request.waveforms]
        with quiet(), self._precision():
            made = self._processor(**given)
        return Processed(made["input_ids"][0], made.get("pixel_values"), made.get("input_features"))

    def _precision(self) -> Any:
        return exact() if self._exact else nullcontext()


def _processor(folder: Folder) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.dots3_note.feature_extraction_dots3_note import Dots3NoteFeatureExtractor
    from transformers.models.dots3_note.processing_dots3_note import Dots3NoteProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    bounds, audio = folder.images.bounds, folder.config.audio
    assert audio is not None
    # The released values, which its class defaults have otherwise.
    images = Qwen2VLImageProcessorPil(
        min_pixels=bounds.min_pixels,
        max_pixels=bounds.max_pixels,
        temporal_patch_size=1,
        image_mean=list(folder.images.mean),
        image_std=list(folder.images.std),
    )
    sounds = Dots3NoteFeatureExtractor(
        feature_size=audio.num_mel_bins, sampling_rate=audio.sampling_rate, chunk_seconds=audio.chunk_seconds
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder.path / TOKENIZER_FILE))
    # Its check of argument classes looks for a video processor, which needs torchvision.
    with mock.patch.object(Dots3NoteProcessor, "check_argument_for_proper_class", return_value=None):
        return Dots3NoteProcessor(image_processor=images, tokenizer=tokenizer, feature_extractor=sounds)


def as_rows(mel_NML: Tensor, frames: int | None = None) -> Tensor:
    """[N L, M]: frames of all chunks behind each other, the first `frames` of each."""
    return mel_NML[..., :frames].transpose(1, 2).flatten(0, 1).to(torch.float64)
