"""The indexer of the full layers: which keys a query attends to.

score[t, s] = Σ_i w[t, i] · relu(J^-½ · <q[t, i], k[s]>)      for s ≤ t
selected(t) = the min(topk, t + 1) keys of largest score; ties go to the smaller position

One small key for each token is shared by I index heads; the head weights are raw signed projections. All of it only
ranks keys: no gradient, no output of its own. With at most `topk` visible keys the layer is plain causal attention.
Source: text_model specification, section 7.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.config import TextConfig
from reference.layers.index_quantization import quantized
from reference.layers.norm import LayerNorm
from reference.layers.rope import RotaryEmbedding
from reference.numerics import Numerics, at_least_float32
from reference.probe import narrowed_rows, probe, scope

# T query tokens  S key tokens  D model  Q query latent  I index heads  J index head dim  K selected keys

RopeLayout = Literal["leading", "tail"]


@dataclass(frozen=True)
class IndexRows:
    """What the indexer makes of new tokens: query_TIJ, head_weights_TI (scaled by I^-½) and key_TJ, which is cached."""

    query_TIJ: Tensor
    head_weights_TI: Tensor
    key_TJ: Tensor


class Indexer(nn.Module):
    """`rope_layout` says which lanes of an index head are rotated: the first R (as released) or the last R."""

    def __init__(self, config: TextConfig, numerics: Numerics, rope_layout: RopeLayout):
        super().__init__()
        self.heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.rope_dim = config.full.qk_rope_head_dim
        self.rope_layout = rope_layout
        self.numerics = numerics
        self.wq_b = nn.Linear(config.full.q_lora_rank, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = LayerNorm(self.head_dim)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.rope = RotaryEmbedding(config.full.rope_theta, numerics.rope_full, config.indexer_rope_interleave)

    @torch.no_grad()
    def forward(self, attn_input_TD: Tensor, q_latent_TQ: Tensor, positions_T: Tensor) -> IndexRows:
        with scope("index"):
            query_TIJ = self.wq_b(q_latent_TQ).unflatten(-1, (self.heads, self.head_dim))
            query_TIJ = probe("query", self._rotated(query_TIJ, positions_T))
            key_TJ = probe("key", self._rotated(self.k_norm(self.wk(attn_input_TD)), positions_T))
            weights_TI = self.weights_proj(attn_input_TD)
            # Widened before the scale: its rounding would differ from head to head.
            weights_TI = weights_TI.to(at_least_float32(weights_TI.dtype)) * self.heads**-0.5
            return IndexRows(query_TIJ, probe("head_weights", weights_TI), key_TJ)

    @torch.no_grad()
    def visible_keys(self, rows: IndexRows, positions_T: Tensor, key_SJ: Tensor, workspace_bytes: int) -> Tensor:
        """The selected keys of each query as a mask, bool [T, S]; key s has position s.

        Works through the queries in blocks, so that no more than `workspace_bytes` of scores exist at a time.
        """
        S = len(key_SJ)
        block = max(1, workspace_bytes // (S * (self.heads + 2) * 8))
        visible_TS = torch.empty(len(positions_T), S, dtype=torch.bool, device=key_SJ.device)
        for start in range(0, len(positions_T), block):
            queries = slice(start, start + block)
            visible_TS[queries] = self._visible_block(rows, positions_T, key_SJ, queries)
        return visible_TS

    def _visible_block(self, rows: IndexRows, positions_T: Tensor, key_SJ: Tensor, block: slice) -> Tensor:
        S = len(key_SJ)
        causal_TS = torch.arange(S, device=key_SJ.device) <= positions_T[block, None]
        with scope("index"), narrowed_rows(block):
            scores_TS = self.scores(rows.query_TIJ[block], rows.head_weights_TI[block], key_SJ)
            scores_TS = probe("scores", scores_TS.masked_fill(~causal_TS, float("-inf")))
            selected_TK = probe("selected", select(scores_TS, causal_TS, self.topk))
        return mask_of(selected_TK, S)

    def scores(self, query_TIJ: Tensor, head_weights_TI: Tensor, key_SJ: Tensor) -> Tensor:
        """[T, S], at least float32; not masked."""
        wide = at_least_float32(query_TIJ.dtype)
        dots_TIS = torch.einsum("tij,sj->tis", query_TIJ.to(wide), key_SJ.to(wide)) * self.head_dim**-0.5
        return torch.einsum("ti,tis->ts", head_weights_TI.to(wide), F.relu(dots_TIS))

    def _rotated(self, x: Tensor, positions_T: Tensor) -> Tensor:
        """RoPE on R of the J lanes; then whatever quantization the numerics ask for."""
        passed = self.head_dim - self.rope_dim
        if self.rope_layout == "leading":
            rotated, rest = x.split((self.rope_dim, passed), dim=-1)
        else:
            rest, rotated = x.split((passed, self.rope_dim), dim=-1)
        rotated = self.rope.unrounded(rotated, positions_T)
        if self.numerics.index_dtype == "activation":
            rotated = rotated.to(x.dtype)
        parts = (rotated, rest.to(rotated.dtype))
        return quantized(torch.cat(parts if self.rope_layout == "leading" else parts[::-1], dim=-1), self.numerics)


def select(scores_TS: Tensor, visible_TS: Tensor, topk: int) -> Tensor:
    """The positions of the `topk` best visible keys, int64 [T, min(topk, S)], ascending; -1 behind them for none.

    A stable sort gives equal scores to the smaller position, on every device.
    """
    S = scores_TS.shape[1]
    best_TK = scores_TS.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    is_visible_TK = visible_TS.gather(-1, best_TK)
    ascending_TK = best_TK.masked_fill(~is_visible_TK, S).sort(dim=-1).values
    return ascending_TK.masked_fill(ascending_TK == S, -1)


def mask_of(selected_TK: Tensor, key_count: int) -> Tensor:
    """bool [T, S]: true where the key is in the row's list; -1 entries select nothing."""
    mask = torch.zeros(len(selected_TK), key_count + 1, dtype=torch.bool, device=selected_TK.device)
    mask.scatter_(-1, selected_TK.masked_fill(selected_TK < 0, key_count), True)
    return mask[:, :key_count]
