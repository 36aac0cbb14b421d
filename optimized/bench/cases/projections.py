"""Products with weights that cuBLAS does: the packed a-projections, q_b with the indexer's, kv_b, o, the MLP, the head.

y = x Wᵀ, bfloat16 with float32 sums. There is no kernel of ours and so no peer: these rows show how far cuBLAS is from
the floor where weights are cold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import Tensor

from optimized.bench.case import Case, Inputs, Problem, Sizes, checked_rows, triples
from optimized.bench.floors import gemm
from optimized.bench.text_floors import projection_widths
from reference.config import TextConfig


def projection_cases(config: TextConfig, sizes: Sizes) -> Iterator[Case]:
    """Rows of a decode step and of a prompt; kv_b only where it is expanded, and the head only where it is sampled."""
    D = config.hidden_size
    widths: dict[str, tuple[int, int]] = {}
    for kind, geometry in (("full", config.full), ("sliding", config.sliding)):
        a, b = projection_widths(config, geometry)
        kv_b = geometry.num_attention_heads * (geometry.qk_nope_head_dim + geometry.v_head_dim)
        widths |= {
            f"a_projection.{kind}": (a, D),
            f"q_b.{kind}": (b, geometry.q_lora_rank),
            f"kv_b.{kind}": (kv_b, geometry.kv_lora_rank),
            f"o_projection.{kind}": (D, geometry.value_width),
        }
    widths |= {
        "dense.gate_up": (2 * config.intermediate_size, D),
        "dense.down": (D, config.intermediate_size),
        "head": (config.vocab_size, D),
    }
    for op, (outputs, inputs) in widths.items():
        tokens = sizes.prompts if op.startswith("kv_b") else sizes.batches if op == "head" else sizes.tokens
        for T in tokens:
            shape = f"M={T} N={outputs} K={inputs}"
            work = gemm(T, outputs, inputs)
            yield Case(op, shape, T, work, sizes.timing(T), _product(T, outputs, inputs))


def _product(T: int, outputs: int, inputs: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        x_TX, weight_YX = given.randn(T, inputs), given.weight(outputs, inputs)
        rows = checked_rows(T)

        def ours() -> Tensor:
            return F.linear(x_TX, weight_YX)

        return Problem(ours, lambda out_TY: triples(out_TY[rows], F.linear, x_TX[rows], weight_YX))

    return build
