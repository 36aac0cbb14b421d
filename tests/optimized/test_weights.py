"""Packing and unpacking of the state dict: every value once, in its place, in one dtype, at one address.

Cases C21, C24, C25 and C64; source: text_model specification, sections 4, 6, 14 and 17.1.
"""

import dataclasses
import weakref
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from strategies import text_configs
from torch import Tensor

from optimized.audio_weights import pack_audio
from optimized.errors import NotSupportedError
from optimized.moe import pack_experts
from optimized.vision_weights import pack_vision
from optimized.weights import PackedText, loaded_into, pack_text, text_places, unpack_text
from reference.audio import tiny_audio
from reference.checkpoint.expected import expected_tensors
from reference.config import TextConfig, released, tiny
from reference.errors import CheckpointError
from reference.numerics import Numerics
from reference.text import TextModel
from reference.vision import tiny_vision

TINY = tiny().text


def shapes(config: TextConfig, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The reference's state dict without values: shape and dtype by name."""
    with torch.device("meta"):
        state = TextModel(config).to(dtype).state_dict()
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator).to(dtype)


def random_state(config: TextConfig, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    return {name: drawn(name, *kind, seed) for name, kind in shapes(config, dtype).items()}


def packed_tiny(dtype: torch.dtype = torch.bfloat16) -> PackedText:
    return pack_text(random_state(TINY, dtype), TINY, "cpu", dtype)


def assert_same_bytes(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_tensor_of_the_state_dict_comes_back_bit_for_bit(dtype):
    state = random_state(TINY, dtype)
    assert_same_bytes(unpack_text(pack_text(state, TINY, "cpu", dtype)), state)
    assert_same_bytes(unpack_text(pack_text(reversed(state.items()), TINY, "cpu", dtype)), state)


@given(
    config=text_configs(oracle=True).map(lambda config: dataclasses.replace(config, n_group=1, topk_group=1)),
)
def test_whatever_the_sizes_it_comes_back_bit_for_bit(config):
    state = random_state(config)
    assert_same_bytes(unpack_text(pack_text(state, config, "cpu", torch.bfloat16)), state)


@pytest.mark.parametrize("changes", [{"num_nextn_predict_layers": 0}, {"n_shared_experts": 3}])
def test_models_without_a_draft_layer_and_with_several_shared_experts(changes):
    config = dataclasses.replace(TINY, **changes)
    state = random_state(config)
    packed = pack_text(state, config, "cpu", torch.bfloat16)
    assert (packed.draft is None) == (config.num_nextn_predict_layers == 0)
    assert_same_bytes(unpack_text(packed), state)


def test_parts_lie_where_the_kernels_look_for_them():
    state = random_state(TINY)
    packed = pack_text(state, TINY, "cpu", torch.bfloat16)
    for layer in (0, 2, 6):
        prefix, is_full, geometry = f"model.layers.{layer}.self_attn.", TINY.is_full(layer), TINY.geometry(layer)
        assert packed.draft is not None
        weights = (packed.layers[layer] if layer < 6 else packed.draft.layer).attention
        parts = ["q_a_proj", "kv_a_proj_with_mqa", "g_proj"]
        parts += ["indexer.wk", "indexer.weights_proj"] if is_full else []
        assert torch.equal(weights.a_XD, torch.cat([state[f"{prefix}{part}.weight"] for part in parts]))
        assert weights.projection.width == len(weights.a_XD)
        parts = ["q_b_proj", "indexer.wq_b"] if is_full else ["q_b_proj"]
        assert torch.equal(weights.q_b_XQ, torch.cat([state[f"{prefix}{part}.weight"] for part in parts]))
        H, N, V = geometry.num_attention_heads, geometry.qk_nope_head_dim, geometry.v_head_dim
        kv_b_HYC = state[f"{prefix}kv_b_proj.weight"].view(H, N + V, -1)
        assert torch.equal(weights.w_uk_HNC, kv_b_HYC[:, :N])
        assert torch.equal(weights.w_uv_HVC, kv_b_HYC[:, N:])
        for view in (weights.w_uk_HNC, weights.w_uv_HVC):
            assert view.untyped_storage().data_ptr() == weights.kv_b_YC.untyped_storage().data_ptr()
        latent = weights.latent
        assert torch.equal(latent.rope_norm_R, state[f"{prefix}k_rope_only_layernorm.weight"])
        assert latent.query_scale == (96 / geometry.q_lora_rank) ** 0.5
        assert latent.latent_scale == (96 / geometry.kv_lora_rank) ** 0.5
        assert (latent.index_norm_J is not None) == is_full
    dense = packed.layers[0].dense
    assert dense is not None
    gate, up = (state[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(dense.gate_up_XD, torch.cat((gate, up)))
    assert [layer.experts is None for layer in packed.layers] == [True, *[False] * 5]


def test_experts_lie_as_their_own_packing_puts_them():
    state = random_state(TINY)
    packed = pack_text(state, TINY, "cpu", torch.bfloat16)
    prefix = "model.layers.3.mlp."
    layer = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    expected, actual = pack_experts(layer, TINY, "cpu"), packed.layers[3].experts
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(actual, field.name), getattr(expected, field.name)
        assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs


def test_latents_are_not_rescaled_where_the_config_says_so():
    config = dataclasses.replace(TINY, apply_mla_qkv_lora_rescale=False)
    packed = pack_text(random_state(config), config, "cpu", torch.bfloat16)
    latent = packed.layers[0].attention.latent
    assert (latent.query_scale, latent.latent_scale) == (1.0, 1.0)


def test_released_storage_takes_the_bytes_of_the_checkpoint_and_no_more():
    config = released().text
    expected = expected_tensors(dataclasses.replace(released(), vision=None, audio=None)).values()
    state = ((each.name, torch.empty(each.shape, dtype=each.dtype, device="meta")) for each in expected)
    packed = pack_text(state, config, "meta", torch.bfloat16)
    assert packed.nbytes == sum(each.nbytes for each in expected)
    assert packed.layers[0].attention.a_XD.shape == (1920, 5120)
    assert packed.layers[2].attention.a_XD.shape == (2176, 5120)
    assert packed.layers[0].attention.q_b_XQ.shape == (32768, 1024)
    storages: dict[int, int] = {}
    for place in text_places(packed).values():
        for piece in place.pieces:
            storage = piece.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    assert sum(storages.values()) == packed.nbytes


def test_a_stream_is_read_once_and_never_holds_two_tensors():
    """Nothing but the storage and one source tensor: the reader lets each go before it asks for the next."""
    alive = most = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def made(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal alive, most
        tensor = drawn(name, shape, dtype)
        alive += 1
        most = max(most, alive)
        weakref.finalize(tensor, gone)
        return tensor

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, kind in shapes(config, torch.bfloat16).items():
            yield name, made(name, *kind)

    config = dataclasses.replace(TINY, n_shared_experts=2)
    packed = pack_text(stream(), config, "cpu", torch.bfloat16)
    assert (alive, most) == (0, 1)
    assert_same_bytes(unpack_text(packed), random_state(config))


def test_c64_everything_wrong_is_listed_in_one_error():
    state = random_state(TINY)
    wrong = [(name, tensor) for name, tensor in state.items() if name != "model.layers.3.mlp.experts.5.up_proj.weight"]
    changes = {
        "lm_head.weight": torch.zeros(3, 96, dtype=torch.bfloat16),
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.zeros(14, dtype=torch.bfloat16),
        "model.norm.weight": torch.empty(96, dtype=torch.bfloat16, device="meta"),
    }
    wrong = [(name, changes.get(name, tensor)) for name, tensor in wrong]
    wrong += [("model.layers.9.mlp.bias", torch.zeros(2)), wrong[0]]
    with pytest.raises(CheckpointError) as refusal:
        pack_text(iter(wrong), TINY, "cpu", torch.bfloat16)
    for part in (
        "state dict: 6 problems",
        "missing: model.layers.3.mlp.experts.5.up_proj.weight: found nothing, expected torch.bfloat16 (28, 96)",
        "unknown: model.layers.9.mlp.bias: found torch.float32 (2,)",
        "wrong shape or dtype: lm_head.weight: found torch.bfloat16 (3, 96), expected torch.bfloat16 (193, 96)",
        "model.layers.1.mlp.gate.e_score_correction_bias: found torch.bfloat16 (14,), expected torch.float32 (14,)",
        "no values: model.norm.weight",
        "given twice: model.embed_tokens.weight",
    ):
        assert part in str(refusal.value)


def test_c21_biases_of_the_routers_stay_float32():
    experts = packed_tiny().layers[1].experts
    assert experts is not None
    assert experts.bias_E.dtype == torch.float32
    assert experts.router_weight_ED.dtype == torch.bfloat16


def addresses(packed: PackedText) -> list[int]:
    return [piece.data_ptr() for place in text_places(packed).values() for piece in place.pieces]


def test_c24_c25_other_weights_come_to_the_same_addresses():
    first, second = random_state(TINY), random_state(TINY, seed=1)
    packed = pack_text(first, TINY, "cpu", torch.bfloat16)
    before = addresses(packed)
    for state in (first, second, first):
        assert loaded_into(packed, state) is packed
        assert_same_bytes(unpack_text(packed), state)
        fresh = pack_text(state, TINY, "cpu", torch.bfloat16)
        assert torch.equal(packed.layers[1].attention.w_uv_HVC, fresh.layers[1].attention.w_uv_HVC)
        assert addresses(packed) == before


def test_weights_that_do_not_fit_change_nothing():
    first, second = random_state(TINY), random_state(TINY, seed=1)
    packed = pack_text(first, TINY, "cpu", torch.bfloat16)
    del second["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight"):
        loaded_into(packed, second)
    assert_same_bytes(unpack_text(packed), first)


def test_unpacked_tensors_are_copies():
    packed = packed_tiny()
    unpack_text(packed)["model.norm.weight"].fill_(0)
    assert packed.final_norm_D.abs().min() > 0


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"full": dataclasses.replace(TINY.full, gate_type="elementwise")}, {}, "attention_gate_type"),
        ({"sliding": dataclasses.replace(TINY.sliding, gate_type="elementwise")}, {}, "swa_attention_gate_type"),
        ({"n_group": 2}, {}, "n_group must be 1, found 2"),
        ({"indexer_rope_interleave": False}, {}, "indexer_rope_interleave must be True"),
        ({"num_nextn_predict_layers": 2}, {}, "num_nextn_predict_layers must be 0 or 1, found 2"),
        ({}, {"indexer_rope_layout": "tail"}, "indexer_rope_layout must be 'leading', found 'tail'"),
        ({}, {"numerics": Numerics.preset("vllm")}, "numerics must be"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, options, message):
    with pytest.raises(NotSupportedError, match=message):
        pack_text({}, dataclasses.replace(TINY, **changes), "cpu", torch.bfloat16, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_a_device_that_is_not_here_is_refused_by_name() -> None:
    for pack, config in ((pack_text, tiny().text), (pack_vision, tiny_vision()), (pack_audio, tiny_audio())):
        with pytest.raises(NotSupportedError, match="device cuda: torch finds no CUDA device here"):
            pack({}, config, "cuda", torch.bfloat16)


def test_a_card_beyond_the_last_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(NotSupportedError, match=r"device cuda:2: torch finds 2 CUDA device\(s\) here"):
        pack_text({}, tiny().text, "cuda:2", torch.bfloat16)
