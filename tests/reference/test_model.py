"""The whole model: what is loaded, which row goes to which placeholder, and that media change nothing else."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from media_files import movie
from torch import Tensor

from reference.audio import tiny_audio
from reference.checkpoint import CheckpointFolder, expected_tensors, synthetic_tensors, write_synthetic
from reference.config import NoteConfig, released, tiny
from reference.errors import CacheError, ConfigError, TokenIdError
from reference.generate import generate
from reference.layers.vision_grid import Grid
from reference.media.image import Patches
from reference.media.mel import features
from reference.media.sound import SoundError
from reference.media.video import prepare_video
from reference.model import NoteModel, NoteSession
from reference.model_load import load_note_model
from reference.model_media import ImageInput, MediaInput, PaddedVideoInput, SoundInput, VideoInput, images, video_input
from reference.model_scatter import MediaRows, PlaceholderError, placements, shown
from reference.prompt_media import MediaSpan
from reference.prompt_messages import MediaKind
from reference.session import Session, StepItem
from reference.text import TextModel
from reference.vision import tiny_vision

CONFIG = dataclasses.replace(tiny(), vision=tiny_vision(), audio=tiny_audio())
WEIGHTS = dict(synthetic_tensors(CONFIG))
D = CONFIG.text.hidden_size
IMAGE, VIDEO, AUDIO = CONFIG.image_token_id, CONFIG.video_token_id, CONFIG.audio_token_id
PADS: dict[MediaKind, int] = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
TOWER_NAMES = ("vision_encoder.", "audio_encoder.")
FUZZ_SECONDS = 600


def model_of(config: NoteConfig, weights: dict[str, Tensor] = WEIGHTS, **kwargs) -> NoteModel:
    model = NoteModel(config, **kwargs)
    names = model.state_dict()
    model.load_state_dict({name: tensor for name, tensor in weights.items() if name in names})
    return model.double().requires_grad_(False)


MODEL = model_of(CONFIG)


def image(height: int, width: int, seed: int = 0, frames: int = 0) -> MediaInput:
    """Of so many patches; a padded video if it has frames."""
    grid: Grid = (frames or 1, height, width)
    values = np.random.default_rng(seed).normal(size=(int(np.prod(grid)), 3 * 7 * 7))
    patches = Patches(torch.from_numpy(values).float(), torch.tensor([grid]))
    return PaddedVideoInput(patches) if frames else ImageInput(patches)


def sound(samples: int, seed: int = 0) -> SoundInput:
    values = np.random.default_rng(seed).normal(size=samples)
    return SoundInput(features(torch.from_numpy(values).float(), CONFIG.audio))


def rows(kind: MediaKind, count: int, value: float = 1.0) -> MediaRows:
    return MediaRows(kind, torch.full((count, D), value, dtype=torch.float64))


class TestLoading:
    def test_parameters_are_the_tensors_of_the_release(self):
        assert set(MODEL.state_dict()) == set(expected_tensors(CONFIG))
        text = NoteModel(CONFIG, towers=())
        assert set(text.state_dict()) == {name for name in WEIGHTS if not name.startswith(TOWER_NAMES)}
        assert not text.modalities
        assert NoteModel(CONFIG, towers=("audio",)).modalities == ("audio",)
        assert MODEL.modalities == ("image", "video", "audio")

    def test_the_released_structure_is_loaded_whole(self, tmp_path: Path):
        """46 layers of 256 experts, 42 blocks, 32 speech layers: all 38,006 tensors, of tiny widths."""
        config = narrow_release()
        # A shard's header is read with each of its tensors.
        write_synthetic(tmp_path / "folder", config, shards=400)
        model = load_note_model(tmp_path / "folder", dtype=None)
        held = model.state_dict()
        folder = CheckpointFolder.open(tmp_path / "folder")
        assert len(held) == len(folder.tensors) == 38_006
        assert Counter(tensor.bucket for tensor in folder.tensors.values()) == Counter(
            tensor.bucket for tensor in expected_tensors(released()).values()
        )
        for name, tensor in folder.tensors.items():
            assert held[name].shape == tensor.shape
            assert held[name].dtype == tensor.dtype
        assert not any(tensor.is_meta for tensor in held.values())
        ids = (5, config.image_token_id, config.image_token_id, 6, config.audio_token_id)
        assert max(ids) >= config.text.vocab_size
        picture = ImageInput(Patches(torch.ones(8, 3 * 14 * 14), torch.tensor([[1, 4, 2]])))
        media = [picture, SoundInput(features(torch.ones(9), config.audio))]
        session = NoteSession(model)
        with torch.no_grad():
            session.place("a", ids, media)
            logits = session.step([StepItem("a", ids, "prefill")])["a"]
        assert logits.shape == (5, config.text.vocab_size)
        assert logits.isfinite().all()

    @pytest.mark.parametrize("towers", [(), ("vision",), ("audio",), None])
    def test_of_a_tower_that_is_left_out_no_tensor_is_read(self, tmp_path: Path, monkeypatch, towers):
        write_synthetic(tmp_path / "folder", CONFIG)
        read: list[str] = []
        tensor = CheckpointFolder.tensor

        def noted(self: CheckpointFolder, name: str, *args):
            read.append(name)
            return tensor(self, name, *args)

        monkeypatch.setattr(CheckpointFolder, "tensor", noted)
        model = load_note_model(tmp_path / "folder", towers, dtype=torch.float32)
        wanted = ("vision", "audio") if towers is None else towers
        left_out = tuple(f"{tower}_encoder." for tower in ("vision", "audio") if tower not in wanted)
        assert sorted(read) == sorted(name for name in WEIGHTS if not name.startswith(left_out or "none"))
        assert set(model.state_dict()) == set(read)

    def test_towers_that_are_not_there(self):
        with pytest.raises(ConfigError, match="lacks vision_config"):
            NoteModel(tiny(), towers=("vision",))
        with pytest.raises(ConfigError, match="no tower 'sight'"):
            NoteModel(CONFIG, towers=("sight",))  # type: ignore[arg-type]
        wide = dataclasses.replace(CONFIG, audio=dataclasses.replace(tiny_audio(), adapter_out_dim=95))
        with pytest.raises(ConfigError, match="adapter_out_dim 95 must be the text's hidden_size, 96"):
            NoteModel(wide)
        with pytest.raises(ConfigError, match="placeholder ids must differ"):
            NoteModel(dataclasses.replace(CONFIG, audio_token_id=IMAGE))

    def test_text_has_the_same_bits_with_and_without_towers(self):
        ids = torch.arange(3, 40)
        text = TextModel(CONFIG.text)
        text.load_state_dict({name: tensor for name, tensor in WEIGHTS.items() if not name.startswith(TOWER_NAMES)})
        expected = text.double()(ids)
        assert torch.equal(MODEL(ids), expected)
        assert torch.equal(model_of(CONFIG, towers=())(ids), expected)


class TestEmbed:
    def test_each_row_goes_to_its_placeholder(self):
        ids = torch.tensor([3, IMAGE, IMAGE, 4, AUDIO, 5, IMAGE, VIDEO, 6])
        found = [rows("image", 2, 10.0), rows("audio", 1, 20.0), rows("image", 1, 30.0), rows("video", 1, 40.0)]
        embeddings_TD = MODEL.embed(ids, found)
        plain_TD = MODEL.embed(ids)
        for position, value in {1: 10.0, 2: 10.0, 4: 20.0, 6: 30.0, 7: 40.0}.items():
            assert (embeddings_TD[position] == value).all()
        for position in (0, 3, 5, 8):
            assert torch.equal(embeddings_TD[position], plain_TD[position])

    def test_order_between_kinds_does_not_matter_and_order_within_a_kind_does(self):
        ids = torch.tensor([IMAGE, 3, AUDIO, 3, IMAGE])
        first, second, heard = rows("image", 1, 1.0), rows("image", 1, 2.0), rows("audio", 1, 3.0)
        in_order = MODEL.embed(ids, [first, heard, second])
        assert torch.equal(MODEL.embed(ids, [heard, first, second]), in_order)
        assert not torch.equal(MODEL.embed(ids, [second, heard, first]), in_order)

    def test_rows_are_cast_to_the_dtype_of_the_embeddings(self):
        found = MODEL.embed(torch.tensor([IMAGE]), [MediaRows("image", torch.full((1, D), 1.5, dtype=torch.bfloat16))])
        assert found.dtype == torch.float64
        assert (found == 1.5).all()

    def test_placeholders_beyond_the_vocabulary_ask_no_table(self):
        config = dataclasses.replace(CONFIG, image_token_id=193, audio_token_id=2**40, video_token_id=500)
        model = model_of(config)
        ids = torch.tensor([3, 193, 2**40, 500])
        found = model.embed(ids, [rows("image", 1, 1.0), rows("audio", 1, 2.0), rows("video", 1, 3.0)])
        assert found[1:, 0].tolist() == [1.0, 2.0, 3.0]
        with pytest.raises(TokenIdError, match="token 1 has id 600"):
            model.embed(torch.tensor([193, 600]), [rows("image", 1)])

    def test_without_features_a_placeholder_is_a_token_like_others(self):
        assert torch.equal(MODEL.embed(torch.tensor([IMAGE])), MODEL.model.embed_tokens.weight[IMAGE][None])

    @pytest.mark.parametrize(
        ("ids", "found", "message"),
        [
            (
                [3, IMAGE, IMAGE],
                [rows("image", 3)],
                r"2 placeholders of image \(id 190\) at positions 1-2, and 3 rows",
            ),
            ([IMAGE, 3, IMAGE], [], r"2 placeholders of image .* at positions 0, 2, and 0 rows of 0 items"),
            ([3, 4], [rows("audio", 2)], r"0 placeholders of audio .* at positions none, and 2 rows of 1 items \[2\]"),
            ([IMAGE, IMAGE], [rows("video", 2)], "2 placeholders of image"),
            # Both counts agree in total, and each item is wrong.
            ([IMAGE] * 4 + [3] + [IMAGE] * 4, [rows("image", 3), rows("image", 5)], "image 1 has 5 rows.* 3, 5-8"),
            ([IMAGE], [rows("image", 0), rows("image", 1)], "image 0 has no rows"),
            ([IMAGE], [MediaRows("image", torch.ones(1, D + 1))], r"96 wide, found \(1, 97\)"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, ids: list[int], found: list[MediaRows], message: str):
        with pytest.raises(PlaceholderError, match=f"request 'b': .*{message}"):
            MODEL.embed(torch.tensor(ids), found, request="b")

    def test_spans_tell_items_apart_that_touch(self):
        ids = torch.tensor([VIDEO] * 5)
        spans = [MediaSpan("video", 0, 0, 2), MediaSpan("video", 1, 2, 5)]
        MODEL.embed(ids, [rows("video", 2), rows("video", 3)], spans)
        with pytest.raises(PlaceholderError, match=r"item 0 of the prompt was written to \[0, 2\), .* \[0, 3\)"):
            MODEL.embed(ids, [rows("video", 3), rows("video", 2)], spans)
        with pytest.raises(PlaceholderError, match="the prompt has 3 items, the rows are of 2"):
            MODEL.embed(ids, [rows("video", 2), rows("video", 3)], [*spans, MediaSpan("image", 2, 9, 10)])

    def test_a_long_list_of_positions_is_cut(self):
        assert shown(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, …"


class TestFeatures:
    def test_items_keep_their_order_and_do_not_see_each_other(self):
        media = [image(2, 4, 1), sound(1300), image(4, 2, 2, frames=2), image(2, 2, 3), sound(40_000, 1)]
        found = MODEL.features(media)
        assert [(item.kind, len(item.rows_MD)) for item in found] == [
            ("image", 2), ("audio", 2), ("video", 4), ("image", 1), ("audio", 32),
        ]  # fmt: skip
        for item, together in zip(media, found, strict=True):
            (alone,) = MODEL.features([item])
            assert torch.equal(alone.rows_MD, together.rows_MD)

    def test_an_interleaved_video_is_its_frames_and_sounds(self):
        parts = (image(2, 2, 1), sound(1300), image(2, 2, 2))
        video = VideoInput(("<00:00:00.00>", parts[0], parts[1], "<00:00:01.00>", parts[2]))
        found, expected = MODEL.features([video]), MODEL.features(parts)
        assert [item.kind for item in found] == ["image", "audio", "image"]
        for own, other in zip(found, expected, strict=True):
            assert torch.equal(own.rows_MD, other.rows_MD)

    @pytest.mark.parametrize(
        ("towers", "item", "message"),
        [
            (("audio",), image(2, 2), "the vision tower is left out"),
            (("vision",), sound(9), "the audio tower is left out"),
        ],
    )
    def test_a_tower_that_is_left_out_is_missed(self, towers, item, message):
        with pytest.raises(PlaceholderError, match=f"request 'q': has .*{message}"):
            model_of(CONFIG, towers=towers).features([item], "q")

    def test_a_video_file_in_both_conventions(self):
        video = prepare_video(movie(frames=40, fps=10, sound_seconds=4.0))
        audio = dataclasses.replace(tiny_audio(), num_mel_bins=128)
        found = video_input(video, audio)
        assert isinstance(found, VideoInput)
        kinds = "".join(type(part).__name__[0] for part in found.parts)
        assert kinds.count("I") == len(video.plan.indices) == kinds.count("s")
        assert kinds.count("S") == len(video.pieces) > 0
        assert [part for part in found.parts if isinstance(part, str)] == [
            emission.text for emission in video.plan.emissions if emission.kind == "frame"
        ]
        padded = video_input(video, audio, "padded")
        assert isinstance(padded, PaddedVideoInput)
        assert padded.patches.tokens == (sum(video.frames.tokens),)
        assert torch.equal(padded.patches.pixels_PX, torch.cat([own.patches.pixels_PX for own in images(video.frames)]))
        with pytest.raises(SoundError, match="has sound at 16000 Hz, and the model has no audio tower"):
            video_input(video, None)


class TestSession:
    IDS = (3, 4, 5, *[IMAGE] * 4, 6, *[AUDIO] * 2, 7, 8)
    MEDIA = (image(4, 4), sound(1300))

    def placed(self, model: NoteModel = MODEL, **kwargs) -> NoteSession:
        session = NoteSession(model, **kwargs)
        session.place("a", self.IDS, self.MEDIA)
        return session

    @pytest.mark.parametrize("lengths", [(12,), (1,) * 12, (5, 7), (4, 1, 7)])
    def test_chunks_are_the_prompt(self, lengths: Sequence[int]):
        expected = MODEL.logits(
            MODEL.hidden(MODEL.embed(torch.tensor(self.IDS), MODEL.features(self.MEDIA)), MODEL.new_cache())
        )
        session, found, start = self.placed(), [], 0
        for length in lengths:
            found.append(session.step([StepItem("a", self.IDS[start : start + length], "prefill")])["a"])
            start += length
        assert (torch.cat(found) - expected).abs().max() <= 1e-12 * expected.abs().max()

    def test_text_behind_the_prompt_may_come_with_it(self):
        session, other = self.placed(), self.placed()
        together = session.step([StepItem("a", (*self.IDS, 9, IMAGE), "prefill")])["a"]
        other.step([StepItem("a", self.IDS, "prefill")])
        behind = other.step([StepItem("a", (9, IMAGE), "prefill")])["a"]
        assert (together[-2:] - behind).abs().max() <= 1e-12 * behind.abs().max()

    def test_requests_are_apart(self):
        """Of two prompts of the same ids, each has its own image; a third is text."""
        session = NoteSession(MODEL)
        session.place("a", self.IDS, self.MEDIA)
        session.place("b", self.IDS, (image(4, 4, 5), self.MEDIA[1]))
        ids = {"a": self.IDS, "b": self.IDS, "c": (3, 4)}
        items = [StepItem(name, own, "prefill") for name, own in ids.items()]
        found = session.step(items)
        assert torch.equal(found["a"], self.placed().step(items[:1])["a"])
        difference_T = (found["a"] - found["b"]).abs().amax(-1)
        assert difference_T[:3].max() < 1e-12
        assert difference_T[3:].min() > 1e-6
        assert torch.equal(found["c"], Session(MODEL).step(items[2:])["c"])

    def test_what_is_refused(self):
        session = self.placed()
        with pytest.raises(PlaceholderError, match="tokens 0 to 1 are not those of the prompt that was placed"):
            session.step([StepItem("a", (3, 9), "prefill")])
        with pytest.raises(PlaceholderError, match="request 'b': 4 placeholders of image"):
            session.place("b", self.IDS, self.MEDIA[1:])
        session.step([StepItem("a", self.IDS[:2], "prefill")])
        with pytest.raises(CacheError, match="'a' has begun"):
            session.place("a", self.IDS, self.MEDIA)
        with pytest.raises(CacheError, match=r"embeddings must be \(1, 96\) in torch.float64, found \(2, 96\)"):
            session.step([StepItem("c", (1,), "prefill", torch.zeros(2, D, dtype=torch.float64))])
        with pytest.raises(TokenIdError, match="token id -1 is negative"):
            session.step([StepItem("c", (-1,), "prefill", torch.zeros(1, D, dtype=torch.float64))])
        assert session.length("a") == 2

    def test_a_fork_goes_on_with_the_prompt_and_a_freed_name_is_free(self):
        session = self.placed()
        session.step([StepItem("a", self.IDS[:5], "prefill")])
        session.fork("a", "b")
        found = session.step([StepItem(name, self.IDS[5:], "prefill") for name in "ab"])
        assert torch.equal(found["a"], found["b"])
        session.free("a")
        session.step([StepItem("a", (9,), "prefill")])


class TestDrafts:
    """Case C31: three tokens, an image of four placeholders, two tokens; then three drafts."""

    @pytest.mark.parametrize("pad", [IMAGE, 193, 2**40])
    def test_the_draft_layer_reads_the_placeholders_id_or_its_last(self, pad: int):
        model = model_of(dataclasses.replace(CONFIG, image_token_id=pad))
        ids = (3, 4, 5, *[pad] * 4, 6, 7)
        session = NoteSession(model)
        session.place("a", ids, [image(4, 4)])
        session.step([StepItem("a", ids, "prefill")])
        hidden_TD = session.request("a").hidden_TD
        found = session.draft("a", 8, 3, forced=(9, 10))
        cache = model.new_cache(4)
        known = torch.tensor([min(token, 192) for token in (*ids[1:], 8)])
        state_TD, first = model.draft_step(0, known, hidden_TD, cache)
        # The next step starts from the state of the last position.
        _, second = model.draft_step(1, torch.tensor([9]), state_TD[-1:], cache)
        assert torch.equal(found[0], first[-1])
        assert torch.equal(found[1], second[-1])
        assert found.isfinite().all()

    @pytest.mark.parametrize("depth", [1, 3, 4])
    def test_drafts_change_no_token_behind_media(self, depth: int):
        """Past the window of 7, with a prompt that ends in media."""
        ids = (3, *[IMAGE] * 4, 6, *[AUDIO] * 8)
        media = [image(4, 4, 2), sound(10_000)]
        texts = []
        for drafted in (0, depth):
            session = NoteSession(MODEL, max_draft_tokens=4)
            session.place("a", ids, media)
            texts.append(generate(session, {"a": ids}, 12, drafted).tokens["a"])
        assert texts[0] == texts[1]


def narrow_release() -> NoteConfig:
    """The released numbers of layers, blocks and experts, with the widths of the tiny model."""
    wide, narrow = released(), tiny()
    text = dataclasses.replace(
        narrow.text,
        hidden_size=8,
        intermediate_size=4,
        moe_intermediate_size=2,
        **{
            name: getattr(wide.text, name)
            for name in (
                "num_hidden_layers", "layer_types", "first_k_dense_replace", "n_routed_experts", "num_experts_per_tok",
            )
        },
    )  # fmt: skip
    vision = dataclasses.replace(
        wide.vision,
        embed_dim=16,
        num_attention_heads=4,
        intermediate_size=4,
        moe_intermediate_size=2,
        adapter_out_dim=8,
    )
    audio = dataclasses.replace(
        wide.audio,
        d_model=16,
        encoder_attention_heads=4,
        encoder_ffn_dim=4,
        downsample_hidden_size=2,
        adapter_out_dim=8,
    )
    return dataclasses.replace(wide, text=text, vision=vision, audio=audio)


def place_or_refuse(source: random.Random) -> bool:
    """A drawn prompt with drawn rows, right or nearly so: scattered as masks would, or refused by name."""
    ids: list[int] = []
    spans: list[MediaSpan] = []
    for number in range(source.randrange(6)):
        ids += [source.randrange(3, 190) for _ in range(source.choice([0, 1, 1, 2]))]
        kind = source.choice(list(PADS))
        spans.append(MediaSpan(kind, number, len(ids), len(ids) + source.choice([1, 1, 2, 5])))
        ids += [PADS[kind]] * (spans[-1].stop - len(ids))
    counts = [span.stop - span.start for span in spans]
    kinds: list[MediaKind] = [span.kind for span in spans]
    for _ in range(source.choice([0, 0, 1, 2])):
        mistake = source.randrange(5)
        if mistake == 0 and counts:
            counts[source.randrange(len(counts))] += source.choice([-1, 1])
        elif mistake == 1 and ids:
            ids[source.randrange(len(ids))] = source.choice([3, *PADS.values()])
        elif mistake == 2 and counts:
            kinds[source.randrange(len(kinds))] = source.choice(list(PADS))
        elif mistake == 3 and counts:
            at = source.randrange(len(counts))
            counts[at : at + 1], kinds[at : at + 1] = [], []
        elif mistake == 4:
            ids.insert(source.randrange(len(ids) + 1), source.choice([3, *PADS.values()]))
    found = [
        MediaRows(kind, torch.arange(1, max(count, 0) + 1).double()[:, None] + 100.0 * number)
        for number, (kind, count) in enumerate(zip(kinds, counts, strict=True))
    ]
    try:
        places = placements(ids, found, PADS, "r", spans if source.random() < 0.5 else None)
    except PlaceholderError:
        return False
    ids_T, values_T = torch.tensor(ids, dtype=torch.int64), torch.zeros(len(ids), dtype=torch.float64)
    expected_T = values_T.clone()
    for start, rows_MD in places:
        values_T[start : start + len(rows_MD)] = rows_MD[:, 0]
    for kind, pad in PADS.items():
        own = [item.rows_MD[:, 0] for item in found if item.kind == kind]
        expected_T = expected_T.masked_scatter(ids_T == pad, torch.cat(own) if own else expected_T[:0])
    assert torch.equal(values_T, expected_T)
    return True


def test_any_prompt_is_filled_as_masks_would_or_refused_by_name():
    source = random.Random(0)
    filled = sum(place_or_refuse(source) for _ in range(3000))
    assert 1000 < filled < 2800


@pytest.mark.slow
@pytest.mark.timeout(2 * FUZZ_SECONDS)
@pytest.mark.parametrize("seed", [1])
def test_fuzz(seed: int):
    """Ten minutes of prompts: `pytest -m slow`."""
    source = random.Random(seed)
    end = time.monotonic() + FUZZ_SECONDS
    count = 0
    while time.monotonic() < end:
        place_or_refuse(source)
        count += 1
    assert count > 10_000
