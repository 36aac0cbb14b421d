"""The list of tensors that a config asks for, against the counts, shapes and bytes of the release."""

import dataclasses

import pytest
import torch

from reference.checkpoint import account, expected_tensors
from reference.config import NoteConfig, released, tiny
from reference.errors import ConfigError
from reference.text import TextModel


def test_the_release_has_38006_tensors_of_exactly_its_size():
    totals = account(released())
    assert totals.tensors == 38_006
    assert totals.nbytes == 576_886_825_984
    assert totals.dtypes == {"BF16": 37_944, "F32": 62}
    assert [total.tensors for total in totals.buckets] == [35_362, 19, 2_195, 430]
    assert [total.nbytes for total in totals.buckets] == [
        559_103_436_032 + 46_080,
        2_268_387_456,
        13_742_554_624 + 2_432,
        1_772_399_360,
    ]


def test_c26_the_classes_of_layers_and_their_evidence():
    dense_full, moe_full, moe_sliding, draft = account(released()).layer_classes
    assert [c.letter + " " + c.kind for c in (dense_full, moe_full, moe_sliding, draft)] == [
        "A dense+full",
        "B MoE+full",
        "C MoE+sliding",
        "D draft",
    ]
    assert [c.tensors for c in (dense_full, moe_full, moe_sliding, draft)] == [19, 789, 784, 18]
    assert [c.nbytes for c in (dense_full, moe_full, moe_sliding, draft)] == [
        712_793_728,
        12_417_524_352,
        12_311_094_400,
        711_252_096,
    ]
    assert moe_full.layers == (1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45)
    assert draft.layers == (46,)
    assert moe_full.q_b_proj_rows == 24_576
    assert draft.evidence == "q_b_proj has 16384 rows = 64 heads x (192 nope + 64 rope): sliding geometry"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.46.eh_proj.weight", (5120, 10240)),
        ("model.layers.46.self_attn.kv_b_proj.weight", (20480, 1024)),
        ("model.layers.45.self_attn.indexer.wq_b.weight", (8192, 1024)),
        ("model.layers.45.self_attn.kv_a_proj_with_mqa.weight", (576, 5120)),
        ("model.layers.2.mlp.experts.255.down_proj.weight", (5120, 1536)),
        ("vision_encoder.blocks.25.mlp.gate_weight", (4, 1536)),
        ("vision_encoder.blocks.41.mlp.experts.63.fc2.weight", (1536, 2112)),
        ("vision_encoder.adapter.mlp.0.weight", (6144, 6144)),
        ("audio_encoder.dots_encoder.speech_encoder.conv_out.weight", (1280, 7680)),
        ("audio_encoder.dots_encoder.speech_encoder.layers.31.fc1.bias", (10240,)),
    ],
)
def test_released_shapes(name: str, shape: tuple[int, ...]):
    assert expected_tensors(released())[name].shape == shape


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.46.shared_head.head.weight",
        "model.layers.46.embed_tokens.weight",
        "model.layers.2.self_attn.indexer.wk.weight",
        "audio_encoder.dots_encoder.speech_encoder.layers.0.self_attn.k_proj.bias",
        "audio_encoder.dots_encoder.speech_encoder.conv_out.bias",
    ],
)
def test_what_the_release_does_not_have(name: str):
    assert name not in expected_tensors(released())


def test_c47_vision_experts_follow_the_pyramid_and_keep_a_float32_bias(towers_config: NoteConfig):
    vision = {name: t for name, t in expected_tensors(towers_config).items() if t.bucket == "vision"}
    for block, experts in enumerate((0, 0, 2, 4)):
        prefix = f"vision_encoder.blocks.{block}.mlp."
        held = {name.removeprefix(prefix): t for name, t in vision.items() if name.startswith(prefix)}
        if not experts:
            assert {*held} == {"fc1.weight", "fc2.weight", "fc3.weight"}
            continue
        assert len(held) == 2 + 3 * experts
        assert held["router_bias"].shape == (experts,)
        assert held["router_bias"].dtype == torch.float32
        assert held["gate_weight"].shape == (experts, 48)
        assert held[f"experts.{experts - 1}.fc2.weight"].shape == (48, 20)
    assert {t.dtype for t in vision.values() if not t.name.endswith("router_bias")} == {torch.bfloat16}


def test_names_and_shapes_are_those_of_the_module():
    with torch.device("meta"):
        module = TextModel(tiny().text).state_dict()
    assert {name: tuple(t.shape) for name, t in module.items()} == {
        name: t.shape for name, t in expected_tensors(tiny()).items()
    }


def test_c33_three_draft_layers_are_refused_with_the_way_out():
    config = tiny()
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, num_nextn_predict_layers=3))
    with pytest.raises(ConfigError, match=r"is 3, but the checkpoint format holds 1 draft layer: set it to 1.*k times"):
        expected_tensors(config)


def test_without_a_draft_layer_there_are_no_mtp_tensors():
    config = tiny()
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, num_nextn_predict_layers=0))
    assert {t.bucket for t in expected_tensors(config).values()} == {"language"}


def test_an_implausible_number_of_tensors_is_refused_before_it_is_listed():
    config = tiny()
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, n_routed_experts=10**12))
    with pytest.raises(ConfigError, match="at most 1000000 are plausible"):
        expected_tensors(config)
