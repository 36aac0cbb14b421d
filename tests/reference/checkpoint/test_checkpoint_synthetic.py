"""Synthetic weights: the same bytes everywhere, and statistics that keep every mechanism of the model alive."""

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from checkpoint_folders import tiny_with_towers
from torch import Tensor

from reference.checkpoint import expected_tensors, load_text_model, synthetic_tensor, synthetic_tensors, write_synthetic
from reference.config import NoteConfig, released, tiny
from reference.probe import Recorder, listening


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


PINNED = {
    "model.embed_tokens.weight": "1812ab55fcfd74f1ee944ae9ed94d54038e045bd8c56da6a89da9ad8a1af56dd",
    "model.layers.1.self_attn.q_b_proj.weight": "9323567b47069ba283a6f103ca0fb967427ed4d33f66f4a1a4f2690b5578c927",
    "model.layers.1.self_attn.k_rope_only_layernorm.weight": (
        "457f62f8107704f25fde8fd53795e1dbc05c3b64044cf54a449817b244ce26b5"
    ),
    "model.layers.2.mlp.gate.e_score_correction_bias": (
        "01c212f607dea3bf78ca80b897c2a2f3b839a5ce33234fb88e69c173120ec9ff"
    ),
    "model.layers.5.self_attn.indexer.k_norm.bias": "bd9dc077362500778fb976599f2d575f4dec3cfe60f06602dce1e44d80a8357e",
    "model.layers.6.eh_proj.weight": "97080c145cb618d42f2f25636ab66fb4f92c6b533437fa5f1269bb25a425558e",
    "vision_encoder.blocks.3.mlp.experts.2.fc2.weight": (
        "4fb90670c891dc010689d2457c99ff873f1ba87ebef6441052b3a85991b206b7"
    ),
    "audio_encoder.dots_encoder.speech_encoder.conv2d2.weight": (
        "17277e9f503016eeea5dc44095f9a5af98b0fdac48fffd5e12097cba333def5b"
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_bytes_are_pinned(name: str):
    config = tiny_with_towers()
    assert sha256(synthetic_tensor(expected_tensors(config)[name], config, seed=0)) == PINNED[name]


def test_a_seed_is_another_checkpoint():
    expected = expected_tensors(tiny())
    for tensor in expected.values():
        assert not torch.equal(synthetic_tensor(tensor, tiny(), 0), synthetic_tensor(tensor, tiny(), 1)), tensor.name


def test_a_tensor_alone_is_the_one_of_the_whole():
    expected = expected_tensors(tiny())
    for name, value in synthetic_tensors(tiny(), seed=3):
        assert value.dtype == expected[name].dtype
        assert tuple(value.shape) == expected[name].shape
        assert value.isfinite().all()
        assert torch.equal(value, synthetic_tensor(expected[name], tiny(), seed=3))


def test_values_do_not_depend_on_the_block_they_are_made_in(monkeypatch: pytest.MonkeyPatch):
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = expected_tensors(tiny())[name]
    whole = synthetic_tensor(tensor, tiny())
    monkeypatch.setattr("reference.checkpoint.synthetic.BLOCK", 1000)
    assert torch.equal(synthetic_tensor(tensor, tiny()), whole)


@pytest.mark.parametrize("config", [tiny(), released()], ids=["tiny", "released"])
def test_norm_weights_are_positive_small_and_unequal_within_every_pair(config: NoteConfig):
    means = []
    for tensor in expected_tensors(config).values():
        if tensor.bucket not in ("language", "mtp") or not tensor.name.endswith("norm.weight"):
            continue
        weight = synthetic_tensor(tensor, config).double()
        assert (weight > 0).all()
        means.append(float(weight.mean()))
        pairs = weight[: len(weight) // 2 * 2].view(-1, 2)
        assert ((pairs[:, 0] - pairs[:, 1]).abs() > 0.05 * pairs.amin(1)).all(), tensor.name
    assert 0.0015 < min(means) < 0.01
    assert 0.3 < max(means) < 0.5


def test_only_query_and_key_norms_of_the_vision_tower_sharpen_attention():
    """`post_trunk_norm` ends in `k_norm` too: it has the small mean of the other norms."""
    config = tiny_with_towers()
    for tensor in expected_tensors(config).values():
        if tensor.bucket == "vision" and tensor.name.endswith("norm.weight"):
            is_sharp = tensor.name.split(".")[-2] in ("q_norm", "k_norm")
            assert (float(synthetic_tensor(tensor, config).double().mean()) > 1.0) == is_sharp, tensor.name


def test_router_biases_are_distinct_in_float32_and_not_in_bfloat16():
    tensor = expected_tensors(released())["model.layers.7.mlp.gate.e_score_correction_bias"]
    bias = synthetic_tensor(tensor, released())
    assert bias.dtype == torch.float32
    assert (len(bias.unique()), len(bias.bfloat16().unique())) == (256, 9)


def test_the_two_embedding_tables_differ():
    held = dict(synthetic_tensors(tiny()))
    assert not torch.equal(held["model.embed_tokens.weight"], held["model.mtp.embed_tokens.weight"])


def observed(folder: Path, config: NoteConfig) -> dict[str, Tensor]:
    """Every probe of a prefill of 100 tokens and of a draft step, in float64."""
    model = load_text_model(folder, dtype=torch.float64).requires_grad_(False)
    ids = torch.randint(0, config.text.vocab_size, (100,), generator=torch.Generator().manual_seed(0))
    recorder, cache = Recorder(), model.new_cache()
    with listening(recorder):
        hidden = model.hidden(model.embed(ids), cache)
        model.logits(hidden)
        model.draft_step(0, ids[1:], hidden[:-1], cache)
    return {name: recorder.values(name)[0].double() for name in recorder.names()}


@pytest.mark.parametrize("depth", [6, 46])
def test_every_mechanism_is_alive(tmp_path: Path, depth: int):
    """Standard deviations on the tiny model, and on one of the release's depth."""
    config = tiny()
    kinds = tuple(config.text.layer_types[i] if i < 6 else released().text.layer_types[i] for i in range(depth))
    text = dataclasses.replace(config.text, num_hidden_layers=depth, layer_types=kinds)
    config = dataclasses.replace(config, text=text)
    write_synthetic(tmp_path / "deep", config)
    values = observed(tmp_path / "deep", config)

    def within(low: float, high: float, suffix: str) -> None:
        for name, value in values.items():
            if name.endswith(suffix):
                deviation = float(value[value.isfinite()].std())
                assert low < deviation < high, f"{name}: {deviation}"

    within(0.2, 0.35, "attn.gate")
    within(1.2, 1.8, "router.logits")
    within(0.2, 0.32, "router.scores")
    within(0.3, 1.5, "index.scores")
    within(0.2, 1.0, "attn.core")
    within(0.008, 0.06, "attn.output")
    within(0.008, 0.06, "ffn.output")
    within(2.0, 4.0, "mtp.0.logits")
    within(0.04, 0.07, "embeddings")
    assert 2.0 < float(values["logits"].std()) < 4.0
    stream = [float(values[f"layers.{layer}.output"].std()) for layer in range(depth)]
    assert 0.04 < stream[0] < stream[-1] < 0.5
    # Heavy tails: the largest value of the stream is many deviations away.
    assert float(values[f"layers.{depth - 1}.output"].abs().max()) > 8 * stream[-1]


def test_exact_ties_between_index_scores_are_rare(tmp_path: Path):
    write_synthetic(tmp_path / "tiny", tiny())
    for name, scores_TS in observed(tmp_path / "tiny", tiny()).items():
        if name.endswith("index.scores"):
            rows = [row[row.isfinite()] for row in scores_TS]
            tied = sum(len(row) - len(row.unique()) for row in rows) / sum(len(row) for row in rows)
            assert tied < 0.01
