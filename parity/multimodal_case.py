"""Cases of the whole model: requests made of text, images, sounds, videos and tools, in one line.

    t4 i60x90 s9000 i28x56 | v30x64x64 | k2 t3

is three requests of one user turn each; its parts stand in this order:

    t4           four words of text
    i60x90       an image file of 60 x 90 pixels (height x width)
    s9000        a sound file of 9,000 samples at 16 kHz
    v30x64x64    a video file of 30 frames at 10 a second, 64 x 64 pixels, with sound: time stamps, frames, sounds
    p30x64x64    the same in transformers' convention: all frames on the video's placeholder, no stamps, no sound
    k2           two tools in the system turn

Files are made from the seed (`multimodal_files`). Pillow may resize the two axes in either order; where the order shows
(an image that becomes lower and changes its width) transformers' processor, which leaves it to Pillow, has other pixels
than the released one, so drawn images are such that it does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import hypothesis
from hypothesis import strategies as st

from parity.errors import ParityError

PartKind = Literal["text", "image", "sound", "video", "padded video", "tools"]
_KINDS: dict[str, tuple[PartKind, int]] = {
    "t": ("text", 1),
    "i": ("image", 2),
    "s": ("sound", 1),
    "v": ("video", 3),
    "p": ("padded video", 3),
    "k": ("tools", 1),
}
_LETTERS = {kind: letter for letter, (kind, _) in _KINDS.items()}
_WORD = re.compile(r"([tisvpk])([1-9]\d{0,6}(?:x[1-9]\d{0,6})*)")
NAMES = "abcdefghij"


class MultimodalCaseError(ParityError):
    """A line that describes no requests."""


@dataclass(frozen=True)
class Part:
    """`sizes`: words, tools or samples; height and width; frames, height and width."""

    kind: PartKind
    sizes: tuple[int, ...]

    def text(self) -> str:
        return _LETTERS[self.kind] + "x".join(map(str, self.sizes))


@dataclass(frozen=True)
class MultimodalCase:
    """Requests a, b, …, and the seed of their files, words and later tokens."""

    requests: tuple[tuple[Part, ...], ...]
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> MultimodalCase:
        """Read the one-line form. Raises: MultimodalCaseError, quoting what is wrong."""
        requests = tuple(tuple(_part(word) for word in line.split()) for line in text.split("|"))
        if not 0 < len(requests) <= len(NAMES) or not all(requests):
            raise MultimodalCaseError(f"{text!r}: needs 1 to {len(NAMES)} requests of at least one part, such as 't3'")
        return cls(requests, seed)

    def text(self) -> str:
        return " | ".join(" ".join(part.text() for part in parts) for parts in self.requests)

    @property
    def tokens(self) -> int:
        """A measure of its size, smaller is simpler: media count for what they roughly take."""
        return sum(_size(part) for parts in self.requests for part in parts)


def _part(word: str) -> Part:
    match = _WORD.fullmatch(word)
    if match:
        kind, dims = _KINDS[match[1]]
        sizes = tuple(map(int, match[2].split("x")))
        if len(sizes) == dims:
            return Part(kind, sizes)
    raise MultimodalCaseError(
        f"{word!r} is none of t4 (words), i60x90 (image), s9000 (sound), v30x64x64 (video), p30x64x64 (the same in "
        f"transformers' convention), k2 (tools)"
    )


def _size(part: Part) -> int:
    if part.kind == "image":
        return 1 + part.sizes[0] * part.sizes[1] // 784
    if part.kind == "sound":
        return 1 + part.sizes[0] // 1280
    return 1000 if part.kind in ("video", "padded video") else part.sizes[0]


def boundary_cases(seed: int = 0) -> tuple[MultimodalCase, ...]:
    """Every kind beside each other and alone; sounds of one sample, one chunk and one sample more; tools; video."""
    lines = (
        "t4 i55x90 s9000 t1 i28x56 | t2 | k1 t3 s1",
        "i84x28 i28x84 i28x28 t1 | s32000 s32001 t1 s1280",
        "t1 v30x64x64 i56x56 | p12x64x64 t2",
    )
    return tuple(MultimodalCase.parse(line, seed + number) for number, line in enumerate(lines))


def cases(with_video: bool = True) -> st.SearchStrategy[MultimodalCase]:
    """Fewer, shorter and without files first. Heights are rounded up to cells of 28, so that passes commute."""
    sides = st.sampled_from([28, 55, 84])
    image = st.builds(lambda height, width: Part("image", (height, width)), sides, sides)
    sound = st.sampled_from([1, 1280, 1281, 9000, 31999, 32001]).map(lambda samples: Part("sound", (samples,)))
    video = st.sampled_from([Part("video", (12, 64, 64)), Part("padded video", (12, 64, 64))])
    text = st.integers(1, 5).map(lambda words: Part("text", (words,)))
    tools = st.integers(1, 3).map(lambda count: Part("tools", (count,)))
    part = st.one_of(text, image, sound, tools, *([video] if with_video else []))
    request = st.lists(part, min_size=1, max_size=5).filter(
        lambda parts: sum(one.kind in ("video", "padded video") for one in parts) < 2
    )
    return st.builds(
        lambda requests, seed: MultimodalCase(tuple(map(tuple, requests)), seed),
        st.lists(request, min_size=1, max_size=3),
        st.integers(0, 999),
    )


def drawn_cases(count: int, seed: int = 0) -> tuple[MultimodalCase, ...]:
    """`count` random cases, the same for the same seed."""
    drawn: list[MultimodalCase] = []
    if count:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count, database=None, deadline=None, phases=[hypothesis.Phase.generate], derandomize=False
        )
        @hypothesis.given(cases())
        def keep(case: MultimodalCase) -> None:
            drawn.append(case)

        keep()
    return tuple(drawn)
