"""Damaged folders are refused when they are opened, with everything that is wrong with them in one error."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import edit_header, edit_index, shard_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from reference.checkpoint import CheckpointFolder, load_into
from reference.checkpoint.header import MAX_HEADER_BYTES
from reference.checkpoint.index import INDEX_FILE
from reference.errors import CheckpointError, ConfigError
from reference.numerics import Numerics

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        CheckpointFolder.open(folder)
    return str(raised.value)


def test_an_intact_folder_opens_and_its_tensors_are_mapped(intact: Path, towers_config):
    folder = CheckpointFolder.open(intact)
    assert folder.config == towers_config
    assert folder.indexer_rope_layout == "leading"
    assert len(folder.files) == 5
    assert folder.tensor(EXPERT).shape == (28, 96)
    rows = folder.tensor("model.layers.1.mlp.gate.weight", rows=[5, 2])
    assert torch.equal(rows, folder.tensor("model.layers.1.mlp.gate.weight")[[5, 2]])
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.layers\.9'"):
        folder.tensor("model.layers.9")


def test_deferred_buckets_are_counted_and_verified_but_not_read(intact: Path, damaged: Path):
    folder = CheckpointFolder.open(intact, buckets=("language", "mtp"))
    assert folder.deferred == {"vision": 62, "audio": 40}
    with pytest.raises(CheckpointError, match="bucket 'vision', which was deferred"):
        folder.tensor("vision_encoder.post_trunk_norm.weight")
    (damaged / "model-vision.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"unreadable: model-vision\.safetensors"):
        CheckpointFolder.open(damaged, buckets=("language", "mtp"))


@pytest.mark.parametrize(("cut", "kept"), [("one byte", -1), ("half", None), ("all but four bytes", 4)])
def test_c63_truncated_shard(damaged: Path, cut: str, kept: int | None):
    path = damaged / "model-00002-of-00003.safetensors"
    size = path.stat().st_size
    kept = size // 2 if kept is None else kept % size
    os.truncate(path, kept)
    message = refused(damaged)
    assert f"truncated: {path.name}: model." in message
    if kept == 4:
        assert "found 4 bytes, expected at least 8" in message
        assert "bytes belong into this file" in message
    else:
        assert f"found a file of {kept} bytes, expected {size} bytes" in message


@pytest.mark.parametrize("length", [2**63 - 1, 2**40, MAX_HEADER_BYTES + 1])
def test_c63_an_absurd_header_length_allocates_nothing(damaged: Path, length: int):
    path = damaged / "model-00002-of-00003.safetensors"
    with path.open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
    assert f"found a header of {length} bytes, expected at most" in refused(damaged)


def test_c63_bytes_behind_the_last_tensor(damaged: Path):
    with (damaged / "model-audio.safetensors").open("ab") as file:
        file.write(b"x")
    assert "found 1 bytes behind the last tensor" in refused(damaged)


def test_c64_missing_unknown_duplicate_and_wrong_shape_in_one_error(damaged: Path):
    """One expert is missing, one name is unknown, one name is in two files, one tensor is transposed."""
    edit_index(damaged, lambda index: index["weight_map"].pop(EXPERT))
    edit_index(damaged, lambda index: index["weight_map"].update({"model.unknown": "model-audio.safetensors"}))
    here = shard_of(damaged, "lm_head.weight")
    other = next(p for p in sorted(damaged.glob("model-0*")) if p != here)

    def add_twin(header: dict) -> None:
        end = max(e["data_offsets"][1] for key, e in header.items() if key != "__metadata__")
        header["lm_head.weight"] = {"dtype": "BF16", "shape": [193, 96], "data_offsets": [end, end + 193 * 96 * 2]}

    edit_header(other, add_twin)
    with other.open("ab") as file:
        file.write(bytes(193 * 96 * 2))
    down = "model.layers.2.mlp.experts.0.down_proj.weight"
    edit_header(shard_of(damaged, down), lambda header: header[down]["shape"].reverse())
    message = refused(damaged)
    assert f"missing: {INDEX_FILE}: {EXPERT}: found no such name, expected BF16 (28, 96)" in message
    assert "unexpected: model-audio.safetensors: model.unknown" in message
    assert "lm_head.weight: found it also in" in message
    assert f"{down}: found (28, 96), expected (96, 28)" in message


def test_c64_a_name_twice_in_the_index_or_in_a_header(damaged: Path):
    text = (damaged / INDEX_FILE).read_text()
    twin = '"lm_head.weight": "model-audio.safetensors",'
    (damaged / INDEX_FILE).write_text(text.replace('"weight_map": {', '"weight_map": {' + twin))
    path = damaged / "model-audio.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].rstrip()
    norm = "audio_encoder.dots_encoder.speech_encoder.layer_norm.weight"
    entry = json.dumps(json.loads(header)[norm])
    header = header[:-1] + f',"{norm}":{entry}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    message = refused(damaged)
    assert f"duplicate: {INDEX_FILE}: lm_head.weight: found 2 times" in message
    assert f"duplicate: model-audio.safetensors: {norm}: found 2 times in one header" in message


def test_c21_a_bias_stored_as_bfloat16_is_refused_with_what_is_left_of_it(damaged: Path):
    path = shard_of(damaged, BIAS)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    first, last = header[BIAS]["data_offsets"]
    values = np.frombuffer(content[end + first : end + last], dtype="<f4")
    rounded = torch.from_numpy(values.copy()).bfloat16()
    header[BIAS] |= {"dtype": "BF16", "data_offsets": [first, last - 28]}
    for name, entry in header.items():
        if name not in ("__metadata__", BIAS) and entry["data_offsets"][0] >= last:
            entry["data_offsets"] = [offset - 28 for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    data = content[end:][:first] + rounded.view(torch.uint8).numpy().tobytes() + content[end:][last:]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    distinct = len(rounded.unique())
    assert distinct < len(np.unique(values)) == 14
    assert f"{BIAS}: found BF16, of whose 14 values {distinct} are distinct, expected F32" in refused(damaged)


def test_c46_a_scale_for_a_bfloat16_weight(damaged: Path):
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    edit_index(damaged, lambda index: index["weight_map"].update({scale: "model-audio.safetensors"}))
    message = refused(damaged)
    assert "found a scale for the BF16 tensor model.layers.0.self_attn.o_proj.weight" in message
    assert "FP8 checkpoints are not supported yet" in message


def test_c46_an_fp8_weight_is_not_supported_yet(damaged: Path):
    name = "model.layers.0.self_attn.o_proj.weight"
    path = shard_of(damaged, name)

    def to_fp8(header: dict) -> None:
        header[name]["dtype"], header[name]["shape"] = "F8_E4M3", [96, 120]

    edit_header(path, to_fp8)
    assert f"{name}: found F8_E4M3, expected BF16; FP8 checkpoints are not supported yet" in refused(damaged)


def test_c26_a_draft_layer_of_full_geometry_is_refused_with_its_shape(damaged: Path):
    name = "model.layers.6.self_attn.q_b_proj.weight"
    edit_header(shard_of(damaged, name), lambda header: header[name].update(shape=[24, 84]))
    assert f"wrong shape: {shard_of(damaged, name).name}: {name}: found (24, 84), expected (84, 24)" in refused(damaged)


def test_c33_more_draft_layers_in_the_config_than_in_the_index(damaged: Path):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 3}))
    assert "is 3, but the index holds 1 draft layer: set it to 1" in refused(damaged)


def test_c66_a_folder_without_index_is_refused_by_name(damaged: Path, tmp_path: Path):
    (damaged / INDEX_FILE).unlink()
    assert f"has no {INDEX_FILE}, which is written last" in refused(damaged)
    assert refused(tmp_path / "nowhere").endswith("nowhere: no such folder; name a checkpoint folder")


def test_names_that_cannot_be_are_refused_with_what_could(damaged: Path):
    names = {
        "model.layers.9.input_layernorm.weight": "expected layers 0 to 5 and draft layer 6",
        "model.layers.2.self_attn.indexer.wk.weight": "expected no indexer, since layer 2 is sliding",
        "model.layers.1.mlp.experts.14.up_proj.weight": "expected experts 0 to 13",
        "model.layers.0.mlp.experts.0.up_proj.weight": "expected layer 0 to be dense",
    }
    edit_index(damaged, lambda index: index["weight_map"].update(dict.fromkeys(names, "model-audio.safetensors")))
    message = refused(damaged)
    for name, expected in names.items():
        line = next(line for line in message.splitlines() if f"{name}: found a name" in line)
        assert line.endswith(expected)


def test_towers_without_their_config_are_refused(damaged: Path):
    config = json.loads((damaged / "config.json").read_text())
    del config["vision_config"]
    (damaged / "config.json").write_text(json.dumps(config))
    assert "expected none, since the config has no vision_config" in refused(damaged)


def test_a_shard_the_index_does_not_mention(damaged: Path):
    shutil.copy(damaged / "model-audio.safetensors", damaged / "model-00009-of-00009.safetensors")
    assert "model-00009-of-00009.safetensors: found a file the index does not mention" in refused(damaged)


@pytest.mark.parametrize("file", ["../escape.safetensors", "/etc/passwd", "a\\b.safetensors", 7, None, ".safetensors"])
def test_index_entries_that_are_no_file_of_the_folder(damaged: Path, file: object):
    edit_index(damaged, lambda index: index["weight_map"].update({"lm_head.weight": file}))
    assert f"unsafe file name: {INDEX_FILE}: lm_head.weight" in refused(damaged)


def test_a_total_size_that_does_not_add_up(damaged: Path):
    edit_index(damaged, lambda index: index["metadata"].update(total_size=1))
    assert "found metadata.total_size 1, expected" in refused(damaged)


@pytest.mark.parametrize("choice", ["leading", "tail"])
def test_a_missing_indexer_layout_needs_a_decision(damaged: Path, choice: str):
    edit_index(damaged, lambda index: index["metadata"].pop("indexer_rope_layout"))
    assert "found no indexer_rope_layout, expected 'leading' or 'tail'" in refused(damaged)
    folder = CheckpointFolder.open(damaged, Numerics(missing_indexer_rope_layout=choice))
    assert folder.indexer_rope_layout == choice


def test_a_conversion_without_a_layout_is_refused_whatever_was_decided(damaged: Path):
    edit_index(damaged, lambda index: index["metadata"].pop("indexer_rope_layout"))
    edit_index(damaged, lambda index: index["metadata"].update(indexer_rope_converted_from="tail"))
    with pytest.raises(CheckpointError, match="converted_from 'tail' without indexer_rope_layout"):
        CheckpointFolder.open(damaged, Numerics.preset("transformers"))


def test_the_layout_of_the_index_wins_over_the_decision(damaged: Path):
    edit_index(damaged, lambda index: index["metadata"].update(indexer_rope_layout="tail"))
    folder = CheckpointFolder.open(damaged, Numerics(missing_indexer_rope_layout="leading"))
    assert folder.indexer_rope_layout == "tail"
    edit_index(damaged, lambda index: index["metadata"].update(indexer_rope_layout="middle"))
    assert "found indexer_rope_layout 'middle'" in refused(damaged)


def test_a_long_list_of_problems_is_cut_and_counted(damaged: Path):
    edit_index(damaged, lambda index: index.update(weight_map={}))
    message = refused(damaged)
    assert len(message.splitlines()) == 102
    assert "more (index disagrees, missing)" in message


class Norms(nn.Module):
    """Two tensors of the checkpoint; what a damaged one must not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.full((96,), 7.0))


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-1, 2**64), max_size=12),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=100)
@given(data=st.data())
def test_any_damage_is_a_checkpoint_error_and_leaves_the_module_alone(intact: Path, data: st.DataObject):
    """Random damage to the bytes, the header or the index of a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(intact, Path(scratch) / "folder"))
        path = data.draw(st.sampled_from(sorted(folder.glob("*.safetensors"))), "shard")
        kind = data.draw(st.sampled_from(["cut", "extend", "header byte", "entry", "index entry", "index bytes"]))
        content = path.read_bytes()
        header_end = 8 + int.from_bytes(content[:8], "little")
        if kind == "cut":
            os.truncate(path, data.draw(st.integers(0, len(content) - 1)))
        elif kind == "extend":
            path.write_bytes(content + bytes(data.draw(st.integers(1, 9))))
        elif kind == "header byte":
            at = data.draw(st.integers(0, header_end - 1))
            path.write_bytes(content[:at] + data.draw(st.binary(min_size=1, max_size=3)) + content[at + 1 :])
        elif kind == "entry":
            names = [name for name in json.loads(content[8:header_end]) if name != "__metadata__"]
            name = data.draw(st.sampled_from(names))
            field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
            edit_header(path, lambda header: header[name].update({field: data.draw(HOSTILE)}))
        elif kind == "index entry":
            part = data.draw(st.sampled_from(["weight_map", "metadata"]))
            key = "lm_head.weight" if part == "weight_map" else "total_size"
            edit_index(folder, lambda index: index[part].update({key: data.draw(HOSTILE)}))
        else:
            text = (folder / INDEX_FILE).read_bytes()
            (folder / INDEX_FILE).write_bytes(text[: data.draw(st.integers(0, len(text) - 3))])
        is_harmless = kind == "header byte" or (path.read_bytes() == content and not kind.startswith("index"))
        module, refusal = Norms(), ""
        try:
            load_into(module, CheckpointFolder.open(folder), "model.")
        except CheckpointError as error:
            refusal = str(error)
        if not is_harmless:
            assert refusal
        if refusal:
            assert "model" in refusal.replace(str(folder), "", 1)
            assert (module.norm.weight == 7.0).all()


def test_a_damaged_config_is_a_config_error(damaged: Path):
    (damaged / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        CheckpointFolder.open(damaged)
