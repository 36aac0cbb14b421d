"""Plans how the token behind each row is chosen: arrays for the device, from each request's sampling.

A nucleus (top_p below 1) needs the probabilities in order, which the kernel does not have: `choose_in_nucleus` takes
such rows afterwards, from the logits. Source: `reference.sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from optimized.plan_spans import padded
from optimized.step import Draws
from reference.sampling import Sampling, contest, signed

# R rows to choose for  T rows of the step  W vocabulary


def plan_draws(
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    sources: Sequence[int],
    chosen_rows: int = 0,
    step_rows: int = 0,
) -> Draws[np.ndarray]:
    """Row r is chosen for absolute position `positions[r]`; step row t is fed from `sources[t]` of the run before.

    Padded to `chosen_rows` greedy rows, and `step_rows` rows with a token of their own.
    """
    temperature_R = np.array([sampling.temperature for sampling in samplings], np.float64)
    return Draws(
        position_T=padded(positions, chosen_rows, np.int64),
        seed_T=padded([signed(sampling.seed) for sampling in samplings], chosen_rows, np.int64),
        temperature_T=padded(temperature_R.view(np.int64), chosen_rows, np.int64),
        source_T=padded(sources, step_rows, np.int32, -1),
    )


def choose_in_nucleus(
    logits_RW: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], chosen_R: Tensor
) -> None:
    """Overwrite the chosen tokens of rows whose top_p is below 1."""
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.top_p < 1.0 and sampling.temperature > 0.0:
            chosen_R[row] = contest(logits_RW[row : row + 1], [position], sampling)[0].argmax()
