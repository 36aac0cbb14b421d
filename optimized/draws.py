"""Plans how the token behind each row is chosen: arrays for the device, from each request's sampling.

A nucleus (top_p below 1) needs the probabilities in order, which the kernel does not have: `choose_in_nucleus` takes
such rows afterwards, from the logits. Source: `reference.sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

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
    padding = (0, max(0, chosen_rows - len(positions)))
    return Draws(
        position_T=np.pad(np.array(positions, np.int64), padding),
        seed_T=np.pad(np.array([signed(sampling.seed) for sampling in samplings], np.int64), padding),
        temperature_T=np.pad(temperature_R.view(np.int64), padding),
        source_T=np.pad(np.array(sources, np.int32), (0, max(0, step_rows - len(sources))), constant_values=-1),
    )


def choose_in_nucleus(
    logits_RW: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], chosen_R: Tensor
) -> None:
    """Overwrite the chosen tokens of rows whose top_p is below 1."""
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.top_p < 1.0 and sampling.temperature > 0.0:
            chosen_R[row] = contest(logits_RW[row : row + 1], [position], sampling)[0].argmax()
