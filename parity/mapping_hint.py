"""Says where a difference is one of names or layout and not of numbers: under which mapping it vanishes (`propose`)."""

from __future__ import annotations

from parity.findings import Comparison
from parity.propose import Evidence, propose_mapping
from parity.schema import pattern_of
from parity.trace import Trace


def mapping_hints(expected: Trace, actual: Trace, comparison: Comparison) -> tuple[str, ...]:
    """A line for each name that is different as it was recorded, and agrees with lanes or layers in another order."""
    blamed = {pattern_of(result.name) for result in comparison.blamed}
    found = propose_mapping(expected, actual).evidence if blamed else ()
    return tuple(
        f"{evidence_line(evidence)}; if that is the layout of the dump, say so in a mapping (note-parity propose)"
        for evidence in found
        if evidence.to in blamed
    )


def evidence_line(evidence: Evidence) -> str:
    """What is where, and the difference before and after, relative to the expected tensor, of the worst layer."""
    said = "itself" if evidence.sources == (evidence.to,) else " + ".join(evidence.sources)
    said += f" of layer {{i}}{-evidence.layer_shift:+d}" if evidence.layer_shift else ""
    said += f" under {', '.join(evidence.transforms)}" if evidence.transforms else ""
    where = f" in {evidence.layers} layers" if "{i}" in evidence.to else ""
    return f"{evidence.to} is {said}: difference {evidence.before:.2e} -> {evidence.after:.2e}{where}"
