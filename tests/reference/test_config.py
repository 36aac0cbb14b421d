"""The configuration: what is read, what is refused by name, and the facts of the released and the tiny model."""

import contextlib
import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import note_configs, text_configs

from reference.config import MlaGeometry, NoteConfig, TextConfig, released, slice_of, tiny
from reference.errors import ConfigError, NoteError

# Text specification, section 2.1: present in the released JSON, and wrong when defaulted.
MANDATORY = [
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "layer_types",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "norm_topk_prob",
    "scoring_func",
    "topk_method",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "apply_mla_qkv_lora_rescale",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_theta",
    "attention_gate_type",
    "swa_num_attention_heads",
    "swa_q_lora_rank",
    "swa_kv_lora_rank",
    "swa_qk_nope_head_dim",
    "swa_qk_rope_head_dim",
    "swa_v_head_dim",
    "swa_rope_theta",
    "sliding_window_size",
    "swa_attention_gate_type",
]
# The only keys that may be absent, with NOTE's own values.
DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "indexer_rope_interleave": True,
    "num_nextn_predict_layers": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
}


def without(values: dict, *keys: str) -> dict:
    return {key: value for key, value in values.items() if key not in keys}


def wrong_type(value: object) -> object:
    """A value of another JSON type that a lenient reader would take: "5" for 5, 1 for true."""
    if isinstance(value, bool):
        return int(value)
    return str(value) if isinstance(value, int | float) else 1


def test_c04_all_36_mandatory_keys_are_known():
    assert len(MANDATORY) == 36
    assert set(MANDATORY) <= set(released().to_json())


@pytest.mark.parametrize("key", MANDATORY)
def test_c04_an_absent_mandatory_key_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"required key '{key}' is absent"):
        NoteConfig.from_json(without(released().to_json(), key))


@pytest.mark.parametrize("key", [*MANDATORY, *DEFAULTS])
def test_c04_a_wrong_json_type_is_refused_by_name(key):
    values = {**released().to_json(), **DEFAULTS}
    with pytest.raises(ConfigError, match=f"'{key}' must be .*, found"):
        NoteConfig.from_json(values | {key: wrong_type(values[key])})


@pytest.mark.parametrize("key", MANDATORY)
def test_c04_null_is_not_absent(key):
    with pytest.raises(ConfigError, match=f"'{key}' must be .*, found None"):
        NoteConfig.from_json(released().to_json() | {key: None})


@pytest.mark.parametrize("key", DEFAULTS)
def test_c04_the_keys_that_may_be_absent_take_the_models_own_values(key):
    """Never a relative's: 8 groups of which 4, half-split index pairs, no draft layer, a routed scale of 2.5."""
    assert NoteConfig.from_json(without(released().to_json(), key)) == released()
    if hasattr(released().text, key):
        assert getattr(NoteConfig.from_json(without(released().to_json(), *DEFAULTS)).text, key) == DEFAULTS[key]


@pytest.mark.parametrize("wrapper", ["text_config", "llm_config", "thinker_config"])
def test_c04_a_wrapped_config_is_refused(wrapper):
    values = released().to_json()
    for wrapped in ({wrapper: values}, values | {wrapper: {}}):
        with pytest.raises(ConfigError, match=wrapper):
            NoteConfig.from_json(wrapped)


@pytest.mark.parametrize(
    ("key", "value", "exists"),
    [
        ("hidden_act", "gelu", "'silu'"),
        ("normalization", "LayerNorm", "'RMSNorm'"),
        ("final_norm", "LayerNorm", "'RMSNorm'"),
        ("scoring_func", "softmax", "'sigmoid'"),
        ("topk_method", "greedy", "'noaux_tc'"),
        ("attention_gate_type", "none", "'headwise' or 'elementwise'"),
        ("swa_attention_gate_type", "none", "'headwise' or 'elementwise'"),
        ("softmax_type", "off-by-one", "'vanilla'"),
        ("rope_scaling", {"type": "yarn", "factor": 4}, "None or {'rope_type': 'default'}"),
        ("k_rope_only_layernorm", False, "True or None"),
        ("moe_gating_fp32", True, "False"),
        ("use_dsa", False, "True"),
        ("use_sliding_window", False, "True"),
        ("use_dynamic_rsf", True, "False"),
        ("attention_bias", True, "False"),
        ("tie_word_embeddings", True, "False"),
        ("moe_layer_freq", 2, "1"),
        ("moe_router_dtype", "float32", "None"),
        ("quantization_config", {"quant_method": "fp8"}, "None"),
        ("model_type", "deepseek_v3", "'dots3_note'"),
        ("architectures", ["DeepseekV3ForCausalLM"], "Dots3NoteForCausalLM"),
    ],
)
def test_c05_what_the_model_never_had_is_refused_with_what_exists(key, value, exists):
    with pytest.raises(ConfigError) as caught:
        NoteConfig.from_json(released().to_json() | {key: value})
    message = str(caught.value)
    assert repr(key) in message
    assert exists in message
    assert repr(value) in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads.*must equal"),
        ({"swa_num_key_value_heads": 8}, "swa_num_key_value_heads.*must equal"),
        ({"layer_types": ["full_attention"]}, "'layer_types' must have num_hidden_layers = 46 entries, found 1"),
        ({"layer_types": ["chunked_attention"] * 46}, r"'layer_types'\[0\] must be .*, found 'chunked_attention'"),
        ({"qk_rope_head_dim": 63}, "'qk_rope_head_dim' must be even"),
        ({"swa_qk_rope_head_dim": 63}, "'swa_qk_rope_head_dim' must be even"),
        ({"index_head_dim": 32}, "'index_head_dim' must be at least qk_rope_head_dim 64, found 32"),
        ({"head_dim": 192}, "'head_dim' must be .* = 256"),
        ({"swa_head_dim": 192}, "'swa_head_dim' must be .* = 256"),
        ({"moe_shared_expert_intermediate_size": 3072}, "must equal moe_intermediate_size 1536"),
        ({"n_group": 3}, "n_group 3 must divide n_routed_experts 256"),
        ({"n_group": 2, "topk_group": 3}, "topk_group 3 must be at most n_group"),
        ({"n_group": 256, "topk_group": 8}, "each group needs two"),
        ({"n_routed_experts": 4}, "'num_experts_per_tok' 8 exceeds the 4 experts"),
        ({"n_group": 64, "topk_group": 1}, "'num_experts_per_tok' 8 exceeds the 4 experts"),
        ({"hidden_size": 0}, "'hidden_size' must be an integer of at least 1, found 0"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a positive number, found nan"),
        ({"rope_theta": -1.0}, "'rope_theta' must be a positive number, found -1.0"),
        ({"hidden_size": 4096}, "vision_config: the adapter's output width must equal hidden_size 4096, found 5120"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        NoteConfig.from_json(released().to_json() | changes)


@pytest.mark.parametrize("alias", ["indexed_attention", "deepseek_sparse_attention"])
def test_full_layers_have_other_names_in_converted_configs(alias):
    values = released().to_json()
    values["layer_types"] = [kind.replace("full_attention", alias) for kind in values["layer_types"]]
    assert NoteConfig.from_json(values) == released()


@pytest.mark.parametrize("plain", [None, {"rope_type": "default"}, {"type": "default"}])
def test_plain_rope_may_be_written_as_a_dictionary(plain):
    assert NoteConfig.from_json(released().to_json() | {"rope_scaling": plain}) == released()


def test_a_null_rope_key_norm_means_that_there_is_one():
    assert NoteConfig.from_json(released().to_json() | {"k_rope_only_layernorm": None}) == released()


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "config.json"
    for content, message in ((None, "cannot be read"), ("{", "not valid JSON"), ("[]", "must hold a JSON object")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
            NoteConfig.from_json(path)


def test_a_file_is_read_like_its_object(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(released().to_json()))
    assert NoteConfig.from_json(path) == NoteConfig.from_json(str(path)) == released()


json_values = st.one_of(st.none(), st.booleans(), st.integers(-1, 3), st.floats(), st.text(max_size=3), st.just([]))


def refusal(values: dict) -> str | None:
    try:
        NoteConfig.from_json(values)
    except NoteError as error:
        return str(error)
    return None


@given(key=st.sampled_from(sorted(tiny().to_json())), value=json_values)
def test_any_value_is_read_or_refused_by_name(key, value):
    """No value of any key ends in anything but a config or a named error."""
    message = refusal(tiny().to_json() | {key: value})
    assert message is None or message.startswith("config: ")


@given(config=note_configs())
def test_json_round_trips(config):
    text = json.dumps(config.to_json())
    assert NoteConfig.from_json(json.loads(text)) == config


@pytest.mark.parametrize("config", [released(), tiny()], ids=["released", "tiny"])
def test_named_configs_round_trip(config):
    assert NoteConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_entries_without_a_meaning_are_kept():
    config = NoteConfig.from_json(released().to_json() | {"transformers_version": "5.24.0"})
    assert config.unused == {"transformers_version": "5.24.0"}
    assert config.to_json()["transformers_version"] == "5.24.0"


@given(config=text_configs())
def test_drawn_configs_are_accepted_by_transformers(config):
    """Its config class, not only ours: the strategy draws nothing that the oracle refuses or reads otherwise."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Dots3NoteTextConfig(**dataclasses.replace(tiny(), text=config).to_json())
    assert theirs.sliding_window == config.sliding_window_size
    assert [kind == "sliding_attention" for kind in theirs.layer_types] == [
        kind == "sliding_attention" for kind in config.layer_types
    ]
    for kind, geometry in (("indexed_attention", config.full), ("sliding_attention", config.sliding)):
        if kind in theirs.layer_types:
            sizes = theirs.per_layer_config[kind]
            factor = theirs.rope_parameters[kind]["partial_rotary_factor"]
            assert int(sizes.head_dim * factor) == geometry.qk_rope_head_dim
            assert (sizes.kv_lora_rank, sizes.v_head_dim) == (geometry.kv_lora_rank, geometry.v_head_dim)


def test_released_schedule():
    text = released().text
    full = [layer for layer in range(46) if text.is_full(layer)]
    assert full == [0, 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45]
    assert [layer for layer in range(46) if not text.is_moe(layer)] == [0]
    assert (text.is_full(46), text.is_moe(46)) == (False, False)
    assert text.geometry(46) == text.sliding


def test_released_geometries():
    text = released().text
    full, sliding = text.full, text.sliding
    assert (full.qk_head_dim, sliding.qk_head_dim) == (192, 256)
    assert (full.softmax_scale, sliding.softmax_scale) == (0.07216878364870322, 0.0625)
    assert (full.latent_row, sliding.latent_row) == (576, 1088)
    assert (full.value_width, sliding.value_width) == (16384, 8192)
    assert (full.gate_width, sliding.gate_width) == (128, 64)
    assert [math.sqrt(text.hidden_size / rank) for rank in (full.q_lora_rank, full.kv_lora_rank)] == [
        math.sqrt(5),
        math.sqrt(10),
    ]
    assert [math.sqrt(text.hidden_size / rank) for rank in (sliding.q_lora_rank, sliding.kv_lora_rank)] == [
        math.sqrt(5),
        math.sqrt(5),
    ]


def test_released_parameters():
    """Checkpoint specification, section 2: 279.55 B in the backbone, 1.13 B in the draft layer with its embedding."""
    text = released().text
    D, W = text.hidden_size, text.vocab_size
    layers = sum(_layer_parameters(text, layer) for layer in range(46))
    assert layers + 2 * W * D + D == 279_551_718_016
    draft = _layer_parameters(text, 46) + 2 * D * D + 3 * D
    assert draft + W * D == 1_134_193_728


def _layer_parameters(text: TextConfig, layer: int) -> int:
    """Without the router's correction bias, which is counted apart."""
    D = text.hidden_size
    swiglu = 3 * D * text.moe_intermediate_size
    experts = text.n_routed_experts * (swiglu + D) + text.n_shared_experts * swiglu
    feed_forward = experts if text.is_moe(layer) else 3 * D * text.intermediate_size
    return 2 * D + _attention_parameters(text, text.geometry(layer), text.is_full(layer)) + feed_forward


def _attention_parameters(text: TextConfig, geometry: MlaGeometry, is_full: bool) -> int:
    D, H, Q, C = text.hidden_size, geometry.num_attention_heads, geometry.q_lora_rank, geometry.kv_lora_rank
    query = D * Q + Q + Q * H * geometry.qk_head_dim
    key_value = (
        D * geometry.latent_row + geometry.latent_row + C * H * (geometry.qk_nope_head_dim + geometry.v_head_dim)
    )
    output = (geometry.value_width + geometry.gate_width) * D
    index_width = text.index_n_heads * text.index_head_dim
    indexer = Q * index_width + D * (text.index_head_dim + text.index_n_heads) + 2 * text.index_head_dim
    return query + key_value + output + (indexer if is_full else 0)


def test_released_towers():
    config = released()
    assert config.vision is not None
    assert config.audio is not None
    assert sum(config.vision.experts) == 608
    assert config.vision.experts[24:26] == (0, 4)
    assert config.audio.conv_output_size == 7680
    assert config.eos_token_ids == (151643, 151668)


# Sizes that a port could take for one another: those of the model, and those of one kind of layer.
MODEL_SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window_size",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
)
LAYER_SIZES = (
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "qk_head_dim",
    "latent_row",
    "value_width",
)


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_c69_sizes_within_a_kind_of_layer_of_tiny_differ(kind):
    """Also the width of a head and of a latent row, from which the two softmax scales would come."""
    text = tiny().text
    names = {name: getattr(text, name) for name in MODEL_SIZES}
    names |= {name: getattr(getattr(text, kind), name) for name in LAYER_SIZES}
    equal = [(a, b) for a, b in itertools.combinations(names, 2) if names[a] == names[b]]
    assert equal == []


@pytest.mark.parametrize("name", [*LAYER_SIZES, "rope_theta"])
def test_c69_the_two_kinds_of_layer_of_tiny_differ(name):
    text = tiny().text
    assert getattr(text.full, name) != getattr(text.sliding, name)


def test_c69_no_mechanism_of_tiny_is_a_no_op():
    text = tiny().text
    assert {kind for layer in range(6) for kind in [(text.is_full(layer), text.is_moe(layer))]} == {
        (True, False),
        (True, True),
        (False, True),
    }
    ratios = [text.hidden_size / rank for g in (text.full, text.sliding) for rank in (g.q_lora_rank, g.kv_lora_rank)]
    assert len({1.0, *ratios}) == 5
    assert text.index_n_heads >= 8, "fewer index heads make exact ties between keys frequent"
    assert text.index_head_dim != 2 * text.full.qk_rope_head_dim, "the rotated half must not equal the other"
    assert text.num_experts_per_tok < text.n_routed_experts
    assert text.n_group == 1
    assert text.num_nextn_predict_layers == 1


def test_slice_keeps_layer_kinds_and_counts():
    config = slice_of(released(), [0, 1, 2], experts=16)
    text = config.text
    assert text.layer_types == ("full_attention", "full_attention", "sliding_attention")
    assert (text.num_hidden_layers, text.first_k_dense_replace, text.n_routed_experts) == (3, 1, 16)
    assert [text.is_moe(layer) for layer in range(4)] == [False, True, True, False]
    unchanged = dataclasses.replace(
        text,
        num_hidden_layers=46,
        layer_types=released().text.layer_types,
        n_routed_experts=256,
    )
    assert dataclasses.replace(config, text=unchanged) == released()


def test_slice_renumbers_in_the_given_order():
    text = slice_of(released(), [45, 2, 5]).text
    assert text.layer_types == ("full_attention", "sliding_attention", "full_attention")
    assert (text.first_k_dense_replace, text.n_routed_experts) == (0, 256)


@pytest.mark.parametrize(
    ("layers", "experts", "message"),
    [
        ([46], None, "layer 46 does not exist; the model has layers 0 to 45"),
        ([-1], None, "layer -1 does not exist"),
        ([], None, "at least one, found"),
        ([1, 1], None, "must be distinct"),
        ([1, 0], None, "dense layers must come before expert layers"),
        ([0, 1], 7, "num_experts_per_tok = 8 and 256 experts, found 7"),
        ([0, 1], 257, "256 experts, found 257"),
    ],
)
def test_slice_refuses_what_the_format_cannot_say(layers, experts, message):
    with pytest.raises(ConfigError, match=message):
        slice_of(released(), layers, experts)


@given(config=note_configs(), data=st.data())
def test_a_slice_is_a_config_that_can_be_written(config, data):
    text = config.text
    layers = data.draw(st.lists(st.integers(0, text.num_hidden_layers - 1), min_size=1, unique=True).map(sorted))
    experts = data.draw(st.integers(text.num_experts_per_tok, text.n_routed_experts)) if text.n_group == 1 else None
    sliced = slice_of(config, layers, experts)
    assert [sliced.text.is_full(i) for i in range(len(layers))] == [text.is_full(layer) for layer in layers]
    assert [sliced.text.is_moe(i) for i in range(len(layers))] == [text.is_moe(layer) for layer in layers]
    assert NoteConfig.from_json(sliced.to_json()) == sliced


@given(config=note_configs(), data=st.data())
def test_a_slice_of_groups_is_refused_or_can_be_written(config, data):
    """Experts are cut from the end, so a count may leave groups that no longer divide it."""
    text = config.text
    experts = data.draw(st.integers(text.num_experts_per_tok, text.n_routed_experts))
    with contextlib.suppress(ConfigError):
        sliced = slice_of(config, [0], experts)
        assert refusal(sliced.to_json()) is None
