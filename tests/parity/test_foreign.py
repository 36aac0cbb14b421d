"""Readers of foreign dumps and their ready mappings. The fixtures are made up here, from the formats' public facts."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from dumps import CONFIG, edited, recorded, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from parity.apply_mapping import Mapped, apply_mapping
from parity.foreign import format_of, read_foreign
from parity.manifest import DumpError
from parity.mapping import read_mapping
from parity.schema import spec_of
from parity.statistics import compare_statistics
from parity.trace import Trace
from parity.trace_file import write_trace
from parity.workload import Workload
from reference.checkpoint import write_synthetic

TEXT = CONFIG.text
LINE = "p:a16 d:a"
BATCH = Workload.parse("p:a5+b3 d:a+b")


def mapped(path: Path, workload: Workload | None = None) -> Mapped:
    dump = read_foreign(path)
    return apply_mapping(read_mapping(dump.mapping), dump, TEXT, workload)


def only(trace: Trace, names: list[str]) -> Trace:
    return edited(trace, lambda name, value: {name: value} if name in names else {})


def forwards(trace: Trace) -> dict[int, dict[str, Tensor]]:
    """The values of each action, the rows of all requests packed into one."""
    packed: dict[int, dict[str, list[Tensor]]] = {}
    for entry in sorted(trace.entries(), key=lambda entry: entry.request):
        spec = spec_of(entry.name)
        if spec and spec.kind == "values":
            packed.setdefault(entry.action, {}).setdefault(entry.name, []).append(entry.source.load())
    return {action: {name: torch.cat(parts) for name, parts in tensors.items()} for action, tensors in packed.items()}


def engine_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hooks on the modules of an engine with two residual streams."""
    names = {"embeddings": "model.embed_tokens.output.0", "final_norm": "model.norm.output.0"}
    shown = {names[name]: value for name, value in tensors.items() if name in names}
    for layer in range(TEXT.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        residual = tensors[f"layers.{layer}.input"]
        shown |= {
            f"{prefix}.input_layernorm.output.0": tensors[f"layers.{layer}.attn.input"],
            f"{prefix}.input_layernorm.output.1": residual,
            f"{prefix}.self_attn.kv_b_proj.output.0": torch.zeros(len(residual), 7),
            f"{prefix}.mlp.output.0": tensors[f"layers.{layer}.ffn.output"],
            # Halves add up exactly.
            f"{prefix}.output.0": tensors[f"layers.{layer}.output"] / 2,
            f"{prefix}.output.1": tensors[f"layers.{layer}.output"] / 2,
        }
    return shown


ENGINE_NAMES = ["embeddings", "final_norm"] + [
    f"layers.{layer}.{name}"
    for layer in range(TEXT.num_hidden_layers)
    for name in ("input", "attn.input", "ffn.output", "output")
]


# transformers, through hooks on its modules


def test_hooks_on_transformers_map_to_what_its_runner_shows(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the oracle needs transformers 5.24")
    from parity.run import traced
    from parity.runners.transformers import TransformersRunner

    write_synthetic(tmp_path / "model", CONFIG)
    runner = TransformersRunner(tmp_path / "model", torch.float32)
    shown: dict[str, Tensor] = {}
    number = 0

    def finish(*_: Any) -> None:
        nonlocal number
        save_file(shown, tmp_path / "dump" / f"forward-{number:04d}.safetensors")
        number += 1
        shown.clear()

    (tmp_path / "dump").mkdir()
    for name, module in runner.model.named_modules():

        def hook(module: Any, args: Any, output: Any, name: str = name) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            for words, values in (("inputs", args), ("output", outputs)):
                for index, value in enumerate(values):
                    if isinstance(value, Tensor) and value.numel():
                        shown[f"{name}.{words}.{index}"] = value.detach().clone().contiguous()

        module.register_forward_hook(hook)
    runner.model.register_forward_hook(finish)
    workload = Workload.parse(LINE)
    trace = traced(runner, workload)
    result = mapped(tmp_path / "dump", workload)
    # The runner cuts the latents of the whole cache too; it shows choices in the order of their scores.
    exact = [name for name in result.trace.names() if not name.endswith(("router.weights", "router.expert_ids"))]
    assert len(exact) > 15 * TEXT.num_hidden_layers
    assert same(only(result.trace, exact), only(trace, exact))
    assert any("expanded from the latents" in reason for _, reason in result.refused)
    ids = "layers.1.ffn.router.expert_ids"
    assert torch.equal(result.trace.table(ids, "a").values.sort().values, trace.table(ids, "a").values.sort().values)


# SGLang


def write_sglang(folder: Path, is_old: bool, rank: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    index = 0
    for step, tensors in forwards(recorded(BATCH.text())).items():
        for name, value in engine_names(tensors).items():
            index += 1
            name = name.removesuffix(".0") if name.endswith("output.0") and f"{name[:-1]}1" not in tensors else name
            tags = {"rank": rank, "dump_index": index, "name": f"non_intrusive__{name}", "layer_id": 3}
            first = {"forward_pass_id": step + 7} if is_old else {"step": step}
            content: Any = value if is_old else {"value": value, "meta": {"step": step}}
            torch.save(content, folder / ("___".join(f"{k}={v}" for k, v in (first | tags).items()) + ".pt"))


@pytest.mark.parametrize("is_old", [False, True], ids=["dict", "bare"])
def test_sglang_hooks(tmp_path: Path, is_old: bool) -> None:
    write_sglang(tmp_path / "dump", is_old)
    write_sglang(tmp_path / "dump", is_old, rank=1)
    torch.save([1, 2], tmp_path / "dump" / "step=0___rank=0___dump_index=0___name=rids.pt")
    assert format_of(tmp_path / "dump") == "sglang"
    result = mapped(tmp_path / "dump", BATCH)
    assert same(result.trace, only(recorded(BATCH.text()), ENGINE_NAMES))
    assert len(result.notes) == 2
    assert "files of other ranks than 0" in result.notes[0]
    assert {name.rpartition(".self_attn.")[2] for name, _ in result.refused} == {"kv_b_proj.output.0"}


def test_sglang_calls_with_two_streams(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    hidden, residual = torch.randn(2, 4, 96).unbind()
    calls = [("layer_start__hidden_states", 0, hidden), ("layer_start__hidden_states", 1, hidden)]
    calls += [("layer_start__residual", 1, residual), ("layer_end__hidden_states", 1, hidden)]
    for index, (name, layer, value) in enumerate(calls):
        torch.save(value, folder / f"step=0___rank=0___dump_index={index}___name={name}___layer_id={layer}.pt")
    result = mapped(folder)
    assert torch.equal(result.trace.table("layers.0.input", "a").values, hidden)
    assert torch.equal(result.trace.table("layers.1.input", "a").values, hidden + residual)
    assert result.refused == (("layers.1.layer_end__hidden_states", "one of the two residual streams alone"),)


# msProbe


def write_msprobe(folder: Path, task: str) -> None:
    (folder / "dump_tensor_data").mkdir(parents=True)
    data: dict[str, Any] = {}
    for call, tensors in forwards(recorded(LINE)).items():
        for name, value in engine_names(tensors).items():
            module, _, number = name.rpartition(".output.")
            key = f"Module.{module}.SomeClass.forward.{call}"
            described = {
                "type": "torch.Tensor",
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                "Max": float(value.max()),
                "Min": float(value.min()),
                "Mean": float(value.mean()),
                "Norm": float(value.norm()),
                "requires_grad": False,
            }
            if task == "tensor":
                described["data_name"] = f"{key}.output.{number}.pt"
                torch.save(value, folder / "dump_tensor_data" / described["data_name"])
            data.setdefault(key, {"input_args": [None], "input_kwargs": {}, "output": []})["output"].append(described)
    data["Functional.linear.0.forward"] = {"input_args": [], "output": []}
    text = json.dumps({"task": task, "level": "L0", "framework": "pytorch", "data": data})
    (folder / "dump.json").write_text(text)


def test_msprobe_tensors(tmp_path: Path) -> None:
    write_msprobe(tmp_path / "step0" / "rank0", "tensor")
    assert format_of(tmp_path) == "msprobe"
    result = mapped(tmp_path)
    assert same(result.trace, only(recorded(LINE), ENGINE_NAMES))
    assert result.notes == ("1 entries that are no module's forward pass",)


def test_msprobe_statistics_are_partial(tmp_path: Path) -> None:
    write_msprobe(tmp_path, "statistics")
    result = mapped(tmp_path)
    assert result.trace.names() == []
    assert {entry.name for entry in result.statistics} == set(ENGINE_NAMES)
    verdicts = compare_statistics(recorded(LINE), result.statistics, lambda name: 1e-6)
    assert {verdict.verdict for verdict in verdicts} == {"partial"}
    # Against another model's tensors most are different, and none is called equal.
    other = edited(recorded(LINE), lambda name, value: {name: value.float() + 1})
    assert {v.verdict for v in compare_statistics(other, result.statistics, lambda name: 1e-6)} == {"different"}


@pytest.mark.parametrize("name", ["../secret.pt", "/etc/secret.pt", "a/b.pt"])
def test_msprobe_data_names_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    write_msprobe(tmp_path, "tensor")
    text = json.loads((tmp_path / "dump.json").read_text())
    first = next(iter(text["data"].values()))
    first["output"][0]["data_name"] = name
    (tmp_path / "dump.json").write_text(json.dumps(text))
    with pytest.raises(DumpError, match="plain name"):
        mapped(tmp_path)


# llama.cpp

LLAMA_NAMES = {"embeddings": "inp_embd", "final_norm": "result_norm", "logits": "result_output"}
LLAMA_LAYER = {"attn.input": "attn_norm", "ffn.input": "ffn_norm", "ffn.output": "ffn_out", "output": "l_out"}


def printed(name: str, value: Tensor, word: str) -> str:
    """A node as the tool prints it: sizes fastest first, ends of long dims, the sum."""
    rows, lanes = value.shape
    sizes = f"{{{lanes}, {rows}, 1, 1}}"
    lines = [f"{word}: {name:>24} = (f32)  MUL(x{sizes}, y{{1, 1, 1, 1}}}}) = {sizes}", "    [", "        ["]
    for row in range(rows) if rows <= 6 else (*range(3), -1, *range(rows - 3, rows)):
        if row < 0:
            lines.append("            ...,")
            continue
        shown = [f"{number:12.4f}" for number in value[row].tolist()]
        lines.append(f"            [ {', '.join(shown if lanes <= 6 else [*shown[:3], '...', *shown[-3:]])} ],")
    return "\n".join([*lines, "        ],", "    ]", f"    sum = {float(value.sum()):.6f}", ""])


def write_llama_cpp(path: Path, trace: Trace, word: str = "common_debug_cb_eval") -> None:
    text = "llama_model_loader: loaded\n"
    for _, tensors in sorted(forwards(trace).items()):
        for name, value in tensors.items():
            _, _, rest = name.partition(".")
            layer, _, local = rest.partition(".")
            if name in LLAMA_NAMES:
                # Only the newest token's logits are computed.
                text += printed(LLAMA_NAMES[name], value[-1:] if name == "logits" else value, word)
            elif name.startswith("layers.") and local in LLAMA_LAYER:
                text += printed(f"{LLAMA_LAYER[local]}-{layer}", value, word)
                text += printed(f"{LLAMA_LAYER[local]}-{layer} (view)", value * 7, word)
    path.write_text(text)


@pytest.mark.parametrize("word", ["common_debug_cb_eval", "ggml_debug"])
def test_llama_cpp_prints_are_partial(tmp_path: Path, word: str) -> None:
    write_llama_cpp(tmp_path / "out.log", recorded("p:a16 d:a"), word)
    assert format_of(tmp_path / "out.log") == "llama_cpp"
    result = mapped(tmp_path / "out.log", Workload.parse("p:a16 d:a"))
    per_step = 2 + 4 * TEXT.num_hidden_layers
    assert len(result.statistics) == 2 * per_step + 1
    assert {len(entry.statistics.samples) for entry in result.statistics} == {36, 6}
    assert [name for name, _ in result.refused] == ["logits"]
    verdicts = compare_statistics(recorded("p:a16 d:a"), result.statistics, lambda name: 1e-6)
    assert {verdict.verdict for verdict in verdicts} == {"partial"}


def test_llama_cpp_prints_show_a_fault(tmp_path: Path) -> None:
    spoilt = edited(recorded(LINE), lambda n, v: {n: v.roll(1, -1) if n == "layers.2.output" else v})
    write_llama_cpp(tmp_path / "out.log", spoilt)
    verdicts = compare_statistics(recorded(LINE), mapped(tmp_path / "out.log").statistics, lambda name: 1e-6)
    bad = [verdict for verdict in verdicts if verdict.verdict == "different"]
    # The sum does not see lanes that have changed places; the samples do.
    assert {verdict.name for verdict in bad} == {"layers.2.output"}
    assert all(item.what != "sum" or not item.is_different for verdict in bad for item in verdict.evidence)


# Formats


def test_native_folders_with_foreign_names(tmp_path: Path) -> None:
    foreign = edited(recorded(LINE), lambda n, v: {f"x.{n}": v} if n == "final_norm" else {})
    write_trace(tmp_path / "dump", foreign, torch.float32)
    dump = read_foreign(tmp_path / "dump")
    assert dump.names() == ["x.final_norm"]
    document = {"mapping_version": 1, "title": "x", "rules": [{"from": "x.final_norm", "to": "final_norm"}]}
    (tmp_path / "m.json").write_text(json.dumps(document))
    result = apply_mapping(read_mapping(tmp_path / "m.json"), dump, TEXT)
    assert same(result.trace, only(recorded(LINE), ["final_norm"]))


def test_what_is_no_dump_is_refused_with_what_would_be_one(tmp_path: Path) -> None:
    (tmp_path / "text.log").write_text("nothing of interest\n")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "text.log"):
        with pytest.raises(DumpError, match="not a dump that is known"):
            read_foreign(path)


# Hostile files


def hostile(folder: Path, content: bytes, kind: str) -> Path:
    """A file of that content where a reader of that kind looks for one."""
    folder.mkdir(exist_ok=True)
    if kind == "msprobe":
        (folder / "dump.json").write_bytes(content)
    elif kind == "sglang":
        (folder / "step=0___rank=0___dump_index=1___name=x.pt").write_bytes(content)
    elif kind == "plain":
        (folder / "x.safetensors").write_bytes(content)
    else:
        (folder / "x.log").write_bytes(b"ggml_debug: \n" + content)
        return folder / "x.log"
    return folder


def read_or_refuse(path: Path) -> None:
    try:
        result = mapped(path)
        for name in result.trace.names():
            result.trace.table(name, "a")
    except DumpError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
DESCRIBED = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("torch.Tensor"),
        "dtype": st.sampled_from(["torch.float32", "torch.bfloat16", "x"]) | JSON,
        "shape": st.lists(st.integers(-1, 2**50), max_size=4) | JSON,
        "Norm": st.floats() | JSON,
        "Max": st.floats() | JSON,
        "Mean": JSON,
        "data_name": st.sampled_from(["a.pt", "../a.pt"]) | JSON,
    },
)
MSPROBE = st.fixed_dictionaries(
    {
        "data": st.dictionaries(
            st.sampled_from(["Module.model.norm.X.forward.0", "Module.model.layers.1.mlp.X.forward.1", "x"]),
            st.fixed_dictionaries({"output": st.lists(DESCRIBED | JSON, max_size=2), "input_args": JSON}) | JSON,
        )
        | JSON
    }
)
PRINTED = st.lists(
    st.sampled_from(
        [
            "ggml_debug: l_out-3 = (f32) ADD(a{96, 2, 1, 1}, b{1, 1, 1, 1}}) = {96, 2, 1, 1}",
            "ggml_debug: l_out-3 = (f32) ADD(a) = {0, 2, 1, 1}",
            "ggml_debug: result_norm = (f32) ADD(a) = {999999999999999, 999999999999999, 1, 1}",
            "ggml_debug: embd = (q4_K) ADD(a) = {96, 1, 1, 1}",
            "[ 0.1, 0.2, nan, ..., 1.0, 2.0, 3.0 ],",
            "sum = 1e999",
            "sum = -3.25",
            "sum = x",
            "[[[[[",
        ]
    )
).map("\n".join)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), kind=st.sampled_from(["msprobe", "sglang", "plain", "llama_cpp"]))
def test_any_content_is_read_or_is_a_dump_error(tmp_path: Path, data: st.DataObject, kind: str) -> None:
    content = data.draw(st.binary(max_size=60))
    if kind == "msprobe":
        content = data.draw(st.just(content) | MSPROBE.map(lambda document: json.dumps(document).encode()))
    elif kind == "llama_cpp":
        content = data.draw(st.just(content) | PRINTED.map(str.encode))
    elif kind == "plain":
        header = json.dumps(data.draw(st.dictionaries(st.text(max_size=5), DESCRIBED | JSON, max_size=2))).encode()
        content = data.draw(st.just(content) | st.just(struct.pack("<Q", len(header)) + header))
    read_or_refuse(hostile(tmp_path / kind, content, kind))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 4000), byte=st.integers(0, 255), length=st.integers(0, 4000))
def test_any_damage_to_a_pt_file_is_a_dump_error_or_a_tensor(
    tmp_path: Path, position: int, byte: int, length: int
) -> None:
    torch.save({"value": torch.zeros(3, 96), "meta": {"step": 0}}, tmp_path / "whole.pt")
    content = bytearray((tmp_path / "whole.pt").read_bytes())
    content[position % len(content)] = byte
    read_or_refuse(hostile(tmp_path / "sglang", bytes(content[: length or None]), "sglang"))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "exploded",))

    torch.save(Bomb(), tmp_path / "step=0___rank=0___dump_index=1___name=x.pt")
    with pytest.raises(DumpError, match="plain tensors"):
        mapped(tmp_path)
    assert not (tmp_path / "exploded").exists()
