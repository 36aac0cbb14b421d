"""What a hasty user types: each gets one line that says what would be right, before anything long has run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parity import clear_tokens
from parity.cli import app
from parity.exit_codes import EXIT_AGREES, EXIT_COULD_NOT_RUN, EXIT_UNUSABLE
from reference.checkpoint import write_synthetic
from reference.config import tiny


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "tiny"
    write_synthetic(folder, tiny())
    return folder


def refusal(*words: str, code: int = EXIT_UNUSABLE) -> str:
    """The one line on stderr."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("option", [["--device", "cuda"], ["--backend", "triton"], ["--graphs"]])
@pytest.mark.parametrize("part", [[], ["--multimodal"]])
def test_an_option_of_the_optimized_one_is_not_ignored(part: list[str], option: list[str]):
    assert f"{option[0]}" in (line := refusal("check", *part, *option))
    assert line.endswith("is for the optimized implementation: add --candidate optimized")


def test_graphs_are_of_the_text():
    assert "leave it or --tower audio out" in refusal("check", "--tower", "audio", "--graphs")


def test_one_workload_leaves_nothing_to_draw():
    assert "leave --drawn out" in refusal("check", "--workload", "p:a3", "--drawn", "2")


@pytest.mark.parametrize("command", ["check", "drift", "bench", "compare tiny x", "diagnose tiny x"])
def test_a_report_that_could_not_be_written_is_refused_first(tmp_path: Path, command: str):
    wrong = tmp_path / "none" / "report.json"
    line = refusal(*command.split(), "--json", str(wrong))
    assert line == f"error: --json {wrong}: there is no folder {wrong.parent}"


def test_a_mapping_that_could_not_be_written_is_refused_first(tmp_path: Path):
    wrong = tmp_path / "none" / "m.json"
    assert (
        refusal("propose", "tiny", "x", str(wrong)) == f"error: MAPPING.json {wrong}: there is no folder {wrong.parent}"
    )
    assert "is a folder; name a file" in refusal("propose", "tiny", "x", str(tmp_path))


@pytest.mark.parametrize("command", [["check"], ["check", "--candidate", "optimized"], ["golden"]])
@pytest.mark.parametrize("workload", ["p:a4097", "p:a4000 f:a>b x:a t:b3 p:b100", "p:a9 p:b4096+a7 d:a+b"])
def test_a_request_longer_than_the_model_takes_is_refused(
    text_folder: Path, tmp_path: Path, command: list[str], workload: str
):
    target = [str(tmp_path / "golden")] if command == ["golden"] else []
    line = refusal(*command, str(text_folder), *target, "--workload", workload)
    assert "4,097 tokens then; the model takes 4,096 (max_position_embeddings)" in line


@pytest.mark.parametrize(
    ("options", "reason"), [([], "exists already"), (["--name", "layers.9.output"], "layers.9.output")]
)
def test_a_golden_that_cannot_be_made_is_refused_before_its_tokens_are_chosen(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], reason: str
):
    monkeypatch.setattr(clear_tokens, "load_text_model", None)
    target = tmp_path if not options else tmp_path / "golden"
    line = refusal("golden", str(text_folder), str(target), "--workload", "p:a3", "--clear-of-ties", *options)
    assert reason in line


def test_what_the_system_refuses_is_one_line(text_folder: Path, tmp_path: Path):
    file = tmp_path / "plain.txt"
    file.touch()
    line = refusal("golden", str(text_folder), str(file / "golden"), "--workload", "p:a3")
    assert line == f"error: {file / 'golden.partial'}: Not a directory"


@pytest.mark.parametrize("part", [["--tower", "vision"], ["--tower", "audio"], ["--multimodal"]])
def test_a_folder_without_the_tower_cannot_be_checked(text_folder: Path, part: list[str]):
    line = refusal("check", str(text_folder), *part, code=EXIT_COULD_NOT_RUN)
    assert "tower" in line
    assert f"config.json has no {'audio' if 'audio' in part else 'vision'}_config" in line


@pytest.mark.parametrize("command", [["check"], ["check", "--tower", "vision"], ["golden", "--workload", "p:a3"]])
def test_what_is_no_folder_is_called_so(tmp_path: Path, command: list[str]):
    file = tmp_path / "a.png"
    file.touch()
    rest = [str(tmp_path / "golden")] if command[0] == "golden" else []
    assert "no such folder" in refusal(*command, str(tmp_path / "none"), *rest)
    assert "a.png: is a file" in refusal(*command, str(file), *rest)


@pytest.mark.parametrize("command", ["validate", "compare tiny", "diagnose tiny", "propose tiny"])
def test_a_file_in_place_of_a_dump_is_called_so(tmp_path: Path, command: str):
    (tmp_path / "manifest.json").write_text("{}")
    assert "manifest.json: is a file; a dump is a folder" in refusal(*command.split(), str(tmp_path / "manifest.json"))
    assert "no such folder; a dump is" in refusal(*command.split(), str(tmp_path / "none"))


def test_a_json_that_is_no_config_is_named(tmp_path: Path):
    (tmp_path / "other.json").write_text("{}")
    assert "other.json: config: required key" in refusal("inspect", str(tmp_path / "other.json"))


@pytest.mark.parametrize("content", [b"\x89PNG", b"[]", b"{", b"{}", b'{"report_version": 1, "machine": []}'])
def test_a_file_that_is_no_benchmark_is_named(tmp_path: Path, content: bytes):
    file = tmp_path / "other.json"
    file.write_bytes(content)
    line = refusal("bench", "--from", str(file))
    assert "other.json: " in line
    assert "not valid JSON" in line or "not a report" in line


def test_faults_that_are_spelled_wrong_or_of_a_tower():
    assert "did you mean swa_theta_on_full" in refusal("faults", "swa_theta_on_ful")
    assert "did you mean router_fp32" in refusal("faults", "router_f32")
    assert "`note-parity faults` lists them" in refusal("faults", "zzz")
    assert "of the text model" in refusal("faults", "vision_merge_order_column_major", "--verify")


@pytest.mark.parametrize("selecting", [["--ops", "rms*"], ["--quick"], ["--no-steps"], ["--profile", "4"]])
def test_a_shown_benchmark_is_shown_as_it_is(selecting: list[str]):
    assert refusal("bench", "--from", "x.json", *selecting).endswith(f"as it is: leave {selecting[0]} out")


def test_a_shown_benchmark_needs_no_gpu(tmp_path: Path):
    records = sorted((Path(__file__).parents[2] / "optimized" / "bench" / "results").glob("*.json"))
    assert records
    for record in records:
        shutil.copy(record, tmp_path / "run.json")
        assert CliRunner().invoke(app, ["bench", "--from", str(tmp_path / "run.json")]).exit_code == EXIT_AGREES
