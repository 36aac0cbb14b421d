"""Into the latent space and out of it, at a decode step: q_nope W_UK in front of the core, W_UV o and the gate behind.

Each is a batched product with a weight of a head; peers are torch's bmm with the small ops around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from optimized.bench.case import Case, Inputs, Peer, Problem, Sizes, checked_rows, triples
from optimized.bench.floors import Work
from optimized.bench.judge import Triple
from reference.config import MlaGeometry, TextConfig


def absorb_cases(config: TextConfig, sizes: Sizes) -> Iterator[Case]:
    for kind, geometry in (("full", config.full), ("sliding", config.sliding)):
        H, N, V, C = (
            geometry.num_attention_heads,
            geometry.qk_nope_head_dim,
            geometry.v_head_dim,
            geometry.kv_lora_rank,
        )
        for T in sizes.batches:
            for op, width, build in (("absorb_queries", N, _absorb), ("unabsorb_gate", V, _unabsorb)):
                # Weight, the rows in and the rows out.
                moved = 2 * H * (width * C + T * (width + C))
                work = Work(moved, 2 * T * H * width * C)
                yield Case(
                    f"{op}.{kind}", f"B={T} {H} x {width} x {C}", T, work, sizes.timing(T), build(T, geometry), (op,)
                )


def _absorb(T: int, geometry: MlaGeometry) -> Callable[[Inputs], Problem]:
    H, N, R, C = (
        geometry.num_attention_heads,
        geometry.qk_nope_head_dim,
        geometry.qk_rope_head_dim,
        geometry.kv_lora_rank,
    )

    def build(given: Inputs) -> Problem:
        q_THX, w_uk_HNC = given.randn(T, H, N + R), given.randn(H, N, C, scale=N**-0.5)
        angles_TP = given.uniform(T, R // 2) * 6.28
        cos_sin_TR = torch.cat((angles_TP.cos(), angles_TP.sin()), dim=-1)
        absorb_queries, rows = given.op("absorb_queries"), checked_rows(T)

        def plain() -> Tensor:
            absorbed_HTC = torch.bmm(q_THX[..., :N].transpose(0, 1), w_uk_HNC)
            return torch.cat((absorbed_HTC.transpose(0, 1), q_THX[..., N:]), dim=-1)

        def check(out_THL: Tensor) -> list[Triple]:
            found = triples(out_THL[rows], given.twin("absorb_queries"), q_THX[rows], w_uk_HNC, cos_sin_TR[rows])
            # The peer rotates nothing: it is held to the absorbed lanes.
            absorbed = Triple(*(value[..., :C] for value in (found[0].out, found[0].eager, found[0].truth)))
            return [absorbed, *found]

        return Problem(
            lambda: absorb_queries(q_THX, w_uk_HNC, cos_sin_TR),
            check,
            [Peer("torch bmm, cat (no rope)", plain, lambda out_THL: out_THL[rows][..., :C])],
        )

    return build


def _unabsorb(T: int, geometry: MlaGeometry) -> Callable[[Inputs], Problem]:
    H, V, C = geometry.num_attention_heads, geometry.v_head_dim, geometry.kv_lora_rank

    def build(given: Inputs) -> Problem:
        o_THC, w_uv_HVC, gate_TH = given.randn(T, H, C), given.weight(H, V, C), given.randn(T, H)
        unabsorb_gate, rows = given.op("unabsorb_gate"), checked_rows(T)

        def plain() -> Tensor:
            core_HTV = torch.bmm(o_THC.transpose(0, 1), w_uv_HVC.mT)
            return (core_HTV.transpose(0, 1) * gate_TH.sigmoid()[..., None]).flatten(1)

        return Problem(
            lambda: unabsorb_gate(o_THC, w_uv_HVC, gate_TH),
            lambda out: triples(
                (out[0][rows], None, None), given.twin("unabsorb_gate"), o_THC[rows], w_uv_HVC, gate_TH[rows]
            ),
            [Peer("torch bmm, sigmoid, mul", plain, lambda out: out[rows])],
        )

    return build
