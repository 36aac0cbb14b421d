"""A report as one JSON object, written under a temporary name and renamed, and read back to an equal value."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optimized.bench.floors import Ceilings
from optimized.bench.judge import Agreement
from optimized.bench.records import BenchError, BenchReport, GenerationRow, Machine, OpRow, PeerTime, StepRow

REPORT_VERSION = 1
# Of a generation: written for readers, and worked out again when read.
DERIVED = ("floor_us", "round_us", "tokens_s", "accepted", "break_even")


def to_json(report: BenchReport) -> dict[str, Any]:
    """The records field by field, with what is derived beside each row. JSON has no NaN: null stands for it."""
    fields = _without_nan(asdict(report))
    for record, row in zip(fields["rows"], report.rows, strict=True):
        record |= {"of_floor": row.of_floor, "peer_of_ours": row.peer_of_ours}
    for record, generation in zip(fields["generations"], report.generations, strict=True):
        record |= {name: getattr(generation, name) for name in DERIVED}
    return {"report_version": REPORT_VERSION, "backends": report.backends, **fields}


def from_json(record: dict[str, Any]) -> BenchReport:
    """Raises: BenchError if this is no report of this version."""
    found = record.get("report_version") if isinstance(record, dict) else None
    if found != REPORT_VERSION:
        raise BenchError(f"not a report of the benchmark: expected report_version {REPORT_VERSION}, found {found!r}")
    try:
        return BenchReport(
            Machine(**{**record["machine"], "missing": tuple(record["machine"]["missing"])}),
            Ceilings(**record["ceilings"]),
            record["date"],
            record["command"],
            tuple(_op_row(row) for row in record["rows"]),
            tuple(_step_row(step) for step in record["steps"]),
            # Earlier reports have none.
            tuple(_generation_row(row) for row in record.get("generations", ())),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise BenchError(f"not a report of the benchmark: {type(error).__name__} {error}") from error


def write_text(path: str | Path, text: str) -> None:
    """The whole file or nothing. Raises: BenchError if the folder does not exist or cannot be written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BenchError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_json(path: str | Path, report: BenchReport) -> None:
    write_text(path, json.dumps(to_json(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path) -> BenchReport:
    """Raises: BenchError if the file is missing, not JSON, or no report."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{path}: is not valid JSON: {error}") from error
    try:
        return from_json(record)
    except BenchError as error:
        raise BenchError(f"{path}: {error}") from error


def _op_row(row: dict[str, Any]) -> OpRow:
    row = {name: value for name, value in row.items() if name not in ("of_floor", "peer_of_ours")}
    agreement = row["agreement"]
    if agreement is not None:
        error, noise = (math.nan if agreement[name] is None else agreement[name] for name in ("error", "noise"))
        agreement = Agreement(error, noise, agreement["is_green"], agreement["why"])
    return OpRow(**{**row, "agreement": agreement, "peers": tuple(PeerTime(**peer) for peer in row["peers"])})


def _step_row(step: dict[str, Any]) -> StepRow:
    return StepRow(**{**step, "slowest": tuple((name, us) for name, us in step["slowest"])})


def _generation_row(row: dict[str, Any]) -> GenerationRow:
    return GenerationRow(**{name: value for name, value in row.items() if name not in DERIVED})


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
