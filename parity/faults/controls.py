"""Negative controls: changes that are no mistakes, and that a comparison must not call different.

Other reduction orders, other places of rounding, other tie breaks. In float64 they agree to 1e-10; in bfloat16 and
float32 they are within the measured noise. Source: fault specification, section M.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import reference.layers.indexer
import reference.layers.moe
from parity.faults.fault import Fault, Patch
from reference.layers.norm import RMSNorm
from reference.numerics import PRESETS, Numerics, at_least_float32
from reference.text import TextModel

# Fields of `Numerics` that only move roundings; the others choose something else.
_ROUNDING_FIELDS = (
    "rms_norm_rounding",
    "rescale_rounding",
    "rope_full",
    "rope_sliding",
    "attention_rounding",
    "attention_form",
    "gate_rounding",
    "swiglu_rounding",
    "index_dtype",
    "expert_accumulation",
)


def _rounding_of(preset: str) -> Callable[[Numerics], Numerics]:
    """The roundings of a preset, without its choices."""
    fields = {name: getattr(PRESETS[preset], name) for name in _ROUNDING_FIELDS}
    return lambda numerics: replace(numerics, **fields)


def _in_halves(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """x Wᵀ as the sum of two products over halves of the inner dim, added in float32."""

    def forward(module: nn.Linear, x: Tensor) -> Tensor:
        half, wide = x.shape[-1] // 2, at_least_float32(x.dtype)
        weight = module.weight.to(wide)
        left, right = x[..., :half].to(wide), x[..., half:].to(wide)
        return (left @ weight[:, :half].mT + right @ weight[:, half:].mT).to(x.dtype)

    return forward


def _summed_backwards(normalized: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The mean of squares, added up from the last lane to the first."""

    def backwards(module: RMSNorm, x: Tensor) -> Tensor:
        return normalized(module, x.flip(-1)).flip(-1)

    return backwards


def _experts_backwards(routed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The sum over experts from the highest id to the lowest."""

    def backwards(module: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        dtype = at_least_float32(x_TD.dtype)
        sum_TD = torch.zeros_like(x_TD, dtype=dtype)
        for expert_id in reversed(range(len(module.experts))):
            rows, slots = (ids_TK == expert_id).nonzero(as_tuple=True)
            if len(rows):
                weighted = module.experts[expert_id](x_TD[rows]) * weights_TK[rows, slots, None]
                sum_TD = sum_TD.index_add(0, rows, weighted.to(dtype))
        return sum_TD.to(x_TD.dtype)

    return backwards


def _later_key_wins(select: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Equal scores go to the larger position: another tie rule, on exact ties only."""

    def selected(scores_TS: Tensor, visible_TS: Tensor, topk: int) -> Tensor:
        last = scores_TS.shape[1] - 1
        mirrored = select(scores_TS.flip(-1), visible_TS.flip(-1), topk)
        positions = (last - mirrored).masked_fill(mirrored < 0, last + 1).sort(dim=-1).values
        return positions.masked_fill(positions > last, -1)

    return selected


def _in_small_blocks(constructor: Callable[..., None]) -> Callable[..., None]:
    def construct(model: TextModel, *args: Any, **kwargs: Any) -> None:
        constructor(model, *args, **(kwargs | {"workspace_bytes": 4096}))

    return construct


def _control(control_id: str, says: str, *patches: Patch, numerics: Any = None) -> Fault:
    return Fault(control_id, says, "I", (), "never", "analysis", patches=patches, numerics=numerics)


CONTROLS = (
    _control("transformers_rounding", "rounds where transformers does", numerics=_rounding_of("transformers")),
    _control("vllm_rounding", "rounds where vLLM does", numerics=_rounding_of("vllm")),
    _control("absorbed", "attends in the latent space", numerics=lambda n: replace(n, attention_form="absorbed")),
    _control("linear_in_halves", "adds products of two halves", Patch(nn.Linear, "forward", _in_halves)),
    _control("norm_backwards", "sums squares backwards", Patch(RMSNorm, "normalized", _summed_backwards)),
    _control(
        "experts_backwards", "sums experts backwards", Patch(reference.layers.moe.Moe, "_routed", _experts_backwards)
    ),
    _control("tie_order", "gives ties to the later key", Patch(reference.layers.indexer, "select", _later_key_wins)),
    _control("small_blocks", "works in blocks of queries and heads", Patch(TextModel, "__init__", _in_small_blocks)),
)
