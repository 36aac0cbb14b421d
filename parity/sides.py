"""The two sides of `compare` and `diagnose`, from what was typed to what was found: golden or dump against dump."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from parity.detail import Detail, detail
from parity.dump_compare import compare_dumps
from parity.end_to_end import end_to_end
from parity.errors import GoldenError
from parity.findings import Comparison
from parity.golden_compare import compare_to_golden
from parity.golden_file import GOLDEN_FILE, Golden, shipped_names
from parity.golden_trace import golden_trace
from parity.manifest import DumpError
from parity.mapping_hint import mapping_hints
from parity.recorded import Recorded, open_recorded
from parity.same_run import RunIdentity, identity_of_golden, require_same_run, run_differences, weights_warning
from parity.schema import dataflow_key
from parity.stored import CLEAR_CHANGES, clear_hidden_choices
from parity.trace import Trace
from parity.workload import Workload
from reference.config import NoteConfig, TextConfig, released, tiny


@dataclass(frozen=True)
class Options:
    """What is said of the sides beside their paths. `mapping` is the actual side's, `expected_mapping` the other's."""

    mapping: str | None = None
    expected_mapping: str | None = None
    config: str | None = None
    allow_different_run: bool = False

    @property
    def words(self) -> str:
        """As typed, with a space in front, for a command that repeats the run."""
        said = {
            "--mapping": self.mapping,
            "--expected-mapping": self.expected_mapping,
            "--config": self.config,
        }
        words = [f" {name} {shlex.quote(value)}" for name, value in said.items() if value is not None]
        return "".join(words) + " --allow-different-run" * self.allow_different_run


@dataclass(frozen=True)
class Compared:
    """A comparison, and what a report has to say of it. `level`: the dtype that was judged.

    `needs_checkpoint`: the expected side is a golden of weights that are not synthetic.
    """

    comparison: Comparison
    workload: Workload | None
    level: str
    config: TextConfig | None
    detail: Detail
    notes: tuple[str, ...]
    needs_checkpoint: bool = False


def is_golden(source: str) -> bool:
    """Whether a golden of that name ships, or the folder is one."""
    return source in shipped_names() or (Path(source) / GOLDEN_FILE).exists()


def config_named(name: str | None) -> NoteConfig | None:
    """`tiny`, `released` or a config file. Raises: ConfigError."""
    if name is None:
        return None
    known = {"tiny": tiny, "released": released}
    return known[name]() if name in known else NoteConfig.from_json(name)


def compare_sides(expected: str, actual: Path, options: Options, with_detail: bool) -> Compared:
    """`with_detail`: also what pictures show; what a difference means for the text is always told.

    Raises: DumpError, GoldenError for what cannot be read, and for sides that are not of the same run.
    """
    if not is_golden(expected) and not Path(expected).exists():
        raise GoldenError(
            f"{expected}: there is no such folder; expected is a golden that ships ({', '.join(shipped_names())}), a "
            f"golden's folder, or a dump of another run"
        )
    if is_golden(expected):
        return _against_golden(Golden.open(expected), actual, options, with_detail)
    return _against_dump(Path(expected), actual, options, with_detail)


def recorded_for(golden: Golden, actual: Path, options: Options) -> tuple[Recorded, tuple[str, ...]]:
    """A dump to be held against a golden, and notes on both. Raises: DumpError."""
    identity = identity_of_golden(golden)
    if options.expected_mapping is not None:
        raise DumpError("--expected-mapping: the expected side is a golden, which needs none")
    if options.config is not None and config_named(options.config) != identity.config:
        raise DumpError(f"--config {options.config}: the expected side is a golden of other sizes; it needs none")
    recorded = open_recorded(actual, options.mapping, identity.config, golden.workload)
    warning = weights_warning(golden, recorded.identity)
    notes = [*([warning] if warning else []), *_run_notes(identity, recorded.identity, options)]
    if recorded.dtype not in (None, golden.dtype):
        notes.append(f"the dump is of a run in {_word(recorded.dtype)}; the noise is that of {golden.record.dtype}")
    return recorded, tuple(notes)


def _against_golden(golden: Golden, actual: Path, options: Options, with_detail: bool) -> Compared:
    recorded, notes = recorded_for(golden, actual, options)
    found = compare_to_golden(golden, recorded.trace, statistics=recorded.statistics)
    config = NoteConfig.from_json(golden.record.config).text
    shown = detail_of(golden_trace(golden), recorded.trace, with_detail)
    comparison = _with_skipped(found, recorded.skipped)
    notes = (*notes, *inputs_note(found), *_hidden_choices_note(golden, recorded.trace, found))
    notes += mapping_hints(golden_trace(golden), recorded.trace, found)
    is_real = golden.record.weights.synthetic_seed is None
    return Compared(comparison, golden.workload, golden.record.dtype, config, shown, notes, is_real)


def _against_dump(expected: Path, actual: Path, options: Options, with_detail: bool) -> Compared:
    config = config_named(options.config)
    left = open_recorded(expected, options.expected_mapping, config)
    config = config or left.identity.config
    right = open_recorded(actual, options.mapping, config, left.identity.workload)
    config = config or right.identity.config
    notes = _run_notes(left.identity, right.identity, options)
    dtype = _coarser(left.dtype, right.dtype)
    notes.append(f"neither side is a golden: the noise is derived from {_word(dtype)} and the depth, not measured")
    workload = left.identity.workload or right.identity.workload
    layers = config.text.num_hidden_layers if config else None
    found = compare_dumps(left.trace, right.trace, dtype, workload, layers, left.statistics, right.statistics)
    notes += [*inputs_note(found), *mapping_hints(left.trace, right.trace, found)]
    skipped = (*left.skipped, *right.skipped)
    shown = detail_of(left.trace, right.trace, with_detail)
    text = config.text if config else None
    return Compared(_with_skipped(found, skipped), workload, _word(dtype), text, shown, tuple(notes))


def detail_of(expected: Trace, actual: Trace, is_whole: bool) -> Detail:
    """All that pictures show, or only what the difference means for the text."""
    return detail(expected, actual) if is_whole else Detail(end_to_end=end_to_end(expected, actual))


def _run_notes(expected: RunIdentity, actual: RunIdentity, options: Options) -> list[str]:
    """Raises: DumpError if the runs differ, unless that is allowed."""
    if not options.allow_different_run:
        require_same_run(expected, actual)
    notes = [f"not the same run, as allowed: {line}" for line in run_differences(expected, actual)]
    if actual.is_unknown:
        notes.append("the dump does not say what was run (no workload, no hash of its inputs); taken to be the same")
    return notes


def not_recorded(golden: Golden, candidate: Trace) -> tuple[str, ...]:
    """A line on the names of the golden that a dump lacks, if there are any."""
    names = golden.names()
    absent = sorted({*names} - {*candidate.names()}, key=dataflow_key)
    if not absent:
        return ()
    return (f"{len(absent)} of {len(names)} tensors are not in the dump, the first is {absent[0]}",)


def inputs_note(found: Comparison) -> tuple[str, ...]:
    """Where the very first tensor differs, the runs may have had other inputs."""
    if found.first is None or found.first.name != "embeddings":
        return ()
    return (
        "the embeddings differ, and nothing is computed before them: other tokens (docs/dumps.md, what to run), "
        "another embedding table, or embeddings that are scaled",
    )


def _hidden_choices_note(golden: Golden, candidate: Trace, found: Comparison) -> list[str]:
    """What choices that are not shown cost, where anything behind them was compared."""
    count = clear_hidden_choices(golden, candidate) if found.compared else 0
    if not count:
        return []
    share = 1.0 - (1.0 - CLEAR_CHANGES) ** count
    return [
        f"{count:,} choices are not shown and were taken for the expected ones, by their margins; rounding changes one "
        f"of them in about {_percent(share)} of runs, and then what is behind it is called different"
    ]


def _percent(share: float) -> str:
    """With the digits that a small number needs: 0.02 %, 0.3 %, 17 %."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _coarser(*dtypes: torch.dtype | None) -> torch.dtype:
    """The one that rounds more; bfloat16 where neither side says its own."""
    known = [dtype for dtype in dtypes if dtype is not None]
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.bfloat16)


def _word(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _with_skipped(comparison: Comparison, lines: tuple[str, ...]) -> Comparison:
    return replace(comparison, skipped=(*lines, *comparison.skipped))
