"""`inspect`: the specification's figures for the release, the cache of C17, and a folder that is not complete."""

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from parity.cli import app
from parity.inspect_model import CacheKind, InspectError, Inspection, Part, inspect_model
from parity.report.terminal import WIDTH, layer_ranges
from reference.checkpoint.expected import expected_tensors
from reference.config import NoteConfig, released, tiny
from reference.config_json import write_config

GIB, MIB = 2**30, 2**20
SCREEN_LINES = 60


@pytest.fixture(scope="module")
def release() -> Inspection:
    return inspect_model("released")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def part(inspection: Inspection, name: str) -> Part:
    return next(part for part in inspection.parts if part.name == name)


def cache_kind(inspection: Inspection, name: str) -> CacheKind:
    return next(kind for kind in inspection.cache.kinds if kind.name == name)


def write_config_file(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps(write_config(tiny()) | changes))
    return path


def write_folder(folder: Path, without: Iterable[str] = ()) -> Path:
    """A tiny checkpoint of zeros in one file, lacking the tensors `without`."""
    folder.mkdir()
    write_config_file(folder / "config.json")
    expected = {name: tensor for name, tensor in expected_tensors(tiny()).items() if name not in set(without)}
    file = "model-00001-of-00001.safetensors"
    save_file({name: torch.zeros(t.shape, dtype=t.dtype) for name, t in expected.items()}, folder / file)
    metadata = {"total_size": sum(t.nbytes for t in expected.values()), "indexer_rope_layout": "leading"}
    index = {"metadata": metadata, "weight_map": dict.fromkeys(expected, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("name", "parameters", "router_bias_values", "tensors"),
    [
        ("language", 279_551_718_016, 11_520, 35_362),
        ("mtp", 1_134_193_728, 0, 19),
        ("vision", 6_871_277_312, 608, 2_195),
        ("audio", 886_199_680, 0, 430),
    ],
)
def test_released_parameters(
    release: Inspection, name: str, parameters: int, router_bias_values: int, tensors: int
) -> None:
    found = part(release, name)
    assert (found.parameters, found.router_bias_values, found.tensors) == (parameters, router_bias_values, tensors)


def test_released_active_parameters(release: Inspection) -> None:
    """15.48 B with the output head; 16.25 B if the embedding table were counted as well."""
    head = table = 152_064 * 5_120
    moe_layers, chosen, expert = 45, 8, 3 * 5_120 * 1_536
    routed = moe_layers * 256 * expert
    assert release.active_parameters_per_token == 279_551_718_016 - table - routed + moe_layers * chosen * expert
    assert round(release.active_parameters_per_token / 1e9, 2) == 15.48
    assert round((release.active_parameters_per_token + table) / 1e9, 2) == 16.25
    assert part(release, "mtp").active_parameters == 1_134_193_728 - head


def test_released_tensors_and_bytes(release: Inspection) -> None:
    assert (release.total_tensors, release.total_bytes) == (38_006, 576_886_825_984)
    assert [(share.dtype, share.tensors) for share in release.by_dtype] == [("bfloat16", 37_944), ("float32", 62)]
    language = {share.dtype: share.bytes for share in part(release, "language").by_dtype}
    assert language == {"bfloat16": 559_103_436_032, "float32": 46_080}


def test_released_schedule(release: Inspection) -> None:
    sizes = {group.letter: (len(group.layers), group.tensors, group.nbytes) for group in release.schedule}
    assert sizes == {
        "A": (1, 19, 712_793_728),
        "B": (12, 789, 12_417_524_352),
        "C": (33, 784, 12_311_094_400),
        "D": (1, 18, 711_252_096),
    }


def test_released_geometries(release: Inspection) -> None:
    full, sliding = release.geometries
    assert (full.softmax_scale, sliding.softmax_scale) == (0.07216878364870322, 0.0625)
    assert full.kv_latent_scale == pytest.approx(10**0.5, rel=1e-15)
    assert {full.q_latent_scale, sliding.q_latent_scale, sliding.kv_latent_scale} == {5**0.5}
    assert (full.latent_row_values, sliding.latent_row_values) == (576, 1088)
    assert (full.visible_keys_at_most, sliding.visible_keys_at_most) == (2048, 513)


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_c17_sliding_cache_is_constant_beyond_the_window(draft_tokens: int) -> None:
    inspection = inspect_model("released", (300, 1024, 32_768, 524_288), draft_tokens)
    window_rows = 513 + draft_tokens
    sliding = cache_kind(inspection, "sliding rings")
    assert [use.rows for use in sliding.uses] == [300, window_rows, window_rows, window_rows]
    assert [use.bytes for use in sliding.uses] == [33 * 1088 * 2 * use.rows for use in sliding.uses]
    assert sliding.rows_at_most == window_rows

    for name, row_bytes in (("full latents", 13 * 576 * 2), ("index keys", 13 * 128 * 2)):
        full = cache_kind(inspection, name)
        assert full.rows_at_most is None
        assert [use.bytes for use in full.uses] == [use.context_tokens * row_bytes for use in full.uses]
    assert inspection.cache.growth_bytes_per_token == 13 * (576 + 128) * 2


def test_c17_figures_of_the_specification() -> None:
    inspection = inspect_model("released", (524_288,), draft_tokens=0)
    assert cache_kind(inspection, "full latents").uses[0].bytes == 7.3125 * GIB
    assert round(cache_kind(inspection, "sliding rings").uses[0].bytes / MIB, 1) == 35.1
    assert inspection.cache.totals[0].bytes == sum(kind.uses[0].bytes for kind in inspection.cache.kinds)


def test_contexts_longer_than_the_model_are_refused() -> None:
    assert [total.context_tokens for total in inspect_model("tiny").cache.totals] == [4096]
    with pytest.raises(InspectError, match="max_position_embeddings = 4096"):
        inspect_model("tiny", (4097,))


def test_totals_must_add_up(release: Inspection) -> None:
    with pytest.raises(ValueError, match="576886825984 bytes, the model 1"):
        dataclasses.replace(release, total_bytes=1)


def test_terminal_fits_a_screen() -> None:
    result = run("inspect", "released")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0] == (
        "released: 288.44 B parameters, 15.48 B active a token, 576,886,825,984 bytes in 38,006 tensors"
    )
    assert max(len(line) for line in lines) <= WIDTH
    assert len(lines) <= SCREEN_LINES
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout  # nothing was cut
    for words in ("1 to 45 by 4", "2-4 to 42-44 by 4", "279,551,718,016", "7.31 GiB", "at most 517"):
        assert words in result.stdout


def test_json_holds_the_same_facts(release: Inspection) -> None:
    result = run("inspect", "released", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(json.dumps(dataclasses.asdict(release)))


def test_config_file_equals_its_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(write_config(released())))
    assert dataclasses.replace(inspect_model(str(path)), name="released") == inspect_model("released")


def test_other_schedules(tmp_path: Path) -> None:
    """A sliding dense layer of the backbone is not the draft layer."""
    path = write_config_file(tmp_path / "config.json", first_k_dense_replace=3)
    groups = [(group.kind, group.layers) for group in inspect_model(str(path)).schedule]
    assert groups == [
        ("dense+full", (0, 1)),
        ("dense+sliding", (2,)),
        ("MoE+sliding", (3, 4)),
        ("MoE+full", (5,)),
        ("draft", (6,)),
    ]


def test_broken_config_names_the_key(tmp_path: Path) -> None:
    values = write_config(tiny())
    del values["swa_rope_theta"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    result = run("inspect", path)
    assert result.exit_code == 2
    assert "'swa_rope_theta' is absent" in result.stderr
    assert "Traceback" not in result.stderr


def test_folder_is_verified(tmp_path: Path) -> None:
    inspection = inspect_model(str(write_folder(tmp_path / "whole")))
    assert inspection.folder is not None
    assert (inspection.folder.weight_files, inspection.folder.indexer_rope_layout) == (1, "leading")
    result = run("inspect", tmp_path / "whole")
    assert result.exit_code == 0
    assert "its weight files (1) hold exactly these tensors" in result.stdout


def test_folder_lists_every_missing_tensor(tmp_path: Path) -> None:
    missing = ("model.layers.1.mlp.experts.13.up_proj.weight", "model.layers.5.self_attn.indexer.k_norm.bias")
    result = run("inspect", write_folder(tmp_path / "broken", without=missing), "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    for name in missing:
        assert re.search(rf"missing.*{re.escape(name)}", result.stderr)


def test_missing_target_says_what_is_expected() -> None:
    result = run("inspect", "dots3-note")
    assert result.exit_code == 2
    assert "expected 'released', 'tiny', a config.json or a checkpoint folder" in result.stderr


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((0,), "0"),
        ((0, 1), "0-1"),
        ((1, 5), "1, 5"),
        (tuple(range(1, 46, 4)), "1 to 45 by 4"),
        (tuple(i for i in range(2, 46) if i % 4 != 1), "2-4 to 42-44 by 4"),
        ((0, 1, 5, 9, 13), "0-1, 5 to 13 by 4"),
    ],
)
def test_layer_ranges(layers: tuple[int, ...], text: str) -> None:
    assert layer_ranges(layers) == text


@given(st.sets(st.integers(0, 40), min_size=1))
def test_layer_ranges_lose_nothing(layers: set[int]) -> None:
    expanded: list[int] = []
    for item in layer_ranges(sorted(layers)).split(", "):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?(?: to (\d+)(?:-\d+)? by (\d+))?", item)
        assert found is not None
        first, end, last, step = (int(group) if group else None for group in found.groups())
        assert first is not None
        for start in range(first, (last or first) + 1, step or 1):
            expanded += range(start, start + (end or first) - first + 1)
    assert expanded == sorted(layers)


def test_towers_that_are_absent_are_not_listed() -> None:
    assert NoteConfig.from_json(write_config(tiny())).vision is None
    assert [found.name for found in inspect_model("tiny").parts] == ["language", "mtp"]
