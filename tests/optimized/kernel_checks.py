"""The rule every kernel is held to: as good as plain torch in the same dtype, both measured against float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16)
# How much worse than eager a kernel may be: another order of sums, and a product rounded at another place.
FACTOR = 2.0


def float64(*values: object) -> list:
    """Floating tensors widened to float64, everything else as it is: arguments for the truth."""
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def ulp_at(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` at a magnitude."""
    return magnitude * torch.finfo(dtype).eps


def assert_as_good_as_eager(out: Tensor, eager: Tensor, truth: Tensor, factor: float = FACTOR) -> float:
    """Largest and root-mean-square error of `out` at most `factor` times those of `eager`, plus one rounding.

    Shapes, dtypes, and the places of infinities and NaNs must be equal. Returns the ratio of the root-mean-square
    errors: 1.0 means as good as eager.
    """
    assert out.shape == eager.shape == truth.shape
    assert out.dtype == eager.dtype
    finite = truth.isfinite()
    for value in (out, eager):
        assert torch.equal(value.isfinite(), finite)
        assert torch.equal(value.double()[~finite].nan_to_num(0.5), truth[~finite].nan_to_num(0.5))
    if not finite.any():
        return 0.0
    error, floor = ((value.double() - truth)[finite].abs() for value in (out, eager))
    rounding = ulp_at(truth[finite].abs().max(), out.dtype)
    assert error.max() <= factor * floor.max() + rounding, (float(error.max()), float(floor.max()), float(rounding))
    mean, mean_floor = error.square().mean().sqrt(), floor.square().mean().sqrt()
    typical = ulp_at(truth[finite].square().mean().sqrt(), out.dtype)
    assert mean <= factor * mean_floor + typical, (float(mean), float(mean_floor), float(typical))
    return float(mean / mean_floor) if mean_floor else 0.0


def check_against_twin(kernel: Callable, twin: Callable, *arguments: object, **options: object) -> None:
    """Runs kernel, twin, and the twin in float64 on the same arguments; compares every tensor that they return."""
    outputs = [f(*a, **options) for f, a in ((kernel, arguments), (twin, arguments), (twin, float64(*arguments)))]
    for out, eager, truth in zip(*(o if isinstance(o, tuple) else (o,) for o in outputs), strict=True):
        if out is None:
            assert eager is None
            continue
        if not out.is_floating_point():
            assert torch.equal(out, eager)
            continue
        assert_as_good_as_eager(out, eager, truth)
