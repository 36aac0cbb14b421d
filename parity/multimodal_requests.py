"""A case's requests as both sides read them: files through this project's preprocessing, chat to ids, and the workload.

Each request is one user turn; the words of a text come from the seed. All prompts are prefilled in one step, then come
decoding, a few tokens at once, drafts, and a rollback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from parity.multimodal_case import NAMES, MultimodalCase, Part
from parity.multimodal_files import image_file, sound_file, video_file
from parity.workload import Workload
from reference.checkpoint.recipes import seed_of
from reference.checkpoint.synthetic_chat import PREPROCESSOR_FILE
from reference.config import NoteConfig
from reference.media.image import preprocess_images
from reference.media.image_config import ImageConfig
from reference.media.mel import features
from reference.media.sound import load_waveform
from reference.media.video import prepare_video
from reference.media.video_options import VideoOptions
from reference.model_media import MediaInput, SoundInput, VideoConvention, images, prompt_item, video_input
from reference.prompt import ChatTokenizer, Prompt, build_prompt
from reference.prompt_check import read_template, read_tools_text
from reference.prompt_media import MediaRules
from reference.prompt_messages import MediaKind
from reference.prompt_render import PromptOptions, ToolsText

# Where no template file says what stands around the tools.
STAND_IN_TOOLS = ToolsText("\n\n# Tools\n\n<tools>", "\n</tools>")
WORDS = ("the", "two", "red", "say", "sum", "bell", "what", "more", "other", "picture")
_PLACES: dict[str, MediaKind] = {"image": "image", "sound": "audio", "video": "video", "padded video": "video"}


@dataclass(frozen=True)
class Folder:
    """What of a checkpoint preprocessing reads."""

    path: Path
    config: NoteConfig
    tokenizer: ChatTokenizer
    images: ImageConfig
    tools_text: ToolsText

    @classmethod
    def open(cls, path: str | Path) -> Folder:
        """Raises: ConfigError, PromptError."""
        path = Path(path)
        config = NoteConfig.from_json(path / "config.json")
        preprocessor = path / PREPROCESSOR_FILE
        image_config = ImageConfig.from_json(preprocessor, config.vision) if preprocessor.exists() else ImageConfig()
        template = read_template(path)
        tools_text = read_tools_text(template) if template else STAND_IN_TOOLS
        return cls(path, config, ChatTokenizer.open(path, config), image_config, tools_text)


@dataclass(frozen=True)
class MadeRequest:
    """A prompt and what the towers read for it. `files`: images, and waveforms [S] of sounds, in the prompt's order."""

    name: str
    prompt: Prompt
    media: tuple[MediaInput, ...]
    images: tuple[bytes, ...]
    waveforms: tuple[Tensor, ...]
    has_video: bool


def make_requests(case: MultimodalCase, folder: Folder) -> dict[str, MadeRequest]:
    """Under `exact()` features are float64. Raises: what reading files and writing prompts raise."""
    return {
        name: _Maker(folder, name, case.seed).request(parts) for name, parts in zip(NAMES, case.requests, strict=False)
    }


def workload_of(case: MultimodalCase, made: Mapping[str, MadeRequest]) -> Workload:
    """The steps that are compared; prompts are its chosen tokens."""
    names = list(made)
    first, last = names[0], names[-1]
    prefill = "+".join(f"{name}{len(request.prompt.ids)}" for name, request in made.items())
    everyone = "+".join(names)
    steps = f"p:{prefill} d:{everyone} p:{first}3 m:{last}2 v:{last}4 t:{last}3 d:{everyone}"
    chosen = {
        (name, position, 0): token_id
        for name, request in made.items()
        for position, token_id in enumerate(request.prompt.ids)
    }
    return Workload(Workload.parse(steps, case.seed).actions, case.seed, chosen)


@dataclass
class _Maker:
    folder: Folder
    name: str
    seed: int
    content: list[dict[str, Any]] = field(default_factory=list)
    media: list[MediaInput] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)
    waveforms: list[Tensor] = field(default_factory=list)

    def request(self, parts: Sequence[Part]) -> MadeRequest:
        for number, part in enumerate(parts):
            self._add(part, f"{self.name}: part {number}")
        options = PromptOptions(tools_text=self.folder.tools_text, media=MediaRules(video_beside_others=True))
        items = [prompt_item(item) for item in self.media]
        messages = [{"role": "user", "content": self.content}]
        prompt = build_prompt(messages, self.folder.tokenizer, options, self.tools, items)
        has_video = any(part.kind in ("video", "padded video") for part in parts)
        return MadeRequest(self.name, prompt, tuple(self.media), tuple(self.images), tuple(self.waveforms), has_video)

    def _add(self, part: Part, where: str) -> None:
        if part.kind == "tools":
            self.tools += [_tool(number) for number in range(part.sizes[0])]
        elif part.kind == "text":
            self.content.append({"type": "text", "text": self._words(part.sizes[0], where)})
        else:
            self.content.append({"type": _PLACES[part.kind]})
            self.media.append(self._item(part, where))

    def _item(self, part: Part, where: str) -> MediaInput:
        audio = self.folder.config.audio
        if part.kind == "image":
            self.images.append(image_file(part.sizes[0], part.sizes[1], self.seed, where))
            return images(preprocess_images(self.images[-1:], self.folder.images))[0]
        if part.kind == "sound":
            assert audio is not None
            self.waveforms.append(load_waveform(sound_file(part.sizes[0], self.seed, where), audio.sampling_rate))
            return SoundInput(features(self.waveforms[-1], audio))
        frames, height, width = part.sizes
        options = VideoOptions(context=min(131_072, self.folder.config.text.max_position_embeddings))
        file = video_file(frames, height, width, self.seed, where)
        convention: VideoConvention = "interleaved" if part.kind == "video" else "padded"
        return video_input(prepare_video(file, options, self.folder.images), audio, convention)

    def _words(self, count: int, where: str) -> str:
        raw = np.random.PCG64(seed_of(self.seed, where)).random_raw(count)
        return " ".join(WORDS[int(value % np.uint64(len(WORDS)))] for value in raw)


def _tool(number: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}
