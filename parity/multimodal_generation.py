"""Compares greedy generation: the reference's tokens with a candidate's, and each side's with drafts and without.

Where two texts part, the candidate has read the same tokens and chosen another one. It is run again up to there, and
the truth with the candidate's discrete choices: what counts is how far its token is from the best one there, against
the noise of the logits. So a parting is a *tie* where its token is the best one (it took other experts or keys, as good
as the reference's by the scores), a *near tie* within the noise, else a *flip*. Behind it the two read different
tokens, and nothing more of that request is compared.

    generated.tokens    the candidate, without drafts
    generated.draftsN   the candidate with drafts of depth N; of transformers, which has none, nothing
    generated.ownN      the reference with drafts of depth N
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parity.findings import ChoiceResult, ChoiceVerdict
from parity.judge import Judge, run_in_view
from parity.replay import ChoiceReplay, Exchange
from parity.run import traced
from parity.runners import NotSupportedHere
from parity.runners.note_sides import NoteSide, ReferenceNoteSide
from parity.tolerance import EXACT_LIMIT, FALSE_ALARM_RATE, element_limit
from parity.trace import Trace
from parity.workload import Workload
from reference.generate import Generation, Parting, first_parting

Reference = Callable[[torch.dtype], ReferenceNoteSide]
# Rounding draws by which exchanged choices on the way to a parting are judged.
DRAWS = 3


def compare_generation(
    reference: Reference, side: NoteSide, dtype: torch.dtype, max_new_tokens: int, depths: Sequence[int]
) -> tuple[list[ChoiceResult], int]:
    """The tokens that differ, and how many were compared. In float64 nothing is rounded on either side."""
    ours = reference(dtype)
    expected = ours.generate(max_new_tokens)
    found: dict[str, tuple[NoteSide, Generation]] = {"generated.tokens": (side, side.generate(max_new_tokens))}
    for depth in depths:
        found[f"generated.own{depth}"] = ours, ours.generate(max_new_tokens, depth)
        try:
            found[f"generated.drafts{depth}"] = side, side.generate(max_new_tokens, depth)
        except NotSupportedHere:
            continue
    choices, rows = [], 0
    for name, (maker, made) in found.items():
        for request in expected.tokens:
            parting = first_parting(expected, made, request)
            rows += len(expected.tokens[request]) if parting is None else parting.index + 1
            if parting is not None:
                choices.append(_judged(name, parting, expected, reference, maker, dtype, rows))
    return choices, rows


def _judged(
    name: str,
    parting: Parting,
    expected: Generation,
    reference: Reference,
    maker: NoteSide,
    dtype: torch.dtype,
    comparisons: int,
) -> ChoiceResult:
    prompt = maker.placed[parting.request].prompt.ids
    ids = (*prompt, *expected.tokens[parting.request][: parting.index])
    workload = _one_by_one(parting.request, len(prompt), ids)
    trace = traced(maker, workload)
    truth_W, eager_W = (
        _last_logits(run_in_view(reference(one), trace, workload, "cascade", ChoiceReplay(trace)), parting.request)
        for one in (torch.float64, dtype)
    )
    # One side had ended where the other went on: no margin makes that rounding.
    gap = float("inf") if parting.actual is None else float(truth_W.max() - truth_W[parting.actual])
    scale = float(truth_W.norm())
    deviation = float((eager_W - truth_W).square().mean().sqrt())
    is_exact = dtype == torch.float64
    # Both tokens' logits are rounded, each on its own.
    noise = EXACT_LIMIT * scale if is_exact else element_limit(comparisons) * 2.0**0.5 * deviation
    verdict: ChoiceVerdict = "tie" if gap == 0.0 else "near tie" if gap <= noise else "flip"
    judge = Judge(reference, trace, dtype, workload, "cascade", 0 if is_exact else DRAWS, FALSE_ALARM_RATE)
    flips = [choice for choice in judge.choices() if choice.verdict == "flip"]
    if flips:
        verdict, gap, noise = "flip", flips[0].exchange.gap, flips[0].noise
    exchange = Exchange(
        name,
        parting.request,
        len(ids),
        0,
        () if parting.expected is None else (parting.expected,),
        () if parting.actual is None else (parting.actual,),
        gap,
        scale,
        float(truth_W.max()),
    )
    return ChoiceResult(exchange, "cascade", noise, verdict)


def _one_by_one(request: str, prompt_length: int, ids: Sequence[int]) -> Workload:
    """The prompt in one step, what was generated behind it token by token."""
    words = [f"p:{request}{prompt_length}", *[f"d:{request}"] * (len(ids) - prompt_length)]
    chosen = {(request, position, 0): token_id for position, token_id in enumerate(ids)}
    return Workload(Workload.parse(" ".join(words)).actions, 0, chosen)


def _last_logits(trace: Trace, request: str) -> Tensor:
    return trace.table("logits", request).values[-1].to(torch.float64)
