"""Exact mode: any PyTorch model in float64, whatever precision its code asks for.

Inside `exact()` every request for float32, bfloat16 or float16 means float64 (and complex64 means complex128): dtype
arguments, `.float()` and its like, the default dtype, `torch.finfo`, `torch.promote_types`, autocast. Build the model
inside too, so that its constant tables (RoPE frequencies) are computed without rounding. Two implementations that
agree to 1e-10 here have the same logic; whatever else they differ by in bfloat16 is rounding.

The proof that nothing was left is the spy, which sees every op below Python: an empty `lower_precision_ops`. It
leaves out ops that only move stored values of one dtype (views, copies, concatenation), since those never round.

Neither of the two sees: other threads (modes belong to a thread), values rounded outside of torch (numpy, `struct`),
legacy constructors such as `torch.FloatTensor`, what a Triton or foreign kernel does inside one op, and compiled
graphs. The promotion alone, not the spy, also misses: requests inside torch's own Python functions and scripted code,
casts in C++, a `torch.finfo` that was bound to another name before, and tensors that were lower than float64 before
they came in. float8 is left alone, for there the quantization is what is computed; the spy lists it.
"""

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_PROMOTED = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
_CASTS = {
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
}
_CASTS_TO_ANOTHER = (Tensor.to, Tensor.type_as)
# They keep the dtype of the numpy array that they are given, which is exact, but lower than float64.
_IMPORTS = (torch.tensor, torch.as_tensor, torch.asarray)
_LEGACY_TYPES = ("FloatTensor", "HalfTensor", "BFloat16Tensor")
# Besides views: ops that move values. They round only where they convert, which `_only_moves` rules out.
_MOVES = ("cat", "clone", "copy_", "_to_copy", "empty", "empty_like", "empty_strided", "new_empty", "stack")
_OWN_CODE = (str(Path(torch.__file__).parent), __file__)


@dataclass(frozen=True)
class LowerPrecisionOp:
    """An op with a floating result below float64. `source` is `file:line: code` of the nearest line not torch's."""

    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: str


@dataclass
class Spy:
    """What exact mode could not promote, in the order of execution. Empty: everything ran in float64."""

    lower_precision_ops: list[LowerPrecisionOp] = field(default_factory=list)


@contextmanager
def exact() -> Iterator[Spy]:
    """Run everything inside in float64; gives the spy that lists what did not.

    The default dtype and the patched `torch` names are put back at the end. Not for several threads at once: those
    are global to the process.
    """
    spy = Spy()
    default, set_default, start_autocast = torch.get_default_dtype(), torch.set_default_dtype, torch.autocast.__init__

    def set_promoted_default(dtype: torch.dtype) -> None:
        set_default(_PROMOTED.get(dtype, dtype))

    def disabled_autocast(
        self: torch.autocast, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        start_autocast(self, device_type, dtype, False, cache_enabled)

    set_default(torch.float64)
    try:
        with ExitStack() as stack:
            for owner, name, replacement in (
                (torch, "finfo", _promoted_finfo),
                (torch, "set_default_dtype", set_promoted_default),
                (torch.autocast, "__init__", disabled_autocast),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            for device_type in ("cpu", "cuda"):
                # Also where the caller has already entered autocast.
                stack.enter_context(torch.autocast(device_type))
            stack.enter_context(_SpyMode(spy))
            stack.enter_context(_Promotion())
            yield spy
    finally:
        set_default(default)


_finfo = torch.finfo


def _promoted_finfo(dtype: torch.dtype | None = None) -> torch.finfo:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return _finfo(_PROMOTED.get(dtype, dtype))


class _Promotion(TorchFunctionMode):
    """Rewrites the requests in the calls of torch functions and tensor methods."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _reinterprets_bytes(func, args):
            return func(*args, **kwargs)
        if func in _CASTS_TO_ANOTHER:
            args = tuple(_widened(arg) if i else arg for i, arg in enumerate(args))
            kwargs = {name: _widened(value) if name == "other" else value for name, value in kwargs.items()}
        if func is Tensor.type:
            args = tuple(_promoted_legacy_type(arg) for arg in args)
        args = tuple(_promoted(arg) for arg in args)
        kwargs = {name: _promoted(value) for name, value in kwargs.items()}
        result = _CASTS.get(func, func)(*args, **kwargs)
        return _widened(result) if func in _IMPORTS else result


def _reinterprets_bytes(func: Callable, args: tuple) -> bool:
    """A dtype that says what stored bytes mean is not a request."""
    if func is torch.asarray:
        return isinstance(args[0], bytes | bytearray | memoryview | torch.UntypedStorage)
    return func is Tensor.view


def _promoted(value: Any) -> Any:
    return _PROMOTED.get(value, value) if isinstance(value, torch.dtype) else value


def _widened(value: Any) -> Any:
    return value.to(_PROMOTED[value.dtype]) if isinstance(value, Tensor) and value.dtype in _PROMOTED else value


def _promoted_legacy_type(value: Any) -> Any:
    """`torch.FloatTensor` or its name, as `Tensor.type` takes them."""
    if not isinstance(value, str | type):
        return value
    module, _, name = (value if isinstance(value, str) else f"{value.__module__}.{value.__name__}").rpartition(".")
    return f"{module}.DoubleTensor" if name in _LEGACY_TYPES else value


class _SpyMode(TorchDispatchMode):
    """Looks at the result of every op that reaches a kernel."""

    def __init__(self, spy: Spy):
        super().__init__()
        self._spy = spy

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if _is_lower(tensor.dtype) and not _only_moves(func, tensor.dtype, (args, kwargs)):
                op = LowerPrecisionOp(str(func), tensor.dtype, tuple(tensor.shape), _calling_line())
                self._spy.lower_precision_ops.append(op)
        return result


def _is_lower(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype not in (torch.float64, torch.complex128)


def _only_moves(func: Any, dtype: torch.dtype, inputs: Any) -> bool:
    """No input of another precision goes into the result, so nothing can have been rounded."""
    moves = func.is_view or func.overloadpacket.__name__ in _MOVES
    return moves and all(t.dtype == dtype for t in _tensors(inputs) if t.dtype.is_floating_point or t.dtype.is_complex)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _calling_line() -> str:
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_OWN_CODE):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"
