"""Are two recorded runs of the same model and the same inputs? What both sides say is held against each other.

config      the parsed configs, where both are there; else their hashes
weights     hashes; a golden's are compared too, but what differs is a warning: the hash is of files, and an engine may
            well run the same weights from files of its own
inputs      hash of the token ids of all steps
workload    the line, its seed and its chosen tokens
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from parity.golden_file import Golden
from parity.golden_trace import numbered_steps
from parity.manifest import Hashes, refuse, sha256_of_tokens
from parity.workload import Workload
from reference.config import NoteConfig


@dataclass(frozen=True)
class RunIdentity:
    """What was run, as far as it is known."""

    hashes: Hashes = field(default_factory=Hashes)
    workload: Workload | None = None
    config: NoteConfig | None = None

    @property
    def is_unknown(self) -> bool:
        """Nothing is said of the inputs."""
        return self.workload is None and self.hashes.inputs is None


def identity_of_golden(golden: Golden) -> RunIdentity:
    """Without the hash of its weights; see `weights_warning`."""
    steps = [(step.request, step.token_ids) for _, step in numbered_steps(golden) if step.kind != "draft"]
    hashes = Hashes(inputs=sha256_of_tokens(steps))
    return RunIdentity(hashes, golden.workload, NoteConfig.from_json(golden.record.config))


def run_differences(expected: RunIdentity, actual: RunIdentity) -> list[str]:
    """One line for each thing that both sides state and in which they differ."""
    problems: list[str] = []
    if expected.config and actual.config:
        problems += _config_differences(expected.config, actual.config)
    for what in ("config", "weights", "inputs"):
        mine, theirs = getattr(expected.hashes, what), getattr(actual.hashes, what)
        is_parsed = what == "config" and expected.config and actual.config
        if mine and theirs and mine != theirs and not is_parsed:
            problems.append(f"{what}: sha256 {theirs}, expected {mine}")
    if expected.workload and actual.workload:
        problems += _workload_differences(expected.workload, actual.workload)
    return problems


def require_same_run(expected: RunIdentity, actual: RunIdentity) -> None:
    """Raises: DumpError, naming everything that differs."""
    problems = run_differences(expected, actual)
    if problems:
        problems.append("to compare them all the same: --allow-different-run")
    refuse("the two sides are not of the same run", problems)


def weights_warning(golden: Golden, dump: RunIdentity) -> str | None:
    """A line if the dump names the hash of its weight files, and the golden another one or none."""
    mine, theirs = golden.record.weights.files_sha256, dump.hashes.weights
    if theirs is None or mine == theirs:
        return None
    if mine is None:
        return "weights not compared: the dump names the hash of its weight files, the golden does not know its own"
    return (
        f"different weights: the dump ran weight files with sha256 {theirs}, the golden was made from {mine}; if these "
        "are not the same tensors in other files, no difference below says anything of the port"
    )


def _config_differences(expected: NoteConfig, actual: NoteConfig) -> Iterator[str]:
    for part in ("text", "vision", "audio"):
        mine, theirs = getattr(expected, part), getattr(actual, part)
        if mine is None or theirs is None:
            continue  # a dump of the text model may well have a config without towers
        for setting in dataclasses.fields(mine):
            one, other = getattr(mine, setting.name), getattr(theirs, setting.name)
            if one != other:
                yield f"config: {part}.{setting.name} is {other!r:.80}, expected {one!r:.80}"


def _workload_differences(expected: Workload, actual: Workload) -> Iterator[str]:
    if expected.text() != actual.text():
        yield f"workload: {actual.text()!r:.200}, expected {expected.text()!r:.200}"
    elif expected.seed != actual.seed:
        yield f"workload: seed {actual.seed}, expected {expected.seed}"
    elif dict(expected.chosen) != dict(actual.chosen):
        count = len(set(expected.chosen.items()) ^ set(actual.chosen.items()))
        yield f"workload: the chosen tokens differ in {count} places"
