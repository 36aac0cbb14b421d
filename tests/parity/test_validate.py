"""What is wrong with a dump is found before it is compared (C41, C68), and the page on dumps is true."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dumps import CONFIG, damaged, edit_manifest, edited, recorded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from parity.apply_mapping import apply_mapping
from parity.cli import app
from parity.foreign import read_foreign
from parity.manifest import DTYPE_CODES, DumpError
from parity.mapping import read_mapping
from parity.schema import PROBES
from parity.testing import steps
from parity.trace import Entry, InMemory, Trace
from parity.trace_file import write_trace
from parity.validate import ValidationReport, validate_dump
from parity.workload import Workload
from reference.errors import ConfigError

LINE = "p:a20+b5 d:a+b v:a3 t:a2 d:a"
CONFIG_TINY = ["--config", "tiny"]


def report_on(folder: Path, trace: Trace, config: bool = True, workload: str | None = None) -> ValidationReport:
    write_trace(
        folder,
        trace,
        torch.float32,
        config=json.dumps(CONFIG.to_json()).encode() if config else None,
        workload=Workload.parse(workload) if workload else None,
    )
    return validate_dump(folder)


def spoilt(report: ValidationReport) -> set[tuple[str, str]]:
    """Errors and warnings."""
    return {(finding.severity, finding.kind) for finding in report.findings if finding.severity != "note"}


def with_change(name: str, change: Callable[[Tensor], Tensor], line: str = LINE) -> Trace:
    return edited(recorded(line), lambda other, value: {other: change(value.clone()) if other == name else value})


def test_a_complete_run_has_nothing_to_complain_of(tmp_path: Path) -> None:
    report = report_on(tmp_path / "dump", recorded("p:a20+b5 d:a+b m:a2 v:a3 t:a2 d:a"), workload=None)
    assert report.findings == ()
    assert report.is_valid
    assert report.requests == ("a", "b")
    assert report.steps == 5
    assert report.tensors > 600


@pytest.mark.parametrize("line", ["p:a1 d:a", "p:a3 p:a9 p:a2", "p:a16", "p:b2 p:a13+b7 x:b d:a f:a>c d:c+a"])
def test_no_run_of_the_model_is_called_wrong(tmp_path: Path, line: str) -> None:
    assert not spoilt(report_on(tmp_path / "dump", recorded(line), workload=line))


def test_layers_that_are_the_same_bytes(tmp_path: Path) -> None:
    """A dump taken inside of a captured graph shows one layer everywhere."""
    first = {e.name.split(".", 2)[2]: e.source.load() for e in recorded("p:a16").entries() if ".3." in e.name}
    stuck = edited(
        recorded("p:a16"),
        lambda name, value: (
            {name: first[name.split(".", 2)[2]]}
            if name.startswith("layers.") and name.split(".")[1] in "34"
            else {name: value}
        ),
    )
    report = report_on(tmp_path / "dump", stuck)
    found = {finding.names for finding in report.findings if finding.kind == "identical layers"}
    assert ("layers.3.attn.q_latent", "layers.4.attn.q_latent") in found
    assert ("layers.3.output", "layers.4.output") in found
    assert not report.is_valid
    assert "captured graph" in report.findings[0].message


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        ("layers.2.attn.gate", lambda x: x.index_fill(0, torch.tensor([0]), float("nan")), ("error", "NaN")),
        ("layers.2.attn.gate", lambda x: x.index_fill(0, torch.tensor([0]), float("-inf")), ("error", "infinite")),
        (
            "layers.1.attn.index.scores",
            lambda x: x.index_fill(0, torch.tensor([0]), float("inf")),
            ("error", "infinite"),
        ),
        ("layers.1.attn.index.selected", lambda x: x + 1, ("error", "future keys")),
        ("layers.1.ffn.router.expert_ids", lambda x: x + 12, ("error", "experts")),
        ("layers.2.attn.q_rope", lambda x: x[..., :-1], ("error", "size")),
        ("layers.2.attn.q_rope", lambda x: x.flatten(1), ("error", "layout")),
        ("layers.2.ffn.router.expert_ids", lambda x: x.float(), ("error", "dtype")),
        ("layers.4.output", lambda x: x[[0, 1, *range(len(x) - 2)]], ("warning", "duplicate rows")),
        ("final_norm", torch.zeros_like, ("warning", "duplicate rows")),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else None,
)
def test_what_is_wrong_is_found_by_name(
    tmp_path: Path, name: str, change: Callable[[Tensor], Tensor], kind: tuple[str, str]
) -> None:
    report = report_on(tmp_path / "dump", with_change(name, change, "p:a20"))
    assert spoilt(report) == {kind}
    assert {n for finding in report.findings if finding.kind == kind[1] for n in finding.names} == {name}
    assert report.is_valid == (kind[0] == "warning")


def test_unknown_names_come_with_the_nearest_known(tmp_path: Path) -> None:
    trace = edited(recorded("p:a3"), lambda n, v: {n.replace("q_latent", "q_latents"): v})
    report = report_on(tmp_path / "dump", trace)
    assert spoilt(report) == {("error", "unknown name")}
    assert all("nearest: layers.{i}.attn.q_latent" in finding.message for finding in report.findings)


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    trace = edited(recorded("p:a3"), lambda n, v: {n.replace("layers.5.", "layers.6."): v})
    assert spoilt(report_on(tmp_path / "dump", trace)) == {("error", "layer"), ("warning", "missing")}


def test_a_run_that_stopped_half_way(tmp_path: Path) -> None:
    report = report_on(tmp_path / "dump", recorded("p:a20+b5 d:a+b"), workload=LINE)
    assert spoilt(report) == {("error", "incomplete")}


def test_positions_that_jump(tmp_path: Path) -> None:
    def moved(entry: Entry) -> Entry:
        positions = tuple(position + 4 * (entry.action > 0) for position in entry.positions)
        return Entry(entry.name, entry.request, entry.action, entry.kind, positions, entry.source)

    report = report_on(tmp_path / "a", Trace([moved(entry) for entry in recorded("p:a3 d:a").entries()], "x"))
    (finding,) = report.findings
    assert "jumps to position 7, after 3 rows" in finding.message
    assert len(finding.names) > 100
    late = Trace([entry for entry in recorded("p:a3 d:a").entries() if entry.action], "x")
    assert "no history" in report_on(tmp_path / "b", late).findings[0].message


def test_what_a_comparison_would_miss_is_a_note(tmp_path: Path) -> None:
    some = edited(recorded("p:a3"), lambda n, v: {n: v} if n.startswith(("layers.0.", "layers.3.attn")) else {})
    report = report_on(tmp_path / "dump", some, config=False)
    messages = [(finding.severity, finding.kind, finding.message) for finding in report.findings]
    assert ("warning", "missing", "nothing of layers 1 to 2") in messages
    assert any("layers 3 have neither their input" in message for _, _, message in messages)
    assert {finding.names for finding in report.findings} >= {("embeddings",), ("final_norm",), ("logits",)}
    assert any(kind == "no config" for _, kind, _ in messages)
    assert report.is_valid


def test_an_empty_dump_is_not_valid(tmp_path: Path) -> None:
    report = report_on(tmp_path / "dump", Trace([], "x"))
    assert not report.is_valid
    assert "nothing to compare" in report.findings[0].message


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no such folder"):
        validate_dump(tmp_path / "nothing")
    write_trace(tmp_path / "dump", recorded("p:a3"), torch.float32, config=b"{}")
    with pytest.raises(ConfigError):
        validate_dump(tmp_path / "dump")


def test_a_float8_dump_and_scattered_one_dimensional_tensors(tmp_path: Path) -> None:
    entries = [
        Entry("layers.0.output", "a", 0, "prefill", (0, 1), InMemory(torch.randn(2, 32).to(torch.float8_e4m3fn))),
        Entry("layers.0.attn.index.selected", "a", 0, "prefill", (0, 1), InMemory(torch.tensor([5, 6]))),
        Entry("logits", "a", 0, "prefill", (0, 1), InMemory(torch.tensor([5.0, 6.0]))),
    ]
    report = report_on(tmp_path / "dump", Trace(entries, "x"), config=False)
    assert spoilt(report) == {("error", "layout")}


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_gets_a_report_or_a_dump_error(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "dump"
    if not folder.exists():
        names = ("embeddings", "layers.0.attn.q_nope", "layers.0.attn.index.selected", "layers.0.output")
        write_trace(folder, edited(recorded("p:a3"), lambda n, v: {n: v} if n in names else {}), torch.float32)
        (tmp_path / "whole.json").write_bytes((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(data.draw(damaged((tmp_path / "whole.json").read_bytes())))
    with contextlib.suppress(DumpError):
        assert validate_dump(folder, CONFIG).findings


# The page for those who write dumps

PAGE = (Path(__file__).parents[2] / "docs" / "dumps.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_table_of_names_is_the_schema() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| ([^|]+) \|$", PAGE, re.MULTILINE)
    in_layers = {spec.local_name for spec in PROBES if spec.pattern.startswith("layers.")}
    wanted = [
        (spec.pattern, spec.dims, spec)
        for spec in PROBES
        if not (spec.pattern.startswith("mtp.") and spec.local_name in in_layers)
    ]
    assert [(name, dims) for name, dims, _ in rows] == [(name, dims) for name, dims, _ in wanted]
    for (_, _, meaning), (_, _, spec) in zip(rows, wanted, strict=True):
        assert meaning.startswith(spec.meaning)
        assert (", float32" in meaning.removeprefix(spec.meaning)) == spec.is_float32
        assert ("**integers**" in meaning) == (spec.kind == "choice")


def test_the_page_names_every_dtype() -> None:
    assert all(f"`{name}`" in PAGE for name in DTYPE_CODES)


def test_the_page_prints_what_to_run(capsys: pytest.CaptureFixture) -> None:
    exec(blocks("python")[0], {})
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["token_ids"] for line in lines] == [list(step.token_ids) for step in steps("tiny")]


def test_sizes_are_those_of_the_config_that_is_named(tmp_path: Path) -> None:
    trace = with_change("layers.0.ffn.output", lambda value: value[:, :-1])
    write_trace(tmp_path / "dump", trace, torch.float32)
    plain, sized = (CliRunner().invoke(app, ["validate", str(tmp_path / "dump"), *more]) for more in ([], CONFIG_TINY))
    assert (plain.exit_code, sized.exit_code) == (0, 2)
    assert "size: layers.0.ffn.output: shape [1, 95], expected D = 96 in 'T D'" in sized.output


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The folder that the page's examples write."""
    manifest, _ = blocks("json")
    folder = tmp_path / "my-dump"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", blocks("python")[1], str(folder)], check=True)
    (folder / "manifest.json").write_text(manifest)
    return folder


def test_the_example_is_a_valid_dump(example: Path, capsys: pytest.CaptureFixture) -> None:
    report = validate_dump(example)
    assert report.is_valid
    assert not spoilt(report)
    assert (report.tensors, report.statistics) == (2, 1)
    exec(blocks("python")[3], {"folder": example})
    assert "note no config" in capsys.readouterr().out


def test_the_example_mapping_does_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _, mapping = blocks("json")
    (tmp_path / "mapping.json").write_text(mapping)
    rows, padding = 5, 2
    sizes = {"hidden": 96, "residual": 96, "q": 6 * (12 + 8), "kv_expanded": 7}
    tensors = {f"model.block.1.{name}": torch.randn(rows + padding, size) for name, size in sizes.items()}
    entries = [Entry(name, "x", 0, "prefill", range(len(x)), InMemory(x)) for name, x in tensors.items()]
    write_trace(tmp_path / "dump", Trace(entries, "my engine"), torch.float32)
    code = blocks("python")[2]
    exec(code, {"folder": tmp_path / "dump", "mapping_file": tmp_path / "mapping.json"})
    assert "['layers.0.attn.q_rope', 'layers.0.output'] ()" in capsys.readouterr().out
    mapped = apply_mapping(read_mapping(tmp_path / "mapping.json"), read_foreign(tmp_path / "dump"), CONFIG.text)
    output = tensors["model.block.1.hidden"] + tensors["model.block.1.residual"]
    assert torch.equal(mapped.trace.table("layers.0.output", "x").values, output)


def test_the_example_manifest_is_refused_if_a_field_is_unknown(example: Path) -> None:
    edit_manifest(example, lambda manifest: manifest.update(colour="red"))
    with pytest.raises(DumpError, match="colour: Extra inputs are not permitted"):
        validate_dump(example)
