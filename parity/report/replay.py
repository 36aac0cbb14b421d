"""The command that a report names: how to repeat what was run, read from the first lines of a JSON report."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from parity import DISTRIBUTION
from parity.report.json_lines import REPORT_VERSION
from parity.report.records import ReportError

REPEATED = ("check", "compare", "diagnose")
WRITING = {"--json", "--junit", "--markdown", "--html"}
# A header and a verdict are some hundred bytes; no more is read of what may be any file.
LONGEST_LINE = 2**20


def words_to_repeat(path: Path) -> list[str]:
    """The subcommand and its arguments, as in the report's `again`.

    Raises: ReportError for a file that is no report, of another version, or whose command is not one that compares;
    nor is a file written for what a report says.
    """
    try:
        with path.open("rb") as file:
            header, verdict = (_record(path, file.readline(LONGEST_LINE)) for _ in range(2))
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}") from error
    version, again = header.get("report_version"), verdict.get("again")
    if version != REPORT_VERSION:
        raise ReportError(f"{path}: report_version: expected {REPORT_VERSION}, found {version!r:.40}")
    try:
        words = shlex.split(again) if isinstance(again, str) else []
    except ValueError:
        words = []
    if words[:1] != [DISTRIBUTION] or not {*words[1:2]} & {*REPEATED}:
        expected = f"{DISTRIBUTION} and one of {', '.join(REPEATED)}"
        raise ReportError(f"{path}: again: expected {expected}, found {again!r:.80}")
    if written := WRITING & {word.partition("=")[0] for word in words}:
        raise ReportError(f"{path}: again: expected a command that writes no file, found {', '.join(sorted(written))}")
    return words[1:]


def _record(path: Path, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ReportError(f"{path}: is not a report: expected what check, compare or diagnose write with --json")
    return record
