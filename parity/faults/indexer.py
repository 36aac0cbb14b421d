"""Section E, first part: the indexer of the full layers, from its queries and keys to its scores.

These show in the index probes from the first tokens on, but change an output only where the selection prunes: with more
than `index_topk` visible keys. The selection itself: `selection`.
Source: text_model specification, section 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import reference.layers.indexer
from parity.faults.fault import Fault, Patch, Weights, after_construction
from parity.faults.norms import in_bfloat16
from reference.config import NoteConfig, TextConfig
from reference.layers.index_quantization import hadamard_matrix
from reference.layers.indexer import Indexer
from reference.layers.mla import FullAttention
from reference.layers.norm import LayerNorm
from reference.numerics import Numerics, at_least_float32
from reference.probe import Override
from reference.text import DecoderLayer

# T query tokens  S key tokens  D model  I index heads  J index head dim

QUERY, KEY = "layers.{i}.attn.index.query", "layers.{i}.attn.index.key"
HEAD_WEIGHTS, SCORES = "layers.{i}.attn.index.head_weights", "layers.{i}.attn.index.scores"
PRUNING_OR_PROBE = "T > index_topk (index probes: T = 1)"
PRUNING_OR_ROTATED_PROBE = "T > index_topk (index probes: T = 2)"


def _tail_lanes(indexer: Any, *_: Any) -> None:
    indexer.rope_layout = "tail"


def _unconverted_norm(weights: Weights, config: NoteConfig) -> Weights:
    shift = -config.text.full.qk_rope_head_dim
    return {name: tensor.roll(shift) if "indexer.k_norm" in name else tensor for name, tensor in weights.items()}


def _rms_in_place_of_layer_norm(norm: LayerNorm, x: Tensor) -> Tensor:
    wide = x.to(at_least_float32(x.dtype))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight).to(x.dtype)


def _model_eps(indexer: Any, config: TextConfig, *_: Any) -> None:
    indexer.k_norm.eps = config.rms_norm_eps


def _norm_after_rope(indexer: Any, *_: Any) -> None:
    norm, rotated = indexer.k_norm.forward, indexer._rotated

    def rotated_then_normed(x: Tensor, positions_T: Tensor) -> Tensor:
        is_key = x.dim() == 2
        return norm(rotated(x, positions_T)) if is_key else rotated(x, positions_T)

    indexer.k_norm.forward = lambda x: x
    indexer._rotated = rotated_then_normed


def _keeps_residual(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(layer: Any, hidden_TD: Tensor, cache: Any) -> Tensor:
        if isinstance(layer.self_attn, FullAttention):
            layer.self_attn.indexer.residual_TD = hidden_TD
        return forward(layer, hidden_TD, cache)

    return run


def _reads_residual(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda indexer, attn_input_TD, *rest: forward(indexer, indexer.residual_TD, *rest)


def _hadamard(x: Tensor) -> Tensor:
    """The orthonormal Hadamard rotation of the lanes, in blocks of powers of two where their number is not one."""
    blocks, rest = [], x.shape[-1]
    while rest:
        width = 1 << (rest.bit_length() - 1)
        blocks.append(hadamard_matrix(width, x.dtype, x.device))
        rest -= width
    return x @ torch.block_diag(*blocks)


def _hadamard_on_both(x: Tensor, numerics: Numerics) -> Tensor:
    return _hadamard(x)


def _hadamard_on_queries(x: Tensor, numerics: Numerics) -> Tensor:
    is_query = x.dim() == 3
    return _hadamard(x) if is_query else x


def index_dots(indexer: Indexer, query_TIJ: Tensor, key_SJ: Tensor) -> Tensor:
    wide = at_least_float32(query_TIJ.dtype)
    return torch.einsum("tij,sj->tis", query_TIJ.to(wide), key_SJ.to(wide)) * indexer.head_dim**-0.5


def _scores_without_relu(indexer: Indexer, query_TIJ: Tensor, head_weights_TI: Tensor, key_SJ: Tensor) -> Tensor:
    return torch.einsum("ti,tis->ts", head_weights_TI, index_dots(indexer, query_TIJ, key_SJ))


def _relu_of_sum(*arguments: Any) -> Tensor:
    return F.relu(_scores_without_relu(*arguments))


def _unscaled(scores: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda indexer, *rest: scores(indexer, *rest) * indexer.head_dim**0.5


def _rounded_scores(scores: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments: in_bfloat16(scores(*arguments))


INDEXER_FAULTS = (
    Fault(
        "indexer_rope_tail",
        says="the indexer rotates the last lanes of a head in place of the first",
        visibility="L",
        first=(QUERY,),
        visible_when=PRUNING_OR_ROTATED_PROBE,
        source="vllm.cpp, tokenspeed",
        patches=(after_construction(Indexer, _tail_lanes),),
    ),
    Fault(
        "indexer_layout_half_converted",
        says="wq_b and wk were converted to the other lane order but k_norm was not",
        visibility="L",
        first=(KEY,),
        visible_when=PRUNING_OR_PROBE,
        source="tokenspeed converts all three",
        weights=_unconverted_norm,
    ),
    Fault(
        "indexer_knorm_rms",
        says="index keys get an RMSNorm without bias in place of a LayerNorm",
        visibility="L",
        first=(KEY,),
        visible_when=PRUNING_OR_PROBE,
        source="vllm.cpp, MLX notes",
        patches=(Patch(LayerNorm, "forward", lambda original: _rms_in_place_of_layer_norm),),
    ),
    Fault(
        "indexer_knorm_eps",
        says="the LayerNorm of the index keys has the epsilon of the model in place of 1e-6",
        visibility="N",
        first=(KEY,),
        visible_when="T = 1",
        source="vllm.cpp",
        patches=(after_construction(Indexer, _model_eps),),
    ),
    Fault(
        "indexer_knorm_order",
        says="index keys are rotated first and normed after that",
        visibility="L",
        first=(KEY,),
        visible_when=PRUNING_OR_ROTATED_PROBE,
        source="analysis",
        patches=(after_construction(Indexer, _norm_after_rope),),
    ),
    Fault(
        "indexer_relu_dropped",
        says="the products of index queries and keys pass without ReLU",
        visibility="L",
        first=(SCORES,),
        visible_when=PRUNING_OR_PROBE,
        source="vllm.cpp",
        patches=(Patch(Indexer, "scores", lambda original: _scores_without_relu),),
    ),
    Fault(
        "indexer_relu_after_sum",
        says="the ReLU follows the sum over the index heads",
        visibility="L",
        first=(SCORES,),
        visible_when=PRUNING_OR_PROBE,
        source="analysis",
        patches=(Patch(Indexer, "scores", lambda original: _relu_of_sum),),
    ),
    Fault(
        "indexer_weights_sigmoid",
        says="the head weights pass through a sigmoid and lose their signs",
        visibility="L",
        first=(HEAD_WEIGHTS,),
        visible_when=PRUNING_OR_PROBE,
        source="analysis",
        listener=lambda config: Override("layers.*.attn.index.head_weights", lambda value, rows: value.sigmoid()),
    ),
    Fault(
        "indexer_wrong_input",
        says="index keys and head weights are made from the residual stream before its norm",
        visibility="L",
        first=(KEY,),
        visible_when=PRUNING_OR_PROBE,
        source="analysis",
        patches=(Patch(DecoderLayer, "forward", _keeps_residual), Patch(Indexer, "forward", _reads_residual)),
    ),
    Fault(
        "indexer_scale_dropped",
        says="the scores are not multiplied by J^-1/2",
        visibility="I",
        first=(SCORES,),
        visible_when="never without quantization",
        source="analysis",
        patches=(Patch(Indexer, "scores", _unscaled),),
        hides_in=(SCORES,),
    ),
    Fault(
        "indexer_no_hadamard",
        says="index queries and keys are both Hadamard-rotated, or neither is where the other port does",
        visibility="I",
        first=(QUERY,),
        visible_when="never without quantization",
        source="transformers note on DeepSeek-V3.2",
        patches=(Patch(reference.layers.indexer, "quantized", lambda original: _hadamard_on_both),),
        hides_in=(QUERY, KEY, "cache.{i}.index_key"),
    ),
    Fault(
        "indexer_hadamard_one_side",
        says="index queries are Hadamard-rotated and keys are not",
        visibility="L",
        first=(QUERY,),
        visible_when=PRUNING_OR_PROBE,
        source="analysis",
        patches=(Patch(reference.layers.indexer, "quantized", lambda original: _hadamard_on_queries),),
    ),
    Fault(
        "indexer_bf16_scores",
        says="scores are stored in bfloat16",
        visibility="L",
        first=(SCORES,),
        visible_when=PRUNING_OR_PROBE,
        source="analysis",
        patches=(Patch(Indexer, "scores", _rounded_scores),),
    ),
)
