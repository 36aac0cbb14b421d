"""All rows of the benchmark, and which of them were asked for.

Source: performance specification, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from optimized.bench.case import Case, Sizes
from optimized.bench.cases.absorb import absorb_cases
from optimized.bench.cases.audio import audio_cases, sequence_attention_cases
from optimized.bench.cases.decode_attention import decode_attention_cases
from optimized.bench.cases.experts import expert_cases
from optimized.bench.cases.indexer import indexer_cases
from optimized.bench.cases.layers import layer_cases
from optimized.bench.cases.pointwise import pointwise_cases
from optimized.bench.cases.prefill_attention import prefill_attention_cases
from optimized.bench.cases.projections import projection_cases
from optimized.bench.cases.vision import vision_cases
from optimized.bench.cases.vision_recorded import recorded_vision_cases
from optimized.bench.records import BenchError
from reference.config import NoteConfig, TextConfig

FAMILIES = (
    pointwise_cases,
    projection_cases,
    absorb_cases,
    indexer_cases,
    decode_attention_cases,
    prefill_attention_cases,
    expert_cases,
    layer_cases,
)

# A few minutes less: the smallest and a usual batch, the shortest context, the shorter prompt.
QUICK = Sizes(batches=(1, 64), contexts=(4096,), prompts=(4096,))


def all_cases(config: TextConfig, sizes: Sizes) -> list[Case]:
    return [case for family in FAMILIES for case in family(config, sizes)]


def tower_cases(config: NoteConfig) -> list[Case]:
    """Whole towers, one case a call, and the attention core that they share."""
    return [
        *((*vision_cases(config.vision), *recorded_vision_cases(config.vision)) if config.vision else ()),
        *(audio_cases(config.audio) if config.audio else ()),
        *sequence_attention_cases(),
    ]


def chosen_cases(
    config: TextConfig,
    sizes: Sizes,
    ops: Sequence[str] = (),
    batches: Sequence[int] = (),
    towers: NoteConfig | None = None,
) -> list[Case]:
    """Those whose op matches one of the globs and whose number of tokens is one of `batches`; none given: all.

    With `towers`, its towers are among what there is.
    Raises: BenchError if a glob or a batch matches nothing, with what there is.
    """
    cases = [*all_cases(config, sizes), *(tower_cases(towers) if towers else ())]
    known = sorted({case.op for case in cases})
    for glob in ops:
        if not any(fnmatchcase(op, glob) for op in known):
            raise BenchError(f"no op matches {glob!r}; there are {', '.join(known)}")
    tokens = {case.tokens for case in cases}
    if unknown := sorted(set(batches) - tokens):
        raise BenchError(f"no row has {unknown[0]} tokens; there are {', '.join(map(str, sorted(tokens)))}")
    found = [
        case
        for case in cases
        if (not ops or any(fnmatchcase(case.op, glob) for glob in ops)) and (not batches or case.tokens in batches)
    ]
    if not found:
        raise BenchError(f"no row of {', '.join(ops)} has {', '.join(map(str, batches))} tokens")
    return found
