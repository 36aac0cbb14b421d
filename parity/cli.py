"""The `note-parity` command: one function a subcommand, which parses, calls and reports.

Exit codes, the same for every subcommand:

    0  agrees
    1  disagrees
    2  wrong use, unreadable input, nothing compared, or a bug (then with a traceback)
    3  could not run here

A subcommand is a function below with `@app.command()`. It imports what it needs inside, so that `--help` is fast, and
raises the named errors of whatever it calls: the group turns them into one message on stderr and an exit code. One that
compares ends with `raise typer.Exit(EXIT_AGREES)` or `typer.Exit(EXIT_DISAGREES)`.
"""

import errno
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from parity import DISTRIBUTION
from parity.cli_again import again
from parity.cli_bench import bench
from parity.cli_generate import generate
from parity.cli_propose import propose
from parity.cli_tools import parse_tools
from parity.cli_traces import compare, diagnose, drift, golden, validate
from parity.errors import ParityError
from parity.exit_codes import EXIT_AGREES, EXIT_COULD_NOT_RUN, EXIT_DISAGREES, EXIT_UNUSABLE
from parity.origin import check_origin
from parity.report.options import HtmlFile, JsonFile, JunitFile, MarkdownFile


class _Commands(TyperGroup):
    """Reports every refusal in the same way, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        from reference.errors import NoteError

        try:
            return super().invoke(ctx)
        except (NoteError, ParityError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(_exit_code(error)) from error
        except OSError as error:
            # A pipe that was closed (`| head`) is the shell's business; what names no file is no mistake of a user.
            if error.errno == errno.EPIPE or error.filename is None:
                raise
            typer.echo(f"error: {error.filename}: {error.strerror}", err=True)
            raise typer.Exit(EXIT_UNUSABLE) from error


def _exit_code(error: Exception) -> int:
    from parity.runners import NotSupportedHere, RunnerUnavailable
    from reference.errors import MissingPackageError

    could_not_run = isinstance(error, NotSupportedHere | RunnerUnavailable | MissingPackageError)
    return EXIT_COULD_NOT_RUN if could_not_run else EXIT_UNUSABLE


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 agrees, 1 disagrees, 2 wrong use or unreadable input or nothing compared, 3 cannot run here.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{DISTRIBUTION} {version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def note_parity(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """The oracle for Dots3 NOTE: does an implementation agree, and if not, where and why."""


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")]


@app.command()
def inspect(
    target: Annotated[
        str,
        typer.Argument(metavar="released|tiny|CONFIG.json|CHECKPOINT", help="What to look at."),
    ],
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="TOKENS", help="Length to plan the cache for; may be repeated. [4096 32768 131072 524288]"
        ),
    ] = None,
    drafts: Annotated[int, typer.Option(min=0, metavar="TOKENS", help="Draft tokens that may be in flight.")] = 4,
    json: JsonOption = False,
) -> None:
    """Sizes of a model: layers, parameters, tensors, cache.

    A checkpoint folder is verified from its configuration, its index and the headers of its files; every problem is
    listed. A folder that is called `released` or `tiny` is written `./released`.
    """
    from parity.inspect_model import inspect_model
    from parity.report.terminal import print_inspection, print_json

    inspection = inspect_model(target, context, drafts)
    if json:
        print_json(inspection)
    else:
        print_inspection(inspection)


@app.command()
def synthetic(
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write.")],
    config: Annotated[
        str,
        typer.Option(
            metavar="tiny|tiny-note|released|CONFIG.json",
            help="The model's sizes; tiny-note has towers, and a tokenizer for `note-parity generate`.",
        ),
    ] = "tiny",
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes on every machine.")] = 0,
) -> None:
    """Write a checkpoint of synthetic weights in the released layout: real shapes and statistics, no training."""
    from reference.checkpoint import write_synthetic
    from reference.checkpoint.synthetic_chat import has_room_for_text, smallest_vocabulary
    from reference.config import NoteConfig, released, tiny
    from reference.model_tiny import tiny_note

    known = {"tiny": tiny, "tiny-note": tiny_note, "released": released}
    made = known[config]() if config in known else NoteConfig.from_json(config)
    write_synthetic(target, made, seed)
    without = f"; no tokenizer: a vocabulary of {made.text.vocab_size} has no room for {smallest_vocabulary()} tokens"
    typer.echo(f"wrote {target}{'' if has_room_for_text(made) else without}")


@app.command("slice")
def slice_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="The folder to cut from.")],
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write.")],
    layer: Annotated[
        list[int],
        typer.Option(min=0, metavar="NUMBER", help="A layer to keep; may be repeated. Renumbered in this order."),
    ],
    experts: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="Keep the first so many experts. [all]")
    ] = None,
    mtp: Annotated[bool, typer.Option(help="Keep the draft layer.")] = True,
) -> None:
    """Cut some layers and experts out of a checkpoint, router rows and bias included, bytes unchanged.

    Layer 0 is dense and full, 1 full with experts, 2 sliding with experts: these and the draft layer show all there is.
    """
    from reference.checkpoint import CheckpointFolder, cut_slice

    kept = None if experts is None else range(experts)
    cut_slice(CheckpointFolder.open(source), target, layer, kept, with_mtp=mtp)
    typer.echo(f"wrote {target}")


@app.command()
def check(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint folder; without one, a tiny synthetic one."),
    ] = None,
    tower: Annotated[Literal["text", "vision", "audio"], typer.Option(help="Which part of the model.")] = "text",
    multimodal: Annotated[
        bool, typer.Option("--multimodal", help="The whole model: files, towers, scatter, text, generation.")
    ] = False,
    candidate: Annotated[
        Literal["transformers", "optimized"], typer.Option(help="What is compared with the reference.")
    ] = "transformers",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the optimized implementation runs.")] = "cpu",
    backend: Annotated[
        Literal["torch", "triton"] | None, typer.Option(help="What its ops take; by itself, see `note-parity doctor`.")
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Decode, verification and drafts of the optimized one from recordings.")
    ] = False,
    level: Annotated[
        list[str] | None,
        typer.Option(metavar="LEVEL", help="exact, float32 or bfloat16; may be repeated. [all three]"),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="LINE", help="Run only this, as reports print it; of towers also file:PATH.")
    ] = None,
    workload_seed: Annotated[
        int | None, typer.Option(metavar="INTEGER", help="Seed of what --workload is fed with. [that of --seed]")
    ] = None,
    drawn: Annotated[int, typer.Option(min=0, metavar="COUNT", help="Random workloads beside the boundary ones.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the tiny checkpoint and of random workloads.")] = 0,
    verbose: Annotated[bool, typer.Option(help="Every tensor, not only the worst of each layer.")] = False,
    json: JsonFile = None,
    junit: JunitFile = None,
    markdown: MarkdownFile = None,
    html: HtmlFile = None,
) -> None:
    """Does an implementation agree with the reference on the same checkpoint: transformers, or the optimized one?

    Runs prefill, chunks, decode, drafts and their rollback at three levels: exact (all rounding promoted to float64),
    float32 and bfloat16, the latter two within a noise floor measured for the same inputs.
    """
    from parity.check import LEVELS
    from parity.check_command import CheckOptions, run_check
    from parity.report.check_text import print_check_report
    from parity.report.terminal import progress_lines, terminal
    from parity.report.write import check_paths, write_reports
    from parity.workload import WorkloadError

    levels = [known for known in LEVELS if known in (level or LEVELS)]
    if len(levels) != len(level or LEVELS):
        raise WorkloadError(f"--level must be one of {', '.join(LEVELS)}, found {', '.join(level or [])}")
    if multimodal and tower != "text":
        raise WorkloadError(f"--multimodal is the whole model: leave --tower {tower} out")
    part = "multimodal" if multimodal else tower
    if graphs and part not in ("text", "multimodal"):
        raise WorkloadError(f"--graphs records steps of the text model: leave it or --tower {tower} out")
    for option, is_given in (("device cuda", device == "cuda"), ("backend", backend), ("graphs", graphs)):
        if is_given and candidate != "optimized":
            raise WorkloadError(f"--{option} is for the optimized implementation: add --candidate optimized")
    if workload is not None and drawn:
        raise WorkloadError("--workload runs that one alone: leave --drawn out")
    if workload is None and workload_seed is not None:
        raise WorkloadError("--workload-seed is of one workload: add --workload, or leave it out")
    check_paths(json=json, junit=junit, markdown=markdown, html=html)
    options = CheckOptions(part, candidate, folder, workload, workload_seed, drawn, seed, device, backend, graphs)
    with progress_lines() as progress:
        found, report = run_check(options, levels, progress)
    write_reports(report, json, junit, markdown, html)
    print_check_report(report, terminal(), verbose)
    if not found.compared:
        raise typer.Exit(EXIT_UNUSABLE)
    raise typer.Exit(EXIT_DISAGREES if found.first_different else EXIT_AGREES)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """What runs here and what does not: versions, the GPU, the backend of every op and why, optional packages.

    Each optional kernel that is found is called once on a small case and compared.
    """
    from parity.doctor import examine
    from parity.report.doctor_text import print_examination
    from parity.report.terminal import print_json, terminal

    found = examine()
    if json:
        print_json(found)
    else:
        print_examination(found, terminal())


@app.command()
def faults(
    fault: Annotated[str | None, typer.Argument(metavar="FAULT", help="Explain this one.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Apply each of the text model to the reference and run the sweep.")
    ] = False,
) -> None:
    """The catalogue of known porting mistakes: list it, explain one, or run it against the harness."""
    from parity.faults.catalogue import CATALOGUE, UnknownFaultError, fault_named
    from parity.faults.verify import verify_tiny
    from parity.report.faults_text import print_catalogue, print_fault, print_matrix
    from parity.report.terminal import progress_lines, terminal

    chosen = [fault_named(fault)] if fault else list(CATALOGUE.values())
    if verify and chosen[0].id not in CATALOGUE:
        raise UnknownFaultError(f"--verify runs faults of the text model, and {fault} is one of a tower or its files")
    if verify:
        with progress_lines() as progress:
            outcomes = verify_tiny(chosen, progress)
        print_matrix(outcomes, terminal())
        is_expected = all(outcome.is_as_expected for outcome in outcomes)
        raise typer.Exit(EXIT_AGREES if is_expected else EXIT_DISAGREES)
    if fault:
        print_fault(chosen[0], terminal())
    else:
        print_catalogue(terminal())


for command in (golden, validate, compare, propose, diagnose, again, drift, bench, generate, parse_tools):
    app.command()(command)


def main() -> None:
    """Entry point. A bug must not look like a disagreement, so it exits with 2 as well."""
    try:
        check_origin("reference")
        app(prog_name=DISTRIBUTION)
    except Exception:
        traceback.print_exc()
        sys.exit(EXIT_UNUSABLE)


if __name__ == "__main__":
    main()
