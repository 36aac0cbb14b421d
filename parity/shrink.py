"""The smallest workload that still fails: of a long one, what can be left out is left out.

Requests first, then the end, then single actions and items, then tokens; whatever still fails takes the place of the
workload before it, until nothing smaller fails or the time is up. Only what an implementation can do is tried: requests
begin with a prefill, and no more is taken back than may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from parity.workload import Action, Draft, Fork, Free, Step, Truncate, Workload

# Tokens that can always be taken back: what rings keep beside their window.
MAX_TAKEN_BACK = 4


def smallest_failing(
    workload: Workload, fails: Callable[[Workload], bool], may_go_on: Callable[[], bool] = lambda: True
) -> Workload:
    """`workload` fails; `fails` runs another one. Returns the smallest that was found to fail."""
    tried = {workload.text()}
    before: Workload | None = None
    while workload is not before:
        before = workload
        for smaller in smaller_workloads(before):
            if smaller.text() in tried:
                continue
            if not may_go_on():
                return workload
            tried.add(smaller.text())
            if fails(smaller):
                workload = smaller
                break
    return workload


def smaller_workloads(workload: Workload) -> Iterator[Workload]:
    """Workloads with less in them, the largest cuts first, as far as they are possible."""
    actions = workload.actions
    for cut in (*_without_a_request(workload), *_prefixes(actions), *_without_an_action(actions), *_with_less(actions)):
        if is_possible(cut):
            yield replace(workload, actions=cut)


def is_possible(actions: tuple[Action, ...]) -> bool:
    """Whether every action is one of a request that is there then, each of which began with a prefill."""
    lengths: dict[str, int] = {}
    spare: dict[str, int] = {}
    for action in actions:
        if isinstance(action, Step):
            for request, count, kind in action.items:
                if request not in lengths and kind != "prefill":
                    return False
                lengths[request] = lengths.get(request, 0) + count
                spare[request] = min(MAX_TAKEN_BACK, spare.get(request, 0) + count, lengths[request] - 1)
        elif action.request not in lengths:
            return False
        elif isinstance(action, Truncate):
            if action.count > spare[action.request]:
                return False
            lengths[action.request] -= action.count
            spare[action.request] -= action.count
        elif isinstance(action, Fork):
            if action.new in lengths:
                return False
            lengths[action.new], spare[action.new] = lengths[action.request], spare[action.request]
        elif isinstance(action, Free):
            del lengths[action.request], spare[action.request]
    return any(isinstance(action, Step) for action in actions)


def _without_a_request(workload: Workload) -> Iterator[tuple[Action, ...]]:
    for gone in workload.requests if len(workload.requests) > 1 else ():
        kept: list[Action] = []
        for action in workload.actions:
            if isinstance(action, Step):
                items = tuple(item for item in action.items if item[0] != gone)
                kept += [Step(items)] if items else []
            elif gone not in (action.request, action.new if isinstance(action, Fork) else ""):
                kept.append(action)
        yield tuple(kept)


def _prefixes(actions: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
    half = len(actions) // 2
    while half < len(actions) and actions:
        yield actions[:half]
        half += max(1, (len(actions) - half) // 2)


def _without_an_action(actions: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
    for number, action in enumerate(actions):
        yield actions[:number] + actions[number + 1 :]
        if isinstance(action, Step) and len(action.items) > 1:
            for gone in action.items:
                step = Step(tuple(item for item in action.items if item is not gone))
                yield (*actions[:number], step, *actions[number + 1 :])


def _with_less(actions: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
    """Fewer tokens in one place: one, half of them, one less."""
    for number, action in enumerate(actions):
        for less in _lessened(action):
            yield (*actions[:number], less, *actions[number + 1 :])


def _lessened(action: Action) -> Iterator[Action]:
    if isinstance(action, Step):
        for place, (request, count, kind) in enumerate(action.items):
            for fewer in _fewer(count):
                yield Step((*action.items[:place], (request, fewer, kind), *action.items[place + 1 :]))
    elif isinstance(action, Draft):
        yield from (replace(action, depth=fewer) for fewer in _fewer(action.depth))
    elif isinstance(action, Truncate):
        yield from (replace(action, count=fewer) for fewer in _fewer(action.count))


def _fewer(count: int) -> list[int]:
    return sorted({number for number in (1, count // 2, count - 1) if 0 < number < count})
