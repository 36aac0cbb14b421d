"""The whole model agrees with transformers' multimodal model, fed the same pixels, features and ids.

Exact mode, drawn prompts: the towers' rows, then every intermediate of the text model behind the scatter, and the
logits of prefill and decoding, to 1e-10. Which placeholder gets which row is each side's own work.
bfloat16 under the preset `transformers`: the towers' rows and the logits have the same bits.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity.exact import exact
from parity.runners import NotSupportedHere
from parity.runners.transformers_note import TransformersNoteRunner
from parity.tolerance import EXACT_LIMIT
from reference.audio import tiny_audio
from reference.checkpoint import synthetic_tensors, write_checkpoint, write_synthetic
from reference.config import NoteConfig, tiny
from reference.media.image import Patches
from reference.media.mel import features
from reference.model import NoteModel, NoteSession
from reference.model_media import (
    ImageInput,
    MediaInput,
    PaddedVideoInput,
    SoundInput,
    VideoInput,
    prompt_item,
    tower_inputs,
)
from reference.model_scatter import MediaRows
from reference.numerics import Numerics
from reference.probe import Recorder, concatenated, listening
from reference.session import DraftItem, StepItem
from reference.vision import tiny_vision
from reference.vision_numerics import VisionNumerics

pytest.importorskip("transformers", reason="the oracle needs transformers 5.24")

CONFIG = dataclasses.replace(tiny(), vision=tiny_vision(), audio=tiny_audio())
PADS = {"image": CONFIG.image_token_id, "video": CONFIG.video_token_id, "audio": CONFIG.audio_token_id}
WEIGHTS = dict(synthetic_tensors(CONFIG))
IS_EXPLORING = settings.get_current_profile_name() == "explore"
# A prompt in words: i4x6 an image of 4 x 6 patches, a900 a sound of 900 samples, v2x4x4 a padded video of 2 frames,
# [i2x2 a9 i2x2] an interleaved one, t3 three tokens of text.
EVERY_KIND = "t2 i4x6 t1 a33000 t1 v2x4x4 t1 [ i2x4 a700 i2x4 ] t3"
PAST_WINDOW_AND_TOP_K = "t9 i8x8 t1 i2x2 t1 a40000 t6"
NOTHING_BETWEEN = "i2x2 i4x2 v1x2x2 v1x4x2 a1 a1300"


def media_of(line: str, seed: int = 0) -> tuple[tuple[int, ...], list[MediaInput]]:
    """Ids and inputs, both in float64, of a prompt in words."""
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    media: list[MediaInput] = []
    parts: list[ImageInput | SoundInput] | None = None
    for word in line.split():
        if word == "[":
            parts = []
            continue
        if word == "]":
            media.append(VideoInput(tuple(parts or ())))
            parts = None
            continue
        if word[0] == "t":
            ids += generator.integers(3, 189, int(word[1:])).tolist()
            continue
        made = _input(word, generator)
        ids += [PADS[prompt_item(made).kind]] * prompt_item(made).tokens
        if parts is None:
            media.append(made)
        else:
            parts.append(made)
            ids.append(7)
    return tuple(ids), media


def _input(word: str, generator: np.random.Generator) -> MediaInput:
    if word[0] == "a":
        made = features(torch.from_numpy(generator.normal(size=int(word[1:]))), CONFIG.audio, torch.float64)
        return SoundInput(made)
    grid = [int(side) for side in word[1:].split("x")]
    grid = grid if word[0] == "v" else [1, *grid]
    pixels = torch.from_numpy(generator.normal(size=(int(np.prod(grid)), 3 * CONFIG.vision.patch_size**2)))
    patches = Patches(pixels, torch.tensor([grid]))
    return PaddedVideoInput(patches) if word[0] == "v" else ImageInput(patches)


@st.composite
def prompts(draw: st.DrawFn) -> str:
    sides = st.sampled_from([2, 4, 6])
    image = st.builds("i{}x{}".format, sides, sides)
    sound = st.sampled_from([1, 1280, 1281, 31999, 32000, 32001, 65000]).map("a{}".format)
    video = st.builds("v{}x{}x{}".format, st.integers(1, 3), sides, sides)
    native = st.lists(st.one_of(image, sound), min_size=1, max_size=4).map(lambda parts: f"[ {' '.join(parts)} ]")
    words = st.one_of(st.integers(1, 5).map("t{}".format), image, sound, video, native)
    return " ".join(draw(st.lists(words, min_size=1, max_size=6))) + " t1"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as parent:
        write_checkpoint(Path(parent) / "folder", CONFIG, WEIGHTS.items())
        yield Path(parent) / "folder"


def reference_of(dtype: torch.dtype) -> NoteModel:
    model = NoteModel(CONFIG, Numerics.preset("transformers"), VisionNumerics.preset("transformers"))
    model.load_state_dict(WEIGHTS)
    return model.to(dtype).requires_grad_(False)


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[NoteModel, TransformersNoteRunner]:
    with exact():
        model = reference_of(torch.float64)
    return model, TransformersNoteRunner(folder, torch.float64, exact=True)


def steps(ids: tuple[int, ...]) -> list[StepItem]:
    return [StepItem("a", ids, "prefill"), StepItem("a", (5,), "decode"), StepItem("a", (9, 11), "prefill")]


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative to the largest expected value; infinite where shapes or infinities differ."""
    finite = expected.isfinite()
    if actual.shape != expected.shape or not torch.equal(actual.isfinite(), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    actual, expected = actual[finite].double(), expected[finite].double()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Over what both show, but for choices and for the embeddings, which transformers shows before the scatter."""
    names = [name for name in found if name in expected and found[name].is_floating_point() and name != "embeddings"]
    assert {"final_norm", "logits", "layers.0.input", "layers.5.attn.core", "layers.5.ffn.routed"} <= {*names}
    return max((error(found[name], expected[name]), name) for name in names)


@settings(max_examples=300 if IS_EXPLORING else 8)
@given(prompts(), st.integers(0, 99))
@example(EVERY_KIND, 0)
@example(PAST_WINDOW_AND_TOP_K, 1)
@example(NOTHING_BETWEEN, 2)
def test_the_logic_is_the_same_to_ten_digits(pair, line: str, seed: int):
    model, port = pair
    ids, media = media_of(line, seed)
    outputs = port.towers(media)
    port.place("a", media)
    with exact(), torch.no_grad():
        rows = model.features(media)
        session = NoteSession(model)
        session.place("a", ids, media)
    for kind in ("image", "video", "audio"):
        own = [item.rows_MD for item in rows if item.kind == kind]
        theirs = getattr(outputs, kind)
        assert (theirs is None) == (not own)
        if own:
            assert error(torch.cat(own), theirs) <= EXACT_LIMIT, kind
    for item in steps(ids):
        here, there = Recorder(), Recorder()
        with exact(), torch.no_grad(), listening(here):
            session.step([item])
        with listening(there):
            port.step([item])
        found, name = worst(concatenated(there.observations), concatenated(here.observations))
        assert found <= EXACT_LIMIT, (name, item.kind)
    port.free("a")
    assert not port.lower_precision_ops


def test_rows_and_logits_in_bfloat16_have_the_bits_of_transformers(folder: Path):
    model, port = reference_of(torch.bfloat16), TransformersNoteRunner(folder, torch.bfloat16)
    ids, media = media_of(EVERY_KIND)
    outputs = port.towers(media)
    port.place("a", media)
    session = NoteSession(model)
    with torch.no_grad():
        rows = model.features(media)
        session.place("a", ids, media)
        logits = session.step(steps(ids)[:1])["a"]
    for kind in ("image", "video", "audio"):
        own = torch.cat([item.rows_MD for item in rows if item.kind == kind])
        assert own.dtype == torch.bfloat16
        assert torch.equal(getattr(outputs, kind), own), kind
    assert torch.equal(port.step(steps(ids)[:1])["a"], logits)


def test_rows_in_another_order_are_seen(pair):
    """The comparison's own check: the fault `scatter_order_sorted` of the specification."""
    model, port = pair
    ids, media = media_of("t1 i2x4 t1 i4x4 t1")
    port.place("a", media)
    logits = port.step([StepItem("a", ids, "prefill")])["a"]
    port.free("a")
    with exact(), torch.no_grad():
        first, second = (item.rows_MD for item in model.features(media))
        mixed = torch.cat((second, first)).split([len(first), len(second)])
        embeddings_TD = model.embed(torch.tensor(ids), [MediaRows("image", rows_MD) for rows_MD in mixed])
        wrong = NoteSession(model).step([StepItem("a", ids, "prefill", embeddings_TD)])["a"]
    assert error(wrong, logits) > 1e-3


class TestWhatTransformersCannotDo:
    def test_drafts(self, pair):
        with pytest.raises(NotSupportedHere, match="draft-depth must be 0"):
            pair[1].drafts([DraftItem("a", 3, 1)])
        assert pair[1].drafts([]) == {}

    @pytest.mark.parametrize("lacking", ["vision", "audio"])
    def test_a_folder_with_one_tower(self, tmp_path: Path, lacking: str):
        config: NoteConfig = dataclasses.replace(CONFIG, **{lacking: None})
        write_synthetic(tmp_path / "folder", config)
        with pytest.raises(NotSupportedHere, match="needs both towers"):
            TransformersNoteRunner(tmp_path / "folder", torch.float32)

    def test_media_without_towers(self, folder: Path):
        port = TransformersNoteRunner(folder, torch.float32, with_towers=False)
        with pytest.raises(NotSupportedHere, match="towers are left out"):
            port.place("a", media_of("i2x2")[1])


def test_words_are_what_they_say():
    ids, media = media_of(EVERY_KIND)
    runs = [(token, len(list(run))) for token, run in itertools.groupby(ids, lambda token: token if token > 189 else 0)]
    assert [length for token, length in runs if token] == [6, 26, 8, 2, 1, 2]
    assert sum(_tokens(item) for item in tower_inputs(media)) == 45


def _tokens(item: MediaInput) -> int:
    made = prompt_item(item)
    assert not isinstance(made, Sequence)
    return made.tokens
