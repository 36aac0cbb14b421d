"""Modules that compute what the reference's do, and read their weights from a checkpoint folder while they do.

The embedding table gives the rows that are asked for, the head works through the vocabulary in blocks, and a mixture of
experts is cut in two around its expert loop, so that one expert at a time is in memory for all runs of all steps. Sums
are made in the order of the reference's loop: the result is bitwise the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.cache import LayerCache
from reference.checkpoint import CheckpointFolder, load_into
from reference.layers.mlp import Mlp
from reference.layers.moe import Moe
from reference.numerics import Numerics, at_least_float32
from reference.probe import Rows, probe, rows, scope
from reference.text import DecoderLayer

# T tokens  D model  K chosen experts  W vocabulary

# Rows of the head in memory at a time: 168 MB in float64 at the released width.
HEAD_BLOCK = 4096


class StreamedTable(nn.Module):
    """An embedding table: ids [T] to rows [T, D] in `dtype`."""

    def __init__(self, folder: CheckpointFolder, name: str, dtype: torch.dtype):
        super().__init__()
        self._folder, self._name, self._dtype = folder, name, dtype

    def forward(self, token_ids_T: Tensor) -> Tensor:
        return self._folder.tensor(self._name, token_ids_T.tolist()).to(self._dtype)


class StreamedHead(nn.Module):
    """The vocabulary projection: [T, D] to [T, W]. `weight` only says on which device it is."""

    def __init__(self, folder: CheckpointFolder, dtype: torch.dtype):
        super().__init__()
        self._folder, self._dtype = folder, dtype
        self.weight = torch.empty(0)

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_WD = self._folder.tensor("lm_head.weight")
        return torch.cat([F.linear(x_TD, block.to(self._dtype)) for block in weight_WD.split(HEAD_BLOCK)], dim=-1)


@dataclass
class _Step:
    """One step of one request that waits for its experts. `sum_TD` grows expert by expert."""

    rows: Rows
    hidden_TD: Tensor
    ffn_input_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    shared_TD: Tensor
    sum_TD: Tensor


class WaitingSteps:
    """The steps of one run between the router and the experts of layer `name`."""

    def __init__(self, name: str):
        self._name = name
        self._steps: list[_Step] = []

    def append(self, step: _Step) -> None:
        self._steps.append(step)

    def use(self, expert_id: int) -> bool:
        return any(bool((step.expert_ids_TK == expert_id).any()) for step in self._steps)

    def add(self, expert_id: int, expert: Mlp) -> None:
        """Run one expert on its rows of every step. To be called in the order of the ids."""
        for step in self._steps:
            rows_, slots = (step.expert_ids_TK == expert_id).nonzero(as_tuple=True)
            if len(rows_):
                weighted = expert(step.ffn_input_TD[rows_]) * step.weights_TK[rows_, slots, None]
                step.sum_TD = step.sum_TD.index_add(0, rows_, weighted.to(step.sum_TD.dtype))

    def outputs(self) -> Iterator[Tensor]:
        """The layer's output [T, D] of each step, in order, once every expert has run."""
        for step in self._steps:
            with rows(step.rows.request, step.rows.positions, step.rows.kind), scope(self._name):
                with scope("ffn"):
                    routed_TD = probe("routed", step.sum_TD.to(step.hidden_TD.dtype))
                    ffn_output_TD = probe("output", routed_TD + step.shared_TD)
                yield probe("output", step.hidden_TD + ffn_output_TD)


class UpToExperts(nn.Module):
    """A decoder layer that stops before its experts (of which `layer` has none) and leaves its steps to `waiting`.

    It listens to learn which rows it is given.
    """

    def __init__(self, layer: DecoderLayer, waiting: WaitingSteps):
        super().__init__()
        assert isinstance(layer.mlp, Moe)
        self._layer, self._moe, self._waiting = layer, layer.mlp, waiting
        self._rows: Rows | None = None

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        self._rows = rows
        return value

    def forward(self, hidden_TD: Tensor, cache: LayerCache) -> Tensor:
        """Returns the residual stream before the experts; the output comes from `waiting`."""
        layer = self._layer
        hidden_TD = probe("input", hidden_TD)
        with scope("attn"):
            attn_input_TD = probe("input", layer.input_layernorm(hidden_TD))
            hidden_TD = hidden_TD + layer.self_attn(attn_input_TD, cache)
        with scope("ffn"):
            ffn_input_TD = probe("input", layer.post_attention_layernorm(hidden_TD))
            of_step = self._rows
            ids_TK, weights_TK = self._moe.gate(ffn_input_TD)
            shared_TD = probe("shared", self._moe.shared_experts(ffn_input_TD))
        assert of_step is not None
        wide = at_least_float32(hidden_TD.dtype) if self._moe.accumulation == "float32" else hidden_TD.dtype
        sum_TD = torch.zeros_like(hidden_TD, dtype=wide)
        self._waiting.append(_Step(of_step, hidden_TD, ffn_input_TD, ids_TK, weights_TK, shared_TD, sum_TD))
        return hidden_TD


def layer_without_experts(folder: CheckpointFolder, numerics: Numerics, index: int, dtype: torch.dtype) -> DecoderLayer:
    """A layer filled from the folder; where it has experts, they are left out."""
    with torch.device("meta"):
        layer = DecoderLayer(folder.config.text, index, numerics, folder.indexer_rope_layout)
    if isinstance(layer.mlp, Moe):
        layer.mlp.experts = nn.ModuleList()
    load_into(layer, folder, f"model.layers.{index}.", dtype)
    return layer


def loaded_expert(folder: CheckpointFolder, numerics: Numerics, index: int, expert_id: int, dtype: torch.dtype) -> Mlp:
    """One expert of layer `index`."""
    text = folder.config.text
    with torch.device("meta"):
        expert = Mlp(text.hidden_size, text.moe_intermediate_size, numerics)
    load_into(expert, folder, f"model.layers.{index}.mlp.experts.{expert_id}.", dtype)
    return expert
