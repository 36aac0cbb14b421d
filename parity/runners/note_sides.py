"""The whole model behind the `Runner` protocol, on each side: a request's media are placed before its first step.

What the towers give is shown once, as `vision.merged` and `audio.adapted`, in the order of the prompt; their insides
are the business of the checks of the towers. Each side also generates, greedily, with drafts or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from parity.runners import Runner
from parity.runners.reference import ReferenceRunner
from parity.runners.transformers_note import TransformersNoteRunner
from reference.config import NoteConfig
from reference.generate import Generation, Generator, generate
from reference.layers.indexer import RopeLayout
from reference.model import NoteModel, NoteSession
from reference.model_media import MediaInput, PaddedVideoInput, SoundInput, tower_inputs
from reference.model_scatter import MediaRows
from reference.numerics import Numerics
from reference.probe import is_observed, probe, rows, unobserved
from reference.prompt import Prompt
from reference.prompt_media import MediaSpan
from reference.prompt_messages import MediaKind
from reference.session import StepItem
from reference.vision_numerics import VisionNumerics


class Placed(Protocol):
    """A request's prompt and media, such as `multimodal_requests.MadeRequest`."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def media(self) -> Sequence[MediaInput]: ...


class NoteSide(Runner, Protocol):
    """A runner that knows the prompts of its requests; `placed` are those of the case at hand."""

    placed: Mapping[str, Placed]

    def generate(self, max_new_tokens: int, draft_depth: int = 0) -> Generation:
        """Greedy, behind every placed prompt; the requests are gone afterwards."""


class Towers(Protocol):
    """What a model makes of media: the rows that `NoteSession.place` takes."""

    def features(self, media: Sequence[MediaInput], request: str = "prompt") -> list[MediaRows]: ...


class Scatter(Protocol):
    """What takes a prompt before its first step, as `NoteSession.place` does."""

    def place(
        self,
        request: str,
        token_ids: Sequence[int],
        media: Sequence[MediaInput],
        spans: Sequence[MediaSpan] | None = None,
        features: Sequence[MediaRows] | None = None,
    ) -> None: ...


@dataclass
class Placements:
    """Which requests have been placed: each once, before its first step, until it is freed."""

    towers: Towers
    scatter: Scatter
    begun: set[str] = field(default_factory=set)

    def begin(self, request: str, placed: Mapping[str, Placed]) -> None:
        """Place a request of `placed` that has not begun, and show what its towers gave; others need nothing."""
        if request in self.begun or request not in placed:
            return
        self.begun.add(request)
        prompt, media = placed[request].prompt, placed[request].media
        with unobserved():
            features = self.towers.features(media, request)
        show_rows(request, features)
        self.scatter.place(request, prompt.ids, media, prompt.media, features)

    def free(self, request: str) -> None:
        self.begun.discard(request)


class ReferenceNoteSide(ReferenceRunner):
    """The reference with towers. Arguments as in `ReferenceRunner`."""

    def __init__(
        self,
        config: NoteConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        numerics: Numerics | None = None,
        vision_numerics: VisionNumerics | None = None,
        exact_mode: bool = False,
        indexer_rope_layout: RopeLayout = "leading",
        max_draft_tokens: int = 4,
        placed: Mapping[str, Placed] | None = None,
    ):
        self.dtype = torch.float64 if exact_mode else dtype
        self.config, self._exact, self._faults, self._listeners = config, exact_mode, (), []
        with self._context():
            model = NoteModel(config, numerics, vision_numerics, indexer_rope_layout=indexer_rope_layout)
            model.load_state_dict(dict(weights))
            self.note = model.to(dtype=self.dtype).requires_grad_(False)
        session = NoteSession(self.note, max_draft_tokens)
        self.session, self._placements = session, Placements(self.note, session)
        self.placed = placed or {}

    def step(self, items: Sequence[StepItem]) -> dict[str, Tensor]:
        with self._run_context():
            for item in items:
                self._placements.begin(item.request, self.placed)
            return self.session.step(items)

    def free(self, request: str) -> None:
        super().free(request)
        self._placements.free(request)

    def generate(self, max_new_tokens: int, draft_depth: int = 0) -> Generation:
        with self._run_context():
            for request in self.placed:
                self._placements.begin(request, self.placed)
            return generated(self.session, self, max_new_tokens, draft_depth)


class TransformersNoteSide(TransformersNoteRunner):
    """transformers' multimodal model. `embeddings`, which it shows before the scatter, are left out."""

    def __init__(self, folder: str | Path, dtype: torch.dtype, exact: bool = False):
        super().__init__(folder, dtype, exact)
        self.placed: Mapping[str, Placed] = {}

    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict[str, Tensor]:
        for item in items:
            if item.request in self.placed and item.request not in self._caches:
                media = self.placed[item.request].media
                self.place(item.request, media)
                if is_observed() and media:
                    with unobserved():
                        features = self._features(media)
                    show_rows(item.request, features)
        return super().step(items, last_only)

    def generate(self, max_new_tokens: int, draft_depth: int = 0) -> Generation:
        return generated(self, self, max_new_tokens, draft_depth)

    def _features(self, media: Sequence[MediaInput]) -> list[MediaRows]:
        """Its rows, item by item in the order of the prompt; it has them by kind."""
        outputs = self.towers(media)
        left: dict[MediaKind, Tensor | None] = {"image": outputs.image, "video": outputs.video, "audio": outputs.audio}
        found = []
        for item in tower_inputs(media):
            kind: MediaKind = "image"
            if isinstance(item, SoundInput):
                kind, count = "audio", item.features.tokens
            else:
                kind = "video" if isinstance(item, PaddedVideoInput) else "image"
                count = sum(item.patches.tokens)
            own = left[kind]
            assert own is not None
            found.append(MediaRows(kind, own[:count]))
            left[kind] = own[count:]
        return found


def show_rows(request: str, features: Sequence[MediaRows]) -> None:
    """Probes for what the towers gave. Rows count from the first of the request."""
    if not is_observed():
        return
    for name, kinds in (("vision.merged", ("image", "video")), ("audio.adapted", ("audio",))):
        own = [item.rows_MD for item in features if item.kind in kinds]
        if own:
            rows_MD = torch.cat(own)
            with rows(request, torch.arange(len(rows_MD)), "prefill"):
                probe(name, rows_MD)


def generated(generator: Generator, side: NoteSide, max_new_tokens: int, draft_depth: int) -> Generation:
    """Greedy, behind every placed prompt of `side`, whose requests are freed."""
    prompts = {request: placed.prompt.ids for request, placed in side.placed.items()}
    with _freed(side, prompts):
        return generate(generator, prompts, max_new_tokens, draft_depth)


@contextmanager
def _freed(side: NoteSide, requests: Mapping[str, object]) -> Iterator[None]:
    try:
        yield
    finally:
        for request in requests:
            side.free(request)
