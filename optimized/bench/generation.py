"""Text from prompts to the last token, on the wall clock, with drafts and without, on the four-layer slice.

plain       each round is one decode step; the host waits once, at the end
drafts      each round proposes d tokens, verifies them in one step and keeps those that the model chooses too; the host
            waits once a round; a last round proposes no more than there is left to write

Random weights accept next to nothing, so tokens a second with drafts say what a round costs, not what drafts bring:
that is the break-even number of drafts that must be kept. The floor of a round is that of its steps, added up. What
runs is given as `make_generation(shape)`, as in `slices`.
Source: performance specification, section 2; text_model specification, section 17.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from optimized.bench.floors import Ceilings, Work, floor, gemm
from optimized.bench.records import GenerationRow
from optimized.bench.run import Progress, reason
from optimized.bench.text_floors import decode_floors, prefill_floors
from reference.config import TextConfig

TIMED_RUNS = 3


@dataclass(frozen=True)
class GenerationShape:
    """`tokens` new ones behind the first new token of each of `requests` prompts of `prompt` tokens."""

    requests: int
    prompt: int = 4096
    tokens: int = 64
    drafts: int = 0

    @property
    def name(self) -> str:
        drafted = f", {self.drafts} drafts" if self.drafts else ""
        return f"{self.tokens} tokens, {self.requests} x {self.prompt}{drafted}"

    def prompt_floor_us(self, config: TextConfig, ceilings: Ceilings) -> float:
        """All prompts through slice and draft layer, and the head for their last tokens."""
        floors = prefill_floors(config, self.prompt, ceilings)
        draft = floors.sliding_projections + floors.sliding_core + floors.dense
        draft += floor(fusion(config, self.prompt), ceilings).us
        head = decode_floors(config, self.requests, 1, ceilings).head
        return self.requests * (floors.slice + bool(self.drafts) * draft) + head

    def round_floor_us(self, config: TextConfig, ceilings: Ceilings) -> float:
        """Half-way through the text: the step, and d steps of the draft layer with a head each."""
        context = self.prompt + self.tokens // 2
        step = decode_floors(config, self.requests, context, ceilings, rows=1 + self.drafts)
        one = decode_floors(config, self.requests, context, ceilings)
        draft = one.sliding_projections + one.sliding_core + one.dense + one.head
        draft += floor(fusion(config, self.requests), ceilings).us
        return step.slice + step.head + self.drafts * draft


@dataclass(frozen=True)
class Counted:
    """Rounds that were run, and the tokens of all requests that they brought."""

    rounds: int
    tokens: int


@dataclass(frozen=True)
class Generation:
    """`prompt()` returns when all first tokens are known, `rounds()` when the others are; `free()` forgets them."""

    prompt: Callable[[], Any]
    rounds: Callable[[], Counted]
    free: Callable[[], Any]


MakeGeneration = Callable[[GenerationShape], Generation]

# The plain one of the same requests first: the others are measured by it.
GENERATION_SHAPES = tuple(GenerationShape(requests, drafts=drafts) for requests in (1, 16) for drafts in (0, 2))


def fusion(config: TextConfig, tokens: int) -> Work:
    """The draft layer's product on embeddings and hidden states."""
    return gemm(tokens, config.hidden_size, 2 * config.hidden_size)


def measure_generations(
    make_generation: MakeGeneration,
    config: TextConfig,
    ceilings: Ceilings,
    shapes: Iterable[GenerationShape] = GENERATION_SHAPES,
    progress: Progress = lambda line: None,
    runs: int = TIMED_RUNS,
) -> list[GenerationRow]:
    """A shape that cannot run gives a row that says why."""
    rows: list[GenerationRow] = []
    for shape in shapes:
        progress(shape.name)
        floors = shape.prompt_floor_us(config, ceilings), shape.round_floor_us(config, ceilings)
        plain = (row.round_us for row in rows if (row.requests, row.drafts) == (shape.requests, 0))
        try:
            rows.append(measure_generation(shape, make_generation(shape), *floors, next(plain, None), runs))
        except Exception as error:  # an engine, a compiler or memory; the table has a place for all of them
            rows.append(GenerationRow(shape.name, shape.requests, shape.drafts, *floors, why=reason(error)))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def measure_generation(
    shape: GenerationShape,
    generation: Generation,
    prompt_floor_us: float,
    round_floor_us: float,
    plain_us: float | None = None,
    runs: int = TIMED_RUNS,
) -> GenerationRow:
    """Medians of several runs, after one in which kernels compile and steps are recorded."""
    prompts, rounds = [], []
    for _ in range(1 + runs):
        prompts.append(_wall_us(generation.prompt)[0])
        us, counted = _wall_us(generation.rounds)
        rounds.append(us)
        generation.free()
    return GenerationRow(
        shape.name,
        shape.requests,
        shape.drafts,
        prompt_floor_us,
        round_floor_us,
        prompt_us=median(prompts[1:]),
        rounds_us=median(rounds[1:]),
        rounds=counted.rounds,
        tokens=counted.tokens,
        plain_us=plain_us if shape.drafts else None,
    )


def _wall_us(call: Callable[[], Any]) -> tuple[float, Any]:
    """Until the device is done, and what the call returned."""
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = call()
    if is_cuda:
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start), found
