"""Who may import whom: parity -> optimized -> reference, each with its own third-party packages, and nobody else's.

The rules are read from the source of every file, so an import inside a function counts, and so does one that is never
executed. What is optional may only be imported inside functions: the packages must load without it.
Source: design, "Layout".
"""

import ast
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("reference", "optimized", "parity")

DEFINITION = {"reference", "torch", "numpy", "safetensors"}
# Reading files and prompts; `media` and `prompt` are extras.
PREPROCESSING = {"PIL", "av", "soundfile", "soxr", "tokenizers", "jinja2"}
# Kernels found at run time: what the extra `gpu` brings, and upstream's build of the same.
GPU_KERNELS = {"fa3_fwd_interface", "flash_attn_interface"}
# Distributions whose import name is another one.
IMPORT_NAMES = {"pillow": "PIL", "fa3-fwd": "fa3_fwd_interface"}
# Part of a declared package's interface: transformers refuses a config with this package's error.
BROUGHT_ALONG = {"huggingface_hub"}


@dataclass(frozen=True)
class Import:
    """`package` is the top-level name; `line` is where it stands; `is_local` inside a function."""

    package: str
    line: int
    is_local: bool


def imports_of(source: str) -> list[Import]:
    """Every import statement that runs: all but those under `if TYPE_CHECKING`."""
    found: list[Import] = []

    def visit(node: ast.AST, is_local: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name.split(".")[0], node.lineno, is_local) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import (no module, or a level) could leave the package unseen; absolute ones are the style.
            package = "." if node.level or node.module is None else node.module.split(".")[0]
            found.append(Import(package, node.lineno, is_local))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, is_local or is_function)

    visit(ast.parse(source), False)
    return found


def declared_imports() -> set[str]:
    """Import names of everything that pyproject.toml declares, extras included, and of what that brings along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = [re.split(r"[^\w.-]", line)[0] for line in lines]
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names} | BROUGHT_ALONG


def rules_for(path: str) -> tuple[set[str], set[str]]:
    """What the file at this path (relative, with slashes) may import: anywhere, and inside functions only."""
    if path.startswith("reference/"):
        is_preprocessing = path.startswith("reference/media/") or path == "reference/prompt.py"
        return DEFINITION, PREPROCESSING if is_preprocessing else set()
    if path.startswith("optimized/"):
        return DEFINITION | {"optimized", "triton"}, GPU_KERNELS
    if path == "parity/testing.py":
        return declared_imports() | {"parity"}, set()
    return declared_imports() | set(PACKAGES), GPU_KERNELS


def violations(path: str, source: str) -> list[str]:
    anywhere, in_functions = rules_for(path)
    found = []
    for item in imports_of(source):
        if item.package in sys.stdlib_module_names or item.package in anywhere:
            continue
        if item.package in in_functions and item.is_local:
            continue
        where = "outside a function" if item.package in in_functions else "here"
        found.append(f"{path}:{item.line}: {item.package} may not be imported {where}")
    return found


def test_every_file_keeps_the_import_arrow():
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > len(PACKAGES), "no source file was found"
    found = [line for path in files for line in violations(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("reference/text.py", "import parity"),
        ("reference/text.py", "def f():\n    from optimized.moe import experts"),
        ("reference/text.py", "import triton"),
        ("reference/text.py", "def f():\n    import PIL"),
        ("reference/text.py", "from . import layers"),
        ("reference/prompt.py", "import jinja2"),
        ("reference/media/mel.py", "from soxr import resample"),
        ("optimized/text.py", "import parity.schema"),
        ("optimized/text.py", "import transformers"),
        ("optimized/attention/decode.py", "import fa3_fwd_interface"),
        ("parity/testing.py", "from reference.config import tiny"),
        ("parity/testing.py", "def f():\n    import optimized"),
        ("parity/cli.py", "import requests"),
    ],
)
def test_the_check_sees(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("reference/text.py", "import torch.nn.functional as F\nfrom reference.config import tiny"),
        ("reference/prompt.py", "def f():\n    import jinja2"),
        ("reference/text.py", "if TYPE_CHECKING:\n    from optimized.moe import experts"),
        ("optimized/kernels/norm.py", "import triton.language as tl\nfrom reference.config import tiny"),
        ("optimized/attention/decode.py", "def f():\n    import fa3_fwd_interface"),
        ("parity/runners/transformers.py", "def f():\n    import transformers"),
        ("parity/testing.py", "from parity.schema import PROBES\nimport torch"),
    ],
)
def test_the_check_allows(path, source):
    assert violations(path, source) == []


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python started in `folder`, which therefore comes first on its search path."""
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("package", ["parity.runners", "optimized"])
@pytest.mark.parametrize("shadow", ["reference/__init__.py", "reference/notes.txt", "reference.py"])
def test_a_foreign_reference_is_refused_by_name(tmp_path, shadow, package):
    """A package, a folder of anything, or a module of our name in the working directory."""
    path = tmp_path / shadow
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    result = run_python(tmp_path, "-c", f"import {package}")
    assert result.returncode != 0
    last_line = result.stderr.strip().splitlines()[-1]
    assert "ShadowedPackageError" in last_line
    assert str(tmp_path / "reference") in last_line


def test_the_command_refuses_a_foreign_reference(tmp_path):
    (tmp_path / "reference").mkdir()
    result = run_python(tmp_path, "-m", "parity.cli", "--help")
    assert result.returncode != 0
    assert "ShadowedPackageError" in result.stderr


def test_our_own_packages_are_accepted(tmp_path):
    result = run_python(tmp_path, "-c", "import reference, optimized, parity")
    assert (result.returncode, result.stderr) == (0, "")
