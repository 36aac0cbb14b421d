"""Proposes the mapping of a foreign trace: which sum, layer shift or lane order makes the difference vanish?

For every name of the schema that the expected trace has, tensors of the other trace are tried in its place, on a few
rows: under any name, of this layer and its neighbours, as they are, with [even | odd] lanes put back into pairs, with
heads flattened, and as the sum of two tensors of one layer. What is found in one layer must hold in all. A prefix that
makes names of the schema is taken off first.

A hypothesis counts if it leaves less than an eighth of the difference that is there without it, and less than an
eighth of the tensor. Tensors that have nothing to do with each other differ by 1.4 times their size, lanes in the wrong
order by about as much, and the residual streams of neighbouring layers by a tenth or more; rounding leaves a hundredth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping as Dict
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from parity.manifest import DumpError
from parity.mapping import Mapping, Rule
from parity.schema import ProbeSpec, pattern_of, spec_of
from parity.trace import Trace
from parity.transforms import Context, Deinterleaved, Rearrange, Transform

ROWS = 8
MAX_SHIFT = 2
VANISHED = 1 / 8
# Two remainders below this are both rounding, and neither is the better one.
ROUNDING = 1 / 256

INTERLEAVE: Literal["deinterleaved_to_interleaved"] = "deinterleaved_to_interleaved"

_Rows = tuple[tuple[int, ...], Tensor]


@dataclass(frozen=True)
class Evidence:
    """Errors are relative to the expected tensor, of the worst layer; `before` is at most 1, and 1 without the name."""

    to: str
    sources: tuple[str, ...]
    layer_shift: int
    transforms: tuple[str, ...]
    before: float
    after: float
    layers: int


@dataclass(frozen=True)
class Proposal:
    """`mapping` is None where nothing needs one, or nothing helps. `prefix` was taken off the other trace's names.

    Names as patterns: `explained` by a tensor of the other trace, under their own name or another; `unexplained`.
    """

    mapping: Mapping | None
    evidence: tuple[Evidence, ...]
    explained: tuple[str, ...]
    unexplained: tuple[str, ...]
    prefix: str = ""


def propose_mapping(expected: Trace, actual: Trace) -> Proposal:
    """Compare the first rows of each name under the hypotheses above; both traces must have the same requests."""
    prefix = _common_prefix(actual.names())
    if prefix:
        actual = Trace([replace(entry, name=entry.name.removeprefix(prefix)) for entry in actual.entries()])
    known, foreign = _Samples(expected), _Samples(actual)
    found = {pattern: _explanations(pattern, known, foreign) for pattern in known.patterns if _spec(pattern)}
    shift = _common_shift(found)
    rules, evidence, unexplained = [], [], []
    for pattern, explanations in found.items():
        if not explanations:
            unexplained.append(pattern)
            continue
        best = min(explanations, key=lambda explanation: explanation.rank(pattern, shift))
        rules.append(best.rule(pattern))
        if not best.is_identity(pattern):
            words = tuple(transform.op for transform in best.transforms)
            before = min(_error(_Hypothesis((pattern,)), pattern, known, foreign)[0], 1.0)
            evidence.append(Evidence(pattern, best.sources, best.shift, words, before, best.error, best.layers))
    explained = tuple(pattern for pattern, explanations in found.items() if explanations)
    if not evidence and not (prefix and explained):
        return Proposal(None, (), explained, tuple(unexplained))
    kept = [pattern for pattern in unexplained if pattern in foreign.patterns]
    return Proposal(_mapping(rules, kept, shift, prefix), tuple(evidence), explained, tuple(unexplained), prefix)


def _common_prefix(names: list[str]) -> str:
    """What stands before a name of the schema in at least half of all names, and in more than are of the schema now."""
    prefixes: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        suffix = next(filter(spec_of, (".".join(parts[first:]) for first in range(len(parts)))), None)
        if suffix is not None:
            prefixes[name.removesuffix(suffix)] += 1
    prefix, count = prefixes.most_common(1)[0] if prefixes else ("", 0)
    return prefix if 2 * count >= len(names) and count > prefixes[""] else ""


def _common_shift(found: Dict[str, list[_Explanation]]) -> int:
    """The shift that explains most names under their own name."""
    shifts = Counter(
        explanation.shift
        for pattern, explanations in found.items()
        for explanation in explanations
        if explanation.sources == (pattern,) and "{i}" in pattern
    )
    return shifts.most_common(1)[0][0] if shifts else 0


def _mapping(rules: list[Rule], kept: list[str], shift: int, prefix: str) -> Mapping:
    """The common shift is said once. It holds for the names that nothing explains too; they are `kept`."""
    rules = [rule.model_copy(update={"layer_shift": None}) if rule.layer_shift == shift else rule for rule in rules]
    rules += [Rule(sources=(pattern,), to=pattern) for pattern in kept]
    strip = (prefix,) if prefix else ()
    return Mapping(mapping_version=1, title="proposed", strip=strip, layer_shift=shift, rules=tuple(rules))


def _spec(pattern: str) -> ProbeSpec | None:
    return spec_of(pattern.replace("{i}", "0").replace("{s}", "0"))


@dataclass(frozen=True)
class _Hypothesis:
    """Where the tensors of a name may come from."""

    sources: tuple[str, ...]
    shift: int = 0
    transforms: tuple[Transform, ...] = ()

    def rule(self, pattern: str) -> Rule:
        shift = self.shift if "{i}" in pattern else None
        return Rule(sources=self.sources, to=pattern, transforms=self.transforms, layer_shift=shift)

    def is_identity(self, pattern: str) -> bool:
        return (self.sources, self.shift, self.transforms) == ((pattern,), 0, ())


@dataclass(frozen=True)
class _Explanation(_Hypothesis):
    """A hypothesis that fits: its error, and in how many layers it could be tried."""

    error: float = 0.0
    layers: int = 0
    is_renamed: bool = False

    def rank(self, pattern: str, common_shift: int) -> tuple[int, int, float, float]:
        """Of two that explain equally well: more layers first, then the one that claims less. Where the same values
        come under two names (a latent, and what is cached of it), the name that is more like the pattern."""
        claims = 3 * (len(self.sources) - 1) + 2 * len(self.transforms) + 2 * self.is_renamed
        likeness = SequenceMatcher(None, pattern, self.sources[0]).ratio()
        return -self.layers, claims + abs(self.shift - common_shift), self.error, -likeness


class _Samples:
    """The first rows of every tensor of a trace, by pattern and layer number (-1 for names without one)."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self._cache: dict[str, _Rows | None] = {}

    @cached_property
    def patterns(self) -> dict[str, dict[int, str]]:
        patterns: dict[str, dict[int, str]] = {}
        for name in self._trace.names():
            pattern, number = _numbered(name)
            patterns.setdefault(pattern, {})[number] = name
        return patterns

    def rows(self, name: str) -> _Rows | None:
        """Positions and values [rows, …] of the first tensor of the first request."""
        if name not in self._cache:
            requests = self._trace.requests(name)
            entries = self._trace.of(name, min(requests)) if requests else ()
            values = entries[0].source.load()[:ROWS].clone() if entries else None
            self._cache[name] = None if values is None else (tuple(entries[0].positions[:ROWS]), values)
        return self._cache[name]

    def rope_width(self, layer: int) -> int | None:
        sample = self.rows(f"layers.{layer}.attn.k_rope")
        return None if sample is None else sample[1].shape[-1]


def _numbered(name: str) -> tuple[str, int]:
    """The pattern of any engine's name: its first number between dots is the layer."""
    if spec_of(name) is not None and not name.startswith("mtp."):
        pattern = pattern_of(name)
        return pattern, int(name.split(".")[1]) if "{i}" in pattern else -1
    if name.startswith("mtp."):
        return name, -1
    match = re.search(r"(?:^|(?<=\.))\d{1,6}(?=\.|$)", name)
    if match is None or "{" in name or "*" in name:
        return name, -1
    return f"{name[: match.start()]}{{i}}{name[match.end() :]}", int(match.group())


def _explanations(pattern: str, known: _Samples, foreign: _Samples) -> list[_Explanation]:
    """The hypotheses that fit best; none if the best does not fit."""
    tried = []
    for hypothesis in (_Hypothesis((pattern,)), *_hypotheses(pattern, known, foreign)):
        error, layers = _error(hypothesis, pattern, known, foreign)
        if error <= VANISHED:
            renamed = hypothesis.sources != (pattern,)
            fields = (hypothesis.sources, hypothesis.shift, hypothesis.transforms)
            tried.append(_Explanation(*fields, error, layers, renamed))
    least = min((explanation.error for explanation in tried), default=0.0)
    return [explanation for explanation in tried if explanation.error * VANISHED <= max(least, ROUNDING)]


def _hypotheses(pattern: str, known: _Samples, foreign: _Samples) -> Iterator[_Hypothesis]:
    """What fits the shape of one layer in the middle, of that layer and its neighbours."""
    layers = sorted(known.patterns[pattern])
    layer = layers[len(layers) // 2]
    sample = known.rows(known.patterns[pattern][layer])
    if sample is None:
        return
    shape = sample[1].shape
    fitting: dict[int, list[str]] = {}
    for other, names in foreign.patterns.items():
        for number in [-1] if layer < 0 else range(layer - MAX_SHIFT, layer + MAX_SHIFT + 1):
            values = foreign.rows(names[number]) if number in names else None
            if values is None or values[1][0].numel() != sample[1][0].numel():
                continue
            fitting.setdefault(number, []).append(other)
            reshaped = _unflattened(pattern, shape, values[1].shape)
            if reshaped is None:
                continue
            shift = 0 if layer < 0 else layer - number
            for transforms in _lane_orders(pattern, shape[-1], known.rope_width(layer)):
                yield _Hypothesis((other,), shift, (*reshaped, *transforms))
    for number, others in fitting.items():
        for pair in combinations(others, 2) if len(shape) == 2 else ():
            yield _Hypothesis(pair, 0 if layer < 0 else layer - number)


def _unflattened(pattern: str, expected: torch.Size, found: torch.Size) -> tuple[Transform, ...] | None:
    """Nothing to do, or heads and lanes that lie in one dim; None for any other shape."""
    if expected[1:] == found[1:]:
        return ()
    spec = _spec(pattern)
    if spec and len(expected) == 3 and len(found) == 2:
        rows, heads, lanes = spec.dims.split()
        return (Rearrange(op="rearrange", dims=f"{rows} ({heads} {lanes}) -> {spec.dims}"),)
    return None


def _lane_orders(pattern: str, width: int, rope_width: int | None) -> Iterator[tuple[Transform, ...]]:
    yield ()
    if not re.search(r"rope|index\.(query|key)|index_key", pattern):
        return
    if width % 2 == 0:
        yield (Deinterleaved(op=INTERLEAVE),)
    if rope_width and rope_width % 2 == 0 and rope_width < width:
        yield (Deinterleaved(op=INTERLEAVE, stop="R"),)
        yield (Deinterleaved(op=INTERLEAVE, start=width - rope_width),)


def _error(hypothesis: _Hypothesis, pattern: str, known: _Samples, foreign: _Samples) -> tuple[float, int]:
    """The worst layer's error and how many layers have all sources; infinite where none has."""
    errors: list[float] = []
    for layer, name in sorted(known.patterns[pattern].items()):
        if errors and errors[-1] > VANISHED and len(hypothesis.sources) > 1:
            break  # one of very many pairs, and refuted
        number = layer if layer < 0 else layer - hypothesis.shift
        sources = [foreign.patterns.get(source, {}).get(number) for source in hypothesis.sources]
        parts = [rows for source in sources if source is not None and (rows := foreign.rows(source)) is not None]
        expected = known.rows(name)
        if expected is not None and len(parts) == len(hypothesis.sources):
            context = Context(_sizes(pattern, expected[1], known.rope_width(layer)))
            # Router weights come in the order of their experts, which another engine may not show.
            has_order = not pattern.endswith("router.weights")
            errors.append(_distance(expected, parts, hypothesis.transforms, context, has_order))
    return max(errors, default=float("inf")), len(errors)


def _sizes(pattern: str, expected: Tensor, rope_width: int | None) -> dict[str, int]:
    """The legend's letters, as far as the expected tensors show them."""
    spec = _spec(pattern)
    letters = spec.dims.split() if spec else []
    sizes = dict(zip(letters, expected.shape, strict=False))
    return sizes | ({"R": rope_width} if rope_width else {})


def _distance(
    expected: _Rows, parts: list[_Rows], transforms: tuple[Transform, ...], context: Context, has_order: bool
) -> float:
    """Norm of the difference over norm of the row, of the median row of those that both have; for choices, the share of
    rows that differ. The median, since one row may have gone to another expert. Without order, both are sorted."""
    positions, total = parts[0]
    for _, other in parts[1:]:
        if other.shape != total.shape:
            return float("inf")
        if total.dtype != other.dtype or total.itemsize == 1:
            total, other = total.double(), other.double()  # 8-bit numbers do not add, nor mix with others
        total = total + other
    common = [(row, positions.index(position)) for row, position in enumerate(expected[0]) if position in positions]
    if not common:
        return float("inf")
    left, right = expected[1][[row for row, _ in common]], total[[row for _, row in common]]
    try:
        for transform in transforms:
            right = transform.apply(right, context)
    except DumpError:
        return float("inf")  # it fits another kind of layer
    if left.shape != right.shape or left.is_floating_point() != right.is_floating_point():
        return float("inf")
    if not left.is_floating_point():
        return float((left.long().sort(-1).values != right.long().sort(-1).values).any(-1).double().mean())
    left, right = left.double(), right.double()
    if not has_order:
        left, right = left.sort(-1).values, right.sort(-1).values
    finite = left.isfinite()
    if not torch.equal(finite, right.isfinite()):
        return float("inf")
    left, right = (torch.where(finite, side, 0.0).flatten(1) for side in (left, right))
    return float(((left - right).norm(dim=1) / left.norm(dim=1).clamp(min=1e-300)).median())
