"""Ops that move rows and compute little: norms, the latents' norm with rope and cache write, SwiGLU, the gate.

Their floor is bytes: every tensor read and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.bench.case import Case, Inputs, Peer, Problem, Sizes, checked_rows, triples
from optimized.bench.floors import Work
from optimized.bench.judge import Triple
from reference.config import MlaGeometry, TextConfig


def pointwise_cases(config: TextConfig, sizes: Sizes) -> Iterator[Case]:
    D, eps, width = config.hidden_size, config.rms_norm_eps, config.intermediate_size
    for T in sizes.tokens:
        timing = sizes.timing(T)
        moved = Work(2 * 4 * T * D, 0)
        yield Case("add_rms_norm", f"T={T} D={D}", T, moved, timing, _add_rms_norm(T, D, eps), ("add_rms_norm",))
        moved = Work(2 * 3 * T * width, 0)
        yield Case("swiglu", f"T={T} F={width}", T, moved, timing, _swiglu(T, width), ("swiglu",))
        for kind, geometry in (("full", config.full), ("sliding", config.sliding)):
            is_full = kind == "full"
            extra = config.index_head_dim + config.index_n_heads if is_full else 0
            lanes = geometry.q_lora_rank + geometry.latent_row + extra
            # Read once; the latents are written to the pool and, dense, for the step; index heads become float32.
            written = lanes + geometry.latent_row + (extra if is_full else 0)
            yield Case(
                f"write_latents.{kind}",
                f"T={T} lanes={lanes + geometry.gate_width}",
                T,
                Work(2 * T * (lanes + written), 0),
                timing,
                _write_latents(T, config, geometry, sizes.page_size),
                ("write_latents",),
            )
    for T in sizes.prompts:
        H, V = config.full.num_attention_heads, config.full.v_head_dim
        moved = Work(2 * T * H * (2 * V + 1), 0)
        yield Case("gate_heads", f"T={T} H={H} V={V}", T, moved, "events", _gate_heads(T, H, V), ("gate_heads",))


def _add_rms_norm(T: int, D: int, eps: float) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        residual_TD, delta_TD, weight_D = given.randn(T, D), given.randn(T, D), 1 + given.randn(D, scale=0.1)
        add_rms_norm, rows = given.op("add_rms_norm"), checked_rows(T)

        def plain() -> Tensor:
            return F.rms_norm(residual_TD + delta_TD, (D,), weight_D, eps)

        def check(out: tuple[Tensor, Tensor]) -> list[Triple]:
            sum_TD, normed_TD = out
            wanted = triples(
                (sum_TD[rows], normed_TD[rows]),
                given.twin("add_rms_norm"),
                residual_TD[rows],
                delta_TD[rows],
                weight_D,
                eps,
            )
            # The norm is that of the rounded sum.
            rounded = triples(normed_TD[rows], given.twin("rms_norm"), sum_TD[rows], weight_D, eps)
            return [*rounded, wanted[0]]

        return Problem(
            lambda: add_rms_norm(residual_TD, delta_TD, weight_D, eps),
            check,
            [Peer("torch add, rms_norm", plain, lambda normed_TD: normed_TD[rows])],
        )

    return build


def _swiglu(T: int, width: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        gate_up_TX = given.randn(T, 2 * width)
        swiglu, rows = given.op("swiglu"), checked_rows(T)

        def plain() -> Tensor:
            gate_TF, up_TF = gate_up_TX.chunk(2, dim=-1)
            return F.silu(gate_TF) * up_TF

        return Problem(
            lambda: swiglu(gate_up_TX),
            lambda out_TF: triples(out_TF[rows], given.twin("swiglu"), gate_up_TX[rows]),
            [Peer("torch silu, mul", plain, lambda out_TF: out_TF[rows])],
        )

    return build


def _gate_heads(T: int, H: int, V: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        core_THV, gate_TH = given.randn(T, H, V), given.randn(T, H)
        gate_heads, rows = given.op("gate_heads"), checked_rows(T)
        return Problem(
            lambda: gate_heads(core_THV, gate_TH),
            lambda out: triples((out[0][rows], None), given.twin("gate_heads"), core_THV[rows], gate_TH[rows]),
            [
                Peer(
                    "torch sigmoid, mul",
                    lambda: (core_THV * gate_TH.sigmoid()[..., None]).flatten(1),
                    lambda out: out[rows],
                )
            ],
        )

    return build


def _write_latents(T: int, config: TextConfig, geometry: MlaGeometry, page_size: int) -> Callable[[Inputs], Problem]:
    is_full = geometry is config.full

    def build(given: Inputs) -> Problem:
        from optimized.kernels.latent import AProjection, LatentWeights

        Q, C, R = geometry.q_lora_rank, geometry.kv_lora_rank, geometry.qk_rope_head_dim
        J, heads = (config.index_head_dim, config.index_n_heads) if is_full else (0, 0)
        layout = AProjection(Q, C, R, geometry.gate_width, J, heads)

        def norm(width: int) -> Tensor:
            return 1 + given.randn(width, scale=0.1)

        weights = LatentWeights(
            norm(Q),
            norm(C),
            norm(R),
            (config.hidden_size / Q) ** 0.5,
            (config.hidden_size / C) ** 0.5,
            norm(J) if is_full else None,
            given.randn(J, scale=0.1) if is_full else None,
        )
        a_TX = given.randn(T, sum(asdict(layout).values()))
        angles_TP = given.uniform(T, R // 2) * 6.28
        cos_sin_TR = torch.cat((angles_TP.cos(), angles_TP.sin()), dim=-1)
        pages = -(-T // page_size) + 1
        # Pools start as zeros, as in production; the op only writes them.
        latent_pool, index_pool = (
            torch.zeros(pages, page_size, width, dtype=given.dtype, device=given.device) if width else None
            for width in (C + R, J)
        )
        slot_T = given.permutation(pages * page_size)[:T]
        index_slot_T = slot_T if is_full else None
        write_latents, rows = given.op("write_latents"), checked_rows(T)

        def with_rows(chosen: Any) -> tuple[Any, ...]:
            slots = (slot_T[chosen], index_pool, None if index_slot_T is None else index_slot_T[chosen])
            return (a_TX[chosen][None], layout, weights, config.rms_norm_eps, cos_sin_TR[chosen], latent_pool, *slots)

        def check(out: Any) -> list[Triple]:
            assert latent_pool is not None
            written = latent_pool.flatten(0, 1)[slot_T[rows]]
            found = triples(
                tuple(None if value is None else value[rows] for value in out),
                given.twin("write_latents"),
                *with_rows(rows),
            )
            return [*found, Triple(written, found[1].eager, found[1].truth)]

        every = slice(None)
        return Problem(lambda: write_latents(*with_rows(every)), check)

    return build
