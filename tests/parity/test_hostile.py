"""Whatever a dump or a golden holds, a command ends with a verdict or with a named error, never with a traceback."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dumps import CONFIG, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from parity.cli import EXIT_AGREES, EXIT_DISAGREES, EXIT_UNUSABLE, app
from parity.golden_file import SHIPPED, Golden
from parity.golden_reference import reference_of
from parity.manifest import Producer
from parity.run import traced
from parity.trace_file import TraceWriter

NAMES = ("embeddings", "layers.0.*", "layers.1.ffn.*", "layers.1.output", "logits", "cache.0.*", "mtp.0.fused")
SUMS = ("layers.1.output", "layers.0.attn.core")
COMMANDS = {
    "golden": ("compare", "tiny", "DUMP"),
    "allowed": ("compare", "tiny", "DUMP", "--allow-different-run"),
    "as actual": ("compare", "INTACT", "DUMP", "--allow-different-run"),
    "as expected": ("compare", "DUMP", "INTACT", "--allow-different-run"),
    "validate": ("validate", "DUMP"),
    "sized": ("validate", "DUMP", "--config", "tiny"),
    "mapped": ("compare", "tiny", "DUMP", "--mapping", "transformers"),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small right dump of the golden's workload: values, choices, scores, caches, drafts, sums, config."""
    golden = Golden.open("tiny")
    trace = traced(reference_of(golden)(torch.bfloat16), golden.workload, patterns=NAMES)
    folder = tmp_path_factory.mktemp("hostile") / "intact"
    with TraceWriter(
        folder,
        Producer(engine="test"),
        torch.bfloat16,
        statistics_only=SUMS,
        workload=golden.workload,
        config=json.dumps(CONFIG.to_json()).encode(),
    ) as writer:
        for entry in sorted(trace.entries(), key=lambda entry: entry.action):
            writer.keep(entry)
    return folder


@pytest.fixture
def dump(intact: Path, tmp_path: Path) -> Path:
    shutil.copytree(intact, tmp_path / "dump")
    return tmp_path / "dump"


def run(command: tuple[str, ...], dump: Path, intact: Path) -> tuple[int, str]:
    """The exit code and the message; a traceback is a failure."""
    words = [{"DUMP": str(dump), "INTACT": str(intact)}.get(word, word) for word in command]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (EXIT_AGREES, EXIT_DISAGREES, EXIT_UNUSABLE)
    if result.exit_code == EXIT_UNUSABLE:
        told = result.stderr.startswith("error: ") or result.stdout.startswith(("NOTHING COMPARED", "INVALID"))
        assert told, result.output
    return result.exit_code, result.output


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def moved_away(folder: Path) -> None:
    part = folder / "part-00001.safetensors"
    os.replace(part, folder.parent / "elsewhere.safetensors")
    part.symlink_to(folder.parent / "elsewhere.safetensors")


def first_tensor(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        document = json.loads((folder / "manifest.json").read_text())
        document["tensors"][0].update(fields)
        (folder / "manifest.json").write_text(json.dumps(document))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: rewrite(folder / "manifest.json", lambda text: text[:-5]), "JSON"),
        (lambda folder: rewrite(folder / "manifest.json", lambda text: "[" * 100_000), "recursion"),
        (
            lambda folder: rewrite(
                folder / "manifest.json", lambda text: re.sub('"mean": [-0-9.e]+', '"mean": NaN', text)
            ),
            "mean: Input should be a finite number, found nan",
        ),
        (
            lambda folder: rewrite(folder / "manifest.json", lambda text: '{"dtype": "float32", ' + text[1:]),
            "'dtype': is a key twice",
        ),
        (
            lambda folder: rewrite(folder / "manifest.json", lambda text: text.replace('"bfloat16"', '"int32"', 1)),
            "must be",
        ),
        (first_tensor(file="../secret.safetensors"), "plain name"),
        (first_tensor(file="/etc/passwd"), "plain name"),
        (first_tensor(shape=[9, 2**46]), "no tensor is so large"),
        (first_tensor(shape=[9, 2**62]), "less than"),
        (first_tensor(positions={"start": 0, "count": 2**22}), "positions for shape"),
        (moved_away, "is a link"),
        (lambda folder: (folder / "part-00001.safetensors").write_bytes(b"\xff" * 64), "truncated"),
        (lambda folder: (folder / "part-00001.safetensors").unlink(), "the dump is incomplete"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json"),
    ],
)
def test_hostile_folders_are_named_errors(
    change: Callable[[Path], None], message: str, dump: Path, intact: Path
) -> None:
    change(dump)
    for name in ("golden", "as actual", "as expected", "validate"):
        exit_code, output = run(COMMANDS[name], dump, intact)
        assert exit_code == EXIT_UNUSABLE
        assert message in output


SLOW_TO_SET_UP = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
ANY_COMMAND = st.sampled_from(sorted(COMMANDS))


@settings(max_examples=60, suppress_health_check=SLOW_TO_SET_UP)
@given(data=st.data(), command=ANY_COMMAND)
def test_any_damage_to_a_manifest(data: st.DataObject, command: str, dump: Path, intact: Path) -> None:
    (dump / "manifest.json").write_text(data.draw(damaged((intact / "manifest.json").read_bytes())))
    run(COMMANDS[command], dump, intact)


@settings(max_examples=60, suppress_health_check=SLOW_TO_SET_UP)
@given(
    command=ANY_COMMAND,
    file=st.sampled_from(["manifest.json", "config.json", "part-00001.safetensors"]),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.none() | st.integers(0, 10**6),
)
def test_any_changed_byte(
    command: str, file: str, changes: list[tuple[int, int]], cut: int | None, dump: Path, intact: Path
) -> None:
    content = bytearray((intact / file).read_bytes())
    for position, byte in changes:
        content[position % len(content)] = byte
    (dump / file).write_bytes(content if cut is None else content[: cut % len(content)])
    run(COMMANDS[command], dump, intact)
    shutil.copyfile(intact / file, dump / file)


def odd(kind: str, value: Tensor) -> Tensor:
    """Values and layouts that a file can hold and no engine should write."""
    is_choice = not value.is_floating_point()
    if kind == "other dtype":
        return value.to(torch.uint8 if is_choice else torch.float8_e5m2)
    if kind == "narrow":
        return value[..., : max(1, value.shape[-1] // 2)]
    if kind == "wide":
        return torch.cat([value, value], dim=-1)
    fill = {"negative": -(10**6) if is_choice else -1.0, "large": 10**9 if is_choice else 1e30, "zero": 0}
    if kind in fill:
        return torch.full_like(value, fill[kind])
    return value if is_choice else value * float("nan")


@settings(max_examples=60, suppress_health_check=SLOW_TO_SET_UP)
@given(data=st.data(), command=ANY_COMMAND)
def test_any_odd_tensor_that_its_manifest_describes(
    data: st.DataObject, command: str, dump: Path, intact: Path
) -> None:
    manifest = json.loads((intact / "manifest.json").read_text())
    tensors = load_file(intact / "part-00001.safetensors")
    names = sorted({entry["name"] for entry in manifest["tensors"]})
    kinds = st.sampled_from(["other dtype", "narrow", "wide", "negative", "large", "zero", "nan"])
    changes = data.draw(st.dictionaries(st.sampled_from(names), kinds, min_size=1, max_size=4))
    moved = data.draw(st.none() | st.sampled_from(["request", "positions", "action"]))
    for number, entry in enumerate(manifest["tensors"]):
        if kind := changes.get(entry["name"]):
            tensors[entry["key"]] = value = odd(kind, tensors[entry["key"]]).contiguous()
            entry |= {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            if moved == "request":
                entry["request"] = "z"
            elif moved == "positions":
                entry["positions"] = [7 * row + 3 for row in range(entry["shape"][0])]
            elif moved == "action":
                entry["action"] = 1000 - number
    save_file(tensors, dump / "part-00001.safetensors")
    (dump / "manifest.json").write_text(json.dumps(manifest))
    run(COMMANDS[command], dump, intact)


@settings(max_examples=60, suppress_health_check=SLOW_TO_SET_UP)
@given(data=st.data())
def test_any_damage_to_a_golden(data: st.DataObject, intact: Path, tmp_path: Path) -> None:
    golden = tmp_path / "golden"
    shutil.copytree(SHIPPED / "tiny", golden, dirs_exist_ok=True)
    (golden / "golden.json").write_text(data.draw(damaged((SHIPPED / "tiny" / "golden.json").read_bytes())))
    run(("compare", str(golden), "DUMP", "--allow-different-run"), intact, intact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record["numerics"].update(surprise=1), "surprise: expected some of"),
        (lambda record: record["numerics"].update(router_dtype="float7"), "router_dtype"),
        (lambda record: record["config"].update(vocab_size="many"), "vocab_size"),
        (lambda record: record["parts"][0].update(file="../layer.0.safetensors"), "is not the name of a file"),
        (lambda record: record.update(workload="p:a1 t:a9"), "takes back more tokens"),
    ],
)
def test_goldens_that_cannot_be_are_named_errors(
    change: Callable[[dict], None], message: str, intact: Path, tmp_path: Path
) -> None:
    golden = tmp_path / "golden"
    shutil.copytree(SHIPPED / "tiny", golden)
    record = json.loads((golden / "golden.json").read_text())
    change(record)
    (golden / "golden.json").write_text(json.dumps(record))
    exit_code, output = run(("diagnose", str(golden), "DUMP"), intact, intact)
    assert exit_code == EXIT_UNUSABLE
    assert message in output
