"""Why rows are infinitely far from the expected ones: another width, or numbers that are none."""

from __future__ import annotations

from torch import Tensor

from parity.schema import spec_of


def remark_of(name: str, actual: Tensor, expected: Tensor, errors: Tensor) -> str:
    """In words, or "" where no error is infinite. Tensors are [rows, …] as recorded, `errors` those of the rows."""
    infinite = int(errors.isinf().sum())
    if not infinite:
        return ""
    widths = list(actual.shape[1:]), list(expected.shape[1:])
    spec = spec_of(name)
    # Scores are as wide as the longest step has keys.
    if widths[0] != widths[1] and (spec is None or spec.kind != "scores"):
        return f"a row has shape {widths[0]}, expected {widths[1]}"
    return f"{infinite:,} row{'s' * (infinite != 1)} with NaN or infinity where only one side has it"
