"""The oracle loads a released-layout folder completely, its paths agree with each other, and observing is harmless."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from parity.runners import NotSupportedHere, RunnerUnavailable
from parity.runners import transformers as oracle
from parity.runners.transformers import INDEX_FILE, TransformersRunner
from parity.runners.transformers_probes import NOT_EXPOSED
from reference.config import MlaGeometry, NoteConfig, tiny
from reference.errors import CacheError, CheckpointError, TokenIdError
from reference.probe import Override, Recorder, concatenated, listening
from reference.session import StepItem

transformers = pytest.importorskip("transformers", reason="the oracle needs transformers 5.24")

# Longer than window (7) and top-k (13) of the tiny model, so that both cut.
TOKENS = tuple(37 * i % 193 for i in range(30))
# Paths of the same model in float64 differ by the order of sums only.
EXACT_TOLERANCE = 1e-10


def expected_shapes(config: NoteConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the language tensors, as the checkpoint specification lists them in section 3."""
    text = config.text
    D = text.hidden_size
    shapes = dict.fromkeys(("model.embed_tokens", "model.mtp.embed_tokens", "lm_head"), (text.vocab_size, D))
    shapes["model.norm"] = (D,)
    draft = text.num_hidden_layers
    for layer in range(draft + 1):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + "input_layernorm": (D,), prefix + "post_attention_layernorm": (D,)}
        shapes |= attention_shapes(prefix + "self_attn.", D, text.geometry(layer))
        if text.is_full(layer):
            index_rows = text.index_n_heads * text.index_head_dim
            shapes |= {
                prefix + "self_attn.indexer.wq_b": (index_rows, text.full.q_lora_rank),
                prefix + "self_attn.indexer.wk": (text.index_head_dim, D),
                prefix + "self_attn.indexer.weights_proj": (text.index_n_heads, D),
                prefix + "self_attn.indexer.k_norm": (text.index_head_dim,),
            }
        if text.is_moe(layer):
            shapes[prefix + "mlp.gate"] = (text.n_routed_experts, D)
            for expert in range(text.n_routed_experts):
                shapes |= mlp_shapes(f"{prefix}mlp.experts.{expert}.", D, text.moe_intermediate_size)
            shapes |= mlp_shapes(prefix + "mlp.shared_experts.", D, text.shared_intermediate_size)
        else:
            shapes |= mlp_shapes(prefix + "mlp.", D, text.intermediate_size)
    prefix = f"model.layers.{draft}."
    shapes |= {prefix + "eh_proj": (D, 2 * D), prefix + "enorm": (D,), prefix + "hnorm": (D,)}
    shapes[prefix + "shared_head.norm"] = (D,)
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    for layer in range(draft):
        prefix = f"model.layers.{layer}."
        if text.is_full(layer):
            shapes[prefix + "self_attn.indexer.k_norm.bias"] = (text.index_head_dim,)
        if text.is_moe(layer):
            shapes[prefix + "mlp.gate.e_score_correction_bias"] = (text.n_routed_experts,)
    return shapes


def attention_shapes(prefix: str, D: int, geometry: MlaGeometry) -> dict[str, tuple[int, ...]]:
    H, Q, C = geometry.num_attention_heads, geometry.q_lora_rank, geometry.kv_lora_rank
    shapes = {
        "q_a_proj": (Q, D),
        "q_a_layernorm": (Q,),
        "q_b_proj": (H * geometry.qk_head_dim, Q),
        "kv_a_proj_with_mqa": (geometry.latent_row, D),
        "kv_a_layernorm": (C,),
        "k_rope_only_layernorm": (geometry.qk_rope_head_dim,),
        "kv_b_proj": (H * (geometry.qk_nope_head_dim + geometry.v_head_dim), C),
        "o_proj": (D, geometry.value_width),
        "g_proj": (geometry.gate_width, D),
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def mlp_shapes(prefix: str, D: int, width: int) -> dict[str, tuple[int, ...]]:
    return {prefix + "gate_proj": (width, D), prefix + "up_proj": (width, D), prefix + "down_proj": (D, width)}


def write_folder(folder: Path, config: NoteConfig) -> dict[str, torch.Tensor]:
    """A checkpoint of seeded random weights in two shards; neighbouring names lie in different shards."""
    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = rng.standard_normal(shape)
        values = values * shape[-1] ** -0.5 if len(shape) == 2 else 0.3 + 0.1 * values
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        tensors[name] = torch.from_numpy(values).to(dtype)
    write_tensors(folder, config, tensors)
    return tensors


def write_tensors(folder: Path, config: NoteConfig, tensors: dict[str, torch.Tensor], layout: str = "leading") -> None:
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for shard in range(2):
        names = list(tensors)[shard::2]
        file = f"model-0000{shard + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 0, "indexer_rope_layout": layout}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config.to_json()))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    write_folder(path, tiny())
    return path


@pytest.fixture(scope="module")
def tensors(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def exact_runner(folder):
    return TransformersRunner(folder, torch.bfloat16, exact=True)


@pytest.fixture(scope="module")
def bfloat16_runner(folder):
    return TransformersRunner(folder, torch.bfloat16)


def run(runner: TransformersRunner, request: str, chunks: list[tuple[int, ...]], kind="prefill") -> torch.Tensor:
    """Logits of all chunks, and the request is gone again."""
    logits = torch.cat([runner.step([StepItem(request, chunk, kind)])[request] for chunk in chunks])
    runner.free(request)
    return logits


def split(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    ends = np.cumsum(lengths)
    return [TOKENS[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def assert_loaded(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Every parameter and persistent buffer holds the checkpoint's values, whatever dtype keeps them."""
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            halves = [
                [tensors[f"{stem}{e}.{half}.weight"] for e in range(len(value))] for half in ("gate_proj", "up_proj")
            ]
            expected = torch.cat([torch.stack(half) for half in halves], dim=1)
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            expected = torch.stack([tensors[f"{stem}{e}.down_proj.weight"] for e in range(len(value))])
        else:
            expected = tensors[name]
        assert torch.equal(value, expected.to(value.dtype)), name


def test_every_weight_is_loaded(bfloat16_runner, exact_runner, tensors):
    for runner in (bfloat16_runner, exact_runner):
        assert_loaded(runner.model, tensors)
        draft = tiny().text.num_hidden_layers
        assert set(runner.dropped) == {n for n in tensors if n.startswith((f"model.layers.{draft}.", "model.mtp."))}
        assert len(runner.dropped) == 19
    wide = [name for name, value in bfloat16_runner.model.state_dict().items() if value.dtype == torch.float32]
    assert len(wide) == 2 * 5, "router weight and bias of each expert layer, and nothing else"


def test_exact_mode_builds_tables_and_weights_in_float64(exact_runner):
    values = [*exact_runner.model.parameters(), *exact_runner.model.buffers()]
    assert {value.dtype for value in values} == {torch.float64}
    rotary = exact_runner.model.model.rotary_emb
    for table, geometry in (
        (rotary.indexed_attention_inv_freq, tiny().text.full),
        (rotary.sliding_attention_inv_freq, tiny().text.sliding),
    ):
        R = geometry.qk_rope_head_dim
        np.testing.assert_allclose(table.numpy(), geometry.rope_theta ** -(np.arange(0, R, 2) / R), rtol=1e-15)


@pytest.mark.parametrize("lengths", [(1,) * 30, (8, 22), (6, 24), (7, 1, 22), (14, 1, 15), (29, 1)])
def test_prefill_decode_and_chunks_agree_exactly(exact_runner, lengths):
    whole = run(exact_runner, "whole", [TOKENS])
    pieces = run(exact_runner, "pieces", split(lengths))
    torch.testing.assert_close(pieces, whole, rtol=0, atol=EXACT_TOLERANCE)
    assert whole.dtype == exact_runner.dtype == torch.float64
    assert exact_runner.lower_precision_ops == []


def test_truncate_fork_and_free(exact_runner):
    whole = run(exact_runner, "whole", [TOKENS])
    exact_runner.step([StepItem("a", TOKENS, "prefill")])
    exact_runner.truncate("a", 20)
    exact_runner.fork("a", "b")
    exact_runner.truncate("a", 12)  # twice, and further back than one window
    items = [StepItem("a", TOKENS[12:], "verify"), StepItem("b", TOKENS[20:], "verify")]
    logits = exact_runner.step(items)
    for request, length in (("a", 12), ("b", 20)):
        torch.testing.assert_close(logits[request], whole[length:], rtol=0, atol=EXACT_TOLERANCE)
    exact_runner.truncate("a", 0)
    torch.testing.assert_close(run(exact_runner, "a", [TOKENS]), whole, rtol=0, atol=EXACT_TOLERANCE)
    exact_runner.free("b")
    for action in (lambda: exact_runner.free("b"), lambda: exact_runner.truncate("b", 0)):
        with pytest.raises(CacheError, match="'b'"):
            action()


def test_wrong_steps_are_refused_before_anything_runs(exact_runner):
    with pytest.raises(TokenIdError, match="193"):
        exact_runner.step([StepItem("a", (1,), "prefill"), StepItem("b", (193,), "prefill")])
    for items in ([StepItem("a", (), "prefill")], [StepItem("a", (1,), "decode")] * 2):
        with pytest.raises(CacheError, match="'a'"):
            exact_runner.step(items)
    with pytest.raises(CacheError, match="no request 'a'"):
        exact_runner.free("a")


def test_observation_and_caching_leave_the_bits_alone(bfloat16_runner, folder):
    """Against a plain model with a plain cache: the same bytes, watched or not."""
    values = json.loads((folder / "config.json").read_text())
    del values["model_type"], values["rope_scaling"]
    plain = transformers.Dots3NoteForCausalLM.from_pretrained(
        folder,
        config=transformers.Dots3NoteTextConfig(**values),
        dtype=torch.bfloat16,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    chunks = split((15, 1, 1, 13))
    cache = transformers.DynamicCache(config=plain.config)
    with torch.no_grad():
        expected = torch.cat([plain(torch.tensor([c]), cache=cache, use_cache=True).logits[0] for c in chunks])
    unwatched = run(bfloat16_runner, "a", chunks)
    with listening(recorder := Recorder()):
        watched = run(bfloat16_runner, "a", chunks)
    assert torch.equal(unwatched, expected)
    assert torch.equal(watched, expected)
    assert recorder.observations
    assert "forward" not in vars(bfloat16_runner.model.model.layers[0].self_attn), "patches are taken away"


def probe_shapes(T: int, S: int) -> dict[str, tuple[int, ...]]:
    text = tiny().text
    D, E, K = text.hidden_size, text.n_routed_experts, text.num_experts_per_tok
    shapes = {"embeddings": (T, D), "final_norm": (T, D), "logits": (T, text.vocab_size)}
    for layer in range(text.num_hidden_layers):
        g = text.geometry(layer)
        H, R = g.num_attention_heads, g.qk_rope_head_dim
        of_layer = {
            "attn.q_latent": (T, g.q_lora_rank),
            "attn.kv_latent": (T, g.kv_lora_rank),
            "attn.k_rope_unrotated": (T, R),
            "attn.k_rope": (T, R),
            "attn.q_nope": (T, H, g.qk_nope_head_dim),
            "attn.q_rope": (T, H, R),
            "attn.core": (T, H, g.v_head_dim),
            "attn.gate": (T, H),
        }
        of_layer |= dict.fromkeys(("input", "attn.input", "attn.output", "ffn.input", "ffn.output", "output"), (T, D))
        if text.is_full(layer):
            of_layer |= {
                "attn.index.query": (T, text.index_n_heads, text.index_head_dim),
                "attn.index.key": (T, text.index_head_dim),
                "attn.index.head_weights": (T, text.index_n_heads),
                "attn.index.scores": (T, S),
                "attn.index.selected": (T, min(S, text.index_topk)),
            }
        if text.is_moe(layer):
            of_layer |= dict.fromkeys(("ffn.router.logits", "ffn.router.scores", "ffn.router.choice"), (T, E))
            of_layer |= {"ffn.router.expert_ids": (T, K), "ffn.router.weights": (T, K)}
            of_layer |= {"ffn.routed": (T, D), "ffn.shared": (T, D)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def test_probes_have_canonical_names_and_shapes(exact_runner):
    for chunks, T, S in ((split((30,)), 30, 30), (split((20, 10)), 10, 30), (split((9, 1)), 1, 10)):
        with listening(recorder := Recorder()):
            run(exact_runner, "a", chunks)
        last = {o.name: o for o in recorder.observations}
        assert {name: tuple(o.value.shape) for name, o in last.items()} == probe_shapes(T, S)
        assert all(o.rows.positions.tolist() == list(range(S - T, S)) for o in last.values())
        assert all(o.rows.request == "a" and o.rows.kind == "prefill" for o in last.values())
    assert not [name for name in last if name.startswith(tuple(glob.removesuffix("*") for glob in NOT_EXPOSED))]


def test_probes_of_chunks_join_to_those_of_one_prefill(exact_runner):
    recorded = []
    for chunks in ([TOKENS], split((9, 1, 20))):
        # Rows of scores and selections grow with the keys, so they do not join.
        with listening(recorder := Recorder(["embeddings", "layers.*", "final_norm"])):
            run(exact_runner, "a", chunks)
        grow = (".index.scores", ".index.selected")
        recorded.append(concatenated(o for o in recorder.observations if not o.name.endswith(grow)))
    whole, joined = recorded
    for name, value in whole.items():
        torch.testing.assert_close(joined[name], value, rtol=0, atol=EXACT_TOLERANCE, msg=name)


def test_probes_are_consistent_with_each_other(exact_runner, tensors):
    """The layouts: rotation in place, selections causal, ascending and best, experts by descending choice."""
    with listening(recorder := Recorder()):
        run(exact_runner, "a", [TOKENS])
    seen = concatenated(recorder.observations)
    for layer, geometry in ((1, tiny().text.full), (2, tiny().text.sliding)):
        R = geometry.qk_rope_head_dim
        angles = np.outer(np.arange(30), geometry.rope_theta ** -(np.arange(0, R, 2) / R))
        pairs = seen[f"layers.{layer}.attn.k_rope_unrotated"].unflatten(-1, (-1, 2)).numpy()
        rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
        expected = torch.from_numpy(np.stack((rotated.real, rotated.imag), -1)).flatten(-2)
        torch.testing.assert_close(seen[f"layers.{layer}.attn.k_rope"], expected, rtol=0, atol=1e-12)
    scores, selected = seen["layers.1.attn.index.scores"], seen["layers.1.attn.index.selected"]
    for position, (row, chosen) in enumerate(zip(scores, selected, strict=True)):
        keys = chosen[chosen >= 0]
        assert len(keys) == min(position + 1, 13)
        assert keys.tolist() == sorted(set(keys.tolist()))
        assert chosen[len(keys) :].eq(-1).all()
        assert row[: position + 1].isfinite().all()
        assert row[position + 1 :].isneginf().all()
        assert row[keys].min() >= row[: position + 1].topk(len(keys)).values[-1]
    choice, ids = seen["layers.1.ffn.router.choice"], seen["layers.1.ffn.router.expert_ids"]
    assert torch.equal(ids, choice.topk(3).indices)
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"].double()
    chosen = seen["layers.1.ffn.router.scores"].gather(-1, ids)
    torch.testing.assert_close(choice - seen["layers.1.ffn.router.scores"], bias.expand_as(choice))
    torch.testing.assert_close(seen["layers.1.ffn.router.weights"], chosen / chosen.sum(-1, keepdim=True))
    torch.testing.assert_close(seen["layers.1.ffn.routed"] + seen["layers.1.ffn.shared"], seen["layers.1.ffn.output"])


def test_a_listener_cannot_replace_a_value(folder):
    runner = TransformersRunner(folder, torch.float32)
    with (
        listening(Override("layers.2.ffn.routed", lambda value, rows: value * 0)),
        pytest.raises(NotSupportedHere, match=r"layers\.2\.ffn\.routed"),
    ):
        runner.step([StepItem("a", TOKENS, "prefill")])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"apply_mla_qkv_lora_rescale": False}, "always rescales"),
        ({"indexer_rope_interleave": False}, "neighbouring"),
        ({"full": dataclasses.replace(tiny().text.full, gate_type="elementwise")}, "elementwise"),
        ({"n_routed_experts": 1, "num_experts_per_tok": 1}, "at least two experts"),
    ],
)
def test_models_that_it_would_run_wrongly_are_refused(tmp_path, changes, message):
    config = dataclasses.replace(tiny(), text=dataclasses.replace(tiny().text, **changes))
    write_tensors(tmp_path, config, {})
    with pytest.raises(NotSupportedHere, match=message):
        TransformersRunner(tmp_path, torch.float32)


def test_tail_layout_is_refused(tmp_path):
    write_tensors(tmp_path, tiny(), {}, layout="tail")
    with pytest.raises(NotSupportedHere, match="'tail'"):
        TransformersRunner(tmp_path, torch.float32)


def test_rotated_width_survives_float_division(tmp_path):
    """49 · (2/49) is below 2 in float64, and transformers truncates."""
    text = tiny().text
    full = dataclasses.replace(text.full, qk_rope_head_dim=2)
    sliding = dataclasses.replace(text.sliding, qk_nope_head_dim=33, qk_rope_head_dim=16)
    assert sliding.qk_head_dim == 49
    config = dataclasses.replace(tiny(), text=dataclasses.replace(text, full=full, sliding=sliding))
    write_folder(tmp_path, config)
    runner = TransformersRunner(tmp_path, torch.bfloat16, exact=True)
    rotary = runner.model.model.rotary_emb
    np.testing.assert_allclose(rotary.sliding_attention_inv_freq, 200.0 ** -(np.arange(0, 16, 2) / 16), rtol=1e-15)
    np.testing.assert_allclose(rotary.indexed_attention_inv_freq, [1.0])


@pytest.mark.parametrize("window", [1, 2])
def test_smallest_windows_keep_chunks_equal(tmp_path, window):
    config = dataclasses.replace(tiny(), text=dataclasses.replace(tiny().text, sliding_window_size=window))
    write_folder(tmp_path, config)
    runner = TransformersRunner(tmp_path, torch.bfloat16, exact=True)
    whole, pieces = run(runner, "a", [TOKENS]), run(runner, "a", split((3, 1, 1, 25)))
    torch.testing.assert_close(pieces, whole, rtol=0, atol=EXACT_TOLERANCE)


GATE = "model.layers.2.self_attn.g_proj.weight"
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(GATE), f"missing {GATE}"),
        (lambda t: t.pop(EXPERT), "cannot load it"),
        (lambda t: t.update({GATE: t[GATE][1:].clone()}), "g_proj"),
        (lambda t: t.update({"model.layers.2.self_attn.g.weight": t[GATE].clone()}), "unexpected .*self_attn.g.weight"),
        (lambda t: t.update({"model.layers.46.enorm.weight": t[GATE].clone()}), "unexpected .*46.enorm.weight"),
    ],
    ids=["missing", "missing expert", "shape", "unexpected", "hidden by its ignore pattern"],
)
def test_incomplete_checkpoints_are_refused(tmp_path, tensors, edit, message):
    edited = dict(tensors)
    edit(edited)
    write_tensors(tmp_path, tiny(), edited)
    with pytest.raises(CheckpointError, match=message):
        TransformersRunner(tmp_path, torch.float32)


def test_unreadable_index_is_refused(tmp_path, folder):
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        TransformersRunner(tmp_path, torch.float32)
    (tmp_path / INDEX_FILE).write_text("[]")
    with pytest.raises(CheckpointError, match="'metadata'"):
        TransformersRunner(tmp_path, torch.float32)


@pytest.mark.parametrize("version", ["5.25.0", None])
def test_another_or_no_transformers_is_refused(monkeypatch, folder, version):
    def installed(name: str) -> str:
        if version is None:
            raise oracle.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(oracle.metadata, "version", installed)
    with pytest.raises(RunnerUnavailable, match="note-parity\\[oracle\\]"):
        TransformersRunner(folder, torch.float32)
