"""The reference against the independent numpy formula, value by value, and the formula against hand-made cases."""

import dataclasses

import formula
import numpy as np
import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st
from strategies import text_configs

from parity.exact import exact
from reference.config import TextConfig, released, tiny
from reference.numerics import Numerics
from reference.probe import Recorder, listening
from reference.session import Session, StepItem
from reference.text import TextModel

# Both sides are float64 and add up to a few thousand terms; over 500 drawn configs the largest difference was 5e-13,
# relative to the largest value of its tensor. Float32 anywhere would show as 1e-8.
BOUND = 1e-10
# Spec section 5.3, frequencies of pairs 0, 1, 2, 16, 30 and 31 of 32.
TABLE = {
    8e7: [1.0, 0.566276367996998, 0.32066892495187144, 1.1180339887498949e-4, 3.898101445868539e-8, 2.20740272885e-8],
    5e4: [1.0, 0.713111084911932, 0.5085274194242727, 4.47213595499958e-3, 3.9329246046639764e-5, 2.804612131709e-5],
}


def torch_angles(T: int, R: int, theta: float) -> np.ndarray:
    """float32 angles whose frequencies come from torch's power: its last bit is the library's, not the model's."""
    frequency_P = (1.0 / theta ** (torch.arange(0, R, 2, dtype=torch.float32) / R)).numpy()
    return (np.arange(T, dtype=np.float32)[:, None] * frequency_P).astype(np.float64)


def reference_values(
    weights: dict[str, np.ndarray],
    config: TextConfig,
    token_ids: tuple[int, ...],
    drafted_ids: tuple[int, ...] = (),
    numerics: Numerics | None = None,
    indexer_rope_layout: str = "leading",
) -> dict[str, np.ndarray]:
    """All probes of the reference over one prefill and, with `drafted_ids`, a teacher-forced draft behind it."""
    model = TextModel(config, numerics or Numerics(), indexer_rope_layout=indexer_rope_layout).double()
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})
    session, recorder = Session(model, max_draft_tokens=max(1, len(drafted_ids))), Recorder()
    with torch.no_grad(), listening(recorder):
        session.step([StepItem("a", token_ids, "prefill")])
        if drafted_ids:
            session.draft("a", drafted_ids[0], len(drafted_ids), forced=drafted_ids[1:])
    # What the caches hold is compared with the probes of the same name elsewhere; the formula has no cache.
    return {o.name: o.value.numpy() for o in recorder.observations if not o.name.startswith("cache.")}


def formula_values(
    weights: dict[str, np.ndarray],
    config: TextConfig,
    token_ids: tuple[int, ...],
    drafted_ids: tuple[int, ...] = (),
    angles: formula.Angles = torch_angles,
    indexer_rope_layout: str = "leading",
    **draft_options: bool,
) -> dict[str, np.ndarray]:
    values = formula.forward(weights, config, token_ids, indexer_rope_layout=indexer_rope_layout, angles=angles)
    if drafted_ids:
        final_norm_TD = values["final_norm"]
        steps = formula.draft(weights, config, token_ids, final_norm_TD, drafted_ids, angles=angles, **draft_options)
        for step, named in enumerate(steps):
            values |= {f"mtp.{step}.{name}": value for name, value in named.items()}
    return values


def differences(expected: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> list[str]:
    """Every name whose values disagree, with its error relative to the largest expected value."""
    assert set(expected) == set(actual)
    return [line for name in expected if (line := _difference(name, expected[name], actual[name]))]


def _difference(name: str, expected: np.ndarray, actual: np.ndarray) -> str:
    if expected.shape != actual.shape:
        return f"{name}: shape {expected.shape} expected, {actual.shape} found"
    if name.endswith(("router.expert_ids", "router.weights", "index.selected")):
        return _choice_difference(name, expected, actual)
    finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(actual), finite):
        return f"{name}: not finite at other places"
    error = np.abs(actual[finite] - expected[finite]).max() / max(np.abs(expected[finite]).max(), 1e-300)
    return f"{name}: {error:.2e}" if not error <= BOUND else ""


def _choice_difference(name: str, expected: np.ndarray, actual: np.ndarray) -> str:
    # Experts come in any order, and their weights in the order of the experts.
    if name.endswith("weights"):
        close = np.allclose(np.sort(expected), np.sort(actual), rtol=BOUND, atol=0)
    elif name.endswith("expert_ids"):
        close = np.array_equal(np.sort(expected), np.sort(actual))
    else:
        close = actual.dtype == np.int64 and np.array_equal(expected, actual)
    return "" if close else f"{name}: another choice"


def drawn_ids(config: TextConfig, count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, config.vocab_size, count).tolist())


@pytest.mark.parametrize("indexer_rope_layout", ["leading", "tail"])
@pytest.mark.parametrize("mask_position_0", [False, True])
def test_tiny_agrees_with_the_formula(indexer_rope_layout, mask_position_0):
    config = tiny().text
    weights, token_ids, drafted_ids = formula.random_weights(config, 0), drawn_ids(config, 30), (5, 7, 180, 7)
    expected = formula_values(
        weights,
        config,
        token_ids,
        drafted_ids,
        indexer_rope_layout=indexer_rope_layout,
        zero_embedding_at_position_0=mask_position_0,
    )
    numerics = Numerics(mtp_mask_position_0=mask_position_0)
    actual = reference_values(weights, config, token_ids, drafted_ids, numerics, indexer_rope_layout)
    assert differences(expected, actual) == []


def test_tiny_agrees_without_rounded_angles():
    """The logic alone: exact mode promotes the reference's angles, the formula computes them in float64."""
    config = tiny().text
    weights, token_ids, drafted_ids = formula.random_weights(config, 1), drawn_ids(config, 25), (3, 4)
    expected = formula_values(weights, config, token_ids, drafted_ids, formula.exact_angles)
    with exact() as spy:
        actual = reference_values(weights, config, token_ids, drafted_ids)
    assert spy.lower_precision_ops == []
    assert differences(expected, actual) == []


@given(
    config=text_configs(),
    length=st.integers(1, 20),
    seed=st.integers(0, 999),
    depth=st.integers(0, 3),
    indexer_rope_layout=st.sampled_from(["leading", "tail"]),
    form=st.sampled_from(["expanded", "absorbed"]),
)
@example(config=tiny().text, length=14, seed=0, depth=1, indexer_rope_layout="leading", form="absorbed")
def test_any_config_agrees_with_the_formula(config, length, seed, depth, indexer_rope_layout, form):
    event(f"layers {'+'.join(kind[0] for kind in config.layer_types)}")
    event(f"more than the top-k {length > config.index_topk}, than the window {length > config.sliding_window_size}")
    weights, token_ids = formula.random_weights(config, seed), drawn_ids(config, length, seed)
    drafted_ids = drawn_ids(config, depth, seed + 1) if config.num_nextn_predict_layers else ()
    expected = formula_values(weights, config, token_ids, drafted_ids, indexer_rope_layout=indexer_rope_layout)
    numerics = Numerics(attention_form=form)
    actual = reference_values(weights, config, token_ids, drafted_ids, numerics, indexer_rope_layout)
    assert differences(expected, actual) == []


def test_the_comparison_sees_a_changed_weight():
    """Every tensor moves some value, but for experts that no token chooses: nothing is compared while it is dead."""
    config = dataclasses.replace(tiny().text, num_hidden_layers=3, layer_types=tiny().text.layer_types[:3])
    weights, token_ids, drafted_ids = formula.random_weights(config, 0), drawn_ids(config, 20), (5, 6)
    actual = reference_values(weights, config, token_ids, drafted_ids)
    unchosen = tuple(
        f"model.layers.{layer}.mlp.experts.{expert}."
        for layer in (1, 2)
        for expert in set(range(config.n_routed_experts)) - set(actual[f"layers.{layer}.ffn.router.expert_ids"].flat)
    )
    for name in (name for name in weights if not name.startswith(unchosen)):
        expected = formula_values({**weights, name: weights[name] * 1.01}, config, token_ids, drafted_ids)
        assert differences(expected, actual), f"{name} has no effect"


def test_random_weights_are_the_models_tensors():
    config = tiny().text
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in TextModel(config, Numerics()).state_dict().items()}
    actual = {name: weight.shape for name, weight in formula.random_weights(config, 0).items()}
    assert actual == expected


@pytest.mark.parametrize("theta", TABLE)
def test_angles_have_the_published_frequencies(theta):
    pairs = [0, 1, 2, 16, 30, 31]
    exact_P = formula.exact_angles(2, 64, theta)[1, pairs]
    assert exact_P == pytest.approx(TABLE[theta], rel=1e-11)
    ulps = np.abs(formula.float32_angles(2, 64, theta)[1, pairs] / exact_P - 1) / 2.0**-23
    assert ulps.max() <= 2


def test_long_positions_round_as_float32_products():
    """At position 524287 the float32 product of the second pair is off by far more than a float64 one."""
    position, theta = 524287, released().text.full.rope_theta
    frequency = np.float32(formula.exact_angles(2, 64, theta)[1, 1])
    rounded = float(np.float32(position) * frequency)
    assert 1e-4 < abs(rounded - position * theta ** (-2 / 64)) < 0.03


def test_rope_rotates_pairs_in_place():
    x_TR = np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 0.0, 1.0]])
    y_TR = formula.rope(x_TR, 100.0, formula.exact_angles)
    assert y_TR[0] == pytest.approx(x_TR[0])
    assert y_TR[1] == pytest.approx([np.cos(1), np.sin(1), -np.sin(0.1), np.cos(0.1)])
    halves_TR = formula.rope(x_TR, 100.0, formula.exact_angles, interleaved=False)
    assert halves_TR[1] == pytest.approx([np.cos(1), -np.sin(0.1), np.sin(1), np.cos(0.1)])


def test_norms_have_their_own_epsilons():
    x = np.array([3e-3, 4e-3])
    assert formula.rms_norm(x, np.ones(2), 0.0) == pytest.approx(x / 12.5e-6**0.5)
    assert formula.rms_norm(x, np.array([1.0, 2.0]), 12.5e-6) == pytest.approx(x * [1, 2] / 25e-6**0.5)
    variance = 0.25e-6
    normed = formula.layer_norm(x, np.array([1.0, 2.0]), np.array([0.0, 5.0]))
    assert normed == pytest.approx([-0.5e-3 / (variance + 1e-6) ** 0.5, 5 + 1e-3 / (variance + 1e-6) ** 0.5])


def test_ties_go_to_the_smaller_index():
    assert formula.best_indices(np.array([0.0, 2.0, 0.0, 2.0, 0.0]), 4) == [1, 3, 0, 2]


def test_equal_scores_select_the_earliest_keys():
    config = dataclasses.replace(tiny().text, num_hidden_layers=1, layer_types=("full_attention",), index_topk=4)
    weights = formula.random_weights(config, 0)
    weights["model.layers.0.self_attn.indexer.weights_proj.weight"] *= 0
    selected_TK = formula.forward(weights, config, drawn_ids(config, 6))["layers.0.attn.index.selected"]
    assert selected_TK.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1], *[[0, 1, 2, 3]] * 3]


def test_groups_are_ranked_by_their_two_best():
    """Group 0 holds the best expert, group 1 the best pair; with one group kept the pair's group wins."""
    config = dataclasses.replace(
        tiny().text, n_routed_experts=6, n_group=2, topk_group=1, num_experts_per_tok=2, hidden_size=6
    )
    weights = {f"experts.{e}.{part}_proj.weight": np.ones((6, 6)) for e in range(6) for part in ("gate", "up", "down")}
    weights |= {f"shared_experts.{part}_proj.weight": np.ones((6, 6)) for part in ("gate", "up", "down")}
    weights |= {"gate.weight": np.eye(6), "gate.e_score_correction_bias": np.zeros(6)}
    logits = np.array([[4.0, -4.0, -4.0, 2.0, 2.0, -4.0]])
    values = formula._experts(weights, config, "", logits)
    assert values["router.expert_ids"].tolist() == [[3, 4]]
    assert values["router.weights"].tolist() == [[0.5, 0.5]]


@given(config=text_configs(), length=st.integers(2, 14), seed=st.integers(0, 99))
def test_the_future_changes_nothing(config, length, seed):
    weights, token_ids = formula.random_weights(config, seed), drawn_ids(config, length, seed)
    whole = formula.forward(weights, config, token_ids)["logits"]
    part = formula.forward(weights, config, token_ids[:-1])["logits"]
    assert np.allclose(whole[:-1], part, rtol=0, atol=1e-11 * np.abs(whole).max())
