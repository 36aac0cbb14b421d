"""The whole model: towers make rows of pixels and sounds, rows take the places of placeholders, the text model goes on.

ids, media --towers--> rows [M, D] of each item --scatter--> embeddings [T, D] --text--> logits

Towers are loaded or left out one by one; without any it is the text model, bit for bit. Media tokens are ordinary
tokens to it: one position each, seen causally. Their ids may lie beyond the vocabulary, since no table is asked for
them; only the draft layer, which reads ids, takes the last id of its own table for such a one.
Source: multimodal prompt specification, sections 2.3, 2.4 and 5; text_model specification, section 17.5.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from reference.audio import AudioEncoder
from reference.config import NoteConfig
from reference.errors import CacheError, ConfigError
from reference.layers.indexer import RopeLayout
from reference.layers.vision_grid import patch_count
from reference.model_media import (
    ImageInput,
    MediaInput,
    PaddedVideoInput,
    SoundInput,
    grid_of,
    tower_inputs,
)
from reference.model_scatter import MediaRows, PlaceholderError, placements
from reference.numerics import Numerics
from reference.prompt_media import MediaSpan
from reference.prompt_messages import MediaKind
from reference.session import Session, StepItem
from reference.text import DEFAULT_WORKSPACE_BYTES, TextModel
from reference.vision import VisionTower
from reference.vision_numerics import VisionNumerics

# T tokens  D model width

Tower = Literal["vision", "audio"]
TOWERS: tuple[Tower, ...] = ("vision", "audio")


class NoteModel(TextModel):
    """The text model with towers before it; its parameters have the released names.

    `towers`: those to build (None: all that the config has). Build it under `torch.device("meta")` and fill it from a
    checkpoint. `numerics` are those of the text model and the speech encoder.
    Raises: ConfigError for a tower that the config lacks or whose rows have another width than the text model, for
    placeholder ids that are not three different ones, and as `TextModel` and `AudioEncoder` do.
    """

    def __init__(
        self,
        config: NoteConfig,
        numerics: Numerics | None = None,
        vision_numerics: VisionNumerics | None = None,
        towers: Collection[Tower] | None = None,
        indexer_rope_layout: RopeLayout = "leading",
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    ):
        super().__init__(config.text, numerics, indexer_rope_layout, workspace_bytes)
        self.note = config
        self.pads: dict[MediaKind, int] = {
            "image": config.image_token_id,
            "video": config.video_token_id,
            "audio": config.audio_token_id,
        }
        wanted = checked_towers(config, towers)
        if wanted and len(set(self.pads.values())) < len(self.pads):
            raise ConfigError(f"placeholder ids must differ, found {self.pads}")
        self.vision_encoder = (
            VisionTower(config.vision, vision_numerics) if config.vision and "vision" in wanted else None
        )
        self.audio_encoder = AudioEncoder(config.audio, numerics) if config.audio and "audio" in wanted else None

    @property
    def modalities(self) -> tuple[MediaKind, ...]:
        """What a prompt may hold, for `prompt_media.MediaRules`."""
        seen: tuple[MediaKind, ...] = ("image", "video") if self.vision_encoder else ()
        return (*seen, "audio") if self.audio_encoder else seen

    def features(self, media: Sequence[MediaInput], request: str = "prompt") -> list[MediaRows]:
        """The towers' rows of each image, frame, sound and padded video of one prompt, in its order.

        Observed rows of the vision tower belong to `request`, counted through the whole prompt; those of the n-th sound
        to `request.sound<n>`.
        Raises: PlaceholderError for a kind whose tower is left out, and what the towers raise for their input.
        """
        inputs = list(tower_inputs(media))
        seen = [item for item in inputs if not isinstance(item, SoundInput)]
        heard = [item for item in inputs if isinstance(item, SoundInput)]
        seen_rows = iter(self._seen(seen, request))
        heard_rows = iter(self._heard(heard, request))
        return [next(heard_rows) if isinstance(item, SoundInput) else next(seen_rows) for item in inputs]

    def embed(
        self,
        token_ids_T: Tensor,
        features: Sequence[MediaRows] | None = None,
        spans: Sequence[MediaSpan] | None = None,
        request: str = "prompt",
    ) -> Tensor:
        """[T, D]: embeddings of the tokens of one prompt, with `features` in the places of its placeholders.

        Without `features` ids are only looked up: so a placeholder that the model itself writes is a token like others.
        With an empty list a prompt must have none. `spans` as in `placements`.
        Raises: PlaceholderError where placeholders and features do not fit; TokenIdError for an id outside the
        vocabulary that is no placeholder.
        """
        if features is None:
            return super().embed(token_ids_T)
        places = placements(token_ids_T.tolist(), features, self.pads, request, spans)
        is_media_T = torch.zeros_like(token_ids_T, dtype=torch.bool)
        for start, rows_MD in places:
            if rows_MD.dim() != 2 or rows_MD.shape[1] != self.config.hidden_size:
                raise PlaceholderError(
                    f"request {request!r}: rows for position {start} must be {self.config.hidden_size} wide, found "
                    f"{tuple(rows_MD.shape)}"
                )
            is_media_T[start : start + len(rows_MD)] = True
        # What the table has for a placeholder is never read, and it may have nothing.
        embeddings_TD = super().embed(token_ids_T.masked_fill(is_media_T, 0))
        for start, rows_MD in places:
            embeddings_TD[start : start + len(rows_MD)] = rows_MD.to(embeddings_TD)
        return embeddings_TD

    def _seen(self, items: Sequence[ImageInput | PaddedVideoInput], request: str) -> list[MediaRows]:
        if not items:
            return []
        if self.vision_encoder is None:
            raise PlaceholderError(f"request {request!r}: has images or frames, and the vision tower is left out")
        grids = [grid_of(item) for item in items]
        device = self.lm_head.weight.device
        pixels_NX = torch.cat([item.patches.pixels_PX for item in items]).to(device)
        rows_MD = self.vision_encoder(pixels_NX, grids, request)
        return rows_of_each(rows_MD, items, self.vision_encoder.config.spatial_merge_size)

    def _heard(self, items: Sequence[SoundInput], request: str) -> list[MediaRows]:
        if not items:
            return []
        if self.audio_encoder is None:
            raise PlaceholderError(f"request {request!r}: has sound, and the audio tower is left out")
        device = self.lm_head.weight.device
        moved = [replace(item.features, mel_NML=item.features.mel_NML.to(device)) for item in items]
        return [
            MediaRows("audio", self.audio_encoder(own, f"{request}.sound{number}")) for number, own in enumerate(moved)
        ]


def rows_of_each(
    rows_MD: Tensor, items: Sequence[ImageInput | PaddedVideoInput], spatial_merge_size: int
) -> list[MediaRows]:
    """The vision tower's rows of several images and videos, [M, D], cut into those of each."""
    counts = [patch_count([grid_of(item)]) // spatial_merge_size**2 for item in items]
    return [
        MediaRows("image" if isinstance(item, ImageInput) else "video", own_MD)
        for item, own_MD in zip(items, rows_MD.split(counts), strict=True)
    ]


def checked_towers(config: NoteConfig, towers: Collection[Tower] | None) -> tuple[Tower, ...]:
    """The towers to build, in the order of `TOWERS`. Raises: ConfigError, see `NoteModel`."""
    found = {"vision": config.vision, "audio": config.audio}
    wanted = tuple(tower for tower in TOWERS if (found[tower] is not None if towers is None else tower in towers))
    if unknown := [tower for tower in towers or () if tower not in TOWERS]:
        raise ConfigError(f"no tower {unknown[0]!r}; there are {', '.join(TOWERS)}")
    for tower in wanted:
        own = found[tower]
        if own is None:
            raise ConfigError(f"the config has no {tower} tower: it lacks {tower}_config")
        if own.adapter_out_dim != config.text.hidden_size:
            raise ConfigError(
                f"{tower}_config: adapter_out_dim {own.adapter_out_dim} must be the text's hidden_size, "
                f"{config.text.hidden_size}"
            )
    return wanted


@dataclass(frozen=True)
class _Prompt:
    token_ids: tuple[int, ...]
    embeddings_TD: Tensor


class NoteSession(Session):
    """A session whose requests may begin with media: `place` their prompt, then step its ids like any others.

    A placed prompt may come in one step or in chunks; what is stepped behind it is text.
    """

    def __init__(self, model: NoteModel, max_draft_tokens: int = 4, max_length: int | None = None):
        super().__init__(model, max_draft_tokens, max_length)
        self.note = model
        self._prompts: dict[str, _Prompt] = {}

    def place(
        self,
        request: str,
        token_ids: Sequence[int],
        media: Sequence[MediaInput],
        spans: Sequence[MediaSpan] | None = None,
        features: Sequence[MediaRows] | None = None,
    ) -> None:
        """Run the towers for the prompt of a request that has not begun, and check all of it.

        `features`: the rows of `media`, where the towers have run already.
        Raises: CacheError if the request exists; what `NoteModel.features` and `NoteModel.embed` raise.
        """
        if request in self._requests:
            raise CacheError(f"request {request!r} has begun: its media must be placed before its first step")
        token_ids_T = torch.tensor(token_ids, dtype=torch.int64, device=self.note.lm_head.weight.device)
        if features is None:
            features = self.note.features(media, request)
        embeddings_TD = self.note.embed(token_ids_T, features, spans, request)
        self._prompts[request] = _Prompt(tuple(token_ids), embeddings_TD)

    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict[str, Tensor]:
        """As `Session.step`. Raises also: PlaceholderError for other ids than those of the placed prompt."""
        return super().step([self._with_embeddings(item) for item in items], last_only)

    def fork(self, request: str, new: str) -> None:
        super().fork(request, new)
        if request in self._prompts:
            self._prompts[new] = self._prompts[request]

    def free(self, request: str) -> None:
        super().free(request)
        self._prompts.pop(request, None)

    def _with_embeddings(self, item: StepItem) -> StepItem:
        prompt = self._prompts.get(item.request)
        start = self.length(item.request) if item.request in self._requests else 0
        if prompt is None or item.embeddings_TD is not None or start >= len(prompt.token_ids):
            return item
        placed = prompt.token_ids[start : start + len(item.token_ids)]
        text = item.token_ids[len(placed) :]
        if item.token_ids[: len(placed)] != placed:
            raise PlaceholderError(
                f"request {item.request!r}: tokens {start} to {start + len(placed) - 1} are not those of the prompt "
                f"that was placed for it"
            )
        embeddings_TD = prompt.embeddings_TD[start : start + len(placed)]
        if text:
            text_T = torch.tensor(text, device=embeddings_TD.device)
            embeddings_TD = torch.cat((embeddings_TD, self.note.embed(text_T)))
        return replace(item, embeddings_TD=embeddings_TD)
