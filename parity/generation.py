"""One prompt with media through one implementation: files to tower inputs, chat to ids, and the thing that generates.

Each implementation is made for the prompt at hand: towers that it does not need are not loaded. What an implementation
cannot do is refused before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from optimized.device import Backend
from optimized.engine import EngineOptions
from optimized.errors import NotSupportedError
from optimized.model import NoteEngine
from parity.runners import NotSupportedHere, RunnerUnavailable
from reference.checkpoint.synthetic_chat import PREPROCESSOR_FILE
from reference.config import NoteConfig
from reference.generate import Generator
from reference.media.image import preprocess_images
from reference.media.image_config import ImageConfig
from reference.media.mel import features
from reference.media.sound import load_waveform
from reference.media.video import prepare_video
from reference.media.video_options import VideoOptions
from reference.model import NoteSession, Tower
from reference.model_load import load_note_model
from reference.model_media import (
    MediaInput,
    SoundInput,
    VideoConvention,
    images,
    prompt_item,
    tower_inputs,
    video_input,
)
from reference.numerics import Numerics
from reference.prompt import ChatTokenizer, Prompt, build_prompt
from reference.prompt_media import MediaRules
from reference.prompt_messages import MediaKind, PromptError
from reference.prompt_render import PromptOptions
from reference.session import DraftItem, StepItem
from reference.vision_numerics import VisionNumerics

Implementation = Literal["reference", "optimized", "transformers"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
# The longest context that a video is planned for, as SGLang has it.
VIDEO_CONTEXT = 131_072
REQUEST = "prompt"
PAGE = 64


@dataclass(frozen=True)
class MediaFiles:
    """Files of one prompt; they stand before its text, images first, then sounds, then videos."""

    images: Sequence[Path] = ()
    sounds: Sequence[Path] = ()
    videos: Sequence[Path] = ()

    @property
    def kinds(self) -> list[MediaKind]:
        """Of each file, in the order of the prompt."""
        counts: dict[MediaKind, int] = {"image": len(self.images), "audio": len(self.sounds), "video": len(self.videos)}
        return [kind for kind, count in counts.items() for _ in range(count)]


def read_media(
    files: MediaFiles,
    folder: Path,
    config: NoteConfig,
    question: str = "",
    convention: VideoConvention = "interleaved",
    max_new_tokens: int = 0,
) -> list[MediaInput]:
    """The files as the towers read them.

    Raises: PromptError for a kind that the checkpoint has no tower for; what reading a file raises.
    """
    modalities = _modalities(config)
    if files.videos and len(files.kinds) > 1:
        raise PromptError(f"--video: one, and no other media; found {len(files.kinds)} files")
    for kind in files.kinds:
        if kind not in modalities:
            raise PromptError(f"--{kind}: this checkpoint takes {', '.join(modalities) or 'text only'}")
    preprocessor = folder / PREPROCESSOR_FILE
    image_config = ImageConfig.from_json(preprocessor, config.vision) if preprocessor.exists() else ImageConfig()
    media: list[MediaInput] = []
    if files.images:
        media += images(preprocess_images(list(files.images), image_config))
    if config.audio:
        for path in files.sounds:
            media.append(SoundInput(features(load_waveform(path, config.audio.sampling_rate), config.audio)))
    for path in files.videos:
        hears = config.audio is not None and convention == "interleaved"
        options = VideoOptions(
            context=min(VIDEO_CONTEXT, config.text.max_position_embeddings),
            max_new_tokens=max_new_tokens,
            audio_cap=1.0 if hears else 0.0,
            question=question,
        )
        media.append(video_input(prepare_video(path, options, image_config), config.audio, convention))
    return media


def write_prompt(
    text: str,
    files: MediaFiles,
    media: Sequence[MediaInput],
    tokenizer: ChatTokenizer,
    config: NoteConfig,
    thinking: bool,
    max_new_tokens: int,
) -> Prompt:
    """A user's turn: media, then the text. Raises: PromptError, also if the context cannot hold it and the answer."""
    content = [*({"type": kind} for kind in files.kinds), {"type": "text", "text": text}]
    rules = MediaRules(modalities=_modalities(config))
    options = PromptOptions(thinking=thinking, media=rules)
    items = [prompt_item(item) for item in media]
    prompt = build_prompt([{"role": "user", "content": content}], tokenizer, options, media=items)
    longest = config.text.max_position_embeddings
    if len(prompt.ids) + max_new_tokens > longest:
        raise PromptError(
            f"the prompt has {len(prompt.ids)} tokens; with {max_new_tokens} new ones it exceeds the context, {longest}"
        )
    return prompt


def refuse(impl: Implementation, device: str, draft_depth: int, numerics: str = "default") -> None:
    """What `impl` cannot do. Raises: NotSupportedHere, RunnerUnavailable."""
    if impl != "reference" and numerics != "default":
        raise NotSupportedHere(f"{impl} rounds in one way only: --numerics is an option of the reference")
    if device == "cuda" and not torch.cuda.is_available():
        raise RunnerUnavailable("--device cuda: torch finds no CUDA device here")
    if impl == "transformers" and draft_depth:
        raise NotSupportedHere("transformers has no draft layer for dots3_note: --draft-depth must be 0")
    if impl == "transformers" and device != "cpu":
        raise NotSupportedHere("transformers runs on the CPU here: --device cpu")


def generator(
    impl: Implementation,
    folder: Path,
    prompt: Prompt,
    media: Sequence[MediaInput],
    dtype: torch.dtype,
    device: str,
    draft_depth: int,
    max_new_tokens: int,
    backend: Backend | None = None,
    numerics: str = "default",
) -> Generator:
    """An implementation with the prompt's media placed for the request `REQUEST`. `backend`: of the optimized one.

    `numerics`: the reference's preset.

    Raises: NotSupportedHere for what it cannot run; CheckpointError, ConfigError; PlaceholderError.
    """
    if impl == "transformers":
        from parity.runners.transformers_note import TransformersNoteRunner

        runner = TransformersNoteRunner(folder, dtype, with_towers=bool(media))
        runner.place(REQUEST, media)
        return runner
    heard = {isinstance(item, SoundInput) for item in tower_inputs(media)}
    needed: dict[Tower, bool] = {"vision": False in heard, "audio": True in heard}
    towers = [tower for tower, is_needed in needed.items() if is_needed]
    session: NoteSession | NoteEngine
    if impl == "optimized":
        session = _engine(folder, towers, dtype, device, backend, draft_depth, len(prompt.ids) + max_new_tokens)
        session.place(REQUEST, prompt.ids, media, prompt.media)
        return session
    text, vision = Numerics.preset(numerics), VisionNumerics.preset(numerics)
    model = load_note_model(folder, towers, text, vision, dtype, device).requires_grad_(False)
    session = NoteSession(model, max_draft_tokens=draft_depth)
    session.place(REQUEST, prompt.ids, media, prompt.media)
    return session


def _engine(
    folder: Path,
    towers: Sequence[Tower],
    dtype: torch.dtype,
    device: str,
    backend: Backend | None,
    draft_depth: int,
    tokens: int,
) -> NoteEngine:
    model = load_note_model(folder, towers, dtype=dtype)
    pages = -(-(tokens + draft_depth + 1) // PAGE)
    options = EngineOptions(pages=pages, page_size=PAGE, requests=1, max_draft_tokens=draft_depth)
    try:
        return NoteEngine.from_state(
            model.note, model.state_dict(), dtype, device, backend, options, towers, model.indexer_rope_layout
        )
    except NotSupportedError as obstacle:
        raise NotSupportedHere(f"the optimized implementation: {obstacle}") from obstacle


def _modalities(config: NoteConfig) -> tuple[MediaKind, ...]:
    seen: tuple[MediaKind, ...] = ("image", "video") if config.vision else ()
    return (*seen, "audio") if config.audio else seen


class Streamed:
    """A generator of one request that tells tokens as soon as they are certain: before the step behind them.

    With drafts some tokens of a step are taken back; what is told is not.
    """

    def __init__(self, session: Generator, tell: Callable[[Sequence[int]], None]):
        self._session, self._tell = session, tell
        self.drafts: Callable[[Sequence[DraftItem]], dict[str, Tensor]] = session.drafts
        self.length = session.length
        self._prompt_length = 0
        self._stepped: list[int] = []
        self._told = 0

    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict[str, Tensor]:
        (item,) = items
        if item.kind == "prefill":
            self._prompt_length += len(item.token_ids)
        else:
            self.finish([*self._stepped, item.token_ids[0]])
            self._stepped += item.token_ids
        return self._session.step(items, last_only)

    def truncate(self, request: str, length: int) -> None:
        self._session.truncate(request, length)
        del self._stepped[length - self._prompt_length :]

    def finish(self, tokens: Sequence[int]) -> None:
        """Tell the rest of `tokens`, all that are certain."""
        self._tell(tokens[self._told :])
        self._told = len(tokens)
