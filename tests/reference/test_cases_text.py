"""Cases of people who ported the text layers: what is right, and where a port that has it wrong first shows.

"The port" is the reference with one thing changed, always with the same weights. Everything runs in float64 unless a
case is about rounding; the first probe that differs, in the order of computation, is the one to report. Test names
begin with the case's id.
"""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from weights import (
    FLOAT64_BOUND,
    drawn_ids,
    error,
    first_difference,
    in_chunks,
    one_layer,
    one_shot,
    probes,
    random_model,
    small,
)

from reference.cache import SlidingCache
from reference.config import MlaGeometry, TextConfig
from reference.layers import attention as attention_module
from reference.layers.attention import LatentAttention, attend, masked_softmax
from reference.layers.index_quantization import hadamard_matrix, quantized
from reference.layers.indexer import mask_of, select
from reference.layers.mla import in_window
from reference.layers.moe import Router
from reference.layers.norm import RMSNorm
from reference.numerics import Numerics
from reference.probe import Recorder, listening
from reference.session import Session, StepItem
from reference.text import TextModel

NEGLIGIBLE_EPS = 1e-30


def recorded_steps(model: TextModel, ids: Sequence[int], lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """The named values of each step, when the same tokens come in steps of these lengths; without the caches' rows."""
    session, steps, start = Session(model), [], 0
    for length in lengths:
        recorder = Recorder(("embeddings", "layers.*", "final_norm", "logits"))
        with torch.no_grad(), listening(recorder):
            session.step([StepItem("a", tuple(ids[start : start + length]), "prefill")])
        steps.append({observation.name: observation.value for observation in recorder.observations})
        start += length
    return steps


def rows_by_position(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows of each value joined over the steps, so that row t belongs to position t.

    Selections become masks over all positions; scores, which are as wide as the keys so far, are left out.
    """
    length = sum(len(step["embeddings"]) for step in steps)
    joined = {}
    for name in steps[0]:
        if name.endswith("selected"):
            joined[name] = torch.cat([mask_of(step[name], length) for step in steps])
        elif not name.endswith("index.scores"):
            joined[name] = torch.cat([step[name] for step in steps])
    return joined


# Geometry, rescale, scale


def test_c01_the_full_layers_theta_in_a_sliding_layer():
    config = small(num_hidden_layers=2, layer_types=("full_attention", "sliding_attention"))
    wrong = dataclasses.replace(config.sliding, rope_theta=config.full.rope_theta)
    port = random_model(dataclasses.replace(config, sliding=wrong))
    ids = drawn_ids(config, 8)
    actual, expected = probes(port, ids), probes(random_model(config), ids)
    assert first_difference(actual, expected) == "layers.1.attn.q_rope"
    # Position 0 is not rotated, and the lanes of pair 0 turn by the same angle for every theta.
    for name in ("layers.1.attn.q_rope", "layers.1.attn.k_rope"):
        assert torch.equal(actual[name][0], expected[name][0])
        assert torch.equal(actual[name][..., :2], expected[name][..., :2])
        assert error(actual[name][1:, ..., 2:], expected[name][1:, ..., 2:]) > 1e-2


@pytest.mark.parametrize("eps", [1e-5, NEGLIGIBLE_EPS])
def test_c02_a_rescale_before_the_norm_looks_like_none(eps):
    """Ratios 5 and 10 as released. From outside, "before the norm" and "missing" differ by the norm's epsilon only."""
    full = MlaGeometry(2, 16, 8, 6, 4, 5, 2.0e4, "headwise")
    config = one_layer("full", hidden_size=80, full=full, rms_norm_eps=eps)
    ids = drawn_ids(config, 8)
    expected = probes(random_model(config), ids)
    missing = probes(random_model(dataclasses.replace(config, apply_mla_qkv_lora_rescale=False)), ids)
    port = random_model(config)
    for norm in (port.model.layers[0].self_attn.q_a_layernorm, port.model.layers[0].self_attn.kv_a_layernorm):
        norm._rescaled = lambda x, norm=norm: RMSNorm.forward(norm, x * norm.scale)
    before = probes(port, ids)

    # Mean squares of the latents' inputs are about 1, so that epsilon matters by about its own size.
    bound = max(10 * eps, FLOAT64_BOUND)
    assert first_difference(before, expected) == first_difference(missing, expected) == "layers.0.attn.q_latent"
    for name, ratio in (("layers.0.attn.q_latent", 5**0.5), ("layers.0.attn.kv_latent", 10**0.5)):
        assert error(before[name] * ratio, expected[name]) <= bound
        assert error(missing[name] * ratio, expected[name]) <= FLOAT64_BOUND
    assert first_difference(before, missing, bound=100 * bound) == ""


class LatentWidthScale(MlaGeometry):
    """The mistake of C03: the scale from the width of the absorbed key."""

    @property
    def softmax_scale(self) -> float:
        return self.latent_row**-0.5


def test_c03_the_absorbed_decode_scales_by_the_latent_width(monkeypatch):
    """Prefill agrees, the first decode step differs first at the attention core, and scores by one constant ratio."""
    config = one_layer("sliding", sliding_window_size=7)
    geometry = config.sliding
    assert geometry.latent_row != geometry.qk_head_dim
    port = random_model(config)
    attention = port.model.layers[0].self_attn
    right = attention.attention
    wrong_geometry = LatentWidthScale(**dataclasses.asdict(geometry))
    wrong = LatentAttention(wrong_geometry, Numerics(attention_form="absorbed"), attention.workspace_bytes)
    attention.attention = lambda q_nope_THN, *others: (right if len(q_nope_THN) > 1 else wrong)(q_nope_THN, *others)

    scores = []

    def attend_and_keep_scores(query_HTX, key_HSX, value_HSV, visible_TS, scale, each_op):
        scores.append(query_HTX @ key_HSX.mT * scale)
        return attend(query_HTX, key_HSX, value_HSV, visible_TS, scale, each_op)

    monkeypatch.setattr(attention_module, "attend", attend_and_keep_scores)
    ids = drawn_ids(config, 17)
    expected = recorded_steps(random_model(config), ids, [16, 1])
    actual = recorded_steps(port, ids, [16, 1])
    assert first_difference(actual[0], expected[0]) == ""
    assert first_difference(actual[1], expected[1]) == "layers.0.attn.core"
    ratio = scores[3] / scores[1]
    assert error(ratio, torch.full_like(ratio, (geometry.qk_head_dim / geometry.latent_row) ** 0.5)) <= FLOAT64_BOUND


# The indexer


def with_halves_rotated(config: TextConfig) -> TextConfig:
    return dataclasses.replace(config, indexer_rope_interleave=False)


@pytest.mark.parametrize("length", [3, 4, 5, 12])
def test_c06_index_pairs_split_half_show_in_outputs_only_beyond_the_top_k(length):
    """The first value that differs is the index query at every length; outputs differ only where keys are pruned."""
    config = one_layer("full", index_topk=4)
    ids = drawn_ids(config, length)
    expected = probes(random_model(config, seed=5), ids)
    actual = probes(random_model(with_halves_rotated(config), seed=5), ids)
    assert first_difference(actual, expected) == "layers.0.attn.index.query"
    is_selected_same = torch.equal(actual["layers.0.attn.index.selected"], expected["layers.0.attn.index.selected"])
    assert is_selected_same == (length <= 4)
    assert torch.equal(actual["logits"], expected["logits"]) == (length <= 4)


def test_c08_eight_exact_ties_at_zero_always_give_the_same_keys():
    """-0.0 ties with 0.0, and zero outranks what is negative."""
    scores = torch.tensor([[0.0, -0.0, 0.0, 0.25, 0.0, 0.0, -0.0, 0.0, 0.5, 0.0]])
    assert int((scores == 0.0).sum()) == 8
    for _ in range(25):
        assert select(scores, torch.ones(1, 10, dtype=torch.bool), 4).tolist() == [[0, 1, 3, 8]]
    scores[0, 0] = -1e-30
    assert select(scores, torch.ones(1, 10, dtype=torch.bool), 4).tolist() == [[1, 2, 3, 8]]


def test_c08_a_key_that_no_head_likes_scores_exactly_zero_and_outranks_a_negative_one():
    """ReLU makes the ties: two keys against every query head, one key only liked by a head of negative weight."""
    indexer = random_model(one_layer("full", index_n_heads=8)).model.layers[0].self_attn.indexer
    query_TIJ = torch.ones(1, 8, indexer.head_dim, dtype=torch.float64)
    query_TIJ[0, 7] = -1.0
    weights_TI = torch.tensor([[1.0] * 7 + [-1.0]], dtype=torch.float64)
    key_SJ = torch.zeros(4, indexer.head_dim, dtype=torch.float64)
    key_SJ[0], key_SJ[2] = -1.0, 1.0
    scores = indexer.scores(query_TIJ, weights_TI, key_SJ)
    assert scores[0, 1] == scores[0, 3] == 0.0
    assert scores[0, 0] < 0.0 < scores[0, 2]
    assert select(scores, torch.ones(1, 4, dtype=torch.bool), 2).tolist() == [[1, 2]]


def test_c09_a_hadamard_rotation_cannot_be_judged_in_float64_and_shows_in_fp8():
    """256 keys, top 16, one channel 50 times larger.

    Measured overlap with the float64 sets: 15.4 of 16 keys without the rotation, 15.0 with it (four seeds: 15.1 to
    15.4 and 14.8 to 15.2). e4m3 is a floating format and keeps its relative precision beside one large lane.
    """
    config = one_layer("full", index_head_dim=128, index_n_heads=8, index_topk=16)
    indexer = random_model(config).model.layers[0].self_attn.indexer
    generator = torch.Generator().manual_seed(0)
    query_TIJ, key_SJ, weights_TI = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((32, 8, 128), (256, 128), (32, 8))
    )
    key_SJ[:, 3] *= 50.0
    visible_TS = torch.ones(32, 256, dtype=torch.bool)
    rotation_JJ = hadamard_matrix(128, torch.float64, torch.device("cpu"))

    truth_TS = indexer.scores(query_TIJ, weights_TI, key_SJ)
    rotated_TS = indexer.scores(query_TIJ @ rotation_JJ, weights_TI, key_SJ @ rotation_JJ)
    assert error(rotated_TS, truth_TS) <= 1e-10
    truth_sets = select(truth_TS, visible_TS, 16)
    assert torch.equal(select(rotated_TS, visible_TS, 16), truth_sets)

    overlap = {}
    for kind in ("fp8", "hadamard_fp8"):
        numerics = Numerics(index_quantization=kind)
        scores_TS = indexer.scores(quantized(query_TIJ, numerics), weights_TI, quantized(key_SJ, numerics))
        shared_TS = mask_of(select(scores_TS, visible_TS, 16), 256) & mask_of(truth_sets, 256)
        overlap[kind] = float(shared_TS.sum(-1).double().mean())
    assert 14.0 < min(overlap.values()) < max(overlap.values()) < 16.0


@pytest.mark.parametrize("split", [[8, 4], [4, 4, 4], [11, 1]])
def test_c10_index_keys_and_selections_do_not_depend_on_the_split(split):
    """Keys owe a bound, in the step and in the cache; selections are exact."""
    config = one_layer("full", index_topk=4)
    model, ids = random_model(config), drawn_ids(config, 12)
    expected, actual = (rows_by_position(recorded_steps(model, ids, lengths)) for lengths in ([12], split))
    assert first_difference(actual, expected) == ""
    caches = [model.new_cache() for _ in range(2)]
    with torch.no_grad():
        model(torch.tensor(ids), caches[0])
        for chunk in torch.tensor(ids).split(split):
            model(chunk, caches[1])
    expected_cached, cached = (cache.layers[0].tensors()["index_key"] for cache in caches)
    assert error(cached, expected_cached) <= FLOAT64_BOUND


def test_c10_a_fresh_long_prompt_and_a_resumed_request_in_one_step():
    """Owes bytes against each alone."""
    config = one_layer("full", index_topk=4)
    model, ids = random_model(config), drawn_ids(config, 12)
    session, alone = Session(model), Session(model)
    with torch.no_grad():
        for each in (session, alone):
            each.step([StepItem("resumed", ids[:8], "prefill")])
        items = [StepItem("fresh", ids[::-1], "prefill"), StepItem("resumed", ids[8:], "prefill")]
        together = session.step(items)
        for item in items:
            assert torch.equal(together[item.request], alone.step([item])[item.request])


def test_c10_a_port_that_scores_only_the_chunk_shows_in_the_first_later_chunk():
    config = one_layer("full", index_topk=4)
    port = random_model(config)
    indexer = port.model.layers[0].self_attn.indexer
    right = indexer.visible_keys
    indexer.visible_keys = lambda rows, positions_T, *others: right(rows, positions_T - positions_T[0], *others)
    ids = drawn_ids(config, 12)
    for split in ([12], [8, 4]):
        expected, actual = (recorded_steps(model, ids, split) for model in (random_model(config), port))
        assert first_difference(actual[0], expected[0]) == ""
    assert first_difference(actual[1], expected[1]) == "layers.0.attn.index.scores"


# Selections and masks


@given(order=st.permutations([*range(4), *[-1] * 8]))
def test_c11_sentinels_anywhere_in_a_selection_change_nothing(order):
    """Owes bytes against dense attention over the same mask."""
    mask = mask_of(torch.tensor([order]), 9)
    assert mask.tolist() == [[True] * 4 + [False] * 5]


def test_c11_sentinels_in_front_leave_dense_attention_over_the_live_keys():
    """Eight sentinels, then four keys. Owes a bound against a softmax over those four alone."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 6, generator=generator, dtype=torch.float64) for n in (1, 9, 9))
    live = [1, 3, 6, 8]
    mask = mask_of(torch.tensor([[-1] * 8 + live]), 9)
    expected = (query @ key[:, live].mT * 0.5).softmax(-1) @ value[:, live]
    assert error(attend(query, key, value, mask, 0.5, each_op=False), expected) <= FLOAT64_BOUND


@pytest.mark.parametrize("each_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_c11_a_row_without_a_live_key_is_zero(dtype, each_op):
    mask = mask_of(torch.tensor([[-1, -1, -1], [-1, 2, -1]]), 4)
    probabilities = masked_softmax(torch.ones(2, 2, 4, dtype=dtype), mask)
    assert torch.equal(probabilities, torch.tensor([[0.0] * 4, [0, 0, 1, 0]]).expand(2, 2, 4).to(probabilities.dtype))
    key = torch.full((2, 4, 6), 3.0, dtype=dtype)
    out = attend(torch.ones(2, 2, 6, dtype=dtype), key, key, mask, 1.0, each_op)
    assert torch.equal(out, torch.tensor([[0.0], [3.0]], dtype=dtype).expand(2, 2, 6))


def test_c12_up_to_the_top_k_the_layer_is_dense_bit_for_bit():
    sparse, dense = (one_layer("full", index_topk=topk) for topk in (8, 1000))
    ids = drawn_ids(sparse, 10)
    for length in (7, 8, 9):
        rows, expected = (one_shot(random_model(config), ids[:length]) for config in (sparse, dense))
        assert torch.equal(rows[:8], expected[:8])
        assert length < 9 or error(rows[8], expected[8]) > 1e-3
    decoded, expected = (in_chunks(random_model(config), ids, [7, 1, 1, 1]) for config in (sparse, dense))
    assert [torch.equal(*rows) for rows in zip(decoded, expected, strict=True)] == [True] * 8 + [False] * 2


def test_c12_a_step_that_holds_both_sides_of_the_border():
    """Owes bytes against each request alone: one of 8 tokens, which is dense, and one of 9, which prunes."""
    model = random_model(one_layer("full", index_topk=8))
    ids = drawn_ids(model.config, 9)
    items = [StepItem("eight", ids[:8], "prefill"), StepItem("nine", ids, "prefill")]
    with torch.no_grad():
        together = Session(model).step(items)
    assert torch.equal(together["eight"], one_shot(model, ids[:8]))
    assert torch.equal(together["nine"], one_shot(model, ids))


# The window


def visible_weights(cache: SlidingCache, length: int) -> Tensor:
    """Attention weights [T, 5] of the next `length` tokens under equal scores; values are one-hot by position."""
    value_TV = torch.eye(5, dtype=torch.float64)[cache.length : cache.length + length]
    positions_T = cache.next_positions(length, value_TV.device)
    rows = cache.append(value_TV, value_TV)
    visible_TS = in_window(positions_T, rows.positions_S, cache.window)
    key_HSX = torch.zeros_like(rows.kv_latent_SC)[None]
    return attend(key_HSX[:, :length], key_HSX, rows.kv_latent_SC[None], visible_TS, 1.0, each_op=False)[0]


def test_c15_the_window_counts_the_token_itself():
    causal = torch.ones(5, 5, dtype=torch.float64).tril()
    expected = causal / causal.sum(-1, keepdim=True)
    assert error(visible_weights(SlidingCache(4, 4), 4), expected[:4]) <= FLOAT64_BOUND
    causal[4, 0] = 0.0
    expected = causal / causal.sum(-1, keepdim=True)
    assert error(visible_weights(SlidingCache(4, 4), 5), expected) <= FLOAT64_BOUND
    cache = SlidingCache(4, 4)
    visible_weights(cache, 4)
    assert error(visible_weights(cache, 1), expected[4:]) <= FLOAT64_BOUND


@pytest.mark.parametrize(("wrong", "first_wrong_position"), [(5, 4), (3, 3)])
def test_c15_a_window_off_by_one_shows_at_the_core_in_prefill_and_in_decode(wrong, first_wrong_position):
    config = one_layer("sliding", sliding_window_size=4)
    model, port = (random_model(dataclasses.replace(config, sliding_window_size=window)) for window in (4, wrong))
    ids = drawn_ids(config, 6)
    for split in ([6], [1] * 6):
        expected, actual = (rows_by_position(recorded_steps(each, ids, split)) for each in (model, port))
        assert first_difference(actual, expected) == "layers.0.attn.core"
        core = "layers.0.attn.core"
        is_same = [error(*rows) <= FLOAT64_BOUND for rows in zip(actual[core], expected[core], strict=True)]
        assert is_same == [position < first_wrong_position for position in range(6)]


def test_c16_every_decode_step_equals_the_last_row_of_a_recompute():
    """Owes a bound."""
    model = random_model(small(sliding_window_size=4, index_topk=5))
    ids = drawn_ids(model.config, 9)
    rows = in_chunks(model, ids, [6, 1, 1, 1])
    for length in (7, 8, 9):
        assert error(rows[length - 1], one_shot(model, ids[:length])[-1]) <= FLOAT64_BOUND


def test_c16_a_window_lost_in_decode_shows_at_the_first_step_and_the_first_sliding_layer():
    """The port keeps every key and masks by the window only when it has more than one query."""
    config = small(sliding_window_size=4)
    port = random_model(dataclasses.replace(config, sliding_window_size=100))
    attention = port.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda module, inputs: setattr(module, "window", 4 if len(inputs[0]) > 1 else 100)
    )
    ids = drawn_ids(config, 9)
    expected, actual = (recorded_steps(model, ids, [6, 1, 1, 1]) for model in (random_model(config), port))
    differences = [first_difference(*steps) for steps in zip(actual, expected, strict=True)]
    assert differences[:2] == ["", "layers.1.attn.core"]


# Experts


def router_of(logits: dict[int, tuple[float, float]], numerics: Numerics, dtype: torch.dtype) -> Router:
    """256 experts, top 8. Logits are the sums of the two given parts, which bfloat16 holds; others are -4."""
    config = one_layer("full", n_routed_experts=256, num_experts_per_tok=8, hidden_size=2)
    router = Router(config, numerics).to(dtype)
    router.weight.data[:, 0] = -4.0
    for expert, parts in logits.items():
        router.weight.data[expert] = torch.tensor(parts, dtype=dtype)
    return router


def test_c20_bfloat16_router_logits_flip_a_close_pair():
    """Experts 100 and 200 have logits 1 and 1 + 2^-10, an eighth of bfloat16's step there. float32 sees it."""
    better = dict.fromkeys(range(7), (2.0, 0.0))
    close = {100: (1.0, 0.0), 200: (1.0, 2.0**-10)}
    x_TD = torch.ones(4, 2, dtype=torch.bfloat16)
    chosen, recorded = {}, {}
    for dtype in ("float32", "activation"):
        recorder = Recorder()
        with torch.no_grad(), listening(recorder):
            ids_TK, _ = router_of(better | close, Numerics(router_dtype=dtype), torch.bfloat16)(x_TD)
        chosen[dtype] = [set(ids) - set(range(7)) for ids in ids_TK.tolist()]
        recorded[dtype] = {observation.name: observation.value for observation in recorder.observations}
    assert chosen == {"float32": [{200}] * 4, "activation": [{100}] * 4}
    assert first_difference(recorded["activation"], recorded["float32"], bound=0.0) == "router.logits"

    margin = recorded["float32"]["router.choice"][:, 200] - recorded["float32"]["router.choice"][:, 100]
    slope = 1 / (2 + 2 * torch.cosh(torch.tensor(1.0)))
    assert margin.tolist() == pytest.approx([float(slope) * 2.0**-10] * 4, rel=1e-2)
    assert 2.0**-10 / torch.finfo(torch.bfloat16).eps == 0.125
    tied = recorded["activation"]["router.choice"]
    assert torch.equal(tied[:, 100], tied[:, 200])


def test_c22_grouped_routing_shows_at_the_first_expert_layer_with_one_token():
    """16 experts, top 4 in 8 groups. The four best each stand beside a bad partner, so no group of theirs is kept."""
    config = small(n_routed_experts=16, num_experts_per_tok=4)
    models = [random_model(dataclasses.replace(config, n_group=n, topk_group=k)) for n, k in ((1, 1), (8, 4))]
    for model in models:
        gate = model.model.layers[1].mlp.gate
        gate.weight.data.zero_()
        gate.e_score_correction_bias.data[:8] = torch.tensor([1.0, -5.0]).repeat(4)
        gate.e_score_correction_bias.data[8:] = 0.5
    ids = drawn_ids(config, 1)
    expected, port = (probes(model, ids) for model in models)
    assert first_difference(port, expected) == "layers.1.ffn.router.choice"
    chosen = "layers.1.ffn.router.expert_ids"
    assert (set(expected[chosen][0].tolist()), set(port[chosen][0].tolist())) == ({0, 2, 4, 6}, {8, 9, 10, 11})


# Chunks


@pytest.mark.parametrize("split", [[8, 8, 8, 8], [31, 1], [1, 31]])
def test_c36_every_value_of_every_position_is_the_same_for_every_split(split):
    """Owes a bound; selections and experts are exact."""
    model = random_model(small(sliding_window_size=7, index_topk=6))
    ids = drawn_ids(model.config, 32)
    expected, actual = (rows_by_position(recorded_steps(model, ids, lengths)) for lengths in ([32], split))
    assert first_difference(actual, expected) == ""


def test_c36_a_port_that_restarts_positions_in_each_chunk_shows_at_the_first_row_of_the_second():
    """Keyed by absolute position: the first is 8, the tensor the rotated query, and the chunk before it agrees."""
    model, port = (random_model(small()) for _ in range(2))
    attention = port.model.layers[0].self_attn
    rope = attention.rope
    attention.rope = lambda x, positions_T: rope(x, positions_T - positions_T[0])
    ids = drawn_ids(model.config, 32)
    expected, actual = (recorded_steps(each, ids, [8, 8, 8, 8]) for each in (model, port))
    differences = [first_difference(*steps) for steps in zip(actual, expected, strict=True)]
    assert differences == ["", *["layers.0.attn.q_rope"] * 3]
    q_rope = [torch.cat([step["layers.0.attn.q_rope"] for step in run]) for run in (actual, expected)]
    is_same = [error(*rows) <= FLOAT64_BOUND for rows in zip(*q_rope, strict=True)]
    assert is_same.index(False) == 8
