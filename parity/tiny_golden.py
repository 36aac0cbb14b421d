"""The golden of the tiny model that ships with the package, and how it was made.

Its workload crosses the window and the top-k, in one prefill, in a chunk and by decoding, with two requests at once,
and verifies drafts of which one is taken back. Its tokens are chosen so that no choice is near a tie.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from parity.clear_tokens import clear_workload
from parity.golden import make_golden
from parity.golden_file import Golden
from parity.workload import Workload
from reference.checkpoint import write_synthetic
from reference.config import tiny

SEED = 0
WORKLOAD = "p:a9 p:a6+b3 d:a+b m:a2 v:a3 t:a1 d:a m:a1"


def make_tiny_golden(target: str | Path, progress: Callable[[str], None] = lambda line: None) -> Golden:
    """Write the golden of the tiny model with synthetic weights of seed 0, for runs in bfloat16.

    The files are those that `note-parity synthetic FOLDER` writes, so that the golden knows them by their hashes.
    """
    with TemporaryDirectory(prefix="note-parity-") as parent:
        folder = Path(parent) / "tiny"
        write_synthetic(folder, tiny(), SEED)
        workload = clear_workload(folder, Workload.parse(WORKLOAD, SEED), progress)
        return make_golden(folder, target, workload, synthetic_seed=SEED, progress=progress)
