"""What an agreement says nothing about: kinds of faults that this workload, or what was recorded of it, cannot show.

A short run agrees with many wrong ports. Up to the top-k every key is selected, whatever the scores are; up to the
window nothing is cut off; in one step nothing is read back from a cache.
"""

from __future__ import annotations

from collections.abc import Collection

from parity.plain_steps import plain_steps
from parity.workload import Workload
from reference.config import TextConfig


def blind_spots(config: TextConfig, workload: Workload, names: Collection[str]) -> tuple[str, ...]:
    """One sentence for each kind of fault that is not excluded, however well the recorded `names` agree."""
    steps = [step for step in plain_steps(workload, config.vocab_size) if step.kind != "draft"]
    longest = max(len(step.history) + len(step.token_ids) for step in steps)
    found = []
    if longest <= config.index_topk:
        why = f"no row sees more than {longest} keys and the top-k is {config.index_topk}, so that all are selected"
        if any(".attn.index." in name and not name.endswith(".selected") for name in names):
            found.append(f"a fault of the selection is not excluded: {why}")
        else:
            found.append(f"a fault of the indexer is not excluded: {why}, and its own tensors were not recorded")
    if longest <= config.sliding_window_size:
        found.append(
            f"a fault of the sliding window is not excluded: no request has more than {longest} tokens, and the window "
            f"is {config.sliding_window_size}"
        )
    if not any(step.history for step in steps):
        found.append("a fault of the caches is not excluded: every request runs in a single step")
    if config.num_nextn_predict_layers and not any(name.startswith("mtp.") for name in names):
        found.append("a fault of the draft layer is not excluded: none of its tensors was recorded")
    return tuple(found)
