"""Sound files go through the optimized tower, from the file to embeddings, as they do through transformers'."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from parity.audio_check import check_audio_optimized, synthetic_audio_checkpoint
from parity.audio_clips import ClipWorkload
from parity.cli import EXIT_AGREES, EXIT_UNUSABLE, app

soundfile = pytest.importorskip("soundfile", reason="sound files need the extra `media`")
pytest.importorskip("soxr", reason="sound files need the extra `media`")

NAMES = ("talk.wav", "talk.flac", "talk.mp3", "stereo.wav")
SECONDS = 3
# One row for each 1,280 samples at 16 kHz, the last not full.
ROWS = 38


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with synthetic_audio_checkpoint() as path:
        yield path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rising tone at 16 kHz in three formats; in stereo at 44.1 kHz beside another; a short one."""
    path = tmp_path_factory.mktemp("sounds")
    for name in NAMES:
        rate = 44100 if name == "stereo.wav" else 16000
        seconds = np.arange(SECONDS * rate) / rate
        left = 0.4 * np.sin(2 * np.pi * 330 * seconds * (1 + 0.1 * seconds))
        right = 0.2 * np.cos(2 * np.pi * 997 * seconds)
        soundfile.write(path / name, np.stack((left, right), axis=1) if rate == 44100 else left, rate)
    soundfile.write(path / "short.flac", 0.3 * np.sin(np.arange(3000) / 7), 16000)
    return path


def line(files: Path, *names: str) -> str:
    return " ".join(f"file:{files / name}" for name in names)


def test_from_a_file_to_embeddings(folder: Path, files: Path):
    report = check_audio_optimized(folder, [ClipWorkload.parse(line(files, *NAMES))], ("exact",))
    assert report.first_different is None
    (run,) = report.runs
    assert {result.rows for result in run.comparison.probes if result.name == "audio.adapted"} == {len(NAMES) * ROWS}


def test_from_a_file_to_embeddings_in_bfloat16_with_kernels(folder: Path, files: Path):
    pytest.importorskip("triton", reason="kernels need triton")
    workload = ClipWorkload.parse(line(files, "short.flac"))
    report = check_audio_optimized(folder, [workload], ("bfloat16",), backend="triton")
    assert report.first_different is None
    assert report.runs[0].comparison.probes


def test_the_command_reads_files_beside_generated_sounds(files: Path):
    words = f"{line(files, 'talk.mp3', 'stereo.wav')} noise:1281"
    arguments = ["--tower", "audio", "--candidate", "optimized", "--level", "exact", "--workload", words]
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exit_code == EXIT_AGREES, result.output
    assert result.stdout.startswith("AGREES  optimized with reference")


def test_the_command_refuses_what_is_no_sound(files: Path):
    (files / "words.wav").write_bytes(b"not a sound")
    arguments = ["--tower", "audio", "--candidate", "optimized", "--level", "exact"]
    result = CliRunner().invoke(app, ["check", *arguments, "--workload", line(files, "words.wav")])
    assert (result.exit_code, result.stdout) == (EXIT_UNUSABLE, "")
    assert "words.wav: cannot be opened as sound" in result.stderr
