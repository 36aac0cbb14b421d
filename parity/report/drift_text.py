"""Drift as text and as files: for every dtype and length, what arrives behind each layer beside what the layer adds."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from parity.drift import Drift
from parity.report.evidence import number
from parity.report.html import drift_page
from parity.report.json_lines import drift_lines
from parity.report.tables import plain_table, print_line, print_table
from parity.report.write import write_files


def print_drift(drift: Drift, console: Console) -> None:
    """First line: the logits at the greatest length. Then a table for each dtype, two columns a length."""
    by_dtype = {row.dtype: row for row in drift.rows if row.tensor == "logits"}
    ends = ", ".join(f"{row.dtype} {number(row.cascade)}" for row in by_dtype.values())
    longest = max(row.length for row in drift.rows)
    print_line(f"DRIFT  relative error of the logits at {longest:,} tokens: {ends}", console)
    for dtype in by_dtype:
        rows = [row for row in drift.rows if row.dtype == dtype]
        lengths = list(dict.fromkeys(row.length for row in rows))
        columns = [f"{length:,}\n{view}" for length in lengths for view in ("arrives", "adds")]
        table = plain_table(f"{dtype}: relative error behind each layer, by number of tokens", ("tensor",), columns)
        for tensor in dict.fromkeys(row.tensor for row in rows):
            found = {row.length: row for row in rows if row.tensor == tensor}
            errors = [error for length in lengths for error in (found[length].cascade, found[length].isolated)]
            table.add_row(tensor, *(number(error) for error in errors))
        print_table(table, console)
    print_line(
        f"choices: {drift.exchanged:,} of {drift.choice_rows:,} rows differ by rounding, and are replayed in the truth",
        console,
    )


def write_drift(drift: Drift, model: str, json: str | Path | None = None, html: str | Path | None = None) -> None:
    """As `write_reports`. `model` says whose rounding it is. Raises: ReportError."""
    write_files({"json": (json, lambda: drift_lines(drift)), "html": (html, lambda: drift_page(drift, model))})
