"""Traces as folders: what is written is read, an interrupted run leaves nothing, a hostile folder is a DumpError."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from dumps import CONFIG, WORKLOAD, damaged, edit_manifest, recorded, same, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.manifest import (
    DumpError,
    Hashes,
    Producer,
    read_manifest,
    sha256_of_files,
    sha256_of_tokens,
)
from parity.run import run_workload
from parity.runners.reference import ReferenceRunner
from parity.same_run import RunIdentity, require_same_run
from parity.statistics import compare_statistics
from parity.trace import Entry, InMemory, Trace, row_blocks
from parity.trace_file import TraceWriter, open_dump, open_trace, write_trace
from parity.workload import Workload

MAKER = Producer(engine="reference", version="1", device="cpu")


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A small valid dump."""
    positions = range(3)
    tensors = {"embeddings": torch.arange(12.0).reshape(3, 4), "layers.0.attn.q_nope": torch.ones(3, 2, 5)}
    entries = [Entry(name, "a", 0, "prefill", positions, InMemory(value)) for name, value in tensors.items()]
    entries.append(
        Entry("layers.0.attn.index.selected", "a", 0, "prefill", positions, InMemory(torch.zeros(3, 2).long()))
    )
    write_trace(tmp_path / "dump", Trace(entries, "test"), torch.float32, MAKER)
    return tmp_path / "dump"


def refusal(folder: Path) -> str:
    with pytest.raises(DumpError) as caught:
        open_dump(folder)
    return str(caught.value)


def test_a_streamed_run_reads_back_bit_for_bit(tmp_path: Path) -> None:
    runner = ReferenceRunner(CONFIG, weights(), torch.float32)
    with TraceWriter(tmp_path / "dump", MAKER, torch.float32, workload=WORKLOAD, part_bytes=300_000) as writer:
        run_workload(runner, WORKLOAD, writer)
    assert len(list((tmp_path / "dump").glob("part-*.safetensors"))) > 2
    assert same(writer.trace(), recorded())
    assert open_dump(tmp_path / "dump").manifest.workload.workload() == WORKLOAD


def test_chosen_tokens_are_kept(tmp_path: Path) -> None:
    workload = dataclasses.replace(Workload.parse("p:a3", seed=4), chosen={("a", 1, 0): 7})
    write_trace(tmp_path / "dump", recorded("p:a3"), torch.float32, workload=workload)
    assert open_dump(tmp_path / "dump").manifest.workload.workload() == workload


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_every_dtype_reads_back(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.linspace(-2, 2, 21).reshape(3, 7).to(dtype)
    write_trace(
        tmp_path / "dump", Trace([Entry("embeddings", "a", 0, "prefill", (0, 1, 2), InMemory(value))], "x"), dtype
    )
    (entry,) = open_trace(tmp_path / "dump").entries()
    loaded = entry.source.load()
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), value.view(torch.uint8))


def test_no_rows_and_scattered_positions(tmp_path: Path) -> None:
    entries = [
        Entry("embeddings", "a", 0, "prefill", (), InMemory(torch.zeros(0, 4))),
        Entry("embeddings", "a", 1, "prefill", (5, 2, 9), InMemory(torch.randn(3, 4))),
    ]
    write_trace(tmp_path / "dump", Trace(entries, "x"), torch.float32)
    assert open_trace(tmp_path / "dump").keys("embeddings", "a") == ((5, 0), (2, 0), (9, 0))


def test_loaded_values_may_be_changed_without_changing_the_file(dump: Path) -> None:
    trace = open_trace(dump)
    (entry,) = trace.of("embeddings", "a")
    entry.source.load().zero_()
    assert torch.equal(entry.source.load(), torch.arange(12.0).reshape(3, 4))


def test_selection_by_glob_and_statistics_only(tmp_path: Path) -> None:
    runner = ReferenceRunner(CONFIG, weights(), torch.float32)
    with TraceWriter(
        tmp_path / "d", MAKER, torch.float32, patterns=("layers.2.*", "logits"), statistics_only=("layers.2.ffn.*",)
    ) as writer:
        run_workload(runner, WORKLOAD, writer)
    opened = open_dump(tmp_path / "d")
    assert all(name.startswith("layers.2.attn") or name[:8] in ("layers.2", "logits") for name in opened.trace.names())
    assert {entry.name for entry in opened.statistics} >= {"layers.2.ffn.input", "layers.2.ffn.output"}
    results = compare_statistics(recorded(), opened.statistics, lambda name: 1e-6)
    assert len(results) == len(opened.statistics)
    assert {result.verdict for result in results} == {"partial"}


def test_statistics_of_another_tensor_are_different() -> None:
    entries = list(recorded().entries())
    spoilt = Trace(
        [
            Entry(e.name, e.request, e.action, e.kind, e.positions, InMemory(e.source.load() * 1.01))
            for e in entries
            if e.name == "layers.3.output"
        ],
        "port",
    )
    verdicts = [r.verdict for r in compare_statistics(recorded(), _summaries(spoilt), lambda name: 1e-6)]
    assert set(verdicts) == {"different"}
    nowhere = compare_statistics(Trace([], ""), _summaries(spoilt), lambda name: 1e-6)
    assert {result.verdict for result in nowhere} == {"missing"}


def _summaries(trace: Trace) -> list:
    from types import SimpleNamespace

    from parity.statistics import statistics_of

    return [
        SimpleNamespace(name=e.name, request=e.request, action=e.action, statistics=statistics_of(e.source.load()))
        for e in trace.entries()
    ]


# Interrupted runs (C66, C68)


def interrupted_run(folder: Path) -> None:
    with TraceWriter(folder, MAKER, torch.float32, part_bytes=100) as writer:
        for action in range(4):
            writer.keep(Entry("embeddings", "a", action, "decode", (action,), InMemory(torch.randn(1, 40))))
        raise KeyboardInterrupt


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted_run(tmp_path / "dump")
    assert list((tmp_path / "dump").iterdir()) == []


def test_a_killed_run_is_refused_by_name_and_can_be_repeated(tmp_path: Path) -> None:
    code = f"""
        import os, torch
        from parity.manifest import Producer
        from parity.trace import Entry, InMemory
        from parity.trace_file import TraceWriter
        with TraceWriter({str(tmp_path / "dump")!r}, Producer(engine="x"), torch.float32, part_bytes=100) as writer:
            for action in range(4):
                writer.keep(Entry("embeddings", "a", action, "decode", (action,), InMemory(torch.randn(1, 40))))
            os._exit(9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert [path.suffix for path in (tmp_path / "dump").iterdir()] == [".partial"] * 3
    assert "incomplete" in refusal(tmp_path / "dump")
    write_trace(tmp_path / "dump", recorded("p:a3"), torch.float32)
    assert not list((tmp_path / "dump").glob("*.partial"))
    assert same(open_trace(tmp_path / "dump"), recorded("p:a3"))


def test_an_existing_dump_is_not_overwritten(dump: Path) -> None:
    before = (dump / "manifest.json").read_bytes()
    with pytest.raises(DumpError, match="already holds a dump"):
        write_trace(dump, recorded("p:a3"), torch.float32)
    assert (dump / "manifest.json").read_bytes() == before


def test_a_run_that_stopped_half_way_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "dump", recorded("p:a3 d:a"), torch.float32, workload=WORKLOAD)
    message = refusal(tmp_path / "dump")
    assert "incomplete: nothing of action 0 (request 'b')" in message
    assert "action 3" in message
    assert open_dump(tmp_path / "dump", allow_incomplete=True).trace.names()


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "dump", MAKER, torch.float32) as writer:
        with pytest.raises(DumpError, match="positions for shape"):
            writer.keep(Entry("embeddings", "a", 0, "prefill", (0,), InMemory(torch.zeros(2, 4))))
        with pytest.raises(DumpError, match="dtype: must be one of"):
            writer.keep(Entry("embeddings", "a", 0, "prefill", (0,), InMemory(torch.zeros(1, 4, dtype=torch.cfloat))))
        with pytest.raises(DumpError, match="kind"):
            writer.keep(Entry("embeddings", "a", 0, "guess", (0,), InMemory(torch.zeros(1, 4))))


# Hashes


def test_dumps_of_other_inputs_are_not_compared(tmp_path: Path) -> None:
    tokens = sha256_of_tokens([("a", [1, 2, 3])])
    assert tokens == sha256_of_tokens([("a", (1, 2, 3))]) != sha256_of_tokens([("a", [1, 23])])
    (tmp_path / "w").write_bytes(b"weights")
    mine = Hashes(inputs=tokens, weights=sha256_of_files([tmp_path / "w"]))
    for name, hashes in (("a", mine), ("b", Hashes(inputs="0" * 64)), ("c", Hashes(weights=mine.weights))):
        write_trace(tmp_path / name, recorded("p:a3"), torch.float32, sha256=hashes)
    a, b, c = (RunIdentity(read_manifest(tmp_path / name).sha256) for name in "abc")
    require_same_run(a, c)
    with pytest.raises(DumpError, match="inputs: sha256 0000"):
        require_same_run(a, b)


def test_a_config_that_is_not_the_hashed_one_is_refused(tmp_path: Path) -> None:
    config = json.dumps(CONFIG.to_json()).encode()
    (tmp_path / "config.json").write_bytes(config)
    hashes = Hashes(config=sha256_of_files([tmp_path / "config.json"]))
    write_trace(tmp_path / "dump", recorded("p:a3"), torch.float32, sha256=hashes, config=config)
    assert open_dump(tmp_path / "dump").config_file
    (tmp_path / "dump" / "config.json").write_bytes(config + b" ")
    assert "config.json: sha256" in refusal(tmp_path / "dump")


# Hostile folders


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("file", "../secret.safetensors", "plain name"),
        ("file", "/etc/secret.safetensors", "plain name"),
        ("file", "a/b.safetensors", "plain name"),
        ("file", "manifest.json", "plain name"),
        ("file", "other.safetensors", "not there"),
        ("key", "nothing", "not in the file"),
        ("name", "layers.0.attn.q_nop", "nearest: layers.{i}.attn.q_nope"),
        ("name", "layers.0.attn.kv_latent\n", "must be printable"),
        ("shape", [3, 2**60], "less than"),
        ("shape", [3, 2**47], "no tensor is so large"),
        ("shape", [2**40, 4], "positions for shape"),
        ("shape", [3, 5], "the manifest says F32 [3, 5]"),
        ("shape", [], "at least 1 item"),
        ("shape", [3, -4], "greater than or equal to 0"),
        ("positions", {"start": 0, "count": 2**40}, "less than or equal"),
        ("positions", {"start": 0, "count": 4}, "4 positions"),
        ("positions", [0, 1, 1], "a position twice"),
        ("positions", [0, 1, -1], "greater than or equal to 0"),
        ("dtype", "bf17", "must be one of"),
        ("dtype", "bfloat16", "the manifest says BF16"),
        ("dims", "T", "one word for each dim"),
        ("action", 1.5, "valid integer"),
        ("kind", "guess", "'prefill'"),
        ("surprise", 1, "not permitted"),
    ],
)
def test_a_wrong_entry_is_refused_with_what_would_be_right(dump: Path, field: str, value: object, message: str) -> None:
    edit_manifest(dump, lambda manifest: manifest["tensors"][0].update({field: value}))
    assert message in refusal(dump)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "EOF"),
        (b"{", "EOF"),
        (b"[]", "object"),
        (b"\xff\xfe", "manifest.json"),
        (b"[" * 100_000, "recursion"),
        (b'{"schema_version": 2, "producer": {"engine": "x"}, "dtype": "float32"}', "schema_version 2"),
        (b'{"schema_version": 1, "producer": {"engine": "x"}}', "dtype: Field required"),
        (b'{"schema_version": 1e999, "producer": {"engine": "x"}, "dtype": "float32"}', "schema_version"),
    ],
)
def test_a_manifest_that_is_none_is_refused(dump: Path, content: bytes, message: str) -> None:
    (dump / "manifest.json").write_bytes(content)
    assert message in refusal(dump)


def test_one_tensor_listed_twice_is_refused(dump: Path) -> None:
    edit_manifest(dump, lambda manifest: manifest["tensors"].append(manifest["tensors"][0]))
    message = refusal(dump)
    assert "listed 2 times" in message
    assert "has a position twice" in message


def test_links_are_refused(dump: Path, tmp_path: Path) -> None:
    part = dump / "part-00001.safetensors"
    os.replace(part, tmp_path / "elsewhere.safetensors")
    part.symlink_to(tmp_path / "elsewhere.safetensors")
    assert "is a link" in refusal(dump)
    os.replace(dump / "manifest.json", tmp_path / "manifest.json")
    (dump / "manifest.json").symlink_to(tmp_path / "manifest.json")
    assert "is a link" in refusal(dump)


def test_truncated_files_are_refused_before_and_after_opening(dump: Path) -> None:
    part = dump / "part-00001.safetensors"
    opened = open_trace(dump)
    content = part.read_bytes()
    part.write_bytes(content[:100])
    with pytest.raises(DumpError, match="cannot be mapped"):
        opened.table("layers.0.attn.q_nope", "a")
    for length in (0, 7, 50, len(content) - 1):
        part.write_bytes(content[:length])
        assert "truncated" in refusal(dump)


def test_rows_of_one_name_must_be_alike(tmp_path: Path) -> None:
    entries = [
        Entry("embeddings", "a", action, "decode", (action,), InMemory(torch.zeros(1, 4 + action)))
        for action in range(2)
    ]
    with TraceWriter(tmp_path / "dump", MAKER, torch.float32) as writer:
        for entry in entries:
            writer.keep(entry)
    assert "embeddings: F32 [1, 5] in action 1, F32 [1, 4] in 0" in refusal(tmp_path / "dump")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_damage_to_a_manifest_opens_or_is_a_dump_error(dump: Path, data: st.DataObject) -> None:
    path = dump / "manifest.json"
    original = path.read_bytes()
    path.write_text(data.draw(damaged(original)))
    try:
        trace = open_trace(dump)
        for name in trace.names():
            for request in trace.requests(name):
                trace.table(name, request)
    except DumpError:
        pass
    finally:
        path.write_bytes(original)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10_000), byte=st.integers(0, 255), file=st.sampled_from(["manifest", "part"]))
def test_any_changed_byte_opens_or_is_a_dump_error(dump: Path, position: int, byte: int, file: str) -> None:
    path = dump / ("manifest.json" if file == "manifest" else "part-00001.safetensors")
    original = path.read_bytes()
    damaged = bytearray(original)
    damaged[position % len(damaged)] = byte
    path.write_bytes(damaged)
    try:
        trace = open_trace(dump)
        for name in trace.names():
            for request in trace.requests(name):
                trace.table(name, request)
    except DumpError:
        pass
    finally:
        path.write_bytes(original)


# Memory


def test_row_blocks_pair_the_same_rows_as_whole_tables() -> None:
    left, right = recorded(), recorded("p:b3 p:a9 p:a7 d:a+b v:a3 t:a2 d:a")
    for name in ("layers.1.output", "layers.1.attn.index.scores"):
        blocks = list(row_blocks(left, right, name, "a", max_bytes=1000))
        assert len(blocks) > 3
        table = left.table(name, "a")
        row_of = {key: row for row, key in enumerate(table.keys)}
        for mine, theirs, keys in blocks:
            width = mine.shape[-1]
            rows = [row_of[key] for key in keys]
            assert torch.equal(mine[..., :1], table.values[rows][..., :1])
            assert mine.shape == theirs.shape == (len(keys), width)
            finite = mine.isfinite()
            assert torch.allclose(mine[finite], theirs[finite], rtol=1e-3, atol=1e-3)
    assert list(row_blocks(left, right, "nothing", "a")) == []


COMPARE = """
    import sys, torch
    from parity.trace import row_blocks
    from parity.trace_file import open_trace
    from parity.tolerance import row_errors
    def peak():
        # Not `ru_maxrss`, which a process takes over from the one that started it.
        return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
    torch.set_num_threads(1)
    torch.zeros(8).double().norm()  # what torch itself needs is not counted
    before = peak()
    left, right = open_trace(sys.argv[1]), open_trace(sys.argv[2])
    for name in left.names():
        for request in left.requests(name):
            for mine, theirs, keys in row_blocks(left, right, name, request, max_bytes=2**19):
                assert float(row_errors(theirs, mine).relative.max()) == 0.0
    print(peak() - before, before)
"""


@pytest.mark.parametrize(("total", "limit"), [(2**27, 2**26), pytest.param(2**31, 700 * 2**20, marks=pytest.mark.slow)])
def test_two_dumps_are_compared_in_far_less_memory_than_they_take(tmp_path: Path, total: int, limit: int) -> None:
    """Two of 128 MB in 64 MB above what torch takes; two of 2 GB in less than 1 GB with it."""
    tensor_bytes = min(2**23, total // 16)
    value = torch.randn(tensor_bytes // 2 // 1024, 1024).to(torch.bfloat16)
    for side in ("left", "right"):
        with TraceWriter(tmp_path / side, MAKER, torch.bfloat16, part_bytes=2**25) as writer:
            for layer in range(total // tensor_bytes):
                positions = range(len(value))
                writer.keep(Entry(f"layers.{layer}.output", "a", 0, "prefill", positions, InMemory(value)))
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPARE), str(tmp_path / "left"), str(tmp_path / "right")],
        check=True,
        capture_output=True,
        text=True,
    )
    grown, before = map(int, result.stdout.split())
    assert grown < limit
    assert grown + before < 2**30
