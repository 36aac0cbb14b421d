"""The whole model on one device: towers make rows of pixels and sounds, and requests begin with them.

ids, media --towers--> rows [M, D] of each item --scatter--> embeddings [T, D] --engine--> logits

All pictures of a prompt go through the vision tower in one call, and all its sounds through the audio tower in one. A
prompt is placed once and stepped like any other, alone or in company, in chunks or whole; behind it the engine has its
graphs and drafts as ever. Whatever maps pixels or features to rows can stand as a tower.
Source: multimodal prompt specification, sections 2.3 and 2.4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from optimized.audio import AudioTower
from optimized.device import Backend
from optimized.draft_rounds import DraftedText
from optimized.engine import Engine, EngineOptions
from optimized.items import DecodeItem
from optimized.vision import VisionTower
from reference.checkpoint.expected_towers import VISION
from reference.checkpoint.load_audio import PREFIX as AUDIO
from reference.config import NoteConfig
from reference.errors import CacheError, ConfigError, TokenIdError
from reference.layers.indexer import RopeLayout
from reference.layers.vision_grid import Grid
from reference.media.mel import Features
from reference.model import TOWERS, Tower, rows_of_each
from reference.model_media import ImageInput, MediaInput, PaddedVideoInput, SoundInput, grid_of, tower_inputs
from reference.model_scatter import MediaRows, PlaceholderError, placements
from reference.prompt_media import MediaSpan
from reference.prompt_messages import MediaKind
from reference.session import StepItem

# T tokens  D model width  M rows of an item  N patches  X values of a patch


class Sees(Protocol):
    """Patches of all items to the rows of their placeholders, item by item; see `optimized.vision.VisionTower`."""

    def __call__(self, pixels_NX: Tensor, grids: Sequence[Grid], request: str = "images") -> Tensor: ...


class Hears(Protocol):
    """Features of clips to the rows of each; see `optimized.audio.AudioTower`."""

    def embed(self, clips: Sequence[Features], names: Sequence[str] | None = None) -> list[Tensor]: ...


@dataclass(frozen=True)
class _Prompt:
    token_ids: tuple[int, ...]
    embeddings_TD: Tensor


class NoteEngine:
    """An engine whose requests may begin with media: `place` their prompt, then step its ids like any others.

    A tower that is None is left out. What else an engine does is its own: `engine`.
    """

    def __init__(self, config: NoteConfig, engine: Engine, vision: Sees | None = None, audio: Hears | None = None):
        self.config, self.engine = config, engine
        self.vision, self.audio = vision, audio
        self.pads: dict[MediaKind, int] = {
            "image": config.image_token_id,
            "video": config.video_token_id,
            "audio": config.audio_token_id,
        }
        self._table_WD = engine.text.weights.embeddings_WD
        self._prompts: dict[str, _Prompt] = {}
        self.drafts, self.draft = engine.drafts, engine.draft
        self.truncate, self.length = engine.truncate, engine.length

    @classmethod
    def from_state(
        cls,
        config: NoteConfig,
        state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        backend: Backend | None = None,
        options: EngineOptions | None = None,
        towers: Collection[Tower] = TOWERS,
        indexer_rope_layout: RopeLayout = "leading",
    ) -> NoteEngine:
        """Pack a state dict of the whole model, released names; of the towers those named.

        Raises: NotSupportedError and CheckpointError as the parts do; ConfigError for a tower that the config lacks.
        """
        own: dict[str, dict[str, Tensor]] = {"": {}, VISION: {}, AUDIO: {}}
        for name, tensor in state.items() if isinstance(state, Mapping) else state:
            prefix = next((one for one in (VISION, AUDIO) if name.startswith(one)), "")
            own[prefix][name.removeprefix(prefix)] = tensor
        engine = Engine.from_state(
            config.text, own[""], dtype, device, backend, options, indexer_rope_layout=indexer_rope_layout
        )
        vision = audio = None
        if "vision" in towers:
            if config.vision is None:
                raise ConfigError("the config has no vision tower: it lacks vision_config")
            vision = VisionTower.from_state(config.vision, own[VISION], dtype, device, backend)
        if "audio" in towers:
            if config.audio is None:
                raise ConfigError("the config has no audio tower: it lacks audio_config")
            audio = AudioTower.from_state(config.audio, own[AUDIO], dtype, device, backend)
        return cls(config, engine, vision, audio)

    def features(self, media: Sequence[MediaInput], request: str = "prompt") -> list[MediaRows]:
        """The towers' rows of each image, frame, sound and padded video of one prompt, in its order.

        Raises: PlaceholderError for a kind whose tower is left out, and what the towers raise for their input.
        """
        inputs = list(tower_inputs(media))
        seen = iter(self._seen([item for item in inputs if not isinstance(item, SoundInput)], request))
        heard = iter(self._heard([item for item in inputs if isinstance(item, SoundInput)], request))
        return [next(heard) if isinstance(item, SoundInput) else next(seen) for item in inputs]

    def place(
        self,
        request: str,
        token_ids: Sequence[int],
        media: Sequence[MediaInput],
        spans: Sequence[MediaSpan] | None = None,
        features: Sequence[MediaRows] | None = None,
    ) -> None:
        """Run the towers for the prompt of a request that has not begun, and check all of it.

        `features`: the rows of `media`, where they are there already. `spans`: where the prompt's writer put each item.
        Raises: CacheError if the request exists; PlaceholderError where placeholders and rows do not fit; TokenIdError
        for an id outside the vocabulary that is no placeholder; what `features` raises.
        """
        if self._held(request) is not None:
            raise CacheError(f"request {request!r} has begun: its media must be placed before its first step")
        rows = self.features(media, request) if features is None else features
        places = placements(token_ids, rows, self.pads, request, spans)
        self._prompts[request] = _Prompt(tuple(token_ids), self._scattered(token_ids, places, request))

    @torch.no_grad()
    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict[str, Tensor]:
        """As `Engine.step`. Raises also: PlaceholderError for other ids than those of the placed prompt."""
        return self.engine.step([self._with_embeddings(item) for item in items], last_only)

    def decode(self, items: Sequence[DecodeItem], count: int) -> dict[str, list[int]]:
        """As `Engine.decode`. Raises also: PlaceholderError before the whole of a placed prompt has been stepped."""
        self._check_prompts(items := tuple(items))
        return self.engine.decode(items, count)

    def decode_with_drafts(self, items: Sequence[DecodeItem], count: int, depth: int) -> dict[str, DraftedText]:
        """As `Engine.decode_with_drafts`. Raises also: as `decode`."""
        self._check_prompts(items := tuple(items))
        return self.engine.decode_with_drafts(items, count, depth)

    def fork(self, request: str, new: str) -> None:
        self.engine.fork(request, new)
        if request in self._prompts:
            self._prompts[new] = self._prompts[request]

    def free(self, request: str) -> None:
        """Also of a request that is placed and has not begun."""
        if self._held(request) is not None or request not in self._prompts:
            self.engine.free(request)
        self._prompts.pop(request, None)

    def _check_prompts(self, items: Sequence[DecodeItem]) -> None:
        for item in items:
            prompt, held = self._prompts.get(item.request), self._held(item.request)
            if prompt is not None and (held or 0) < len(prompt.token_ids):
                raise PlaceholderError(
                    f"request {item.request!r}: {held or 0} of the {len(prompt.token_ids)} tokens of the prompt that "
                    f"was placed for it are stepped; step the others first"
                )

    def _seen(self, items: Sequence[ImageInput | PaddedVideoInput], request: str) -> list[MediaRows]:
        if not items:
            return []
        if self.vision is None or self.config.vision is None:
            raise PlaceholderError(f"request {request!r}: has images or frames, and the vision tower is left out")
        grids = [grid_of(item) for item in items]
        rows_MD = self.vision(torch.cat([item.patches.pixels_PX for item in items]), grids, request)
        return rows_of_each(rows_MD, items, self.config.vision.spatial_merge_size)

    def _heard(self, items: Sequence[SoundInput], request: str) -> list[MediaRows]:
        if not items:
            return []
        if self.audio is None:
            raise PlaceholderError(f"request {request!r}: has sound, and the audio tower is left out")
        names = [f"{request}.sound{number}" for number in range(len(items))]
        return [MediaRows("audio", rows_MD) for rows_MD in self.audio.embed([item.features for item in items], names)]

    def _scattered(self, token_ids: Sequence[int], places: Sequence[tuple[int, Tensor]], request: str) -> Tensor:
        """[T, D] in the dtype of the table."""
        ids, last = list(token_ids), len(self._table_WD) - 1
        width = self._table_WD.shape[1]
        for start, rows_MD in places:
            if rows_MD.dim() != 2 or rows_MD.shape[1] != width:
                raise PlaceholderError(
                    f"request {request!r}: rows for position {start} must be {width} wide, found {tuple(rows_MD.shape)}"
                )
            # What the table has for a placeholder is never read, and it may have nothing.
            ids[start : start + len(rows_MD)] = [0] * len(rows_MD)
        for token_id in ids:
            if not 0 <= token_id <= last:
                raise TokenIdError(f"request {request!r}: token id {token_id} is outside the vocabulary (0 to {last})")
        embeddings_TD = self._table_WD[torch.tensor(ids, dtype=torch.int64, device=self._table_WD.device)]
        for start, rows_MD in places:
            embeddings_TD[start : start + len(rows_MD)] = rows_MD.to(embeddings_TD)
        return embeddings_TD

    def _held(self, request: str) -> int | None:
        """Tokens of a request; None if it has not begun."""
        try:
            return self.engine.length(request)
        except CacheError:
            return None

    def _with_embeddings(self, item: StepItem) -> StepItem:
        prompt = self._prompts.get(item.request)
        start = self._held(item.request) or 0
        if prompt is None or item.embeddings_TD is not None or start >= len(prompt.token_ids):
            return item
        placed = prompt.token_ids[start : start + len(item.token_ids)]
        text = item.token_ids[len(placed) :]
        if tuple(item.token_ids[: len(placed)]) != placed:
            raise PlaceholderError(
                f"request {item.request!r}: tokens {start} to {start + len(placed) - 1} are not those of the prompt "
                f"that was placed for it"
            )
        embeddings_TD = prompt.embeddings_TD[start : start + len(placed)]
        if text:
            behind_TD = self._scattered(text, (), item.request)
            embeddings_TD = torch.cat((embeddings_TD, behind_TD))
        return replace(item, embeddings_TD=embeddings_TD)
