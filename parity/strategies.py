"""Hypothesis strategies that draw workloads.

Structure is drawn, tensors are not: lengths at the boundaries of window and top-k, chunks, decode, requests that join
and leave, drafts accepted and taken back. Simpler choices come first, so a failure shrinks to fewer actions, fewer
requests and fewer tokens.
"""

from __future__ import annotations

from hypothesis import strategies as st

from parity.workload import Action, Draft, Fork, Free, Step, Truncate, Workload
from reference.config import TextConfig
from reference.session import StepKind

MAX_DRAFTS = 4
_REQUESTS = "abc"


def boundary_lengths(config: TextConfig) -> list[int]:
    """1 and what lies around the window and the top-k, ascending."""
    window, topk = config.sliding_window_size, config.index_topk
    around = {base + offset for base in (window, topk) for offset in (-1, 0, 1)}
    return sorted({1, 2, 3} | {length for length in around if length > 0})


class _State:
    """What is known of the requests while a workload is drawn."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        self.headroom: dict[str, int] = {}  # tokens that can be taken back

    def append(self, request: str, count: int) -> None:
        self.lengths[request] = self.lengths.get(request, 0) + count
        self.headroom[request] = min(MAX_DRAFTS, self.headroom.get(request, 0) + count, self.lengths[request] - 1)


@st.composite
def workloads(
    draw: st.DrawFn, config: TextConfig, max_actions: int = 7, max_tokens: int = 90, drafting: bool = True
) -> Workload:
    """A valid workload. Its first action prefills; the rest is drawn from what is possible then."""
    state, actions = _State(), []
    count = draw(st.integers(1, max_actions))
    for _ in range(count):
        if sum(state.lengths.values()) > max_tokens:
            break
        actions.append(draw(_action(config, state, drafting)))
    workload = Workload(tuple(actions), draw(st.integers(0, 999)))
    workload.check()
    return workload


def _action(config: TextConfig, state: _State, drafting: bool) -> st.SearchStrategy[Action]:
    options: list[st.SearchStrategy[Action]] = [_step(config, state)]
    live = sorted(state.lengths)
    if takeable := [request for request in live if state.headroom[request] > 0]:
        options.append(_truncate(state, takeable))
    if live and drafting and config.num_nextn_predict_layers:
        options.append(st.builds(Draft, st.sampled_from(live), st.integers(1, MAX_DRAFTS)))
    if live and (unused := [request for request in _REQUESTS if request not in live]):
        options.append(_fork(state, live, unused))
    if len(live) > 1:
        options.append(_free(state, live))
    return st.one_of(options)


@st.composite
def _step(draw: st.DrawFn, config: TextConfig, state: _State) -> Action:
    requests = draw(st.lists(st.sampled_from(_REQUESTS), min_size=1, max_size=len(_REQUESTS), unique=True))
    items: list[tuple[str, int, StepKind]] = []
    for request in requests:
        kinds: list[StepKind] = ["prefill"] if request not in state.lengths else ["decode", "prefill", "verify"]
        kind = draw(st.sampled_from(kinds))
        if kind == "decode":
            count = 1
        elif kind == "verify":
            count = draw(st.integers(1, 1 + MAX_DRAFTS))
        else:
            count = draw(st.sampled_from(boundary_lengths(config)))
        state.append(request, count)
        items.append((request, count, kind))
    return Step(tuple(items))


@st.composite
def _truncate(draw: st.DrawFn, state: _State, takeable: list[str]) -> Action:
    request = draw(st.sampled_from(takeable))
    count = draw(st.integers(1, state.headroom[request]))
    state.lengths[request] -= count
    state.headroom[request] -= count
    return Truncate(request, count)


@st.composite
def _fork(draw: st.DrawFn, state: _State, live: list[str], unused: list[str]) -> Action:
    origin, new = draw(st.sampled_from(live)), unused[0]
    state.lengths[new], state.headroom[new] = state.lengths[origin], state.headroom[origin]
    return Fork(origin, new)


@st.composite
def _free(draw: st.DrawFn, state: _State, live: list[str]) -> Action:
    request = draw(st.sampled_from(live))
    del state.lengths[request], state.headroom[request]
    return Free(request)
