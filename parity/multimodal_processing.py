"""Compares what two preprocessings make of the same text and files: ids and pixels bit for bit, features to 1e-10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parity.findings import Place, ProbeResult, Verdict
from parity.multimodal_requests import MadeRequest
from parity.runners.transformers_processing import TransformersProcessing, as_rows
from parity.tolerance import EXACT_LIMIT, row_errors
from reference.model_media import ImageInput, SoundInput


def compare_processing(theirs: TransformersProcessing, made: Mapping[str, MadeRequest]) -> list[ProbeResult]:
    """`prompt.ids`, `vision.pixels`, `audio.mel` over all requests without video; rows count from a request's first."""
    pairs: dict[str, list[tuple[str, Tensor, Tensor]]] = {"prompt.ids": [], "vision.pixels": [], "audio.mel": []}
    for name, request in made.items():
        if request.has_video:
            continue
        found = theirs(request)
        pairs["prompt.ids"].append((name, torch.tensor(request.prompt.ids)[:, None], found.ids_T[:, None]))
        pixels = [item.patches.pixels_PX for item in request.media if isinstance(item, ImageInput)]
        if pixels:
            assert found.pixels_PX is not None
            pairs["vision.pixels"].append((name, torch.cat(pixels), found.pixels_PX))
        sounds = [item.features.mel_NML for item in request.media if isinstance(item, SoundInput)]
        if sounds:
            assert found.mel_NML is not None
            # They stop where the longest sound of the request does.
            frames = found.mel_NML.shape[-1]
            pairs["audio.mel"].append((name, as_rows(torch.cat(sounds), frames), as_rows(found.mel_NML)))
    return [_result(name, parts) for name, parts in pairs.items() if parts]


def _result(name: str, parts: Sequence[tuple[str, Tensor, Tensor]]) -> ProbeResult:
    """Where numbers of rows differ, no row has a partner: all are different from the first on."""
    errors, places, equal, elements, largest = [], [], True, 0, 0.0
    for request, expected_RX, actual_RX in parts:
        places += [Place(request, row, 0) for row in range(len(expected_RX))]
        elements += expected_RX.numel()
        if expected_RX.shape != actual_RX.shape:
            errors.append(torch.full((len(expected_RX),), float("inf"), dtype=torch.float64))
            equal, largest = False, float("inf")
            continue
        found = row_errors(actual_RX, expected_RX)
        is_exact = name != "audio.mel"
        wrong = (actual_RX != expected_RX).any(-1) & is_exact
        errors.append(found.relative.masked_fill(wrong, float("inf")))
        largest = max(largest, float(found.largest.max()))
        equal &= torch.equal(actual_RX, expected_RX)
    error = torch.cat(errors)
    worst, bad = int(error.argmax()), (error > EXACT_LIMIT).nonzero().flatten().tolist()
    verdict: Verdict = "different" if bad else "bitwise equal" if equal else "close"
    return ProbeResult(
        name,
        "cascade",
        verdict,
        len(places),
        elements,
        0,
        float(error[worst]),
        EXACT_LIMIT,
        1.0,
        largest,
        places[worst],
        places[bad[0]] if bad else None,
    )
