"""The language model and its draft layer, with the released tensor names as its module tree.

h = embedding[ids]
for each layer:  h = h + attention(rms(h));  h = h + ffn(rms(h))
logits = rms(h) · head

Draft layer (multi-token prediction), row t:  u = [rms(E_mtp[x[t+1]]) | rms(g[t])] W_ehᵀ,  one dense sliding layer on u,
r = rms(·), logits for x[t+2] = r · head. g is the hidden state after the final norm; a further step uses r for g.
Source: text_model specification, sections 1, 12 and 17.
"""

from typing import cast

import torch
from torch import Tensor, nn

from reference.cache import LayerCache, RequestCache
from reference.config import TextConfig
from reference.errors import ConfigError, TokenIdError
from reference.layers.indexer import RopeLayout
from reference.layers.mla import FullAttention, SlidingAttention
from reference.layers.mlp import Mlp
from reference.layers.moe import Moe
from reference.layers.norm import RMSNorm
from reference.numerics import Numerics
from reference.probe import probe, scope

# T tokens  D model  W vocabulary

DEFAULT_WORKSPACE_BYTES = 2**30


class DecoderLayer(nn.Module):
    """One layer, [T, D] to [T, D]. Its index decides its attention kind and whether it has experts."""

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        numerics: Numerics,
        indexer_rope_layout: RopeLayout = "leading",
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    ):
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps, numerics)
        self.self_attn = (
            FullAttention(config, numerics, indexer_rope_layout, workspace_bytes)
            if config.is_full(layer)
            else SlidingAttention(config, numerics, workspace_bytes)
        )
        self.post_attention_layernorm = RMSNorm(D, eps, numerics)
        self.mlp = Moe(config, numerics) if config.is_moe(layer) else Mlp(D, config.intermediate_size, numerics)

    def forward(self, hidden_TD: Tensor, cache: LayerCache) -> Tensor:
        """Runs T new tokens at the next positions of `cache`, and appends them to it."""
        hidden_TD = probe("input", hidden_TD)
        with scope("attn"):
            attn_input_TD = probe("input", self.input_layernorm(hidden_TD))
            hidden_TD = hidden_TD + self.self_attn(attn_input_TD, cache)
        with scope("ffn"):
            ffn_input_TD = probe("input", self.post_attention_layernorm(hidden_TD))
            ffn_output_TD = probe("output", self.mlp(ffn_input_TD))
        return probe("output", hidden_TD + ffn_output_TD)


class MtpBlock(DecoderLayer):
    """The draft layer: fuses the next token's embedding with a hidden state, then is one dense sliding layer."""

    def __init__(self, config: TextConfig, numerics: Numerics, workspace_bytes: int = DEFAULT_WORKSPACE_BYTES):
        super().__init__(config, config.num_hidden_layers, numerics, workspace_bytes=workspace_bytes)
        D, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(D, eps, numerics)
        self.hnorm = RMSNorm(D, eps, numerics)
        self.eh_proj = nn.Linear(2 * D, D, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(D, eps, numerics)})
        self.mask_position_0 = numerics.mtp_mask_position_0

    def draft(self, embedding_TD: Tensor, hidden_TD: Tensor, cache: LayerCache) -> Tensor:
        """Returns r_TD, what the head and the next draft step read."""
        if self.mask_position_0:
            is_first_T1 = cache.next_positions(len(embedding_TD), embedding_TD.device)[:, None] == 0
            embedding_TD = embedding_TD.masked_fill(is_first_T1, 0.0)
        # Embedding first, hidden state second.
        eh_input = probe("eh_input", torch.cat((self.enorm(embedding_TD), self.hnorm(hidden_TD)), dim=-1))
        fused_TD = probe("fused", self.eh_proj(eh_input))
        return probe("normed", self.shared_head["norm"](self(fused_TD, cache)))


class _Backbone(nn.Module):
    """`model.` in the tensor names. The draft layer is the last of `layers`; its embedding table is its own."""

    def __init__(self, config: TextConfig, numerics: Numerics, rope_layout: RopeLayout, workspace_bytes: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, numerics, rope_layout, workspace_bytes)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        if config.num_nextn_predict_layers:
            self.layers.append(MtpBlock(config, numerics, workspace_bytes))
            self.mtp = nn.ModuleDict({"embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size)})


class TextModel(nn.Module):
    """The language model. Build it under `torch.device("meta")` and fill it, or parts of it, from a checkpoint.

    `indexer_rope_layout` comes from the checkpoint's index. `workspace_bytes` bounds temporary scores and expanded keys
    of one layer; the result does not depend on it.
    Raises: ConfigError for more than one draft layer: the release has one, which is driven once for each draft token.
    """

    def __init__(
        self,
        config: TextConfig,
        numerics: Numerics | None = None,
        indexer_rope_layout: RopeLayout = "leading",
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    ):
        super().__init__()
        if config.num_nextn_predict_layers > 1:
            raise ConfigError(
                f"num_nextn_predict_layers is {config.num_nextn_predict_layers}, but NOTE has one draft layer: set it "
                f"to 1 and draft to any depth by driving that layer again"
            )
        self.config = config
        self.numerics = numerics or Numerics()
        self.indexer_rope_layout = indexer_rope_layout
        self.model = _Backbone(config, self.numerics, indexer_rope_layout, workspace_bytes)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def new_cache(self, max_draft_tokens: int = 0, max_length: int | None = None) -> RequestCache:
        return RequestCache(self.config, max_draft_tokens, max_length)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """[T, D]; no multiplier. Raises: TokenIdError for an id outside the vocabulary."""
        self._check_ids(token_ids_T)
        return self.model.embed_tokens(token_ids_T)

    def hidden(self, embeddings_TD: Tensor, cache: RequestCache) -> Tensor:
        """Run new tokens through all layers. Returns the state after the final norm, [T, D].

        Raises: CacheError if they exceed the cache's `max_length`, before any layer has run.
        """
        cache.check_room(len(embeddings_TD))
        hidden_TD = probe("embeddings", embeddings_TD)
        for index, layer_cache in enumerate(cache.layers):
            with scope(f"layers.{index}"):
                hidden_TD = self.model.layers[index](hidden_TD, layer_cache)
        return probe("final_norm", self.model.norm(hidden_TD))

    def logits(self, normed_TD: Tensor) -> Tensor:
        """[T, W] in the activation dtype; no cap, no scale."""
        return probe("logits", self.lm_head(normed_TD))

    def forward(self, token_ids_T: Tensor, cache: RequestCache | None = None) -> Tensor:
        """Logits [T, W] of new tokens; without a cache, of a sequence from position 0."""
        cache = self.new_cache() if cache is None else cache
        return self.logits(self.hidden(self.embed(token_ids_T), cache))

    def draft_step(
        self, step: int, next_ids_T: Tensor, hidden_TD: Tensor, cache: RequestCache
    ) -> tuple[Tensor, Tensor]:
        """Draft step number `step` on rows t whose next token is known: the token x[t+1] and the hidden state of row t.

        Returns r_TD (the hidden state for a further step) and logits_TW for x[t+2].
        """
        self._check_ids(next_ids_T)
        block = cast(MtpBlock, self.model.layers[self.config.num_hidden_layers])
        with scope(f"mtp.{step}"):
            normed_TD = block.draft(self.model.mtp["embed_tokens"](next_ids_T), hidden_TD, cache.draft)
            return normed_TD, self.logits(normed_TD)

    def _check_ids(self, token_ids_T: Tensor) -> None:
        outside = (token_ids_T < 0) | (token_ids_T >= self.config.vocab_size)
        if outside.any():
            row = int(outside.nonzero()[0])
            raise TokenIdError(
                f"token {row} has id {int(token_ids_T[row])}; ids must be 0 to {self.config.vocab_size - 1}"
            )
