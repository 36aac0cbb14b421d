"""The text model and its draft layer a second time, in numpy float64, as an oracle for the reference.

Written from the specification alone and, where a formula allows it, by another way than one would first choose: RoPE
multiplies complex numbers, attention runs token by token and head by head in the latent space over the visible keys
only, choices are full sorts by (-score, index). There is no cache and no speed; sizes are tiny.

Weights are a dict of float64 arrays under the released tensor names. Every function that computes takes and returns
float64, one row a token. Named values go into a dict under the names and layouts of the probe schema.

The one place where rounding belongs to the definition is the RoPE angle, the float32 product of position and float32
frequency. `angles=exact_angles` computes it in float64 instead; a function of the same signature may stand in where the
last bit of a library's float32 power matters.

Source: text_model specification, sections 5 to 12 and 17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from reference.config import MlaGeometry, TextConfig

# T tokens  S visible keys  D model  H heads  N nope  R rope  Q query latent  C kv latent  V value
# P rotated pairs  I index heads  J index head dim  E experts  K chosen  W vocabulary
Array = np.ndarray
Weights = Mapping[str, Array]
# (tokens, rotated width R, theta) to the angles of positions 0 to T - 1, [T, R/2] in radians
Angles = Callable[[int, int, float], Array]

LAYER_NORM_EPS = 1e-6
WEIGHT_SUM_FLOOR = 1e-20


def float32_angles(T: int, R: int, theta: float) -> Array:
    """The model's definition: float32 frequencies theta^(-2j/R), float32 product with the position."""
    frequency_P = np.power(np.float32(theta), -np.arange(0, R, 2, dtype=np.float32) / np.float32(R))
    return (np.arange(T, dtype=np.float32)[:, None] * frequency_P).astype(np.float64)


def exact_angles(T: int, R: int, theta: float) -> Array:
    """The same without rounding."""
    return np.outer(np.arange(T), theta ** (-np.arange(0, R, 2) / R))


def forward(
    weights: Weights,
    config: TextConfig,
    token_ids: Sequence[int],
    *,
    indexer_rope_layout: str = "leading",
    angles: Angles = float32_angles,
) -> dict[str, Array]:
    """All named values of one prefill of `token_ids` from position 0, in the order of computation.

    Raises: ValueError for a layout that is neither `leading` nor `tail`.
    """
    if indexer_rope_layout not in ("leading", "tail"):
        raise ValueError(f"indexer_rope_layout must be 'leading' or 'tail', found {indexer_rope_layout!r}")
    values: dict[str, Array] = {}
    hidden_TD = values["embeddings"] = weights["model.embed_tokens.weight"][list(token_ids)]
    for layer in range(config.num_hidden_layers):
        named = _layer(weights, config, layer, hidden_TD, indexer_rope_layout, angles)
        values |= {f"layers.{layer}.{name}": value for name, value in named.items()}
        hidden_TD = named["output"]
    values["final_norm"] = rms_norm(hidden_TD, weights["model.norm.weight"], config.rms_norm_eps)
    values["logits"] = values["final_norm"] @ weights["lm_head.weight"].T
    return values


def draft(
    weights: Weights,
    config: TextConfig,
    token_ids: Sequence[int],
    final_norm_TD: Array,
    drafted_ids: Sequence[int],
    *,
    zero_embedding_at_position_0: bool = False,
    angles: Angles = float32_angles,
) -> list[dict[str, Array]]:
    """Drive the draft layer `len(drafted_ids)` times behind the committed `token_ids`.

    `final_norm_TD` is the target's hidden state of every token, after its final norm. `drafted_ids[0]` is the token
    that was sampled from the target's last row; `drafted_ids[s]` is what step s - 1 drafted.

    The first step covers all committed rows: row t reads hidden state t and token t + 1 at position t. Each further
    step appends one row, which reads the step before's normed output and the token drafted there.
    Returns: for each step the named values of the rows that it adds (T rows, then one each).
    """
    embedding_WD = weights["model.mtp.embed_tokens.weight"]
    prefix = f"model.layers.{config.num_hidden_layers}."
    shifted_ids = [*token_ids[1:], drafted_ids[0]]
    read_TD = final_norm_TD
    seen = 0
    steps: list[dict[str, Array]] = []
    fused_TD = np.empty((0, config.hidden_size))
    for step, drafted in enumerate(drafted_ids):
        new_ids = shifted_ids if step == 0 else [drafted]
        embedded_TD = embedding_WD[new_ids].copy()
        if zero_embedding_at_position_0 and step == 0:
            embedded_TD[0] = 0.0
        normed_embedding_TD = rms_norm(embedded_TD, weights[prefix + "enorm.weight"], config.rms_norm_eps)
        normed_hidden_TD = rms_norm(read_TD, weights[prefix + "hnorm.weight"], config.rms_norm_eps)
        eh_input = np.hstack([normed_embedding_TD, normed_hidden_TD])
        # Without a cache every step runs the whole sequence of the draft layer's inputs again.
        fused_TD = np.vstack([fused_TD, eh_input @ weights[prefix + "eh_proj.weight"].T])
        block = _layer(weights, config, config.num_hidden_layers, fused_TD, "leading", angles)
        named = {"eh_input": eh_input, "fused": fused_TD[seen:]}
        named |= {name: value[seen:] for name, value in block.items()}
        normed_TD = rms_norm(named["output"], weights[prefix + "shared_head.norm.weight"], config.rms_norm_eps)
        named["normed"], named["logits"] = normed_TD, normed_TD @ weights["lm_head.weight"].T
        steps.append(named)
        seen = len(fused_TD)
        read_TD = normed_TD[-1:]
    return steps


def _layer(
    weights: Weights, config: TextConfig, layer: int, hidden_TD: Array, indexer_rope_layout: str, angles: Angles
) -> dict[str, Array]:
    """Both residual branches of one layer, draft layer included."""
    prefix, eps = f"model.layers.{layer}.", config.rms_norm_eps
    attn_input_TD = rms_norm(hidden_TD, weights[prefix + "input_layernorm.weight"], eps)
    attention = _attention(weights, config, layer, attn_input_TD, indexer_rope_layout, angles)
    middle_TD = hidden_TD + attention["output"]
    ffn_input_TD = rms_norm(middle_TD, weights[prefix + "post_attention_layernorm.weight"], eps)
    if config.is_moe(layer):
        feed_forward = _experts(weights, config, prefix + "mlp.", ffn_input_TD)
    else:
        feed_forward = {"output": _swiglu(weights, prefix + "mlp.", ffn_input_TD)}
    return {
        "input": hidden_TD,
        "attn.input": attn_input_TD,
        **{f"attn.{name}": value for name, value in attention.items()},
        "ffn.input": ffn_input_TD,
        **{f"ffn.{name}": value for name, value in feed_forward.items()},
        "output": middle_TD + feed_forward["output"],
    }


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim."""
    width = x.shape[-1]
    length = np.sqrt((x * x).sum(-1, keepdims=True) + width * eps)
    return weight * (x / length) * np.sqrt(width)


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    """Biased variance; an epsilon of its own, which is not `rms_norm_eps`."""
    variance = (x * x).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2
    return (x - x.mean(-1, keepdims=True)) * weight / np.sqrt(variance + LAYER_NORM_EPS) + bias


def sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def rope(x: Array, theta: float, angles: Angles, interleaved: bool = True) -> Array:
    """Rotate pair j of row t by the angle t * theta^(-2j/R), as a complex number. Pairs stay where they are.

    x: [T, R] or [T, heads, R]. A pair is lanes (2j, 2j+1), or (j, j + R/2) when not `interleaved`.
    """
    T, R = x.shape[0], x.shape[-1]
    turn = np.exp(1j * angles(T, R, theta)).reshape(T, *(1,) * (x.ndim - 2), R // 2)
    first, second = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (slice(0, R // 2), slice(R // 2, R))
    rotated = (x[..., first] + 1j * x[..., second]) * turn
    y = np.empty_like(x)
    y[..., first], y[..., second] = rotated.real, rotated.imag
    return y


def _attention(
    weights: Weights, config: TextConfig, layer: int, x_TD: Array, indexer_rope_layout: str, angles: Angles
) -> dict[str, Array]:
    prefix, geometry, eps = f"model.layers.{layer}.self_attn.", config.geometry(layer), config.rms_norm_eps
    T, D = x_TD.shape
    H, N, R, C = (
        geometry.num_attention_heads,
        geometry.qk_nope_head_dim,
        geometry.qk_rope_head_dim,
        geometry.kv_lora_rank,
    )

    def weight(name: str) -> Array:
        return weights[f"{prefix}{name}.weight"]

    def rescale(rank: int) -> float:
        return np.sqrt(D / rank) if config.apply_mla_qkv_lora_rescale else 1.0

    q_latent_TQ = rms_norm(x_TD @ weight("q_a_proj").T, weight("q_a_layernorm"), eps) * rescale(geometry.q_lora_rank)
    q_THX = (q_latent_TQ @ weight("q_b_proj").T).reshape(T, H, N + R)
    q_nope_THN, q_rope_THR = q_THX[:, :, :N], rope(q_THX[:, :, N:], geometry.rope_theta, angles)
    both_TX = x_TD @ weight("kv_a_proj_with_mqa").T
    kv_latent_TC = rms_norm(both_TX[:, :C], weight("kv_a_layernorm"), eps) * rescale(C)
    k_rope_unrotated_TR = rms_norm(both_TX[:, C:], weight("k_rope_only_layernorm"), eps)
    k_rope_TR = rope(k_rope_unrotated_TR, geometry.rope_theta, angles)
    values = {
        "q_latent": q_latent_TQ,
        "q_nope": q_nope_THN,
        "q_rope": q_rope_THR,
        "kv_latent": kv_latent_TC,
        "k_rope_unrotated": k_rope_unrotated_TR,
        "k_rope": k_rope_TR,
    }
    if config.is_full(layer):
        indexer = _indexer(weights, config, prefix, x_TD, q_latent_TQ, indexer_rope_layout, angles)
        values |= {f"index.{name}": value for name, value in indexer.items()}
        visible = [[s for s in row if s >= 0] for row in indexer["selected"].tolist()]
    else:
        visible = [list(range(max(0, t - config.sliding_window_size + 1), t + 1)) for t in range(T)]
    core_THV = _core(geometry, weight("kv_b_proj"), q_nope_THN, q_rope_THR, kv_latent_TC, k_rope_TR, visible)
    gate_TG = sigmoid(x_TD @ weight("g_proj").T)
    lanes_per_gate = geometry.value_width // gate_TG.shape[1]
    gated_TX = core_THV.reshape(T, -1) * np.repeat(gate_TG, lanes_per_gate, axis=1)
    return values | {"core": core_THV, "gate": gate_TG, "output": gated_TX @ weight("o_proj").T}


def _core(
    geometry: MlaGeometry,
    kv_b_weight: Array,
    q_nope_THN: Array,
    q_rope_THR: Array,
    kv_latent_TC: Array,
    k_rope_TR: Array,
    visible: list[list[int]],
) -> Array:
    """Attention in the latent space: the key expansion moves to the query, the value expansion behind the sum."""
    T, H, N = q_nope_THN.shape
    per_head_HXC = kv_b_weight.reshape(H, N + geometry.v_head_dim, -1)
    core_THV = np.empty((T, H, geometry.v_head_dim))
    for t, keys in enumerate(visible):
        latent_SC, k_rope_SR = kv_latent_TC[keys], k_rope_TR[keys]
        for head in range(H):
            expand_key_NC, expand_value_VC = per_head_HXC[head, :N], per_head_HXC[head, N:]
            absorbed_C = expand_key_NC.T @ q_nope_THN[t, head]
            scores_S = (latent_SC @ absorbed_C + k_rope_SR @ q_rope_THR[t, head]) / np.sqrt(geometry.qk_head_dim)
            log_sum = np.logaddexp.reduce(scores_S)
            core_THV[t, head] = expand_value_VC @ (np.exp(scores_S - log_sum) @ latent_SC)
    return core_THV


def _indexer(
    weights: Weights,
    config: TextConfig,
    prefix: str,
    x_TD: Array,
    q_latent_TQ: Array,
    layout: str,
    angles: Angles,
) -> dict[str, Array]:
    """Score every earlier key, and the key of the token itself, and keep the best `index_topk`."""
    T, J, R = len(x_TD), config.index_head_dim, config.full.qk_rope_head_dim
    lanes = slice(0, R) if layout == "leading" else slice(J - R, J)

    def rotated(x: Array) -> Array:
        y = x.copy()
        y[..., lanes] = rope(x[..., lanes], config.full.rope_theta, angles, config.indexer_rope_interleave)
        return y

    def weight(name: str) -> Array:
        return weights[f"{prefix}indexer.{name}"]

    query_TIJ = rotated((q_latent_TQ @ weight("wq_b.weight").T).reshape(T, -1, J))
    key_TJ = rotated(layer_norm(x_TD @ weight("wk.weight").T, weight("k_norm.weight"), weight("k_norm.bias")))
    head_weights_TI = x_TD @ weight("weights_proj.weight").T / np.sqrt(config.index_n_heads)
    scores_TS = np.full((T, T), -np.inf)
    for t in range(T):
        for s in range(t + 1):
            products_I = query_TIJ[t] @ key_TJ[s] / np.sqrt(J)
            scores_TS[t, s] = head_weights_TI[t] @ np.where(products_I > 0, products_I, 0.0)
    K = min(config.index_topk, T)
    selected_TK = np.full((T, K), -1, dtype=np.int64)
    for t in range(T):
        best = best_indices(scores_TS[t, : t + 1], K)
        selected_TK[t, : len(best)] = sorted(best)
    return {
        "query": query_TIJ,
        "key": key_TJ,
        "head_weights": head_weights_TI,
        "scores": scores_TS,
        "selected": selected_TK,
    }


def best_indices(scores: Array, count: int) -> list[int]:
    """The indices of the `count` largest scores, best first; equal scores go to the smaller index."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


def _swiglu(weights: Weights, prefix: str, x_TD: Array) -> Array:
    gate_TF, up_TF = x_TD @ weights[f"{prefix}gate_proj.weight"].T, x_TD @ weights[f"{prefix}up_proj.weight"].T
    return (gate_TF * sigmoid(gate_TF) * up_TF) @ weights[f"{prefix}down_proj.weight"].T


def _experts(weights: Weights, config: TextConfig, prefix: str, x_TD: Array) -> dict[str, Array]:
    """Route each token by itself: sigmoid scores, biased for the choice only."""
    T, K = len(x_TD), config.num_experts_per_tok
    logits_TE = x_TD @ weights[f"{prefix}gate.weight"].T
    scores_TE = sigmoid(logits_TE)
    choice_TE = scores_TE + weights[f"{prefix}gate.e_score_correction_bias"]
    if config.n_group > 1:
        choice_TE = np.stack([_within_best_groups(row, config) for row in choice_TE])
    expert_ids_TK = np.array([best_indices(row, K) for row in choice_TE], dtype=np.int64)
    chosen_TK = np.array([[scores_TE[t, e] for e in ids] for t, ids in enumerate(expert_ids_TK)])
    if config.norm_topk_prob:
        chosen_TK = chosen_TK / (chosen_TK.sum(1, keepdims=True) + WEIGHT_SUM_FLOOR)
    weights_TK = chosen_TK * config.routed_scaling_factor
    routed_TD = np.zeros_like(x_TD)
    for t in range(T):
        for expert, expert_weight in zip(expert_ids_TK[t], weights_TK[t], strict=True):
            routed_TD[t] += expert_weight * _swiglu(weights, f"{prefix}experts.{expert}.", x_TD[t])
    shared_TD = _swiglu(weights, f"{prefix}shared_experts.", x_TD)
    return {
        "router.logits": logits_TE,
        "router.scores": scores_TE,
        "router.choice": choice_TE,
        "router.expert_ids": expert_ids_TK,
        "router.weights": weights_TK,
        "routed": routed_TD,
        "shared": shared_TD,
        "output": routed_TD + shared_TD,
    }


def _within_best_groups(choice_E: Array, config: TextConfig) -> Array:
    """-inf outside the `topk_group` groups whose two best experts have the largest sum."""
    groups = choice_E.reshape(config.n_group, -1)
    strength = np.array([sum(sorted(group)[-2:]) for group in groups])
    limited = np.full_like(groups, -np.inf)
    for group in best_indices(strength, config.topk_group):
        limited[group] = groups[group]
    return limited.reshape(-1)


def random_weights(config: TextConfig, seed: int) -> dict[str, Array]:
    """Every released tensor of the text model and its draft layer, drawn so that each one matters.

    Norm weights lie between 0.3 and 2 and differ from lane to lane; projections keep the scale of their input;
    correction biases are large enough to change the choice of experts. Values are float32 numbers held as float64.
    """
    rng = np.random.default_rng(seed)
    D, W, F = config.hidden_size, config.vocab_size, config.intermediate_size
    weights: dict[str, Array] = {}

    def add(name: str, array: Array) -> None:
        weights[name] = array.astype(np.float32).astype(np.float64)

    def linear(name: str, out_features: int, in_features: int) -> None:
        add(f"{name}.weight", rng.normal(size=(out_features, in_features)) / np.sqrt(in_features))

    def norm(name: str, width: int) -> None:
        add(f"{name}.weight", rng.uniform(0.3, 2.0, size=width))

    def swiglu(name: str, width: int) -> None:
        linear(f"{name}.gate_proj", width, D)
        linear(f"{name}.up_proj", width, D)
        linear(f"{name}.down_proj", D, width)

    def attention(name: str, geometry: MlaGeometry) -> None:
        H, Q, C = geometry.num_attention_heads, geometry.q_lora_rank, geometry.kv_lora_rank
        linear(f"{name}.q_a_proj", Q, D)
        norm(f"{name}.q_a_layernorm", Q)
        linear(f"{name}.q_b_proj", H * geometry.qk_head_dim, Q)
        linear(f"{name}.kv_a_proj_with_mqa", geometry.latent_row, D)
        norm(f"{name}.kv_a_layernorm", C)
        norm(f"{name}.k_rope_only_layernorm", geometry.qk_rope_head_dim)
        linear(f"{name}.kv_b_proj", H * (geometry.qk_nope_head_dim + geometry.v_head_dim), C)
        linear(f"{name}.o_proj", D, geometry.value_width)
        linear(f"{name}.g_proj", geometry.gate_width, D)

    def indexer(name: str) -> None:
        linear(f"{name}.wq_b", config.index_n_heads * config.index_head_dim, config.full.q_lora_rank)
        linear(f"{name}.wk", config.index_head_dim, D)
        linear(f"{name}.weights_proj", config.index_n_heads, D)
        norm(f"{name}.k_norm", config.index_head_dim)
        add(f"{name}.k_norm.bias", rng.normal(size=config.index_head_dim) * 0.3)

    def experts(name: str) -> None:
        linear(f"{name}.gate", config.n_routed_experts, D)
        add(f"{name}.gate.e_score_correction_bias", rng.normal(size=config.n_routed_experts) * 0.3)
        for expert in range(config.n_routed_experts):
            swiglu(f"{name}.experts.{expert}", config.moe_intermediate_size)
        swiglu(f"{name}.shared_experts", config.shared_intermediate_size)

    add("model.embed_tokens.weight", rng.normal(size=(W, D)))
    for layer in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        name = f"model.layers.{layer}"
        norm(f"{name}.input_layernorm", D)
        attention(f"{name}.self_attn", config.geometry(layer))
        if config.is_full(layer):
            indexer(f"{name}.self_attn.indexer")
        norm(f"{name}.post_attention_layernorm", D)
        if config.is_moe(layer):
            experts(f"{name}.mlp")
        else:
            swiglu(f"{name}.mlp", F)
        if layer >= config.num_hidden_layers:
            for part in ("enorm", "hnorm", "shared_head.norm"):
                norm(f"{name}.{part}", D)
            linear(f"{name}.eh_proj", D, 2 * D)
    norm("model.norm", D)
    linear("lm_head", W, D)
    if config.num_nextn_predict_layers:
        add("model.mtp.embed_tokens.weight", rng.normal(size=(W, D)))
    return weights
