"""Modules are filled completely or not at all, with one tensor of memory to spare."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_folders import edit_index, shard_of, tiny_with_towers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from reference.checkpoint import (
    CheckpointFolder,
    Selection,
    drop_layer,
    empty_text_model,
    expected_tensors,
    load_into,
    load_layer,
    load_text_model,
    synthetic_tensor,
    write_synthetic,
)
from reference.config import slice_of, tiny
from reference.errors import CheckpointError, ConfigError

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def spoil(folder: Path, name: str, value: float) -> None:
    """Overwrite the first value of a bfloat16 tensor on disk."""
    path = shard_of(folder, name)
    content = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    start = end + json.loads(content[8:end])[name]["data_offsets"][0]
    content[start : start + 2] = torch.tensor([value], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    path.write_bytes(content)


def test_every_parameter_holds_the_value_of_its_name(intact: Path):
    model = load_text_model(intact, dtype=None)
    config = tiny_with_towers()
    expected = expected_tensors(config)
    for name, value in model.state_dict().items():
        assert torch.equal(value, synthetic_tensor(expected[name], config)), name
    language = [t for t in expected.values() if t.bucket in ("language", "mtp")]
    assert len(model.state_dict()) == len(language)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_c21_the_bias_stays_at_least_float32_whatever_is_asked_for(intact: Path, dtype: torch.dtype):
    model = load_text_model(intact, dtype=dtype)
    bias = model.get_parameter(BIAS)
    assert bias.dtype == torch.promote_types(dtype, torch.float32)
    assert len(bias.unique()) == 14
    assert model.lm_head.weight.dtype == dtype
    assert not bias.requires_grad


def test_c21_the_bias_stays_float32_when_the_model_is_cast(intact: Path):
    bias = load_text_model(intact).to(torch.bfloat16).get_parameter(BIAS)
    assert bias.dtype == torch.float32
    assert len(bias.unique()) == 14


class Layer(nn.Module):
    """Has a buffer and a parameter named like tensors of the checkpoint, and one more that is not."""

    def __init__(self, width: int, extra: bool = False):
        super().__init__()
        self.input_layernorm = nn.Module()
        self.input_layernorm.register_buffer("weight", torch.full((96,), 7.0))
        self.post_attention_layernorm = nn.Module()
        self.post_attention_layernorm.weight = nn.Parameter(torch.full((width,), 7.0))
        if extra:
            self.norm = nn.LayerNorm(3)

    def untouched(self) -> bool:
        return all((value == 7.0).all() for name, value in self.state_dict().items() if "layernorm" in name)


def test_a_module_of_ones_own(intact: Path):
    folder, module = CheckpointFolder.open(intact), Layer(96)
    load_into(module, folder, "model.layers.3.", torch.float32)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        assert torch.equal(module.state_dict()[name], folder.tensor(f"model.layers.3.{name}").float())
    assert {*dict(module.named_buffers())} == {"input_layernorm.weight"}


def test_all_misfits_are_listed_and_nothing_is_written(intact: Path):
    module = Layer(97, extra=True)
    with pytest.raises(CheckpointError) as raised:
        load_into(module, CheckpointFolder.open(intact), "model.layers.3.")
    message = str(raised.value)
    assert "3 problems" in message
    assert "model.layers.3.post_attention_layernorm.weight: found (97,) in the module, expected (96,)" in message
    assert "missing: model.layers.3.norm.bias" in message
    assert module.untouched()


def test_c26_a_draft_layer_built_with_full_geometry_is_refused_with_the_shape(intact: Path):
    folder = CheckpointFolder.open(intact)
    with torch.device("meta"):
        full_attention = empty_text_model(folder).model.layers[0].self_attn
    with pytest.raises(CheckpointError, match=r"layers\.6.*q_b_proj\.weight: found \(120, 32\) .*expected \(84, 24\)"):
        load_into(full_attention, folder, "model.layers.6.self_attn.")


def test_a_deferred_bucket_is_refused_before_anything_is_written(intact: Path):
    folder = CheckpointFolder.open(intact, buckets=("language",))
    module = Layer(96)
    with pytest.raises(CheckpointError, match=r"deferred: model-.*bucket 'mtp' deferred"):
        load_into(module, folder, "model.layers.6.")
    assert module.untouched()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_scan_refuses_what_is_not_finite(damaged: Path, value: float):
    name = "model.layers.3.post_attention_layernorm.weight"
    spoil(damaged, name, value)
    module, folder = Layer(96), CheckpointFolder.open(damaged)
    with pytest.raises(CheckpointError, match=rf"non-finite: model-0000\d-.*{name}: found 1 of 96 values"):
        load_into(module, folder, "model.layers.3.", scan_non_finite=True)
    assert module.untouched()
    load_into(module, folder, "model.layers.3.")
    assert not module.untouched()


def test_layers_are_filled_run_and_dropped_one_by_one(intact: Path):
    folder = CheckpointFolder.open(intact)
    whole, empty = load_text_model(intact), empty_text_model(folder)
    hidden = {"whole": torch.randn(20, 96, generator=torch.Generator().manual_seed(0)).bfloat16() / 20}
    hidden["empty"] = hidden["whole"]
    caches = {"whole": whole.new_cache(), "empty": empty.new_cache()}
    with torch.no_grad():
        for layer in range(6):
            hidden["whole"] = whole.model.layers[layer](hidden["whole"], caches["whole"].layers[layer])
            hidden["empty"] = load_layer(empty, folder, layer)(hidden["empty"], caches["empty"].layers[layer])
            drop_layer(empty, layer)
            assert torch.equal(hidden["whole"], hidden["empty"])
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}


def test_selected_layers_and_experts(intact: Path):
    model = load_text_model(intact, layers=(0, 4, 5), experts=(9, 2, 4, 7))
    folder = CheckpointFolder.open(intact)
    assert model.config == slice_of(tiny_with_towers(), (0, 4, 5), 4).text
    pairs = {
        "model.layers.1.self_attn.q_b_proj.weight": "model.layers.4.self_attn.q_b_proj.weight",
        "model.layers.2.mlp.experts.1.up_proj.weight": "model.layers.5.mlp.experts.2.up_proj.weight",
        "model.layers.3.eh_proj.weight": "model.layers.6.eh_proj.weight",
        "model.mtp.embed_tokens.weight": "model.mtp.embed_tokens.weight",
    }
    for name, source in pairs.items():
        assert torch.equal(model.get_parameter(name), folder.tensor(source))
    gate = model.get_parameter("model.layers.1.mlp.gate.weight")
    assert torch.equal(gate, folder.tensor("model.layers.4.mlp.gate.weight")[[9, 2, 4, 7]])


@pytest.mark.parametrize(
    ("experts", "message"),
    [((0, 1), "keep between"), ((0, 1, 14), "expert 14 does not exist"), ((0, 1, 1, 2), "must be distinct")],
)
def test_experts_that_cannot_be_selected(experts: tuple[int, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        Selection(tiny(), experts=experts)


@given(data=st.data())
def test_a_selection_takes_every_tensor_from_one_that_fits(data: st.DataObject):
    """Any layers in any order that the format can say, any experts, with and without the draft layer."""
    config = tiny_with_towers()
    moe = data.draw(st.lists(st.sampled_from(range(1, 6)), unique=True))
    layers = [*([0] if not moe or data.draw(st.booleans()) else []), *moe]
    experts = data.draw(st.lists(st.sampled_from(range(14)), unique=True, min_size=3))
    selection = Selection(config, layers, experts, data.draw(st.booleans()), data.draw(st.booleans()))
    expected = expected_tensors(config)
    taken = []
    for name, tensor in expected_tensors(selection.config).items():
        source = selection.source(name)
        whole = expected[source.name]
        assert (tensor.dtype, tensor.shape[1:]) == (whole.dtype, whole.shape[1:])
        assert tensor.shape[0] == (whole.shape[0] if source.rows is None else len(source.rows))
        taken.append(source.name)
    assert len(set(taken)) == len(taken)


def test_the_whole_selection_takes_every_name_as_it_is():
    config = tiny_with_towers()
    selection = Selection(config)
    assert selection.config == config
    sources = {name: selection.source(name) for name in expected_tensors(config)}
    assert all(source.name == name and source.rows is None for name, source in sources.items())


def private_bytes() -> int:
    """Resident memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def write_wide(path: Path) -> CheckpointFolder:
    """Two dense layers with three tensors of 19 MB each, and little else."""
    config = tiny()
    text = dataclasses.replace(slice_of(config, (0, 2, 3)).text, intermediate_size=100_000)
    write_synthetic(path, dataclasses.replace(config, text=text))
    return CheckpointFolder.open(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_one_tensor_more_than_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Memory is looked at whenever a tensor is asked for."""
    folder = write_wide(tmp_path)
    model_bytes = sum(t.nbytes for t in folder.tensors.values())
    largest = max(t.nbytes for t in folder.tensors.values())
    model = empty_text_model(folder)
    read, before = CheckpointFolder.tensor, private_bytes()
    seen: list[int] = []

    def watched(self: CheckpointFolder, name: str, rows: object = None) -> Tensor:
        seen.append(private_bytes() - before)
        return read(self, name, rows)

    monkeypatch.setattr(CheckpointFolder, "tensor", watched)
    load_into(model, folder)
    seen.append(private_bytes() - before)
    assert model_bytes * 0.9 < max(seen) <= model_bytes + largest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_dropped_layer_leaves_no_memory_behind(tmp_path: Path, dtype: torch.dtype):
    folder = write_wide(tmp_path)
    model, before = empty_text_model(folder), private_bytes()
    for _ in range(3):
        load_layer(model, folder, 0, dtype)
        assert private_bytes() - before < 1.1 * 57_600_000 * dtype.itemsize / 2
        drop_layer(model, 0)
        assert private_bytes() - before < 5_000_000


def test_a_file_that_changes_after_opening_is_a_named_error(damaged: Path):
    folder = CheckpointFolder.open(damaged)
    shutil.copy(damaged / "model-audio.safetensors", shard_of(damaged, "lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' was there when the folder was opened"):
        folder.tensor("lm_head.weight")


def test_the_indexer_layout_reaches_the_model(damaged: Path):
    edit_index(damaged, lambda index: index["metadata"].update(indexer_rope_layout="tail"))
    assert load_text_model(damaged).indexer_rope_layout == "tail"
