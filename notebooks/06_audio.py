# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Audio: from a waveform to tokens
#
# NOTE hears 12.5 tokens a second. Between the samples and the first layer of the text model stand a picture (log-mel
# features), a stack of convolutions, 32 layers of bidirectional attention and an adapter. This notebook goes through
# them with a small encoder and generated sound. Each step has a trap in which a port gives plausible text all the same.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from parity.audio_check import tiny_with_audio
from parity.audio_clips import ClipWorkload
from parity.audio_compare import compare_audio, first_different, traced_clips
from parity.faults.audio import AUDIO_FAULTS
from parity.runners.reference_audio import ReferenceAudio
from reference.audio import AudioEncoder
from reference.checkpoint import synthetic_tensors
from reference.config import released
from reference.media.mel import (
    Features,
    audio_tokens,
    chunk_lengths,
    corner_frequencies,
    features,
    mel_filter_bank,
    stage_frames,
    token_count,
)
from reference.media.sound import to_mono
from reference.probe import Recorder, listening

torch.set_num_threads(1)
note = tiny_with_audio()
config = note.audio
weights = dict(synthetic_tensors(note))
encoder = AudioEncoder(config)
encoder.load_state_dict(
    {name.removeprefix("audio_encoder."): w for name, w in weights.items() if name.startswith("audio_encoder.")}
)
encoder = encoder.float().requires_grad_(False)
RATE = config.sampling_rate
CHUNK = RATE * config.chunk_seconds
print(f"a chunk is {config.chunk_seconds} s here and {released().audio.chunk_seconds} s in the release")

# %% [markdown]
# ## 1. A sound
#
# A glide from 200 Hz to 3 kHz with a pause, 1.5 s, one channel at 16 kHz. Files come with any rate and any number of
# channels; `reference.media.sound` decodes, mixes and resamples them.

# %%
seconds = np.arange(int(1.5 * RATE)) / RATE
loudness = 0.4 * (np.abs(seconds - 0.9) > 0.1)
sound_S = torch.from_numpy((loudness * np.sin(2 * np.pi * (200 * seconds + 930 * seconds**2))).astype(np.float32))
print(len(sound_S), "samples,", audio_tokens(len(sound_S), config), "tokens")
assert audio_tokens(len(sound_S), config) == 19

# %% [markdown]
# The first trap lies before all maths. Two channels of opposite phase are silence if they are averaged, and sound if
# the first is taken; both are done in public.

# %%
opposed_SC = torch.stack((sound_S, -sound_S), dim=1)
print("mean:", float(to_mono(opposed_SC).abs().max()), " first:", float(to_mono(opposed_SC, "first").abs().max()))
assert not to_mono(opposed_SC).any()
assert torch.equal(to_mono(opposed_SC, "first"), sound_S)

# %% [markdown]
# ## 2. Filters
#
# A frame of 400 samples, every 160, becomes the power at 201 frequencies, and these are collected by triangles that are
# narrow and evenly spaced up to 1 kHz and wider above: the Slaney scale. Each triangle has the same area.

# %%
bank_KM = mel_filter_bank(config.num_mel_bins, RATE)
hz_K = np.arange(201) * 40
figure, axis = plt.subplots(figsize=(8, 2.4), layout="constrained")
axis.plot(hz_K, bank_KM.numpy(), linewidth=0.9)
axis.set(xlabel="Hz", ylabel="weight", title=f"{config.num_mel_bins} filters")
plt.show()

corner = corner_frequencies(config.num_mel_bins)
areas = (bank_KM.sum(0) * 40)[5:-1]
print("areas of the wider filters:", [round(float(area), 2) for area in areas[-5:]])
assert bool((corner.diff().diff() > -1e-9).all()), "widths never shrink"
assert float((areas[-5:] - 1).abs().max()) < 0.1

# %% [markdown]
# ## 3. The picture
#
# The logarithm of what the filters collect, cut off 8 decades below the loudest point of the chunk, then moved to a
# handy range. The chunk is filled up with zeros first, and silence is the floor, never 0.

# %%
made = features(sound_S, config)
mel_ML = made.mel_NML[0]
figure, axes = plt.subplots(2, 1, figsize=(8, 4), layout="constrained", sharex=True)
axes[0].plot(seconds, sound_S.numpy(), linewidth=0.3)
axes[0].set(ylabel="sample")
shown = axes[1].imshow(
    mel_ML.numpy(), origin="lower", aspect="auto", extent=(0, config.chunk_seconds, 0, config.num_mel_bins)
)
axes[1].set(xlabel="s", ylabel="mel bin")
figure.colorbar(shown, ax=axes[1])
plt.show()

print("shape", tuple(mel_ML.shape), " range", float(mel_ML.min()), "to", float(mel_ML.max()))
assert float(mel_ML.max() - mel_ML.min()) <= 2.0 + 1e-6
assert torch.equal(features(torch.zeros(CHUNK), config).mel_NML, torch.full((1, config.num_mel_bins, 200), -1.5))

# %% [markdown]
# "The loudest point of the chunk" is a trap: a maximum over the whole clip would lift the floor of a quiet chunk. So a
# chunk is what it is, whatever stands before it.

# %%
noise_S = torch.randn(2 * CHUNK, generator=torch.Generator().manual_seed(0)) * 0.1
quiet_S = torch.cat((noise_S[:CHUNK], noise_S[CHUNK:] * 1e-4))
both, alone = features(quiet_S, config), features(quiet_S[CHUNK:], config)
assert torch.equal(both.mel_NML[1], alone.mel_NML[0])
print("floors of the two chunks:", [round(float(chunk.min()), 3) for chunk in both.mel_NML])

# %% [markdown]
# ## 4. Four numbers
#
# Of n samples a chunk has floor(n / 160) valid frames; each convolution halves them, upwards; and it has ceil(n / 1280)
# tokens. The last two do not always agree: with 1 to 159 samples more than a multiple of 1280 there is a token without
# any valid frame, for one length in eight. It is emitted all the same.

# %%
print("samples  frames (behind 0, 1, 2, 3 convolutions)  tokens")
for samples in (159, 160, 1279, 1280, 1281, 1439, 1440):
    print(f"{samples:7}  {stage_frames(samples)!s:40}  {token_count(samples)}")
share = sum(token_count(n) > stage_frames(n)[-1] for n in range(1, CHUNK + 1)) / CHUNK
print(f"{share:.2%} of lengths have a token without a frame")
assert 0.12 < share < 0.13
assert chunk_lengths(CHUNK + 1, config) == (CHUNK, 1)

# %% [markdown]
# ## 5. The stem
#
# Three convolutions of stride 2 turn 100 frames a second into 12.5. After each, what lies behind the valid frames is
# set to zero: otherwise the biases of the convolutions leak from the padding into the last tokens.

# %%
recorder = Recorder()
with listening(recorder):
    embeddings_TO = encoder(made)
figure, axes = plt.subplots(1, 4, figsize=(9, 2.4), layout="constrained")
for axis, stage in zip(axes, ("input", "conv1", "conv2", "conv3"), strict=True):
    (picture_LCP,) = recorder.values(f"audio.stem.{stage}")
    axis.imshow(picture_LCP[:, 0].T.numpy(), origin="lower", aspect="auto")
    axis.set(title=f"{stage}: {tuple(picture_LCP.shape)}", xticks=[], yticks=[])
plt.show()

names = [name for name in recorder.names() if not name.startswith(("audio.layers.1", "audio.layers.2"))]
for name in names:
    print(f"{name:32}", tuple(recorder.values(name)[0].shape))
assert embeddings_TO.shape == (19, note.text.hidden_size)

# %% [markdown]
# What is behind the samples cannot be heard: neither its values nor how much of it there is.

# %%
poisoned = made.mel_NML.clone()
poisoned[:, :, stage_frames(len(sound_S))[0] :] = 1e9
assert torch.equal(encoder(Features(poisoned, made.samples)), embeddings_TO)
assert torch.equal(encoder(Features(made.mel_NML[:, :, : 8 * 19], made.samples)), embeddings_TO)

# %% [markdown]
# And the token without a frame enters the layers as exact zeros. It is not lost there: its queries have a bias, it sees
# the others, and it is seen.

# %%
recorder = Recorder(("audio.stem", "audio.layers.0.output"))
with listening(recorder):
    encoder(features(noise_S[:1281], config))
(stem_TD,), (output_TD,) = recorder.values("audio.stem"), recorder.values("audio.layers.0.output")
print("norm of the rows of the stem:", [round(float(row.norm()), 3) for row in stem_TD])
print("norm behind the first layer: ", [round(float(row.norm()), 3) for row in output_TD])
assert not stem_TD[1].any()
assert output_TD[1].any()

# %% [markdown]
# ## 6. Traps
#
# The catalogue has every mistake that is known of, each as a small patch of the reference. Here some of them run on
# the same sounds; the comparison names the first tensor that differs.

# %%
workload = ClipWorkload.parse("noise:1281 tone:9600 fading:33440")


def reference(dtype: torch.dtype) -> ReferenceAudio:
    return ReferenceAudio(note, weights, dtype)


def first_place(fault_id: str) -> str:
    fault = next(fault for fault in AUDIO_FAULTS if fault.id == fault_id)
    trace = traced_clips(ReferenceAudio(note, weights, torch.float64, faults=(fault,)), workload)
    found = first_different(compare_audio(reference, trace, torch.float64, workload, ("cascade",), draws=0))
    print(f"{fault.id:26} {found.name:30} {fault.says}")
    return found.name


print(len(AUDIO_FAULTS), "faults")
assert first_place("batch_global_max") == "audio.mel"
assert first_place("mask_stage0_only") == "audio.stem.conv1"
assert first_place("flatten_freq_major") == "audio.stem"
assert first_place("audio_rope_interleaved") == "audio.layers.0.attn.query"
assert first_place("attention_len_v3") == "audio.layers.0.attn.core"
assert first_place("audio_swiglu_swapped") == "audio.layers.0.ffn.activated"
assert first_place("adapter_rms") == "audio.adapter.input"

# %% [markdown]
# Some of them stay invisible for a long time. Attention across chunks needs a clip of more than one; in the release
# that is more than a minute, longer than most clips of a test.


# %%
def embedded(line: str, *fault_ids: str) -> Tensor:
    faults = tuple(fault for fault in AUDIO_FAULTS if fault.id in fault_ids)
    side = ReferenceAudio(note, weights, torch.float64, faults=faults)
    return torch.cat([side.embed(clip) for clip in ClipWorkload.parse(line).clips])


for line in ("noise:31000", "noise:33440"):
    right_TO, wrong_TO = embedded(line), embedded(line, "cross_segment_attention")
    print(line, "largest difference", float((wrong_TO - right_TO).abs().max()))
assert not torch.allclose(embedded("noise:33440"), embedded("noise:33440", "cross_segment_attention"))
assert torch.allclose(embedded("noise:31000"), embedded("noise:31000", "cross_segment_attention"))

# %% [markdown]
# ## What to change to see it break
#
# * In step 3 divide `quiet_S[:CHUNK]` by ten as well: the floor of the first chunk moves, that of the second does not.
# * In step 5 poison one frame earlier, `stage_frames(...)[0] - 1`: the last tokens change, and with them, through
#   attention, all of them.
# * In step 5 take 1280 samples in place of 1281: the second token is gone.
# * In step 6 leave `noise:1281` out of the workload: `attention_len_v3` can no longer be seen, and `first_place` fails.
