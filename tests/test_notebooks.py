"""The notebooks: each runs from top to bottom in a fresh kernel, and its two forms agree.

Written by hand is the text form, `NAME.py`; the paired `NAME.ipynb` is made from it, outputs stripped:

    .venv/bin/jupytext --to ipynb --update notebooks/*.py

A run gets one core, no network, and a folder of its own, in which nothing may be left. The limit is on the kernel's
processor time, so that a busy machine fails no test.
"""

import os
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[1] / "notebooks"
TEXT_FORMS = sorted(FOLDER.glob("*.py"))
CPU_SECONDS = 60
TIMEOUT_SECONDS = 600

# Runs before the first cell. IPython's own connections to the kernel are not made through Python's sockets.
NO_NETWORK = """
import sys

def _refused(event, arguments):
    is_outward = event == "socket.connect" and arguments[1][0] not in ("127.0.0.1", "::1")
    if event == "socket.getaddrinfo" or (is_outward and isinstance(arguments[1], tuple)):
        raise RuntimeError(f"a notebook must not use the network: {event} {arguments}")

sys.addaudithook(_refused)
"""
CPU_TIME = "import time; print(time.process_time())"

every_notebook = pytest.mark.parametrize("text_form", TEXT_FORMS, ids=lambda path: path.stem)


def test_there_are_notebooks() -> None:
    names = ["01_architecture_tour", "02_find_the_bug", "03_noise_and_tolerance", "05_vision", "06_audio"]
    assert [path.stem for path in TEXT_FORMS] == [*names, "07_from_chat_to_tool_call"]
    assert sorted(FOLDER.glob("*.ipynb")) == [path.with_suffix(".ipynb") for path in TEXT_FORMS]


@every_notebook
def test_both_forms_agree(text_form: Path) -> None:
    written, made = jupytext.read(text_form), nbformat.read(text_form.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(made)
    assert _cells(made) == _cells(written), "run jupytext: see the docstring of this file"
    for cell in made.cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


@every_notebook
def test_it_ends_with_what_to_change(text_form: Path) -> None:
    headings = [line for line in text_form.read_text().splitlines() if line.startswith("# ## ")]
    assert headings[-1] == "# ## What to change to see it break"


@every_notebook
@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_it_runs(text_form: Path, tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    notebook = jupytext.read(text_form)
    guard, clock = (nbformat.v4.new_code_cell(source) for source in (NO_NETWORK, CPU_TIME))
    notebook.cells = [guard, *notebook.cells, clock]
    before = sorted(FOLDER.iterdir())

    client = NotebookClient(notebook, timeout=TIMEOUT_SECONDS, resources={"metadata": {"path": str(work)}})
    client.execute(env=_environment(home))

    assert not list(work.iterdir())
    assert sorted(FOLDER.iterdir()) == before
    figures = [output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in _data(output)]
    assert len(figures) >= 3
    assert float(clock.outputs[0].text) < CPU_SECONDS


def _cells(notebook: NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def _data(output: NotebookNode) -> dict[str, Any]:
    return output.get("data", {})


def _environment(home: Path) -> dict[str, str]:
    """One thread, figures inline, and the caches of IPython and matplotlib in a folder that goes away."""
    own = {
        "HOME": str(home),
        "IPYTHONDIR": str(home / "ipython"),
        "MPLCONFIGDIR": str(home / "matplotlib"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return {**os.environ, **own}
