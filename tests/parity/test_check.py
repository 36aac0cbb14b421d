"""`note-parity check` from the command line: verdicts, exit codes, and a report that can be acted on.

Each run is one short workload, at the exact level unless the level is what is tested.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import parity.check
import parity.oracle_check
import parity.runners.transformers
from parity.check import LEVELS
from parity.check_command import CheckOptions
from parity.cli import EXIT_AGREES, EXIT_COULD_NOT_RUN, EXIT_DISAGREES, EXIT_UNUSABLE, app
from parity.runners.transformers import TransformersRunner
from parity.workload import Workload
from reference.checkpoint import write_synthetic
from reference.config import slice_of, tiny

pytest.importorskip("transformers", reason="the oracle needs transformers 5.24")

QUICK = ("--level", "exact", "--workload", "p:a9 d:a")


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments])


def first_line(result: Result) -> str:
    return result.stdout.partition("\n")[0]


def line_that_starts(result: Result, word: str) -> str:
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(word)]
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers, full and sliding."""
    path = tmp_path_factory.mktemp("check") / "model"
    write_synthetic(path, slice_of(tiny(), [1, 2]))
    return path


def test_agreement_exits_with_0() -> None:
    result = check(*QUICK)
    assert result.exit_code == EXIT_AGREES, result.output
    assert first_line(result).startswith("AGREES  transformers 5.24 with ")
    assert "129 tensors" in first_line(result), "19 of each layer, 5 more of a full one, 7 more with experts; 3 others"
    assert "again:" not in result.stdout
    assert result.stderr == ""


def test_a_checkpoint_of_ones_own_at_all_levels(folder: Path) -> None:
    result = check(str(folder), "--workload", "p:a9 d:a")
    assert result.exit_code == EXIT_AGREES, result.output
    for level in ("exact", "float32", "bfloat16"):
        assert line_that_starts(result, level).split()[1] == "agrees"
    assert " 0 full, experts" in result.stdout
    assert " 1 sliding, experts" in result.stdout
    assert " 2 " not in result.stdout, "no third layer"


class WrongTheta(TransformersRunner):
    """A port whose sliding layers rotate too fast, by more than bfloat16 hides within ten tokens."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.model.model.rotary_emb.sliding_attention_inv_freq *= 1.5


def test_a_planted_difference_exits_with_1_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity.oracle_check, "TransformersRunner", WrongTheta)
    result = check(*QUICK, "--seed", "3", "--workload-seed", "5")
    assert result.exit_code == EXIT_DISAGREES, result.output
    assert first_line(result).startswith("DIFFERENT  ")
    assert "layers.2.attn.q_rope" in first_line(result)
    assert re.search(r"request a position 1\b", result.stdout), "position 0 is not rotated"
    assert line_that_starts(result, "exact ").split()[1] == "different"

    again = shlex.split(line_that_starts(result, "again:").removeprefix("again:"))
    assert again == shlex.split("note-parity check --seed 3 --level exact --workload 'p:a9 d:a' --workload-seed 5")
    repeated = CliRunner().invoke(app, again[1:])
    assert repeated.exit_code == EXIT_DISAGREES
    assert repeated.stdout == result.stdout


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check took 100 s by its clock, which then stands still: the search for smaller workloads ends by itself."""
    monkeypatch.setattr(parity.check, "time", SimpleNamespace(monotonic=chain([0.0], repeat(100.0)).__next__))


@pytest.mark.usefixtures("unhurried")
def test_c74_the_smallest_workload_of_a_sweep_that_differs_is_what_is_repeated(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Position 0 is not rotated: two tokens are needed. The tokens of a sweep's workloads have seeds of their own."""
    monkeypatch.setattr(parity.oracle_check, "TransformersRunner", WrongTheta)
    result = check(str(folder), "--level", "exact", "--drawn", "3")
    assert result.exit_code == EXIT_DISAGREES, result.output
    again = shlex.split(line_that_starts(result, "again:").removeprefix("again:"))
    assert again[:5] == ["note-parity", "check", str(folder), "--level", "exact"]
    assert again[5:8] in (["--workload", line, "--workload-seed"] for line in ("p:a2", "p:b2", "p:a1 d:a"))
    repeated = CliRunner().invoke(app, again[1:])
    assert repeated.exit_code == EXIT_DISAGREES
    assert first_line(repeated).split()[:4] == first_line(result).split()[:4]


class FailsOnLess(WrongTheta):
    def step(self, items: Any) -> Any:
        if sum(len(item.token_ids) for item in items) < 9:
            raise RuntimeError("of the port's own making")
        return super().step(items)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("port", "line"), [(WrongTheta, "p:a2"), (FailsOnLess, "p:a9")])
def test_what_was_found_on_the_way_to_the_smallest_stays(
    monkeypatch: pytest.MonkeyPatch, folder: Path, port: type, line: str
) -> None:
    """Also if no more was left out than what computes nothing, and if the port raises on the next one."""
    monkeypatch.setattr(parity.oracle_check, "TransformersRunner", port)
    monkeypatch.setattr(parity.oracle_check, "boundary_workloads", lambda text: (Workload.parse("p:a9 t:a1"),))
    result = check(str(folder), "--level", "exact")
    assert result.exit_code == EXIT_DISAGREES, result.output
    assert f"--level exact --workload {line} --workload-seed 0" in line_that_starts(result, "again:")


def test_a_layout_that_the_optimized_implementation_lacks_is_no_agreement(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "model", slice_of(tiny(), [1, 2]), indexer_rope_layout="tail")
    result = check(str(tmp_path / "model"), "--candidate", "optimized", *QUICK)
    assert (result.exit_code, "indexer_rope_layout" in result.stderr) == (EXIT_COULD_NOT_RUN, True)


def test_a_planted_difference_is_found_at_every_level(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The report leads with the sharpest level that shows it, and the table has all."""
    monkeypatch.setattr(parity.oracle_check, "TransformersRunner", WrongTheta)
    result = check(str(folder), "--workload", "p:a9 d:a")
    assert result.exit_code == EXIT_DISAGREES, result.output
    assert "layers.1.attn.q_rope" in first_line(result)
    for level in ("exact", "float32", "bfloat16"):
        assert line_that_starts(result, f"{level} ").split()[1] == "different"
    assert "--level exact" in line_that_starts(result, "again:")


def test_all_that_was_run_is_what_a_report_repeats(folder: Path, tmp_path: Path) -> None:
    options = ("--level", "exact", "--level", "float32", "--workload", "p:a3", "--seed", "4")
    for name, where in (("own", [str(folder)]), ("tiny", [])):
        assert check(*where, *options, "--json", str(tmp_path / name)).exit_code == EXIT_AGREES
        said = json.loads((tmp_path / name).read_text().splitlines()[1])["again"]
        head = f"note-parity check {folder} " if where else "note-parity check --seed 4 "
        assert said == f"{head}--level exact --level float32 --workload p:a3 --workload-seed 4"
    assert CheckOptions(drawn=3, seed=7).narrowed(LEVELS) == "note-parity check --seed 7 --drawn 3"
    there = CheckOptions(folder=Path("a b"), drawn=3, seed=7).narrowed(LEVELS)
    assert there == "note-parity check 'a b' --seed 7 --drawn 3"


def test_nothing_compared_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity.runners.transformers, "observed", nullcontext)
    result = check(*QUICK)
    assert result.exit_code == EXIT_UNUSABLE
    assert first_line(result).startswith("NOTHING COMPARED")


def test_without_transformers_exits_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name == "transformers":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    result = check(*QUICK)
    assert result.exit_code == EXIT_COULD_NOT_RUN
    assert result.stdout == ""
    assert result.stderr.startswith("error: transformers is not installed; ")
    assert "note-parity[oracle]" in result.stderr


def _absent(path: Path) -> Path:
    return path / "absent"


def _empty(path: Path) -> Path:
    return path


def _complete(path: Path) -> Path:
    write_synthetic(path / "model", slice_of(tiny(), [1]))
    return path / "model"


def _broken_config(path: Path) -> Path:
    model = _complete(path)
    (model / "config.json").write_text("{")
    return model


def _config_without_a_key(path: Path) -> Path:
    model = _complete(path)
    values = slice_of(tiny(), [1]).to_json()
    del values["swa_rope_theta"]
    (model / "config.json").write_text(json.dumps(values))
    return model


def _truncated_shard(path: Path) -> Path:
    model = _complete(path)
    (shard,) = model.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_absent, "absent"),
        (_empty, "model.safetensors.index.json"),
        (_broken_config, "not valid JSON"),
        (_config_without_a_key, "swa_rope_theta"),
        (_truncated_shard, ".safetensors"),
    ],
)
def test_a_folder_that_is_no_checkpoint_exits_with_2(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    result = check(str(make(tmp_path)), *QUICK)
    assert result.exit_code == EXIT_UNUSABLE
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--level", "float16"), "exact, float32, bfloat16"),
        (("--level", "exact", "--level", "half"), "half"),
        (("--workload", "q:a3"), "q:a3"),
        (("--workload", ""), "at least one step"),
        (("--workload-seed", "3"), "add --workload"),
        (("--workload", "d:a t:a5"), "t:a5"),
        (("--drawn", "-1"), "--drawn"),
        (("--drawn", "many"), "--drawn"),
        (("--graphs",), "--candidate optimized"),
    ],
)
def test_wrong_use_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = check(*arguments)
    assert result.exit_code == EXIT_UNUSABLE
    assert result.stdout == ""
    assert message in result.stderr


def test_the_optimized_implementation_through_recordings() -> None:
    result = check("--candidate", "optimized", "--graphs", "--level", "exact")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("AGREES  optimized with reference")


def test_levels_may_be_repeated_and_are_shown_in_order() -> None:
    result = check("--level", "bfloat16", "--level", "exact", "--workload", "p:a3")
    assert result.exit_code == EXIT_AGREES, result.output
    rows = [line.split()[0] for line in result.stdout.splitlines() if " agrees " in line]
    assert rows == ["exact", "bfloat16"]


def test_drawn_workloads_come_beside_the_boundary_ones(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A draft is asked of the oracle in the workload given; it has no draft layer, and the report says so."""
    boundary = (Workload.parse("p:a3 m:a2"),)
    monkeypatch.setattr(parity.oracle_check, "boundary_workloads", lambda config: boundary)
    result = check(str(folder), "--level", "exact", "--drawn", "2")
    assert result.exit_code == EXIT_AGREES, result.output
    assert " 3 workloads" in first_line(result)
    assert line_that_starts(result, "skipped:") == "skipped: transformers has no draft layer for dots3_note"
    assert check(str(folder), "--level", "exact", "--drawn", "2").stdout == result.stdout


def test_verbose_lists_every_tensor(folder: Path) -> None:
    brief, verbose = check(str(folder), *QUICK), check(str(folder), *QUICK, "--verbose")
    assert (brief.exit_code, verbose.exit_code) == (EXIT_AGREES, EXIT_AGREES)
    assert first_line(verbose) == first_line(brief)
    for name in ("embeddings", "layers.0.attn.index.scores", "layers.1.ffn.router.weights", "logits"):
        assert any(line.split()[:1] == [name] for line in verbose.stdout.splitlines())
    assert len(verbose.stdout.splitlines()) > len(brief.stdout.splitlines()) + 40


def test_quiet_when_not_a_terminal(tmp_path: Path, folder: Path) -> None:
    """As a command in any folder: nothing on stderr, and no control characters in the report."""
    command = [sys.executable, "-m", "parity.cli", "check", str(folder), *QUICK]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stderr) == (EXIT_AGREES, "")
    assert result.stdout.startswith("AGREES  ")
    assert all(character.isprintable() or character == "\n" for character in result.stdout)
