"""What the benchmark runs on: card, driver, versions, and which optional packages are installed."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

from optimized.bench.records import Machine
from optimized.device import triton_obstacle

# Distributions that bring peers. Each is found at run time and required by nothing.
OPTIONAL_PACKAGES = ("fa3-fwd", "tokenspeed-fa3", "sgl-flash-mla", "tokenspeed-deepgemm", "transformers", "vllm")


def obstacle() -> str | None:
    """Why nothing can be timed here; None if it can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device, and times of interpreted kernels mean nothing"
    return triton_obstacle(torch.device("cuda"))


def this_machine() -> Machine:
    found = {name: installed for name in OPTIONAL_PACKAGES if (installed := _version(name))}
    if "transformers" in found:
        # A folder on the path may stand before what is installed. One that does not load costs no report.
        with suppress(Exception):
            found["transformers"] = import_module("transformers").__version__
    return Machine(
        card=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        driver=_driver(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton") or "none",
        packages=found,
        missing=tuple(name for name in OPTIONAL_PACKAGES if name not in found),
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    """The driver's version, which torch does not know; "unknown" where its tool is missing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.splitlines()[0].strip() if answer.strip() else "unknown"
