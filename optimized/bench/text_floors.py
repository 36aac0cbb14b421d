"""Floors of whole steps of the four-layer slice: full + dense, full + MoE, two sliding + MoE; then the head.

Each piece has its own floor, and a step is their sum: no kernel overlaps another's bytes with its own operations. The
absorbed core does H (2 (C + R) + 2 C) operations a key for each query, the expanded one H (2 (N + R) + 2 V).
Source: performance specification, section 2, whose tables this reproduces from the released config.
"""

from __future__ import annotations

from dataclasses import dataclass

from optimized.bench.floors import Ceilings, Rate, Work, causal_pairs, distinct_experts, floor, gemm
from reference.config import MlaGeometry, TextConfig

# Router logits are float32 products of a float32 copy of the router's weight.
ROUTER_WEIGHT_BYTES = 4


@dataclass(frozen=True)
class Storage:
    """Bytes of a projection weight; rate of the products with them; whether full layers cache fp8 rows.

    An fp8 row has a float32 scale for each 128 latent lanes and its rope key in bfloat16; an fp8 index key one scale.
    """

    weight_bytes: int
    rate: Rate

    def latent_row_bytes(self, geometry: MlaGeometry) -> int:
        C, R = geometry.kv_lora_rank, geometry.qk_rope_head_dim
        return 2 * (C + R) if self.rate == "bf16" else C + 4 * (C // 128) + 2 * R

    def index_key_bytes(self, config: TextConfig) -> int:
        J = config.index_head_dim
        return 2 * J if self.rate == "bf16" else J + 4


BF16 = Storage(2, "bf16")
FP8 = Storage(1, "fp8")


@dataclass(frozen=True)
class StepFloors:
    """Microseconds of one layer or one op each, and their sum over the slice."""

    full_projections: float
    indexer: float
    full_core: float
    sliding_projections: float
    sliding_core: float
    dense: float
    moe: float
    head: float

    @property
    def slice(self) -> float:
        full = self.full_projections + self.indexer + self.full_core
        sliding = self.sliding_projections + self.sliding_core
        return 2 * full + 2 * sliding + self.dense + 3 * self.moe


def decode_floors(
    config: TextConfig, batch: int, context: int, ceilings: Ceilings, storage: Storage = BF16, rows: int = 1
) -> StepFloors:
    """`rows` tokens for each of `batch` requests that see `context` keys."""
    keys = min(context, config.index_topk)
    window = min(context, config.sliding_window_size)
    full, sliding = config.full, config.sliding
    return StepFloors(
        **_shared(config, batch * rows, ceilings, storage),
        indexer=_us(index_scores(config, batch * rows * context, batch * context, storage), ceilings),
        full_core=_us(absorbed_core(full, batch, keys, storage.latent_row_bytes(full), rows), ceilings),
        sliding_core=_us(absorbed_core(sliding, batch, window, BF16.latent_row_bytes(sliding), rows), ceilings),
    )


def prefill_floors(config: TextConfig, tokens: int, ceilings: Ceilings, storage: Storage = BF16) -> StepFloors:
    """One prompt of `tokens` tokens from position 0; the full layers take the cheaper form of the core."""
    dense_core = _us(expanded_core(config.full, tokens), ceilings)
    sparse_core = _us(absorbed_prefill(config, tokens), ceilings)
    return StepFloors(
        **_shared(config, tokens, ceilings, storage),
        indexer=_us(index_scores(config, causal_pairs(tokens), tokens, storage), ceilings),
        full_core=min(dense_core, sparse_core),
        sliding_core=_us(expanded_core(config.sliding, tokens, config.sliding_window_size), ceilings),
    )


def layer_works(config: TextConfig, layer: int, batch: int, context: int) -> tuple[Work, ...]:
    """The pieces of one layer in bfloat16: in a decode step of `batch` requests, or, 0, over a prompt of `context`."""
    tokens, geometry, D = batch or context, config.geometry(layer), config.hidden_size
    works = [gemm(tokens, projection_parameters(config, geometry), 1)]
    if config.is_full(layer):
        pairs = batch * context or causal_pairs(context)
        works.append(index_scores(config, pairs, max(1, batch) * context))
    most = config.index_topk if config.is_full(layer) else config.sliding_window_size
    if batch:
        works.append(absorbed_core(geometry, batch, min(context, most), BF16.latent_row_bytes(geometry)))
    elif config.is_full(layer):
        forms = (expanded_core(geometry, context), absorbed_prefill(config, context))
        works.append(min(forms, key=lambda work: work.flops))
    else:
        works.append(expanded_core(geometry, context, most))
    if not config.is_moe(layer):
        return (*works, gemm(tokens, 3 * D * config.intermediate_size, 1))
    shared = gemm(tokens, 3 * D * config.shared_intermediate_size, 1)
    return (*works, routed_experts(config, tokens), shared, router(config))


def projection_widths(config: TextConfig, geometry: MlaGeometry) -> tuple[int, int]:
    """Rows of the packed a-projection and of the packed q_b projection: full layers have the indexer's with them."""
    H, Q = geometry.num_attention_heads, geometry.q_lora_rank
    a = Q + geometry.latent_row + geometry.gate_width
    b = H * geometry.qk_head_dim
    if geometry is not config.full:
        return a, b
    I, J = config.index_n_heads, config.index_head_dim  # noqa: E741 - the legend's letter
    return a + J + I, b + I * J


def projection_parameters(config: TextConfig, geometry: MlaGeometry) -> int:
    """Weights of all projections of a layer, indexer included."""
    D, H = config.hidden_size, geometry.num_attention_heads
    a, b = projection_widths(config, geometry)
    kv_b = H * (geometry.qk_nope_head_dim + geometry.v_head_dim) * geometry.kv_lora_rank
    return a * D + b * geometry.q_lora_rank + kv_b + D * geometry.value_width


def index_scores(config: TextConfig, pairs: int, keys: int, storage: Storage = BF16) -> Work:
    """I heads of width J for each pair of query and key; each key is read once."""
    return Work(
        keys * storage.index_key_bytes(config), 2 * pairs * config.index_n_heads * config.index_head_dim, storage.rate
    )


def absorbed_core(geometry: MlaGeometry, batch: int, keys: int, row_bytes: int, rows: int = 1) -> Work:
    """Each request reads `keys` latent rows, at best the same for its `rows` queries; those in, latents out, bf16."""
    H, C, L = geometry.num_attention_heads, geometry.kv_lora_rank, geometry.latent_row
    return Work(batch * (keys * row_bytes + 2 * rows * H * (L + C)), 2 * batch * rows * keys * H * (L + C))


def absorbed_prefill(config: TextConfig, tokens: int) -> Work:
    """The absorbed core over the selected keys of a prompt, whose latent rows are read once."""
    geometry = config.full
    H, C, L = geometry.num_attention_heads, geometry.kv_lora_rank, geometry.latent_row
    pairs = causal_pairs(tokens, config.index_topk)
    return Work(2 * tokens * (L + H * (L + C)), 2 * pairs * H * (L + C))


def expanded_core(geometry: MlaGeometry, tokens: int, most_keys: int | None = None) -> Work:
    """A prompt of `tokens` from position 0: q, expanded keys and values in, values out, in bfloat16."""
    H, X, V = geometry.num_attention_heads, geometry.qk_head_dim, geometry.v_head_dim
    lanes = X + (geometry.qk_nope_head_dim + V) + V
    return Work(2 * tokens * H * lanes, 2 * causal_pairs(tokens, most_keys) * H * (X + V))


def routed_experts(config: TextConfig, tokens: int, storage: Storage = BF16) -> Work:
    """Gate, up and down of the experts that `tokens` tokens choose."""
    one = 3 * config.hidden_size * config.moe_intermediate_size
    read = distinct_experts(tokens, config.n_routed_experts, config.num_experts_per_tok)
    return Work(read * one * storage.weight_bytes, 2 * tokens * config.num_experts_per_tok * one, storage.rate)


def router(config: TextConfig) -> Work:
    return Work(config.n_routed_experts * config.hidden_size * ROUTER_WEIGHT_BYTES, 0)


def _shared(config: TextConfig, tokens: int, ceilings: Ceilings, storage: Storage) -> dict[str, float]:
    """The pieces that depend on the number of tokens alone."""
    D = config.hidden_size

    def products(parameters: int) -> float:
        return _us(gemm(tokens, parameters, 1, storage.weight_bytes, storage.rate), ceilings)

    routing = _us(routed_experts(config, tokens, storage), ceilings) + _us(router(config), ceilings)
    return {
        "full_projections": products(projection_parameters(config, config.full)),
        "sliding_projections": products(projection_parameters(config, config.sliding)),
        "dense": products(3 * D * config.intermediate_size),
        "moe": routing + products(3 * D * config.shared_intermediate_size),
        "head": _us(gemm(tokens, config.vocab_size, D), ceilings),
    }


def _us(work: Work, ceilings: Ceilings) -> float:
    return floor(work, ceilings).us
