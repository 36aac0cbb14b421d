"""Image and video files go through the vision tower of both implementations and the oracle: `file:PATH` in a case."""

import dataclasses
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from media_files import encoded, movie, noise, smooth, turned_jpeg
from PIL import Image
from torch.nn.functional import unfold
from typer.testing import CliRunner

from parity.cli import EXIT_AGREES, EXIT_DISAGREES, EXIT_UNUSABLE, app
from parity.faults.fault import applied
from parity.faults.vision import VISION_FAULTS
from parity.vision_case import VisionCase, VisionCaseError
from parity.vision_check import check_vision, synthetic_vision_checkpoint
from parity.vision_files import VisionFile, VisionFileError
from reference.media.errors import ImageError, MediaError, VideoError
from reference.media.image import image_of_rows, preprocess_image
from reference.media.video import prepare_video
from reference.vision import tiny_vision

pytest.importorskip("transformers", reason="the oracle needs transformers 5.24")

VISION = tiny_vision()
RELEASED_PATCHES = dataclasses.replace(VISION, patch_size=14)
# Frames, height and width in patches of 7 pixels: of the size as stored, once sides are whole cells of 28.
GRIDS = {
    "a.png": (1, 8, 12),
    "b.jpg": (1, 8, 8),
    "c.webp": (1, 12, 8),
    "d.gif": (1, 4, 16),
    "deep.png": (1, 8, 8),
    "turned.jpg": (1, 4, 16),
    "film.mp4": (4, 8, 16),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    second = Image.fromarray(smooth(30, 120, 9))
    deep = np.arange(60 * 60, dtype=np.uint16).reshape(60, 60) % 400
    made = {
        "a.png": encoded(noise(60, 90), "PNG"),
        "b.jpg": encoded(smooth(60, 60, 1), "JPEG"),
        "c.webp": encoded(smooth(90, 60, 2), "WEBP", lossless=True),
        "d.gif": encoded(smooth(30, 120, 3), "GIF", save_all=True, append_images=[second]),
        "deep.png": encoded(deep, "PNG"),
        "turned.jpg": turned_jpeg(smooth(30, 120, 4), 6),
        "film.mp4": movie(frames=20, fps=10, size=(64, 128), sound_seconds=2.0),
    }
    for name, content in made.items():
        (folder / name).write_bytes(content)
    return folder


def line(files: Path, *words: str) -> str:
    """The words, those that name a file with its whole path."""
    return " ".join(f"file:{files / word}" if (files / word).exists() else word for word in words)


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", "--tower", "vision", "--level", "exact", *arguments])


@pytest.mark.parametrize("candidate", ["transformers", "optimized"])
def test_every_kind_of_file_goes_from_file_to_embeddings(files: Path, candidate: str):
    case = VisionCase.parse(line(files, "a.png", "1x4x6", *list(GRIDS)[1:], "2x2x2"), seed=3)
    with synthetic_vision_checkpoint() as folder:
        found, _ = check_vision(folder, [case], ("exact",), candidate=candidate)
    assert found.first_different is None
    (run,) = found.runs
    rows = {result.name: result.rows for result in run.comparison.probes}
    patches = sum(frames * height * width for frames, height, width in (*GRIDS.values(), (1, 4, 6), (2, 2, 2)))
    assert (rows["vision.pixels"], rows["vision.merged"]) == (patches, patches // 4)


@pytest.mark.parametrize("candidate", ["transformers", "optimized"])
def test_the_command_reads_files(files: Path, candidate: str):
    result = check("--candidate", candidate, "--workload", line(files, "d.gif", "1x4x6", "b.jpg"))
    assert result.exit_code == EXIT_AGREES, result.output
    assert result.stdout.startswith("AGREES  ")


def test_bfloat16_is_within_the_floor_from_a_file(files: Path):
    case = VisionCase.parse(line(files, "d.gif", "1x2x4"))
    with synthetic_vision_checkpoint() as folder:
        found, _ = check_vision(folder, [case], ("bfloat16",))
    assert found.first_different is None


def test_a_difference_names_the_file_and_how_to_repeat_it(files: Path):
    words = line(files, "1x2x2", "b.jpg")
    fault = next(fault for fault in VISION_FAULTS if fault.id == "vision_merge_order_column_major")
    with applied([fault]):
        result = check("--workload", words, "--seed", "3")
    assert result.exit_code == EXIT_DISAGREES, result.output
    (again,) = [text for text in result.stdout.splitlines() if text.startswith("again: ")]
    repeated = shlex.split(again.removeprefix("again: "))
    assert repeated[repeated.index("--workload") + 1] == words


def test_pixels_are_those_of_the_released_preprocessing_in_the_patches_of_the_tower(files: Path):
    for name, grid in GRIDS.items():
        frames, height, width = grid
        path = files / name
        expected = prepare_video(path).frames if name == "film.mp4" else preprocess_image(path)
        assert len(expected.grids_N3) == frames
        released_PX, released_grid = VisionFile(str(path)).rows(RELEASED_PATCHES)
        assert torch.equal(released_PX, expected.pixels_PX)
        assert released_grid == (frames, height // 2, width // 2)
        smaller_PX, smaller_grid = VisionFile(str(path)).rows(VISION)
        assert (smaller_grid, smaller_PX.dtype) == (grid, torch.float32)
        for frame, rows_PX in enumerate(expected.pixels_PX.chunk(frames)):
            picture_HWC = torch.from_numpy(image_of_rows(rows_PX.numpy(), (1, height // 2, width // 2)))
            raster_PX = unfold(picture_HWC.permute(2, 0, 1)[None], 7, stride=7)[0].T.reshape(height, width, -1)
            squares = raster_PX.reshape(height // 2, 2, width // 2, 2, -1).transpose(1, 2).reshape(height * width, -1)
            assert torch.equal(smaller_PX.chunk(frames)[frame], squares)


def test_files_stand_where_the_line_has_them_and_leave_the_pixels_of_grids_alone(files: Path):
    case = VisionCase.parse(line(files, "1x2x4", "b.jpg", "2x2x2"), seed=5)
    pixels_NX, grids = case.inputs(VISION)
    assert grids == ((1, 2, 4), (1, 8, 8), (2, 2, 2))
    first, image, last = pixels_NX.split([8, 64, 8])
    assert torch.equal(torch.cat((first, last)), VisionCase.parse("1x2x4 2x2x2", seed=5).pixels(VISION))
    assert torch.equal(image, VisionFile(str(files / "b.jpg")).rows(VISION)[0])
    assert (case.grids, case.tokens) == (((1, 2, 4), (2, 2, 2)), 8 + 16 + 8), "files count in patches of 14 pixels"
    assert VisionCase.parse(case.text(), 5) == case


def test_a_file_is_read_when_its_pixels_are_needed_and_once(tmp_path: Path):
    path = tmp_path / "late.png"
    case = VisionCase.parse(f"file:{path}")
    path.write_bytes(encoded(noise(30, 30), "PNG"))
    pixels_NX = case.pixels(VISION)
    path.unlink()
    assert torch.equal(case.pixels(VISION), pixels_NX)


BROKEN = {
    "cut.png": (encoded(noise(60, 60), "PNG")[:900], ImageError, r"cut\.png: damaged"),
    "thin.png": (encoded(noise(3, 60), "PNG"), ImageError, "sides must be at least 7 pixels"),
    "cut.mp4": (movie(frames=4, size=(64, 64))[:300], VideoError, r"cut\.mp4: .*does not begin like an image: PNG"),
    "words.png": (b"not an image", VideoError, r"words\.png: not a readable video.*does not begin like an image"),
    "empty.jpg": (b"", VideoError, r"empty\.jpg: not a readable video"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_file_is_refused_by_the_reader_of_its_kind(tmp_path: Path, name: str):
    content, error, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        VisionCase.parse(f"1x2x2 file:{tmp_path / name}").inputs(VISION)


def test_what_is_no_file_is_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing.png"):
        with pytest.raises(MediaError, match="not a file; it must be an image or a video"):
            VisionFile(str(path)).rows(VISION)
    result = check("--workload", f"1x2x2 file:{tmp_path}/missing.png")
    assert (result.exit_code, result.stdout) == (EXIT_UNUSABLE, "")
    assert "missing.png: not a file" in result.stderr


def test_paths_that_a_line_cannot_hold_are_refused():
    with pytest.raises(VisionCaseError, match=r"'cat\.png' is not a grid .*a path has no spaces"):
        VisionCase.parse("file:my cat.png")
    for path in ("", "my cat.png"):
        with pytest.raises(VisionFileError, match="must be given and have no spaces"):
            VisionFile(path)


@pytest.mark.parametrize("changed", [{"patch_size": 5}, {"spatial_merge_size": 3}, {"num_channels": 4}], ids=str)
def test_a_tower_that_files_cannot_be_cut_for_is_refused(files: Path, changed: dict[str, int]):
    with pytest.raises(VisionFileError, match=r"b\.jpg: files have 3 channels .*which must divide 28"):
        VisionFile(str(files / "b.jpg")).rows(dataclasses.replace(VISION, **changed))
