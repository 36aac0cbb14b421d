"""The commands on goldens and dumps, from a dump on disk to the verdict, the files and the exit code."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from parity.cli import EXIT_AGREES, EXIT_DISAGREES, EXIT_UNUSABLE, app
from parity.faults.catalogue import CATALOGUE
from parity.golden_compare import CLEAR_MARGIN
from parity.golden_file import Golden
from parity.golden_reference import reference_of
from parity.run import traced
from parity.schema import decided_by
from parity.trace_file import write_trace
from reference.checkpoint import write_synthetic
from reference.config import tiny


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ports record of the shipped golden's workload: a right one, and one with a fault."""
    folder = tmp_path_factory.mktemp("dumps")
    golden = Golden.open("tiny")
    reference = reference_of(golden)
    for name, faults in (("right", []), ("wrong", [CATALOGUE["swa_theta_on_full"]])):
        write_trace(folder / name, traced(reference(torch.bfloat16, faults), golden.workload), torch.bfloat16)
    return folder


def test_a_right_dump_agrees(dumps: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "tiny", str(dumps / "right")])
    assert (result.exit_code, result.output.split()[0]) == (EXIT_AGREES, "AGREES")


def test_c74_one_command_finds_the_first_difference_and_writes_every_report(dumps: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("json", "junit", "markdown", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    result = CliRunner().invoke(app, ["compare", "tiny", str(dumps / "wrong"), *options])
    assert result.exit_code == EXIT_DISAGREES
    assert result.output.startswith("DIFFERENT  layers.0.attn.q_rope")
    assert all(path.stat().st_size > 500 for path in files.values())
    assert "note-parity diagnose" in result.output


def test_the_fault_is_named_from_the_dump_and_the_page_shows_both_errors_of_each_layer(
    dumps: Path, tmp_path: Path
) -> None:
    pages = ["--html", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")]
    result = CliRunner().invoke(app, ["diagnose", "tiny", str(dumps / "wrong"), *pages])
    assert result.exit_code == EXIT_DISAGREES
    assert "swa_theta_on_full explains it" in result.output
    records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    layers = {record["layer"]: record for record in records if record["record"] == "layer"}
    assert all(layers[str(layer)]["arrives"] > 0 and layers[str(layer)]["added"] > 0 for layer in range(6))
    page = (tmp_path / "r.html").read_text()
    for title in ("Error by layer", "Error by layer and step", "Distance in ulps", "Overlap of choices"):
        assert f"<strong>{title}.</strong>" in page


def test_a_dump_is_validated_by_itself(dumps: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(dumps / "right")])
    assert (result.exit_code, result.output.split()[0]) == (EXIT_AGREES, "VALID")


def test_what_is_no_dump_is_unusable(tmp_path: Path) -> None:
    for command in (["compare", "tiny"], ["diagnose", "tiny"], ["validate"]):
        result = CliRunner().invoke(app, [*command, str(tmp_path)])
        assert result.exit_code == EXIT_UNUSABLE
        assert "manifest.json" in result.output


def test_a_golden_whose_tokens_are_clear_of_ties(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "checkpoint", tiny(), 5)
    nearest = {}
    for name, options in (("drawn", []), ("clear", ["--clear-of-ties"])):
        command = ["golden", str(tmp_path / "checkpoint"), str(tmp_path / name), "--workload", "p:a5 d:a", *options]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == EXIT_AGREES, result.output
        golden = Golden.open(str(tmp_path / name))
        assert len(golden.record.chosen_tokens) == (6 if options else 0)
        tables = [golden.choices(choice, "a") for choice in filter(decided_by, golden.names())]
        nearest[name] = min(float((table.margins / table.margin_noises).min()) for table in tables)
    assert nearest["drawn"] < CLEAR_MARGIN < nearest["clear"]
