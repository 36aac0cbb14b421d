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
class GenerationRow:
    """From prompts to the last token on the wall clock, `requests` at once, `drafts` proposed to each a round.

    `prompt_us`: until all first tokens are known; with drafts the draft layer has then run over the prompts too.
    `rounds_us`: all of the `rounds` that bring the other `tokens`, of all requests together. A round is one step, with
    drafts also the proposals. `plain_us`: a round without drafts, in the same run.
    """

    name: str
    requests: int
    drafts: int
    prompt_floor_us: float
    round_floor_us: float
    prompt_us: float | None = None
    rounds_us: float | None = None
    rounds: int = 0
    tokens: int = 0
    plain_us: float | None = None
    why: str = ""

    def __post_init__(self) -> None:
        if (self.rounds_us is None) != bool(self.why) or (self.prompt_us is None) != bool(self.why):
            raise BenchError(f"{self.name}: expected times or a reason, found rounds_us={self.rounds_us}, {self.why!r}")
        if not self.why and not self.requests * self.rounds <= self.tokens <= self.most_tokens:
            raise BenchError(
                f"{self.name}: {self.rounds} rounds of {self.requests} requests bring {self.requests * self.rounds} to "
                f"{self.most_tokens} tokens, found {self.tokens}"
            )

    @property
    def most_tokens(self) -> int:
        return self.requests * self.rounds * (1 + self.drafts)

    @property
    def round_us(self) -> float | None:
        return self.rounds_us / self.rounds if self.rounds_us is not None and self.rounds else None

    @property
    def tokens_s(self) -> float | None:
        """Tokens a second in the rounds, of all requests together."""
        return 1e6 * self.tokens / self.rounds_us if self.rounds_us else None

    @property
    def floor_us(self) -> float:
        """The floors of all steps that were done, added up."""
        return self.prompt_floor_us + self.rounds * self.round_floor_us

    @property
    def accepted(self) -> float | None:
        """Drafts that were kept, in a round of one request."""
        return self.tokens / (self.requests * self.rounds) - 1 if self.rounds else None

    @property
    def break_even(self) -> float | None:
        """How many drafts must be kept in a round of one request for the same tokens a second as without drafts."""
        return self.round_us / self.plain_us - 1 if self.round_us is not None and self.plain_us else None


@dataclass(frozen=True)
class BenchReport:
    """Everything one run found. `date` is ISO 8601 in UTC, `command` what repeats it."""

    machine: Machine
    ceilings: Ceilings
    date: str
    command: str
    rows: tuple[OpRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    generations: tuple[GenerationRow, ...] = ()

    @property
    def red(self) -> tuple[OpRow, ...]:
        return tuple(row for row in self.rows if row.is_red)

    @property
    def timed(self) -> int:
        found = (*(row.us for row in self.rows), *(step.gpu_us for step in self.steps))
        return sum(us is not None for us in (*found, *(row.rounds_us for row in self.generations)))

    @property
    def count(self) -> int:
        """All that was to be timed."""
        return len(self.rows) + len(self.steps) + len(self.generations)

    @property
    def backends(self) -> dict[str, str]:
        """Which backend each op took."""
        return {row.op: row.backend for row in self.rows}
