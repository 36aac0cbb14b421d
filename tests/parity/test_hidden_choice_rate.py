"""How often rounding changes a choice that counts as clear: what `stored.CLEAR_CHANGES` is, measured.

Truth, floor and margins as in a golden, from eight draws in bfloat16; six more draws stand for implementations that
round as the reference does, with the truth's choices replayed, so that each choice is tried by itself. Profile
`explore`: 90 workloads.
"""

from __future__ import annotations

import torch
from hypothesis import settings

from parity.golden import with_margins
from parity.golden_file import ValueTable
from parity.replay import ChoiceReplay
from parity.rounding import RoundingDraw
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.schema import decided_by
from parity.stored import CLEAR_CHANGES, CLEAR_MARGIN
from parity.tolerance import DRAWS, floor_of
from parity.trace import Trace
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors
from reference.config import tiny

CONFIG = tiny()
WEIGHTS = dict(synthetic_tensors(CONFIG))
TRUTH, ROUNDED = (ReferenceRunner(CONFIG, WEIGHTS, dtype) for dtype in (torch.float64, torch.bfloat16))
WORKLOADS = 90 if settings.get_current_profile_name() == "explore" else 3
IMPLEMENTATIONS = 6


def drawn(workload: Workload, truth: Trace, draw: int) -> tuple[Trace, set[tuple[str, int]]]:
    """A run that rounds otherwise, and where it would have chosen otherwise."""
    replay = ChoiceReplay(truth)
    with RoundingDraw(draw).drawing():
        trace = traced(ROUNDED, workload, before=[replay])
    return trace, {(exchange.name, exchange.position) for exchange in replay.exchanges}


def test_rounding_changes_few_of_the_choices_that_count_as_clear() -> None:
    clear = changed = close = changed_close = 0
    for seed in range(WORKLOADS):
        workload = Workload.parse("p:a40 d:a d:a", seed)
        truth = traced(TRUTH, workload)
        draws = [drawn(workload, truth, draw)[0] for draw in range(1, DRAWS + 1)]
        others = [drawn(workload, truth, 100 + number)[1] for number in range(IMPLEMENTATIONS)]
        for name in filter(decided_by, truth.names()):
            scores = str(decided_by(name))
            values = truth.table(scores, "a")
            floor = floor_of([draw.table(scores, "a").values for draw in draws], values.values, torch.float32)
            table = with_margins(
                values.keys, truth.table(name, "a").values, ValueTable(values.keys, values.values, floor)
            )
            for (position, _), ratio in zip(table.keys, (table.margins / table.margin_noises).tolist(), strict=True):
                is_clear = CLEAR_MARGIN <= ratio < float("inf")
                count = sum((name, position) in other for other in others)
                clear, changed = clear + is_clear * IMPLEMENTATIONS, changed + is_clear * count
                is_close = ratio < CLEAR_MARGIN
                close, changed_close = close + is_close * IMPLEMENTATIONS, changed_close + is_close * count
    print(f"clear: {changed} of {clear:,} changed; others: {changed_close} of {close:,}")
    assert clear > 1000 * WORKLOADS
    assert changed <= 3 * CLEAR_CHANGES * clear + 1
    # What is not clear is changed often: the margin parts the two.
    assert changed_close > 0.05 * close
