"""Every field of `Numerics`: where its bits first show in bfloat16, and that in float64 a rounding shows nowhere.

Three fields are choices and not roundings, so float64 sees them too: the index quantization with its floor, and the
draft layer's mask. One more, the missing layout, is read by the loader alone. Also the quantization by itself.
Source: text_model specification, sections 5, 7.3, 11, 17.4, 18 and 19.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from weights import FLOAT64_BOUND, drawn_ids, first_difference, random_model, small

from reference.errors import ConfigError
from reference.layers.index_quantization import fp8_round_trip, hadamard_matrix, quantized
from reference.numerics import PRESETS, Numerics
from reference.probe import Recorder, listening
from reference.session import Session, StepItem

# Layer 0: full, dense. Layer 1: sliding, experts. Layer 2: full, experts. A power of two, for the Hadamard rotation.
CONFIG = small(index_head_dim=32)
# Field, value, and the first value of a run that has other bits than under `default` in bfloat16.
ROUNDINGS = [
    ("router_dtype", "activation", "layers.1.ffn.router.logits"),
    ("rms_norm_rounding", "twice", "layers.0.attn.input"),
    ("rescale_rounding", "separate", "layers.0.attn.q_latent"),
    ("rope_full", "rounded_table", "layers.0.attn.q_rope"),
    ("rope_full", "activation", "layers.0.attn.q_rope"),
    ("rope_sliding", "rounded_table", "layers.1.attn.q_rope"),
    ("rope_sliding", "activation", "layers.1.attn.q_rope"),
    ("attention_rounding", "each_op", "layers.0.attn.core"),
    ("attention_form", "absorbed", "layers.0.attn.core"),
    ("gate_rounding", "twice", "layers.0.attn.gate"),
    ("swiglu_rounding", "twice", "layers.0.ffn.output"),
    ("index_dtype", "float32", "layers.0.attn.index.query"),
    ("expert_accumulation", "activation", "layers.1.ffn.routed"),
]
CHOICES = [
    ("index_quantization", "fp8", "layers.0.attn.index.query"),
    ("index_quantization", "hadamard_fp8", "layers.0.attn.index.query"),
    ("mtp_mask_position_0", True, "mtp.0.eh_input"),
]


def observed(dtype: torch.dtype, numerics: Numerics) -> dict[str, Tensor]:
    """Every named value of a prefill and two draft steps behind it."""
    session, recorder = Session(random_model(CONFIG, dtype=dtype, numerics=numerics)), Recorder()
    with torch.no_grad(), listening(recorder):
        session.step([StepItem("a", drawn_ids(CONFIG, 20), "prefill")])
        session.draft("a", 5, 2, forced=(6,))
    return {observation.name: observation.value for observation in recorder.observations}


@pytest.fixture(scope="module")
def default_bfloat16() -> dict[str, Tensor]:
    return observed(torch.bfloat16, Numerics())


@pytest.fixture(scope="module")
def default_float64() -> dict[str, Tensor]:
    return observed(torch.float64, Numerics())


@pytest.mark.parametrize(("field", "value", "probe"), [*ROUNDINGS, *CHOICES])
def test_a_field_changes_bits_in_bfloat16_first_where_it_says(default_bfloat16, field, value, probe):
    actual = observed(torch.bfloat16, dataclasses.replace(Numerics(), **{field: value}))
    assert first_difference(actual, default_bfloat16, bound=0.0) == probe


@pytest.mark.parametrize(("field", "value"), [rounding[:2] for rounding in ROUNDINGS])
def test_a_rounding_changes_nothing_in_float64(default_float64, field, value):
    """Owes a bound; of the roundings, all but the absorbed form and the separate rescale owe bytes."""
    actual = observed(torch.float64, dataclasses.replace(Numerics(), **{field: value}))
    owes_bytes = field not in ("attention_form", "rescale_rounding")
    assert first_difference(actual, default_float64, bound=0.0 if owes_bytes else FLOAT64_BOUND) == ""


@pytest.mark.parametrize(("field", "value", "probe"), CHOICES)
def test_a_choice_shows_in_float64_too(default_float64, field, value, probe):
    actual = observed(torch.float64, dataclasses.replace(Numerics(), **{field: value}))
    assert first_difference(actual, default_float64, bound=1e-3) == probe


def test_the_amax_floor_shows_only_below_it():
    fp8 = Numerics(index_quantization="fp8")
    expected = observed(torch.float64, fp8)
    low, high = (observed(torch.float64, dataclasses.replace(fp8, index_amax_floor=floor)) for floor in (1e-10, 1e6))
    assert first_difference(low, expected, bound=0.0) == ""
    assert first_difference(high, expected, bound=1e-3) == "layers.0.attn.index.query"


def test_the_missing_layout_is_no_concern_of_the_model(default_float64):
    for layout in ("leading", "tail"):
        actual = observed(torch.float64, Numerics(missing_indexer_rope_layout=layout))
        assert first_difference(actual, default_float64, bound=0.0) == ""


def test_every_field_is_judged_here():
    judged = {field for field, _, _ in (*ROUNDINGS, *CHOICES)} | {"index_amax_floor", "missing_indexer_rope_layout"}
    assert judged == {field.name for field in dataclasses.fields(Numerics)}


def test_the_draft_mask_zeroes_the_embedding_half_of_row_0_and_nothing_else(default_float64):
    actual, D = observed(torch.float64, Numerics(mtp_mask_position_0=True)), CONFIG.hidden_size
    eh_input, expected = actual["mtp.0.eh_input"], default_float64["mtp.0.eh_input"]
    assert torch.equal(eh_input[0, :D], torch.zeros(D))
    assert expected[0, :D].abs().min() > 0
    assert torch.equal(eh_input[0, D:], expected[0, D:])
    assert torch.equal(eh_input[1:], expected[1:])
    assert torch.equal(actual["logits"], default_float64["logits"])


def test_presets_are_named_and_the_default_is_the_default():
    assert set(PRESETS) == {"default", "transformers", "vllm"}
    assert Numerics.preset("default") == Numerics()
    assert Numerics.preset("vllm").index_quantization == "fp8"
    assert Numerics.preset("transformers").router_dtype == "float32"


def test_an_unknown_preset_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigError, match=r"sglang.*default.*transformers.*vllm"):
        Numerics.preset("sglang")


def test_an_unknown_value_of_a_field_is_refused_by_name():
    with pytest.raises(ConfigError, match="router_dtype"):
        Numerics(router_dtype="bfloat16")


# The fp8 round trip


def e4m3(value: float) -> float:
    """Nearest e4m3 number, ties to even, from the format: 3 mantissa bits, exponents -6 to 8, subnormals below."""
    if value == 0.0:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, -6)
    step = 2.0 ** (exponent - 3)
    return round(value / step) * step


def test_c44_an_amax_of_3_has_the_scale_of_the_next_power_of_two():
    """3/448 lies between 2^-8 and 2^-7. At 2^-7, 3.0 is stored as 384 and 0.1 as 13 (12.8); 3/448 would give 15."""
    x = torch.tensor([3.0, 0.1, -1.0, 0.0])
    assert fp8_round_trip(x, 1e-4).tolist() == [3.0, 13 / 128, -1.0, 0.0]


@pytest.mark.parametrize(
    ("amax", "scale"), [(448.0, 1.0), (448.5, 2.0), (224.0, 0.5), (7.0, 2.0**-6), (1e-4, 2.0**-22), (0.0, 2.0**-22)]
)
def test_the_scale_is_the_power_of_two_that_just_holds_amax(amax, scale):
    """Seen through the smallest e4m3 number, 2^-9 of the scale: half of it vanishes, a little more does not."""
    tiny_value = scale * 2.0**-9
    x = torch.tensor([amax, tiny_value, tiny_value * 0.49, tiny_value * 0.51], dtype=torch.float64)
    assert fp8_round_trip(x, 1e-4)[1:].tolist() == [tiny_value, 0.0, tiny_value]


@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8),
    floor=st.sampled_from([1e-4, 1e-10]),
)
def test_the_round_trip_equals_the_format_written_out(values, floor):
    """Owes bytes."""
    amax = max(*map(abs, values), floor)
    scale = 2.0 ** math.ceil(math.log2(amax / 448))
    expected = [e4m3(value / scale) * scale for value in values]
    assert fp8_round_trip(torch.tensor(values, dtype=torch.float32), floor).tolist() == expected


@given(exponent=st.integers(-8, 8), seed=st.integers(0, 99))
def test_the_round_trip_commutes_with_powers_of_two(exponent, seed):
    """Owes bytes, above the floor."""
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(fp8_round_trip(x * 2.0**exponent, 1e-4), fp8_round_trip(x, 1e-4) * 2.0**exponent)


def test_each_head_has_its_own_scale():
    x = torch.tensor([[3.0, 0.1], [3000.0, 0.1]])
    assert fp8_round_trip(x, 1e-4)[0].tolist() == [3.0, 13 / 128]
    assert fp8_round_trip(x, 1e-4)[1].tolist() == [3072.0, 6 * 2.0**-9 * 8]


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_quantized_values_are_at_least_float32(dtype, wide):
    x = torch.ones(2, 32, dtype=dtype)
    for kind in ("fp8", "hadamard_fp8"):
        assert quantized(x, Numerics(index_quantization=kind)).dtype == wide
    assert quantized(x, Numerics()) is x


@pytest.mark.parametrize("width", [1, 2, 32, 128])
def test_the_hadamard_matrix_is_orthonormal_with_entries_of_one_size(width):
    matrix = hadamard_matrix(width, torch.float64, torch.device("cpu"))
    assert (matrix @ matrix.T - torch.eye(width, dtype=torch.float64)).abs().max() <= FLOAT64_BOUND
    assert torch.equal(matrix.abs(), torch.full((width, width), width**-0.5, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T)


@pytest.mark.parametrize("width", [22, 96])
def test_the_hadamard_rotation_refuses_other_widths_by_name(width):
    with pytest.raises(ConfigError, match=f"index_head_dim that is a power of two, found {width}"):
        quantized(torch.ones(1, width), Numerics(index_quantization="hadamard_fp8"))
