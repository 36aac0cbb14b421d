"""The subcommand `propose`: the mapping of a dump whose names or layouts are not the schema's. See `cli`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from parity.cli_traces import ExpectedArgument
from parity.exit_codes import EXIT_UNUSABLE


def propose(
    expected: ExpectedArgument,
    actual: Annotated[
        Path, typer.Argument(metavar="ACTUAL", help="A dump folder (docs/dumps.md) of the same run, under any names.")
    ],
    target: Annotated[
        Path | None, typer.Argument(metavar="[MAPPING.json]", help="File to write; without it nothing is written.")
    ] = None,
) -> None:
    """Which mapping makes the difference vanish? Tries other names, sums, layer numbers and lane orders on the values.

    Names that no mapping explains keep their own name; what is wrong with them is for compare to say.
    """
    from parity.golden_file import Golden
    from parity.golden_trace import golden_trace
    from parity.manifest import DumpError
    from parity.mapping import mapping_json
    from parity.mapping_hint import evidence_line
    from parity.propose import propose_mapping
    from parity.report.write import check_path, write_text
    from parity.sides import is_golden
    from parity.trace_file import open_dump, open_trace

    if target is not None:
        check_path("MAPPING.json", target)
        if target.exists():
            raise DumpError(f"{target}: exists already; name another file or remove it")
    known = golden_trace(Golden.open(expected)) if is_golden(expected) else open_trace(expected)
    dump = open_dump(actual, any_names=True).trace
    proposal = propose_mapping(known, dump)
    if proposal.prefix:
        typer.echo(f"names without {proposal.prefix!r} are the schema's, or are looked for so")
    for evidence in proposal.evidence:
        typer.echo(evidence_line(evidence))
    if not proposal.explained:
        typer.echo(
            f"NOTHING ALIKE  no tensor of the dump, under any name, explains one of {len(proposal.unexplained)} names: "
            f"other tokens or weights, or a layout that was not tried"
        )
        raise typer.Exit(EXIT_UNUSABLE)
    if proposal.mapping is None:
        typer.echo("no mapping is proposed: none that was tried brings another tensor closer than the one of that name")
    elif target is not None:
        write_text(target, mapping_json(proposal.mapping))
        words = shlex.join(["note-parity", "compare", expected, str(actual), "--mapping", str(target)])
        typer.echo(f"wrote {target}; next: {words}")
