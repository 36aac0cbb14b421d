"""The whole optimized model: requests that begin with media give what the reference gives, in chunks and in company.

float64 and torch twins, so that only logic is compared; with the engine's recordings and without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from optimized.engine import DecodeItem, Engine, EngineOptions
from optimized.model import NoteEngine
from optimized.plan_spans import StepLimits
from reference.checkpoint import synthetic_tensors
from reference.errors import CacheError, ConfigError, TokenIdError
from reference.generate import generate
from reference.media.image import Patches
from reference.media.mel import features
from reference.model import NoteModel, NoteSession
from reference.model_media import ImageInput, MediaInput, PaddedVideoInput, SoundInput
from reference.model_scatter import MediaRows, PlaceholderError
from reference.model_tiny import tiny_note
from reference.probe import Recorder, concatenated, listening
from reference.prompt_media import MediaSpan
from reference.session import StepItem

CONFIG = tiny_note()
IMAGE, VIDEO, AUDIO = CONFIG.image_token_id, CONFIG.video_token_id, CONFIG.audio_token_id
WEIGHTS = {name: tensor.double() for name, tensor in synthetic_tensors(CONFIG)}
OPTIONS = EngineOptions(
    pages=128, page_size=4, requests=6, limits=StepLimits(10_000, 2**26, 2**22), poison=True, disjoint_numbers=True
)
MODEL = NoteModel(CONFIG)
MODEL.load_state_dict(WEIGHTS)
MODEL = MODEL.double().requires_grad_(False)
FEW = dataclasses.replace(OPTIONS, limits=StepLimits(9, 2**15, 600))
RECORDED = dataclasses.replace(OPTIONS, graphs=True)
ALIKE = dataclasses.replace(OPTIONS, batch_invariant=True, max_length=120)
WAYS = pytest.mark.parametrize(
    "options", [OPTIONS, FEW, RECORDED, ALIKE], ids=["whole", "few rows a step", "recorded", "batch-invariant"]
)


def picture(height: int, width: int, seed: int = 0, frames: int = 1) -> Patches:
    count = frames * height * width
    pixels = torch.randn(count, 3 * 14 * 14, generator=torch.Generator().manual_seed(seed))
    return Patches(pixels, torch.tensor([[frames, height, width]]))


def sound(samples: int, seed: int = 0) -> SoundInput:
    waveform_S = torch.randn(samples, generator=torch.Generator().manual_seed(seed)) * 0.1
    return SoundInput(features(waveform_S, CONFIG.audio, torch.float64))


MEDIA: list[MediaInput] = [
    ImageInput(picture(4, 6, 1)),
    sound(9000),
    PaddedVideoInput(picture(2, 4, 2, frames=2)),
    ImageInput(picture(2, 2, 3)),
    sound(33_000, 1),
]
IDS = (5, *[IMAGE] * 6, 7, 8, *[AUDIO] * 8, *[VIDEO] * 4, 9, IMAGE, *[AUDIO] * 26, 3)
# Of other requests: text, media alone, and a prompt shorter than the window.
OTHERS: dict[str, tuple[tuple[int, ...], list[MediaInput]]] = {
    "b": (tuple(range(40, 61)), []),
    "c": ((IMAGE, IMAGE), [ImageInput(picture(4, 2, 5))]),
}


def engine(options: EngineOptions = OPTIONS) -> NoteEngine:
    return NoteEngine.from_state(CONFIG, WEIGHTS, torch.float64, "cpu", "torch", options)


def placed(one: NoteEngine | NoteSession) -> NoteEngine | NoteSession:
    for name, (ids, media) in {"a": (IDS, MEDIA), **OTHERS}.items():
        one.place(name, ids, media)
    return one


PROMPTS = {"a": IDS, **{name: ids for name, (ids, _) in OTHERS.items()}}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert {*found} == {*expected}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)


def test_rows_of_each_item_are_the_references() -> None:
    found, expected = engine().features(MEDIA), MODEL.features(MEDIA)
    assert [item.kind for item in found] == [item.kind for item in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.rows_MD, theirs.rows_MD, rtol=1e-9, atol=1e-9)


@WAYS
def test_prompts_in_company_and_what_follows(options: EngineOptions) -> None:
    ours, session = placed(engine(options)), placed(NoteSession(MODEL))
    steps = [
        [StepItem(name, ids, "prefill") for name, ids in PROMPTS.items()],
        [StepItem("a", (5,), "decode"), StepItem("b", (6, 7, 8), "verify"), StepItem("c", (9,), "decode")],
        [StepItem("c", tuple(range(20, 45)), "prefill"), StepItem("a", (IMAGE,), "decode")],
    ]
    for items in steps:
        close(ours.step(items), session.step(items))


@pytest.mark.parametrize("lengths", [(1, 6, 5), (12, 30), (len(IDS) - 1,)], ids=str)
def test_chunks_are_the_prompt(lengths: Sequence[int]) -> None:
    expected = placed(NoteSession(MODEL)).step([StepItem("a", IDS, "prefill")])["a"]
    ours, found, start = placed(engine()), [], 0
    for length in (*lengths, len(IDS) - sum(lengths)):
        found.append(ours.step([StepItem("a", IDS[start : start + length], "prefill")])["a"])
        start += length
    close({"a": torch.cat(found)}, {"a": expected})


def test_text_behind_the_prompt_may_come_with_it() -> None:
    item = StepItem("a", (*IDS, 11, 12), "prefill")
    close(placed(engine()).step([item]), placed(NoteSession(MODEL)).step([item]))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_generation_with_drafts_behind_media(depth: int) -> None:
    """Past the window of 7, with a prompt of media alone in company."""
    expected = generate(placed(NoteSession(MODEL)), PROMPTS, 12, 0).tokens
    assert generate(placed(engine()), PROMPTS, 12, depth).tokens == expected
    if depth == 3:
        assert generate(placed(engine(RECORDED)), PROMPTS, 12, depth).tokens == expected


@pytest.mark.parametrize("options", [OPTIONS, RECORDED], ids=["whole", "recorded"])
def test_decoding_goes_on_behind_the_whole_prompt(options: EngineOptions) -> None:
    expected = generate(placed(NoteSession(MODEL)), PROMPTS, 12, 0).tokens
    for depth in (0, 3):
        ours = placed(engine(options))
        logits = ours.step([StepItem(name, ids, "prefill") for name, ids in PROMPTS.items()], last_only=True)
        items = [DecodeItem(name, int(logits_TW.argmax())) for name, logits_TW in logits.items()]
        texts = ours.decode_with_drafts(items, 11, depth) if depth else ours.decode(items, 11)
        found = {name: text.tokens if depth else text for name, text in texts.items()}
        assert {item.request: [item.next_token, *found[item.request]] for item in items} == expected


def test_nothing_is_decoded_inside_of_a_prompt() -> None:
    ours = placed(engine())
    ours.step([StepItem("a", IDS[:9], "prefill")])
    for name, held in (("a", 9), ("c", 0)):
        message = f"'{name}': {held} of the {len(PROMPTS[name])} tokens of the prompt"
        for decode in (lambda item: ours.decode([item], 3), lambda item: ours.decode_with_drafts([item], 3, 1)):
            with pytest.raises(PlaceholderError, match=message):
                decode(DecodeItem(name, 7))
    ours.free("c")
    ours.place("c", *OTHERS["c"])
    with pytest.raises(CacheError, match="no request 'x'"):
        ours.free("x")


def test_intermediates_are_the_references() -> None:
    """Tower outputs, what enters the first layer behind the scatter, and all behind it."""
    recorders = Recorder(), Recorder()
    for recorder, new in zip(recorders, (lambda: engine(), lambda: NoteSession(MODEL)), strict=True):
        with listening(recorder):
            one = new()
            one.place("a", IDS, MEDIA)
            one.step([StepItem("a", IDS, "prefill")])
    names = ("vision.merged", "embeddings", "layers.0.input", "layers.5.output", "final_norm")
    found, expected = (
        concatenated(seen for seen in recorder.observations if seen.name in names) for recorder in recorders
    )
    assert {*found} == {*expected} == {*names}
    close(found, expected)


def test_placeholders_beyond_the_vocabulary() -> None:
    config = dataclasses.replace(CONFIG, image_token_id=999)
    model = NoteModel(config)
    model.load_state_dict(WEIGHTS)
    session = NoteSession(model.double().requires_grad_(False))
    ours = NoteEngine.from_state(config, WEIGHTS, torch.float64, "cpu", "torch", OPTIONS)
    ids, media = (5, *[999] * 6, 7), [ImageInput(picture(4, 6))]
    for one in (ours, session):
        one.place("a", ids, media)
    close(ours.step([StepItem("a", ids, "prefill")]), session.step([StepItem("a", ids, "prefill")]))
    torch.testing.assert_close(ours.draft("a", 3, 2), session.draft("a", 3, 2), rtol=1e-9, atol=1e-9)


def test_rows_that_are_there_already_are_taken() -> None:
    ours, rows = engine(), MODEL.features(MEDIA)
    ours.place("a", IDS, MEDIA, features=rows)
    expected = placed(NoteSession(MODEL)).step([StepItem("a", IDS, "prefill")])["a"]
    close(ours.step([StepItem("a", IDS, "prefill")]), {"a": expected})


def test_a_fork_goes_on_with_the_prompt_and_a_freed_name_is_free() -> None:
    ours, session = placed(engine()), placed(NoteSession(MODEL))
    for one in (ours, session):
        one.step([StepItem("a", IDS[:9], "prefill")])
        one.fork("a", "d")
        one.free("a")
    items = [StepItem("d", IDS[9:], "prefill"), StepItem("a", (4, 5), "prefill")]
    close(ours.step(items), session.step(items))


@pytest.mark.parametrize(
    ("ids", "media", "error", "message"),
    [
        ((5, IMAGE), [ImageInput(picture(4, 2))], PlaceholderError, "1 placeholders of image .* 2 rows"),
        ((5, AUDIO), [], PlaceholderError, "1 placeholders of audio"),
        ((5, 281, IMAGE), [ImageInput(picture(2, 2))], TokenIdError, "281 is outside"),
        ((-1, IMAGE), [ImageInput(picture(2, 2))], TokenIdError, "-1 is outside"),
    ],
)
def test_what_does_not_fit_is_refused(ids: tuple[int, ...], media: list[MediaInput], error, message: str) -> None:
    with pytest.raises(error, match=message):
        engine().place("a", ids, media)


def test_other_refusals() -> None:
    ours = placed(engine())
    with pytest.raises(PlaceholderError, match="tokens 0 to 2 are not those of the prompt"):
        ours.step([StepItem("a", (1, 2, 3), "prefill")])
    ours.step([StepItem("a", IDS, "prefill")])
    with pytest.raises(CacheError, match="has begun"):
        ours.place("a", IDS, MEDIA)
    with pytest.raises(PlaceholderError, match="item 0 of the prompt was written to"):
        engine().place("a", IDS, MEDIA, spans=[MediaSpan("image", 0, 2, 8)])
    with pytest.raises(PlaceholderError, match="must be 96 wide"):
        engine().place("a", (IMAGE,), [], features=[MediaRows("image", torch.zeros(1, 95))])
    alone = NoteEngine(CONFIG, engine().engine)
    for item, tower in ((MEDIA[0], "vision"), (MEDIA[1], "audio")):
        with pytest.raises(PlaceholderError, match=f"the {tower} tower is left out"):
            alone.features([item])
    for tower in ("vision", "audio"):
        config = dataclasses.replace(CONFIG, **{tower: None})
        with pytest.raises(ConfigError, match=f"no {tower} tower"):
            NoteEngine.from_state(config, WEIGHTS, torch.float64, "cpu", "torch", OPTIONS, towers=(tower,))


class TestEngineWithEmbeddings:
    """The engine itself takes rows in the place of ids."""

    @staticmethod
    def text_engine(options: EngineOptions = OPTIONS) -> Engine:
        return engine(options).engine

    @WAYS
    def test_rows_of_the_table_are_the_ids(self, options: EngineOptions) -> None:
        """Also in a decode step, which then is not one of the recorded ones."""
        ids = tuple(range(3, 30))
        plain, given = self.text_engine(options), self.text_engine(options)
        table_WD = plain.text.weights.embeddings_WD
        for chunk in (ids, (7,), (8, 9)):
            expected = plain.step([StepItem("a", chunk, "prefill"), StepItem("b", (4,), "decode")])
            rows_TD = table_WD[list(chunk)]
            found = given.step([StepItem("a", chunk, "prefill", rows_TD), StepItem("b", (4,), "decode")])
            close(found, expected)

    def test_other_shapes_and_dtypes_are_refused_and_nothing_is_left(self) -> None:
        one = self.text_engine()
        for rows_TD in (torch.zeros(2, 96).double(), torch.zeros(3, 95).double(), torch.zeros(3, 96)):
            with pytest.raises(CacheError, match=r"embeddings must be \(3, 96\) in torch.float64"):
                one.step([StepItem("a", (1, 2, 3), "prefill", rows_TD)])
        with pytest.raises(TokenIdError, match="-1 is negative"):
            one.step([StepItem("a", (1, -1), "prefill", torch.zeros(2, 96).double())])
        with pytest.raises(CacheError, match="no request"):
            one.length("a")
