"""What is wrong with a checkpoint, one fact a line: file, tensor, what was found, what would be right.

Checks collect these instead of stopping at the first, so one error shows the whole extent of the damage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from reference.errors import CheckpointError

# A folder of another model has tens of thousands of unexpected names; nobody reads more than this.
MAX_LINES = 100


@dataclass(frozen=True)
class Problem:
    """`kind` is a class of refusals (`missing`, `wrong shape`, ...); a field that does not apply is empty."""

    kind: str
    file: str
    tensor: str
    found: str
    expected: str

    def __str__(self) -> str:
        where = ": ".join(_one_line(part) for part in (self.file, self.tensor) if part)
        return f"{self.kind}: {where}: found {self.found}, expected {self.expected}"


def _one_line(name: str) -> str:
    """Names come from files that nobody has vouched for: no line breaks, no pages of text."""
    return name if name.isprintable() and len(name) <= 200 else ascii(name[:200])


def refusal(subject: object, problems: Sequence[Problem]) -> CheckpointError:
    """One error that lists all problems of `subject`, a folder or a file."""
    lines = [f"{subject}: {len(problems)} problem{'s' * (len(problems) != 1)}"]
    lines += [f"  {problem}" for problem in problems[:MAX_LINES]]
    if len(problems) > MAX_LINES:
        kinds = sorted({problem.kind for problem in problems[MAX_LINES:]})
        lines.append(f"  and {len(problems) - MAX_LINES} more ({', '.join(kinds)})")
    return CheckpointError("\n".join(lines))
