"""Products with weights: the packed a-projections, q_b with the indexer's, kv_b, o, the dense MLP, the head.

y = x Wᵀ, bfloat16 with float32 sums, as the model calls it: in parts where the next op adds them up, with SwiGLU behind
the gate and up projections. Few rows run through kernels of ours, many through the library, which is the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import Tensor

from optimized.bench.case import Case, Inputs, Peer, Problem, Sizes, checked_rows, triples
from optimized.bench.floors import gemm
from optimized.bench.text_floors import projection_widths
from reference.config import TextConfig

# T rows  X outputs  Y depth


def projection_cases(config: TextConfig, sizes: Sizes) -> Iterator[Case]:
    """Rows of a decode step and of a prompt; kv_b only where it is expanded, and the head only where it is sampled."""
    D = config.hidden_size
    products: dict[str, tuple[str, int, int]] = {}
    for kind, geometry in (("full", config.full), ("sliding", config.sliding)):
        a, b = projection_widths(config, geometry)
        kv_b = geometry.num_attention_heads * (geometry.qk_nope_head_dim + geometry.v_head_dim)
        products |= {
            f"a_projection.{kind}": ("product_parts", a, D),
            f"q_b.{kind}": ("product", b, geometry.q_lora_rank),
            f"kv_b.{kind}": ("product", kv_b, geometry.kv_lora_rank),
            f"o_projection.{kind}": ("product_parts", D, geometry.value_width),
        }
    products |= {
        "dense.gate_up": ("product_swiglu", 2 * config.intermediate_size, D),
        "dense.down": ("product_parts", D, config.intermediate_size),
        "head": ("product", config.vocab_size, D),
    }
    for op, (function, outputs, inputs) in products.items():
        tokens = sizes.prompts if op.startswith("kv_b") else sizes.batches if op == "head" else sizes.tokens
        for T in tokens:
            shape = f"M={T} N={outputs} K={inputs}"
            work = gemm(T, outputs, inputs)
            yield Case(op, shape, T, work, sizes.timing(T), _product(function, T, outputs, inputs), (function,))


def _product(function: str, T: int, outputs: int, inputs: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        from optimized.kernels.parts import whole

        x_TY, weight_XY = given.randn(T, inputs), given.weight(outputs, inputs)
        product, twin, rows = given.op(function), given.twin(function), checked_rows(T)

        def summed(y: Tensor) -> Tensor:
            return whole(y, given.dtype) if y.dim() == 3 else y

        def plain() -> Tensor:
            y_TX = F.linear(x_TY, weight_XY)
            if function != "product_swiglu":
                return y_TX
            gate_TF, up_TF = y_TX.chunk(2, dim=-1)
            return F.silu(gate_TF) * up_TF

        def rows_of_twin(x_TY: Tensor, weight_XY: Tensor) -> Tensor:
            y = twin(x_TY, weight_XY)
            return y[0] if y.dim() == 3 else y

        return Problem(
            lambda: product(x_TY, weight_XY),
            lambda y: triples(summed(y)[rows], rows_of_twin, x_TY[rows], weight_XY),
            [Peer("torch linear", plain, lambda y_TX: y_TX[rows])],
        )

    return build
