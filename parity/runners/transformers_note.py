"""The oracle of the whole model: transformers 5.24's `Dots3NoteForConditionalGeneration`, towers and scatter included.

It loads the released-layout folder with its own classes and converter, and is fed the same pixels, features and ids as
the reference; which rows go where is its own work. A prompt with media comes in one step, since it takes pixels with
the ids of a forward. The text model's intermediates are shown as `TransformersRunner` shows them, but that
`embeddings` are those before the scatter; `layers.0.input` are those behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.runners import NotSupportedHere
from parity.runners.transformers import (
    INDEX_FILE,
    TransformersRunner,
    _new_cache,
    _refuse_unsupported,
    _transformers_config,
    quiet,
    read_index,
    read_json,
    require_transformers,
)
from parity.runners.transformers_probes import _show, observed
from reference.config import NoteConfig
from reference.errors import CacheError, CheckpointError
from reference.model_media import ImageInput, MediaInput, PaddedVideoInput, SoundInput, tower_inputs
from reference.probe import rows
from reference.session import DraftItem, StepItem


@dataclass(frozen=True)
class TowerOutputs:
    """What its towers made of a prompt, behind one another in its order; None for a kind that the prompt lacks."""

    image: Tensor | None
    video: Tensor | None
    audio: Tensor | None


class TransformersNoteRunner(TransformersRunner):
    """transformers' multimodal model behind the `Runner` protocol, and what generation needs of a session.

    `dtype`, `exact` and errors as in `TransformersRunner`; without `with_towers` it is that runner. NotSupportedHere
    also for a folder that lacks one of the two towers: transformers would make up the other.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype, exact: bool = False, with_towers: bool = True):
        self._media: dict[str, dict[str, Tensor]] = {}
        self._with_towers = with_towers
        if not with_towers:
            super().__init__(folder, dtype, exact)
            return
        require_transformers()
        folder = Path(folder)
        self.config = NoteConfig.from_json(folder / "config.json")
        self.dtype = torch.float64 if exact else dtype
        self.lower_precision_ops = []
        self._exact = exact
        self._caches = {}
        index = read_index(folder / INDEX_FILE)
        _refuse_unsupported(self.config.text, index["metadata"])
        with self._precision():
            self.model = _load(folder, self.config, self.dtype)
        self.dropped = ()

    def place(self, request: str, media: Sequence[MediaInput]) -> None:
        """Give the media of a request before its first step, which must be its whole prompt."""
        if media and not self._with_towers:
            raise NotSupportedHere(f"request {request!r}: has media, and the towers are left out")
        self._media[request] = _tensors(media, self.dtype)

    def towers(self, media: Sequence[MediaInput]) -> TowerOutputs:
        """The rows of its towers alone."""
        given = _tensors(media, self.dtype)
        with torch.no_grad(), self._precision():
            image = video = audio = None
            if "pixel_values" in given:
                image = torch.cat(
                    self.model.model.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output
                )
            if "pixel_values_videos" in given:
                video = torch.cat(
                    self.model.model.get_video_features(
                        given["pixel_values_videos"], given["video_grid_thw"]
                    ).pooler_output
                )
            if "input_features" in given:
                audio = self.model.get_audio_features(
                    given["input_features"], given["chunk_sample_lengths"]
                ).pooler_output
        return TowerOutputs(image, video, audio)

    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict[str, Tensor]:
        logits = super().step(items)
        return {request: logits_TW[-1:] for request, logits_TW in logits.items()} if last_only else logits

    def drafts(self, items: Sequence[DraftItem]) -> dict[str, Tensor]:
        """Nothing for nothing. Raises: NotSupportedHere otherwise."""
        if items:
            raise NotSupportedHere("transformers has no draft layer for dots3_note: --draft-depth must be 0")
        return {}

    def length(self, request: str) -> int:
        return self._cache(request).get_seq_length()

    def _run(self, item: StepItem) -> Tensor:
        if not self._with_towers:
            return super()._run(item)
        if item.request not in self._caches:
            self._caches[item.request] = _new_cache(self.model.config.text_config)
        cache = self._caches[item.request]
        held = cache.get_seq_length()
        given = self._media.pop(item.request, {})
        if given and held:
            raise CacheError(f"request {item.request!r} has begun: media must be placed before its first step")
        positions_T = torch.arange(held, held + len(item.token_ids))
        with rows(item.request, positions_T, item.kind), self._observed_text():
            output = self.model(input_ids=torch.tensor([item.token_ids]), cache=cache, use_cache=True, **given)
            _show("logits", output.logits[0])
        return output.logits[0]

    @contextmanager
    def _observed_text(self) -> Iterator[None]:
        """Watch while the text model runs, not while the towers do: they call the same attention function."""
        language_model = self.model.model.language_model
        forward = language_model.forward
        text = SimpleNamespace(model=language_model, lm_head=self.model.lm_head)

        def observed_forward(*args: Any, **kwargs: Any) -> Any:
            with observed(text):
                return forward(*args, **kwargs)

        with mock.patch.object(language_model, "forward", observed_forward):
            yield


def _tensors(media: Sequence[MediaInput], dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments of its forward. Pixels stay at least float32: it rounds them itself."""
    inputs = list(tower_inputs(media))
    wide = torch.promote_types(torch.float32, dtype)
    given: dict[str, Tensor] = {}
    stills = [item.patches for item in inputs if isinstance(item, ImageInput)]
    videos = [item.patches for item in inputs if isinstance(item, PaddedVideoInput)]
    for patches, pixels, grid in (
        (stills, "pixel_values", "image_grid_thw"),
        (videos, "pixel_values_videos", "video_grid_thw"),
    ):
        if patches:
            given[pixels] = torch.cat([own.pixels_PX for own in patches]).to(wide)
            given[grid] = torch.cat([own.grids_N3 for own in patches])
    sounds = [item.features for item in inputs if isinstance(item, SoundInput)]
    if sounds:
        given["input_features"] = torch.cat([own.mel_NML for own in sounds]).to(dtype)
        given["chunk_sample_lengths"] = torch.tensor([count for own in sounds for count in own.samples])
    return given


def _load(folder: Path, config: NoteConfig, dtype: torch.dtype) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import Dots3NoteForConditionalGeneration
    from transformers.models.dots3_note.configuration_dots3_note import (
        Dots3NoteAudioConfig,
        Dots3NoteConfig,
        Dots3NoteVisionConfig,
    )

    if config.vision is None or config.audio is None:
        raise NotSupportedHere(f"{folder}: transformers' multimodal model needs both towers, and the config lacks one")
    try:
        read = Dots3NoteConfig(
            text_config=_transformers_config(folder, config),
            vision_config=Dots3NoteVisionConfig(**read_json(folder / "config.json")["vision_config"]),
            audio_config=Dots3NoteAudioConfig(**config.to_json()["audio_config"]),
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            audio_token_id=config.audio_token_id,
        )
    except StrictDataclassError as error:
        raise NotSupportedHere(f"{folder}: transformers refuses this config: {error}") from error
    with quiet() as messages:
        try:
            model, report = Dots3NoteForConditionalGeneration.from_pretrained(
                folder,
                config=read,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            told = "\n".join((str(error), *messages))
            raise CheckpointError(f"{folder}: transformers cannot load it: {told}") from error
    # It knows the released number of the draft layer only.
    draft = f"model.language_model.layers.{config.text.num_hidden_layers}."
    problems = [f"missing {name}" for name in sorted(report["missing_keys"])]
    problems += [f"unexpected {name}" for name in sorted(report["unexpected_keys"]) if not name.startswith(draft)]
    if problems:
        raise CheckpointError(f"{folder}: transformers did not find the model's tensors: {'; '.join(problems)}")
    return model.eval()
