"""Thirteen changes that must not matter, in float64. Each test says whether it owes bytes or a bound.

Where the change is absorbed by a norm, the config's epsilon is made negligible, and a model without that norm shows
that the test can fail. Source: text_model specification, section 20, in its order.
"""

import dataclasses

import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st
from strategies import text_configs
from torch import Tensor, nn
from weights import (
    FLOAT64_BOUND,
    drawn_ids,
    error,
    in_chunks,
    one_layer,
    one_shot,
    probes,
    random_model,
    small,
)

from reference.cache import FullCache, LatentRows
from reference.config import MlaGeometry
from reference.layers.mla import in_window
from reference.numerics import Numerics
from reference.text import TextModel

NEGLIGIBLE_EPS = 1e-30
# What a change that matters moves at least: twelve orders above the bound of one that does not.
VISIBLE = 1e-2

factors = st.floats(0.03, 30.0)
lengths = st.integers(1, 24)
seeds = st.integers(0, 2**16)


def scaled(model: TextModel, name: str, rows: slice, factor: float) -> None:
    """Multiply these rows of every weight whose name ends so."""
    matching = [weight for full_name, weight in model.named_parameters() if full_name.endswith(f"{name}.weight")]
    assert matching
    for weight in matching:
        weight.data[rows] *= factor


def dense_core(values: dict[str, Tensor], model: TextModel, visible_TS: Tensor) -> Tensor:
    """Attention of layer 0 from its named values, [T, H, V], written from the definition, one head at a time."""
    attention = model.model.layers[0].self_attn
    q_nope_THN, q_rope_THR = values["layers.0.attn.q_nope"], values["layers.0.attn.q_rope"]
    kv_latent_SC, k_rope_SR = values["layers.0.attn.kv_latent"], values["layers.0.attn.k_rope"]
    H, N = q_nope_THN.shape[1:]
    scale = (N + k_rope_SR.shape[1]) ** -0.5
    heads = []
    for head, weight_XC in enumerate(attention.kv_b_proj.weight.detach().unflatten(0, (H, -1))):
        k_nope_SN, value_SV = (kv_latent_SC @ weight_XC.T).tensor_split([N], dim=-1)
        scores_TS = (q_nope_THN[:, head] @ k_nope_SN.T + q_rope_THR[:, head] @ k_rope_SR.T) * scale
        exponentials_TS = (scores_TS - scores_TS.amax(-1, keepdim=True)).exp() * visible_TS
        heads.append(exponentials_TS / exponentials_TS.sum(-1, keepdim=True) @ value_SV)
    return torch.stack(heads, dim=1)


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@given(config=text_configs(), length=lengths, seed=seeds, factor=factors)
def test_01_scaling_the_rope_key_rows_changes_nothing(config, length, seed, factor):
    """Owes a bound: the rope-key norm forgets scale."""
    config = dataclasses.replace(config, rms_norm_eps=NEGLIGIBLE_EPS)
    ids = drawn_ids(config, length, seed)
    expected = one_shot(random_model(config, seed), ids)
    model = random_model(config, seed)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.kv_a_proj_with_mqa.weight.data[attention.geometry.kv_lora_rank :] *= factor
    assert error(one_shot(model, ids), expected) <= FLOAT64_BOUND


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_01_a_model_without_the_rope_key_norm_moves(kind):
    config = one_layer(kind)
    rows, ids = slice(getattr(config, kind).kv_lora_rank, None), drawn_ids(config, 6)
    outputs = []
    for factor in (1.0, 3.0):
        model = random_model(config)
        model.model.layers[0].self_attn.k_rope_only_layernorm = nn.Identity()
        scaled(model, "layers.0.self_attn.kv_a_proj_with_mqa", rows, factor)
        outputs.append(one_shot(model, ids))
    assert error(*outputs) > VISIBLE


@given(config=text_configs(), length=lengths, seed=seeds, q_factor=factors, kv_factor=factors)
def test_02_scaling_the_latent_projections_changes_nothing(config, length, seed, q_factor, kv_factor):
    """Owes a bound: the norms of both latents forget scale. This is also why a rescale before them is none."""
    config = dataclasses.replace(config, rms_norm_eps=NEGLIGIBLE_EPS)
    ids = drawn_ids(config, length, seed)
    expected = one_shot(random_model(config, seed), ids)
    model = random_model(config, seed)
    scaled(model, "q_a_proj", slice(None), q_factor)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.kv_a_proj_with_mqa.weight.data[: attention.geometry.kv_lora_rank] *= kv_factor
    assert error(one_shot(model, ids), expected) <= FLOAT64_BOUND


@given(length=st.integers(1, 24), seed=seeds, exponent=st.integers(-20, 20), topk=st.integers(1, 11))
def test_03_scaling_index_queries_by_a_power_of_two_scales_scores_and_selects_the_same(length, seed, exponent, topk):
    """Owes bytes."""
    config = small(index_topk=topk)
    ids, factor = drawn_ids(config, length, seed), 2.0**exponent
    expected = probes(random_model(config, seed), ids)
    model = random_model(config, seed)
    scaled(model, "indexer.wq_b", slice(None), factor)
    actual = probes(model, ids)
    for layer in (0, 2):
        name = f"layers.{layer}.attn.index."
        assert torch.equal(actual[name + "selected"], expected[name + "selected"])
        assert torch.equal(actual[name + "scores"], expected[name + "scores"] * factor)
    assert torch.equal(actual["logits"], expected["logits"])


@pytest.mark.parametrize("gate_type", ["headwise", "elementwise"])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_04_gated_over_ungated_is_the_gate(kind, gate_type):
    """Owes a bound. Headwise, the ratio is one number for all lanes of a head; elementwise, one for each lane."""
    config = one_layer(kind)
    config = dataclasses.replace(config, **{kind: dataclasses.replace(getattr(config, kind), gate_type=gate_type)})
    model, gated = random_model(config), []
    attention = model.model.layers[0].self_attn
    attention.o_proj.register_forward_pre_hook(lambda module, inputs: gated.append(inputs[0]))
    values = probes(model, drawn_ids(config, 9))
    core_THV, attn_input_TD = values["layers.0.attn.core"], values["layers.0.attn.input"]
    ratio_THV = gated[0].view_as(core_THV) / core_THV
    gate = torch.sigmoid(attn_input_TD @ attention.g_proj.weight.detach().T).reshape(*core_THV.shape[:2], -1)
    assert gate.shape[-1] == (1 if gate_type == "headwise" else core_THV.shape[-1])
    assert error(ratio_THV, gate.expand_as(ratio_THV)) <= FLOAT64_BOUND
    assert error(values["layers.0.attn.gate"].reshape_as(gate), gate) <= FLOAT64_BOUND


@given(length=st.integers(2, 20), spare=st.integers(0, 3), seed=seeds)
def test_05_a_window_as_long_as_the_sequence_is_causal_and_one_less_drops_one_pair(length, spare, seed):
    """Owes a bound against the dense formula; the number of pairs is exact."""
    config = one_layer("sliding", sliding_window_size=length + spare)
    model, ids = random_model(config, seed), drawn_ids(config, length, seed)
    values = probes(model, ids)
    assert error(values["layers.0.attn.core"], dense_core(values, model, causal(length))) <= FLOAT64_BOUND

    narrow = random_model(dataclasses.replace(config, sliding_window_size=length - 1), seed)
    values, visible_TS = probes(narrow, ids), causal(length)
    visible_TS[length - 1, 0] = False
    assert error(values["layers.0.attn.core"], dense_core(values, narrow, visible_TS)) <= FLOAT64_BOUND
    positions = torch.arange(length)
    assert torch.equal(in_window(positions, positions, length - 1), visible_TS)


@given(length=st.integers(1, 20), spare=st.integers(0, 3), seed=seeds)
def test_06_a_top_k_as_long_as_the_sequence_is_causal_for_any_indexer(length, spare, seed):
    """Owes a bound against the dense formula, and bytes between two indexers."""
    config = one_layer("full", index_topk=length + spare)
    model, ids = random_model(config, seed), drawn_ids(config, length, seed)
    values = probes(model, ids)
    assert error(values["layers.0.attn.core"], dense_core(values, model, causal(length))) <= FLOAT64_BOUND
    for weight in model.model.layers[0].self_attn.indexer.parameters():
        weight.data = -2.0 * weight.data.flip(0)
    other = probes(model, ids)
    assert torch.equal(other["logits"], values["logits"])
    assert length == 1 or not torch.equal(other["layers.0.attn.index.scores"], values["layers.0.attn.index.scores"])


def exchange(model: TextModel, first: int, second: int, with_router: bool) -> None:
    """Exchange two experts of every layer, with or without their router rows and biases."""
    order = list(range(model.config.n_routed_experts))
    order[first], order[second] = second, first
    for layer in model.model.layers:
        if not hasattr(layer.mlp, "gate"):
            continue
        layer.mlp.experts = nn.ModuleList(layer.mlp.experts[expert] for expert in order)
        if with_router:
            layer.mlp.gate.weight.data = layer.mlp.gate.weight.data[order]
            layer.mlp.gate.e_score_correction_bias.data = layer.mlp.gate.e_score_correction_bias.data[order]


@given(length=lengths, seed=seeds, pair=st.lists(st.integers(0, 13), min_size=2, max_size=2, unique=True))
def test_07_exchanging_two_experts_with_their_router_rows_changes_nothing(length, seed, pair):
    """Owes a bound: the sum over experts runs in the order of their ids."""
    config = small()
    ids = drawn_ids(config, length, seed)
    expected = one_shot(random_model(config, seed), ids)
    model = random_model(config, seed)
    exchange(model, *pair, with_router=True)
    assert error(one_shot(model, ids), expected) <= FLOAT64_BOUND


def test_07_exchanging_two_experts_alone_is_visible():
    config = small()
    ids = drawn_ids(config, 12)
    expected = one_shot(random_model(config), ids)
    model = random_model(config)
    exchange(model, 2, 9, with_router=False)
    assert error(one_shot(model, ids), expected) > VISIBLE


def with_twin_experts(seed: int, bias: float) -> TextModel:
    """Experts 4 and 11 of every layer have the same router row and the same bias, `bias`."""
    model = random_model(small(num_experts_per_tok=3), seed)
    for layer in model.model.layers[1:3]:
        layer.mlp.gate.weight.data[11] = layer.mlp.gate.weight.data[4]
        layer.mlp.gate.e_score_correction_bias.data[[4, 11]] = bias
    return model


@given(length=lengths, seed=seeds)
def test_08_twin_experts_tie_exactly_and_inside_the_top_k_nothing_changes(length, seed):
    """The tie owes bytes; exchanging the twins' weights owes a bound, since they run in the order of their ids."""
    model = with_twin_experts(seed, bias=10.0)
    ids = drawn_ids(model.config, length, seed)
    expected = probes(model, ids)
    for layer in (1, 2):
        name = f"layers.{layer}.ffn.router."
        assert torch.equal(expected[name + "choice"][:, 4], expected[name + "choice"][:, 11])
        assert all({4, 11} <= set(chosen) for chosen in expected[name + "expert_ids"].tolist())
    exchange(model, 4, 11, with_router=False)
    assert error(one_shot(model, ids), expected["logits"]) <= FLOAT64_BOUND


def test_08_a_tie_at_the_cut_goes_to_the_lower_id():
    model = with_twin_experts(seed=3, bias=10.0)
    for layer in model.model.layers[1:3]:
        layer.mlp.gate.e_score_correction_bias.data[[0, 13]] = 20.0
    values = probes(model, drawn_ids(model.config, 12))
    for layer in (1, 2):
        assert values[f"layers.{layer}.ffn.router.expert_ids"].sort(-1).values.tolist() == [[0, 4, 13]] * 12


@given(config=text_configs(), length=st.integers(2, 24), seed=seeds)
def test_09_a_prefill_equals_a_shorter_prefill_and_one_decode(config, length, seed):
    """Owes a bound."""
    model, ids = random_model(config, seed), drawn_ids(config, length, seed)
    assert error(in_chunks(model, ids, [length - 1, 1])[-1], one_shot(model, ids)[-1]) <= FLOAT64_BOUND


@given(config=text_configs(), length=st.integers(1, 24), chunk=st.integers(1, 24), seed=seeds)
@example(config=small(), length=24, chunk=1, seed=0)
def test_10_any_chunk_size_gives_the_rows_of_one_prefill(config, length, chunk, seed):
    """Owes a bound."""
    model, ids = random_model(config, seed), drawn_ids(config, length, seed)
    sizes = [min(chunk, length - start) for start in range(0, length, chunk)]
    assert error(in_chunks(model, ids, sizes), one_shot(model, ids)) <= FLOAT64_BOUND


@given(config=text_configs(), length=lengths, seed=seeds)
def test_11_absorbed_equals_expanded_attention(config, length, seed):
    """Owes a bound: the same sums in another order."""
    ids = drawn_ids(config, length, seed)
    absorbed = random_model(config, seed, numerics=Numerics(attention_form="absorbed"))
    assert error(one_shot(absorbed, ids), one_shot(random_model(config, seed), ids)) <= FLOAT64_BOUND


class PaddedCache(FullCache):
    """Latent and rope key in one physical row that is wider than both; the lanes behind them hold NaN."""

    PADDING = 5

    def __init__(self, geometry: MlaGeometry):
        super().__init__()
        self.widths = (geometry.kv_lora_rank, geometry.qk_rope_head_dim)
        self.pool_PX = torch.full((64, sum(self.widths) + self.PADDING), float("nan"), dtype=torch.float64)

    def append(self, kv_latent_TC: Tensor, k_rope_TR: Tensor, index_key_TJ: Tensor) -> tuple[LatentRows, Tensor]:
        start = self.length
        _, index_key_SJ = super().append(kv_latent_TC, k_rope_TR, index_key_TJ)
        self.pool_PX[start : self.length, : sum(self.widths)] = torch.cat((kv_latent_TC, k_rope_TR), dim=-1)
        latent_SC, rope_SR = self.pool_PX[: self.length, : sum(self.widths)].split(self.widths, dim=-1)
        return LatentRows(latent_SC, rope_SR, torch.arange(self.length)), index_key_SJ


@given(chunks=st.lists(st.integers(1, 7), min_size=1, max_size=5), seed=seeds)
def test_12_a_padded_physical_row_gives_the_same_and_its_padding_stays(chunks, seed):
    """Owes a bound, since the rows' stride may change the order of a sum; the padding owes bytes."""
    config = small()
    model, ids = random_model(config, seed), drawn_ids(config, sum(chunks), seed)
    cache = model.new_cache()
    cache.layers = [PaddedCache(config.full) if config.is_full(layer) else cache.layers[layer] for layer in range(3)]
    with torch.no_grad():
        rows = [model(piece, cache) for piece in torch.tensor(ids).split(chunks)]
    assert error(torch.cat(rows), one_shot(model, ids)) <= FLOAT64_BOUND
    for padded in (cache.layers[0], cache.layers[2]):
        assert padded.pool_PX[:, -PaddedCache.PADDING :].isnan().all()
        assert not padded.pool_PX[: sum(chunks), : -PaddedCache.PADDING].isnan().any()


@given(config=text_configs(), prefix=st.integers(1, 12), suffix=st.integers(1, 12), seed=seeds)
def test_13_appending_tokens_never_changes_earlier_rows(config, prefix, suffix, seed):
    """Selections owe bytes, values a bound (matrix products of another height may add in another order)."""
    model, ids = random_model(config, seed), drawn_ids(config, prefix + suffix, seed)
    whole, part = probes(model, ids), probes(model, ids[:prefix])
    for name, value in part.items():
        if name.endswith("index.selected"):
            width = value.shape[1]
            assert torch.equal(whole[name][:prefix, :width], value)
            assert (whole[name][:prefix, width:] == -1).all()
        elif name.endswith("expert_ids"):
            assert torch.equal(whole[name][:prefix].sort(-1).values, value.sort(-1).values)
    assert error(whole["logits"][:prefix], part["logits"]) <= FLOAT64_BOUND
    event(f"prunes: {prefix > config.index_topk}")


def test_the_thirteen_are_all_here():
    numbers = {name[5:7] for name in globals() if name.startswith("test_") and name[5:7].isdigit()}
    assert numbers == {f"{number:02}" for number in range(1, 14)}
