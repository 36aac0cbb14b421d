"""Every op has its kernel and its twin under one signature, so that either stands for the other."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from optimized.device import OPS, PACKAGED, choose
from optimized.errors import NotSupportedError


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_and_its_twin_take_the_same(op: str) -> None:
    module, end = import_module(OPS[op]), "_" if op.endswith("_") else ""
    kernel, twin = (getattr(module, f"{op}{'' if end else '_'}{backend}{end}") for backend in ("triton", "torch"))
    assert inspect.signature(kernel) == inspect.signature(twin)
    if op in PACKAGED:
        package = getattr(import_module(PACKAGED[op].module), f"{op}_package")
        assert inspect.signature(package) == inspect.signature(kernel)


def test_what_is_asked_for_and_not_there_is_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="no backend 'cuda'; there are triton, torch"):
        choose("cpu", "cuda")  # type: ignore[arg-type]
    with pytest.raises(NotSupportedError, match="no op can take triton on meta: there are no kernels for meta"):
        choose("meta", "triton")
    with pytest.raises(AttributeError, match="no op 'softmax'; there are rms_norm, "):
        _ = choose("cpu", "torch").softmax
