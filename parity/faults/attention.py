"""Section G: the attention core (scale, absorbed form, softmax) and the output gate.

Source: text_model specification, sections 8, 9, 10 and 14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import reference.layers.attention
import reference.layers.mla
from parity.faults.configuration import with_scaled_logits
from parity.faults.fault import Fault, Patch, after_construction
from parity.faults.norms import in_bfloat16
from reference.config import MlaGeometry, TextConfig
from reference.layers.attention import LatentAttention, masked_softmax
from reference.layers.mla import MlaAttention, SlidingAttention
from reference.numerics import at_least_float32
from reference.probe import probe
from reference.text import DecoderLayer

# T query tokens  S key tokens  D model  H heads  N nope dim  R rope dim  C kv latent  V value dim
# X lanes of a query (N + R, or C + R in the latent space)  G gates (one a head, or one a lane)

CORE, GATE, OUTPUT = "layers.{i}.attn.core", "layers.{i}.attn.gate", "layers.{i}.attn.output"


def _scale_of_latent_row(attention: Any, config: TextConfig, geometry: MlaGeometry, *_: Any) -> None:
    with_scaled_logits(attention, (geometry.qk_head_dim / geometry.latent_row) ** 0.5)


def _scale_of_full(attention: Any, config: TextConfig, *_: Any) -> None:
    with_scaled_logits(attention, (config.sliding.qk_head_dim / config.full.qk_head_dim) ** 0.5)


def _scale_of_latent_row_for_one(attention: Any, config: TextConfig, geometry: MlaGeometry, *_: Any) -> None:
    """A step of one token takes the absorbed form, which has another scale than the expanded one."""
    right, factor = attention.attention, (geometry.qk_head_dim / geometry.latent_row) ** 0.5

    def scaled(q_nope_THN: Tensor, q_rope_THR: Tensor, *keys: Tensor) -> Tensor:
        own = factor if len(q_nope_THN) == 1 else 1.0
        return right(q_nope_THN * own, q_rope_THR * own, *keys)

    attention.attention = scaled


def _key_rows_transposed(absorbed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The key rows of each head, [N, C] in memory, are read as [C, N]."""

    def run(attention: Any, *arguments: Tensor) -> Tensor:
        *queries_and_keys, weight_HXC, visible_TS = arguments
        N, C = attention.geometry.qk_nope_head_dim, weight_HXC.shape[-1]
        misread_HNC = weight_HXC[:, :N].flatten(1).unflatten(1, (C, N)).mT
        weight_HXC = torch.cat((misread_HNC, weight_HXC[:, N:]), dim=1)
        return absorbed(attention, *queries_and_keys, weight_HXC, visible_TS)

    return run


def _bfloat16_softmax(scores_HTS: Tensor, visible_TS: Tensor) -> Tensor:
    return in_bfloat16(masked_softmax(in_bfloat16(scores_HTS), visible_TS))


def _raw_scores_rounded(
    query_HTX: Tensor, key_HSX: Tensor, value_HSV: Tensor, visible_TS: Tensor, scale: float, each_op: bool
) -> Tensor:
    wide = at_least_float32(value_HSV.dtype)
    scores_HTS = in_bfloat16(query_HTX.to(wide) @ key_HSX.to(wide).mT) * scale
    return (masked_softmax(scores_HTS, visible_TS) @ value_HSV.to(wide)).to(value_HSV.dtype)


def _filled_with_minimum(scores_HTS: Tensor, visible_TS: Tensor) -> Tensor:
    wide = scores_HTS.to(at_least_float32(scores_HTS.dtype))
    return wide.masked_fill(~visible_TS, torch.finfo(torch.float32).min).softmax(-1)


def _maximum_over_all(scores_HTS: Tensor, visible_TS: Tensor) -> Tensor:
    wide = scores_HTS.to(at_least_float32(scores_HTS.dtype))
    exponentials_HTS = (wide - wide.amax(-1, keepdim=True)).exp() * visible_TS
    return exponentials_HTS / exponentials_HTS.sum(-1, keepdim=True)


def _padded_values(attention: Any, *_: Any) -> None:
    """Value lanes are padded to the width of keys, and heads are joined with the padding between them."""
    right = attention.attention

    def leaking(*arguments: Tensor) -> Tensor:
        core_THV = right(*arguments)
        _, H, V = core_THV.shape
        padding = max(0, attention.geometry.qk_head_dim - V)
        return F.pad(core_THV, (0, padding)).flatten(1)[:, : H * V].unflatten(1, (H, V))

    attention.attention = leaking


def _drop_gate(attention: Any, *_: Any) -> None:
    attention._gated = lambda core_THV, logits: core_THV


def _gate_of_head_0(attention: Any, *_: Any) -> None:
    right = attention._gated

    def broadcast(core_THV: Tensor, logits: Tensor) -> Tensor:
        by_head = logits.unflatten(1, (core_THV.shape[1], -1))
        return right(core_THV, by_head[:, :1].expand_as(by_head).flatten(1))

    attention._gated = broadcast


def _gates_along_lanes(gate: Tensor, core_THV: Tensor) -> Tensor:
    """Lane j of the joined heads has gate j modulo G."""
    _, H, V = core_THV.shape
    return gate.repeat(1, H * V // gate.shape[1]).unflatten(1, (H, V))


def _gate_from_residual(layer: Any, *_: Any, **__: Any) -> None:
    norm, gate = layer.input_layernorm, layer.self_attn.g_proj
    right_norm, right_gate = norm.forward, gate.forward
    residual: list[Tensor] = []

    def remembered(hidden_TD: Tensor) -> Tensor:
        residual[:] = [hidden_TD]
        return right_norm(hidden_TD)

    norm.forward = remembered
    gate.forward = lambda attn_input_TD: right_gate(residual[0])


def _squashed_by(squash: Callable[[Tensor], Tensor]) -> tuple[Patch, ...]:
    """Patches that put `squash` in place of the gate's sigmoid, whatever the numerics round."""

    def gated(core_THV: Tensor, logits: Tensor) -> Tensor:
        wide = at_least_float32(core_THV.dtype)
        gate = probe("gate", squash(logits.to(wide)))
        return (core_THV.to(wide) * reference.layers.mla._by_head(gate, core_THV)).to(core_THV.dtype)

    names = ("_gate_then_round", "_round_then_gate")
    return tuple(Patch(reference.layers.mla, name, lambda original: gated) for name in names)


def _sigmoid_of_activation(core_THV: Tensor, logits: Tensor) -> Tensor:
    gate = probe("gate", logits.sigmoid())
    return core_THV * reference.layers.mla._by_head(gate, core_THV)


def _gate_behind_projection(attention: Any, *_: Any) -> None:
    """Each head gates an equal share of the projected lanes."""
    right_gated, right_projection = attention._gated, attention.o_proj.forward
    gates: list[Tensor] = []

    def remembered(core_THV: Tensor, logits: Tensor) -> Tensor:
        right_gated(core_THV, logits)  # shows the gate
        gates[:] = [logits.sigmoid()]
        return core_THV

    def gated(core: Tensor) -> Tensor:
        output_TD, gate_TG = right_projection(core), gates[0]
        D, G = output_TD.shape[1], gate_TG.shape[1]
        return output_TD * gate_TG[:, torch.arange(D, device=gate_TG.device) * G // D]

    attention._gated, attention.o_proj.forward = remembered, gated


def _gate_on_values(attention: Any, *_: Any) -> None:
    """The gate of each key multiplies its values, and is kept beside its cached row."""
    right_keys, geometry = attention._keys, attention.geometry
    H, N, V = geometry.num_attention_heads, geometry.qk_nope_head_dim, geometry.v_head_dim
    gates: list[Tensor] = []

    def keys(attn_input_TD: Tensor, q_latent_TQ: Tensor, positions_T: Tensor, cache: Any) -> Any:
        rows, visible_TS = right_keys(attn_input_TD, q_latent_TQ, positions_T, cache)
        new_TG = attention.g_proj(attn_input_TD).sigmoid()
        written_SG = vars(cache).get("gates", new_TG[:0])[: int(positions_T[0])]
        cache.gates = torch.cat((written_SG, new_TG))
        gates[:] = [cache.gates[rows.positions_S]]
        return rows, visible_TS

    def core(
        q_nope_THN: Tensor,
        q_rope_THR: Tensor,
        kv_latent_SC: Tensor,
        k_rope_SR: Tensor,
        kv_b_weight: Tensor,
        visible_TS: Tensor,
    ) -> Tensor:
        k_nope_SHN, value_SHV = F.linear(kv_latent_SC, kv_b_weight).unflatten(1, (H, N + V)).split((N, V), dim=-1)
        scores_HTS = torch.einsum("thn,shn->hts", q_nope_THN, k_nope_SHN)
        scores_HTS = scores_HTS + torch.einsum("thr,sr->hts", q_rope_THR, k_rope_SR)
        probabilities_HTS = masked_softmax(scores_HTS * geometry.softmax_scale, visible_TS).to(value_SHV.dtype)
        return torch.einsum("hts,shv->thv", probabilities_HTS, value_SHV * gates[0].unflatten(1, (H, -1)))

    attention._keys, attention.attention = keys, core
    _drop_gate(attention)


def _rounded_gate_logits(attention: Any, *_: Any) -> None:
    right = attention.g_proj.forward
    attention.g_proj.forward = lambda attn_input_TD: in_bfloat16(right(attn_input_TD))


def _rounded_gate(by_head: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda gate, core_THV: by_head(in_bfloat16(gate), core_THV)


ATTENTION_FAULTS = (
    Fault(
        "scale_from_latent_row",
        says="the softmax scale of the absorbed form comes from the width of a cached row",
        visibility="V",
        first=(CORE,),
        visible_when="T = 2",
        source="vllm.cpp",
        patches=(after_construction(MlaAttention, _scale_of_latent_row),),
    ),
    Fault(
        "scale_from_latent_row_in_decode",
        says="the softmax scale comes from the width of a cached row in steps of one token, and is right in prefill",
        visibility="C",
        first=(CORE,),
        visible_when="a decode step",
        source="optimum-intel #1877, vllm.cpp #699",
        patches=(after_construction(MlaAttention, _scale_of_latent_row_for_one),),
    ),
    Fault(
        "scale_full_on_swa",
        says="sliding layers have the softmax scale of full layers",
        visibility="V",
        first=(CORE,),
        visible_when="T = 2, a sliding layer",
        source="analysis",
        patches=(after_construction(SlidingAttention, _scale_of_full),),
    ),
    Fault(
        "absorb_transpose",
        says="the absorbed form reads the key rows of kv_b_proj as if they were stored transposed",
        visibility="V",
        first=(CORE,),
        visible_when="T = 2",
        source="vllm.cpp",
        numerics=lambda numerics: replace(numerics, attention_form="absorbed"),
        patches=(Patch(LatentAttention, "_absorbed", _key_rows_transposed),),
    ),
    Fault(
        "softmax_bf16",
        says="the softmax reads scores in bfloat16 and gives probabilities in bfloat16",
        visibility="V",
        first=(CORE,),
        visible_when="T = 2; grows with T",
        source="analysis",
        patches=(Patch(reference.layers.attention, "masked_softmax", lambda original: _bfloat16_softmax),),
    ),
    Fault(
        "scores_bf16_before_scale",
        says="products of queries and keys are rounded to bfloat16 before they are scaled",
        visibility="N",
        first=(CORE,),
        visible_when="bit test; large scores",
        source="vLLM decode path",
        patches=(Patch(reference.layers.attention, "attend", lambda original: _raw_scores_rounded),),
    ),
    Fault(
        "masked_fill_value",
        says="masked scores are the lowest float32 number in place of minus infinity",
        visibility="I",
        first=(CORE,),
        visible_when="never: every row sees a key",
        source="vllm.cpp",
        patches=(Patch(reference.layers.attention, "masked_softmax", lambda original: _filled_with_minimum),),
    ),
    Fault(
        "prefill_max_over_masked",
        says="the maximum that the softmax subtracts is taken over masked keys too",
        visibility="I",
        first=(CORE,),
        visible_when="never: only a log-sum-exp would show it",
        source="vllm.cpp",
        patches=(Patch(reference.layers.attention, "masked_softmax", lambda original: _maximum_over_all),),
    ),
    Fault(
        "v_pad_not_sliced",
        says="value lanes are padded to the width of keys and the padding stays between the heads",
        visibility="V",
        first=(CORE,),
        visible_when="T = 1",
        source="vLLM, which slices",
        patches=(after_construction(MlaAttention, _padded_values),),
    ),
    Fault(
        "gate_dropped",
        says="attention has no output gate",
        visibility="V",
        first=(OUTPUT,),
        visible_when="T = 1",
        source="vllm.cpp",
        patches=(after_construction(MlaAttention, _drop_gate),),
    ),
    Fault(
        "gate_head0_broadcast",
        says="the gate of head 0 is every head's",
        visibility="V",
        first=(GATE,),
        visible_when="T = 1",
        source="vllm.cpp",
        patches=(after_construction(MlaAttention, _gate_of_head_0),),
    ),
    Fault(
        "gate_lanewise",
        says="gates follow each other lane by lane in place of head by head",
        visibility="V",
        first=(OUTPUT,),
        visible_when="T = 1, one gate a head",
        source="vllm.cpp",
        patches=(Patch(reference.layers.mla, "_by_head", lambda original: _gates_along_lanes),),
    ),
    Fault(
        "gate_wrong_input",
        says="the gate is computed from the residual stream in place of the normed layer input",
        visibility="V",
        first=(GATE,),
        visible_when="T = 1",
        source="vllm.cpp",
        patches=(after_construction(DecoderLayer, _gate_from_residual),),
    ),
    Fault(
        "gate_hard_step",
        says="the gate is a clamped line in place of a sigmoid",
        visibility="V",
        first=(GATE,),
        visible_when="T = 1",
        source="vllm.cpp",
        patches=_squashed_by(F.hardsigmoid),
    ),
    Fault(
        "gate_after_o_proj",
        says="the gates multiply the projected output, a share of its lanes each",
        visibility="V",
        first=(OUTPUT,),
        visible_when="T = 1",
        source="analysis",
        patches=(after_construction(MlaAttention, _gate_behind_projection),),
    ),
    Fault(
        "gate_on_v",
        says="values are gated when they are written, by the gate of the key in place of the query's",
        visibility="V",
        first=(CORE,),
        visible_when="T = 2 (T = 1: only the place of the gate)",
        source="analysis",
        patches=(after_construction(MlaAttention, _gate_on_values),),
    ),
    Fault(
        "gate_tanh_or_2sigmoid",
        says="the gate is a hyperbolic tangent in place of a sigmoid",
        visibility="V",
        first=(GATE,),
        visible_when="T = 1",
        source="analysis",
        patches=_squashed_by(torch.tanh),
    ),
    Fault(
        "gate_sigmoid_bf16",
        says="the sigmoid is applied to gate logits in the activation dtype",
        visibility="I",
        first=(GATE,),
        visible_when="never: the framework computes it in float32 and rounds once",
        source="transformers 5.24 and SGLang against vLLM",
        numerics=lambda numerics: replace(numerics, gate_rounding="twice"),
        patches=(Patch(reference.layers.mla, "_round_then_gate", lambda original: _sigmoid_of_activation),),
    ),
    Fault(
        "gate_logit_fp32",
        says="one side keeps gate logits in float32 while the other rounds them to bfloat16",
        visibility="N",
        first=(GATE,),
        visible_when="bit test",
        source="vllm.cpp",
        patches=(after_construction(MlaAttention, _rounded_gate_logits),),
    ),
    Fault(
        "gate_product_rounding",
        says="one side keeps the sigmoid in float32 until the product while the other rounds it to bfloat16",
        visibility="N",
        first=(OUTPUT,),
        visible_when="bit test",
        source="vllm.cpp, llama.cpp",
        patches=(Patch(reference.layers.mla, "_by_head", _rounded_gate),),
    ),
)
