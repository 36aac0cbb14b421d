"""`compare` and `diagnose` on two sides: goldens, dumps, foreign dumps through mappings, sums and samples alone."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from click.testing import Result
from dumps import CONFIG, edit_manifest, edited, split_lanes
from safetensors.torch import save_file
from typer.testing import CliRunner

from parity.cli import EXIT_AGREES, EXIT_DISAGREES, EXIT_UNUSABLE, app
from parity.dump_compare import compare_dumps, derived_noise
from parity.faults import catalogue
from parity.faults.catalogue import CATALOGUE
from parity.golden_compare import compare_to_golden
from parity.golden_file import Golden
from parity.golden_reference import reference_of
from parity.golden_trace import golden_trace
from parity.manifest import Hashes, Producer, sha256_of_files
from parity.run import traced
from parity.same_run import identity_of_golden
from parity.trace import Entry, InMemory, Trace
from parity.trace_file import TraceWriter, open_trace, write_trace

GOLDEN = Golden.open("tiny")
RUNS = {
    "right": (torch.bfloat16, []),
    "float32": (torch.float32, []),
    "wrong": (torch.bfloat16, [CATALOGUE["swa_theta_on_full"]]),
}


def write_statistics(folder: Path, trace: Trace, patterns: tuple[str, ...] = ("*",)) -> None:
    maker = Producer(engine="sums")
    with TraceWriter(folder, maker, torch.bfloat16, statistics_only=patterns, workload=GOLDEN.workload) as writer:
        for entry in sorted(trace.entries(), key=lambda entry: entry.action):
            writer.keep(entry)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the golden's workload: whole, and as sums and samples (`right-sums`)."""
    folder = tmp_path_factory.mktemp("sides")
    reference = reference_of(GOLDEN)
    config = json.dumps(CONFIG.to_json()).encode()
    for name, (dtype, faults) in RUNS.items():
        trace = traced(reference(dtype, faults), GOLDEN.workload)
        write_trace(folder / name, trace, dtype, workload=GOLDEN.workload, config=config)
        write_statistics(folder / f"{name}-sums", trace)
    return folder


def run(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def first_word(result: Result) -> str:
    return result.output.split()[0]


# Two dumps


def test_a_run_with_itself_is_bitwise_equal(dumps: Path, tmp_path: Path) -> None:
    result = run("compare", dumps / "right", dumps / "right", "--json", tmp_path / "r.json")
    assert (result.exit_code, first_word(result)) == (EXIT_AGREES, "AGREES")
    records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    totals = records[-1]
    assert totals["bitwise_equal"] == totals["tensors"] > 150
    assert any("not measured" in record.get("note", "") for record in records)


@pytest.mark.parametrize(("expected", "actual"), [("right", "float32"), ("float32", "right")])
def test_two_dtypes_of_one_run_are_close_and_never_within_noise(expected: str, actual: str, dumps: Path) -> None:
    found = compare_dumps(open_trace(dumps / expected), open_trace(dumps / actual), torch.bfloat16, GOLDEN.workload)
    assert {probe.verdict for probe in found.probes} <= {"close", "bitwise equal"}
    assert found.compared > 150
    assert all(choice.verdict != "flip" for choice in found.choices)


def test_c74_the_first_difference_of_two_dumps_is_found(dumps: Path) -> None:
    result = run("compare", dumps / "right", dumps / "wrong")
    assert result.exit_code == EXIT_DISAGREES
    assert result.output.startswith("DIFFERENT  layers.0.attn.q_rope")
    assert "--verbose" in result.output.splitlines()[-1], "without a golden there is no reference to diagnose with"


def test_derived_noise_grows_with_depth_and_is_near_what_was_measured() -> None:
    layers = CONFIG.text.num_hidden_layers
    names = ["embeddings", *(f"layers.{layer}.output" for layer in range(layers)), "logits", "mtp.0.logits"]
    noise = [derived_noise(name, torch.bfloat16, layers) for name in names]
    assert noise == sorted(noise)
    for name, derived in zip(names[1:-1], noise[1:-1], strict=True):
        measured = GOLDEN.values(name, "a").floor.noise
        assert 0.5 < derived / float(measured.square().mean().sqrt()) < 4.0


def test_a_choice_without_scores_is_no_near_tie(dumps: Path) -> None:
    """Nothing says that the two were close."""
    ids = "layers.1.ffn.router.expert_ids"
    right = edited(open_trace(dumps / "right"), lambda name, value: {name: value} if name == ids else {})
    other = edited(right, lambda name, value: {name: value.clone().index_fill_(1, torch.tensor([0]), 13)})
    found = compare_dumps(right, other, torch.bfloat16)
    assert {choice.verdict for choice in found.choices} == {"flip"}
    assert {choice.exchange.gap for choice in found.choices} == {float("inf")}


def test_c20_the_gap_of_a_choice_is_told_in_steps_of_the_dtype(dumps: Path, tmp_path: Path) -> None:
    """Against a golden and against another dump; the step is that at the better score."""
    ids, scores = "layers.1.ffn.router.expert_ids", "layers.1.ffn.router.choice"
    right = open_trace(dumps / "right")
    order_TE = right.of(scores, "a")[0].source.load()[:1].argsort(-1, descending=True)
    best, last = int(order_TE[0, 0]), int(order_TE[0, -1])

    def swap(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: value.masked_fill(value == best, last) if name == ids else value}

    write_trace(tmp_path / "swapped", edited(right, swap), torch.bfloat16, workload=GOLDEN.workload)
    for expected, verdict in (("tiny", "flip"), (dumps / "right", "near tie")):  # what is derived allows more
        result = run("compare", expected, tmp_path / "swapped", "--json", tmp_path / "r.json")
        records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
        choice = next(record for record in records if record["record"] == "choice")
        assert choice["place"] == {"request": "a", "position": 0, "occurrence": 0}
        top, bottom = right.of(scores, "a")[0].source.load()[0, order_TE[0]].double()[[0, -1]].tolist()
        step = 2.0 ** (math.floor(math.log2(top)) - 7)
        assert choice["gap_ulps"] == pytest.approx((top - bottom) / step, rel=1e-2)
        assert choice["verdict"] == verdict
        if verdict == "flip":
            assert " ulps of bfloat16), noise " in result.output.splitlines()[0]


def test_numbers_that_no_engine_should_write_are_different_and_not_a_crash(dumps: Path) -> None:
    """Negative and repeated experts, float8, bytes, infinities, weights without their experts."""
    right = open_trace(dumps / "right")
    edits = {
        "layers.1.ffn.router.expert_ids": lambda value: -value - 5,
        "layers.2.ffn.router.expert_ids": lambda value: value[:, :1].expand_as(value),
        "layers.3.ffn.router.expert_ids": lambda value: value[:, :2].to(torch.uint8),
        "layers.0.output": lambda value: value.to(torch.float8_e4m3fn),
        "layers.1.output": lambda value: value * float("inf"),
        "logits": lambda value: value[:, :-3],
    }
    spoilt = edited(right, lambda name, value: {name: edits[name](value) if name in edits else value})
    for found in (
        compare_to_golden(GOLDEN, spoilt),
        compare_dumps(right, spoilt, torch.bfloat16),
        compare_dumps(spoilt, right, torch.bfloat16),
    ):
        assert found.is_different
        assert any("layers.3.ffn.router.weights" in line or "router" in line for line in found.skipped)


# Sums and samples


@pytest.mark.parametrize("expected", ["tiny", "right", "right-sums"])
def test_sums_of_a_right_run_are_partial_in_every_form(expected: str, dumps: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("json", "junit", "markdown", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    side = expected if expected == "tiny" else dumps / expected
    result = run("compare", side, dumps / "right-sums", *options)
    assert (result.exit_code, first_word(result)) == (EXIT_AGREES, "PARTIAL"), result.output
    assert "AGREES" not in result.output
    records = [json.loads(line) for line in files["json"].read_text().splitlines()]
    assert next(record for record in records if record["record"] == "verdict")["verdict"] == "partial"
    partial = [record for record in records if record["record"] == "partial"]
    # Behind choices that are not shown nothing is judged; a golden's are clear of ties.
    least = 250 if expected == "right" else 900
    assert records[-1]["partial"] == sum(record["verdict"] == "partial" for record in partial) > least
    assert all(record["numbers"] for record in partial if record["verdict"] == "partial")
    assert ElementTree.parse(files["junit"]).getroot().get("failures") == "0"
    assert "◐ note-parity compare: partial" in files["markdown"].read_text()
    assert "◐ partial" in files["html"].read_text()


@pytest.mark.parametrize("expected", ["tiny", "right", "right-sums"])
@pytest.mark.parametrize("actual", ["wrong-sums", "wrong"])
def test_sums_show_a_fault_where_it_begins(expected: str, actual: str, dumps: Path) -> None:
    result = run("compare", expected if expected == "tiny" else dumps / expected, dumps / actual)
    assert result.exit_code == EXIT_DISAGREES
    assert result.output.startswith("DIFFERENT  layers.0.attn.q_rope")


def test_some_names_by_sums_beside_whole_tensors(dumps: Path, tmp_path: Path) -> None:
    write_statistics(tmp_path / "mixed", open_trace(dumps / "right"), ("layers.*.attn.core", "layers.*.ffn.routed"))
    result = run("compare", "tiny", tmp_path / "mixed")
    assert (result.exit_code, first_word(result)) == (EXIT_AGREES, "AGREES")
    assert "more only sums and samples" in result.output.splitlines()[0]


def test_a_diagnosis_of_sums_alone_is_refused_with_what_to_do(dumps: Path) -> None:
    result = run("diagnose", "tiny", dumps / "wrong-sums")
    assert result.exit_code == EXIT_UNUSABLE
    assert "a diagnosis needs values" in result.stderr
    assert "note-parity compare tiny" in result.stderr


# Foreign dumps


def hooked(trace: Trace) -> Iterator[dict[str, torch.Tensor]]:
    """What hooks on a port of transformers' module tree show of a run, a forward pass after the other."""
    passes: dict[int, dict[str, list[torch.Tensor]]] = {}
    words = {"attn.input": "input_layernorm", "ffn.input": "post_attention_layernorm", "ffn.output": "mlp"}
    # The rows of one step are packed in the order of its items.
    for entry in sorted(trace.entries(), key=lambda entry: (entry.action, entry.request)):
        group, _, rest = entry.name.partition(".")
        layer, _, local = rest.partition(".")
        name = {"embeddings": "model.embed_tokens", "final_norm": "model.norm"}.get(entry.name)
        if group == "layers" and local in words:
            name = f"model.layers.{layer}.{words[local]}"
        if name:
            passes.setdefault(entry.action, {}).setdefault(f"{name}.output.0", []).append(entry.source.load())
    for _, tensors in sorted(passes.items()):
        yield {name: torch.cat(parts)[None].contiguous() for name, parts in tensors.items()}


@pytest.fixture(scope="module", params=["plain", "sglang"])
def foreign(request: pytest.FixtureRequest, dumps: Path) -> tuple[str, Path]:
    """The wrong run as a folder of another tool."""
    folder = dumps / f"foreign-{request.param}"
    folder.mkdir()
    index = 0
    for number, tensors in enumerate(hooked(open_trace(dumps / "wrong"))):
        if request.param == "plain":
            save_file(tensors, folder / f"forward-{number}.safetensors")
            continue
        for name, value in tensors.items():
            index += 1
            hook = f"non_intrusive__{name.removesuffix('.0')}"
            torch.save(value[0], folder / f"step={number}___rank=0___dump_index={index}___name={hook}.pt")
    return {"plain": "transformers", "sglang": "sglang"}[request.param], folder


def test_c67_from_the_files_of_another_engine_to_a_verdict_in_one_command(foreign: tuple[str, Path]) -> None:
    mapping, folder = foreign
    result = run("compare", "tiny", folder, "--mapping", mapping)
    assert result.exit_code == EXIT_DISAGREES, result.output
    # Of the first layer's attention nothing was recorded, so its consequence is the first that is seen.
    assert result.output.startswith("DIFFERENT  layers.0.ffn.input")
    assert f"--mapping {mapping}" in result.output.splitlines()[-1]


def test_a_foreign_dump_without_a_mapping_is_told_which_one(foreign: tuple[str, Path]) -> None:
    mapping, folder = foreign
    for command in ("compare", "diagnose"):
        result = run(command, "tiny", folder)
        assert result.exit_code == EXIT_UNUSABLE
        assert f"--mapping {mapping}" in result.stderr


def test_a_mapping_that_fits_nothing_is_refused(dumps: Path) -> None:
    def rename(manifest: dict) -> None:
        for entry in (*manifest["tensors"], *manifest.get("statistics_only", ())):
            entry["name"] = f"x.{entry['name']}"

    shutil.copytree(dumps / "right", dumps / "renamed")
    edit_manifest(dumps / "renamed", rename)
    result = run("compare", "tiny", dumps / "renamed", "--mapping", "sglang")
    assert result.exit_code == EXIT_UNUSABLE
    assert "no rule of mapping" in result.stderr
    assert "x.embeddings" in result.stderr


def test_names_of_the_schema_need_no_rule(dumps: Path, tmp_path: Path) -> None:
    """A dump that renames a few tensors needs a mapping of those only, and it works for the other side too."""

    def rename(manifest: dict) -> None:
        for entry in manifest["tensors"]:
            entry["name"] = {"final_norm": "my.norm"}.get(entry["name"], entry["name"])

    shutil.copytree(dumps / "right", tmp_path / "mine")
    edit_manifest(tmp_path / "mine", rename)
    document = {"mapping_version": 1, "title": "mine", "rules": [{"from": "my.norm", "to": "final_norm"}]}
    (tmp_path / "m.json").write_text(json.dumps(document))
    whole = run("compare", "tiny", dumps / "right").output.splitlines()[0].partition(": ")[2]
    mapped = run("compare", "tiny", tmp_path / "mine", "--mapping", tmp_path / "m.json")
    assert mapped.output.splitlines()[0].partition(": ")[2] == whole
    both = run("compare", tmp_path / "mine", dumps / "wrong", "--expected-mapping", tmp_path / "m.json")
    assert both.exit_code == EXIT_DISAGREES
    assert "--expected-mapping" in both.output.splitlines()[-1]


# The same run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": {"text": GOLDEN.workload.text(), "seed": 7}}, "seed 7, expected 0"),
        ({"sha256": {"inputs": "0" * 64}}, f"expected {identity_of_golden(GOLDEN).hashes.inputs}"),
    ],
)
def test_another_run_is_refused_unless_it_is_allowed(change: dict, message: str, dumps: Path, tmp_path: Path) -> None:
    shutil.copytree(dumps / "right", tmp_path / "other")
    edit_manifest(tmp_path / "other", lambda manifest: manifest.update(change))
    for command in ("compare", "diagnose"):
        result = run(command, "tiny", tmp_path / "other")
        assert result.exit_code == EXIT_UNUSABLE
        assert message in result.stderr
        assert "--allow-different-run" in result.stderr
    allowed = run("compare", "tiny", tmp_path / "other", "--allow-different-run")
    assert allowed.exit_code == EXIT_AGREES
    assert "note: not the same run, as allowed" in allowed.output


def test_another_model_is_refused_by_the_field_that_differs(dumps: Path, tmp_path: Path) -> None:
    text = dataclasses.replace(CONFIG.text, sliding_window_size=CONFIG.text.sliding_window_size + 1)
    shutil.copytree(dumps / "right", tmp_path / "other")
    config = dataclasses.replace(CONFIG, text=text)
    (tmp_path / "other" / "config.json").write_text(json.dumps(config.to_json()))
    for expected in ("tiny", dumps / "right"):
        result = run("compare", expected, tmp_path / "other")
        assert result.exit_code == EXIT_UNUSABLE
        assert "text.sliding_window_size is" in result.stderr


def test_the_hash_of_the_inputs_of_a_golden_is_the_one_that_dumps_state(dumps: Path, tmp_path: Path) -> None:
    trace = open_trace(dumps / "right")
    hashes = Hashes(inputs=identity_of_golden(GOLDEN).hashes.inputs)
    write_trace(tmp_path / "hashed", trace, torch.bfloat16, sha256=hashes)
    result = run("compare", "tiny", tmp_path / "hashed")
    assert result.exit_code == EXIT_AGREES
    assert "does not say what was run" not in result.output


def test_weights_are_those_that_the_golden_was_made_from_or_it_is_said(dumps: Path, tmp_path: Path) -> None:
    """The golden's are what `note-parity synthetic` writes, for `compare` and for `diagnose --checkpoint`."""
    assert run("synthetic", tmp_path / "tiny").exit_code == EXIT_AGREES
    own = sha256_of_files((tmp_path / "tiny").glob("*.safetensors"))
    assert GOLDEN.record.weights.files_sha256 == own
    assert reference_of(GOLDEN, tmp_path / "tiny").config == CONFIG

    def compared(weights: str, golden: str | Path = "tiny") -> str:
        shutil.rmtree(tmp_path / "dump", ignore_errors=True)
        trace, hashes = open_trace(dumps / "right"), Hashes(weights=weights)
        write_trace(tmp_path / "dump", trace, torch.bfloat16, sha256=hashes, workload=GOLDEN.workload)
        result = run("compare", golden, tmp_path / "dump")
        assert result.exit_code == EXIT_AGREES
        return result.output

    assert "note: " not in compared(own)
    ran = f"note: different weights: the dump ran weight files with sha256 {'0' * 64}"
    assert f"{ran}, the golden was made from {own}; if" in compared("0" * 64)
    shutil.copytree(GOLDEN.folder, tmp_path / "old")
    record = json.loads((tmp_path / "old" / "golden.json").read_text())
    del record["weights"]["files_sha256"]
    (tmp_path / "old" / "golden.json").write_text(json.dumps(record))
    assert "note: weights not compared: " in compared(own, tmp_path / "old")


def test_what_choices_that_are_not_shown_cost_is_said(dumps: Path, tmp_path: Path) -> None:
    trace = open_trace(dumps / "right")
    logits = Trace([entry for entry in trace.entries() if entry.name == "logits"])
    write_trace(tmp_path / "logits", logits, torch.bfloat16, workload=GOLDEN.workload)
    told = run("compare", "tiny", tmp_path / "logits").output
    assert "note: 141 choices are not shown and were taken for the expected ones, by their margins; " in told
    assert "rounding changes one of them in about 0.3 % of runs" in told
    assert "choices are not shown" not in run("compare", "tiny", dumps / "right").output


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda value: value[:, :-3], "logits: a row has shape [190], expected [193]"),
        (lambda value: value * float("nan"), "logits: 20 rows with NaN or infinity where only one side has it"),
    ],
    ids=["width", "NaN"],
)
@pytest.mark.parametrize("command", ["compare", "diagnose"])
def test_why_an_error_is_infinite_is_said(
    edit: Callable[[torch.Tensor], torch.Tensor],
    told: str,
    command: str,
    dumps: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No fault explains it; few are tried, for each takes a third of a second."""
    monkeypatch.setattr(catalogue, "CATALOGUE", dict(islice(CATALOGUE.items(), 10)))
    names = ("layers.5.output", "final_norm", "logits") if command == "diagnose" else ("logits",)
    spoilt = edited(
        open_trace(dumps / "right"),
        lambda name, value: {name: edit(value) if name == "logits" else value} if name in names else {},
    )
    write_trace(tmp_path / "spoilt", spoilt, torch.bfloat16, workload=GOLDEN.workload)
    result = run(command, "tiny", tmp_path / "spoilt")
    assert (result.exit_code, result.output.split()[:2]) == (EXIT_DISAGREES, ["DIFFERENT", "logits"])
    assert told in result.output


def test_rows_of_one_side_are_told_in_a_line_a_request(dumps: Path, tmp_path: Path) -> None:
    short = [entry for entry in open_trace(dumps / "right").entries() if entry.action < 2 and "mtp" not in entry.name]
    write_trace(tmp_path / "short", Trace(short), torch.bfloat16)
    told = run("compare", "tiny", tmp_path / "short", "--verbose").output
    lines = [line for line in told.splitlines() if "that only one side has" in line]
    assert [line.split(":")[1] for line in lines] == [" request a", " request b"]
    assert lines[1].endswith("rows of 152 tensors that only one side has, the first is embeddings with 1")


def test_c67_a_layout_is_told_from_a_mistake_and_its_mapping_is_written(dumps: Path, tmp_path: Path) -> None:
    """Lanes as [even | odd], and a name of the engine's own; the numbers are right."""
    mapping, folder = tmp_path / "mapping.json", tmp_path / "halves"
    trace = open_trace(dumps / "right")
    halves = edited(trace, lambda name, value: {name: split_lanes(value) if name.endswith("attn.q_rope") else value})
    write_trace(folder, halves, torch.bfloat16, workload=GOLDEN.workload)
    hint = "note: layers.{i}.attn.q_rope is itself under deinterleaved_to_interleaved: difference 1.00e+00 -> "
    assert hint in run("compare", "tiny", folder).output
    assert hint in run("diagnose", "tiny", folder).output

    def rename(manifest: dict) -> None:
        for tensor in manifest["tensors"]:
            tensor["name"] = tensor["name"].replace("ffn.router.weights", "gate.w").replace("q_rope", "q_pe")

    edit_manifest(folder, rename)
    result = run("propose", "tiny", folder, mapping)
    assert "layers.{i}.attn.q_rope is layers.{i}.attn.q_pe under deinterleaved_to_interleaved" in result.output
    assert "router" not in run("propose", "tiny", dumps / "right").output, "weights come in the order of their experts"
    assert first_word(run("compare", "tiny", folder, "--mapping", mapping)) == "AGREES"
    again = run("propose", "tiny", folder, mapping)
    assert (again.exit_code, "exists already" in again.stderr) == (EXIT_UNUSABLE, True)
    assert "no mapping is proposed" in run("propose", "tiny", dumps / "wrong").output
    assert "is itself" not in run("compare", "tiny", dumps / "wrong").output


# Steps


def test_c07_junit_has_a_case_for_each_layer_and_step(dumps: Path, tmp_path: Path) -> None:
    """The fault is a wrong rotation: the first tokens do not show it, and one of them is a decode of one request."""
    run("compare", "tiny", dumps / "wrong", "--junit", tmp_path / "r.xml")
    (suite,) = ElementTree.parse(tmp_path / "r.xml").getroot()
    cases = {case.get("name", ""): case for case in suite}
    words = GOLDEN.workload.text().split()
    steps = [number for number, word in enumerate(words) if word[0] in "pdv"]
    for layer, kind in ((0, "full, dense"), (2, "sliding, experts")):
        names = [name for name in cases if name.startswith(f"layer {layer} {kind}, step")]
        assert names == [f"layer {layer} {kind}, step {number} {words[number]}" for number in steps]
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    assert f"layer 0 full, dense, step 0 {words[0]}" in failed
    assert not any(name.startswith("layer embeddings") for name in failed)
    assert int(suite.get("tests", 0)) == len(suite) > 6 * len(steps)


def test_steps_add_up_to_their_tensor(dumps: Path) -> None:
    found = compare_to_golden(GOLDEN, open_trace(dumps / "wrong"))
    for probe in found.probes:
        assert sum(step.rows for step in probe.steps) == probe.rows
        worst = max(probe.steps, key=lambda step: step.error / (step.noise * step.limit))
        assert (worst.error, worst.place) == (probe.error, probe.place)
        assert any(step.bad for step in probe.steps) == (probe.verdict == "different")


def test_a_golden_as_a_trace_has_the_rows_of_its_tables() -> None:
    trace = golden_trace(GOLDEN)
    assert trace.names() == GOLDEN.names()
    for name in ("embeddings", "cache.2.kv_latent", "mtp.1.logits"):
        for request in GOLDEN.requests(name):
            table = trace.table(name, request)
            assert table.keys == GOLDEN.keys(name, request)
            assert torch.equal(table.values, GOLDEN.values(name, request).truth)


# Pictures


def test_the_page_of_a_comparison_has_heat_map_histogram_and_overlap(dumps: Path, tmp_path: Path) -> None:
    for side in ("tiny", dumps / "right"):
        run("compare", side, dumps / "wrong", "--html", tmp_path / "r.html")
        page = (tmp_path / "r.html").read_text()
        for title in ("Error by layer", "Error by layer and step", "Distance in ulps", "Overlap of choices"):
            assert f"<strong>{title}.</strong>" in page
        assert "the same best token in" in page


# Memory

WRITE = """
import sys
from pathlib import Path
import torch
from parity.manifest import Producer
from parity.trace import Entry, InMemory
from parity.trace_file import TraceWriter

folder, layers, rows, width = Path(sys.argv[1]), *map(int, sys.argv[2:])
for side in ("left", "right"):
    with TraceWriter(folder / side, Producer(engine="test"), torch.bfloat16) as dump:
        for layer in range(layers):
            values = torch.randn(rows, width, generator=torch.Generator().manual_seed(layer)).to(torch.bfloat16)
            value = values * (-1 if side == "right" and layer == layers - 2 else 1)
            dump.keep(Entry(f"layers.{layer}.output", "a", 0, "prefill", range(rows), InMemory(value)))
"""
COMPARE = """
import sys
from pathlib import Path
from parity.sides import Options, compare_sides

folder = Path(sys.argv[1])
def compared(pair):
    return compare_sides(str(pair / "left"), pair / "right", Options(), with_detail=True)
compared(folder / "small")  # what is loaded at the first comparison is not counted
before = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
found = compared(folder)
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
print(found.comparison.compared, found.comparison.first.name, before, peak)
"""


@pytest.mark.parametrize(
    ("layers", "rows", "limit"),
    [
        pytest.param(64, 400, None, id="262 MB each"),
        pytest.param(60, 3400, 10**9, id="2 GB each", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_two_dumps_are_compared_pair_by_pair(tmp_path: Path, layers: int, rows: int, limit: int | None) -> None:
    """262 MB: half of one side above what two small ones take. 2 GB: less than 1 GB in all."""

    def script(text: str, *arguments: object) -> str:
        command = [sys.executable, "-c", text, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert result.returncode == 0, result.stderr
        return result.stdout

    try:
        script(WRITE, tmp_path, layers, rows, 5120)
        script(WRITE, tmp_path / "small", 2, rows, 5120)
        compared, first, before, peak = script(COMPARE, tmp_path).split()
    finally:
        shutil.rmtree(tmp_path)
    print(f"{layers * rows * 5120 * 2} bytes each: peak {int(peak) / 1e6:.0f} MB, {int(before) / 1e6:.0f} MB before")
    assert (int(compared), first) == (layers, f"layers.{layers - 2}.output")
    assert int(peak) < (limit or int(before) + layers * rows * 5120)


def test_the_requests_of_a_name_are_looked_up() -> None:
    entries = [
        Entry("logits", f"r{number}", number, "prefill", (0,), InMemory(torch.zeros(1, 2))) for number in range(5)
    ]
    trace = Trace([*entries, Entry("logits", "r0", 9, "decode", (1,), InMemory(torch.zeros(1, 2)))])
    assert trace.requests("logits") == [f"r{number}" for number in range(5)]
    assert trace.requests("nothing") == []
