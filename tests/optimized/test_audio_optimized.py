"""The optimized audio tower against the reference: packing, features, every named tensor, batches, budgets."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, assert_as_good_as_eager
from torch import Tensor

from optimized.audio import AudioOptions, AudioTower
from optimized.audio_mel import DeviceMel, MelRows, mel_rows
from optimized.audio_rows import ChunkPlace, grouped
from optimized.audio_weights import audio_places, empty_audio, pack_audio, unpack_audio
from optimized.errors import KernelInputError, NotSupportedError
from parity.audio_check import check_audio_sides, tiny_with_audio
from parity.audio_clips import ClipWorkload
from parity.audio_strategies import clip_workloads
from parity.check import CheckReport
from parity.runners.optimized_audio import OptimizedAudio
from parity.runners.reference_audio import ReferenceAudio
from parity.schema_audio import AUDIO_PROBES, audio_pattern_of
from reference.audio import AudioEncoder, tiny_audio
from reference.checkpoint import synthetic_tensors
from reference.config import AudioConfig, released
from reference.errors import CheckpointError
from reference.media.mel import Features, features
from reference.media.sound import SoundError
from reference.numerics import Numerics
from reference.probe import Override, Recorder, concatenated, listening

CONFIG = tiny_audio()
TINY = tiny_with_audio()
# A chunk of one second is 100 frames: its last token has only four.
ODD = dataclasses.replace(CONFIG, chunk_seconds=1)
CHUNK = 32000
EXAMPLES = 15 if DEVICE == "cpu" else 3
LENGTHS = st.one_of(
    st.sampled_from([1, 159, 160, 1279, 1280, 1281, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 777]),
    st.integers(1, 3 * CHUNK),
)


@functools.cache
def encoder(config: AudioConfig, dtype: torch.dtype) -> AudioEncoder:
    """Matrices that keep the size of what they are multiplied with, norms around 1, biases that are not 0."""
    generator = torch.Generator().manual_seed(3)
    model = AudioEncoder(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        is_matrix = parameter.dim() > 1
        offset = 0.0 if is_matrix or name.endswith("bias") else 1.0
        parameter.copy_(offset + drawn * (parameter[0].numel() ** -0.5 if is_matrix else 0.2))
    return model.to(dtype)


@functools.cache
def tower(config: AudioConfig, dtype: torch.dtype, budget: int | None = None) -> AudioTower:
    backend = "torch" if dtype == torch.float64 else None
    options = None if budget is None else AudioOptions(budget, budget // 2)
    return AudioTower.from_state(config, encoder(config, dtype).state_dict(), dtype, DEVICE, backend, options)


def noise(samples: int, seed: int = 0) -> Tensor:
    """Loud at first, then a thousand times quieter, which is below the floor of the loud part's chunk."""
    drawn = torch.from_numpy(np.random.default_rng(seed).standard_normal(samples)).float() * 0.1
    drawn[CHUNK:] *= 1e-3
    return drawn


def clips(lengths: list[int], config: AudioConfig, dtype: torch.dtype) -> list[Features]:
    return [features(noise(n, seed), config, dtype) for seed, n in enumerate(lengths)]


def expected(given_clips: list[Features], config: AudioConfig, dtype: torch.dtype) -> list[Tensor]:
    return [encoder(config, dtype)(clip) for clip in given_clips]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for own, other in zip(found, wanted, strict=True):
        assert own.shape == other.shape
        assert (own.cpu() - other).abs().max() <= 1e-10 * other.abs().max()


def test_packing_moves_every_tensor_and_changes_none() -> None:
    state = encoder(CONFIG, torch.float32).state_dict()
    unpacked = unpack_audio(pack_audio(state, CONFIG, DEVICE, torch.float32))
    assert unpacked.keys() == state.keys()
    assert all(torch.equal(unpacked[name].cpu(), state[name]) for name in state)


def test_the_released_encoder_fits_its_storage() -> None:
    """430 tensors, 886,199,680 parameters."""
    places = audio_places(empty_audio(released().audio, "meta", torch.bfloat16))
    with torch.device("meta"):
        state = AudioEncoder(released().audio).state_dict()
    assert {name: place.shape for name, place in places.items()} == {name: t.shape for name, t in state.items()}
    assert len(places) == 430
    assert sum(place.shape.numel() for place in places.values()) == 886_199_680


def test_what_is_wrong_with_the_weights_is_listed() -> None:
    state = encoder(CONFIG, torch.float32).state_dict()
    encoder_name = "dots_encoder.speech_encoder."
    state[encoder_name + "layers.0.self_attn.k_proj.bias"] = torch.zeros(60)
    del state[encoder_name + "conv2d2.bias"]
    state["audio_adapter.proj.1.weight"] = state["audio_adapter.proj.1.weight"].bfloat16()
    with pytest.raises(CheckpointError) as refused:
        pack_audio(state, CONFIG, DEVICE, torch.float32)
    for line in ("unknown: dots_encoder", "missing: dots_encoder", "wrong shape or dtype: audio_adapter.proj.1.weight"):
        assert line in str(refused.value)
    with pytest.raises(NotSupportedError, match="numerics must be"):
        pack_audio(state, CONFIG, DEVICE, torch.float32, Numerics.preset("transformers"))


@settings(max_examples=EXAMPLES)
@given(st.sampled_from([CONFIG, ODD]), st.lists(LENGTHS, min_size=1, max_size=4), st.sampled_from([None, 30, 7]))
@example(CONFIG, [1, 159, 160, 1279, 1280, 1281], None)
@example(CONFIG, [CHUNK - 1, CHUNK, CHUNK + 1], 26)
def test_embeddings_are_the_references(config: AudioConfig, lengths: list[int], budget: int | None) -> None:
    """In float64, whatever the company of a clip and the budgets of tokens; features from either side."""
    given_clips = clips(lengths, config, torch.float64)
    wanted = expected(given_clips, config, torch.float64)
    own = tower(config, torch.float64, budget)
    assert_close(own.embed(given_clips), wanted)
    assert_close(own.embed_sound([noise(n, seed) for seed, n in enumerate(lengths)]), wanted)


@st.composite
def configs(draw: st.DrawFn) -> AudioConfig:
    """Odd and small sizes, heads that are rotated in part, whole or in a single pair; one mel bin."""
    heads, pairs, passed = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 9))
    head_dim = 2 * pairs + passed
    assume(int(head_dim * (2 * pairs / head_dim)) == 2 * pairs)
    return dataclasses.replace(
        CONFIG,
        d_model=heads * head_dim,
        encoder_layers=draw(st.integers(1, 2)),
        encoder_attention_heads=heads,
        encoder_ffn_dim=draw(st.integers(1, 20)),
        num_mel_bins=draw(st.integers(1, 40)),
        downsample_hidden_size=draw(st.integers(1, 9)),
        chunk_seconds=draw(st.integers(1, 3)),
        partial_rotary_factor=2 * pairs / head_dim,
        adapter_out_dim=draw(st.integers(1, 20)),
    )


@settings(max_examples=EXAMPLES)
@given(configs(), st.lists(LENGTHS, min_size=1, max_size=3))
def test_drawn_models_give_the_references_embeddings(config: AudioConfig, lengths: list[int]) -> None:
    given_clips = clips(lengths, config, torch.float64)
    own = AudioTower.from_state(config, encoder(config, torch.float64).state_dict(), torch.float64, DEVICE, "torch")
    assert_close(own.embed(given_clips), expected(given_clips, config, torch.float64))


@settings(max_examples=5 if DEVICE == "cpu" else 2)
@given(configs(), st.lists(st.integers(1, 6000), max_size=2), st.sampled_from([torch.float32, torch.bfloat16]))
def test_drawn_models_run_through_the_kernels(config: AudioConfig, lengths: list[int], dtype: torch.dtype) -> None:
    """As close to the twins in float64 as the twins in the same dtype are, over enough elements to tell."""
    config, lengths = dataclasses.replace(config, adapter_out_dim=24), [*lengths, 12000]
    state = encoder(config, dtype).state_dict()
    wide = {name: tensor.double() for name, tensor in state.items()}
    kernels, plain = (AudioTower.from_state(config, state, dtype, DEVICE, backend) for backend in (None, "torch"))
    truth = AudioTower.from_state(config, wide, torch.float64, DEVICE, "torch")
    mel = mel_rows(clips(lengths, config, torch.float32), config, DEVICE)
    rounded = dataclasses.replace(mel, mel_LM=mel.mel_LM.to(dtype).double())
    assert_as_good_as_eager(*(torch.cat(rows) for rows in (kernels(mel), plain(mel), truth(rounded))))


@pytest.mark.parametrize("config", [CONFIG, ODD], ids=["whole-tokens", "half-a-token"])
def test_every_named_tensor_is_the_references(config: AudioConfig) -> None:
    lengths, names = [1281, 2 * CHUNK + 777, 100], ["a", "b", "c"]
    given_clips = clips(lengths, config, torch.float64)
    theirs, ours = Recorder(), Recorder()
    with listening(theirs):
        for name, clip in zip(names, given_clips, strict=True):
            encoder(config, torch.float64)(clip, name)
    with listening(ours):
        tower(config, torch.float64, 40).embed(given_clips, names)
    assert set(ours.names()) == set(theirs.names())
    assert {audio_pattern_of(name) for name in ours.names()} == {probe.pattern for probe in AUDIO_PROBES}
    for name in names:
        own, other = (
            concatenated(seen for seen in recorder.observations if seen.rows.request == name)
            for recorder in (ours, theirs)
        )
        for tensor in other:
            assert own[tensor].shape == other[tensor].shape, tensor
            scale = other[tensor].abs().max().clamp(min=1e-30)
            assert (own[tensor].cpu() - other[tensor]).abs().max() <= 1e-10 * scale, tensor
    positions = [
        torch.cat([seen.rows.positions.cpu() for seen in recorder.observations if seen.name == "audio.stem.conv1"])
        for recorder in (ours, theirs)
    ]
    assert torch.equal(*positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernels_are_as_good_as_the_eager_reference(dtype: torch.dtype) -> None:
    given_clips = clips([1281, 5000, 1, CHUNK + 161], CONFIG, torch.float32)
    found = torch.cat(tower(CONFIG, dtype).embed(given_clips)).cpu()
    eager = torch.cat(expected(given_clips, CONFIG, dtype))
    wide = encoder(CONFIG, dtype).state_dict()
    truth = AudioEncoder(CONFIG).double()
    truth.load_state_dict({name: tensor.double() for name, tensor in wide.items()})
    rounded = [Features(clip.mel_NML.to(dtype).double(), clip.samples) for clip in given_clips]
    with torch.no_grad():
        wanted = torch.cat([truth(clip) for clip in rounded])
    assert_as_good_as_eager(found, eager, wanted)


def test_orders_of_clips_give_the_same_rows() -> None:
    """In float64 and to rounding: the library's products depend on how many rows they have."""
    given_clips = clips([1281, CHUNK + 5, 159, 9000], CONFIG, torch.float64)
    own = tower(CONFIG, torch.float64)
    forward = own.embed(given_clips)
    assert_close(own.embed(given_clips[::-1])[::-1], [rows.cpu() for rows in forward])
    assert_close([own.embed([clip])[0] for clip in given_clips], [rows.cpu() for rows in forward])


def test_clips_shorter_than_a_frame_are_not_heard() -> None:
    """Two different clips of 100 samples give the same bytes: their only token is masked."""
    own = tower(CONFIG, torch.bfloat16)
    first, second = own.embed_sound([noise(100, 1), noise(100, 2)])
    assert torch.equal(first, second)


@settings(max_examples=EXAMPLES)
@given(st.sampled_from([CONFIG, ODD]), st.lists(LENGTHS, min_size=1, max_size=4))
@example(CONFIG, [CHUNK, CHUNK - 100, CHUNK - 199, CHUNK - 201, CHUNK - 360])
def test_features_of_the_device_are_the_definitions(config: AudioConfig, lengths: list[int]) -> None:
    """Every frame of a token, in float64; in float32 no worse than the definition itself."""
    waveforms = [noise(n, seed) for seed, n in enumerate(lengths)]

    def defined(dtype: torch.dtype) -> MelRows:
        return mel_rows([features(waveform_S, config, dtype) for waveform_S in waveforms], config, "cpu")

    truth, eager = defined(torch.float64), defined(torch.float32)
    # Frames that do not exist are zeros there and repetitions here, and read by nothing.
    exists_L = truth.mel_LM.abs().sum(-1) > 0
    wide, single = (DeviceMel(config, DEVICE, dtype)(waveforms) for dtype in (torch.float64, torch.float32))
    assert wide.samples == single.samples == truth.samples
    assert wide.tokens == truth.tokens
    torch.testing.assert_close(wide.mel_LM.cpu()[exists_L], truth.mel_LM[exists_L], rtol=0, atol=1e-10)
    assert wide.mel_LM.isfinite().all()
    assert_as_good_as_eager(single.mel_LM.cpu()[exists_L], eager.mel_LM[exists_L], truth.mel_LM[exists_L])


def test_silence_and_a_click_at_the_end() -> None:
    """The click's two frames lie behind the last token, and still decide the floor of their chunk."""
    click = torch.zeros(1280 * 3)
    click[-1] = 1.0
    for waveform_S in (torch.zeros(3000), click):
        defined = features(waveform_S, CONFIG).mel_NML[0].mT
        found = DeviceMel(CONFIG, DEVICE)([waveform_S]).mel_LM.cpu()
        torch.testing.assert_close(found, defined[: len(found)], rtol=0, atol=1e-5)


def test_bad_sound_is_refused() -> None:
    own = tower(CONFIG, torch.bfloat16)
    for waveform_S, told in (
        (torch.zeros(0), "no samples"),
        (torch.zeros(4, 2), "expected one channel"),
        (torch.zeros(9, dtype=torch.int16), "divide int16 by 32768"),
        (torch.tensor([0.0, float("nan")]), "finite"),
    ):
        with pytest.raises(SoundError, match=told):
            own.embed_sound([noise(5), waveform_S])
    mel_NML = torch.zeros(1, 27, 16)
    for clip in (Features(mel_NML, (1281, 1)), Features(mel_NML, (2561,)), Features(mel_NML[:, :5], (5,))):
        with pytest.raises(SoundError, match="clip 1"):
            own.embed([Features(mel_NML, (1281,)), clip])
    with pytest.raises(KernelInputError, match="a name for each of 1 clips, found 2"):
        own.embed([Features(mel_NML, (1281,))], ["a", "b"])


def test_nothing_to_embed_is_nothing() -> None:
    own = tower(CONFIG, torch.bfloat16)
    assert own.embed([]) == own.embed_sound([]) == []


def test_chunks_are_grouped_in_their_order_within_the_budget() -> None:
    chunks = [ChunkPlace("a", i, 1280 * tokens) for i, tokens in enumerate([3, 4, 9, 1, 1])]
    groups = [[chunk.tokens for chunk in group] for group in grouped(chunks, 7)]
    assert groups == [[3, 4], [9], [1, 1]]
    assert list(grouped([], 7)) == []


@pytest.mark.parametrize("pattern", [probe.pattern.replace("{i}", "1") for probe in AUDIO_PROBES])
def test_a_replaced_tensor_changes_the_embeddings_or_is_refused(pattern: str) -> None:
    given_clips = clips([CHUNK + 5000], CONFIG, torch.float64)
    own = tower(CONFIG, torch.float64)
    plain = own.embed(given_clips)[0]
    override = Override(pattern, lambda value, rows: value * 1.5)
    refusals = []
    with listening(override):
        try:
            assert not torch.allclose(own.embed(given_clips)[0], plain)
        except NotSupportedError as refusal:
            refusals.append(str(refusal))
    assert override.count
    assert all(pattern.rpartition(".")[2] in refusal for refusal in refusals)


def test_an_odd_number_of_rotated_lanes_is_refused() -> None:
    config = dataclasses.replace(CONFIG, partial_rotary_factor=0.25)
    weights = empty_audio(config, "cpu", torch.float32)
    with pytest.raises(NotSupportedError, match="expected an even number, found 3"):
        AudioTower(config, weights, tower(CONFIG, torch.float32).ops)


def checked(workload: ClipWorkload, level: str, spoil=lambda tower: None) -> CheckReport:
    """What `note-parity check --tower audio --candidate optimized` finds on the tiny checkpoint."""
    weights = dict(synthetic_tensors(TINY))

    def candidate(level: str) -> OptimizedAudio:
        if level == "exact":
            side = OptimizedAudio(TINY, weights, torch.float64, DEVICE, "torch")
        else:
            side = OptimizedAudio(TINY, weights, getattr(torch, level), DEVICE)
        spoil(side.tower)
        return side

    return check_audio_sides(
        lambda _: lambda dtype: ReferenceAudio(TINY, weights, dtype), candidate, [workload], (level,)
    )


@settings(max_examples=EXAMPLES)
@given(clip_workloads(CONFIG, max_clips=2))
def test_drawn_clips_agree_exactly(workload: ClipWorkload) -> None:
    found = checked(workload, "exact")
    assert found.compared
    assert found.first_different is None


@pytest.mark.parametrize("level", ["float32", "bfloat16"])
def test_kernels_agree_at_every_named_tensor(level: str) -> None:
    found = checked(ClipWorkload.parse("noise:1281 fading:33441 clicks:160"), level)
    assert {audio_pattern_of(probe.name) for run in found.runs for probe in run.comparison.probes} == {
        probe.pattern for probe in AUDIO_PROBES
    }
    assert found.first_different is None


def _positions_run_on(own: AudioTower) -> None:
    rotation = own.rotation
    own.rotation = lambda positions_T: rotation(torch.arange(len(positions_T), device=DEVICE))


def _symmetric_window(own: AudioTower) -> None:
    own._mel._window = torch.hann_window(400, periodic=False, dtype=own._mel.dtype, device=DEVICE)


def _other_biases(own: AudioTower) -> None:
    own.weights.layers[1].qkv_bias_X.fill_(0.3)


@pytest.mark.parametrize(
    ("spoil", "first"),
    [
        (_positions_run_on, "audio.layers.0.attn.query"),
        (_symmetric_window, "audio.mel"),
        (_other_biases, "audio.layers.1.attn.query"),
    ],
)
def test_a_spoiled_tower_is_seen_where_it_is_wrong(spoil, first: str) -> None:
    for level in ("exact", "bfloat16"):
        found = checked(ClipWorkload.parse("noise:40000"), level, spoil)
        assert found.first_different is not None
        assert found.first_different.comparison.first.name == first
