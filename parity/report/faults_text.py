"""The fault catalogue as text: the list, one entry, and the matrix of faults against the sweep."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from parity.faults.catalogue import SECTION_TITLES, SECTIONS, TOWER_SECTIONS, TOWER_TITLES
from parity.faults.fault import VISIBILITIES, Fault
from parity.faults.verify import Outcome


def print_catalogue(console: Console) -> None:
    """Every fault in one line, by section."""
    sections, titles = {**SECTIONS, **TOWER_SECTIONS}, {**SECTION_TITLES, **TOWER_TITLES}
    for section, faults in sections.items():
        table = Table(title=f"{section}  {titles[section]}", title_justify="left", box=None, pad_edge=False)
        for column in ("fault", "class", "what is done wrong"):
            table.add_column(column)
        for fault in faults:
            table.add_row(fault.id, fault.visibility, fault.says)
        console.print(table)
    total = sum(len(faults) for faults in sections.values())
    classes = ", ".join(f"{letter} {meaning}" for letter, meaning in VISIBILITIES.items())
    console.print(f"{total} faults. Classes: {classes}.")


def print_fault(fault: Fault, console: Console) -> None:
    """One entry, in full."""
    facts = {
        "what is done wrong": fault.says,
        "class": f"{fault.visibility}: {VISIBILITIES[fault.visibility]}",
        "first shows at": ", ".join(fault.first) or "nowhere",
        "visible when": fault.visible_when,
        "reported by": fault.source,
    }
    console.print(fault.id)
    for title, value in facts.items():
        console.print(textwrap.fill(value, 96, initial_indent=f"  {title}: ", subsequent_indent="    "))


def print_matrix(outcomes: Sequence[Outcome], console: Console) -> None:
    """First the verdict, then what is not as expected, then the counts by class."""
    wrong = [outcome for outcome in outcomes if not outcome.is_as_expected]
    detected = sum(outcome.is_detected for outcome in outcomes)
    console.print(
        f"{'UNEXPECTED' if wrong else 'AS EXPECTED'}  {len(outcomes)} faults tried, {detected} detected, "
        f"{len(outcomes) - detected} not; {len(wrong)} other than the catalogue says"
    )
    for outcome in wrong:
        seen = f"first at {outcome.first}" if outcome.first else "not detected"
        console.print(f"  {outcome.fault.id} (class {outcome.fault.visibility}): {seen}")
    table = Table(title="faults by class", title_justify="left", box=None, pad_edge=False)
    for column in ("class", "meaning", "tried", "detected", "as expected"):
        table.add_column(column, justify="left" if column in ("class", "meaning") else "right")
    for letter, meaning in VISIBILITIES.items():
        of_class = [outcome for outcome in outcomes if outcome.fault.visibility == letter]
        table.add_row(
            letter,
            meaning,
            str(len(of_class)),
            str(sum(outcome.is_detected for outcome in of_class)),
            str(sum(outcome.is_as_expected for outcome in of_class)),
        )
    console.print(table)
