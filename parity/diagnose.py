"""Which known mistake explains a difference: an experiment, not a guess.

The candidate is localised first, each operation computed from the candidate's own recorded values (pinpoint). Then
every fault of the catalogue that can first show at a blamed place is applied to the reference, and the candidate is
compared with that. A fault explains the difference if nothing is left outside the noise. If no single fault does, pairs
of those that help are tried. "unknown" is an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import log
from typing import Literal

import torch

from parity.blind_spots import blind_spots
from parity.faults.fault import Fault
from parity.findings import ChoiceResult, Comparison, ProbeResult
from parity.judge import Findings, Judge
from parity.runners.reference import ReferenceRunner
from parity.schema import dataflow_key, pattern_of
from parity.score_factor import CORE, score_factor
from parity.tolerance import DRAWS, EXACT_LIMIT, FALSE_ALARM_RATE, row_errors
from parity.trace import Trace, common_rows
from parity.workload import Workload

Coverage = Literal["all probes", "layer outputs", "some probes", "logits only"]
# Builds the reference in a dtype with some faults.
FaultyReference = Callable[[torch.dtype, Sequence[Fault]], ReferenceRunner]
# How many faults that explain a part are tried together with others when no single one explains everything.
PARTIAL = 4
# A hypothesis is close that leaves this part of the worst error, or less; so many of them are judged again.
CLOSE = 0.2
JUDGED_AGAIN = 3
MAX_EQUIVALENTS = 3
# So many of those that leave something are reported.
HELPED = 5


@dataclass(frozen=True)
class Hypothesis:
    """Some faults applied to the reference, and what is left of the difference then.

    `residual` is the worst error in units of its limit: at most 1 if nothing is left. `blamed`: the tensors and choices
    that are still outside the noise. `weight`: by how much, summed over them. `confirmed`: how many rows and choices
    that differed before were judged; where that is none, nothing has been explained.
    """

    faults: tuple[str, ...]
    residual: float
    blamed: frozenset[str]
    weight: float
    confirmed: int

    @property
    def explains(self) -> bool:
        return not self.blamed and self.confirmed > 0


@dataclass(frozen=True)
class Diagnosis:
    """`explanations` are the faults (or pairs) that leave nothing, best first; none of them: unknown.

    `equivalents`: explanations that give the same float64 values as the best on this workload, so that no dump of it
    can tell them apart. `tried` counts the hypotheses that were run. `has_no_consequences`: what explains the
    difference changes intermediate tensors only. `blind_spots`: what an agreement would not exclude.
    """

    coverage: Coverage
    before: Comparison
    residual_before: float
    explanations: tuple[Hypothesis, ...]
    equivalents: tuple[tuple[str, ...], ...]
    tried: int
    helped: tuple[Hypothesis, ...]
    has_no_consequences: bool
    blind_spots: tuple[str, ...]

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
    before = _with_score_factor(before, judge, reference)
    residual_before = _worst([*before.probes, *before.choices])
    unseen = blind_spots(judge.config.text, workload, candidate.names())
    if not before.is_different:
        return Diagnosis(coverage, before, residual_before, (), (), 0, (), False, unseen)
    experiment = _Experiment(judge, reference, before, draws, false_alarm_rate, progress)
    catalogue = list(catalogue)
    for faults in _rounds(catalogue, before, coverage):
        experiment.try_each(faults)
        if experiment.explanations():
            break
    else:
        # Where operations are not seen one by one, a pair can imitate what neither of its faults is.
        if coverage == "all probes":
            experiment.try_pairs([fault for fault in catalogue if fault.visibility not in ("I", "R")])
    explanations = experiment.explanations()
    equivalents = experiment.equivalent_to(explanations[0]) if explanations else ()
    helped = tuple(h for h in experiment.sorted() if not h.explains and h.confirmed)[:HELPED]
    harmless = {fault.id for fault in catalogue if fault.visibility in ("I", "R")}
    return Diagnosis(
        coverage,
        before,
        residual_before,
        explanations,
        equivalents,
        experiment.count,
        helped,
        bool(explanations) and harmless.issuperset(explanations[0].faults),
        unseen,
    )


def _with_score_factor(before: Comparison, judge: Judge, reference: FaultyReference) -> Comparison:
    """Attention scores are in no dump: of the first difference, it is said if it is a factor of theirs."""
    first = before.first
    if not isinstance(first, ProbeResult) or pattern_of(first.name) != CORE:
        return before
    told = replace(first, score_factor=score_factor(judge, reference(torch.float64, ()), first))
    return replace(before, probes=tuple(told if probe is first else probe for probe in before.probes))


def coverage_of(candidate: Trace) -> Coverage:
    """How much a trace shows; "some probes": neither the insides of attention nor what leaves the layers."""
    patterns = {pattern_of(name) for name in candidate.names()}
    if "layers.{i}.attn.core" in patterns or "layers.{i}.attn.q_latent" in patterns:
        return "all probes"
    if "layers.{i}.output" in patterns:
        return "layer outputs"
    return "logits only" if patterns <= {"logits", "mtp.{s}.logits"} else "some probes"


def _rounds(catalogue: Sequence[Fault], before: Comparison, coverage: Coverage) -> Iterable[list[Fault]]:
    """Faults that can first show where the difference is; then those that show earlier, below the noise, or later.

    A fault without consequences is possible only where nothing but what it may change is different.
    """
    blamed = {pattern_of(result.name) for result in before.blamed}
    without_consequences = [fault for fault in catalogue if fault.hides_in and blamed <= set(fault.hides_in)]
    possible = [fault for fault in catalogue if fault.visibility not in ("I", "R")]
    if coverage != "all probes":
        return ([*without_consequences, *possible],)
    likely = [fault for fault in possible if blamed & set(fault.first)]
    return [*without_consequences, *likely], [fault for fault in possible if fault not in likely]


class _Witness:
    """The first row that is different: a hypothesis that leaves it so explains nothing, and need not run further."""

    def __init__(self, judge: Judge, runner: ReferenceRunner, blamed: Sequence[ProbeResult | ChoiceResult]):
        self.row = judge.first_of(blamed)
        self._residual = _hypothesis((), judge.against(runner, self.row)).residual

    def is_eased_by(self, hypothesis: Hypothesis) -> bool:
        return not hypothesis.blamed or hypothesis.residual <= CLOSE * self._residual


class _Experiment:
    """Runs hypotheses against one judge and remembers what each leaves. `count`: how many were run."""

    def __init__(
        self,
        judge: Judge,
        reference: FaultyReference,
        before: Comparison,
        draws: int,
        false_alarm_rate: float,
        progress: Callable[[str], None],
    ):
        self._judge, self._reference, self._progress = judge, reference, progress
        self._draws, self._false_alarm_rate = draws, false_alarm_rate
        self._residual_before = _worst([*before.probes, *before.choices])
        self._weight_before = _weight([*before.probes, *before.choices])
        self._witness = self._witness_of((), before.blamed)
        self.count = 0
        # Those that ease the witness, and so were run on the whole workload.
        self._tried: dict[tuple[str, ...], Hypothesis] = {}
        self._faults: dict[tuple[str, ...], tuple[Fault, ...]] = {}
        self._found: dict[tuple[str, ...], Findings] = {}
        self._judged_again: set[tuple[str, ...]] = set()

    def try_each(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._run((fault,), self._witness)
        self._judge_closest_again()

    def try_pairs(self, faults: Sequence[Fault]) -> None:
        """Together with each fault that explains a part, those that can show where something is left.

        The worst of that is the witness, not the first: what is left a little above the noise may be noise that the
        first fault makes larger.
        """
        partial = [h for h in self.sorted() if h.weight < self._weight_before]
        for hypothesis in partial[:PARTIAL]:
            own, found = self._faults[hypothesis.faults], self._found[hypothesis.faults]
            results: list[ProbeResult | ChoiceResult] = [*found.probes, *found.choices]
            left = [result for result in results if result.name in hypothesis.blamed and result.verdict != "missing"]
            if not left:
                continue
            witness = self._witness_of(own, [max(left, key=lambda result: result.excess)])
            patterns = {pattern_of(result.name) for result in left}
            for fault in faults:
                if patterns & set(fault.first):
                    self._run((*own, fault), witness)
        self._judge_closest_again()

    def _witness_of(self, faults: tuple[Fault, ...], blamed: Sequence[ProbeResult | ChoiceResult]) -> _Witness:
        return _Witness(self._judge, self._reference(torch.float64, faults), blamed)

    def _run(self, faults: tuple[Fault, ...], witness: _Witness) -> None:
        """On the witness first; on the whole workload if that helps."""
        key = tuple(fault.id for fault in faults)
        self._progress(" + ".join(key))
        self.count += 1
        try:
            seen = self._judge.against(self._reference(torch.float64, faults), witness.row)
            if not witness.is_eased_by(_hypothesis(key, seen)):
                return
            found = self._judge.against(self._reference(torch.float64, faults))
        except (RuntimeError, IndexError, ValueError):
            # The fault's shapes do not fit this configuration or these recorded values: it is not what happened.
            return
        self._faults[key] = faults
        self._remember(key, found)

    def _judge_closest_again(self) -> None:
        """Hold what comes close against a floor of its own: a fault can make rounding larger than it is without.

        Only the best few of those that leave a small part of the difference, where nothing explains all of it.
        """
        if self.explanations():
            return
        close = [h for h in self.sorted() if h.confirmed and h.residual <= CLOSE * self._residual_before]
        for hypothesis in [h for h in close if h.faults not in self._judged_again][:JUDGED_AGAIN]:
            self._judged_again.add(hypothesis.faults)
            faults, old = self._faults[hypothesis.faults], self._judge
            again = Judge(
                lambda dtype, faults=faults: self._reference(dtype, faults),  # type: ignore[misc]
                old.candidate,
                old.dtype,
                old.workload,
                old.view,
                self._draws,
                self._false_alarm_rate,
            )
            found = Findings(again.probes(), again.choices(), again.truth, hypothesis.confirmed)
            self._remember(hypothesis.faults, found)

    def _remember(self, key: tuple[str, ...], found: Findings) -> None:
        self._tried[key], self._found[key] = _hypothesis(key, found), found

    def sorted(self) -> list[Hypothesis]:
        return sorted(self._tried.values(), key=lambda h: (not h.explains, h.weight, len(h.faults), h.residual))

    def explanations(self) -> tuple[Hypothesis, ...]:
        return tuple(hypothesis for hypothesis in self.sorted() if hypothesis.explains)

    def equivalent_to(self, best: Hypothesis) -> tuple[tuple[str, ...], ...]:
        """Other explanations whose float64 values are the same, at every tensor that the candidate shows."""
        truth = self._found[best.faults].truth
        others = (h.faults for h in self.explanations() if h.faults != best.faults)
        same = (key for key in others if _same_values(self._found[key].truth, truth, self._judge.names))
        return tuple(islice(same, MAX_EQUIVALENTS - 1))


def _hypothesis(faults: tuple[str, ...], found: Findings) -> Hypothesis:
    # A tensor that the hypothesis does not compute at all, and the candidate has, is not explained.
    blamed = frozenset(
        [probe.name for probe in found.probes if probe.verdict in ("different", "missing")]
        + [choice.name for choice in found.choices if choice.verdict == "flip"]
    )
    results: list[ProbeResult | ChoiceResult] = [*found.probes, *found.choices]
    return Hypothesis(faults, _worst(results), blamed, _weight(results), found.confirmed)


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


def _weight(results: Iterable[ProbeResult | ChoiceResult]) -> float:
    """How much is outside the noise, over all tensors and choices: the sum of the logarithms of the excesses."""
    excesses = [min(result.excess, 1e12) for result in results]
    return sum(log(excess) for excess in excesses if excess > 1.0)
