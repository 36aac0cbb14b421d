"""Where tower rows go in a prompt: one row for each placeholder, item by item, in the order of the prompt.

    E = embed_tokens(ids);   E[p] = row(p)  wherever ids[p] is the placeholder of an image, a video or a sound

Nothing is scaled and no position changes; delimiters keep their own embeddings. Rows are cast to E's dtype.
A prompt is checked by itself and item by item: in a check over all prompts of a batch, one row too many in the first
and one too few in the second would cancel, and so would two items of one prompt.
Source: multimodal prompt specification, sections 2.3 and 2.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from reference.errors import NoteError
from reference.prompt_media import MediaSpan
from reference.prompt_messages import MediaKind

# M rows of one item  D model width

# Runs of positions that a message shows; a prompt may hold hundreds of images.
SHOWN_RUNS = 8


class PlaceholderError(NoteError):
    """The placeholders of a prompt and the rows that the towers made for it do not fit."""


@dataclass(frozen=True)
class MediaRows:
    """The rows of one item (an image, a frame, a piece of sound, a padded video), for placeholders of `kind`."""

    kind: MediaKind
    rows_MD: Tensor


def placements(
    token_ids: Sequence[int],
    features: Sequence[MediaRows],
    pads: Mapping[MediaKind, int],
    request: str = "prompt",
    spans: Sequence[MediaSpan] | None = None,
) -> list[tuple[int, Tensor]]:
    """(first position, rows) of each item. Items of a kind take its placeholders in order; kinds do not mix.

    `spans` says where the prompt's writer put each item; without it an item must still have its placeholders side by
    side.
    Raises: PlaceholderError where counts or places differ, naming the request, both counts and the positions.
    """
    found: list[tuple[int, Tensor]] = []
    for kind, pad in pads.items():
        own = [item.rows_MD for item in features if item.kind == kind]
        positions = [position for position, token_id in enumerate(token_ids) if token_id == pad]
        _check_counts(positions, [len(rows_MD) for rows_MD in own], f"request {request!r}", kind, pad)
        at = 0
        for number, rows_MD in enumerate(own):
            taken = positions[at : at + len(rows_MD)]
            if taken[-1] - taken[0] >= len(taken):
                raise PlaceholderError(
                    f"request {request!r}: {kind} {number} has {len(taken)} rows, and its placeholders are not side by "
                    f"side: positions {shown(taken)}; the counts of this item and of another one differ from the prompt"
                )
            found.append((taken[0], rows_MD))
            at += len(rows_MD)
    if spans is not None:
        _check_spans(found, spans, request)
    return sorted(found, key=lambda place: place[0])


def _check_counts(positions: Sequence[int], counts: Sequence[int], where: str, kind: MediaKind, pad: int) -> None:
    if len(positions) != sum(counts):
        raise PlaceholderError(
            f"{where}: {len(positions)} placeholders of {kind} (id {pad}) at positions {shown(positions)}, and "
            f"{sum(counts)} rows of {len(counts)} items {list(counts[:SHOWN_RUNS])}: each placeholder takes one row"
        )
    if 0 in counts:
        raise PlaceholderError(f"{where}: {kind} {counts.index(0)} has no rows; an item has at least one")


def _check_spans(found: Sequence[tuple[int, Tensor]], spans: Sequence[MediaSpan], request: str) -> None:
    written = sorted((span.start, span.stop) for span in spans)
    placed = sorted((start, start + len(rows_MD)) for start, rows_MD in found)
    for number, (span, place) in enumerate(zip(written, placed, strict=False)):
        if span != place:
            raise PlaceholderError(
                f"request {request!r}: item {number} of the prompt was written to [{span[0]}, {span[1]}), and its "
                f"rows would go to [{place[0]}, {place[1]})"
            )
    if len(written) != len(placed):
        raise PlaceholderError(
            f"request {request!r}: the prompt has {len(written)} items, the rows are of {len(placed)}"
        )


def shown(positions: Sequence[int]) -> str:
    """Positions as runs: `3-6, 9`."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:SHOWN_RUNS]]
    return ", ".join(texts + (["…"] if len(runs) > SHOWN_RUNS else [])) or "none"
