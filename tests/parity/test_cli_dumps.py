"""What the commands on dumps say beside the verdict: other inputs, what was not recorded, names that are alike."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import Result
from dumps import edit_manifest, edited
from typer.testing import CliRunner

from parity.cli import app
from parity.exit_codes import EXIT_AGREES, EXIT_DISAGREES, EXIT_UNUSABLE
from parity.golden_file import Golden
from parity.golden_reference import reference_of
from parity.run import traced
from parity.trace import Trace
from parity.trace_file import open_trace, write_trace
from reference.checkpoint import write_synthetic
from reference.config import tiny

GOLDEN = Golden.open("tiny")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that agrees with the golden, in a folder whose name needs quotes."""
    folder = tmp_path_factory.mktemp("dumps") / "mein Lauf 名"
    write_trace(folder, traced(reference_of(GOLDEN)(torch.bfloat16), GOLDEN.workload), torch.bfloat16)
    return folder


def run(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def test_other_inputs_are_suspected_where_the_embeddings_differ(right: Path, tmp_path: Path) -> None:
    write_trace(tmp_path / "short", only(right, "embeddings", "logits"), torch.bfloat16)
    other = edited(open_trace(tmp_path / "short"), lambda name, value: {name: value.flip(0)})
    write_trace(tmp_path / "other", other, torch.bfloat16)
    for expected in ("tiny", tmp_path / "short"):
        result = run("compare", expected, tmp_path / "other")
        assert (result.exit_code, "other tokens (docs/dumps.md" in result.output) == (EXIT_DISAGREES, True)
    assert "other tokens" not in run("compare", "tiny", right).output


def test_a_diagnosis_says_what_was_not_recorded(right: Path, tmp_path: Path) -> None:
    write_trace(tmp_path / "little", only(right, "layers.3.output"), torch.bfloat16)
    result = run("diagnose", "tiny", tmp_path / "little")
    assert result.exit_code == EXIT_AGREES
    assert "skipped: 187 of 188 tensors are not in the dump, the first is embeddings" in result.output
    assert "not in the dump" not in run("diagnose", "tiny", right).output


def test_the_share_of_runs_with_another_choice_has_a_digit(right: Path, tmp_path: Path) -> None:
    ids = "layers.1.ffn.router.expert_ids"
    most = Trace([entry for entry in open_trace(right).entries() if entry.name != ids])
    write_trace(tmp_path / "most", most, torch.bfloat16)
    said = run("compare", "tiny", tmp_path / "most").output
    assert re.search(r"rounding changes one of them in about 0\.0[1-9] % of runs", said)


def test_sizes_that_are_not_the_golden_s_are_refused(right: Path) -> None:
    for config, reason in (("nosuch.json", "cannot be read"), ("released", "a golden of other sizes; it needs none")):
        result = run("compare", "tiny", right, "--config", config)
        assert (result.exit_code, reason in result.stderr) == (EXIT_UNUSABLE, True)
    assert run("compare", "tiny", right, "--config", "tiny").exit_code == EXIT_AGREES


def test_a_config_of_a_dump_that_is_wrong_is_named_once(right: Path, tmp_path: Path) -> None:
    write_trace(tmp_path / "dump", only(right, "logits"), torch.bfloat16, config=b"{}")
    line = run("validate", tmp_path / "dump").stderr
    assert line.startswith(f"error: {tmp_path / 'dump' / 'config.json'}: config: required key 'model_type' is absent")
    assert line.count("config.json:") == 1


def test_names_that_are_alike_are_proposed_and_the_next_command_can_be_pasted(right: Path, tmp_path: Path) -> None:
    dump, mapping = tmp_path / "die Namen", tmp_path / "m ü.json"
    write_trace(dump, open_trace(right), torch.bfloat16)

    def rename(manifest: dict) -> None:
        for entry in manifest["tensors"]:
            group, _, last = entry["name"].rpartition(".")
            entry["name"] = f"{group}.latent" if last == "kv_latent" and not group.startswith("mtp") else entry["name"]

    edit_manifest(dump, rename)
    result = run("propose", "tiny", dump, mapping)
    # A latent has the values of what is cached of it.
    assert "layers.{i}.attn.kv_latent is layers.{i}.attn.latent:" in result.output
    assert "cache.{i}.kv_latent is cache.{i}.latent:" in result.output
    words = shlex.split(result.output.split("next: ")[1])
    assert words == ["note-parity", "compare", "tiny", str(dump), "--mapping", str(mapping)]
    assert run(*words[1:]).exit_code == EXIT_AGREES


def test_a_prefix_is_taken_off_every_name(right: Path, tmp_path: Path) -> None:
    """Of scores that grow and of draft steps too, whose layouts are not searched."""
    dump, mapping = tmp_path / "dump", tmp_path / "m.json"
    write_trace(dump, open_trace(right), torch.bfloat16)
    edit_manifest(
        dump, lambda manifest: [entry.update(name=f"my.net.{entry['name']}") for entry in manifest["tensors"]]
    )
    result = run("propose", "tiny", dump, mapping)
    assert result.exit_code == EXIT_AGREES
    assert result.output.startswith("names without 'my.net.' are the schema's")
    assert " is " not in result.output
    result = run("compare", "tiny", dump, "--mapping", mapping)
    assert (result.exit_code, "skipped" in result.output) == (EXIT_AGREES, False)
    assert "names without" not in run("propose", "tiny", right).output


def test_nothing_alike_is_not_a_success(right: Path, tmp_path: Path) -> None:
    write_trace(tmp_path / "noise", only(right, "logits", change=torch.randn_like), torch.bfloat16)
    result = run("propose", "tiny", tmp_path / "noise", tmp_path / "m.json")
    assert (result.exit_code, result.output.split("  ")[0]) == (EXIT_UNUSABLE, "NOTHING ALIKE")
    assert not (tmp_path / "m.json").exists()


def test_a_diagnosis_with_weights_of_its_own_is_repeated_with_them(right: Path, tmp_path: Path) -> None:
    """The golden is of other tokens, which the diagnosis suspects too."""
    checkpoint, golden = tmp_path / "my model", tmp_path / "golden"
    write_synthetic(checkpoint, tiny(), 1)
    assert run("golden", checkpoint, golden, "--workload", "p:a3").exit_code == EXIT_AGREES
    write_trace(tmp_path / "dump", only(right, "embeddings", "logits"), torch.bfloat16)
    paths = f"{golden} {tmp_path / 'dump'}"
    compared = run("compare", golden, tmp_path / "dump").output
    assert compared.splitlines()[-1] == f"next:  note-parity diagnose {paths} --checkpoint CHECKPOINT"
    diagnosed = run("diagnose", golden, tmp_path / "dump", "--checkpoint", checkpoint).output
    assert f"again: note-parity diagnose {paths} --checkpoint '{checkpoint}'\n" in diagnosed
    assert "note: the embeddings differ" in diagnosed


def only(dump: Path, *names: str, change=lambda value: value) -> Trace:
    return edited(open_trace(dump), lambda name, value: {name: change(value)} if name in names else {})
