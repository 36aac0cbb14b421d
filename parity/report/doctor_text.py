"""What `note-parity doctor` found, as text: one line that says what can run, then the facts, kind by kind."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from rich.console import Console

from optimized.device import Choice
from parity.doctor import Examination
from parity.report.tables import plain_table, print_line, print_table


def print_examination(found: Examination, console: Console) -> None:
    cards = ", ".join(card.name for card in found.cards) or "no GPU: kernels run interpreted or as their torch twins"
    print_line(
        f"note-parity {found.distribution_version}, Python {found.python} on {found.system}; {cards}",
        console,
    )
    table = plain_table("Packages", ("package", "version", "needed for"))
    for dependency in found.dependencies:
        table.add_row(dependency.name, dependency.version or "not installed", dependency.needed_for)
    print_table(table, console)
    if found.cards:
        table = plain_table("GPUs", ("card", "compute capability"), ("memory GiB", "multiprocessors"))
        for card in found.cards:
            table.add_row(
                card.name, card.compute_capability, f"{card.memory_bytes / 2**30:.1f}", str(card.multiprocessors)
            )
        print_table(table, console)
    for device, choices in found.choices.items():
        for backend, reason, ops in _grouped(choices):
            print_line(f"Ops on {device}: {backend} ({reason})", console)
            print_line(fill(", ".join(ops), console.width, initial_indent="  ", subsequent_indent="  "), console)
    table = plain_table("Optional kernels", ("package", "for", "state", "detail"))
    for package in found.packages:
        table.add_row(package.distribution, package.use, "works" if package.works else "not used", package.detail)
    print_table(table, console)


def _grouped(choices: Sequence[Choice]) -> list[tuple[str, str, list[str]]]:
    """Ops of the same backend for the same reason on one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        groups.setdefault((choice.backend, choice.reason), []).append(choice.op)
    return [(backend, reason, ops) for (backend, reason), ops in groups.items()]
