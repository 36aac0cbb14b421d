"""The speech encoder: an independent formula, masks and tokens, chunks on their own, released tensors, refusals.

The formula runs the stem on the valid frames alone, without any mask, and rotates with complex numbers: ways that the
specification calls equal (audio specification, sections 5 to 10).
"""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from reference.audio import ADAPTER_EPS, ENCODER_EPS, AudioEncoder, Chunk, tiny_audio
from reference.checkpoint import expected_tensors, synthetic_tensors, write_synthetic
from reference.checkpoint.load_audio import PREFIX, empty_audio_encoder, load_audio_encoder
from reference.config import AudioConfig, NoteConfig, released, tiny
from reference.errors import CheckpointError, ConfigError
from reference.media.mel import Features, features, stage_frames, token_count
from reference.media.sound import SoundError
from reference.numerics import Numerics
from reference.probe import Recorder, listening

# T tokens  D model  H heads  X lanes  R rotated lanes  C channels  P rows of frequencies

CONFIG = tiny_audio()
NOTE = dataclasses.replace(tiny(), audio=CONFIG)
CHUNK = 32000
FLOAT64_BOUND = 1e-10


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    made = synthetic_tensors(NOTE)
    return {name.removeprefix(PREFIX): tensor.double() for name, tensor in made if name.startswith(PREFIX)}


def encoder_of(weights: dict[str, Tensor], dtype: torch.dtype = torch.float64, **numerics) -> AudioEncoder:
    encoder = AudioEncoder(CONFIG, Numerics(**numerics))
    encoder.load_state_dict(weights)
    return encoder.to(dtype).requires_grad_(False)


def noise(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) * 0.1


def heard(samples: int, seed: int = 0) -> Features:
    return features(noise(samples, seed), CONFIG, torch.float64)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def convolved(x_CLP: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """3x3, stride 2, a border of zeros: one product for each of the nine taps. Time before frequency here."""
    C, L, P = x_CLP.shape
    bordered = torch.zeros(C, L + 3, P + 3, dtype=x_CLP.dtype)
    bordered[:, 1 : L + 1, 1 : P + 1] = x_CLP
    out_l, out_p = (L + 1) // 2, (P + 1) // 2
    total = bias[:, None, None].expand(-1, out_l, out_p)
    for frequency, time in itertools.product(range(3), range(3)):
        tap = bordered[:, time : time + 2 * out_l : 2, frequency : frequency + 2 * out_p : 2]
        total = total + torch.einsum("oc,clp->olp", weight[:, :, frequency, time], tap)
    return total


def formula(weights: dict[str, Tensor], mel_ML: Tensor, samples: int) -> Tensor:
    """Embeddings of one chunk, float64 [T, O]."""
    speech = {name.removeprefix("dots_encoder.speech_encoder."): tensor for name, tensor in weights.items()}
    valid, T = stage_frames(samples)[0], token_count(samples)
    x_CLP = mel_ML.mT[None, :valid]
    for number in (1, 2, 3):
        x_CLP = gelu(convolved(x_CLP, speech[f"conv2d{number}.weight"], speech[f"conv2d{number}.bias"]))
    x_TD = torch.zeros(T, CONFIG.d_model, dtype=torch.float64)
    for t in range(x_CLP.shape[1] if valid else 0):
        x_TD[t] = speech["conv_out.weight"] @ x_CLP[:, t].reshape(-1)
    for index in range(CONFIG.encoder_layers):
        x_TD = layer_formula({name: speech[f"layers.{index}.{name}"] for name in LAYER_NAMES}, x_TD)
    x_TD = rms(x_TD, speech["layer_norm.weight"])
    adapter = {name.removeprefix("audio_adapter.proj."): tensor for name, tensor in weights.items()}
    centred = x_TD - x_TD.mean(1, keepdim=True)
    normed = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * adapter["0.weight"] + adapter["0.bias"]
    hidden = gelu(normed @ adapter["1.weight"].T + adapter["1.bias"])
    return hidden @ adapter["3.weight"].T + adapter["3.bias"]


LAYER_NAMES = [
    "self_attn_layer_norm.weight",
    "self_attn.q_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.v_proj.bias",
    "self_attn.out_proj.weight",
    "self_attn.out_proj.bias",
    "final_layer_norm.weight",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(x_THX: Tensor) -> Tensor:
    """The first half of each head as complex numbers (lane j, lane j + R/2), turned by t · theta^(-2j/R)."""
    T, _, X = x_THX.shape
    R = X // 2
    numbers = torch.complex(x_THX[..., : R // 2], x_THX[..., R // 2 : R])
    # The model's definition of an angle is the float32 product.
    frequency = 1.0 / CONFIG.rope_theta ** (torch.arange(0, R, 2, dtype=torch.float32) / R)
    angle = torch.arange(T, dtype=torch.float32)[:, None] * frequency
    turned = numbers * torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double())[:, None]
    return torch.cat((turned.real, turned.imag, x_THX[..., R:]), dim=-1)


def layer_formula(w: dict[str, Tensor], x_TD: Tensor) -> Tensor:
    H = CONFIG.encoder_attention_heads
    normed = rms(x_TD, w["self_attn_layer_norm.weight"])
    query = rotated((normed @ w["self_attn.q_proj.weight"].T + w["self_attn.q_proj.bias"]).unflatten(1, (H, -1)))
    key = rotated((normed @ w["self_attn.k_proj.weight"].T).unflatten(1, (H, -1)))
    value = (normed @ w["self_attn.v_proj.weight"].T + w["self_attn.v_proj.bias"]).unflatten(1, (H, -1))
    scores = torch.einsum("thx,shx->hts", query, key) / (CONFIG.d_model // H) ** 0.5
    core = torch.einsum("hts,shx->thx", scores.softmax(-1), value).flatten(1)
    h_TD = x_TD + core @ w["self_attn.out_proj.weight"].T + w["self_attn.out_proj.bias"]
    packed = rms(h_TD, w["final_layer_norm.weight"]) @ w["fc1.weight"].T + w["fc1.bias"]
    gate, up = packed[:, : CONFIG.encoder_ffn_dim], packed[:, CONFIG.encoder_ffn_dim :]
    return h_TD + (gate * torch.sigmoid(gate) * up) @ w["fc2.weight"].T + w["fc2.bias"]


@given(st.integers(1, CHUNK), st.integers(0, 99))
@example(1, 0)
@example(159, 0)
@example(160, 0)
@example(1279, 0)
@example(1280, 0)
@example(1281, 0)
@example(1439, 0)
@example(1440, 0)
@example(CHUNK - 1, 0)
@example(CHUNK, 0)
def test_the_encoder_is_the_formula(weights, samples, seed):
    made = heard(samples, seed)
    expected_TO = formula(weights, made.mel_NML[0], samples)
    out_TO = encoder_of(weights)(made)
    assert out_TO.shape == (token_count(samples), 96)
    assert (out_TO - expected_TO).norm() <= FLOAT64_BOUND * expected_TO.norm()


class TestMaskedTail:
    """1 to 159 samples behind a multiple of 1280: a token that hears nothing and is still there."""

    @pytest.mark.parametrize("samples", [1281, 1439, 2561, CHUNK - 1121])
    def test_its_row_is_exactly_zero(self, weights, samples):
        recorder = Recorder(("audio.stem", "audio.layers.0.output"))
        with listening(recorder):
            out_TO = encoder_of(weights)(heard(samples))
        (stem_TD,) = recorder.values("audio.stem")
        assert len(out_TO) == len(stem_TD) == token_count(samples) == stage_frames(samples)[-1] + 1
        assert not stem_TD[-1].any()
        assert stem_TD[:-1].any(1).all()
        assert recorder.values("audio.layers.0.output")[0][-1].any()

    def test_it_is_attended_to(self, weights):
        """The rows before it are not those of the clip without it, though their stem rows are the same."""
        encoder, recorder = encoder_of(weights), Recorder(("audio.stem", "audio.layers.0.attn.core"))
        made = heard(1281)
        with listening(recorder):
            encoder(made)
            encoder(Features(made.mel_NML, (1280,)))
        with_tail, without = recorder.values("audio.stem")
        assert torch.allclose(with_tail[:1], without, rtol=1e-13)
        with_tail, without = recorder.values("audio.layers.0.attn.core")
        assert (with_tail[:1] - without).norm() > 1e-3 * without.norm()

    def test_a_clip_shorter_than_a_frame_is_not_heard(self, weights):
        for dtype in (torch.float64, torch.bfloat16):
            one, other = (encoder_of(weights, dtype)(heard(100, seed)) for seed in (1, 2))
            assert torch.equal(one, other)
            assert one.shape == (1, 96)


class TestChunks:
    @given(st.integers(1, 3 * CHUNK), st.integers(0, 99))
    @example(CHUNK, 0)
    @example(CHUNK + 1, 0)
    @example(2 * CHUNK + 1440, 0)
    def test_each_is_on_its_own(self, weights, samples, seed):
        encoder = encoder_of(weights, torch.float32)
        x = noise(samples, seed)
        parts = [encoder(features(part, CONFIG)) for part in x.split(CHUNK)]
        assert torch.equal(encoder(features(x, CONFIG)), torch.cat(parts))

    def test_order(self, weights):
        encoder = encoder_of(weights)
        one, other = heard(5000, 1), heard(9000, 2)
        both = Features(torch.cat((one.mel_NML, other.mel_NML)), (5000, 9000))
        swapped = Features(torch.cat((other.mel_NML, one.mel_NML)), (9000, 5000))
        assert torch.equal(encoder(both), torch.cat((encoder(one), encoder(other))))
        assert torch.equal(encoder(swapped), torch.cat((encoder(other), encoder(one))))

    @given(st.integers(160, CHUNK), st.integers(0, 99))
    def test_what_lies_behind_the_samples_does_not_matter(self, weights, samples, seed):
        """Neither its values nor its length; 200 frames, 8 of each token, or any between."""
        encoder, made = encoder_of(weights), heard(samples, seed)
        valid, T = stage_frames(samples)[0], token_count(samples)
        poisoned = made.mel_NML.clone()
        poisoned[:, :, valid:] = 1e30
        assert torch.equal(encoder(Features(poisoned, (samples,))), encoder(made))
        whole = encoder.dots_encoder["speech_encoder"].stem(made.mel_NML[0], Chunk("a", 0, samples, 200))
        cut = encoder.dots_encoder["speech_encoder"].stem(made.mel_NML[0][:, : 8 * T], Chunk("a", 0, samples, 200))
        assert (whole[:T] - cut).norm() <= 1e-12 * max(1e-9, cut.norm())
        assert not whole[T:].any()

    def test_rows_are_counted_through_the_clip(self, weights):
        recorder = Recorder()
        with listening(recorder):
            encoder_of(weights)(heard(CHUNK + 1281), "talk")
        second = {o.name: o.rows for o in recorder.observations if o.rows and int(o.rows.positions[0])}
        starts = {name: (int(rows.positions[0]), len(rows.positions)) for name, rows in second.items()}
        assert starts["audio.mel"] == starts["audio.stem.input"] == (200, 16)
        assert starts["audio.stem.conv1"] == (100, 8)
        assert starts["audio.stem.conv2"] == (50, 4)
        assert {starts[name] for name in starts if "mel" not in name and "conv" not in name} == {
            (25, 2),
            (200, 16),
        }
        assert {rows.request for rows in second.values()} == {"talk"}


class TestNumerics:
    @pytest.mark.parametrize(
        ("field", "value", "first"),
        [
            ("rms_norm_rounding", "twice", "audio.layers.0.attn.input"),
            ("attention_rounding", "each_op", "audio.layers.0.attn.core"),
            ("swiglu_rounding", "twice", "audio.layers.0.ffn.activated"),
        ],
    )
    def test_a_rounding_shows_in_bfloat16_only(self, weights, field, value, first):
        for dtype in (torch.bfloat16, torch.float64):
            recorders = [Recorder(), Recorder()]
            for recorder, numerics in zip(recorders, ({}, {field: value}), strict=True):
                with listening(recorder):
                    encoder_of(weights, dtype, **numerics)(heard(20000))
            pairs = zip(*(recorder.observations for recorder in recorders), strict=True)
            different = [one.name for one, other in pairs if not torch.equal(one.value, other.value)]
            assert different[:1] == ([first] if dtype == torch.bfloat16 else [])

    def test_where_swiglu_rounds(self, weights):
        packed_TF = torch.randn(9, 88, generator=torch.Generator().manual_seed(0)).bfloat16()
        gate_TF, up_TF = packed_TF.split(44, dim=1)
        silu_TF = gate_TF.float() * torch.sigmoid(gate_TF.float())
        expected = {"once": (silu_TF * up_TF.float()).bfloat16(), "twice": silu_TF.bfloat16() * up_TF}
        assert not torch.equal(*expected.values())
        for rounding, expected_TF in expected.items():
            layer = encoder_of(weights, swiglu_rounding=rounding).dots_encoder["speech_encoder"].layers[0]
            assert torch.equal(layer.activated(packed_TF), expected_TF)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_lower_precision_is_near_the_truth(self, weights, dtype):
        truth, eager = encoder_of(weights)(heard(40000)), encoder_of(weights, dtype)(heard(40000))
        assert eager.dtype == dtype
        assert (eager.double() - truth).norm() < 30 * torch.finfo(dtype).eps * truth.norm()

    def test_nobody_listening_changes_nothing(self, weights):
        encoder, made = encoder_of(weights, torch.bfloat16), heard(CHUNK + 5000)
        with listening(Recorder()):
            observed = encoder(made)
        assert torch.equal(encoder(made), observed)


class TestCheckpoint:
    def test_the_released_tensors(self):
        """430 tensors, 1,772,399,360 bytes, and the module has just these."""
        config = released()
        expected = {t.name: t for t in expected_tensors(config).values() if t.bucket == "audio"}
        assert len(expected) == 430
        assert sum(t.numel * t.dtype.itemsize for t in expected.values()) == 1_772_399_360
        assert config.audio
        module = empty_audio_encoder(config.audio).state_dict()
        assert {PREFIX + name: tuple(tensor.shape) for name, tensor in module.items()} == {
            name: tensor.shape for name, tensor in expected.items()
        }
        assert sum(tensor.numel() for tensor in module.values()) == 886_199_680

    def test_from_a_folder(self, weights, tmp_path):
        write_synthetic(tmp_path / "c", NOTE)
        for dtype, wanted in ((torch.bfloat16, torch.bfloat16), (None, torch.bfloat16), (torch.float32, torch.float32)):
            encoder = load_audio_encoder(tmp_path / "c", dtype=dtype)
            assert {tensor.dtype for tensor in encoder.state_dict().values()} == {wanted}
            assert all(torch.equal(tensor.double(), weights[name]) for name, tensor in encoder.state_dict().items())

    def test_a_folder_without_index_layout(self, tmp_path):
        """Which lanes of an index head are rotated is nothing to the audio tower."""
        write_synthetic(tmp_path / "c", NOTE, indexer_rope_layout=None)
        assert load_audio_encoder(tmp_path / "c").config == CONFIG

    def test_a_folder_without_audio(self, tmp_path):
        write_synthetic(tmp_path / "c", tiny())
        with pytest.raises(CheckpointError, match=r"has no audio tower.*audio_config"):
            load_audio_encoder(tmp_path / "c")

    def test_the_tiny_config_survives_json(self):
        assert NoteConfig.from_json(NOTE.to_json()).audio == CONFIG


def sizes(config: AudioConfig) -> dict[str, int]:
    """Every size that a port could take for another one."""
    head_dim = config.d_model // config.encoder_attention_heads
    rows = [config.num_mel_bins]
    for _ in range(3):
        rows.append((rows[-1] + 1) // 2)
    chunk = config.sampling_rate * config.chunk_seconds
    return {
        "width": config.d_model,
        "layers": config.encoder_layers,
        "heads": config.encoder_attention_heads,
        "head": head_dim,
        "rotated": int(head_dim * config.partial_rotary_factor),
        "ffn": config.encoder_ffn_dim,
        "packed": 2 * config.encoder_ffn_dim,
        "channels": config.downsample_hidden_size,
        "flattened": config.conv_output_size,
        "out": config.adapter_out_dim,
        "frames": chunk // 160,
        "tokens": chunk // 1280,
        **{f"rows behind {stage} convolutions": count for stage, count in enumerate(rows)},
    }


def test_all_sizes_of_the_tiny_encoder_differ():
    found = sizes(CONFIG)
    assert len(set(found.values())) == len(found), found
    assert CONFIG.conv_output_size == 9 * 4
    assert ENCODER_EPS != ADAPTER_EPS


class TestRefusals:
    @pytest.mark.parametrize(
        ("shape", "samples", "told"),
        [
            ((1, 20, 200), (100,), r"\(chunks, 27, frames\) of 1 chunks, found \(1, 20, 200\)"),
            ((2, 27, 200), (100,), r"of 1 chunks, found \(2, 27, 200\)"),
            ((0, 27, 200), (), r"of 0 chunks"),
            ((1, 27, 200), (0,), "chunk 0 has 0 samples"),
            ((1, 27, 200), (CHUNK + 1,), "chunk 0 has 32001 samples.*1 to 32000"),
            ((2, 27, 15), (100, 1281), "chunk 1 has 1281 samples and 15 frames.*at least 16 frames"),
        ],
    )
    def test_features(self, weights, shape, samples, told):
        with pytest.raises(SoundError, match=f"talk: .*{told}"):
            encoder_of(weights)(Features(torch.zeros(shape), samples), "talk")

    def test_an_odd_number_of_rotated_lanes(self):
        with pytest.raises(ConfigError, match="rotates 3 of 12 lanes"):
            AudioEncoder(dataclasses.replace(CONFIG, partial_rotary_factor=0.25))
