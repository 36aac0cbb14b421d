"""Sampling with drafts keeps the target's distribution, whatever the draft layer proposes: a test of counts.

The model is a table of probabilities of the next token given the last one, so the distribution of a text is known. Over
thousands of seeds the texts must be distributed so, for a draft layer that is right, wrong, or always says the same.
A draft is kept where it equals the token that the target draws with the noise of that place, so texts are not only
distributed alike: each is the text without drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from reference.generate import generate
from reference.sampling import Sampling, choose
from reference.session import DraftItem, StepItem

TOKENS, LENGTH, SEEDS, START = 3, 4, 3000, 0
# A cell of fewer expected texts is pooled with others.
FEWEST = 5.0
SOURCE = torch.Generator().manual_seed(5)
TARGET_WW = torch.randn(TOKENS, TOKENS, generator=SOURCE, dtype=torch.float64)
DRAFTS = {
    "right": TARGET_WW,
    "near": TARGET_WW + 0.5 * torch.randn(TOKENS, TOKENS, generator=SOURCE, dtype=torch.float64),
    "wrong": -3.0 * TARGET_WW,
    "the same": torch.tensor([9.0, 0.0, 0.0], dtype=torch.float64).expand(TOKENS, TOKENS),
}


class Table:
    """What generation needs of a session: row w of the tables has the logits behind token w."""

    def __init__(self, draft_WW: Tensor):
        self._draft_WW = draft_WW
        self._held: dict[str, list[int]] = {}

    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict[str, Tensor]:
        for item in items:
            self._held.setdefault(item.request, []).extend(item.token_ids)
        return {item.request: TARGET_WW[list(item.token_ids)] for item in items}

    def drafts(self, items: Sequence[DraftItem]) -> dict[str, Tensor]:
        found = {}
        for item in items:
            last, rows = item.next_token, []
            for place in range(item.depth):
                rows.append(self._draft_WW[last])
                (last,) = choose(rows[-1][None], [self.length(item.request) + 1 + place], item.sampling)
            found[item.request] = torch.stack(rows)
        return found

    def truncate(self, request: str, length: int) -> None:
        del self._held[request][length:]

    def length(self, request: str) -> int:
        return len(self._held[request])


def texts(draft: str, depth: int, temperature: float) -> tuple[dict[str, list[int]], tuple[float, ...]]:
    """One request a seed, all in one batch."""
    names = {f"seed {seed}": Sampling(temperature, seed=seed) for seed in range(SEEDS)}
    found = generate(Table(DRAFTS[draft]), dict.fromkeys(names, (START,)), LENGTH, depth, sampling=names)
    return found.tokens, found.acceptance


def excess(found: dict[str, list[int]], temperature: float) -> float:
    """Chi-square of the counts, in units of what it exceeds once in a million (Wilson and Hilferty's approximation)."""
    probabilities_WW = (TARGET_WW / temperature).softmax(-1)
    counts = Counter(map(tuple, found.values()))
    cells, pooled = [], [0.0, 0.0]
    for text in product(range(TOKENS), repeat=LENGTH):
        steps = zip((START, *text), text, strict=False)
        expected = SEEDS * float(torch.stack([probabilities_WW[step] for step in steps]).prod())
        if expected >= FEWEST:
            cells.append((counts[text], expected))
        else:
            pooled = [pooled[0] + counts[text], pooled[1] + expected]
    cells += [(pooled[0], pooled[1])] if pooled[1] >= FEWEST else []
    total, freedom = sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1
    z = NormalDist().inv_cdf(1.0 - 1e-6)
    limit = freedom * (1.0 - 2.0 / (9.0 * freedom) + z * (2.0 / (9.0 * freedom)) ** 0.5) ** 3
    return total / limit


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("draft", DRAFTS)
def test_texts_are_distributed_as_the_targets(draft: str, temperature: float) -> None:
    found, acceptance = texts(draft, 2, temperature)
    assert excess(found, temperature) < 1.0
    assert found == texts("right", 0, temperature)[0]
    if draft == "right":
        assert acceptance == (1.0, 1.0)
    else:
        assert max(acceptance) < 1.0


def test_the_count_sees_what_takes_every_draft() -> None:
    """The draft layer's own texts are not distributed as the target's."""
    own = Table(DRAFTS["near"])
    found = {}
    for seed in range(SEEDS):
        sampling, name = Sampling(1.0, seed=seed), f"seed {seed}"
        own.step([StepItem(name, (START,), "prefill")])
        own.truncate(name, 0)
        rows = own.drafts([DraftItem(name, START, LENGTH, sampling=sampling)])[name]
        found[name] = choose(rows, range(1, LENGTH + 1), sampling)
    assert excess(found, 1.0) > 1.0
