"""Single layers of each kind, in a decode step and over a prompt, beside transformers' layer on the same weights.

A decode step continues requests whose cached rows are random; a prompt starts at position 0. What is judged is what the
layer adds to the residual stream, in a few rows, each run again as a decode step of its own on what the timed run has
cached before it, by the twins in float64 with the experts and keys that the timed run chose. How good those are is
judged apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from optimized.bench.case import Case, Inputs, Problem, Sizes, checked_rows
from optimized.bench.judge import Triple
from optimized.bench.layer_choices import Choices, GivenOps, NotedOps, choice_triples
from optimized.bench.layer_run import KEPT_ROWS, LayerRun, drawn_layer, layer_alone, mapped
from optimized.bench.peers_layer import LayerInputs, transformers_layers
from optimized.bench.text_floors import layer_works
from optimized.device import choose
from optimized.weights import PackedText
from reference.config import TextConfig

# T rows  D model

ATTENTION = (
    "add_parts_rms_norm", "product", "product_parts", "write_latents", "rotate_queries_", "absorb_queries",
    "unabsorb_gate", "gate_heads", "expanded_attention",
)  # fmt: skip
FULL = ("index_scores", "select_keys", "select_bits", "sparse_attention")
SLIDING = ("ring_attention", "gather_rows", "store_rows")
DENSE = ("product_swiglu",)
EXPERTS = ("route", "sort_rows", "expert_swiglu", "expert_down")


def layer_cases(config: TextConfig, sizes: Sizes) -> Iterator[Case]:
    """The first layer of each kind that there is; the shortest context and prompt."""
    context, prompt = sizes.contexts[0], sizes.prompts[0]
    kinds = {(config.is_full(i), config.is_moe(i)): i for i in reversed(range(config.num_hidden_layers))}
    for (is_full, is_moe), layer in sorted(kinds.items(), key=lambda item: item[1]):
        op = f"layer.{'full' if is_full else 'sliding'}.{'experts' if is_moe else 'dense'}"
        uses = (*ATTENTION, *(FULL if is_full else SLIDING), *(EXPERTS if is_moe else DENSE))
        for batch in (*sizes.batches, 0):
            tokens, shape = (batch, f"B={batch} S={context}") if batch else (prompt, f"T={prompt}")
            work = layer_works(config, layer, batch, context if batch else prompt)
            build = _layer(layer, batch, context if batch else prompt, sizes.page_size)
            yield Case(op, shape, tokens, work, sizes.timing(tokens), build, uses, packages=True)


def _layer(layer: int, batch: int, length: int, page_size: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        config = layer_alone(given.config, layer)
        weights = drawn_layer(config, given.generator, given.dtype)
        ops = given.ops(packages=True)
        seen, count = ([length] * batch, 1) if batch else ([0], length)
        run = LayerRun(config, weights, ops, seen, count, page_size)
        if batch:
            run.fill(given.generator)
        hidden_TD = given.randn(len(seen) * count, config.hidden_size)
        normed_TD = run.norm(hidden_TD)
        rows = checked_rows(len(hidden_TD))
        if not batch and not config.is_full(0):
            # Of a sliding layer's prompt only the last rows' windows are still cached.
            rows = list(range(max(0, length - KEPT_ROWS - 1), length))

        def check(out_TD: Tensor) -> list[Triple]:
            # Caches, which a peer may have been given copies of, hold the same values after each run.
            noted = NotedOps(ops)
            run.again_with(noted)(hidden_TD, normed_TD)
            choices = noted.noted.of_rows(rows)
            few_TD = hidden_TD[rows]
            used = used_weights(weights, choices)
            eager_TD, eager = _twin(run, rows, used, choices, few_TD)
            truth_TD, truth = _twin(run, rows, mapped(used, Tensor.double), choices, few_TD.double())
            added = Triple(out_TD[rows] - few_TD, eager_TD - few_TD, truth_TD - few_TD.double())
            return [added, *choice_triples(choices, eager, truth, given.dtype)]

        inputs = LayerInputs(hidden_TD.view(len(seen), count, -1), seen[0], *run.cached())
        peers = transformers_layers(config, weights, inputs, lambda out_TD: out_TD[rows] - hidden_TD[rows])
        return Problem(lambda: run(hidden_TD, normed_TD), check, peers)

    return build


def used_weights(weights: PackedText, choices: Choices) -> PackedText:
    """The weights with the experts that these choices use, and the shared ones: few enough to be widened."""
    layer = weights.layers[0]
    if layer.experts is None or choices.experts_TK is None:
        return weights
    stack = layer.experts
    used = choices.experts_TK.unique().long()
    members = torch.cat((used, torch.arange(stack.routed, len(stack.gate_up_EXD), device=used.device)))
    experts = dataclasses.replace(
        stack, gate_up_EXD=stack.gate_up_EXD[members], down_EDF=stack.down_EDF[members], routed=len(used)
    )
    return dataclasses.replace(weights, layers=(dataclasses.replace(layer, experts=experts),))


def _twin(
    run: LayerRun, rows: list[int], weights: PackedText, choices: Choices, hidden_TD: Tensor
) -> tuple[Tensor, GivenOps]:
    """These rows through the torch twins with given choices, and what the twins would have chosen."""
    ops = GivenOps(choose(hidden_TD.device, "torch"), choices)
    few = run.of_rows(rows, weights, ops)
    return few(hidden_TD, few.norm(hidden_TD)), ops
