"""A gate for the tests of other projects: does an implementation of NOTE agree with a golden?

    from parity.testing import assert_parity

    def test_my_port():
        assert_parity(lambda step: {"logits": my_model(step.history + step.token_ids)[-len(step.token_ids):]})

The golden `tiny` ships with the package. Its weights are those of `note-parity`'s synthetic tiny checkpoint, which
`reference.checkpoint.write_synthetic(folder, reference.config.tiny(), seed=0)` writes in the released layout. What is
allowed is the noise measured for each row of the golden, in its dtype; there is no tolerance to choose.

Neither `reference` nor `optimized` is imported here, nor anything that does.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.errors import GoldenError
from parity.findings import ChoiceResult, Comparison, ProbeResult
from parity.golden_compare import compare_to_golden
from parity.golden_file import Golden
from parity.plain_steps import PlainStep, plain_steps
from parity.trace import Entry, InMemory, Trace

__all__ = ["PlainStep", "assert_parity", "steps"]

Rows = Mapping[str, Any]  # name to a tensor, or to what `torch.as_tensor` takes
# Lines of the message: there are hundreds of names.
MAX_LINES = 12


def steps(golden: str | Path | Golden = "tiny") -> list[PlainStep]:
    """What the golden's model was given, in order."""
    opened = golden if isinstance(golden, Golden) else Golden.open(golden)
    return list(plain_steps(opened.workload, opened.vocab_size))


def assert_parity(
    candidate: Rows | Callable[[PlainStep], Rows],
    golden: str | Path | Golden = "tiny",
    *,
    names: Sequence[str] | None = None,
) -> Comparison:
    """Compare a candidate with a golden, and raise if it differs, or if nothing could be compared.

    candidate: called with each of `steps(golden)`, returns name -> rows that the step computes, [T, …] in the schema's
    names and layouts. Or a mapping of name -> rows of all steps that compute it, one after the other.
    names: globs of what must be there and agree; None: whatever the candidate returns.
    Returns: the comparison, for those who want its numbers.
    Raises: AssertionError with verdict, first place and numbers. GoldenError for a folder that is no golden, and for a
    candidate that cannot be read: a name that the golden does not have, another number or shape of rows.
    """
    opened = golden if isinstance(golden, Golden) else Golden.open(golden)
    trace = _trace_of(candidate, opened)
    wanted = trace.names() if names is None else _wanted(names, opened)
    kept = {name for name in trace.names() if name in wanted} | _orders(trace)
    comparison = compare_to_golden(opened, Trace([entry for entry in trace.entries() if entry.name in kept]))
    problem = _problem(comparison, wanted, set(trace.names()))
    if problem:
        raise AssertionError("\n".join([problem, *_details(comparison, opened)]))
    return comparison


def _orders(trace: Trace) -> set[str]:
    """Choices are always compared where they are there: what follows them is judged by them."""
    return {name for name in trace.names() if name.endswith((".selected", ".expert_ids"))}


def _wanted(patterns: Sequence[str], golden: Golden) -> list[str]:
    wanted: dict[str, None] = {}
    for pattern in patterns:
        found = fnmatch.filter(golden.names(), pattern)
        if not found:
            raise GoldenError(f"names: {pattern!r} matches none of the golden's {len(golden.names())} names")
        wanted |= dict.fromkeys(found)
    return list(wanted)


def _trace_of(candidate: Rows | Callable[[PlainStep], Rows], golden: Golden) -> Trace:
    given = steps(golden)
    entries: list[Entry] = []
    if callable(candidate):
        for number, step in enumerate(given):
            place = f"step {number} ({step.kind}, request {step.request})"
            for name, value in _named_rows(candidate(step), place).items():
                entries.append(_entry(name, _tensor(name, value), number, step, golden))
        return Trace(entries, "candidate")
    for name, value in _named_rows(candidate, "the candidate").items():
        computing = [(number, step) for number, step in enumerate(given) if step.positions_of(name)]
        rows = _tensor(name, value)
        counts = [len(step.positions_of(name)) for _, step in computing]
        if rows.ndim == 0 or len(rows) != sum(counts):
            raise GoldenError(
                f"{name}: expected {sum(counts)} rows, those of {len(counts)} steps, found {tuple(rows.shape)}"
            )
        for (number, step), part in zip(computing, rows.split(counts), strict=True):
            entries.append(_entry(name, part, number, step, golden))
    return Trace(entries, "candidate")


def _named_rows(found: object, place: str) -> Rows:
    if not isinstance(found, Mapping):
        raise GoldenError(f"{place}: expected names and their rows, found {type(found).__name__}")
    return found


def _tensor(name: str, value: object) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GoldenError(f"{name!r:.200}: expected a tensor, found {type(value).__name__}: {error}") from error


def _entry(name: str, rows: Tensor, number: int, step: PlainStep, golden: Golden) -> Entry:
    """One tensor of one step; rows that are flattened get the golden's shape back."""
    if not golden.has(name, step.request) or name.startswith("cache."):
        raise GoldenError(
            f"{name!r:.200}, request {step.request}: cannot be compared; the golden has {len(golden.names())} names, "
            f"such as 'layers.0.output' and 'logits' (of a cache, compare the rows when they are computed)"
        )
    positions = step.positions_of(name)
    if not positions:
        raise GoldenError(
            f"{name}, step {number} ({step.kind}, request {step.request}): such a step does not compute it; leave it "
            f"out there (a draft step computes mtp.0.…, mtp.1.… and so on, every other step what is not of mtp)"
        )
    shape = golden.row_shape(name, step.request)
    count, width = shape.numel(), rows[0].numel() if rows.ndim and len(rows) else 0
    # Scores and choices grow with the number of keys.
    is_growing = name.endswith((".index.scores", ".index.selected"))
    if rows.ndim == 0 or len(rows) != len(positions) or (width != count and not is_growing):
        raise GoldenError(
            f"{name}, step {number} ({step.kind}, request {step.request}): expected "
            f"{(len(positions), *shape)}, found {tuple(rows.shape)}"
        )
    rows = rows.detach().cpu() if is_growing else rows.detach().cpu().reshape(len(positions), *shape)
    return Entry(name, step.request, number, step.kind, positions, InMemory(rows))


def _problem(comparison: Comparison, wanted: Sequence[str], shown: set[str]) -> str | None:
    """The first line of the message, or None if everything wanted was compared and agrees."""
    absent = [name for name in wanted if name not in shown]
    if absent:
        return f"INCOMPLETE  {len(absent)} of {len(wanted)} names were not returned, the first is {absent[0]}"
    if not comparison.compared and not comparison.choice_rows:
        return "NOTHING COMPARED  the candidate returned no name that could be judged"
    first = comparison.first
    if isinstance(first, ProbeResult) and first.first_bad:
        place = first.first_bad
        return (
            f"DIFFERENT  {first.name}  error {first.ratio:.3g}x noise (limit {first.limit:.2g}x)  request "
            f"{place.request}, first bad position {place.position} (run {place.occurrence + 1} of it)"
        )
    if isinstance(first, ChoiceResult):
        exchange = first.exchange
        return (
            f"DIFFERENT  {first.name}  request {exchange.request}, position {exchange.position}: "
            f"{list(exchange.only_actual)} in place of {list(exchange.only_expected)}, {exchange.gap:.3g} from a tie, "
            f"{first.excess:.3g}x what noise can close"
        )
    short = [result for result in comparison.probes if result.missing_rows]
    if short:
        return f"INCOMPLETE  {short[0].name}: {short[0].missing_rows} rows were not returned"
    return None


def _details(comparison: Comparison, golden: Golden) -> list[str]:
    blamed = sorted(comparison.blamed, key=lambda result: -result.excess)
    lines = [f"  {result.name}: {result.excess:.3g}x of what is allowed" for result in blamed]
    elements = sum(result.elements for result in comparison.probes)
    lines = _first(lines, f"of {comparison.compared} tensors ({elements} elements) are outside the noise")
    lines += [f"  {comparison.choice_rows} rows of choices compared, {len(comparison.choices)} differ"]
    lines += _first([f"  {line}" for line in comparison.skipped], "lines of what was not judged")
    return [*lines, f"golden: {golden.folder.name}, {golden.record.dtype}, workload {golden.record.workload}"]


def _first(lines: list[str], what: str) -> list[str]:
    return [f"{len(lines)} {what}{', the worst are' * (len(lines) > MAX_LINES)}", *lines[:MAX_LINES]] if lines else []
