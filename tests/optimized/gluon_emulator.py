"""Runs a Gluon kernel for Hopper in numpy, one program after the other: what Triton's interpreter does not do.

What runs beside a program is moved as far as the program allows: copies land at once, and a product reads its operands
when it is waited for. A tile that is refilled before it was read, or read before it was filled (tiles begin as NaN), so
gives a wrong result; a wait that would never end raises. Two programs of a cluster run as one, whose tensors hold the
half of the one before that of the other. Threads are not emulated: barriers and fences do nothing, layouts are ignored,
values are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor


class Array(np.ndarray):
    """A tensor of a kernel, or a scalar of it. Casts keep the values."""

    def to(self, dtype: Any) -> Array:
        return self


def array(values: Any) -> Array:
    return np.asarray(values).view(Array)


@dataclass
class Pointer:
    """Places in the memory of a tensor, counted in elements."""

    memory: np.ndarray
    place: Any

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, array(self.place) + array(offset))


def memory_of(tensor: Tensor) -> np.ndarray:
    """All that the tensor's storage holds."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0).numpy()


def pointer(tensor: Tensor) -> Pointer:
    return Pointer(memory_of(tensor), array(tensor.storage_offset()))


@dataclass
class Rows:
    """A descriptor of blocks of a matrix that begins where the tensor does; zeros outside of `shape`."""

    tensor: Tensor
    shape: tuple[int, int]
    row_stride: int
    block: tuple[int, int]

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=2 * self.block[0] * self.block[1])

    def read(self, row: int, lane: int) -> np.ndarray:
        rows, lanes = (first + np.arange(count) for first, count in zip((row, lane), self.block, strict=True))
        is_inside = ((rows >= 0) & (rows < self.shape[0]))[:, None] & (lanes < self.shape[1])[None, :]
        places = self.tensor.storage_offset() + rows[:, None] * self.row_stride + lanes[None, :]
        return np.where(is_inside, memory_of(self.tensor)[np.where(is_inside, places, 0)], 0.0)


@dataclass
class Barrier:
    """Counts the bytes that a phase expects. `phases`: how many are complete."""

    phases: int = 0
    missing: int = 0

    def expect(self, size: int) -> None:
        assert not self.missing, "a phase is opened while another one is open"
        self.missing = size

    def arrive(self, size: int) -> None:
        assert size <= self.missing, "more bytes than expected"
        self.missing -= size
        self.phases += not self.missing

    def wait(self, parity: int) -> None:
        assert not self.missing, "a wait for bytes that nobody sends"
        assert self.phases % 2 != parity, "a wait for a phase that does not end"


@dataclass
class Shared:
    """A tile in shared memory, several of them, or several barriers."""

    data: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def index(self, i: Any) -> Any:
        return self.data[int(i)] if isinstance(self.data, list) else Shared(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.transpose(order))

    def load(self, layout: Any) -> Array:
        return array(self.data.copy())

    def store(self, values: Any) -> None:
        self.data[...] = values


class OwnHalves(Shared):
    """Two tiles, one for each program of a cluster: `data` has one more dim in front."""

    def permute(self, order: tuple[int, ...]) -> OwnHalves:
        return OwnHalves(self.data.transpose(0, *(1 + dim for dim in order)))


@dataclass
class Product:
    """a b + sums, computed when it is waited for."""

    a: Any
    b: Shared
    sums: Any
    result: np.ndarray | None = None

    def compute(self) -> None:
        a = np.asarray(self.a.data if isinstance(self.a, Shared) else self.a)
        sums = self.sums.result if isinstance(self.sums, Product) else self.sums
        rows = a.reshape(*self.b.data.shape[:-2], -1, a.shape[-1]) @ self.b.data
        self.result = rows.reshape(len(a), -1) + (0.0 if sums is None else sums)


@dataclass
class Program:
    """The names that a kernel finds instead of Gluon's, for the program at `place` of a grid."""

    place: tuple[int, int, int]
    grid: tuple[int, int, int]
    products: list[Product] = field(default_factory=list)

    def multiply(self, a: Any, b: Shared, sums: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        self.products.append(Product(a, b, sums if use_acc else None))
        return self.products[-1]

    def wait(self, num_outstanding: int, deps: list[Product]) -> Array:
        while len(self.products) > num_outstanding:
            self.products.pop(0).compute()
        (product,) = deps
        assert product.result is not None, "a product is used that was not waited for"
        return array(product.result)

    def names(self) -> dict[str, Any]:
        return {
            "gl": language(self),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: None,
                expect=lambda barrier, size: barrier.expect(int(size)),
                wait=lambda barrier, parity: barrier.wait(int(parity)),
            ),
            "copy_rows": copy_rows,
            "copy_async": copy_async,
            "async_copy": SimpleNamespace(commit_group=lambda: None, wait_group=lambda outstanding: None),
            **dict.fromkeys(("barrier", "fence_async_shared", "arrive", "leave"), lambda: None),
            "own_half": lambda tile, layout: OwnHalves(tile.data.reshape(2, -1, tile.shape[1])),
            "add_other_program": add_other_half,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait,
        }


def copy_rows(rows: Rows, place: list[Any], barrier: Barrier, tile: Shared) -> None:
    assert tile.shape == rows.block
    tile.store(rows.read(*map(int, place)))
    barrier.arrive(rows.block_type.nbytes)


def copy_async(tile: Shared, source: Pointer, mask: Any = True) -> None:
    tile.store(load(source, mask, 0.0))


def add_other_half(values: Array, exchange: Any = 0) -> Array:
    return values + np.roll(values, len(values) // 2, axis=0)


def load(source: Pointer, mask: Any = True, other: Any = 0) -> Array:
    is_read = np.broadcast_to(mask, np.shape(source.place))
    return array(np.where(is_read, source.memory[np.where(is_read, source.place, 0)], other))


def store(target: Pointer, values: Any, mask: Any = True) -> None:
    is_written = np.broadcast_to(mask, np.shape(target.place))
    target.memory[np.asarray(target.place)[is_written]] = np.broadcast_to(values, is_written.shape)[is_written]


def allocate(dtype: str, shape: list[int], layout: Any) -> Shared:
    return Shared([Barrier() for _ in range(shape[0])] if dtype == "int64" else np.full(shape, np.nan))


def full(shape: list[int], value: float, dtype: str, layout: Any = None) -> Array:
    return array(np.full(shape, value, np.int64 if dtype == "int32" else np.float64))


def language(program: Program) -> SimpleNamespace:
    def ignored(*arguments: Any, **options: Any) -> None:
        return None

    return SimpleNamespace(
        **{name: name for name in ("bfloat16", "float32", "int32", "int64")},
        **dict.fromkeys(
            ("BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout"), ignored
        ),
        constexpr=object,
        static_range=range,
        program_id=lambda axis: array(program.place[axis]),
        num_programs=lambda axis: array(program.grid[axis]),
        allocate_shared_memory=allocate,
        load=load,
        store=store,
        full=full,
        zeros=lambda shape, dtype, layout=None: full(shape, 0, dtype),
        arange=lambda start, stop, layout=None: array(np.arange(start, stop)),
        convert_layout=lambda values, layout: values,
        cdiv=lambda a, b: -(-a // b),
        where=lambda condition, a, b: array(np.where(condition, a, b)),
        maximum=lambda a, b: array(np.maximum(a, b)),
        minimum=lambda a, b: array(np.minimum(a, b)),
        max=lambda values, axis: array(np.max(values, axis)),
        min=lambda values, axis: array(np.min(values, axis)),
        sum=lambda values, axis: array(np.sum(values, axis)),
        ceil=lambda values: array(np.ceil(values)),
        exp2=lambda values: array(np.exp2(np.asarray(values, np.float64))),
        log2=lambda values: array(np.log2(values)),
    )


def emulated(module: ModuleType, kernel: str, grid: tuple[int, int, int]) -> Callable[..., None]:
    """The kernel of this name as a function of its arguments that runs every program of the grid."""

    def run(*arguments: Any, **constants: Any) -> None:
        for place in np.ndindex(*grid):
            program = Program(place, grid)
            names = {"__builtins__": __builtins__} | program.names()
            for name, value in vars(module).items():
                if name in names:
                    continue
                if type(value).__name__ == "constexpr":
                    names[name] = value.value
                elif hasattr(value, "fn"):
                    names[name] = FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
            with np.errstate(all="ignore"):
                names[kernel](*arguments, **constants)
            assert not program.products, "a product was not waited for"

    return run
