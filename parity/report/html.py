"""A report as one HTML file: it opens offline, needs no script, prints well, and says in words and symbols what its
colours say. Figures are embedded; each has a text alternative.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parity.report.compare_text import end_to_end_lines
from parity.report.diagnosis_text import finding_lines
from parity.report.evidence import number, times
from parity.report.json_lines import versions
from parity.report.plots import Picture, drift_pictures, pictures
from parity.report.records import Report
from parity.report.tables import choice_lines, closing_lines

if TYPE_CHECKING:
    from jinja2 import Environment

    from parity.drift import Drift

TEMPLATES = Path(__file__).parent / "templates"


def html_page(report: Report) -> str:
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            findings=list(finding_lines(report)),
            notes=[*end_to_end_lines(report.detail), *choice_lines(report)],
            closing=closing_lines(report, verbose=True),
            flips=[choice for choice in report.choices if choice.is_different],
            has_outputs=any(row.arrives or row.added for row in report.layers),
            pictures=pictures(report),
            versions=versions(),
        )
    )


def drift_page(drift: Drift, model: str) -> str:
    """`model` says whose rounding was measured."""
    return (
        _environment()
        .get_template("drift.html")
        .render(drift=drift, model=model, pictures=drift_pictures(drift), versions=versions())
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {"number": number, "times": times, "data_uri": _data_uri}
    environment.filters.update(filters)
    return environment


def _data_uri(picture: Picture) -> str:
    """An image of its own, so that the ids inside two figures cannot meet."""
    return "data:image/svg+xml;base64," + b64encode(picture.svg.encode()).decode()
