"""The whole audio tower at released geometry, and the attention core of both towers alone.

A recording of 30 minutes is 30 full chunks; utterances are 100 clips of 3 to 15 s, one of them a call of its own. Times
are from features to embeddings, and once from samples. Weights and features are random, which changes no time. The
check runs some short clips through the same weights beside the torch twins, in bfloat16 and in float64.
Floor: operations, attention included, at the rate of a dense bfloat16 product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.audio import AudioTower
from optimized.audio_mel import MelRows
from optimized.audio_weights import PackedAudio, audio_places, empty_audio, pack_audio
from optimized.bench.case import AbsentPeer, Case, Inputs, Peer, Problem, checked_rows, triples
from optimized.bench.floors import Work
from optimized.bench.judge import Triple
from optimized.bench.peers import fa3_sequences
from optimized.bench.peers_audio import AudioCall, reference_audio, transformers_audio
from optimized.device import choose
from reference.config import AudioConfig
from reference.media.mel import STRIDES, chunk_lengths, token_count

# T tokens  M mel bins  O output  H heads  X lanes of a head  B sequences

USES = ("stem_first", "stem_activate_", "rms_norm", "add_rms_norm", "rotate_halves_", "varlen_attention", "swiglu")
# Samples: a masked tail, one sample, a clip of 7 s.
CHECKED_CLIPS = (16001, 1, 112000)
# Sequences, rows of each, heads, lanes of a head: 30 full chunks of sound, frames of a video, an image of 3 MP.
SEQUENCES = ((30, 750, 20, 64), (16, 4096, 24, 64), (1, 16384, 24, 64))


@dataclass(frozen=True)
class AudioShape:
    """One call: what it is in words, and the samples of its clips."""

    name: str
    clips: tuple[int, ...]

    def chunks(self, config: AudioConfig) -> tuple[tuple[int, ...], ...]:
        """Samples of each chunk of each clip."""
        return tuple(chunk_lengths(samples, config) for samples in self.clips)


def audio_shapes(config: AudioConfig) -> tuple[AudioShape, ...]:
    second = config.sampling_rate
    utterances = tuple(3 * second + 12 * second * i // 100 for i in range(100))
    return (
        AudioShape("30 minutes", (1800 * second,)),
        AudioShape("100 clips of 3 to 15 s", utterances),
        AudioShape("1 clip of 10 s", (10 * second,)),
    )


def audio_flops(config: AudioConfig, samples: Sequence[int]) -> float:
    """Of chunks of so many samples; a multiply-add counts as two. Norms, rotations, GELU and features are left out."""
    C, D, width, out = config.downsample_hidden_size, config.d_model, config.encoder_ffn_dim, config.adapter_out_dim
    tokens = [token_count(count) for count in samples]
    rows, per_token = config.num_mel_bins, 0
    for stage in range(1, STRIDES + 1):
        rows = (rows + 1) // 2
        per_token += (rows << (STRIDES - stage)) * 9 * C * (1 if stage == 1 else C)
    per_token += config.conv_output_size * D
    per_token += config.encoder_layers * (4 * D * D + 3 * D * width)
    per_token += D * out + out * out
    pairs = sum(count * count for count in tokens)
    return 2.0 * sum(tokens) * per_token + 4.0 * D * pairs * config.encoder_layers


def audio_cases(config: AudioConfig, shapes: Sequence[AudioShape] | None = None) -> Iterator[Case]:
    nbytes = sum(piece.nbytes for piece in _pieces(empty_audio(config, "meta", torch.bfloat16)))
    shapes = audio_shapes(config) if shapes is None else shapes
    for shape in shapes:
        samples = [count for clip in shape.chunks(config) for count in clip]
        tokens, work = sum(map(token_count, samples)), Work(nbytes, audio_flops(config, samples))
        yield Case("audio_tower", shape.name, tokens, work, "events", _tower(config, shape), USES)
        if shape is shapes[0]:
            build = _from_samples(config, shape)
            yield Case("audio_tower.samples", shape.name, tokens, work, "events", build, USES)


def sequence_attention_cases(sizes: Sequence[tuple[int, int, int, int]] = SEQUENCES) -> Iterator[Case]:
    """`sizes`: as `SEQUENCES`."""
    for B, rows, H, X in sizes:
        T = B * rows
        work = Work(2 * 4 * T * H * X, 4.0 * B * rows * rows * H * X)
        name = f"{B} x {rows}, {H} heads of {X}"
        yield Case("varlen_attention", name, T, work, "events", _attention(B, rows, H, X), ("varlen_attention",))


def drawn_weights(config: AudioConfig, device: torch.device | str, seed: int = 0) -> PackedAudio:
    """Random bfloat16 weights: matrices with a spread of 1 / sqrt of their inputs, norms about 1, small biases."""
    generator = torch.Generator(device).manual_seed(seed)
    packed = empty_audio(config, device, torch.bfloat16)
    for name, place in audio_places(packed).items():
        inputs = place.shape[1:].numel()
        for piece in place.pieces:
            if len(place.shape) > 1:
                piece.normal_(0.0, inputs**-0.5, generator=generator)
            elif name.endswith("bias"):
                piece.normal_(0.0, 0.05, generator=generator)
            else:
                piece.normal_(1.0, 0.1, generator=generator)
    return packed


def _tower(config: AudioConfig, shape: AudioShape) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        weights = _weights(given, config)
        tower = AudioTower(config, weights, choose(given.device, given.backend))
        timed, few = (_call(given, config, some) for some in (shape, AudioShape("checked", CHECKED_CLIPS)))
        peers = [make(config, weights, timed, few) for make in (transformers_audio, reference_audio)]
        return Problem(lambda: tower(timed.mel), lambda _: _triples(given, tower, few), peers)

    return build


def _from_samples(config: AudioConfig, shape: AudioShape) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        tower = AudioTower(config, _weights(given, config), choose(given.device, given.backend))
        few = _call(given, config, AudioShape("checked", CHECKED_CLIPS))
        waveforms = [given.randn(samples, scale=0.1, dtype=torch.float32).cpu() for samples in shape.clips]
        return Problem(lambda: tower.embed_sound(waveforms), lambda _: _triples(given, tower, few))

    return build


def _weights(given: Inputs, config: AudioConfig) -> PackedAudio:
    return given.keep("audio tower", lambda: drawn_weights(config, given.device, given.seed))


def _call(given: Inputs, config: AudioConfig, shape: AudioShape) -> AudioCall:
    chunks = shape.chunks(config)
    samples = tuple(count for clip in chunks for count in clip)
    frames = sum(token_count(count) for count in samples) << STRIDES
    mel_LM = given.randn(frames, config.num_mel_bins, scale=0.5, dtype=torch.float32)
    return AudioCall(MelRows(mel_LM, samples, tuple(len(clip) for clip in chunks)))


def _triples(given: Inputs, tower: AudioTower, few: AudioCall) -> list[Triple]:
    """The tower on a few clips, its twins in the same dtype, and those in float64."""
    config, packed = tower.config, tower.weights
    plain = AudioTower(config, packed, choose(given.device, "torch"))
    state = ((name, torch.cat(place.pieces, place.dim).double()) for name, place in audio_places(packed).items())
    wide = AudioTower(config, pack_audio(state, config, given.device, torch.float64), plain.ops)
    # Features are activations from the first convolution on.
    rounded = MelRows(few.mel.mel_LM.to(tower.dtype).double(), few.mel.samples, few.mel.chunks)
    return [Triple(torch.cat(tower(few.mel)), torch.cat(plain(few.mel)), torch.cat(wide(rounded)))]


def _attention(B: int, rows: int, H: int, X: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        q_THX, k_THX, v_THX = given.randn(B * rows, 3, H, X).unbind(1)
        starts_B1 = torch.arange(0, B * rows + 1, rows, device=given.device, dtype=torch.int32)
        attention, scale = given.op("varlen_attention"), X**-0.5
        # Some queries of the last sequence against all of its keys.
        chosen = [(B - 1) * rows + row for row in checked_rows(rows)]

        def check(out_THX: Tensor) -> list[Triple]:
            k, v = (x_THX[-rows:].contiguous() for x_THX in (k_THX, v_THX))

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                wide = torch.promote_types(q.dtype, torch.float32)
                score_HTS = torch.einsum("thx,shx->hts", q.to(wide), k.to(wide)) * scale
                return torch.einsum("hts,shx->thx", score_HTS.softmax(-1), v.to(wide)).to(q.dtype)

            return triples(out_THX[chosen], attend, q_THX[chosen], k, v)

        def of_heads(out_BHTX: Tensor) -> Tensor:
            return out_BHTX.transpose(1, 2).flatten(0, 1)[chosen]

        q, k, v = (x_THX.unflatten(0, (B, rows)).transpose(1, 2) for x_THX in (q_THX, k_THX, v_THX))
        peers: list[Peer | AbsentPeer] = [
            fa3_sequences(q_THX, k_THX, v_THX, starts_B1, rows, scale, lambda out_THX: out_THX[chosen]),
            Peer("SDPA, padded", lambda: F.scaled_dot_product_attention(q, k, v, scale=scale), of_heads),
        ]
        return Problem(lambda: attention(q_THX, k_THX, v_THX, starts_B1, rows, scale), check, peers)

    return build


def _pieces(packed: PackedAudio) -> Iterator[Tensor]:
    return chain.from_iterable(place.pieces for place in audio_places(packed).values())
