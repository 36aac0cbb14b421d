"""Reports: records that add up, and formats that say what they say, whatever a foreign dump calls its tensors."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from parity.check import CheckReport, Run, check
from parity.detail import Detail, detail, ulp_distance
from parity.diagnose import diagnose
from parity.end_to_end import best_token, end_to_end, kl_divergence
from parity.faults.catalogue import CATALOGUE
from parity.faults.fault import Fault
from parity.findings import ChoiceResult, Comparison, Place, ProbeResult, by_step
from parity.replay import Exchange
from parity.report.check_text import print_check_report
from parity.report.compare_text import print_comparison
from parity.report.diagnosis_text import print_diagnosis
from parity.report.evidence import times
from parity.report.from_findings import layer_kinds, report_of_check, report_of_comparison, report_of_diagnosis
from parity.report.heat_map import heat_maps
from parity.report.html import html_page
from parity.report.json_lines import json_lines
from parity.report.junit import junit_xml
from parity.report.markdown import markdown
from parity.report.plots import pictures
from parity.report.records import Report, ReportError
from parity.report.write import write_reports
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.trace import Entry, InMemory, Trace
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors
from reference.config import tiny

CONFIG = tiny()
WEIGHTS = dict(synthetic_tensors(CONFIG))
KINDS = layer_kinds(CONFIG.text)
WORKLOAD = Workload.parse("p:a9 d:a")
FAULT = CATALOGUE["k_rope_norm_dropped"]
HOSTILE = "layers.0.<script>alert(1)</script>|`\x00\x1b[31m"


def probe(name: str, ratio: float, view: str = "isolated", limit: float = 3.3, noise: float = 1e-3) -> ProbeResult:
    verdict = "different" if ratio > limit else "within noise"
    place = Place("a", 3, 0)
    bad = place if ratio > limit else None
    return ProbeResult(name, view, verdict, 10, 960, 0, ratio * noise, noise, limit, 0.5, place, bad)  # type: ignore[arg-type]


def flip(name: str) -> ChoiceResult:
    return ChoiceResult(Exchange(name, "a", 4, 0, (1,), (2,), 0.5, 3.0), "isolated", 0.01, "flip")


def compared(*probes: ProbeResult, choices: tuple[ChoiceResult, ...] = (), choice_rows: int = 20) -> Report:
    comparison = Comparison(probes, choices, choice_rows, 1e-6)
    return report_of_comparison(comparison, WORKLOAD, "bfloat16", "golden", "dump", KINDS)


DIFFERENT = compared(
    *(probe(f"layers.{i}.output", 1.0 + i, view) for i in range(6) for view in ("cascade", "isolated")),
    probe("layers.4.attn.k_rope_unrotated", 41.0),
    probe("logits", 0.0),
    choices=(flip("layers.1.ffn.router.expert_ids"),),
)


def reference(dtype: torch.dtype, faults: tuple[Fault, ...] = ()) -> ReferenceRunner:
    return ReferenceRunner(CONFIG, WEIGHTS, dtype, faults=faults)


@pytest.fixture(scope="module")
def checked() -> CheckReport:
    """A faulty port at the exact level, over two workloads."""
    workloads = [WORKLOAD, Workload.parse("p:a5+b3 d:b", 1)]
    return check(
        lambda level: reference, lambda level: reference(torch.float64, (FAULT,)), workloads, levels=("exact",)
    )


@pytest.fixture(scope="module")
def diagnosed() -> Iterator[Report]:
    candidate = traced(reference(torch.float64, (FAULT,)), WORKLOAD)
    found = diagnose(reference, candidate, torch.float64, WORKLOAD, [FAULT, CATALOGUE["rescale_twice"]], draws=0)
    truth = traced(reference(torch.float64), WORKLOAD)
    return report_of_diagnosis(
        found, WORKLOAD, "float64", "golden", "my dump", CATALOGUE, KINDS, detail(truth, candidate)
    )


def printed(print_report, report: Report, verbose: bool = False, width: int = 100) -> str:
    console = Console(width=width, highlight=False, markup=False, emoji=False, force_terminal=False)
    with console.capture() as capture:
        print_report(report, console, verbose)
    return capture.get()


# Records


@pytest.mark.parametrize(
    "field", ["workloads", "tensors", "elements", "bitwise_equal", "different", "missing", "flips"]
)
def test_totals_that_do_not_add_up_are_refused(field: str) -> None:
    totals = replace(DIFFERENT.totals, **{field: getattr(DIFFERENT.totals, field) + 1})
    with pytest.raises(ReportError, match=r"the totals say \d+, the records add up to \d+"):
        replace(DIFFERENT, totals=totals)


def test_fewer_choices_compared_than_differ_are_refused() -> None:
    with pytest.raises(ReportError, match="rows of choices that differ"):
        replace(DIFFERENT, totals=replace(DIFFERENT.totals, choice_rows=0))


def test_a_verdict_that_its_rows_do_not_make_is_refused() -> None:
    with pytest.raises(ReportError, match="its records make it 'different'"):
        replace(DIFFERENT, verdict="agrees", first=None)
    with pytest.raises(ReportError, match="the first difference is None"):
        replace(DIFFERENT, first=None)


def test_headline_is_the_verdict_and_its_number() -> None:
    # The flip in layer 1 comes before the tensors in the order of computation.
    assert DIFFERENT.headline.startswith("DIFFERENT  layers.1.ffn.router.expert_ids  chooses [2] in place of [1]")
    report = compared(probe("layers.0.attn.gate", 41.0, limit=2.0))
    assert report.headline == (
        "DIFFERENT  layers.0.attn.gate  isolated error 41.0x noise (limit 2.0x)  bad from request a position 3"
    )
    agrees = compared(probe("logits", 1.0)).headline
    assert agrees == ("AGREES  dump with golden: 1 tensor, 960 elements, 1 workload; worst 1.0x of 3.3x at logits")


def test_what_arrives_and_what_is_added_stand_side_by_side() -> None:
    report = compared(probe("layers.2.output", 3.0, "cascade"), probe("layers.2.output", 1.0), probe("logits", 0.5))
    layer, logits = report.layers
    assert layer.arrives
    assert layer.added
    assert (layer.arrives.error, layer.added.error) == (3e-3, 1e-3)
    assert (logits.arrives, logits.layer) == (None, "logits")


def test_the_two_views_of_a_layer_are_of_one_workload() -> None:
    both = Comparison((probe("layers.0.output", 1.5, "cascade"), probe("layers.0.output", 1.0)), (), 0, 1e-6)
    alone = Comparison((probe("layers.0.output", 2.0),), (), 0, 1e-6)
    runs = (Run("bfloat16", WORKLOAD, both), Run("bfloat16", Workload.parse("p:a3", 1), alone))
    (layer,) = report_of_check(CheckReport("reference", "port", runs, ())).layers
    assert layer.arrives
    assert layer.added
    assert (layer.arrives.error, layer.added.error, layer.worst.ratio) == (1.5e-3, 1e-3, 2.0)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0x"), (0.004, "0.004x"), (1.26, "1.3x"), (1234.0, "1.23e+03x"), (math.inf, "infx")]
)
def test_times(value: float, text: str) -> None:
    assert times(value) == text


# Formats


def test_json_lines_hold_every_record_and_end_with_the_totals(checked: CheckReport) -> None:
    report = report_of_check(checked, KINDS)
    records = [json.loads(line) for line in json_lines(report).splitlines()]
    assert records[0]["record"] == "header"
    assert set(records[0]["versions"]) == {"python", "torch", "note-parity"}
    assert records[-1]["record"] == "totals"
    tensors = [record for record in records if record["record"] == "tensor"]
    assert len(tensors) == records[-1]["tensors"] + records[-1]["missing"] == checked.compared
    assert sum(record["elements"] for record in tensors) == records[-1]["elements"]


def test_json_has_no_infinity() -> None:
    report = compared(replace(probe("logits", 41.0), error=math.inf, largest=math.inf))
    records = [json.loads(line, parse_constant=pytest.fail) for line in json_lines(report).splitlines()]
    assert next(record for record in records if record["record"] == "tensor")["error"] == "inf"


def test_c07_junit_has_a_case_for_each_layer_and_step_of_each_level_and_workload(checked: CheckReport) -> None:
    root = ElementTree.fromstring(junit_xml(report_of_check(checked, KINDS)))
    assert [suite.get("name") for suite in root] == ["exact: p:a9 d:a (seed 0)", "exact: p:a5+b3 d:b (seed 1)"]
    for suite in root:
        names = [case.get("name") for case in suite]
        actions = str(suite.get("name")).split(": ")[1].split(" (")[0].split()
        for layer in ("embeddings", "0 full, dense", "1 full, experts"):
            steps = [f"layer {layer}, step {number} {action}" for number, action in enumerate(actions)]
            assert [name for name in names if name.startswith(f"layer {layer}")] == steps
        assert sum(name.startswith("layer ") for name in names) == int(suite.get("tests", 0)) == len(names)
    assert int(root.get("failures", 0)) == len(root.findall(".//failure")) > 0
    failure = root.find(".//testcase[@name='layer 0 full, dense, step 0 p:a9']/failure")
    assert failure is not None
    assert failure.get("message", "").startswith("layers.0.attn.k_rope_unrotated  cascade error")


def test_nothing_compared_is_an_error_everywhere() -> None:
    missing = ProbeResult("logits", "cascade", "missing", 0, 0, 7, 0.0, 0.0, 0.0, 0.0, None, None)
    for report in (compared(choice_rows=0), compared(missing, choice_rows=0)):
        root = ElementTree.fromstring(junit_xml(report))
        assert (root.get("errors"), root.get("failures")) == ("1", "0")
        assert report.headline.startswith("NOTHING COMPARED")
        assert "nothing compared" in markdown(report)
        assert "∅ nothing compared" in html_page(report)
        assert printed(print_comparison, report).startswith("NOTHING COMPARED")


class _Page(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_one_offline_file_with_text_for_every_figure(checked: CheckReport, diagnosed: Report) -> None:
    for report in (report_of_check(checked, KINDS), diagnosed):
        page = _Page(html_page(report))
        tags = [tag for tag, _ in page.tags]
        assert not {"script", "link", "iframe", "object"} & set(tags)
        sources = [attributes.get("src") or attributes.get("href") for _, attributes in page.tags]
        assert all(source is None or source.startswith("data:image/svg+xml;base64,") for source in sources)
        images = [attributes for tag, attributes in page.tags if tag == "img"]
        assert len(images) == len(pictures(report)) > 0
        assert all(len(image.get("alt") or "") > 40 for image in images)
        assert report.headline in page.text
        assert "✘ different" in page.text


def test_hostile_names_stay_text() -> None:
    report = compared(probe(HOSTILE, 41.0))
    assert "script" not in [tag for tag, _ in _Page(html_page(report)).tags]
    failure = ElementTree.fromstring(junit_xml(report)).find(".//failure")
    assert failure is not None
    assert failure.get("message", "").startswith("layers.0.<script>alert(1)</script>|`??[31m")
    row = next(line for line in markdown(report).splitlines() if "isolated" in line and line.startswith("|"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert [json.loads(line)["tensor"] for line in json_lines(report).splitlines() if '"record": "tensor"' in line] == [
        HOSTILE
    ]


def test_figures_are_the_same_bytes_every_time_and_say_what_they_show() -> None:
    first, second = pictures(DIFFERENT), pictures(DIFFERENT)
    assert first == second
    assert first[0].title == "Error by layer"
    assert "cascade from 1.00e-03 behind layer 0 to 6.00e-03 behind layer 5" in first[0].alt
    assert ElementTree.fromstring(first[0].svg).tag.endswith("svg")


def test_heat_maps(checked: CheckReport, diagnosed: Report) -> None:
    by_step, by_workload = heat_maps(report_of_check(checked, KINDS))
    assert (by_step.title, by_step.columns) == ("Error by layer and step, level exact", ("0  p:a9", "1  d:a"))
    assert by_workload.columns == ("p:a9 d:a", "p:a5+b3 d:b")
    assert by_workload.layers[:3] == ("embeddings", "0", "1")
    (by_step,) = heat_maps(diagnosed)
    assert by_step.columns == ("0  p:a9", "1  d:a")
    assert by_step.values[0] == (0.0, 0.0)
    assert all(value for row in by_step.values[1:] for value in row)


# Text


@pytest.mark.parametrize("width", [60, 100])
def test_names_and_amounts_are_never_cut_or_broken(width: int) -> None:
    longest = ("layers.45.attn.index.head_weights", "layers.45.attn.k_rope_unrotated")
    report = compared(*(probe(name, 1234.5, view) for name in longest for view in ("cascade", "isolated")))
    for print_report in (print_comparison, print_check_report):
        text = printed(print_report, report, verbose=True, width=width)
        assert "…" not in text
        assert all(name in text for name in longest)
        assert "1.23e+03x of 3.3x" in text


def test_check_text_ends_with_the_command_that_repeats_it(checked: CheckReport) -> None:
    lines = printed(print_check_report, report_of_check(checked, KINDS)).splitlines()
    assert lines[0].startswith("DIFFERENT  layers.0.attn.k_rope_unrotated  cascade error")
    tables = lines[2 : next(i for i, line in enumerate(lines) if line.startswith("choices"))]
    assert max(len(line.rstrip()) for line in tables) <= 100
    assert lines[-2] == "again: note-parity check --level exact --workload 'p:a5+b3 d:b' --workload-seed 1"
    assert lines[-1] == "next:  note-parity check --level exact --workload 'p:a5+b3 d:b' --workload-seed 1 --verbose"


def test_an_agreement_needs_no_commands() -> None:
    text = printed(print_comparison, compared(probe("logits", 1.0)))
    assert text.startswith("AGREES  dump with golden")
    assert "again" not in text
    assert "next" not in text


def test_diagnosis_names_the_fault_and_its_residual(diagnosed: Report) -> None:
    text = printed(print_diagnosis, diagnosed)
    assert "fault: k_rope_norm_dropped explains it: " in text
    assert FAULT.says in text
    assert text.splitlines()[-2:] == [
        "again: note-parity diagnose golden 'my dump'",
        "next:  note-parity faults k_rope_norm_dropped",
    ]


def test_unknown_is_an_answer_with_the_place(diagnosed: Report) -> None:
    assert diagnosed.fault
    unknown = replace(diagnosed.fault, verdict="unknown", explanations=(), equivalents=(), tried=12)
    text = printed(print_diagnosis, replace(diagnosed, fault=unknown))
    assert "fault: unknown. 12 hypotheses were applied to the reference; none explains the difference" in text
    assert "layers.0.attn.k_rope_unrotated, computed from recorded inputs, is the first that differs" in text
    for coverage, told in (("logits only", "only logits were recorded"), ("some probes", "only some tensors were")):
        blind = printed(print_diagnosis, replace(diagnosed, fault=replace(unknown, coverage=coverage)))
        assert told in blind


# Files


def test_all_formats_are_written_whole(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"report.{name}" for name in ("json", "junit", "markdown", "html")}
    paths["json"].write_text("old")
    write_reports(DIFFERENT, **paths)
    assert sorted(tmp_path.iterdir()) == sorted(paths.values())
    assert paths["json"].read_text() == json_lines(DIFFERENT)
    assert paths["html"].read_text(encoding="utf-8").endswith("</html>")


def test_a_path_that_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    good = tmp_path / "report.json"
    for bad, message in (
        ({"html": tmp_path}, "is a folder"),
        ({"html": tmp_path / "none" / "report.html"}, "there is no folder"),
        ({"junit": good}, "--json writes the same file"),
    ):
        with pytest.raises(ReportError, match=message):
            write_reports(DIFFERENT, json=good, **bad)
        assert not good.exists()


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ReportError, match="No space left on device"):
        write_reports(DIFFERENT, json=path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# What the pictures are made of


def trace_of(name: str, *steps: torch.Tensor) -> Trace:
    entries, position = [], 0
    for action, rows in enumerate(steps):
        positions = tuple(range(position, position + len(rows)))
        entries.append(Entry(name, "a", action, "prefill", positions, InMemory(rows)))
        position += len(rows)
    return Trace(entries)


def test_end_to_end_against_the_definition() -> None:
    expected = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0]], dtype=torch.float64)
    actual = torch.tensor([[2.0, 0.0, 0.0], [0.0, 4.0, 3.0]], dtype=torch.float64)
    p, q = expected[1].softmax(0), actual[1].softmax(0)
    found = end_to_end(trace_of("logits", expected[:1], expected[1:]), trace_of("logits", actual))
    assert found
    assert found.first_different
    assert found.largest_kl == pytest.approx(float((p * (p / q).log()).sum()))
    assert found.mean_kl == pytest.approx(found.largest_kl / 2)
    assert (found.rows, found.agreeing_rows, found.top1_agreement) == (2, 1, 0.5)
    token = found.first_different
    assert (token.position, token.action, token.expected, token.actual, token.margin) == (1, 1, 2, 1, 2.0)


def test_end_to_end_of_ties_and_of_rows_without_a_distribution() -> None:
    assert best_token(torch.tensor([[1.0, 5.0, 5.0]])).tolist() == [1]
    assert float(kl_divergence(torch.tensor([[1.0, -torch.inf]]), torch.tensor([[1.0, -torch.inf]]))) == 0.0
    rows = torch.tensor([[1.0, 2.0], [1.0, torch.nan]])
    found = end_to_end(trace_of("logits", rows), trace_of("logits", rows))
    assert found
    assert (found.rows_without_distribution, found.agreeing_rows, found.largest_kl) == (1, 1, math.inf)
    assert end_to_end(trace_of("logits", rows), trace_of("final_norm", rows)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ulps_count_neighbours(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -1.0, 0.0, 3.0e-3], dtype=dtype)
    stepped = values.clone()
    for steps in range(1, 4):
        stepped = torch.nextafter(stepped, torch.tensor(torch.inf, dtype=dtype))
        assert ulp_distance(values.double(), stepped).tolist() == [steps] * 4
    assert ulp_distance(torch.tensor([0.0]), torch.tensor([-0.0])).tolist() == [0]
    assert ulp_distance(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, torch.nan])).tolist() == [0, 2**31]


def test_overlap_counts_what_both_choose() -> None:
    name = "layers.1.ffn.router.expert_ids"
    expected, actual = torch.tensor([[1, 2, 3, -1], [4, 5, 6, 7]]), torch.tensor([[3, 2, 1, -1], [4, 5, 8, 9]])
    (overlap,) = detail(trace_of(name, expected), trace_of(name, actual)).overlaps
    assert (overlap.layer, overlap.rows, overlap.mean, overlap.least) == (1, 2, 0.75, 0.5)


def test_detail_of_equal_runs_is_zero_everywhere() -> None:
    trace = traced(reference(torch.bfloat16), WORKLOAD)
    found = detail(trace, trace)
    assert {step.error for step in found.by_step} == {0.0}
    assert {ulp.ulps for ulp in found.ulps if ulp.elements} == {0}
    assert {overlap.least for overlap in found.overlaps} == {1.0}
    assert found.end_to_end
    assert (found.end_to_end.top1_agreement, found.end_to_end.largest_kl) == (1.0, 0.0)


def test_a_run_keeps_its_records_apart() -> None:
    """The same tensor at two levels and in two workloads is four rows."""
    comparison = Comparison((probe("logits", 1.0),), (), 0, 1e-6)
    runs = [
        Run(level, Workload.parse("p:a3", seed), comparison) for level in ("float32", "bfloat16") for seed in (0, 1)
    ]
    report = report_of_check(CheckReport("reference", "port", tuple(runs), ("a: no draft layer",)), KINDS)
    assert (report.totals.tensors, report.totals.workloads, len(report.levels)) == (4, 2, 2)
    assert "skipped: a: no draft layer" in printed(print_check_report, report)
    assert report.detail == Detail()


def test_where_nothing_is_allowed_any_error_is_too_much() -> None:
    places = [Place("a", position, 0) for position in range(3)]
    first, second = by_step([0, 0, 1], places, [0.0, 0.5, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0])
    assert (first.bad, first.place, second.bad) == (1, places[1], 0)
