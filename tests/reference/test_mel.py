"""Sound files and log-mel features: the specification's golden values, an independent formula, lengths, and refusals.

Source: audio specification, sections 2 to 5; cases C55, C56 and C57.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from reference.audio import tiny_audio
from reference.config import AudioConfig, released
from reference.errors import MissingPackageError
from reference.media import mel
from reference.media.mel import (
    audio_tokens,
    check_placeholders,
    chunk_lengths,
    corner_frequencies,
    features,
    hann_window,
    mel_filter_bank,
    stage_frames,
    token_count,
)
from reference.media.sound import (
    MAX_SECONDS,
    SoundError,
    decode,
    load_waveform,
    refuse_non_finite,
    resample,
    through_int16,
    to_mono,
)

RELEASED = released().audio
assert RELEASED is not None
TINY = tiny_audio()
CHUNK = 32000  # samples of a chunk of TINY
GOLDEN_TOLERANCE = 2e-4  # stated with the golden values
needs_soundfile = pytest.mark.skipif(
    not all(find_spec(name) for name in ("soundfile", "soxr", "av")),
    reason="sound files need the extra `media`",
)


def tone(samples: int, hz: float = 440.0, rate: int = 16000) -> Tensor:
    return torch.from_numpy((0.5 * np.sin(2 * np.pi * hz * np.arange(samples) / rate)).astype(np.float32))


def noise(samples: int, seed: int = 0, scale: float = 0.1) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) * scale


def band_limited(samples: int, rate: int, highest_hz: float) -> Tensor:
    spectrum = torch.fft.rfft(noise(samples))
    return torch.fft.irfft(spectrum * (torch.fft.rfftfreq(samples, 1 / rate) < highest_hz), n=samples)


class TestFilterBank:
    """Golden values of section 4.1, float64."""

    bank_KM = mel_filter_bank(128, 16000)

    def test_sums(self):
        assert self.bank_KM.shape == (201, 128)
        assert self.bank_KM.dtype == torch.float64
        assert int((self.bank_KM > 0).sum()) == 394
        assert bool((self.bank_KM > 0).any(0).all()), "an empty filter"
        assert float(self.bank_KM.sum()) == pytest.approx(3.1909855285406996, rel=1e-14)
        assert float(self.bank_KM.max()) == pytest.approx(0.04168174928351783, rel=1e-13)

    def test_rows(self):
        near = pytest.approx
        assert self.bank_KM[1, :4].tolist() == near([0.01237399, 0.03039256, 0, 0], abs=1e-8)
        assert self.bank_KM[2, :4].tolist() == near([0, 0, 0.02474797, 0.01801858], abs=1e-8)
        assert self.bank_KM[100].nonzero().flatten().tolist() == [99, 100]
        assert self.bank_KM[100, 99:101].tolist() == near([0.00778917, 0.00257835], abs=1e-8)
        assert float(self.bank_KM[199, 127]) == near(0.0011142802, abs=1e-10)
        assert not self.bank_KM[200].any()

    def test_corners(self):
        corners = corner_frequencies(128)
        assert len(corners) == 130
        assert corners[[1, 64, 128]].tolist() == pytest.approx([23.382759933811354, 1668.66748188, 7809.3946175])
        assert mel.mel_of_hz(8000.0) == pytest.approx(45.245640471924965, rel=1e-15)
        assert float(corners[-1]) == pytest.approx(8000.0)

    def test_the_scale_and_its_inverse(self):
        for hz in (0.0, 999.0, 1000.0, 1001.0, 7999.0):
            assert float(mel.hz_of_mel(torch.tensor(mel.mel_of_hz(hz), dtype=torch.float64))) == pytest.approx(hz)

    def test_window(self):
        window = hann_window(torch.float64)
        assert float(window.sum()) == pytest.approx(200.0)
        assert float(window.square().sum()) == pytest.approx(150.0)
        assert window[0] == 0.0
        assert window[-1] > 0.0


class TestGoldenFeatures:
    """Section 4.2: one second of 440 Hz at half of full scale."""

    made = features(tone(16000), RELEASED)
    mel_ML = made.mel_NML[0]

    @pytest.mark.parametrize(
        ("m", "t", "value"),
        [
            (18, 13, 1.4853541),
            (0, 0, 0.9075196),
            (20, 0, 1.3302985),
            (17, 50, 1.3374910),
            (19, 50, 1.2752443),
            (20, 50, 1.2873930),
            (127, 50, -0.5146459),
            (0, 200, -0.5146459),
        ],
    )
    def test_values(self, m, t, value):
        assert float(self.mel_ML[m, t]) == pytest.approx(value, abs=GOLDEN_TOLERANCE)

    def test_loudest(self):
        """The tone repeats every 11 frames: frame 13 is one of several that are equally loud but for rounding."""
        assert int(self.mel_ML.argmax()) // 6000 == 18
        assert float(self.mel_ML[18, 13]) == pytest.approx(float(self.mel_ML.max()), abs=1e-6)
        assert float(self.mel_ML.max()) * 4 - 4 == pytest.approx(1.9414165, abs=GOLDEN_TOLERANCE)

    def test_the_end_of_the_sound(self):
        """Frames 100 and 101 overlap the sound, although only 100 frames are valid."""
        peaks = [float(self.mel_ML[:, t].max()) for t in (99, 100, 101)]
        assert peaks == pytest.approx([1.4839882, 1.3349286, 0.4146124], abs=GOLDEN_TOLERANCE)
        assert float(self.mel_ML[:, :100].mean()) == pytest.approx(-0.4253238, abs=GOLDEN_TOLERANCE)

    def test_form(self):
        assert self.made.mel_NML.shape == (1, 128, 6000)
        assert self.made.mel_NML.dtype == torch.float32
        assert self.made.samples == (16000,)
        assert self.made.tokens == 13


def by_formula(samples: np.ndarray, config: AudioConfig, frames: list[int]) -> np.ndarray:
    """log10 of the floored mel power of some frames, written with sums, without padding or FFT: float64 [frames, M]."""
    size = config.sampling_rate * config.chunk_seconds
    chunk = np.zeros(size)
    chunk[: len(samples)] = samples
    n, k = np.arange(400), np.arange(201)
    waves = np.exp(-2j * np.pi * np.outer(n, k) / 400) * (0.5 - 0.5 * np.cos(2 * np.pi * n / 400))[:, None]
    bank = mel_filter_bank(config.num_mel_bins, config.sampling_rate).numpy()
    rows = []
    for t in frames:
        at = 160 * t - 200 + n
        at = np.where(at < 0, -at, at)
        at = np.where(at > size - 1, 2 * (size - 1) - at, at)
        rows.append(np.log10(np.maximum(np.abs(chunk[at] @ waves) ** 2 @ bank, 1e-10)))
    return np.array(rows)


@pytest.mark.parametrize("samples", [1, 200, 8000, CHUNK - 1, CHUNK])
@pytest.mark.parametrize("kind", ["noise", "clicks"])
def test_features_are_the_formula(samples, kind):
    """Both edges included; the clicks are those of case C57."""
    x = noise(samples)
    if kind == "clicks":
        x = torch.zeros(samples)
        x[0] = x[-1] = 0.7
    log = by_formula(x.double().numpy(), TINY, list(range(200)))
    expected = (np.maximum(log, log.max() - 8) + 4) / 4
    made = features(x.double(), TINY, torch.float64)
    assert np.abs(made.mel_NML[0].numpy().T - expected).max() < 1e-10
    assert (features(x, TINY).mel_NML[0].double() - made.mel_NML[0]).abs().max() < 1e-3


def test_silence_is_the_floor():
    assert torch.equal(features(torch.zeros(16000), TINY).mel_NML, torch.full((1, 27, 200), -1.5))


def test_each_chunk_has_its_own_maximum():
    """Case C56: what a chunk is does not depend on another, and a common maximum would show."""
    loud, quiet = noise(60 * 16000), noise(10 * 16000, seed=1, scale=1e-4)
    both = features(torch.cat((loud, quiet)), RELEASED)
    alone = features(quiet, RELEASED)
    assert torch.equal(both.mel_NML[1], alone.mel_NML[0])
    assert both.samples == (960000, 160000)
    # The floor is two units below each chunk's maximum, or that of silence.
    assert float(both.mel_NML[0].max() - both.mel_NML[0].min()) <= 2.0
    assert float(both.mel_NML[1].min()) < float(both.mel_NML[0].max()) - 2.0


@given(st.integers(1, 3 * CHUNK), st.integers(0, 99))
@example(CHUNK, 0)
@example(CHUNK + 1, 0)
@example(2 * CHUNK - 1, 0)
def test_chunks_are_on_their_own(samples, seed):
    x = noise(samples, seed)
    made = features(x, TINY)
    parts = [features(part, TINY) for part in x.split(CHUNK)]
    assert torch.equal(made.mel_NML, torch.cat([part.mel_NML for part in parts]))
    assert made.samples == tuple(part.samples[0] for part in parts) == chunk_lengths(samples, TINY)
    assert made.tokens == audio_tokens(samples, TINY) == -(-samples // 1280)


@given(st.sampled_from(["clipped", "constant", "quiet", "tone"]), st.integers(1, CHUNK))
def test_any_signal_gives_finite_features(kind, samples):
    x = {
        "clipped": (noise(samples, scale=100.0)).clamp(-1, 1),
        "constant": torch.full((samples,), 0.5),
        "quiet": noise(samples, scale=1e-30),
        "tone": tone(samples, 7990.0),
    }[kind]
    made = features(x, TINY).mel_NML
    assert made.isfinite().all()
    assert float(made.min()) >= -1.5
    assert float(made.max() - made.min()) <= 2.0 + 1e-6


# Section 5: samples, tokens, and of each chunk its samples, tokens and valid frames behind each stage.
LENGTHS = [
    (1, 1, [(1, 1, (0, 0, 0, 0))]),
    (159, 1, [(159, 1, (0, 0, 0, 0))]),
    (160, 1, [(160, 1, (1, 1, 1, 1))]),
    (1279, 1, [(1279, 1, (7, 4, 2, 1))]),
    (1280, 1, [(1280, 1, (8, 4, 2, 1))]),
    (1281, 2, [(1281, 2, (8, 4, 2, 1))]),
    (1439, 2, [(1439, 2, (8, 4, 2, 1))]),
    (1440, 2, [(1440, 2, (9, 5, 3, 2))]),
    (2561, 3, [(2561, 3, (16, 8, 4, 2))]),
    (8000, 7, [(8000, 7, (50, 25, 13, 7))]),
    (16000, 13, [(16000, 13, (100, 50, 25, 13))]),
    (480000, 375, [(480000, 375, (3000, 1500, 750, 375))]),
    (960000, 750, [(960000, 750, (6000, 3000, 1500, 750))]),
    (960001, 751, [(960000, 750, (6000, 3000, 1500, 750)), (1, 1, (0, 0, 0, 0))]),
    (961440, 752, [(960000, 750, (6000, 3000, 1500, 750)), (1440, 2, (9, 5, 3, 2))]),
    (1920000, 1500, [(960000, 750, (6000, 3000, 1500, 750))] * 2),
]


class TestLengths:
    @pytest.mark.parametrize(("samples", "tokens", "chunks"), LENGTHS)
    def test_table(self, samples, tokens, chunks):
        lengths = chunk_lengths(samples, RELEASED)
        assert [(n, token_count(n), stage_frames(n)) for n in lengths] == chunks
        assert audio_tokens(samples, RELEASED) == tokens

    @pytest.mark.parametrize(
        ("seconds", "tokens"), [("7.3", 92), ("30", 375), ("60", 750), ("60.01", 750 + 1), ("65", 750 + 63)]
    )
    def test_durations(self, seconds, tokens):
        """Case C55."""
        assert audio_tokens(round(float(seconds) * 16000), RELEASED) == tokens

    def test_how_often_the_last_token_is_masked(self):
        masked = sum(token_count(n) != stage_frames(n)[-1] for n in range(1, 960001))
        assert masked == 119250
        assert all((token_count(n) > stage_frames(n)[-1]) == (1 <= n % 1280 <= 159) for n in range(1, 4000))

    def test_a_prompt_with_another_number(self):
        check_placeholders(2, 1281, RELEASED)
        with pytest.raises(SoundError, match=r"1 audio placeholders.*1281 samples.*2 tokens"):
            check_placeholders(1, 1281, RELEASED)


class TestRefusals:
    @pytest.mark.parametrize(
        ("samples", "told"),
        [
            (torch.zeros(0), "no samples"),
            (torch.zeros(2, 100), r"\(2, 100\)"),
            (torch.zeros(100, dtype=torch.int16), "int16"),
            (torch.tensor([0.0, float("nan"), 1.0]), "first is sample 1"),
            (torch.tensor([0.0, 0.0, float("-inf")]), "first is sample 2"),
        ],
    )
    def test_waveforms(self, samples, told):
        with pytest.raises(SoundError, match=told):
            features(samples, TINY)

    def test_many_channels(self):
        with pytest.raises(SoundError, match="2 of 3 samples"):
            refuse_non_finite(torch.tensor([[0.0, float("nan")], [0.0, 0.0], [float("inf"), 0.0]]), "it")


class TestChannels:
    opposed_SC = torch.stack((tone(100), -tone(100)), dim=1)

    def test_rules_differ_on_opposite_phases(self):
        assert not to_mono(self.opposed_SC).any()
        assert torch.equal(to_mono(self.opposed_SC, "first"), tone(100))

    def test_one_channel_is_kept(self):
        for rule in ("mean", "first"):
            assert torch.equal(to_mono(tone(100)[:, None], rule), tone(100))

    def test_refusals(self):
        with pytest.raises(SoundError, match="'mean' and 'first'"):
            to_mono(self.opposed_SC, "loudest")
        with pytest.raises(SoundError, match=r"\(100,\)"):
            to_mono(tone(100))


def test_the_route_of_a_video():
    x = torch.tensor([0.0, 1.0, -1.0, 1.5, -1.5, 0.99999, -0.00001, 0.5])
    expected = torch.tensor([0, 32767, -32767, 32767, -32767, 32766, 0, 16383]) / 32768
    assert torch.equal(through_int16(x), expected)
    assert (through_int16(tone(1000)) - tone(1000)).abs().max() <= 2 / 32768


@needs_soundfile
class TestResampling:
    def test_the_same_rate_changes_nothing(self):
        assert torch.equal(resample(noise(100), 16000), noise(100))

    @pytest.mark.parametrize("resampler", ["soxr", "swresample"])
    @pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
    def test_a_tone_stays_the_tone(self, rate, resampler):
        made = resample(tone(rate, 1000.0, rate), rate, resampler=resampler)
        assert made.dtype == torch.float32
        assert abs(len(made) - 16000) <= 1
        inside = slice(1000, 15000)
        assert (made[inside] - tone(16000, 1000.0)[inside]).abs().max() < 1e-3

    def test_how_far_the_two_are_apart(self):
        """What the module says: below 1 % for noise up to 7 kHz, about 10 % where both cut off."""
        apart = []
        for highest_hz in (7000.0, 22050.0):
            x = band_limited(88200, 44100, highest_hz)
            by_soxr, by_swresample = (resample(x, 44100, resampler=name) for name in ("soxr", "swresample"))
            assert len(by_soxr) == len(by_swresample) == 32000
            apart.append(float((by_soxr - by_swresample).norm() / by_soxr.norm()))
        assert 1e-4 < apart[0] < 0.01
        assert 0.05 < apart[1] < 0.2

    def test_refusals(self):
        with pytest.raises(SoundError, match="'soxr' and 'swresample'"):
            resample(noise(100), 8000, resampler="linear")


def write(path: Path, samples_SC: Tensor, rate: int = 16000) -> Path:
    import soundfile

    soundfile.write(path, samples_SC.numpy(), rate)
    return path


@needs_soundfile
class TestFiles:
    @pytest.mark.parametrize("suffix", ["wav", "flac"])
    def test_lossless_files(self, tmp_path, suffix):
        steps_SC = (noise(5000)[:, None] * 32768).round().clamp(-32768, 32767) / 32768
        path = write(tmp_path / f"a.{suffix}", steps_SC)
        assert torch.equal(decode(path).samples_SC, steps_SC)
        assert torch.equal(load_waveform(path), steps_SC[:, 0])
        assert torch.equal(load_waveform(path.read_bytes()), steps_SC[:, 0])
        assert torch.equal(load_waveform(str(path)), steps_SC[:, 0])

    @pytest.mark.parametrize("suffix", ["mp3", "ogg"])
    def test_lossy_files(self, tmp_path, suffix):
        made = load_waveform(write(tmp_path / f"a.{suffix}", tone(16000)[:, None]))
        assert len(made) == 16000
        inside = slice(1500, 14500)
        assert (made[inside] - tone(16000)[inside]).norm() < 0.02 * tone(16000)[inside].norm()

    def test_stereo_at_another_rate(self, tmp_path):
        both = torch.stack((tone(44100, 440.0, 44100), 0 * tone(44100)), dim=1)
        path = write(tmp_path / "a.wav", both, 44100)
        sound = decode(path)
        assert (sound.rate, tuple(sound.samples_SC.shape)) == (44100, (44100, 2))
        inside = slice(1000, 15000)
        mean, first = load_waveform(path), load_waveform(path, channels="first")
        assert (first[inside] - tone(16000)[inside]).abs().max() < 1e-3
        assert (mean[inside] - 0.5 * tone(16000)[inside]).abs().max() < 1e-3

    def test_float_files(self, tmp_path):
        import soundfile

        loud_SC = 3.0 * tone(100)[:, None]
        soundfile.write(tmp_path / "a.wav", loud_SC.numpy(), 16000, subtype="FLOAT")
        assert torch.equal(decode(tmp_path / "a.wav").samples_SC, loud_SC)
        loud_SC[7] = float("nan")
        soundfile.write(tmp_path / "b.wav", loud_SC.numpy(), 16000, subtype="FLOAT")
        with pytest.raises(SoundError, match=r"b\.wav: 1 of 100 samples.*sample 7"):
            decode(tmp_path / "b.wav")

    @pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "aiff"])
    @pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
    def test_files_cut_short(self, tmp_path, suffix, share):
        whole = write(tmp_path / f"a.{suffix}", noise(30000)[:, None]).read_bytes()
        (tmp_path / f"cut.{suffix}").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(SoundError, match=rf"cut\.{suffix}: is (cut short|damaged)"):
            decode(tmp_path / f"cut.{suffix}")

    def test_a_stream_whose_header_knows_no_size(self, tmp_path):
        whole = bytearray(write(tmp_path / "a.wav", tone(1000)[:, None]).read_bytes())
        whole[4:8] = b"\xff\xff\xff\xff"
        assert len(decode(bytes(whole)).samples_SC) == 1000

    @pytest.mark.parametrize("id3", [b"", b"ID3\x03\x00\x00\x00\x00\x04\x00" + bytes(512)])
    def test_an_mp3_that_does_not_say_how_long_it_is(self, tmp_path, id3):
        """Half of it silent: from the rate of its first frame libsndfile would take it for half as long."""
        x = noise(60000)
        x[20000:40000] *= 0.001
        tagged = write(tmp_path / "a.mp3", x[:, None]).read_bytes()
        second_frame = tagged.index(tagged[:2], 20)
        path = tmp_path / "b.mp3"
        path.write_bytes(id3 + tagged[second_frame:])
        whole = decode(id3 + tagged).samples_SC
        assert len(whole) == 60000
        for source in (path, path.read_bytes()):
            # Without a tag nobody knows how many samples at the start are the encoder's delay.
            untagged = decode(source).samples_SC[:, 0]
            assert 60000 <= len(untagged) < 63000
            delay = next(d for d in range(3000) if torch.allclose(untagged[d : d + 9000], whole[:9000, 0], atol=1e-3))
            assert torch.allclose(untagged[delay : delay + 50000], whole[:50000, 0], atol=1e-3)
        with pytest.raises(SoundError, match="longer than the limit of 48000 samples"):
            decode(path, max_seconds=3.0)

    def test_no_sound(self, tmp_path):
        (tmp_path / "empty.wav").write_bytes(b"")
        (tmp_path / "text.wav").write_text("not a sound at all")
        (tmp_path / "folder.wav").mkdir()
        for name in ("empty.wav", "text.wav"):
            with pytest.raises(SoundError, match=rf"{name}: cannot be opened as sound \(Format not recognised"):
                decode(tmp_path / name)
        for name in ("folder.wav", "missing.wav"):
            with pytest.raises(SoundError, match=rf"{name}: not a file"):
                decode(tmp_path / name)
        with pytest.raises(SoundError, match="sound of 3 bytes: cannot be opened"):
            decode(b"abc")

    def test_no_samples(self, tmp_path):
        with pytest.raises(SoundError, match=r"a\.wav: has no samples"):
            decode(write(tmp_path / "a.wav", torch.zeros(0, 1)))

    def test_too_long(self, tmp_path):
        path = write(tmp_path / "a.wav", tone(24000)[:, None])
        assert len(load_waveform(path, max_seconds=1.5)) == 24000
        with pytest.raises(SoundError, match=r"is 1\.50 s long; the limit is 1\.49 s"):
            load_waveform(path, max_seconds=1.49)
        assert audio_tokens(round(MAX_SECONDS * 16000), RELEASED) == 524288

    def test_from_file_to_tokens(self, tmp_path):
        path = write(tmp_path / "a.wav", tone(44100 * 3, 440.0, 44100)[:, None], 44100)
        assert features(load_waveform(path), TINY).samples == (CHUNK, 16000)


@pytest.mark.parametrize(
    ("package", "call"), [("soundfile", lambda: decode(b"RIFF")), ("soxr", lambda: resample(noise(9), 8000))]
)
def test_a_package_that_is_not_installed_is_named(monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package} is needed.*note-parity\[media\]"):
        call()
