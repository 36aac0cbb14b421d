"""Which known mistake explains a difference: an experiment, not a guess.

The candidate is localised first, each operation computed from the candidate's own recorded values (pinpoint). Then
every fault of the catalogue that can first show at a blamed place is applied to the reference, and the candidate is
compared with that. A fault explains the difference if nothing is left outside the noise. If no single fault does, pairs
of those that help are tried. "unknown" is an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, log
from typing import Literal

import torch

from parity.faults.fault import Fault
from parity.findings import ChoiceResult, Comparison, ProbeResult
from parity.judge import Judge
from parity.runners.reference import ReferenceRunner
from parity.schema import dataflow_key, pattern_of
from parity.tolerance import DRAWS, EXACT_LIMIT, FALSE_ALARM_RATE, row_errors
from parity.trace import Trace, common_rows
from parity.workload import Workload

Coverage = Literal["all probes", "layer outputs", "logits only"]
# Builds the reference in a dtype with some faults.
FaultyReference = Callable[[torch.dtype, Sequence[Fault]], ReferenceRunner]
# How many pairs of faults that help are tried when no single one explains everything.
PAIRS = 20
# A hypothesis is close that leaves this part of the worst error, or less; so many of them are judged again.
CLOSE = 0.2
JUDGED_AGAIN = 3
MAX_EQUIVALENTS = 3


@dataclass(frozen=True)
class Hypothesis:
    """Some faults applied to the reference, and what is left of the difference then.

    `residual` is the worst error in units of its limit: at most 1 if nothing is left. `blamed`: the tensors and choices
    that are still outside the noise. `weight`: by how much, summed over them.
    """

    faults: tuple[str, ...]
    residual: float
    blamed: frozenset[str]
    weight: float

    @property
    def explains(self) -> bool:
        return not self.blamed


@dataclass(frozen=True)
class Diagnosis:
    """`explanations` are the faults (or pairs) that leave nothing, best first; none of them: unknown.

    `equivalents`: explanations that give the same float64 values as the best on this workload, so that no dump of it
    can tell them apart. `tried` counts the hypotheses that were run.
    """

    coverage: Coverage
    before: Comparison
    residual_before: float
    explanations: tuple[Hypothesis, ...]
    equivalents: tuple[tuple[str, ...], ...]
    tried: int
    helped: tuple[Hypothesis, ...]

    @property
    def verdict(self) -> Literal["agrees", "explained", "unknown"]:
        if not self.before.is_different:
            return "agrees"
        return "explained" if self.explanations else "unknown"


def diagnose(
    reference: FaultyReference,
    candidate: Trace,
    dtype: torch.dtype,
    workload: Workload,
    catalogue: Iterable[Fault],
    draws: int = DRAWS,
    false_alarm_rate: float = FALSE_ALARM_RATE,
    progress: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Localise the candidate's first difference from the reference and find the faults that explain it."""
    judge = Judge(lambda dt: reference(dt, ()), candidate, dtype, workload, "pinpoint", draws, false_alarm_rate)
    coverage = coverage_of(candidate)
    before = Comparison(tuple(judge.probes()), tuple(judge.choices()), judge.choice_rows, false_alarm_rate)
    residual_before = _worst([*before.probes, *before.choices])
    if not before.is_different:
        return Diagnosis(coverage, before, residual_before, (), (), 0, ())
    experiment = _Experiment(judge, reference)
    for faults in _rounds(catalogue, before):
        for fault in faults:
            progress(fault.id)
            experiment.run((fault,))
        experiment.judge_closest_again(residual_before, draws, false_alarm_rate)
        if experiment.explanations():
            break
    else:
        for pair in experiment.pairs(_weight(before.probes, before.choices)):
            progress(" + ".join(fault.id for fault in pair))
            experiment.run(pair)
    explanations = experiment.explanations()
    equivalents = experiment.equivalent_to(explanations[0]) if explanations else ()
    helped = tuple(h for h in experiment.sorted() if not h.explains)[:5]
    return Diagnosis(coverage, before, residual_before, explanations, equivalents, len(experiment.tried), helped)


def coverage_of(candidate: Trace) -> Coverage:
    """How much a trace shows."""
    patterns = {pattern_of(name) for name in candidate.names()}
    if "layers.{i}.attn.core" in patterns or "layers.{i}.attn.q_latent" in patterns:
        return "all probes"
    return "layer outputs" if "layers.{i}.output" in patterns else "logits only"


def _rounds(catalogue: Iterable[Fault], before: Comparison) -> Iterable[list[Fault]]:
    """Faults that can first show where the difference is; then those that show earlier, below the noise, or later."""
    possible = [fault for fault in catalogue if fault.visibility not in ("I", "R")]
    blamed = {pattern_of(result.name) for result in before.blamed}
    likely = [fault for fault in possible if blamed & set(fault.first)]
    return likely, [fault for fault in possible if fault not in likely]


class _Experiment:
    """Runs hypotheses against one judge and remembers what each leaves."""

    def __init__(self, judge: Judge, reference: FaultyReference):
        self._judge, self._reference = judge, reference
        self.tried: dict[tuple[str, ...], Hypothesis] = {}
        self._faults: dict[tuple[str, ...], tuple[Fault, ...]] = {}
        self._truths: dict[tuple[str, ...], Trace] = {}

    def run(self, faults: tuple[Fault, ...]) -> None:
        key = tuple(fault.id for fault in faults)
        try:
            probes, choices, truth = self._judge.against(self._reference(torch.float64, faults))
        except (RuntimeError, IndexError, ValueError):
            # The fault's shapes do not fit this configuration or these recorded values: it is not what happened.
            self.tried[key] = Hypothesis(key, inf, frozenset(self._judge.names), inf)
            return
        self._faults[key] = faults
        self._remember(key, probes, choices, truth)

    def judge_closest_again(self, residual_before: float, draws: int, false_alarm_rate: float) -> None:
        """Hold what comes close against a floor of its own: a fault can make rounding larger than it is without.

        Only the best few of those that leave a small part of the difference, where nothing explains all of it.
        """
        if self.explanations():
            return
        close = [h for h in self.sorted() if h.residual <= CLOSE * residual_before and h.faults in self._faults]
        for hypothesis in close[:JUDGED_AGAIN]:
            faults, old = self._faults[hypothesis.faults], self._judge
            again = Judge(
                lambda dtype, faults=faults: self._reference(dtype, faults),  # type: ignore[misc]
                old.candidate,
                old.dtype,
                old.workload,
                old.view,
                draws,
                false_alarm_rate,
            )
            self._remember(hypothesis.faults, again.probes(), again.choices(), again.truth)

    def _remember(
        self, key: tuple[str, ...], probes: list[ProbeResult], choices: list[ChoiceResult], truth: Trace
    ) -> None:
        # A tensor that the hypothesis does not compute at all, and the candidate has, is not explained.
        blamed = frozenset(
            [probe.name for probe in probes if probe.verdict in ("different", "missing")]
            + [choice.name for choice in choices if choice.verdict == "flip"]
        )
        self.tried[key] = Hypothesis(key, _worst([*probes, *choices]), blamed, _weight(probes, choices))
        if not blamed:
            self._truths[key] = truth

    def sorted(self) -> list[Hypothesis]:
        return sorted(self.tried.values(), key=lambda h: (not h.explains, h.weight, len(h.faults), h.residual))

    def explanations(self) -> tuple[Hypothesis, ...]:
        return tuple(hypothesis for hypothesis in self.sorted() if hypothesis.explains)

    def pairs(self, weight_before: float) -> list[tuple[Fault, Fault]]:
        """Pairs of faults that each leave less than there was; first those that leave different things.

        Where every operation was recorded, each is blamed by itself, so that these explain everything.
        """
        helpful = [h for h in self.sorted() if h.weight < weight_before and h.faults in self._faults]
        ranked = sorted(combinations(helpful, 2), key=lambda pair: len(pair[0].blamed & pair[1].blamed))
        return [(self._fault(a), self._fault(b)) for a, b in ranked[:PAIRS]]

    def _fault(self, hypothesis: Hypothesis) -> Fault:
        return self._faults[hypothesis.faults][0]

    def equivalent_to(self, best: Hypothesis) -> tuple[tuple[str, ...], ...]:
        """Other explanations whose float64 values are the same, at every tensor that the candidate shows."""
        return tuple(
            key
            for key, truth in self._truths.items()
            if key != best.faults and _same_values(truth, self._truths[best.faults], self._judge.names)
        )[: MAX_EQUIVALENTS - 1]


def _same_values(one: Trace, other: Trace, names: Sequence[str]) -> bool:
    for name in sorted(names, key=dataflow_key):
        for request in one.requests(name):
            if not other.has(name, request):
                return False
            left, right, _, missing = common_rows(one.table(name, request), other.table(name, request))
            if missing or float(row_errors(left, right).relative.max()) > EXACT_LIMIT:
                return False
    return True


def _worst(results: Iterable[ProbeResult | ChoiceResult]) -> float:
    return max((result.excess for result in results), default=0.0)


def _weight(probes: Iterable[ProbeResult], choices: Iterable[ChoiceResult]) -> float:
    """How much is outside the noise, over all tensors and choices: the sum of the logarithms of the excesses."""
    results: list[ProbeResult | ChoiceResult] = [*probes, *choices]
    excesses = [min(result.excess, 1e12) for result in results]
    return sum(log(excess) for excess in excesses if excess > 1.0)
