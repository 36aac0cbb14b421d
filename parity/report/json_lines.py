"""A report as JSON lines: one object a line, each with its kind in `record`.

    header       versions of this format, of the trace schema, and of what made the report
    verdict      the answer, its headline, the commands
    level layer tensor choice partial note skipped step ulps overlap end_to_end fault hypothesis
    totals       last: a file without it is cut off

What errors, noise and limits are: `records`. JSON has no infinity: the strings "inf", "-inf" and "nan" stand for it.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, is_dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from parity import DISTRIBUTION
from parity.report.records import FaultFinding, Report
from parity.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from parity.drift import Drift

REPORT_VERSION = 1


def json_lines(report: Report) -> str:
    return _lines(_records(report))


def drift_lines(drift: Drift) -> str:
    """`header`, a `drift` for each row, `totals`."""
    header = _header()
    rows = [_record("drift", **_fields(row)) for row in drift.rows]
    totals = _record("totals", rows=len(rows), choice_rows=drift.choice_rows, exchanged=drift.exchanged)
    return _lines([header, *rows, totals])


def _lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)


def _header() -> dict[str, Any]:
    return _record("header", report_version=REPORT_VERSION, schema_version=SCHEMA_VERSION, versions=versions())


def versions() -> dict[str, str]:
    """Of Python, torch and this distribution."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", DISTRIBUTION)}}


def _records(report: Report) -> Iterator[dict[str, Any]]:
    yield _header()
    yield _record(
        "verdict",
        command=report.command,
        verdict=report.verdict,
        headline=report.headline,
        expected=report.expected,
        actual=report.actual,
        first=report.first,
        again=report.again,
        next=report.next,
    )
    for level in report.levels:
        yield _record("level", **(_fields(level) | {"worst": level.worst.tensor if level.worst else None}))
    for layer in report.layers:
        worst = {"worst": layer.worst.tensor, "ratio": layer.worst.ratio, "limit": layer.worst.limit}
        arrives, added = (row.error if row else None for row in (layer.arrives, layer.added))
        yield _record("layer", **(_fields(layer) | worst | {"arrives": arrives, "added": added}))
    for row in report.rows:
        yield _record("tensor", **_fields(row))
    for choice in report.choices:
        yield _record("choice", **_fields(choice))
    for partial in report.partials:
        yield _record("partial", **_fields(partial))
    for note in report.notes:
        yield _record("note", note=note)
    for reason in report.skipped:
        yield _record("skipped", reason=reason)
    for kind, records in (
        ("step", report.detail.by_step),
        ("ulps", report.detail.ulps),
        ("overlap", report.detail.overlaps),
    ):
        for one in records:
            yield _record(kind, **_fields(one))
    if report.detail.end_to_end:
        yield _record("end_to_end", **_fields(report.detail.end_to_end))
    if report.fault:
        yield from _fault_records(report.fault)
    yield _record("totals", **_fields(report.totals))


def _fault_records(fault: FaultFinding) -> Iterator[dict[str, Any]]:
    hypotheses = (*fault.explanations, *fault.closest)
    fields = {name: value for name, value in _fields(fault).items() if name not in ("explanations", "closest")}
    yield _record("fault", explanations=[tried.name for tried in fault.explanations], **fields)
    for tried in hypotheses:
        yield _record("hypothesis", **_fields(tried))


def _record(kind: str, /, **fields: Any) -> dict[str, Any]:
    return {"record": kind, **{name: _plain(value) for name, value in fields.items()}}


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
