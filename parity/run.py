"""Runs a workload on a runner, with listeners on its probes."""

from collections.abc import Sequence

from parity.runners import NotSupportedHere, Runner
from parity.tokens import Tokens
from parity.trace import Trace, TraceRecorder
from parity.workload import Draft, Fork, Free, Step, Truncate, Workload
from reference.probe import Listener, listening
from reference.session import StepItem


def run_workload(
    runner: Runner, workload: Workload, recorder: TraceRecorder, *after: Listener, before: Sequence[Listener] = ()
) -> list[str]:
    """Run every action. A tensor goes through the listeners `before`, is recorded, and goes through those `after`.

    Requests that are left at the end are freed. Returns a line for each action that the runner does not support: it
    counts as skipped, never as passed.
    """
    tokens = Tokens(workload, runner.config.text.vocab_size)
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


def _act(runner: Runner, action: Step | Truncate | Draft | Fork | Free, tokens: Tokens) -> None:
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
