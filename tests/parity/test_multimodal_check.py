"""`note-parity check --multimodal`: every stage of a mixed request is compared, and a mistake in each is seen there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from optimized.model import NoteEngine
from parity import multimodal_check
from parity.cli import app
from parity.exit_codes import EXIT_AGREES, EXIT_COULD_NOT_RUN, EXIT_DISAGREES, EXIT_UNUSABLE
from parity.findings import Comparison
from parity.multimodal_case import MultimodalCase, MultimodalCaseError, boundary_cases, cases, drawn_cases
from parity.multimodal_check import (
    VIDEO_NOTE,
    check_multimodal,
    check_multimodal_optimized,
    synthetic_note_checkpoint,
)
from parity.multimodal_files import image_file, sound_file, video_file
from parity.multimodal_requests import Folder, make_requests, workload_of
from parity.runners.note_sides import TransformersNoteSide
from parity.runners.transformers_processing import TransformersProcessing
from reference.checkpoint import write_synthetic
from reference.generate import Generation
from reference.media.sound import load_waveform
from reference.media.video import prepare_video
from reference.media.video_options import VideoOptions
from reference.model_scatter import MediaRows
from reference.model_tiny import tiny_note

pytest.importorskip("transformers", reason="the oracle needs transformers 5.24")

SMALL = MultimodalCase.parse("t1 i28x28 s9 i55x28 | t1", 3)
STAGES = {"prompt.ids", "vision.pixels", "audio.mel", "vision.merged", "audio.adapted", "layers.0.input", "logits"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with synthetic_note_checkpoint() as path:
        yield path


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multimodal_check, "NEW_TOKENS", 5)
    monkeypatch.setattr(multimodal_check, "DRAFT_DEPTHS", (2,))


def checked(folder: Path, *levels, case: MultimodalCase = SMALL) -> list[Comparison]:
    found, _ = check_multimodal(folder, [case], levels)
    return [run.comparison for run in found.runs]


def names_that_differ(found: Comparison) -> set[str]:
    return {result.name for result in found.blamed}


class TestCases:
    @given(cases())
    def test_a_line_is_read_back(self, case: MultimodalCase):
        assert MultimodalCase.parse(case.text(), case.seed) == case
        assert case.tokens > 0

    @pytest.mark.parametrize("line", ["", "t1 |", "t0", "i28", "s9x9", "v1x2", "q3", "|".join(["t1"] * 11)])
    def test_a_line_that_is_none_is_refused(self, line: str):
        with pytest.raises(MultimodalCaseError):
            MultimodalCase.parse(line)

    def test_drawn_cases_are_a_function_of_the_seed(self):
        assert drawn_cases(4, 1) == drawn_cases(4, 1)
        assert len(drawn_cases(4, 1)) == 4
        assert drawn_cases(0) == ()

    def test_the_boundary_cases_have_every_kind(self):
        kinds = {part.kind for case in boundary_cases() for parts in case.requests for part in parts}
        assert kinds == {"text", "image", "sound", "video", "padded video", "tools"}


class TestFiles:
    def test_pixels_and_samples_are_a_function_of_seed_and_name(self):
        assert image_file(28, 30, 1, "a") == image_file(28, 30, 1, "a") != image_file(28, 30, 2, "a")
        assert sound_file(100, 1, "a") == sound_file(100, 1, "a") != sound_file(100, 1, "b")

    @given(st.integers(1, 2000))
    def test_a_sound_has_its_samples(self, samples: int):
        waveform_S = load_waveform(sound_file(samples, 0, "a"))
        assert len(waveform_S) == samples
        assert float(waveform_S.abs().max()) <= 1 / 3

    def test_a_video_has_its_frames_and_sound(self):
        video = prepare_video(video_file(20, 64, 48, 0, "a"), VideoOptions(context=4096))
        assert len(video.frames.grids_N3) >= 4
        assert video.pieces


def test_every_stage_agrees_and_is_there(folder: Path):
    exact, bfloat16 = checked(folder, "exact", "bfloat16")
    assert {result.name for result in exact.probes if result.verdict != "missing"} >= STAGES
    assert STAGES - {"prompt.ids", "vision.pixels", "audio.mel"} <= {result.name for result in bfloat16.probes}
    for found in (exact, bfloat16):
        assert not found.is_different, found.first
        assert all(result.missing_rows == 0 for result in found.probes)
        assert "embeddings" not in {result.name for result in found.probes}
    bits = {result.name: result.verdict for result in exact.probes}
    assert bits["prompt.ids"] == bits["vision.pixels"] == "bitwise equal"


def test_a_video_is_compared_from_its_pixels_on(folder: Path):
    found, _ = check_multimodal(folder, [MultimodalCase.parse("v12x64x64 | p12x64x64")], ("exact",))
    (run,) = found.runs
    assert VIDEO_NOTE in found.skipped
    assert not run.comparison.is_different
    names = {result.name for result in run.comparison.probes}
    assert {"vision.merged", "audio.adapted", "layers.0.input"} <= names
    assert "prompt.ids" not in names


def test_prompts_are_the_workload(folder: Path):
    made = make_requests(SMALL, Folder.open(folder))
    workload = workload_of(SMALL, made)
    for name, request in made.items():
        ids = [workload.token_id(name, position, 0, 281) for position in range(len(request.prompt.ids))]
        assert tuple(ids) == request.prompt.ids
    workload.check()


class TestMistakesAreSeen:
    def test_in_the_ids(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        plain = TransformersProcessing.__call__

        def one_more(self, request):
            made = plain(self, request)
            return dataclasses.replace(made, ids_T=torch.cat((made.ids_T[:1], made.ids_T)))

        monkeypatch.setattr(TransformersProcessing, "__call__", one_more)
        (found,) = checked(folder, "exact")
        assert found.first is not None
        assert found.first.name == "prompt.ids"

    def test_in_the_pixels(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        plain = TransformersProcessing.__call__

        def brighter(self, request):
            made = plain(self, request)
            return made if made.pixels_PX is None else dataclasses.replace(made, pixels_PX=made.pixels_PX + 1e-6)

        monkeypatch.setattr(TransformersProcessing, "__call__", brighter)
        assert names_that_differ(checked(folder, "exact")[0]) == {"vision.pixels"}

    @pytest.mark.parametrize("level", ["exact", "bfloat16"])
    def test_in_the_scatter(self, folder: Path, monkeypatch: pytest.MonkeyPatch, level: str):
        """The towers' rows are right, and the two images of the prompt stand in each other's place."""
        plain = TransformersNoteSide.place

        def swapped(self, request, media):
            plain(self, request, [media[2], media[1], media[0]] if len(media) == 3 else media)

        monkeypatch.setattr(TransformersNoteSide, "place", swapped)
        (found,) = checked(folder, level)
        assert found.first is not None
        assert found.first.name == "layers.0.input"

    def test_in_the_generation(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        plain = TransformersNoteSide.generate

        def other(self, max_new_tokens, draft_depth=0):
            made = plain(self, max_new_tokens, draft_depth)
            tokens = {name: [*own[:2], (own[2] + 1) % 281, *own[3:]] for name, own in made.tokens.items()}
            return Generation(tokens, made.tried, made.accepted, made.margins)

        monkeypatch.setattr(TransformersNoteSide, "generate", other)
        (found,) = checked(folder, "exact")
        assert names_that_differ(found) == {"generated.tokens"}
        assert [choice.exchange.request for choice in found.choices if choice.verdict == "flip"] == ["a", "b"]


class TestCommand:
    def test_it_agrees(self, tmp_path: Path):
        report = tmp_path / "report.json"
        arguments = ["--level", "exact", "--workload", "t1 i28x28", "--json", str(report)]
        result = CliRunner().invoke(app, ["check", "--multimodal", *arguments])
        assert result.exit_code == EXIT_AGREES, result.output
        assert result.stdout.startswith("AGREES  transformers 5.24 with reference")
        assert "note-parity check --multimodal" in report.read_text()

    def test_it_disagrees(self, monkeypatch: pytest.MonkeyPatch):
        plain = multimodal_check.compare_processing

        def spoilt(theirs, made):
            return [dataclasses.replace(result, verdict="different", error=1.0) for result in plain(theirs, made)]

        monkeypatch.setattr(multimodal_check, "compare_processing", spoilt)
        result = CliRunner().invoke(app, ["check", "--multimodal", "--level", "exact", "--workload", "t1"])
        assert result.exit_code == EXIT_DISAGREES
        again = "again: note-parity check --multimodal --seed 0 --level exact --workload t1 --workload-seed 0"
        assert again in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [(["--tower", "audio"], "leave --tower audio out"), (["--workload", "i9"], "'i9' is none of")],
    )
    def test_wrong_use(self, arguments: list[str], message: str):
        result = CliRunner().invoke(app, ["check", "--multimodal", *arguments])
        assert result.exit_code == EXIT_UNUSABLE
        assert message in result.output


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("check", [check_multimodal, check_multimodal_optimized])
def test_drawn_requests_agree(folder: Path, check):
    found, _ = check(folder, drawn_cases(20, 11), ("exact",))
    assert found.first_different is None
    assert len(found.runs) == 20


@pytest.mark.parametrize("candidate", ["transformers", "optimized"])
@pytest.mark.parametrize("lacking", ["vision", "audio"])
def test_a_folder_without_a_tower_cannot_run(tmp_path: Path, candidate: str, lacking: str):
    write_synthetic(tmp_path / "folder", dataclasses.replace(tiny_note(), **{lacking: None}))
    result = CliRunner().invoke(
        app, ["check", str(tmp_path / "folder"), "--multimodal", "--candidate", candidate, "--workload", "t1"]
    )
    assert result.exit_code == EXIT_COULD_NOT_RUN
    assert "needs both towers" in result.output


@pytest.mark.parametrize("level", ["exact", "float32", "bfloat16"])
def test_the_optimized_model_agrees(folder: Path, level: str):
    """Its own towers, scatter, engine and drafts."""
    found, _ = check_multimodal_optimized(folder, [SMALL], (level,), backend="torch")
    (run,) = found.runs
    assert not run.comparison.is_different, run.comparison.first
    names = {result.name for result in run.comparison.probes if result.verdict != "missing"}
    assert {"vision.merged", "audio.adapted", "embeddings", "layers.0.input", "mtp.1.logits", "logits"} <= names
    assert not found.skipped
    if level == "exact":
        assert not run.comparison.choices


def test_a_mistake_in_the_optimized_scatter_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch):
    plain = NoteEngine.place

    def backwards(self, request, token_ids, media, spans=None, features=None):
        rows = [MediaRows(item.kind, item.rows_MD.flip(0)) for item in features]
        plain(self, request, token_ids, media, spans, rows)

    monkeypatch.setattr(NoteEngine, "place", backwards)
    found, _ = check_multimodal_optimized(folder, [SMALL], ("exact",))
    assert found.first_different is not None
    assert found.first_different.comparison.first.name == "embeddings"
