"""The subcommands on goldens and dumps: `golden`, `validate`, `compare`, `diagnose`, `drift`. See `cli`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from parity.exit_codes import EXIT_AGREES, EXIT_DISAGREES, EXIT_UNUSABLE
from parity.report.options import HtmlFile, JsonFile, JunitFile, MarkdownFile

GoldenArgument = Annotated[
    str, typer.Argument(metavar="GOLDEN", help="A golden folder, or `tiny`, which ships with the package.")
]
ExpectedArgument = Annotated[
    str, typer.Argument(metavar="EXPECTED", help="A golden folder, `tiny`, which ships, or a dump of another run.")
]
ActualArgument = Annotated[
    Path, typer.Argument(metavar="ACTUAL", help="A dump: our folder (docs/dumps.md), or another tool's with --mapping.")
]
DumpArgument = Annotated[Path, typer.Argument(metavar="DUMP", help="A dump folder; how to write one: docs/dumps.md.")]
MappingOption = Annotated[
    str | None,
    typer.Option(metavar="FILE|NAME", help="Names and layouts of ACTUAL: transformers, sglang, msprobe, llama_cpp."),
]
ExpectedMappingOption = Annotated[
    str | None, typer.Option(metavar="FILE|NAME", help="The same of EXPECTED, where it is a dump too.")
]
ConfigOption = Annotated[
    str | None,
    typer.Option(metavar="tiny|released|CONFIG.json", help="The model's sizes. [config.json of the dump]"),
]
DifferentRunOption = Annotated[
    bool, typer.Option("--allow-different-run", help="Compare although config, weights, inputs or workload differ.")
]
CheckpointOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="The golden's weights, if they are not synthetic.")
]
VerboseOption = Annotated[bool, typer.Option(help="Every tensor.")]


def golden(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint folder; may exceed memory.")],
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="The golden to write, or to go on with.")],
    workload: Annotated[str, typer.Option(metavar="LINE", help="What to run, such as 'p:a20 d:a v:a4 t:a2 d:a'.")],
    seed: Annotated[int, typer.Option(help="Seed of the tokens.")] = 0,
    name: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Tensors to keep; may be repeated.")] = None,
    clear_of_ties: Annotated[
        bool,
        typer.Option("--clear-of-ties", help="Choose tokens by which no choice is near a tie; takes the whole model."),
    ] = False,
) -> None:
    """Record truths, noise floors and margins of a checkpoint, layer by layer; an interrupted export goes on."""
    from parity.clear_tokens import clear_workload
    from parity.golden import make_golden, require_exportable
    from parity.report.terminal import progress_lines
    from parity.workload import Workload

    run, names = Workload.parse(workload, seed), tuple(name or ("*",))
    with progress_lines() as progress:
        if clear_of_ties:
            require_exportable(checkpoint, target, run, names=names)
            run = clear_workload(checkpoint, run, progress)
        made = make_golden(checkpoint, target, run, names=names, progress=progress)
    typer.echo(f"wrote {target}: {len(made.names())} tensors")


def validate(dump: DumpArgument, config: ConfigOption = None) -> None:
    """Is a dump well formed, complete and plausible on its own? Lists what is not."""
    from parity.sides import config_named
    from parity.validate import validate_dump

    report = validate_dump(dump, config_named(config))
    typer.echo(
        f"{'VALID' if report.is_valid else 'INVALID'}  {report.path}: {report.tensors:,} tensors, "
        f"{report.elements:,} elements, {report.statistics:,} by statistics only, {report.steps} steps, "
        f"{len(report.requests)} requests"
    )
    for finding in report.findings:
        names = f" {', '.join(finding.names[:4])}{', …' if len(finding.names) > 4 else ''}:" if finding.names else ""
        typer.echo(f"{finding.severity}: {finding.kind}:{names} {finding.message}")
    raise typer.Exit(EXIT_AGREES if report.is_valid else EXIT_UNUSABLE)


def compare(
    expected: ExpectedArgument,
    actual: ActualArgument,
    mapping: MappingOption = None,
    expected_mapping: ExpectedMappingOption = None,
    config: ConfigOption = None,
    allow_different_run: DifferentRunOption = False,
    verbose: VerboseOption = False,
    json: JsonFile = None,
    junit: JunitFile = None,
    markdown: MarkdownFile = None,
    html: HtmlFile = None,
) -> None:
    """Does a recorded run agree with a golden, or with another recorded run? Runs no model.

    A golden has measured noise: AGREES or DIFFERENT. Between two dumps errors are close within a derived bound, or not.
    Where a dump has only sums and samples (llama.cpp, statistics), nothing can be proved equal: PARTIAL, exit code 0.
    """
    from parity.report.compare_text import print_comparison
    from parity.report.from_findings import layer_kinds, report_of_comparison
    from parity.report.terminal import terminal
    from parity.report.write import check_paths, write_reports
    from parity.sides import Options, compare_sides, is_golden

    check_paths(json=json, junit=junit, markdown=markdown, html=html)
    options = Options(mapping, expected_mapping, config, allow_different_run)
    found = compare_sides(expected, actual, options, with_detail=bool(json or html))
    report = report_of_comparison(
        found.comparison,
        found.workload,
        found.level,
        expected,
        str(actual),
        layer_kinds(found.config) if found.config else None,
        found.detail,
        options.words,
        found.notes,
        can_be_diagnosed=is_golden(expected),
        weights=" --checkpoint CHECKPOINT" if found.needs_checkpoint else "",
    )
    write_reports(report, json, junit, markdown, html)
    print_comparison(report, terminal(), verbose)
    if report.verdict == "nothing compared":
        raise typer.Exit(EXIT_UNUSABLE)
    raise typer.Exit(EXIT_DISAGREES if report.verdict == "different" else EXIT_AGREES)


def diagnose(
    expected: GoldenArgument,
    actual: ActualArgument,
    checkpoint: CheckpointOption = None,
    mapping: MappingOption = None,
    allow_different_run: DifferentRunOption = False,
    verbose: VerboseOption = False,
    json: JsonFile = None,
    junit: JunitFile = None,
    markdown: MarkdownFile = None,
    html: HtmlFile = None,
) -> None:
    """Which known mistake explains the difference? Applies each to the reference and sees whether it vanishes."""
    from dataclasses import replace

    from parity.compare import compare as compared
    from parity.diagnose import diagnose as diagnosed
    from parity.faults.catalogue import CATALOGUE
    from parity.golden_file import Golden
    from parity.golden_reference import reference_of
    from parity.golden_trace import golden_trace
    from parity.manifest import DumpError
    from parity.mapping_hint import mapping_hints
    from parity.report.diagnosis_text import print_diagnosis
    from parity.report.from_findings import layer_kinds, report_of_diagnosis
    from parity.report.terminal import progress_lines, terminal
    from parity.report.write import check_paths, write_reports
    from parity.sides import Options, detail_of, inputs_note, not_recorded, recorded_for

    check_paths(json=json, junit=junit, markdown=markdown, html=html)
    golden = Golden.open(expected)
    options = Options(mapping, allow_different_run=allow_different_run)
    recorded, notes = recorded_for(golden, actual, options)
    if recorded.statistics and not recorded.trace.names():
        raise DumpError(
            f"{actual}: has sums and samples only, and a diagnosis needs values; the first tensor that differs is "
            f"found by {shlex.join(['note-parity', 'compare', str(expected), str(actual)])}{options.words}"
        )
    reference = reference_of(golden, checkpoint)
    with progress_lines() as progress:
        diagnosis = diagnosed(
            reference, recorded.trace, golden.dtype, golden.workload, CATALOGUE.values(), progress=progress
        )
    if (json or html) and diagnosis.before.is_different:
        # What pictures set beside each other: how error arrives at a layer, and what the layer adds to it.
        views = compared(reference, recorded.trace, golden.dtype, golden.workload)
        before = replace(diagnosis.before, probes=(*diagnosis.before.probes, *views.probes))
        diagnosis = replace(diagnosis, before=before)
    skipped = (*not_recorded(golden, recorded.trace), *diagnosis.before.skipped)
    diagnosis = replace(diagnosis, before=replace(diagnosis.before, skipped=skipped))
    if recorded.statistics:
        notes = (*notes, f"{len(recorded.statistics)} tensors by sums and samples only: a diagnosis does not use them")
    if diagnosis.verdict == "unknown":
        notes += inputs_note(diagnosis.before)
        notes += mapping_hints(golden_trace(golden), recorded.trace, diagnosis.before)
    report = report_of_diagnosis(
        diagnosis,
        golden.workload,
        golden.record.dtype,
        expected,
        str(actual),
        CATALOGUE,
        layer_kinds(reference.config.text),
        detail_of(golden_trace(golden), recorded.trace, bool(json or html)),
        options.words,
        (*notes, *recorded.skipped),
        f" --checkpoint {shlex.quote(str(checkpoint))}" if checkpoint else "",
    )
    write_reports(report, json, junit, markdown, html)
    print_diagnosis(report, terminal(), verbose)
    if not diagnosis.before.compared:
        raise typer.Exit(EXIT_UNUSABLE)
    raise typer.Exit(EXIT_AGREES if diagnosis.verdict == "agrees" else EXIT_DISAGREES)


def drift(
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """How rounding grows over depth and length in the tiny model: what arrives at each layer, and what it adds."""
    from parity.drift import drift as measured
    from parity.report.drift_text import print_drift, write_drift
    from parity.report.terminal import progress_lines, terminal
    from parity.report.write import check_paths
    from parity.runners.reference import ReferenceRunner
    from reference.checkpoint import synthetic_tensors
    from reference.config import tiny

    check_paths(json=json, html=html)
    config = tiny()
    weights = dict(synthetic_tensors(config, seed))
    with progress_lines() as progress:
        found = measured(lambda dtype: ReferenceRunner(config, weights, dtype), seed=seed, progress=progress)
    print_drift(found, terminal())
    write_drift(found, f"tiny, seed {seed}", json, html)
