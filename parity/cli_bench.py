"""The subcommand `bench`: every op at released geometry, beside its floor and its peers. See `cli`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parity.exit_codes import EXIT_AGREES, EXIT_DISAGREES, EXIT_UNUSABLE

if TYPE_CHECKING:
    from optimized.bench.records import BenchReport


def _file(option: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(f"--{option}", metavar="FILE", dir_okay=False, help=help)


def bench(
    ops: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only these ops, such as 'index*'; may be repeated. [all]")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="TOKENS", help="Only rows with so many tokens; may be repeated. [all]"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes: 1 and 64 requests, 4k tokens.")] = False,
    only_steps: Annotated[bool, typer.Option("--no-ops", help="Whole steps only.")] = False,
    steps: Annotated[
        bool, typer.Option(help="Also whole steps of a four-layer slice, and text from it: 40 GB of weights.")
    ] = True,
    profile: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="REQUESTS", help="Instead, where a decode step of so many with 4k tokens spends its time."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 0,
    earlier: Annotated[
        Path | None, _file("from", "Show an earlier run's JSON in place of measuring; needs no GPU.")
    ] = None,
    json: Annotated[Path | None, _file("json", "Write every record as one JSON object.")] = None,
    markdown: Annotated[Path | None, _file("markdown", "Write what is printed, as Markdown.")] = None,
    plot: Annotated[Path | None, _file("plot", "Write the roofline as SVG.")] = None,
) -> None:
    """How far is each op from what the card allows, and from what others reach?

    Checks each op against its float64 truth before timing it; a red check prints no time. Times are cold and on random
    inputs; ceilings are measured in the same run.
    """
    from optimized.bench.json_file import read_json, write_json, write_text
    from optimized.bench.records import BenchError
    from optimized.bench.tables import report_lines, verdict_line
    from parity.report.write import check_paths

    check_paths(json=json, markdown=markdown, plot=plot)
    selecting = {"--ops": ops, "--batch": batch, "--quick": quick, "--no-ops": only_steps, "--profile": profile}
    if earlier and (given := [name for name, value in {**selecting, "--no-steps": not steps}.items() if value]):
        raise BenchError(f"--from {earlier}: an earlier run is shown as it is: leave {', '.join(given)} out")
    if profile:
        typer.echo("\n".join(_profiled(profile, seed)))
        return
    report = read_json(earlier) if earlier else _measured(ops or [], batch or [], quick, only_steps, steps, seed)
    lines = [verdict_line(report), *report_lines(report)]
    if json:
        write_json(json, report)
    if markdown:
        write_text(markdown, "\n\n".join(("\n".join(lines[:1]), "\n".join(lines[1:]))) + "\n")
    if plot:
        from parity.roofline import roofline

        write_text(plot, roofline(report))
    typer.echo("\n".join(lines))
    if not report.timed and not report.red:
        raise typer.Exit(EXIT_UNUSABLE)
    raise typer.Exit(EXIT_DISAGREES if report.red else EXIT_AGREES)


def _profiled(batch: int, seed: int) -> list[str]:
    """Raises: RunnerUnavailable without a GPU."""
    from optimized.bench.engine_steps import EngineSteps
    from optimized.bench.machine import obstacle
    from optimized.bench.profile import profile_lines
    from optimized.bench.slices import StepShape
    from parity.runners import RunnerUnavailable
    from reference.config import released

    if found := obstacle():
        raise RunnerUnavailable(f"bench: cannot run here: {found}")
    return profile_lines(EngineSteps(released(), seed).profile(StepShape(batch, 4096)))


def _measured(ops: list[str], batches: list[int], quick: bool, only_steps: bool, steps: bool, seed: int) -> BenchReport:
    """Raises: RunnerUnavailable without a GPU, BenchError if nothing was asked for that exists."""
    from optimized.bench.case import Sizes
    from optimized.bench.catalogue import QUICK, chosen_cases
    from optimized.bench.engine_steps import EngineSteps
    from optimized.bench.machine import obstacle
    from optimized.bench.measure import measure
    from optimized.bench.records import BenchError
    from parity.engine_check import first_difference
    from parity.report.terminal import progress_lines
    from parity.runners import RunnerUnavailable
    from reference.config import released

    config = released()
    cases = [] if only_steps else chosen_cases(config.text, QUICK if quick else Sizes(), ops, batches, config)
    if found := obstacle():
        raise RunnerUnavailable(f"bench: cannot run here: {found}")
    command = shlex.join(["note-parity", *sys.argv[1:]])
    with progress_lines() as progress:
        make_step = make_generation = None
        if steps:
            progress("the engine against the reference")
            difference = first_difference("cuda")
            if difference:
                raise BenchError(f"bench: no step is timed while the engine disagrees with the reference: {difference}")
            make_step = EngineSteps(config, seed)
            make_generation = make_step.generation
        return measure(config.text, cases, command, seed, progress, make_step, make_generation=make_generation)
