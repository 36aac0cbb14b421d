"""How rounding grows: the reference in a storage dtype against its float64 truth, over depth and length.

cascade    error behind a layer when everything before it was rounded as well: what arrives
isolated   error behind a layer that started from the same input as the truth: what its own rounding contributes
growth     cascade error behind the layer less that before it. Where this is far above the isolated error, the layer
           amplifies what it receives; where it is negative, the layer damps it.

Errors are relative (norm of the difference over norm of the true row), of the worst row. The discrete choices of the
rounded run are replayed in the truth: an exchanged expert would hide all rounding behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parity.compare import compare
from parity.errors import ParityError
from parity.findings import View
from parity.judge import Reference
from parity.run import traced
from parity.schema import layer_of, pattern_of
from parity.workload import Workload

DTYPES = ("bfloat16", "float32")
LENGTHS = (4, 16, 64, 256)
_VIEWS: tuple[View, ...] = ("cascade", "isolated")


class DriftError(ParityError):
    """A dtype or a length that drift cannot be measured for."""


@dataclass(frozen=True)
class DriftRow:
    """Behind one layer, or at the logits (`layer` None). `length` in tokens, one prefill."""

    layer: int | None
    tensor: str
    length: int
    dtype: str
    cascade: float
    isolated: float
    growth: float


@dataclass(frozen=True)
class Drift:
    """By dtype, then length, then depth. `exchanged` counts rows whose choice in the rounded run is not the truth's."""

    rows: tuple[DriftRow, ...]
    choice_rows: int
    exchanged: int


def drift(
    reference: Reference,
    dtypes: Sequence[str] = DTYPES,
    lengths: Sequence[int] = LENGTHS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> Drift:
    """Measure each dtype at each length. `reference(dtype)` builds the model in a dtype.

    Raises: DriftError for another dtype than bfloat16, float16 or float32, or a length below one token.
    """
    known = ("bfloat16", "float16", "float32")
    if not dtypes or not set(dtypes) <= set(known):
        raise DriftError(f"drift: a dtype must be one of {', '.join(known)}, found {', '.join(dtypes) or 'none'}")
    if not lengths or min(lengths) < 1:
        raise DriftError(f"drift: a length is at least one token, found {list(lengths)}")
    rows: list[DriftRow] = []
    choice_rows = exchanged = 0
    for dtype in dtypes:
        for length in sorted(set(lengths)):
            progress(f"{dtype}: {length:,} tokens")
            workload = Workload.parse(f"p:a{length}", seed)
            candidate = traced(reference(getattr(torch, dtype)), workload, patterns=_RECORDED)
            # Without draws: errors against the truth are wanted, not verdicts.
            found = compare(reference, candidate, getattr(torch, dtype), workload, _VIEWS, draws=0)
            rows += _rows({(p.name, p.view): p.error for p in found.probes}, candidate.names(), length, dtype)
            choice_rows += found.choice_rows
            exchanged += len({(c.name, c.exchange.position) for c in found.choices})
    return Drift(tuple(rows), choice_rows, exchanged)


# Inputs and outputs of the layers (and, by the same glob, of their halves), and the choices, which are replayed.
_RECORDED = (
    "embeddings",
    "layers.*.output",
    "final_norm",
    "logits",
    "layers.*.attn.index.selected",
    "layers.*.ffn.router.expert_ids",
)


def _rows(errors: dict[tuple[str, str], float], names: Sequence[str], length: int, dtype: str) -> list[DriftRow]:
    rows, before = [], 0.0
    for name in names:
        if pattern_of(name) in ("layers.{i}.output", "logits"):
            cascade, isolated = errors[name, "cascade"], errors[name, "isolated"]
            rows.append(DriftRow(layer_of(name), name, length, dtype, cascade, isolated, cascade - before))
            before = cascade
    return rows
