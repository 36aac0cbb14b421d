"""Exact mode: nothing that a model asks for is lower than float64, and the spy says where something was."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parity.exact import exact

X = torch.tensor([[1.0, 2.0, -3.0], [0.1, 0.2, 0.7]], dtype=torch.float64)

REQUESTS = {
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to_positional": lambda x: x.to(torch.bfloat16),
    "to_keyword": lambda x: x.to(dtype=torch.float16),
    "to_device_and_dtype": lambda x: x.to("cpu", torch.float32),
    "to_another": lambda x: x.to(LOW),
    "type_as": lambda x: x.type_as(LOW),
    "type_dtype": lambda x: x.type(torch.float32),
    "type_name": lambda x: x.type("torch.HalfTensor"),
    "type_class": lambda x: x.type(torch.FloatTensor),
    "softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "sum": lambda x: x.sum(dtype=torch.float32),
    "of_integers": lambda x: torch.arange(3).float() / 3,
    "arange": lambda x: torch.arange(0, 3, dtype=torch.float),
    "arange_default": lambda x: torch.arange(0.0, 3.0),
    "tensor": lambda x: torch.tensor([0.1]),
    "tensor_of_numpy": lambda x: torch.tensor(np.ones(3, np.float32)),
    "as_tensor": lambda x: torch.as_tensor(np.ones(3, np.float32)),
    "zeros_like": lambda x: torch.zeros_like(x, dtype=torch.bfloat16),
    "new_zeros": lambda x: x.new_zeros(2, dtype=torch.float16),
    "full": lambda x: torch.full((2,), torch.finfo(torch.bfloat16).min),
    "randn": lambda x: torch.randn(2, dtype=torch.float32),
    "promote_types": lambda x: x.to(torch.promote_types(torch.bfloat16, torch.float32)),
    "module": lambda x: nn.Linear(3, 2).to(torch.bfloat16)(x),
    "module_half": lambda x: nn.Linear(3, 2).half()(x),
    "module_dtype": lambda x: nn.Linear(3, 2, dtype=torch.float16)(x),
}
LOW = torch.zeros(1, dtype=torch.bfloat16)


class UpcastingNorm(nn.Module):
    """A module in the usual way: a float32 table, a float32 region, a rounding at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("frequencies", 1.0 / (1e4 ** (torch.arange(0, 3, dtype=torch.float32) / 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * wide.to(x.dtype) * self.frequencies.float().cos()).bfloat16()


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_every_request_means_float64(request_):
    with exact() as spy:
        value = request_(X)
    assert value.dtype == torch.float64
    assert spy.lower_precision_ops == []


def test_module_with_upcasts_gives_the_unrounded_values():
    with exact() as spy:
        out = UpcastingNorm().to(torch.bfloat16)(X)
    x = X.numpy()
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.cos(1e4 ** -(np.arange(3) / 3))
    torch.testing.assert_close(out.detach(), torch.from_numpy(expected), rtol=1e-15, atol=1e-15)
    assert spy.lower_precision_ops == []
    outside = UpcastingNorm()(X.float())
    assert np.abs(outside.detach().double().numpy() - expected).max() > 1e-4, (
        "the same module rounds outside of exact mode"
    )


def test_complex_rotation_is_promoted():
    with exact() as spy:
        rotated = torch.view_as_complex(torch.ones(4, 2).float()) * torch.ones(4, dtype=torch.complex64)
    assert rotated.dtype == torch.complex128
    assert spy.lower_precision_ops == []


@pytest.mark.parametrize("entered_inside", [True, False])
def test_autocast_is_switched_off(entered_inside):
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    if entered_inside:
        with exact() as spy, torch.autocast("cpu", dtype=torch.bfloat16):
            out = F.linear(X, X)
    else:
        with autocast, exact() as spy:
            out = F.linear(X, X)
    assert torch.equal(out, X @ X.T)
    assert spy.lower_precision_ops == []


def test_stored_bytes_are_not_reinterpreted():
    bits = torch.tensor([0x3F80, 0x4000], dtype=torch.int16)
    with exact() as spy:
        stored = torch.cat((bits.view(torch.bfloat16), torch.zeros(1, dtype=torch.int16).view(torch.bfloat16)))
        value = stored[:2].to(torch.float32)
    assert stored.dtype == torch.bfloat16
    assert value.tolist() == [1.0, 2.0]
    assert value.dtype == torch.float64
    assert spy.lower_precision_ops == [], "moving stored values rounds nothing"


def test_spy_names_op_dtype_shape_and_line():
    low = torch.ones(2, 3)
    with exact() as spy:
        low.exp()  # the line that is named
        torch.empty(3, dtype=torch.int16).view(torch.float16).copy_(X[0])
    first, second = spy.lower_precision_ops
    assert (first.op, first.dtype, first.shape) == ("aten.exp.default", torch.float32, (2, 3))
    assert first.source.split(":")[0] == __file__
    assert first.source.endswith("low.exp()  # the line that is named")
    assert (second.op, second.dtype, second.shape) == ("aten.copy_.default", torch.float16, (3,))


def test_float8_is_left_alone_and_listed():
    with exact() as spy:
        X.to(torch.float8_e4m3fn)
    assert [op.dtype for op in spy.lower_precision_ops] == [torch.float8_e4m3fn]


def test_everything_is_put_back_also_after_an_error():
    finfo, set_default, autocast = torch.finfo, torch.set_default_dtype, torch.autocast.__init__

    def fail_inside() -> None:
        with exact():
            torch.set_default_dtype(torch.bfloat16)
            assert torch.get_default_dtype() == torch.float64
            assert torch.finfo(torch.float16).max == torch.finfo(torch.float64).max
            raise KeyError("the caller's")

    with pytest.raises(KeyError, match="the caller's"):
        fail_inside()
    assert (torch.finfo, torch.set_default_dtype, torch.autocast.__init__) == (finfo, set_default, autocast)
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(1).float().dtype == torch.float32


def test_nesting_is_harmless():
    with exact() as outer, exact() as inner:
        assert X.float().dtype == torch.float64
    assert outer.lower_precision_ops == inner.lower_precision_ops == []
    assert torch.get_default_dtype() == torch.float32
