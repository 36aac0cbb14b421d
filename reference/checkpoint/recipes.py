"""What synthetic text weights look like: one recipe for each tensor, so that every mechanism of the model is alive.

A random model hides faults unless its statistics are arranged: with unit norm weights `1 + w` passes for `w`, with
small router logits softmax passes for sigmoid, with small attention logits any mask passes. Here

    norm weights      positive, mean 0.002 to 0.49, the two lanes of a RoPE pair always half a mean apart
    residual stream   starts at STREAM, each sublayer adds WRITE; a few channels are OUTLIER times larger
    latents, keys     LATENT before their norms, so small that the norms' eps shows
    attention logits  standard deviation 1.8, half of its square from the rotated lanes
    gate, router      logits of standard deviation 1.5; router biases 6.8 to 7.05, all different
    index scores      from unit dot products and unit head weights
    vocabulary logits standard deviation 3; the draft layer has an embedding table of its own

A projection behind a norm of mean m is scaled by 1/m, and so on: each recipe knows the means of the norms before it.
Only +, -, *, / and square roots are used, which round the same way on every machine.
Source: text_model specification, sections 4 to 12 and 17; checkpoint specification, section 9, rule 8.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from reference.config import MlaGeometry, TextConfig

# D model  H heads  N nope dim  R rope dim  Q query latent  C kv latent  V value dim  F ffn width  J index head dim

Scale = float | NDArray[np.float64]

STREAM, WRITE, LATENT = 0.04, 0.016, 0.03
OUTLIER = 8.0
CHANNELS_PER_OUTLIER = 256
NORM_MEANS = (0.49, 0.25, 0.12, 0.06, 0.03, 0.012, 0.005, 0.002)
# Mean square of norm weights spread evenly over 0.5 to 1.5 times their mean.
SPREAD = 13 / 12
# Standard deviation of the index key's bias, in units of its norm weight's mean.
INDEX_BIAS = 0.3
# Root mean squares of silu(1.3 x) and sigmoid(1.5 x), x normal, and of an attention output over unit values.
SILU, GATE, CORE = 0.81, 0.57, 0.5
# A chosen expert's weight where weights are not normalised: the sigmoid of a large logit.
CHOSEN_SCORE = 0.85


@dataclass(frozen=True)
class Normal:
    """Bell-shaped values; `rows` and `columns` are factors of the standard deviation along the two dims."""

    rows: Scale
    columns: Scale = 1.0


@dataclass(frozen=True)
class NormWeight:
    """Positive values from 0.5 to 1.5 times `mean`; the outlier channels of `gains` are divided by their gain."""

    mean: float
    gains: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class RouterBias:
    """Different values from 6.8 to 7.05."""


Recipe = Normal | NormWeight | RouterBias


def seed_of(seed: int, name: str) -> int:
    """128 bits that belong to `name` under `seed`."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")


def norm_mean(seed: int, name: str) -> float:
    return NORM_MEANS[seed_of(seed, f"mean of {name}") % len(NORM_MEANS)]


@lru_cache(maxsize=8)
def channel_gains(seed: int, D: int) -> NDArray[np.float64]:
    """How much larger each channel of the residual stream is: 1, or OUTLIER for one channel in 256, at least one."""
    order = np.random.PCG64(seed_of(seed, "outlier channels")).random_raw(D).argsort(kind="stable")
    gains = np.ones(D)
    gains[order[: max(1, D // CHANNELS_PER_OUTLIER)]] = OUTLIER
    return gains


class TextRecipes:
    """The recipes of one text model. `of` takes the name of a language or MTP tensor."""

    def __init__(self, text: TextConfig, seed: int):
        self.text, self.seed = text, seed
        self.gains = channel_gains(seed, text.hidden_size)
        # Mean square of the gains: what the residual stream's norm divides out.
        self.gain_power = float((self.gains**2).mean())

    def of(self, name: str) -> Recipe:
        module, _, kind = name.rpartition(".")
        if kind == "e_score_correction_bias":
            return RouterBias()
        if module.endswith("embed_tokens"):
            return Normal(STREAM, self.gains)
        if module == "lm_head":
            return Normal(3.0 * self._behind("model.norm"))
        if module == "model.norm":
            return self._stream_norm(module)
        _, _, number, *parts = module.split(".")
        prefix = f"model.layers.{number}."
        if parts[0] == "self_attn":
            return self._attention(prefix + "self_attn.", int(number), ".".join(parts[1:]), kind)
        if parts[0] == "mlp":
            return self._feed_forward(prefix, parts)
        return self._block(prefix, parts[0])

    def _block(self, prefix: str, part: str) -> Recipe:
        """The norms of a layer, and what the draft layer has besides."""
        D = self.text.hidden_size
        if part == "shared_head":
            # Its output goes through the backbone's head, which is scaled for the final norm.
            return NormWeight(norm_mean(self.seed, "model.norm"), self.gains)
        if part == "hnorm":
            # The hidden state comes out of a norm that has already evened out the outlier channels.
            return NormWeight(norm_mean(self.seed, prefix + part))
        if part == "eh_proj":
            hidden = 1 / (norm_mean(self.seed, prefix + "hnorm") * math.sqrt(SPREAD * D))
            columns = np.repeat([self._behind(prefix + "enorm"), hidden], D)
            return Normal(STREAM * math.sqrt(0.5) * self.gains, columns)
        return self._stream_norm(prefix + part)

    def _attention(self, prefix: str, layer: int, part: str, kind: str) -> Recipe:
        geometry, before = self.text.geometry(layer), prefix.replace("self_attn.", "input_layernorm")
        from_stream = self._behind(before)
        if part in ("q_a_layernorm", "kv_a_layernorm", "k_rope_only_layernorm", "indexer.k_norm"):
            mean = self._inner_mean(prefix + part)
            return NormWeight(mean) if kind == "weight" else Normal(INDEX_BIAS * mean)
        if part in ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk"):
            return Normal(LATENT * from_stream)
        if part == "q_b_proj":
            query = self._behind_latent(prefix + "q_a_layernorm", geometry.q_lora_rank)
            return Normal(query * self._query_rows(prefix, geometry))
        if part == "kv_b_proj":
            return Normal(self._behind_latent(prefix + "kv_a_layernorm", geometry.kv_lora_rank))
        if part == "g_proj":
            return Normal(1.5 * from_stream)
        if part == "o_proj":
            return Normal(WRITE / (CORE * GATE * math.sqrt(geometry.value_width)) * self.gains)
        if part == "indexer.wq_b":
            query = self._behind_latent(prefix + "q_a_layernorm", geometry.q_lora_rank)
            key = self._inner_mean(prefix + "indexer.k_norm") * math.sqrt(SPREAD + INDEX_BIAS * INDEX_BIAS)
            return Normal(query / key)
        return Normal(from_stream)  # indexer.weights_proj

    def _query_rows(self, prefix: str, geometry: MlaGeometry) -> NDArray[np.float64]:
        """Nope and rotated lanes of every head contribute equally to its logits: 1.3 each, 1.8 together."""
        N, R, width = geometry.qk_nope_head_dim, geometry.qk_rope_head_dim, geometry.qk_head_dim
        key = self._inner_mean(prefix + "k_rope_only_layernorm") * math.sqrt(SPREAD)
        head = np.repeat([1.3 * math.sqrt(width / N), 1.3 * math.sqrt(width / R) / key], [N, R])
        return np.tile(head, geometry.num_attention_heads)

    def _feed_forward(self, prefix: str, parts: list[str]) -> Recipe:
        text, projection = self.text, parts[-1]
        from_stream = self._behind(prefix + "post_attention_layernorm")
        if projection == "gate":
            return Normal(1.5 * from_stream)
        if projection in ("gate_proj", "up_proj"):
            return Normal((1.3 if projection == "gate_proj" else 1.0) * from_stream)
        width, share = text.intermediate_size, 1.0
        if parts[1] == "shared_experts":
            width, share = text.shared_intermediate_size, math.sqrt(0.5)
        elif parts[1] == "experts":
            # K independent outputs with these weights add up to the share.
            weight = 1 / text.num_experts_per_tok if text.norm_topk_prob else CHOSEN_SCORE
            weight *= text.routed_scaling_factor * math.sqrt(text.num_experts_per_tok)
            width, share = text.moe_intermediate_size, math.sqrt(0.5) / weight
        return Normal(WRITE * share / (SILU * math.sqrt(width)) * self.gains)

    def _stream_norm(self, module: str) -> NormWeight:
        return NormWeight(norm_mean(self.seed, module), self.gains)

    def _inner_mean(self, module: str) -> float:
        """A norm inside attention. A tiny mean on the rope key would ask for huge queries."""
        mean = norm_mean(self.seed, module)
        return max(mean, NORM_MEANS[2]) if module.endswith("k_rope_only_layernorm") else mean

    def _behind(self, norm: str) -> float:
        """The standard deviation of weights that turn a normed residual stream into unit outputs."""
        power = SPREAD * self.text.hidden_size / self.gain_power
        return 1 / (norm_mean(self.seed, norm) * math.sqrt(power))

    def _behind_latent(self, norm: str, rank: int) -> float:
        """The same for a latent, whose norm is followed by the rescale sqrt(D / rank)."""
        width = self.text.hidden_size if self.text.apply_mla_qkv_lora_rescale else rank
        return 1 / (self._inner_mean(norm) * math.sqrt(SPREAD * width))
