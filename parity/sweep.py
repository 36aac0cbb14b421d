"""The workloads of a check: the boundaries at which ports have been seen to break, and random ones."""

import hypothesis

from parity.strategies import workloads
from parity.workload import Workload
from reference.config import TextConfig


def boundary_workloads(config: TextConfig) -> tuple[Workload, ...]:
    """Lengths around the window and the top-k, chunks, decode, several requests, drafts taken back, a fork.

    Short lengths: meant for small windows and top-k, as `tiny()` has them.
    """
    W, K = config.sliding_window_size, config.index_topk
    long = max(W, K) + 3
    lines = (
        # One prefill past window and top-k, then decode, then drafts.
        f"p:a{long + W} d:a d:a m:a3",
        # Up to the window and across it by decoding; a second request is prefilled meanwhile.
        f"p:a{max(1, W - 1)} d:a d:a p:b{K}+d:a d:a+b d:a+b m:b2",
        # Chunks that end around the window and the top-k.
        f"p:a{W} p:a{max(1, K - W)} p:a1 p:a{W + 2} p:a2 d:a",
        # Verification with some drafts taken back, across the ring's wrap; the draft layer follows.
        f"p:a{W + 1}+b{K + 2} m:a3 v:a4 t:a3 d:a m:a3 v:a4+b3 t:b1 d:a+b m:a2 m:b4",
        # A fork lives on after its origin is gone.
        f"p:a{long} d:a f:a>c d:a+c x:a p:c{W} d:c m:c2",
        # The shortest ones.
        "p:a1 m:a1 d:a d:a+b p:b2+d:a",
    )
    return tuple(Workload.parse(line, seed) for seed, line in enumerate(lines))


def drawn_workloads(config: TextConfig, count: int, seed: int = 0) -> tuple[Workload, ...]:
    """`count` random workloads, the same for the same seed."""
    drawn: list[Workload] = []
    if count:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count, database=None, deadline=None, phases=[hypothesis.Phase.generate], derandomize=False
        )
        @hypothesis.given(workloads(config))
        def keep(workload: Workload) -> None:
            drawn.append(workload)

        keep()
    return tuple(drawn)
