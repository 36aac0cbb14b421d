"""`note-parity again`: the run that a JSON report names, repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from dumps import edited
from typer.testing import CliRunner

from parity.cli import app
from parity.exit_codes import EXIT_AGREES, EXIT_DISAGREES, EXIT_UNUSABLE
from parity.golden_file import Golden
from parity.golden_reference import reference_of
from parity.report.json_lines import REPORT_VERSION
from parity.run import traced
from parity.trace_file import open_trace, write_trace

HEADER = json.dumps({"record": "header", "report_version": REPORT_VERSION})


def run(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def test_a_check_is_repeated(tmp_path: Path) -> None:
    report = tmp_path / "ü r.json"
    command = ["check", "--candidate", "optimized", "--level", "exact", "--workload", "p:a3", "--json", report]
    first = run(*command)
    assert first.exit_code == EXIT_AGREES
    result = run("again", report)
    said = "check --candidate optimized --device cpu --seed 0 --level exact --workload p:a3 --workload-seed 0"
    assert (result.exit_code, result.output) == (EXIT_AGREES, f"note-parity {said}\n{first.output}")


def test_a_comparison_is_repeated_with_its_exit_code(tmp_path: Path) -> None:
    right, wrong, report = tmp_path / "right", tmp_path / "wrong dump", tmp_path / "r.json"
    golden = Golden.open("tiny")
    trace = traced(reference_of(golden)(torch.bfloat16), golden.workload, patterns=("logits",))
    write_trace(right, trace, torch.bfloat16)
    write_trace(wrong, edited(open_trace(right), lambda name, value: {name: value.flip(0)}), torch.bfloat16)
    first = run("compare", right, wrong, "--json", report)
    result = run("again", report)
    assert (first.exit_code, result.exit_code) == (EXIT_DISAGREES, EXIT_DISAGREES)
    assert result.output == f"note-parity compare {right} '{wrong}'\n{first.output}"
    wrong.rename(tmp_path / "moved")
    result = run("again", report)
    assert (result.exit_code, "no such folder" in result.stderr) == (EXIT_UNUSABLE, True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is not a report"),
        ("[1]\n[2]\n", "is not a report"),
        (f"{HEADER}\n", "is not a report"),
        ("[" * 100_000, "is not a report"),
        ('{"report_version": 9}\n{}\n', "report_version: expected 1, found 9"),
        (f"{HEADER}\n{{}}\n", "again: expected note-parity and one of check, compare, diagnose, found None"),
        (f'{HEADER}\n{{"again": "rm -rf /"}}\n', "found 'rm -rf /'"),
        (f'{HEADER}\n{{"again": "note-parity synthetic x"}}\n', "found 'note-parity synthetic x'"),
        (f'{HEADER}\n{{"again": "note-parity check \'"}}\n', "again: expected note-parity"),
        (f'{HEADER}\n{{"again": "note-parity check --html=x"}}\n', "writes no file, found --html"),
    ],
)
def test_what_names_no_comparison_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "r.json").write_text(content)
    result = run("again", tmp_path / "r.json")
    assert (result.exit_code, result.stdout) == (EXIT_UNUSABLE, "")
    assert reason in result.stderr
    assert len(result.stderr) < 400


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        assert f"error: {path}: cannot be read: {reason}" in run("again", path).stderr
