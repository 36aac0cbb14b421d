"""The audio side agrees with transformers, an independent implementation, from waveform or file to embeddings.

Each example writes a checkpoint to disk and both sides load it with their own code. Features have the same bits; the
tower agrees to 1e-10 with all rounding promoted to float64, and within the measured floor in float32 and bfloat16.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity.audio_check import check_audio, synthetic_audio_checkpoint, tiny_with_audio
from parity.audio_clips import KINDS, Clip, ClipError, ClipWorkload, FileClip, boundary_clips
from parity.audio_compare import compare_audio, first_different, traced_clips
from parity.audio_strategies import clip_workloads, drawn_clips, lengths
from parity.check import LEVELS
from parity.faults.audio import AUDIO_CONTROLS, AUDIO_FAULTS
from parity.faults.audio_verify import verify_audio
from parity.faults.catalogue import CATALOGUE
from parity.faults.fault import Fault
from parity.report.from_findings import report_of_check
from parity.runners import NotSupportedHere
from parity.runners.reference_audio import ReferenceAudio
from parity.runners.transformers_audio import TransformersAudio
from parity.schema_audio import (
    AUDIO_BOUNDARIES,
    AUDIO_FLOAT32,
    AUDIO_PROBES,
    audio_dataflow_key,
    audio_pattern_of,
    audio_probe_of,
)
from parity.tolerance import EXACT_LIMIT
from reference.checkpoint import synthetic_tensors, write_synthetic
from reference.config import AudioConfig, NoteConfig, tiny
from reference.errors import CheckpointError, ConfigError
from reference.media.mel import features
from reference.media.sound import SoundError
from reference.numerics import Numerics
from reference.probe import Override, listening

pytest.importorskip("transformers", reason="the oracle needs transformers 5.24")
for package in ("soundfile", "soxr", "av"):
    pytest.importorskip(package, reason="sound files need the extra `media`")

CONFIG = tiny_with_audio()
assert CONFIG.audio is not None
NUMERICS = Numerics.preset("transformers")
CHUNK = 32000
PATTERNS = {probe.pattern for probe in AUDIO_PROBES}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return dict(synthetic_tensors(CONFIG))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with synthetic_audio_checkpoint() as path:
        yield path


@pytest.fixture(scope="module")
def oracles(folder) -> dict[str, TransformersAudio]:
    return {
        level: TransformersAudio(folder, getattr(torch, level, torch.float64), exact_mode=level == "exact")
        for level in LEVELS
    }


@st.composite
def audio_configs(draw: st.DrawFn) -> AudioConfig:
    """Odd and small sizes; chunks of whole seconds, so that full ones may end in the middle of a token."""
    heads, pairs, passed = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 9))
    head_dim = 2 * pairs + passed
    assume(int(head_dim * (2 * pairs / head_dim)) == 2 * pairs)
    return AudioConfig(
        d_model=heads * head_dim,
        encoder_layers=draw(st.integers(1, 2)),
        encoder_attention_heads=heads,
        encoder_ffn_dim=draw(st.integers(1, 20)),
        num_mel_bins=draw(st.integers(2, 40)),
        max_source_positions=6000,
        downsample_hidden_size=draw(st.integers(1, 9)),
        sampling_rate=16000,
        chunk_seconds=draw(st.integers(1, 3)),
        rope_theta=draw(st.sampled_from([1e2, 1e4])),
        partial_rotary_factor=2 * pairs / head_dim,
        adapter_out_dim=tiny().text.hidden_size,
    )


@contextmanager
def checkpoint(config: NoteConfig, seed: int) -> Iterator[Path]:
    with TemporaryDirectory() as parent:
        write_synthetic(Path(parent) / "c", config, seed)
        yield Path(parent) / "c"


@settings(max_examples=15)
@given(audio_configs(), st.data(), st.integers(0, 99))
def test_drawn_models_agree_exactly(audio, data, seed):
    config = dataclasses.replace(tiny(), audio=audio)
    workload = data.draw(clip_workloads(audio, max_clips=2))
    with checkpoint(config, seed) as folder:
        oracle = TransformersAudio(folder, torch.float64, exact_mode=True)
        trace = traced_clips(oracle, workload)
    weights = dict(synthetic_tensors(config, seed))

    def reference(dtype: torch.dtype) -> ReferenceAudio:
        return ReferenceAudio(config, weights, dtype, NUMERICS, exact_mode=True)

    found = compare_audio(reference, trace, torch.float64, workload, ("cascade",), draws=0)
    assert not oracle.lower_precision_ops
    assert first_different(found) is None
    assert {audio_pattern_of(result.name) for result in found.probes} == PATTERNS
    assert all(result.error <= EXACT_LIMIT and result.rows and not result.missing_rows for result in found.probes)


@given(clip_workloads(CONFIG.audio))
@example(ClipWorkload.parse("noise:1 noise:159 noise:160 noise:1279 noise:1280 noise:1281"))
@example(ClipWorkload.parse("noise:31999 noise:32000 noise:32001 noise:64000 noise:65281"))
@example(ClipWorkload.parse("silence:5000 clipped:5000 constant:5000 clicks:5000"))
def test_drawn_clips_agree_exactly(oracles, weights, workload):
    trace = traced_clips(oracles["exact"], workload)
    event(f"{sum(len(trace.keys('audio.adapted', clip.name)) for clip in workload.clips) // 20 * 20}+ tokens")

    def reference(dtype: torch.dtype) -> ReferenceAudio:
        return ReferenceAudio(CONFIG, weights, dtype, NUMERICS, exact_mode=True)

    found = compare_audio(reference, trace, torch.float64, workload, ("cascade",), draws=0)
    assert first_different(found) is None
    assert all(result.verdict in ("bitwise equal", "close") for result in found.probes)


@given(st.sampled_from(list(KINDS)), lengths(CONFIG.audio), st.integers(0, 99))
def test_features_have_the_same_bits(oracles, kind, samples, seed):
    clip = Clip(kind, samples, seed=seed)
    theirs, theirs_samples = oracles["float32"].features(clip)
    ours = features(clip.waveform(), CONFIG.audio)
    assert ours.samples == theirs_samples
    assert torch.equal(ours.mel_NML[:, :, : theirs.shape[2]], theirs)
    assert theirs.shape[2] == 8 * max(-(-count // 1280) for count in theirs_samples)


@pytest.mark.parametrize("level", ["float32", "bfloat16"])
@settings(max_examples=5)
@given(workload=clip_workloads(CONFIG.audio, max_clips=2))
def test_drawn_clips_agree_within_the_floor(oracles, weights, level, workload):
    dtype = getattr(torch, level)
    trace = traced_clips(oracles[level], workload)

    def reference(wanted: torch.dtype) -> ReferenceAudio:
        return ReferenceAudio(CONFIG, weights, wanted, NUMERICS)

    found = compare_audio(reference, trace, dtype, workload, ("cascade", "isolated", "pinpoint"))
    assert first_different(found) is None
    assert len(found.probes) == 3 * len(trace.names())


def test_the_check_of_a_checkpoint(folder):
    workloads = (*boundary_clips(CONFIG.audio)[1:3], *drawn_clips(CONFIG.audio, 1))
    lines: list[str] = []
    report = check_audio(folder, workloads, progress=lines.append)
    assert report.first_different is None
    assert [level.level for level in report.levels] == list(LEVELS)
    assert all(level.workloads == 3 and level.tensors for level in report.levels)
    assert len(lines) == 9
    shown = report_of_check(report)
    assert (shown.verdict, shown.totals.missing, shown.totals.different) == ("agrees", 0, 0)
    names = {row.tensor for row in shown.rows}
    assert "audio.adapted" in names
    assert "audio.layers.2.attn.core" in names


@pytest.mark.parametrize("name", ["talk.wav", "talk.flac", "talk.mp3", "stereo.wav"])
def test_from_a_file_to_embeddings(oracles, weights, tmp_path, name):
    import soundfile

    rate = 44100 if name == "stereo.wav" else 16000
    seconds = np.arange(3 * rate) / rate
    left = 0.4 * np.sin(2 * np.pi * 330 * seconds * (1 + 0.1 * seconds))
    samples = np.stack((left, 0.2 * np.cos(2 * np.pi * 997 * seconds)), axis=1) if rate == 44100 else left
    soundfile.write(tmp_path / name, samples, rate)
    workload = ClipWorkload.parse(f"file:{tmp_path / name}")
    for level, dtype in (("exact", torch.float64), ("bfloat16", torch.bfloat16)):
        is_exact = level == "exact"
        trace = traced_clips(oracles[level], workload)

        def reference(wanted: torch.dtype, is_exact: bool = is_exact) -> ReferenceAudio:
            return ReferenceAudio(CONFIG, weights, wanted, NUMERICS, is_exact)

        found = compare_audio(reference, trace, dtype, workload, ("cascade",), draws=0 if is_exact else 8)
        assert first_different(found) is None
        assert sum(result.rows for result in found.probes if result.name == "audio.adapted") == 38


class TestFaults:
    @pytest.mark.parametrize("fault", AUDIO_FAULTS, ids=lambda fault: fault.id)
    def test_a_fault_is_seen_where_the_catalogue_says_and_nowhere_else(self, fault, weights):
        outcome = verify_audio(fault, CONFIG, weights, boundary_clips(CONFIG.audio))
        assert outcome.is_as_expected, f"first at {outcome.first}, expected {fault.first}"

    VISIBLE = tuple(fault for fault in AUDIO_FAULTS if fault.visibility in ("V", "L"))

    @pytest.mark.parametrize("fault", VISIBLE, ids=lambda fault: fault.id)
    def test_a_visible_fault_reaches_the_embeddings(self, fault, weights):
        for workload in boundary_clips(CONFIG.audio):
            right, faulty = embeddings(weights, workload), embeddings(weights, workload, fault)
            for expected, actual in zip(right, faulty, strict=True):
                if actual.shape != expected.shape or (actual - expected).norm() > EXACT_LIMIT * expected.norm():
                    return
        pytest.fail("no embedding changed")

    @pytest.mark.parametrize("fault", AUDIO_FAULTS, ids=lambda fault: fault.id)
    def test_a_fault_is_undone(self, fault, weights):
        workload = ClipWorkload.parse("noise:1281 opposed:3000@8000")
        before = [vars(patch.owner)[patch.attribute] for patch in fault.patches]
        right = embeddings(weights, workload)
        embeddings(weights, workload, fault)
        assert [vars(patch.owner)[patch.attribute] for patch in fault.patches] == before
        again = embeddings(weights, workload)
        assert all(torch.equal(one, other) for one, other in zip(right, again, strict=True))

    @pytest.mark.parametrize("control", AUDIO_CONTROLS, ids=lambda control: control.id)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_a_control_is_no_difference(self, control, dtype, weights):
        workload = ClipWorkload.parse("noise:2561 fading:33440")
        trace = traced_clips(ReferenceAudio(CONFIG, weights, dtype, faults=(control,)), workload)
        draws, views = (0, ("cascade",)) if dtype == torch.float64 else (8, ("cascade", "isolated"))
        found = compare_audio(
            lambda wanted: ReferenceAudio(CONFIG, weights, wanted), trace, dtype, workload, views, draws
        )
        assert first_different(found) is None

    def test_the_texts(self):
        assert len(AUDIO_FAULTS) >= 40
        ids = [fault.id for fault in AUDIO_FAULTS]
        assert len(set(ids)) == len(ids)
        assert not set(ids) & {fault_id for fault_id, fault in CATALOGUE.items() if fault not in AUDIO_FAULTS}
        for fault in AUDIO_FAULTS:
            assert fault.first
            assert set(fault.first) | set(fault.hides_in) <= PATTERNS
            assert fault.says
            assert not fault.says.endswith(".")
            assert fault.visible_when
            assert fault.source
            assert fault.patches or fault.config or fault.weights


def embeddings(weights: dict[str, Tensor], workload: ClipWorkload, *faults: Fault) -> list[Tensor]:
    side = ReferenceAudio(CONFIG, weights, torch.float64, faults=faults)
    return [side.embed(clip) for clip in workload.clips]


class TestComparison:
    """What the comparison calls different besides values."""

    workload = ClipWorkload.parse("noise:1281")

    def found(self, weights, trace):
        return compare_audio(
            lambda dtype: ReferenceAudio(CONFIG, weights, dtype), trace, torch.float64, self.workload, ("cascade",), 0
        )

    def test_a_token_too_few(self, weights):
        fault = next(fault for fault in AUDIO_FAULTS if fault.id == "drop_masked_token")
        trace = traced_clips(ReferenceAudio(CONFIG, weights, torch.float64, faults=(fault,)), self.workload)
        adapted = next(result for result in self.found(weights, trace).probes if result.name == "audio.adapted")
        assert (adapted.verdict, adapted.rows, adapted.missing_rows) == ("different", 1, 1)

    def test_a_tensor_that_was_not_recorded(self, weights):
        trace = traced_clips(ReferenceAudio(CONFIG, weights, torch.float64), ClipWorkload.parse("noise:1280"))
        found = self.found(weights, trace)
        assert {result.verdict for result in found.probes} == {"missing"}
        assert first_different(found) is None

    def test_pinpoint_blames_one_operation(self, weights):
        fault = next(fault for fault in AUDIO_FAULTS if fault.id == "audio_causal_mask")
        workload = ClipWorkload.parse("noise:9000")
        trace = traced_clips(ReferenceAudio(CONFIG, weights, torch.float64, faults=(fault,)), workload)
        names = {}
        for view in ("cascade", "isolated", "pinpoint"):
            found = compare_audio(
                lambda dtype: ReferenceAudio(CONFIG, weights, dtype), trace, torch.float64, workload, (view,), 0
            )
            names[view] = {result.name for result in found.probes if result.verdict == "different"}
        assert names["pinpoint"] == {f"audio.layers.{i}.attn.core" for i in range(3)}
        assert "audio.final_norm" not in names["isolated"]
        assert "audio.adapted" in names["cascade"]
        assert names["pinpoint"] < names["isolated"] < names["cascade"]


class TestOracle:
    def test_with_and_without_listeners(self, oracles):
        clip = Clip("noise", CHUNK + 1281)
        traced = traced_clips(oracles["bfloat16"], ClipWorkload((clip,)))
        assert torch.equal(traced.table("audio.adapted", clip.name).values, oracles["bfloat16"].embed(clip))
        assert {audio_pattern_of(name) for name in traced.names()} == PATTERNS

    def test_it_cannot_be_overridden(self, oracles):
        with (
            pytest.raises(NotSupportedHere, match=r"audio\.stem"),
            listening(Override("audio.stem", lambda value, rows: value + 1)),
        ):
            oracles["float32"].embed(Clip("noise", 2000))

    def test_a_folder_without_audio(self, tmp_path):
        write_synthetic(tmp_path / "c", tiny())
        with pytest.raises(CheckpointError, match="no audio tower"):
            TransformersAudio(tmp_path / "c", torch.float32)
        with pytest.raises(CheckpointError, match="no audio tower"):
            check_audio(tmp_path / "c")

    def test_a_single_mel_bin(self, tmp_path):
        """transformers would fill up a chunk along the bins too: 7 TB for 60 s."""
        config = dataclasses.replace(CONFIG, audio=dataclasses.replace(CONFIG.audio, num_mel_bins=1))
        write_synthetic(tmp_path / "c", config)
        with pytest.raises(NotSupportedHere, match="one mel bin"):
            TransformersAudio(tmp_path / "c", torch.float32)

    def test_a_config_without_audio(self):
        with pytest.raises(ConfigError, match="no audio tower"):
            ReferenceAudio(tiny(), {})

    def test_nan_is_refused(self, tmp_path, weights):
        import soundfile

        soundfile.write(tmp_path / "a.wav", np.array([0.0, np.nan, 0.0]), 16000, subtype="FLOAT")
        with pytest.raises(SoundError, match="sample 1"):
            ReferenceAudio(CONFIG, weights).embed(FileClip(str(tmp_path / "a.wav")))


class TestWords:
    @pytest.mark.parametrize("word", ["noise:1", "opposed:44100@44100", "clicks:9/video", "tone:8000@8000/video"])
    def test_a_word_is_its_clip(self, word):
        clip = Clip.parse(word)
        assert clip.name == word
        assert clip.samples_SC.shape == (clip.samples, 2 if clip.kind == "opposed" else 1)

    @pytest.mark.parametrize("word", ["noise", "noise:0", "noise:-1", "roar:100", "noise:100@", "noise:1 noise:2"])
    def test_other_words(self, word):
        with pytest.raises(ClipError, match=r"KIND:SAMPLES"):
            Clip.parse(word)

    @pytest.mark.parametrize("line", ["", "noise:5 noise:5"])
    def test_lines(self, line):
        with pytest.raises(ClipError, match="at least one clip"):
            ClipWorkload.parse(line)

    def test_paths_that_a_line_cannot_hold_are_refused(self):
        with pytest.raises(ClipError, match=r"'talk\.wav' is no clip; .*a path has no spaces"):
            ClipWorkload.parse("noise:5 talk.wav")
        for line in ("file:", "noise:5 file:"):
            with pytest.raises(ClipError, match="must be given and have no spaces"):
                ClipWorkload.parse(line)
        with pytest.raises(ClipError, match="must be given and have no spaces"):
            FileClip("my talk.wav")

    def test_the_same_words_give_the_same_sound(self):
        one, other = (ClipWorkload.parse("noise:5 tone:7", seed=3) for _ in range(2))
        assert all(torch.equal(a.waveform(), b.waveform()) for a, b in zip(one.clips, other.clips, strict=True))
        assert not torch.equal(Clip("noise", 50).waveform(), Clip("noise", 50, seed=1).waveform())
        assert Clip("noise", 4).samples_SC.flatten().mul(32768).tolist() == [2243.0, -3772.0, -7521.0, -7922.0]
        assert one.tokens == 2

    def test_drawn_workloads_can_be_replayed(self):
        drawn = drawn_clips(CONFIG.audio, 3, seed=5)
        assert drawn == drawn_clips(CONFIG.audio, 3, seed=5)
        assert all(ClipWorkload.parse(workload.text(), workload.seed) == workload for workload in drawn)


class TestSchema:
    def test_patterns_and_order(self):
        names = [probe.pattern.replace("{i}", layer) for layer in "01" for probe in AUDIO_PROBES]
        ordered = sorted(set(names), key=audio_dataflow_key)
        assert ordered[0] == "audio.mel"
        assert ordered[-1] == "audio.adapted"
        assert ordered.index("audio.layers.0.output") + 1 == ordered.index("audio.layers.1.input")
        assert {audio_pattern_of(name) for name in names} == PATTERNS
        assert audio_probe_of("audio.layers.7.attn.core").dims == "T H X"
        assert audio_probe_of("audio.layers.7.attn.gate") is None
        assert AUDIO_BOUNDARIES <= PATTERNS
        assert {"audio.mel"} == AUDIO_FLOAT32

    def test_dims_are_those_of_the_reference(self, weights):
        trace = traced_clips(ReferenceAudio(CONFIG, weights), ClipWorkload.parse("noise:5000"))
        assert {audio_pattern_of(name) for name in trace.names()} == PATTERNS
        sizes = {
            "audio.mel": (32, 27),
            "audio.stem.input": (32, 1, 27),
            "audio.stem.conv1": (16, 9, 14),
            "audio.stem.conv2": (8, 9, 7),
            "audio.stem.conv3": (4, 9, 4),
            "audio.layers.0.attn.query": (4, 5, 12),
            "audio.layers.0.ffn.activated": (4, 44),
            "audio.adapter.hidden": (4, 96),
        }
        for name in trace.names():
            shape = tuple(trace.table(name, "noise:5000").values.shape)
            assert shape == sizes.get(name, shape)
            assert len(shape) == len(audio_probe_of(name).dims.split())
        assert trace.table("audio.mel", "noise:5000").values.dtype == torch.float32
