"""Written folders have the released layout, appear whole or not at all, and never damage what was there."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_folders import tiny_with_towers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from reference.checkpoint import (
    CheckpointFolder,
    CheckpointWriter,
    ExpectedTensor,
    expected_tensors,
    synthetic_tensors,
    write_checkpoint,
)
from reference.checkpoint.index import INDEX_FILE
from reference.checkpoint.shards import plan
from reference.config import released, tiny
from reference.errors import CheckpointError


class KilledError(Exception):
    """Stands for whatever ends a conversion halfway."""


def test_the_layout_is_the_released_one(intact: Path):
    config = tiny_with_towers()
    expected = expected_tensors(config)
    index = json.loads((intact / INDEX_FILE).read_text())
    assert index["metadata"] == {
        "total_size": sum(t.nbytes for t in expected.values()),
        "indexer_rope_layout": "leading",
    }
    assert {path.name for path in intact.iterdir()} == {
        *(f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)),
        "model-vision.safetensors",
        "model-audio.safetensors",
        "config.json",
        INDEX_FILE,
    }
    for name, file in index["weight_map"].items():
        tower = {"vision": "model-vision.safetensors", "audio": "model-audio.safetensors"}.get(expected[name].bucket)
        assert file == tower if tower else file.startswith("model-0000")


def test_each_layer_is_spread_over_all_shards(intact: Path):
    files = json.loads((intact / INDEX_FILE).read_text())["weight_map"]
    for layer in range(7):
        assert len({file for name, file in files.items() if name.startswith(f"model.layers.{layer}.")}) == 3


def test_the_safetensors_library_reads_every_file(intact: Path):
    read = {}
    for path in intact.glob("*.safetensors"):
        read |= load_file(path)
    made = dict(synthetic_tensors(tiny_with_towers()))
    assert read.keys() == made.keys()
    for name, value in made.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value)


def test_metadata_of_a_conversion(tmp_path: Path):
    write_checkpoint(
        tmp_path, tiny(), synthetic_tensors(tiny()), indexer_rope_layout="tail", indexer_rope_converted_from="leading"
    )
    folder = CheckpointFolder.open(tmp_path)
    assert folder.indexer_rope_layout == "tail"
    assert folder.index.metadata["indexer_rope_converted_from"] == "leading"


def test_the_same_tensors_in_any_order_give_the_same_bytes(tmp_path: Path):
    tensors = [*synthetic_tensors(tiny())]
    for name, order in (("a", tensors), ("b", tensors[::-1])):
        write_checkpoint(tmp_path / name, tiny(), order, max_shard_bytes=200_000)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) > 8
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[:-1], "missing: model-0000"),
        (lambda tensors: [*tensors, tensors[0]], "found it a second time"),
        (lambda tensors: [("model.unknown", tensors[0][1]), *tensors], "a name that is not the model's"),
        (lambda tensors: [(tensors[0][0], tensors[0][1].T), *tensors[1:]], r"found torch.bfloat16 \(96, 193\)"),
        (lambda tensors: [(tensors[0][0], tensors[0][1].float()), *tensors[1:]], r"found torch.float32 \(193, 96\)"),
    ],
)
def test_other_tensors_than_the_configs_leave_nothing_behind(tmp_path: Path, change, message: str):
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "new", tiny(), change([*synthetic_tensors(tiny())]))
    assert [*(tmp_path / "new").iterdir()] == []


def interrupted(after: int) -> Iterator[tuple[str, Tensor]]:
    for number, item in enumerate(synthetic_tensors(tiny())):
        if number == after:
            raise KilledError
        yield item


@pytest.mark.parametrize("after", [0, 1, 200, 340])
def test_c66_an_interrupted_write_leaves_no_folder_that_opens(tmp_path: Path, after: int):
    with pytest.raises(KilledError):
        write_checkpoint(tmp_path, tiny(), interrupted(after))
    with pytest.raises(CheckpointError, match=f"has no {INDEX_FILE}"):
        CheckpointFolder.open(tmp_path)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4])
def test_c66_killed_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int):
    """Three shards, the config and the index appear one by one; the folder opens with the last of them."""
    replace, count = Path.replace, 0

    def replace_until_killed(self: Path, target: Path) -> Path:
        nonlocal count
        if count == after:
            raise KilledError
        count += 1
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace_until_killed)
        # What a killed process leaves: nothing is tidied up.
        patched.setattr(CheckpointWriter, "_remove_partial", lambda self: None)
        with pytest.raises(KilledError):
            write_checkpoint(tmp_path, tiny(), synthetic_tensors(tiny()), shards=3)
    with pytest.raises(CheckpointError, match=f"has no {INDEX_FILE}"):
        CheckpointFolder.open(tmp_path)
    write_checkpoint(tmp_path, tiny(), synthetic_tensors(tiny()), shards=3)
    CheckpointFolder.open(tmp_path)
    assert not [*tmp_path.glob("*.partial")]


def test_a_folder_that_holds_a_checkpoint_is_left_as_it_is(damaged: Path):
    before = {path.name: path.read_bytes() for path in damaged.iterdir()}
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        write_checkpoint(damaged, tiny(), synthetic_tensors(tiny(), seed=1))
    assert {path.name: path.read_bytes() for path in damaged.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_a_named_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(tmp_path / "file" / "folder", tiny(), [])


def test_the_release_gets_its_131_shards():
    shards = plan(expected_tensors(released()).values(), max_shard_bytes=4_300_000_000)
    assert [shard.name for shard in shards[-3:]] == [
        "model-00131-of-00131.safetensors",
        "model-vision.safetensors",
        "model-audio.safetensors",
    ]
    assert max(shard.size for shard in shards[:-2]) < 4_300_100_000


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    limit=st.integers(1, 200),
    shards=st.none() | st.integers(1, 40),
)
def test_a_plan_places_every_tensor_once_and_keeps_the_limit(sizes: list[int], limit: int, shards: int | None):
    tensors = [
        ExpectedTensor(f"t{k}", (size,), torch.float32 if size % 3 == 0 else torch.bfloat16, "language")
        for k, size in enumerate(sizes)
    ]
    planned = plan(tensors, limit, shards)
    assert sorted(name for shard in planned for name in shard.starts) == sorted(t.name for t in tensors)
    by_name = {t.name: t for t in tensors}
    for shard in planned:
        position = len(shard.header)
        for name, start in shard.starts.items():
            assert start == position
            assert start % by_name[name].dtype.itemsize == 0
            position += by_name[name].nbytes
        assert position == shard.size
        if shards is None and len(shard.starts) > 1:
            assert shard.size - len(shard.header) <= limit
    if shards is not None:
        assert len(planned) == min(shards, len(tensors))


@pytest.mark.parametrize(("limit", "shards"), [(0, None), (100, 0)])
def test_no_shards_is_a_named_error(limit: int, shards: int | None):
    with pytest.raises(CheckpointError, match="at least one shard of at least one byte"):
        plan([], limit, shards)
