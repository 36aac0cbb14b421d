"""Is an output good enough to be timed? Three runs: the truth in float64, plain torch in the dtype, what is judged.

green: |out - truth| ≤ 2 |eager - truth| + one rounding, for the largest and for the root-mean-square error.
Integers must be equal. The error that is printed is ‖out - truth‖ / ‖truth‖; its noise is that of eager.
Source: style, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Another order of sums, and a product rounded at another place.
FACTOR = 2.0


@dataclass(frozen=True)
class Triple:
    """One tensor of an op, computed three times. `truth` is float64, or an integer tensor."""

    out: Tensor
    eager: Tensor
    truth: Tensor


@dataclass(frozen=True)
class Agreement:
    """`error` of the op and `noise` of eager, both relative to the truth; `why` says what is wrong where it is red."""

    error: float
    noise: float
    is_green: bool
    why: str = ""


def judge(triples: Sequence[Triple]) -> Agreement:
    """The verdict over all tensors of an op: the first red one, or the one with the largest error."""
    found = [_judged(triple) for triple in triples]
    red = [agreement for agreement in found if not agreement.is_green]
    return red[0] if red else max(found, key=lambda agreement: agreement.error)


def relative_error(out: Tensor, truth: Tensor) -> float:
    """‖out - truth‖ / ‖truth‖; NaN in `out` gives NaN, and infinities that coincide count as equal."""
    out, truth = out.double(), truth.double()
    difference = torch.where(out == truth, 0.0, out - truth)
    size = truth[truth.isfinite()].norm()
    return float(difference.norm() / size) if size else float(difference.norm())


def _judged(triple: Triple) -> Agreement:
    out, eager, truth = triple.out, triple.eager, triple.truth
    if out.shape != truth.shape or out.dtype != eager.dtype:
        found, wanted = f"{tuple(out.shape)} {out.dtype}", f"{tuple(truth.shape)} {eager.dtype}"
        return Agreement(float("nan"), float("nan"), False, f"expected {wanted}, found {found}")
    if not out.is_floating_point():
        wrong = int((out != truth).sum())
        share = wrong / max(1, out.numel())
        return Agreement(share, 0.0, not wrong, f"{wrong} of {out.numel()} entries differ" if wrong else "")
    error, noise = relative_error(out, truth), relative_error(eager, truth)
    for name, value, floor, rounding in _measures(out, eager, truth):
        # Written so that NaN is red.
        if not value <= FACTOR * floor + rounding:
            return Agreement(error, noise, False, f"{name} error {value:.2e}, allowed {FACTOR * floor + rounding:.2e}")
    return Agreement(error, noise, True)


def _measures(out: Tensor, eager: Tensor, truth: Tensor) -> list[tuple[str, float, float, float]]:
    """Name, error of `out`, error of `eager` and one rounding, of the largest and of the typical element."""
    if not out.numel():
        return []
    errors, floors = ((value.double() - truth).abs() for value in (out, eager))
    eps = torch.finfo(out.dtype).eps
    largest, typical = float(truth.abs().max()) * eps, float(truth.square().mean().sqrt()) * eps
    return [
        ("largest", float(errors.max()), float(floors.max()), largest),
        ("typical", float(errors.square().mean().sqrt()), float(floors.square().mean().sqrt()), typical),
    ]
