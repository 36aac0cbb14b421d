"""What an agreement says nothing about: kinds of faults that this workload, or what was recorded of it, cannot show.

A short run agrees with many wrong ports. Up to the top-k every key is selected, whatever the scores are; up to the
window nothing is cut off; in one step nothing is read back from a cache.
"""

from __future__ import annotations

from collections.abc import Collection

from parity.tokens import Tokens
from parity.workload import Draft, Fork, Free, Step, Truncate, Workload
from reference.config import TextConfig


def blind_spots(config: TextConfig, workload: Workload, names: Collection[str]) -> tuple[str, ...]:
    """One sentence for each kind of fault that is not excluded, however well the recorded `names` agree."""
    longest, steps = _longest(config, workload), _most_steps(workload)
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
    if steps == 1:
        found.append("a fault of the caches is not excluded: every request runs in a single step")
    if config.num_nextn_predict_layers and not any(name.startswith("mtp.") for name in names):
        found.append("a fault of the draft layer is not excluded: none of its tensors was recorded")
    return tuple(found)


def _longest(config: TextConfig, workload: Workload) -> int:
    """Tokens of the longest request at any time."""
    tokens, longest = Tokens(workload, config.vocab_size), 0
    for action in workload.actions:
        if isinstance(action, Step):
            for request, count, _ in action.items:
                tokens.take(request, count)
                longest = max(longest, tokens.length(request))
        elif isinstance(action, Truncate):
            tokens.truncate(action.request, action.count)
        elif isinstance(action, Fork):
            tokens.fork(action.request, action.new)
        elif isinstance(action, Free):
            tokens.free(action.request)
    return longest


def _most_steps(workload: Workload) -> int:
    """Steps and drafts of the request that has the most; a fork reads what its origin has cached."""
    count: dict[str, int] = {}
    for action in workload.actions:
        if isinstance(action, Step):
            for request, _, _ in action.items:
                count[request] = count.get(request, 0) + 1
        elif isinstance(action, Draft):
            count[action.request] = count.get(action.request, 0) + 1
        elif isinstance(action, Fork):
            count[action.new] = count[action.request]
    return max(count.values())
