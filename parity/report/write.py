"""Writes a report into files, each complete or not at all: under a temporary name beside it, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from parity.report.html import html_page
from parity.report.json_lines import json_lines
from parity.report.junit import junit_xml
from parity.report.markdown import markdown as markdown_text
from parity.report.records import Report, ReportError


def write_reports(
    report: Report,
    json: str | Path | None = None,
    junit: str | Path | None = None,
    markdown: str | Path | None = None,
    html: str | Path | None = None,
) -> None:
    """Write the formats that have a path. Existing files are replaced.

    Raises: ReportError, before anything is written, if a path is a folder, lies in none, or is named twice.
    """
    write_files(
        {
            "json": (json, lambda: json_lines(report)),
            "junit": (junit, lambda: junit_xml(report)),
            "markdown": (markdown, lambda: markdown_text(report)),
            "html": (html, lambda: html_page(report)),
        }
    )


def write_files(formats: Mapping[str, tuple[str | Path | None, Callable[[], str]]]) -> None:
    """For each format the path that was asked for, and what makes its text. All texts exist before one is written."""
    check_paths(**{name: path for name, (path, _) in formats.items()})
    paths = {name: Path(path) for name, (path, _) in formats.items() if path is not None}
    texts = {path: formats[name][1]() for name, path in paths.items()}
    for path, text in texts.items():
        write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Raises: ReportError for what the system says against it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ReportError(f"{path}: cannot be written: {error.strerror or error}") from error


def check_paths(**paths: str | Path | None) -> None:
    """What can be said of the files of a report before there is one, so that no long run ends in a wrong path.

    Raises: ReportError if a path is a folder, lies in none, or is named twice.
    """
    seen: dict[Path, str] = {}
    for name, path in ((name, Path(path)) for name, path in paths.items() if path is not None):
        check_path(f"--{name}", path)
        other = seen.setdefault(path.resolve(), name)
        if other != name:
            raise ReportError(f"--{name} {path}: --{other} writes the same file")


def check_path(said: str, path: Path) -> None:
    """Raises: ReportError, beginning with what names the file, if it is a folder or lies in none."""
    if path.is_dir():
        raise ReportError(f"{said} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise ReportError(f"{said} {path}: there is no folder {path.parent}")
