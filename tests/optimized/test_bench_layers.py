"""The benchmark's rows of single layers: what runs is the layer, its check sees mistakes, its peer is that layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from optimized.bench import peers_layer
from optimized.bench.case import AbsentPeer, Inputs, Sizes
from optimized.bench.cases.layers import layer_cases, used_weights
from optimized.bench.floors import Ceilings, floor_of_all
from optimized.bench.judge import judge, relative_error
from optimized.bench.layer_choices import Choices, GivenOps, NotedOps, choice_triples
from optimized.bench.layer_run import KEPT_ROWS, LayerRun, drawn_layer, layer_alone, mapped
from optimized.bench.peers_layer import LayerInputs, transformers_layer, transformers_layers
from optimized.bench.run import run_case
from optimized.bench.slices import slice_config
from optimized.bench.text_floors import decode_floors, layer_works, prefill_floors
from optimized.device import choose
from optimized.weights import PackedText, unpack_text
from reference.config import TextConfig, released, tiny
from reference.text import TextModel

# T tokens  D model

CEILINGS = Ceilings(copy_tb_s=4.27, read_tb_s=4.62, write_tb_s=3.37, bf16_tflops=790)
# Full + dense, full + experts, sliding + experts; more tokens than a window or a selection has.
LAYERS = (0, 1, 2)
TOKENS = 30
TWIN = choose("cpu", "torch")


def alone(layer: int, dtype: torch.dtype = torch.float32) -> tuple[TextConfig, PackedText]:
    config = layer_alone(tiny().text, layer)
    return config, drawn_layer(config, torch.Generator().manual_seed(layer), dtype)


def drawn(tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, tiny().text.hidden_size, generator=torch.Generator().manual_seed(3)).to(dtype)


def through(run: LayerRun, hidden_TD: Tensor) -> Tensor:
    return run(hidden_TD, run.norm(hidden_TD))


def reference_of(config: TextConfig, weights: PackedText) -> TextModel:
    model = TextModel(config)
    model.load_state_dict(unpack_text(weights))
    return model.requires_grad_(False)


def cached_inputs(config: TextConfig, cache: object, hidden_TD: Tensor) -> LayerInputs:
    """One request's next tokens behind what the reference has cached."""
    seen = cache.length  # type: ignore[attr-defined]
    held = torch.arange(0 if config.is_full(0) else max(0, seen + 1 - config.sliding_window_size), seen)
    rows = cache.rows(held)  # type: ignore[attr-defined]
    latents = torch.cat((rows["kv_latent"], rows["k_rope"]), dim=-1)[None]
    return LayerInputs(hidden_TD[None], seen, latents, rows["index_key"][None] if config.is_full(0) else None)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_peer_is_the_references_layer(layer: int, attention: str) -> None:
    """Over a prompt, and one and several tokens behind it, in float32."""
    pytest.importorskip("transformers.models.dots3_note", reason="the peer needs transformers 5.24")
    config, weights = alone(layer)
    model = reference_of(config, weights)
    cache = model.new_cache().layers[0]
    hidden_TD = drawn(TOKENS + 3)
    prompt_TD, next_TD = hidden_TD[:TOKENS], hidden_TD[TOKENS:]
    asked = [LayerInputs(prompt_TD[None], 0, None, None)]
    expected = [model.model.layers[0](prompt_TD, cache)]
    for piece_TD in next_TD.split((1, 2)):
        asked.append(cached_inputs(config, cache, piece_TD))
        expected.append(model.model.layers[0](piece_TD, cache))
    for inputs, expected_TD in zip(asked, expected, strict=True):
        run = transformers_layer(config, weights, inputs, attention, "eager")
        for _ in range(2):
            assert relative_error(run()[0], expected_TD) < 2e-6


@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_timed_is_the_references_layer_and_can_run_again(layer: int) -> None:
    config, weights = alone(layer)
    model = reference_of(config, weights)
    cache, hidden_TD = model.new_cache().layers[0], drawn(TOKENS)
    run = LayerRun(config, weights, TWIN, [0], TOKENS, page_size=4)
    out_TD = through(run, hidden_TD)
    assert relative_error(out_TD, model.model.layers[0](hidden_TD, cache)) < 2e-6
    assert torch.equal(through(run, hidden_TD), out_TD)


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_of_a_prompt_are_decode_steps_on_what_was_cached_before_them(layer: int) -> None:
    config, weights = alone(layer, torch.float64)
    hidden_TD = drawn(TOKENS, torch.float64)
    run = LayerRun(config, weights, TWIN, [0], TOKENS, page_size=4)
    out_TD = through(run, hidden_TD)
    rows = [0, 5, 17, TOKENS - 1] if config.is_full(0) else list(range(TOKENS - KEPT_ROWS - 1, TOKENS))
    few_TD = through(run.of_rows(rows, weights, TWIN), hidden_TD[rows])
    assert relative_error(few_TD, out_TD[rows]) < 1e-12


def test_choices_are_noted_given_and_judged_by_themselves() -> None:
    config, weights = alone(1)
    hidden_TD = drawn(4)
    run = LayerRun(config, weights, TWIN, [20, 20, 25, 9], page_size=4)
    run.fill(torch.Generator().manual_seed(1))
    noted = NotedOps(TWIN)
    out_TD = through(run.again_with(noted), hidden_TD)
    choices = noted.noted
    assert choices.experts_TK is not None
    assert choices.keys_TK is not None
    assert choices.experts_TK.shape == (4, config.num_experts_per_tok)
    assert choices.keys_TK.shape == (4, config.index_topk)

    def again(given: Choices, dtype: torch.dtype = torch.float32) -> tuple[Tensor, GivenOps]:
        ops = GivenOps(TWIN, given)
        wide = mapped(used_weights(weights, given), lambda tensor: tensor.to(dtype))
        return through(run.of_rows([0, 1, 2, 3], wide, ops), hidden_TD.to(dtype)), ops

    same_TD, eager = again(choices)
    _, truth = again(choices, torch.float64)
    assert relative_error(same_TD, out_TD) < 1e-6
    assert judge(choice_triples(choices, eager, truth, torch.float32)).is_green
    worst_TK = truth.scores[1].argsort(-1)[:, : config.num_experts_per_tok]
    first_TK = torch.arange(config.index_topk).expand(4, -1)
    for others in (replace(choices, experts_TK=worst_TK), replace(choices, keys_TK=first_TK)):
        assert not judge(choice_triples(others, eager, truth, torch.float32)).is_green


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_computes_something_else_is_red(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is given an input that is a fifth too large; its twins make their own."""
    plain, calls = LayerRun.norm, []

    def norm(run: LayerRun, hidden_TD: Tensor) -> Tensor:
        calls.append(run)
        return plain(run, hidden_TD) * (1.2 if len(calls) == 1 else 1.0)

    monkeypatch.setattr(LayerRun, "norm", norm)
    cases = [*layer_cases(tiny().text, Sizes(batches=(3,), contexts=(20,), prompts=(30,), page_size=4))]
    given = Inputs(tiny().text, torch.device("cpu"), backend="torch")
    row = run_case(cases[2 * layer], given, CEILINGS, lambda call, timing: 1.0)
    assert row.is_red
    assert len(calls) == 3


def test_a_peer_that_is_not_installed_or_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = alone(0)
    inputs = LayerInputs(drawn(3)[None], 0, None, None)

    def broken(*_: object) -> None:
        raise ValueError("no such layer")

    monkeypatch.setattr(peers_layer, "transformers_layer", broken)
    with monkeypatch.context() as missing:
        missing.setattr(peers_layer, "find_spec", lambda name: None)
        found = transformers_layers(config, weights, inputs, lambda out_TD: out_TD)
        assert {peer.why for peer in found if isinstance(peer, AbsentPeer)} == {"not installed, or without dots3_note"}
    monkeypatch.setattr(peers_layer, "find_spec", lambda name: object())
    found = transformers_layers(config, weights, inputs, lambda out_TD: out_TD)
    assert [peer.why for peer in found if isinstance(peer, AbsentPeer)] == ["needs CUDA", "ValueError: no such layer"]


def test_there_is_a_row_of_each_kind_of_layer() -> None:
    cases = list(layer_cases(released().text, Sizes()))
    kinds = ("layer.full.dense", "layer.full.experts", "layer.sliding.experts")
    wanted = [(kind, tokens) for kind in kinds for tokens in (1, 16, 64, 256, 4096)]
    assert [(case.op, case.tokens) for case in cases] == wanted
    assert {case.timing for case in cases if case.tokens == 4096} == {"events"}


@pytest.mark.parametrize(("batch", "context"), [(1, 4096), (64, 300), (0, 4096), (0, 16384)])
def test_floors_of_the_layers_add_up_to_the_slices(batch: int, context: int) -> None:
    text = slice_config(released()).text
    layers = range(text.num_hidden_layers)
    found = sum(floor_of_all(layer_works(text, layer, batch, context), CEILINGS).us for layer in layers)
    floors = decode_floors(text, batch, context, CEILINGS) if batch else prefill_floors(text, context, CEILINGS)
    assert found == pytest.approx(floors.slice, rel=1e-9)
