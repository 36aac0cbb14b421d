"""Runs a workload on a runner, with listeners on its probes."""

from collections.abc import Sequence

from parity.runners import NotSupportedHere, Runner
from parity.trace import Trace, TraceRecorder
from parity.workload import Draft, Fork, Free, Step, Truncate, Workload, token_id
from reference.probe import Listener, listening
from reference.session import StepItem


class _Tokens:
    """The token ids of each request, as the workload defines them."""

    def __init__(self, seed: int, vocab_size: int):
        self._seed, self._vocab_size = seed, vocab_size
        self._lengths: dict[str, int] = {}
        self._epochs: dict[str, int] = {}

    def take(self, request: str, count: int) -> tuple[int, ...]:
        ids = self.peek(request, count)
        self._lengths[request] = self._lengths.get(request, 0) + count
        return ids

    def peek(self, request: str, count: int) -> tuple[int, ...]:
        start, epoch = self._lengths.get(request, 0), self._epochs.get(request, 0)
        return tuple(token_id(self._seed, request, start + i, epoch, self._vocab_size) for i in range(count))

    def truncate(self, request: str, count: int) -> int:
        self._lengths[request] -= count
        self._epochs[request] = self._epochs.get(request, 0) + 1
        return self._lengths[request]

    def fork(self, request: str, new: str) -> None:
        self._lengths[new] = self._lengths[request]
        self._epochs[new] = 0

    def live(self) -> list[str]:
        return list(self._lengths)

    def free(self, request: str) -> None:
        del self._lengths[request]
        self._epochs[request] = self._epochs.get(request, 0) + 1


def run_workload(
    runner: Runner, workload: Workload, recorder: TraceRecorder, *after: Listener, before: Sequence[Listener] = ()
) -> list[str]:
    """Run every action. A tensor goes through the listeners `before`, is recorded, and goes through those `after`.

    Requests that are left at the end are freed. Returns a line for each action that the runner does not support: it
    counts as skipped, never as passed.
    """
    tokens = _Tokens(workload.seed, runner.config.text.vocab_size)
    skipped: list[str] = []
    for index, action in enumerate(workload.actions):
        recorder.action = index
        with listening(*before, recorder, *after):
            try:
                _act(runner, action, tokens)
            except NotSupportedHere as reason:
                skipped.append(f"action {index}: {reason}")
    for request in tokens.live():
        runner.free(request)
    return skipped


def _act(runner: Runner, action: Step | Truncate | Draft | Fork | Free, tokens: _Tokens) -> None:
    if isinstance(action, Step):
        items = [StepItem(request, tokens.take(request, count), kind) for request, count, kind in action.items]
        runner.step(items)
    elif isinstance(action, Truncate):
        runner.truncate(action.request, tokens.truncate(action.request, action.count))
    elif isinstance(action, Draft):
        next_token, *forced = tokens.peek(action.request, action.depth + 1)
        runner.draft(action.request, next_token, action.depth, tuple(forced))
    elif isinstance(action, Fork):
        tokens.fork(action.request, action.new)
        runner.fork(action.request, action.new)
    else:
        tokens.free(action.request)
        runner.free(action.request)


def traced(
    runner: Runner,
    workload: Workload,
    *after: Listener,
    before: Sequence[Listener] = (),
    patterns: Sequence[str] = ("*",),
) -> Trace:
    """The trace of one run; see `run_workload`."""
    recorder = TraceRecorder(patterns, runner.name)
    run_workload(runner, workload, recorder, *after, before=before)
    return recorder.trace()
