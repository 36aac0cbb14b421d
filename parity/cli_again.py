"""The subcommand `again`: what a report names, repeated. See `cli`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from parity import DISTRIBUTION


def again(
    context: typer.Context,
    report: Annotated[
        Path, typer.Argument(metavar="REPORT.json", help="What check, compare or diagnose wrote with --json.")
    ],
) -> None:
    """Repeat what a report names: of a check the smallest run that differs, else the same comparison.

    Paths are those of the report: run it in the same folder. The exit code is that of what is repeated.
    """
    from parity.report.replay import words_to_repeat

    words = words_to_repeat(report)
    typer.echo(shlex.join([DISTRIBUTION, *words]))
    assert context.parent is not None
    raise typer.Exit(context.parent.command.main(words, DISTRIBUTION, standalone_mode=False))
