"""Where the chunks of a batch lie: tokens side by side in the layers, with a gap between them in the stem.

All of it follows from the chunks' lengths, which the host knows, and goes to the device in one copy. Source: audio
specification, sections 5 to 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from optimized.kernels.stem import StemRows
from optimized.observe import BatchObserver, Segment
from reference.config import AudioConfig
from reference.media.mel import HOP, STRIDES, stage_frames, token_count

# T tokens  R token rows with gaps  B chunks


@dataclass(frozen=True)
class ChunkPlace:
    """A chunk of a clip, for the names of its rows."""

    clip: str
    index: int
    samples: int

    @property
    def tokens(self) -> int:
        return token_count(self.samples)


@dataclass(frozen=True)
class TokenRows:
    """starts_B1: first token of each chunk, with the end appended; positions_T, from 0 in each chunk; int32."""

    starts_B1: Tensor
    positions_T: Tensor
    longest: int


def grouped(chunks: Sequence[ChunkPlace], most_tokens: int) -> Iterator[Sequence[ChunkPlace]]:
    """Runs of chunks, in their order, with at most `most_tokens` tokens; one chunk may have more."""
    first, tokens = 0, 0
    for index, chunk in enumerate(chunks):
        if index > first and tokens + chunk.tokens > most_tokens:
            yield chunks[first:index]
            first, tokens = index, 0
        tokens += chunk.tokens
    if first < len(chunks):
        yield chunks[first:]


def token_rows(chunks: Sequence[ChunkPlace], device: torch.device) -> TokenRows:
    counts = [chunk.tokens for chunk in chunks]
    positions_T = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts])
    starts_B1 = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    starts_B1, positions_T = uploaded((starts_B1, positions_T), device)
    return TokenRows(starts_B1, positions_T, max(counts))


def stem_rows(chunks: Sequence[ChunkPlace], device: torch.device) -> tuple[StemRows, Tensor]:
    """Rows of the stem's picture, and which of them are tokens: token_T, int32."""
    counts = torch.tensor([chunk.tokens for chunk in chunks], dtype=torch.int32)
    first_B = (counts + 1).cumsum(0).to(torch.int32) - counts - 1
    frames_B = torch.tensor([stage_frames(chunk.samples)[0] for chunk in chunks], dtype=torch.int32)
    chunk_B = torch.arange(len(chunks), dtype=torch.int32)
    chunk_R = chunk_B.repeat_interleave(counts + 1)
    # Chunk b has b gaps before it.
    token_T = torch.arange(int(counts.sum()), dtype=torch.int32) + chunk_B.repeat_interleave(counts)
    chunk_R, first_B, frames_B, token_T = uploaded((chunk_R, first_B, frames_B, token_T), device)
    return StemRows(chunk_R, first_B, frames_B), token_T


def uploaded(vectors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of one dtype on the device, joined along their rows for one copy that nothing waits for."""
    together = torch.cat(tuple(vectors))
    if device.type == "cuda" and not together.is_cuda:
        together = together.pin_memory()
    return together.to(device, non_blocking=True).split([len(vector) for vector in vectors])


def stage_observer(
    chunks: Sequence[ChunkPlace], config: AudioConfig, stage: int, gap: int, device: torch.device
) -> BatchObserver:
    """Shows tensors behind `stage` convolutions, whose chunks have `gap` token rows behind each.

    Rows count from the start of a clip. Those behind the last frame of a full chunk, which exist where its end is not
    that of a token, are not shown.
    """
    shift = STRIDES - stage
    full = -(-(config.sampling_rate * config.chunk_seconds // HOP) >> stage)
    segments, start = [], 0
    for chunk in chunks:
        count = min(chunk.tokens << shift, full)
        positions = torch.arange(count, device=device) + chunk.index * full
        segments.append(Segment(chunk.clip, "prefill", start, start + count, positions))
        start += (chunk.tokens + gap) << shift
    return BatchObserver(segments)
