"""Slices hold the same bytes as their source, say what was cut, and layer 0 of a slice is layer 0 of the model."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch
from checkpoint_folders import tiny_with_towers

from reference.checkpoint import CheckpointFolder, Selection, cut_slice, load_text_model
from reference.checkpoint.index import INDEX_FILE
from reference.checkpoint.slice import SLICE_FILE
from reference.config import slice_of
from reference.errors import CheckpointError, ConfigError

LAYERS, EXPERTS = (0, 1, 2), (3, 1, 13, 8)


@pytest.fixture(scope="module")
def cut(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("slice") / "cut"
    cut_slice(CheckpointFolder.open(intact), target, LAYERS, EXPERTS)
    return target


def test_c65_the_slice_opens_and_holds_the_same_bytes(intact: Path, cut: Path):
    source, target = CheckpointFolder.open(intact), CheckpointFolder.open(cut)
    assert target.config.text == slice_of(tiny_with_towers(), LAYERS, 4).text
    assert (target.config.vision, target.config.audio) == (None, None)
    pairs = {
        "model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj.weight",
        "model.layers.2.mlp.experts.0.up_proj.weight": "model.layers.2.mlp.experts.3.up_proj.weight",
        "model.layers.3.shared_head.norm.weight": "model.layers.6.shared_head.norm.weight",
    }
    for name, origin in pairs.items():
        assert torch.equal(target.tensor(name), source.tensor(origin))
    for name in ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"):
        assert torch.equal(target.tensor(name), source.tensor(name)[list(EXPERTS)])
    assert target.tensor("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32


def test_c65_layer_0_gives_exactly_what_the_full_model_gives(intact: Path, cut: Path):
    ids = torch.arange(40) * 5 % 193
    outputs = []
    for folder in (intact, cut):
        model = load_text_model(folder)
        with torch.no_grad():
            outputs.append(model.model.layers[0](model.embed(ids), model.new_cache().layers[0]))
    assert torch.equal(*outputs)


def test_c65_a_slice_loads_like_the_selection_from_the_full_folder(intact: Path, cut: Path):
    selected, loaded = load_text_model(intact, layers=LAYERS, experts=EXPERTS), load_text_model(cut)
    assert selected.config == loaded.config
    for name, value in selected.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_c65_what_was_cut_and_from_what_is_on_record(intact: Path, cut: Path):
    record = json.loads((cut / SLICE_FILE).read_text())
    assert (record["layers"], record["experts"]) == ([*LAYERS], [*EXPERTS])
    for file in ("config.json", INDEX_FILE):
        assert record["source"][file] == hashlib.sha256((intact / file).read_bytes()).hexdigest()
    target = CheckpointFolder.open(cut)
    assert record["tensors"].keys() == target.tensors.keys()
    name = "model.layers.2.mlp.experts.0.up_proj.weight"
    content = target.tensor(name).flatten().view(torch.uint8).numpy().tobytes()
    assert record["tensors"][name] == {
        "source": "model.layers.2.mlp.experts.3.up_proj.weight",
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_c65_too_few_experts_for_the_top_k(intact: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="keep between num_experts_per_tok = 3 and 14 experts, found 2"):
        cut_slice(CheckpointFolder.open(intact), tmp_path / "new", LAYERS, (0, 1))
    assert not (tmp_path / "new").exists()


def test_layers_keep_their_kind_in_another_place(intact: Path, tmp_path: Path):
    """Layer 5 is full and becomes layer 1; layer 3 is sliding and becomes layer 2."""
    cut_slice(CheckpointFolder.open(intact), tmp_path, (0, 5, 3), with_mtp=False)
    folder = CheckpointFolder.open(tmp_path)
    assert folder.config.text.layer_types == ("full_attention", "full_attention", "sliding_attention")
    assert not any(tensor.bucket == "mtp" for tensor in folder.tensors.values())
    source = CheckpointFolder.open(intact)
    name = "self_attn.indexer.wk.weight"
    assert torch.equal(folder.tensor(f"model.layers.1.{name}"), source.tensor(f"model.layers.5.{name}"))


def test_a_slice_with_its_towers_and_tokenizer(damaged: Path, tmp_path: Path):
    (damaged / "tokenizer.json").write_text("{}")
    cut_slice(CheckpointFolder.open(damaged), tmp_path / "new", (0,), with_towers=True)
    folder = CheckpointFolder.open(tmp_path / "new")
    assert {"model-vision.safetensors", "model-audio.safetensors"} < {*folder.files}
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"


def test_the_indexer_layout_travels_along(damaged: Path, tmp_path: Path):
    index = json.loads((damaged / INDEX_FILE).read_text())
    index["metadata"] |= {"indexer_rope_layout": "tail", "indexer_rope_converted_from": "leading"}
    (damaged / INDEX_FILE).write_text(json.dumps(index))
    cut_slice(CheckpointFolder.open(damaged), tmp_path / "new", (0,))
    metadata = CheckpointFolder.open(tmp_path / "new").index.metadata
    assert (metadata["indexer_rope_layout"], metadata["indexer_rope_converted_from"]) == ("tail", "leading")


def test_a_deferred_tower_cannot_be_copied_and_nothing_is_left(intact: Path, tmp_path: Path):
    folder = CheckpointFolder.open(intact, buckets=("language", "mtp"))
    with pytest.raises(CheckpointError, match="bucket 'vision', which was deferred"):
        cut_slice(folder, tmp_path, (0,), with_towers=True)
    assert [*tmp_path.iterdir()] == []


def test_a_grouped_router_keeps_all_its_experts():
    config = tiny_with_towers()
    grouped = dataclasses.replace(config.text, n_group=2, topk_group=1)
    with pytest.raises(ConfigError, match="n_group = 2 groups"):
        Selection(dataclasses.replace(config, text=grouped), experts=range(10))
