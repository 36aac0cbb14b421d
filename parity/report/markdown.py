"""A report as Markdown, for the summary page of a CI job: verdict, tables, commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parity.report.compare_text import end_to_end_lines
from parity.report.diagnosis_text import finding_lines
from parity.report.evidence import number, times
from parity.report.records import Report
from parity.report.tables import SHOWN_ROWS, choice_lines, command_lines, more_than_shown, omission_lines

_MARKS = {"agrees": "✔", "different": "✘", "partial": "◐", "nothing compared": "∅"}


def markdown(report: Report) -> str:
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"## {_MARKS[report.verdict]} note-parity {report.command}: {report.verdict}"
    yield ""
    yield _text(report.headline)
    yield ""
    for line in finding_lines(report):
        yield f"- {_text(line.strip())}"
    yield from _section(
        "Levels",
        ("level", "verdict", "worst tensor", "error of limit", "tensors", "bitwise equal, %"),
        [
            (
                level.level,
                level.verdict,
                _code(level.worst.tensor) if level.worst else "",
                level.worst.amount if level.worst else "",
                f"{level.tensors:,}",
                f"{level.bitwise_percent:.1f}",
            )
            for level in report.levels
        ],
    )
    yield from _section(
        f"Outside the noise, in the order of computation{more_than_shown(report.blamed)}",
        ("tensor", "view", "relative error", "error of limit", "first bad row"),
        [
            (_code(row.tensor), row.view, number(row.error), row.amount, str(row.first_bad or ""))
            for row in report.blamed[:SHOWN_ROWS]
        ],
    )
    yield from _section(
        f"By sums and samples{more_than_shown(report.partly_compared)}",
        ("tensor", "request", "step", "verdict", "numbers", "distance of limit"),
        [
            (_code(one.tensor), one.request, f"{one.action}", one.verdict, f"{one.numbers}", one.amount)
            for one in report.partly_compared[:SHOWN_ROWS]
        ],
    )
    if report.fault:
        yield from _section(
            "Hypotheses, applied to the reference",
            ("fault", "verdict", "residual of limit", "outside noise"),
            [
                ("(none)", "as found", times(report.fault.residual_before), f"{report.fault.blamed_before:,}"),
                *(
                    (_code(tried.name), tried.verdict, times(tried.residual), f"{tried.blamed:,}")
                    for tried in (*report.fault.explanations, *report.fault.closest)
                ),
            ],
        )
    yield from _section(
        "Layers",
        ("level", "layer", "arrives (cascade)", "added (isolated)", "worst tensor", "error of limit", "outside noise"),
        [
            (
                row.level,
                report.layer_title(row.layer),
                number(row.arrives.error) if row.arrives else "",
                number(row.added.error) if row.added else "",
                _code(row.worst.tensor),
                row.worst.amount,
                f"{row.different:,}" if row.different else "",
            )
            for row in report.layers
        ],
        is_folded=True,
    )
    yield ""
    for line in (*end_to_end_lines(report.detail), *choice_lines(report), *omission_lines(report)):
        yield f"- {_text(line)}"
    if commands := list(command_lines(report)):
        # Longer than any run of backticks inside, so that a foreign name cannot end the block.
        fence = "`" * (3 + max(line.count("`") for line in commands))
        yield from ("", fence, *commands, fence)


def _section(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], is_folded: bool = False
) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield f"<details><summary>{title}</summary>" if is_folded else f"### {title}"
    yield ""
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(_text(cell) if not cell.startswith('`') else cell for cell in row)} |"
    if is_folded:
        yield ""
        yield "</details>"


def _code(text: str) -> str:
    """A name, whatever a foreign dump called it."""
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"


def _text(text: str) -> str:
    """Characters that would be read as markup are written as what they are."""
    for special in "\\`*_<>|[]":
        text = text.replace(special, f"\\{special}")
    return text.replace("\n", " ")
