"""The subcommand `propose`: the mapping of a dump whose names or layouts are not the schema's. See `cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parity.cli_traces import ExpectedArgument


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
    from parity.sides import is_golden
    from parity.trace_file import open_dump, open_trace

    if target is not None and target.exists():
        raise DumpError(f"{target}: exists already; name another file or remove it")
    known = golden_trace(Golden.open(expected)) if is_golden(expected) else open_trace(expected)
    dump = open_dump(actual, any_names=True).trace
    proposal = propose_mapping(known, dump)
    for evidence in proposal.evidence:
        typer.echo(evidence_line(evidence))
    if proposal.mapping is None:
        typer.echo("no mapping is proposed: none that was tried brings another tensor closer than the one of that name")
    elif target is not None:
        target.write_text(mapping_json(proposal.mapping), encoding="utf-8")
        typer.echo(f"wrote {target}; next: note-parity compare {expected} {actual} --mapping {target}")
