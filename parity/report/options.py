"""The options of every subcommand that compares: where to write the report besides the terminal.

A subcommand takes them as parameters, begins with `check_paths(json=json, …)`, before anything long, and ends with
`write_reports(report, json, junit, markdown, html)`:

    json: JsonFile = None, junit: JunitFile = None, markdown: MarkdownFile = None, html: HtmlFile = None
"""

from pathlib import Path
from typing import Annotated

import typer


def _file(option: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(f"--{option}", metavar="FILE", dir_okay=False, help=help)


JsonFile = Annotated[Path | None, _file("json", "Write every record as a line of JSON.")]
JunitFile = Annotated[Path | None, _file("junit", "Write JUnit XML: a test case for each layer and step.")]
MarkdownFile = Annotated[Path | None, _file("markdown", "Write a Markdown summary, for a CI job's page.")]
HtmlFile = Annotated[Path | None, _file("html", "Write one HTML file with figures; it opens offline.")]
