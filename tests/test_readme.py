"""What README.md shows can be typed: its commands exist, its files are there, its Python runs on a tiny checkpoint."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from parity.cli import app
from parity.faults.catalogue import CATALOGUE, TOWER_SECTIONS
from reference.checkpoint import write_synthetic
from reference.model_tiny import tiny_note

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
# What the released model is given on a GPU, in sizes of the tiny one.
TINY = {
    '"cuda"': '"cpu", "torch"',
    "[(1, 72, 72), (3, 28, 52)]": "[(1, 4, 6), (1, 6, 4)]",
    "pages=4096": "pages=8",
    "decode(items, 32)": "decode(items, 4)",
}


def test_the_python_runs_in_the_order_of_the_page(tmp_path: Path):
    write_synthetic(tmp_path / "folder", tiny_note())
    names: dict[str, object] = {
        "first_S": torch.linspace(-1, 1, 5000),
        "second_S": torch.linspace(-1, 1, 2500),
        "pixels": torch.linspace(-1, 1, 48 * 588).view(48, 588),
    }
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGES["README.md"], re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    for block in blocks:
        for shown, small in {**TINY, '"path/to/checkpoint"': repr(str(tmp_path / "folder"))}.items():
            block = block.replace(shown, small)
        exec(block, names)
    assert [len(tokens) for tokens in names["tokens"].values()] == [4, 4]
    assert names["logits"]["a"].shape[0] == 3
    assert names["rows"].shape[0] == 12


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str):
    commands = get_command(app).commands
    shown = re.findall(r"note-parity ((?:[a-z-]+)[^`\n#]*)", PAGES[page])
    assert shown
    for line in shown:
        name, *words = shlex.split(line.replace("'", "")) if line.count('"') % 2 else shlex.split(line)
        if name not in commands:
            continue
        options = {
            option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGES[page]):
        assert (folder / target).exists(), target


def test_every_command_is_in_the_table():
    rows = re.findall(r"^\| `note-parity ([a-z-]+)", PAGES["README.md"], re.MULTILINE)
    assert set(rows) == set(get_command(app).commands)


def test_the_catalogue_has_as_many_faults_as_stated():
    towers = [len(TOWER_SECTIONS[letter]) for letter in "VWX"]
    stated = f"{len(CATALOGUE) + sum(towers)} known porting mistakes ({len(CATALOGUE)} text, {towers[0]} vision, "
    assert f"{stated}{towers[1]} audio, {towers[2]} media)" in PAGES["README.md"]
