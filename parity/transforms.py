"""What a mapping may do to a foreign tensor to bring it into the schema's layout. A fixed list, written as data.

    {"op": "rearrange", "dims": "1 H T N -> T H N"}                 transpose, reshape, drop dims of size 1
    {"op": "deinterleaved_to_interleaved", "start": 0, "stop": "R"} [even | odd] lanes back to neighbouring pairs
    {"op": "lanes", "start": "N", "stop": "N+R"}                    some lanes of the last dim
    {"op": "keep_rows", "side": "last"}                             of a longer tensor, as many rows as the step has
    {"op": "drop_future"}                                           keys behind the query leave an index list
    {"op": "sigmoid"}
    {"op": "scale", "by": 0.5, "size": "I", "power": -0.5}          times by · size^power

Sizes are numbers, letters of the schema's legend, or sums of letters. All ops run on meta tensors too, so that a
mapping that does not fit is refused before a value is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Literal

import torch
from pydantic import Field, FiniteFloat, field_validator
from torch import Tensor

from parity.manifest import DumpError
from parity.statistics import Record
from reference.config import TextConfig

SizeText = Annotated[str, Field(pattern=r"^[A-Z](\+[A-Z])*$", max_length=40)]
SizeOrText = Annotated[int, Field(ge=0, lt=2**31)] | SizeText


def sizes_of(config: TextConfig | None, layer: int | None) -> dict[str, int]:
    """The legend's letters for one layer; those of the attention geometry only where there is a layer."""
    if config is None:
        return {}
    sizes = {
        "D": config.hidden_size,
        "I": config.index_n_heads,
        "J": config.index_head_dim,
        "E": config.n_routed_experts,
        "W": config.vocab_size,
    }
    if layer is not None:
        geometry = config.geometry(layer)
        sizes |= {
            "H": geometry.num_attention_heads,
            "N": geometry.qk_nope_head_dim,
            "R": geometry.qk_rope_head_dim,
            "Q": geometry.q_lora_rank,
            "C": geometry.kv_lora_rank,
            "V": geometry.v_head_dim,
            "G": geometry.gate_width,
        }
    return sizes


@dataclass(frozen=True)
class Context:
    """What is known beside the tensor: sizes, and the absolute position of each row of the step (-1: padding)."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    positions: Sequence[int] = ()

    def size(self, value: int | str) -> int:
        if isinstance(value, int):
            return value
        unknown = [letter for letter in value.split("+") if letter not in self.sizes]
        if unknown:
            raise DumpError(f"size {value!r}: {unknown[0]} is not known here; give the model's config, or a number")
        return sum(self.sizes[letter] for letter in value.split("+"))


class Deinterleaved(Record):
    """Of lanes `start` to `stop` of the last dim, the first half holds the even lanes of the schema's layout."""

    op: Literal["deinterleaved_to_interleaved"]
    start: SizeOrText = 0
    stop: SizeOrText | None = None

    def apply(self, x: Tensor, context: Context) -> Tensor:
        start, stop = _lanes(self.start, self.stop, x, context)
        if (stop - start) % 2:
            raise DumpError(f"{self.op}: lanes {start} to {stop} are {stop - start}; pairs need an even number")
        before, rotated, after = x[..., :start], x[..., start:stop], x[..., stop:]
        pairs = torch.stack(rotated.chunk(2, dim=-1), dim=-1).flatten(-2)
        return torch.cat((before, pairs, after), dim=-1)


class Lanes(Record):
    """Lanes `start` to `stop` of the last dim."""

    op: Literal["lanes"]
    start: SizeOrText = 0
    stop: SizeOrText | None = None

    def apply(self, x: Tensor, context: Context) -> Tensor:
        start, stop = _lanes(self.start, self.stop, x, context)
        return x[..., start:stop]


class KeepRows(Record):
    """The first or last rows, as many as the step has: a cache that is longer, or rows of padding."""

    op: Literal["keep_rows"]
    side: Literal["first", "last"]

    def apply(self, x: Tensor, context: Context) -> Tensor:
        rows = len(context.positions)
        if len(x) < rows:
            raise DumpError(f"{self.op}: {len(x)} rows, expected at least the step's {rows}")
        return x[:rows] if self.side == "first" else x[len(x) - rows :]


class DropFuture(Record):
    """Entries of an index list [T, K] that point behind the query's own position, or nowhere, become -1, and go last.

    The list is relative to its request: key 0 is the request's first token.
    """

    op: Literal["drop_future"]

    def apply(self, x: Tensor, context: Context) -> Tensor:
        if x.is_floating_point() or x.dim() != 2 or len(x) != len(context.positions):
            raise DumpError(
                f"{self.op}: {x.dtype} {list(x.shape)}, expected an index list with a row for each of the step's "
                f"{len(context.positions)} tokens"
            )
        positions_T1 = torch.tensor(context.positions, dtype=torch.int64, device=x.device)[:, None]
        keys_TK = x.long()
        nowhere = torch.iinfo(torch.int64).max
        kept_TK = keys_TK.masked_fill((keys_TK > positions_T1) | (keys_TK < 0), nowhere).sort(dim=-1).values
        return kept_TK.masked_fill(kept_TK == nowhere, -1)


class Sigmoid(Record):
    """In at least float32, rounded once to the tensor's dtype."""

    op: Literal["sigmoid"]

    def apply(self, x: Tensor, context: Context) -> Tensor:
        _require_floating(self.op, x)
        return x.to(torch.promote_types(x.dtype, torch.float32)).sigmoid().to(x.dtype)


class Scale(Record):
    """Times `by` · `size`^`power`."""

    op: Literal["scale"]
    by: FiniteFloat = 1.0
    size: SizeOrText = 1
    power: FiniteFloat = 1.0

    def factor(self, context: Context) -> float:
        size = context.size(self.size)
        if size < 1 or abs(self.power) > 8:
            raise DumpError(f"{self.op}: {size}^{self.power:g}; expected a size of at least 1, a power of at most 8")
        return self.by * float(size) ** self.power

    def apply(self, x: Tensor, context: Context) -> Tensor:
        _require_floating(self.op, x)
        return x * self.factor(context)


class Rearrange(Record):
    """`"1 H T N -> T H N"`: every dim by a letter, `(H N)` for dims in one, 1 for a dim of size 1.

    Sizes inside a group come from `sizes`, from the model's config, or are what is left over.
    """

    op: Literal["rearrange"]
    dims: Annotated[str, Field(max_length=200)]
    sizes: dict[Annotated[str, Field(pattern=r"^[A-Z]$")], Annotated[int, Field(ge=1, lt=2**31)]] = Field(
        default_factory=dict
    )

    @field_validator("dims")
    @classmethod
    def _can_be_parsed(cls, dims: str) -> str:
        left, right = _sides(dims)
        before, after = ([letter for group in side for letter in group if letter != "1"] for side in (left, right))
        if sorted(before) != sorted(after) or len(set(before)) != len(before):
            raise ValueError("must name each letter once on either side of '->'")
        return dims

    @property
    def keeps_order(self) -> bool:
        """Whether the flattened elements stay in their order."""
        left, right = ([letter for group in side for letter in group if letter != "1"] for side in _sides(self.dims))
        return left == right

    def apply(self, x: Tensor, context: Context) -> Tensor:
        left, right = _sides(self.dims)
        if x.dim() != len(left):
            raise DumpError(f"{self.op} {self.dims!r}: found {x.dim()} dims {list(x.shape)}, expected {len(left)}")
        sizes = {**context.sizes, **self.sizes}
        letters: dict[str, int] = {}
        for group, size in zip(left, x.shape, strict=True):
            letters |= _split(self.dims, group, size, sizes)
        order = [letter for group in left for letter in group if letter != "1"]
        wanted = [letter for group in right for letter in group if letter != "1"]
        atoms = x.reshape([letters[letter] for letter in order])
        shape = [prod(letters.get(letter, 1) for letter in group) for group in right]
        return atoms.permute([order.index(letter) for letter in wanted]).reshape(shape)


Transform = Annotated[
    Deinterleaved | Lanes | KeepRows | DropFuture | Sigmoid | Scale | Rearrange, Field(discriminator="op")
]


def _lanes(start: int | str, stop: int | str | None, x: Tensor, context: Context) -> tuple[int, int]:
    width = x.shape[-1]
    first, last = context.size(start), width if stop is None else context.size(stop)
    if not 0 <= first < last <= width:
        raise DumpError(f"lanes {first} to {last}: the last dim has {width}")
    return first, last


def _require_floating(op: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise DumpError(f"{op}: found {x.dtype}, expected a floating dtype")


def _sides(dims: str) -> tuple[list[list[str]], list[list[str]]]:
    """`"1 T (H N) -> T H N"` as [[1], [T], [H, N]] and [[T], [H], [N]]."""
    left, arrow, right = dims.partition("->")
    sides = []
    for side in (left, right):
        if not re.fullmatch(r"(\s*([A-Z1]|\(\s*[A-Z](\s+[A-Z])*\s*\)))+\s*", side):
            raise ValueError("must be letters, 1 and groups in parentheses, on both sides of '->'")
        sides.append([re.findall(r"[A-Z1]", group) for group in re.findall(r"\([^)]*\)|[A-Z1]", side)])
    if not arrow:
        raise ValueError("must have two sides with '->' between")
    return sides[0], sides[1]


def _split(dims: str, group: Sequence[str], size: int, known: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the letters of one dim; a letter alone takes the dim's size, whatever is known of it."""
    if group == ["1"]:
        if size != 1:
            raise DumpError(f"rearrange {dims!r}: found size {size} where 1 is expected")
        return {}
    if len(group) == 1:
        return {group[0]: size}
    open_letters = [letter for letter in group if letter not in known]
    rest = prod(known[letter] for letter in group if letter in known)
    if len(open_letters) > 1 or size % rest or (not open_letters and rest != size):
        raise DumpError(
            f"rearrange {dims!r}: cannot split a dim of {size} into {' '.join(group)} with "
            f"{ {letter: known[letter] for letter in group if letter in known} }; at most one size may be left open"
        )
    return {letter: known.get(letter, size // rest) for letter in group}
