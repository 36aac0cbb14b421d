"""Hypothesis strategies for configurations, simplest first, so that a failure shrinks to the smallest model."""

import dataclasses

from hypothesis import strategies as st

from reference.config import GateType, MlaGeometry, NoteConfig, TextConfig, tiny


@st.composite
def text_configs(draw: st.DrawFn, oracle: bool = False) -> TextConfig:
    """Small text configs: every size, the schedule, window, top-k, expert counts, groups and switches.

    transformers' config class accepts each of them. With `oracle=True` its model computes them too: what it has no
    switch for stays as released (gates one a head, latents rescaled, index pairs interleaved), and there are at least 8
    index heads, so that exact ties between keys are rare.
    """
    kinds = draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=1, max_size=4))
    gates: st.SearchStrategy[GateType] = st.just("headwise") if oracle else st.sampled_from(["headwise", "elementwise"])
    released_switch = st.just(True) if oracle else st.sampled_from([True, False])
    sliding = draw(_geometries(gates))
    # transformers derives the rotated width of full layers from `head_dim` too, which is the sliding head's width.
    full = draw(_geometries(gates).filter(lambda full: _survives(full.qk_rope_head_dim, sliding.qk_head_dim)))
    n_group = draw(st.integers(1, 4))
    topk_group = draw(st.integers(1, n_group))
    experts_per_group = draw(st.integers(2, 5))
    return TextConfig(
        hidden_size=draw(st.integers(2, 40)),
        vocab_size=draw(st.integers(2, 70)),
        num_hidden_layers=len(kinds),
        layer_types=tuple(kinds),
        max_position_embeddings=4096,
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6, 1e-2])),
        full=full,
        sliding=sliding,
        sliding_window_size=draw(st.integers(1, 9)),
        apply_mla_qkv_lora_rescale=draw(released_switch),
        index_n_heads=draw(st.sampled_from([8, 9, 16] if oracle else [1, 2, 8, 9, 16])),
        index_head_dim=full.qk_rope_head_dim + draw(st.integers(0, 6)),
        index_topk=draw(st.integers(1, 12)),
        indexer_rope_interleave=draw(released_switch),
        intermediate_size=draw(st.integers(1, 30)),
        first_k_dense_replace=draw(st.integers(0, len(kinds))),
        n_routed_experts=n_group * experts_per_group,
        n_shared_experts=draw(st.integers(1, 2)),
        num_experts_per_tok=draw(st.integers(1, experts_per_group * topk_group)),
        moe_intermediate_size=draw(st.integers(1, 20)),
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=draw(st.sampled_from([True, False])),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        num_nextn_predict_layers=draw(st.sampled_from([1, 0])),
    )


@st.composite
def note_configs(draw: st.DrawFn) -> NoteConfig:
    """A drawn text config, the special tokens drawn too, no towers, and now and then an entry that is not used."""
    text = draw(text_configs())
    token_ids = st.integers(0, text.vocab_size - 1)
    return dataclasses.replace(
        tiny(),
        text=text,
        bos_token_id=draw(token_ids),
        eos_token_ids=tuple(draw(st.lists(token_ids, min_size=1, max_size=3))),
        pad_token_id=draw(token_ids),
        unused=draw(st.sampled_from([{}, {"transformers_version": "5.24.0", "torch_dtype": "bfloat16"}])),
    )


@st.composite
def _geometries(draw: st.DrawFn, gates: st.SearchStrategy[GateType]) -> MlaGeometry:
    rope, nope = draw(
        st.tuples(st.sampled_from([2, 4, 6, 8]), st.integers(1, 14)).filter(
            lambda sizes: _survives(sizes[0], sum(sizes))
        )
    )
    return MlaGeometry(
        num_attention_heads=draw(st.integers(1, 5)),
        q_lora_rank=draw(st.integers(1, 24)),
        kv_lora_rank=draw(st.integers(1, 24)),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=draw(st.integers(1, 12)),
        rope_theta=draw(st.sampled_from([1e2, 5e4, 8e7])),
        gate_type=draw(gates),
    )


def _survives(rope: int, width: int) -> bool:
    """transformers stores the rotated width as a fraction of the head's and multiplies back, losing one for some."""
    return int(width * (rope / width)) == rope
