"""What a run of the benchmark found, as values that text, JSON and the plot are made from.

Times are microseconds. A row that has a time also has a green check: the type refuses anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from optimized.bench.floors import Bound, Ceilings
from optimized.bench.judge import Agreement
from optimized.bench.timing import Timing
from reference.errors import NoteError


class BenchError(NoteError):
    """A benchmark that was asked for wrongly, or a record that contradicts itself."""


@dataclass(frozen=True)
class Machine:
    """`packages` are the optional ones that were found, with their versions; `missing` those that were not."""

    card: str
    driver: str
    python: str
    torch: str
    triton: str
    packages: dict[str, str]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class PeerTime:
    """Another implementation on the same inputs: its time and error, or `why` it has none."""

    name: str
    us: float | None = None
    error: float | None = None
    timing: Timing | None = None
    why: str = ""

    def __post_init__(self) -> None:
        if (self.us is None) != bool(self.why):
            raise BenchError(f"peer {self.name}: expected a time or a reason, found us={self.us}, why={self.why!r}")


@dataclass(frozen=True)
class OpRow:
    """One op at one shape. `us` is None where the check is red or the op cannot run; `why` says so."""

    op: str
    shape: str
    backend: str
    bytes: float
    flops: float
    floor_us: float
    bound: Bound
    us: float | None = None
    timing: Timing | None = None
    agreement: Agreement | None = None
    peers: tuple[PeerTime, ...] = ()
    why: str = ""

    def __post_init__(self) -> None:
        if self.us is not None and not (self.agreement and self.agreement.is_green):
            raise BenchError(f"{self.op} {self.shape}: has a time although its check is not green")
        if (self.us is None) != bool(self.why):
            raise BenchError(f"{self.op} {self.shape}: expected a time or a reason, found us={self.us}, {self.why!r}")

    @property
    def is_red(self) -> bool:
        return self.agreement is not None and not self.agreement.is_green

    @property
    def best_peer(self) -> PeerTime | None:
        timed = [peer for peer in self.peers if peer.us is not None]
        return min(timed, key=lambda peer: peer.us or 0.0, default=None)

    @property
    def of_floor(self) -> float | None:
        """How many times its floor the op takes."""
        return self.us / self.floor_us if self.us is not None and self.floor_us else None

    @property
    def peer_of_ours(self) -> float | None:
        """Above 1: faster than the best peer."""
        peer = self.best_peer
        return peer.us / self.us if self.us and peer and peer.us is not None else None


@dataclass(frozen=True)
class StepRow:
    """A whole step of the slice: time on the GPU (sum of its kernels), wall time, and the host's own time."""

    name: str
    floor_us: float
    gpu_us: float | None = None
    wall_us: float | None = None
    host_us: float | None = None
    kernels: int | None = None
    slowest: tuple[tuple[str, float], ...] = ()
    why: str = ""

    def __post_init__(self) -> None:
        if (self.gpu_us is None) != bool(self.why):
            raise BenchError(f"{self.name}: expected a time or a reason, found gpu_us={self.gpu_us}, {self.why!r}")


@dataclass(frozen=True)
class BenchReport:
    """Everything one run found. `date` is ISO 8601 in UTC, `command` what repeats it."""

    machine: Machine
    ceilings: Ceilings
    date: str
    command: str
    rows: tuple[OpRow, ...] = ()
    steps: tuple[StepRow, ...] = ()

    @property
    def red(self) -> tuple[OpRow, ...]:
        return tuple(row for row in self.rows if row.is_red)

    @property
    def timed(self) -> int:
        return sum(row.us is not None for row in self.rows) + sum(step.gpu_us is not None for step in self.steps)

    @property
    def backends(self) -> dict[str, str]:
        """Which backend each op took."""
        return {row.op: row.backend for row in self.rows}
