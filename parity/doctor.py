"""What runs on this machine and what does not: versions, the GPU, the backend of every op, optional packages.

Every optional kernel that is found is called once on a small case and compared; a package that loads is not one that
works.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from optimized.device import Choice, choose
from optimized.packages import PACKAGES, PackageStatus, status_of
from parity import DISTRIBUTION

# Distribution and what needs it.
DEPENDENCIES = (
    ("torch", "everything"),
    ("triton", "the optimized kernels"),
    ("transformers", "note-parity check: the oracle (extra `oracle`, 5.24)"),
    ("numpy", "synthetic weights"),
    ("safetensors", "checkpoints, dumps, goldens"),
    ("tokenizers", "prompts (extra `prompt`)"),
    ("jinja2", "reports, and chat templates as files"),
    ("pillow", "images (extra `media`)"),
    ("av", "videos, and MP3 without a length (extra `media`)"),
    ("soundfile", "sound files (extra `media`)"),
    ("soxr", "sound files of other rates than 16 kHz (extra `media`)"),
)


@dataclass(frozen=True)
class Dependency:
    """`version` is None if it is not installed."""

    name: str
    version: str | None
    needed_for: str


@dataclass(frozen=True)
class Card:
    """A GPU as torch sees it; memory in bytes."""

    name: str
    compute_capability: str
    memory_bytes: int
    multiprocessors: int


@dataclass(frozen=True)
class Examination:
    """All facts. `choices`: what each op takes on the CPU, and on the GPU if there is one, with packages let in."""

    distribution_version: str
    python: str
    system: str
    dependencies: tuple[Dependency, ...]
    cards: tuple[Card, ...]
    choices: dict[str, tuple[Choice, ...]]
    packages: tuple[PackageStatus, ...]


def examine() -> Examination:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return Examination(
        version(DISTRIBUTION),
        sys.version.split()[0],
        f"{platform.system()} {platform.machine()}",
        tuple(Dependency(name, _version(name), needed_for) for name, needed_for in DEPENDENCIES),
        tuple(_card(index) for index in range(torch.cuda.device_count())),
        {device: tuple(choose(device, packages=True).choices.values()) for device in devices},
        tuple(status_of(package) for package in PACKAGES),
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _card(index: int) -> Card:
    found = torch.cuda.get_device_properties(index)
    return Card(found.name, f"{found.major}.{found.minor}", found.total_memory, found.multi_processor_count)
