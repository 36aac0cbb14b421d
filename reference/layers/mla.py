"""Multi-head latent attention, NOTE's way: a module for full layers and one for sliding layers.

q_latent  = sqrt(D/Q) · rms(a W_qaᵀ)            → q = q_latent W_qbᵀ, each head [nope N | rope R]
kv_latent = sqrt(D/C) · rms(first C lanes of a W_kvaᵀ)                  cached
k_rope    = rope(rms(last R lanes of a W_kvaᵀ))                         cached; one head, shared by all
output    = (sigmoid(a W_gᵀ) · attention(q, latents)) W_oᵀ

`a` is the normed layer input. Four things are not DeepSeek's MLA: the rescale after the norm, the norm on the rope key,
the output gate, and two geometries in one model. Source: text_model specification, sections 4, 6, 8, 9 and 10.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from reference.cache import FullCache, LatentRows, LayerCache, SlidingCache
from reference.config import MlaGeometry, TextConfig
from reference.layers.attention import LatentAttention
from reference.layers.indexer import Indexer, RopeLayout
from reference.layers.norm import RescaledRMSNorm, RMSNorm
from reference.layers.rope import RotaryEmbedding
from reference.numerics import Numerics, RopeDtype, at_least_float32
from reference.probe import probe

# T query tokens  S key tokens  D model  H heads  N nope dim  R rope dim  Q query latent  C kv latent  V value dim


class MlaAttention(nn.Module):
    """What both layer kinds share. A subclass says which keys a query sees."""

    def __init__(
        self,
        config: TextConfig,
        geometry: MlaGeometry,
        numerics: Numerics,
        rope_dtype: RopeDtype,
        workspace_bytes: int,
    ):
        super().__init__()
        self.geometry = geometry
        self.workspace_bytes = workspace_bytes
        D, H, Q, C = config.hidden_size, geometry.num_attention_heads, geometry.q_lora_rank, geometry.kv_lora_rank
        q_scale, kv_scale = ((D / Q) ** 0.5, (D / C) ** 0.5) if config.apply_mla_qkv_lora_rescale else (1.0, 1.0)
        eps = config.rms_norm_eps
        self.q_a_proj = nn.Linear(D, Q, bias=False)
        self.q_a_layernorm = RescaledRMSNorm(Q, eps, q_scale, numerics)
        self.q_b_proj = nn.Linear(Q, H * geometry.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(D, geometry.latent_row, bias=False)
        self.kv_a_layernorm = RescaledRMSNorm(C, eps, kv_scale, numerics)
        self.k_rope_only_layernorm = RMSNorm(geometry.qk_rope_head_dim, eps, numerics)
        self.kv_b_proj = nn.Linear(C, H * (geometry.qk_nope_head_dim + geometry.v_head_dim), bias=False)
        self.g_proj = nn.Linear(D, geometry.gate_width, bias=False)
        self.o_proj = nn.Linear(geometry.value_width, D, bias=False)
        self.rope = RotaryEmbedding(geometry.rope_theta, rope_dtype)
        self.attention = LatentAttention(geometry, numerics, workspace_bytes)
        self._gated = _gate_then_round if numerics.gate_rounding == "once" else _round_then_gate

    def forward(self, attn_input_TD: Tensor, cache: LayerCache) -> Tensor:
        """Attend from T new tokens, the next positions of `cache`, and append them to it. Returns [T, D]."""
        positions_T = cache.next_positions(len(attn_input_TD), attn_input_TD.device)
        q_latent_TQ = probe("q_latent", self.q_a_layernorm(self.q_a_proj(attn_input_TD)))
        q_nope_THN, q_rope_THR = self._queries(q_latent_TQ, positions_T)
        rows, visible_TS = self._keys(attn_input_TD, q_latent_TQ, positions_T, cache)
        core_THV = self.attention(
            q_nope_THN, q_rope_THR, rows.kv_latent_SC, rows.k_rope_SR, self.kv_b_proj.weight, visible_TS
        )
        core_THV = probe("core", core_THV)
        gated = self._gated(core_THV, self.g_proj(attn_input_TD))
        return probe("output", self.o_proj(gated.flatten(1)))

    def _queries(self, q_latent_TQ: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        geometry = self.geometry
        q_THX = self.q_b_proj(q_latent_TQ).unflatten(-1, (geometry.num_attention_heads, geometry.qk_head_dim))
        q_nope_THN, q_rope_THR = q_THX.split((geometry.qk_nope_head_dim, geometry.qk_rope_head_dim), dim=-1)
        return probe("q_nope", q_nope_THN), probe("q_rope", self.rope(q_rope_THR, positions_T))

    def _latent(self, attn_input_TD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that are cached: kv_latent_TC (normed and rescaled) and k_rope_TR (normed, then rotated)."""
        latent_TC, k_rope_TR = self.kv_a_proj_with_mqa(attn_input_TD).split(
            (self.geometry.kv_lora_rank, self.geometry.qk_rope_head_dim), dim=-1
        )
        kv_latent_TC = probe("kv_latent", self.kv_a_layernorm(latent_TC))
        k_rope_TR = probe("k_rope_unrotated", self.k_rope_only_layernorm(k_rope_TR))
        return kv_latent_TC, probe("k_rope", self.rope(k_rope_TR, positions_T))

    @abstractmethod
    def _keys(
        self, attn_input_TD: Tensor, q_latent_TQ: Tensor, positions_T: Tensor, cache: LayerCache
    ) -> tuple[LatentRows, Tensor]:
        """Append the new rows to the cache; return all S rows that may matter, and visible_TS, bool."""


class SlidingAttention(MlaAttention):
    """A query at position t sees the `window` keys t - window + 1 .. t, itself counted."""

    def __init__(self, config: TextConfig, numerics: Numerics, workspace_bytes: int):
        super().__init__(config, config.sliding, numerics, numerics.rope_sliding, workspace_bytes)
        self.window = config.sliding_window_size

    def _keys(
        self, attn_input_TD: Tensor, q_latent_TQ: Tensor, positions_T: Tensor, cache: LayerCache
    ) -> tuple[LatentRows, Tensor]:
        assert isinstance(cache, SlidingCache)
        rows = cache.append(*self._latent(attn_input_TD, positions_T))
        return rows, in_window(positions_T, rows.positions_S, self.window)


class FullAttention(MlaAttention):
    """A query sees the keys that the indexer selects for it, at most `index_topk` of those up to its own position."""

    def __init__(self, config: TextConfig, numerics: Numerics, rope_layout: RopeLayout, workspace_bytes: int):
        super().__init__(config, config.full, numerics, numerics.rope_full, workspace_bytes)
        self.indexer = Indexer(config, numerics, rope_layout)

    def _keys(
        self, attn_input_TD: Tensor, q_latent_TQ: Tensor, positions_T: Tensor, cache: LayerCache
    ) -> tuple[LatentRows, Tensor]:
        assert isinstance(cache, FullCache)
        latent_TC, k_rope_TR = self._latent(attn_input_TD, positions_T)
        index = self.indexer(attn_input_TD, q_latent_TQ, positions_T)
        rows, index_key_SJ = cache.append(latent_TC, k_rope_TR, index.key_TJ)
        return rows, self.indexer.visible_keys(index, positions_T, index_key_SJ, self.workspace_bytes)


def in_window(query_positions_T: Tensor, key_positions_S: Tensor, window: int) -> Tensor:
    """bool [T, S], on absolute positions: max(0, t - window + 1) <= s <= t."""
    # Compared as they are: a table of distances would take eight bytes for each pair.
    query_positions_T1 = query_positions_T[:, None]
    return (key_positions_S <= query_positions_T1) & (key_positions_S > query_positions_T1 - window)


def _gate_then_round(core_THV: Tensor, logits: Tensor) -> Tensor:
    wide = at_least_float32(core_THV.dtype)
    gate = probe("gate", torch.sigmoid(logits.to(wide)))
    return (core_THV.to(wide) * _by_head(gate, core_THV)).to(core_THV.dtype)


def _round_then_gate(core_THV: Tensor, logits: Tensor) -> Tensor:
    gate = probe("gate", torch.sigmoid(logits.to(at_least_float32(logits.dtype))).to(core_THV.dtype))
    return core_THV * _by_head(gate, core_THV)


def _by_head(gate: Tensor, core_THV: Tensor) -> Tensor:
    """One gate a head [T, H, 1], or one a lane [T, H, V]."""
    T, H, _ = core_THV.shape
    return gate.reshape(T, H, -1)
