"""`note-parity generate`: three implementations write the same tokens, streamed or not; what is refused, and how."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import soundfile
import typer
from media_files import encoded, movie, noise
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from parity.cli import _exit_code
from parity.cli import app as whole_app
from parity.cli_generate import generate
from parity.exit_codes import EXIT_COULD_NOT_RUN, EXIT_UNUSABLE
from parity.generation import Streamed
from reference.audio import tiny_audio
from reference.checkpoint import write_synthetic
from reference.config import NoteConfig, tiny
from reference.errors import NoteError
from reference.prompt import BOS, TURN_MARKERS
from reference.prompt_media import AROUND, PADS
from reference.session import StepItem
from reference.vision import tiny_vision

MARKERS = (BOS, *TURN_MARKERS, *PADS.values(), *(marker for pair in AROUND.values() for marker in pair if marker))
# The command alone, so that its errors arrive as they are raised.
app = typer.Typer()
app.command()(generate)


def write_tokenizer(path: Path) -> dict[str, int]:
    """A token for each byte, and the markers. Returns the ids of the latter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
    tokenizer.save(str(path))
    return {text: tokenizer.token_to_id(text) for text in MARKERS}


def write_folder(folder: Path, has_towers: bool) -> None:
    """A checkpoint with everything that generation reads; patches are 14 pixels wide, as those that files become."""
    folder.mkdir()
    ids = write_tokenizer(folder / "tokenizer.json")
    text = dataclasses.replace(tiny().text, vocab_size=300)
    config: NoteConfig = dataclasses.replace(
        tiny(),
        text=text,
        vision=dataclasses.replace(tiny_vision(), patch_size=14) if has_towers else None,
        audio=tiny_audio() if has_towers else None,
        image_token_id=ids[PADS["image"]],
        audio_token_id=ids[PADS["audio"]],
        video_token_id=ids[PADS["video"]],
    )
    write_synthetic(folder, config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[BOS]]}))


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A checkpoint `full`, one without towers `text`, and files."""
    with TemporaryDirectory() as parent:
        folder = Path(parent)
        write_folder(folder / "full", has_towers=True)
        write_folder(folder / "text", has_towers=False)
        (folder / "a.png").write_bytes(encoded(noise(60, 90), "PNG"))
        soundfile.write(folder / "b.wav", np.random.default_rng(0).normal(size=9000) * 0.1, 16000)
        (folder / "c.mp4").write_bytes(movie(frames=30, fps=10, size=(64, 64), sound_seconds=3.0))
        yield folder


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `note-parity synthetic --config tiny-note` writes, and nothing else."""
    folder = tmp_path_factory.mktemp("fresh") / "folder"
    result = CliRunner().invoke(whole_app, ["synthetic", str(folder), "--config", "tiny-note"])
    assert result.exit_code == 0, result.output
    return folder


def run(
    place: Path, *arguments: str, checkpoint: str = "full", impl: str = "reference", dtype: str = "float64"
) -> tuple[str, str]:
    """What goes to stdout and stderr."""
    options = ["--checkpoint", str(place / checkpoint), "--impl", impl, "--max-new-tokens", "9", "--dtype", dtype]
    # Triton's kernels know no float64.
    options += ["--backend", "torch"]
    found = CliRunner().invoke(app, ["Hé?", *options, *arguments])
    if found.exception is not None:
        raise found.exception
    return found.stdout, found.stderr


def media(place: Path) -> list[str]:
    return ["--image", str(place / "a.png"), "--audio", str(place / "b.wav"), "--image", str(place / "a.png")]


SAMPLED = ["--temperature", "1.0", "--top-p", "0.9", "--seed", "3"]


@pytest.mark.parametrize("sampling", [[], SAMPLED], ids=["greedy", "sampled"])
def test_three_implementations_write_the_same_text(place: Path, sampling: list[str]):
    expected, summary = run(place, "--ids", *sampling)
    assert len(expected.split()) == 9
    assert "tokens in the prompt, 9 new ones, ended by the limit; closest choice: token " in summary
    for impl in ("optimized", "transformers"):
        assert run(place, "--ids", *sampling, impl=impl) == (expected, summary), impl
    for impl in ("reference", "optimized"):
        assert run(place, "--ids", *sampling, "--draft-depth", "3", impl=impl)[0] == expected, impl


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("impl", ["reference", "optimized", "transformers"])
def test_a_fresh_synthetic_folder_is_all_it_needs(place: Path, fresh: Path, impl: str, dtype: str):
    """In float64 the three write the same; the margin tells how near another token was."""
    found, summary = run(place, "--ids", *media(place), checkpoint=str(fresh), impl=impl, dtype=dtype)
    assert 0 < len(found.split()) <= 9
    assert "closest choice: token " in summary
    if dtype == "float64":
        assert (found, summary) == run(place, "--ids", *media(place), checkpoint=str(fresh))


@pytest.mark.parametrize("convention", ["interleaved", "padded"])
def test_a_video_with_sound(place: Path, convention: str):
    arguments = ["--ids", "--video", str(place / "c.mp4"), "--video-convention", convention]
    found, summary = run(place, *arguments)
    assert len(found.split()) == 9
    for impl in ("optimized", "transformers"):
        assert run(place, *arguments, impl=impl) == (found, summary), impl


@pytest.mark.parametrize("sampling", [[], SAMPLED], ids=["greedy", "sampled"])
def test_images_and_sounds(place: Path, sampling: list[str]):
    expected = run(place, "--ids", *media(place), *sampling)
    for impl in ("optimized", "transformers"):
        assert run(place, "--ids", *media(place), *sampling, impl=impl) == expected, impl
    for impl in ("reference", "optimized"):
        drafted, summary = run(place, "--ids", *media(place), *sampling, "--draft-depth", "2", impl=impl)
        assert drafted == expected[0], impl
        assert "; drafts kept, place by place: " in summary
    assert run(place, "--ids", *sampling)[0] != expected[0]


def test_in_bfloat16_the_reference_rounds_as_transformers_if_asked(place: Path):
    expected = run(place, "--ids", *media(place), impl="transformers", dtype="bfloat16")
    assert run(place, "--ids", *media(place), "--numerics", "transformers", dtype="bfloat16") == expected


def test_text_is_that_of_the_ids(place: Path):
    ids = [int(token) for token in run(place, "--ids", *media(place))[0].split()]
    tokenizer = Tokenizer.from_file(str(place / "full" / "tokenizer.json"))
    text = run(place, *media(place))[0].removesuffix("\n")
    if all(tokenizer.id_to_token(token) for token in ids):
        assert text == tokenizer.decode(ids, skip_special_tokens=False)
    else:
        assert "<no token " in text


def test_a_stop_id_ends_the_text(place: Path, tmp_path: Path):
    ids = run(place, "--ids")[0].split()
    folder = tmp_path / "stopping"
    folder.mkdir()
    for file in (place / "full").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [int(ids[4])]}))
    found, summary = run(tmp_path, "--ids", checkpoint="stopping")
    assert found.split() == ids[: ids.index(ids[4]) + 1]
    assert "the limit" not in summary


@pytest.mark.parametrize(
    ("arguments", "impl", "checkpoint", "code", "message"),
    [
        (["--draft-depth", "1"], "transformers", "full", EXIT_COULD_NOT_RUN, "no draft layer"),
        (["--numerics", "vllm"], "optimized", "full", EXIT_COULD_NOT_RUN, "an option of the reference"),
        (["--device", "cuda"], "reference", "full", EXIT_COULD_NOT_RUN, "no CUDA device"),
        (["--image", "a.png"], "reference", "text", EXIT_UNUSABLE, "--image: this checkpoint takes text only"),
        (["--image", "b.wav"], "reference", "full", EXIT_UNUSABLE, "b.wav"),
        (["--audio", "none.wav"], "reference", "full", EXIT_UNUSABLE, "none.wav: not a file"),
        (
            ["--video", "c.mp4", "--image", "a.png"],
            "reference",
            "full",
            EXIT_UNUSABLE,
            "--video: one, and no other media",
        ),
        (["--video", "c.mp4", "--video", "c.mp4"], "reference", "full", EXIT_UNUSABLE, "--video: one"),
        (["--max-new-tokens", "4096"], "reference", "full", EXIT_UNUSABLE, "exceeds the context, 4096"),
        (["--top-p", "0"], "reference", "full", EXIT_UNUSABLE, "top_p must be above 0"),
        ([], "reference", "nowhere", EXIT_UNUSABLE, "nowhere"),
    ],
)
def test_what_is_refused(
    place: Path, arguments: Sequence[str], impl: str, checkpoint: str, code: int, message: str, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    files = [str(place / word) if word.endswith((".png", ".wav", ".mp4")) else word for word in arguments]
    with pytest.raises(NoteError, match=message) as refused:
        run(place, *files, impl=impl, checkpoint=checkpoint)
    assert _exit_code(refused.value) == code


class Scripted:
    """Steps that do nothing, for one request."""

    def __init__(self) -> None:
        self.held = 0

    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict:
        self.held += len(items[0].token_ids)
        return {}

    def drafts(self, items: Sequence) -> dict:
        return {}

    def truncate(self, request: str, length: int) -> None:
        self.held = length

    def length(self, request: str) -> int:
        return self.held


def test_only_tokens_that_stay_are_told_and_each_once():
    told: list[list[int]] = []
    streamed = Streamed(Scripted(), lambda tokens: told.append(list(tokens)))
    streamed.step([StepItem("a", (1, 2, 3), "prefill")])
    streamed.step([StepItem("a", (10, 11, 12), "verify")])
    streamed.truncate("a", 5)
    streamed.step([StepItem("a", (13,), "decode")])
    streamed.step([StepItem("a", (14, 15), "verify")])
    streamed.finish([10, 11, 13, 14, 15, 16])
    assert told == [[10], [11, 13], [14], [15, 16]]
