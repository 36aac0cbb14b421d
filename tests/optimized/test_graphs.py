"""Recorded steps: what may change between replays is tracked, what may not stays, and nothing else reaches a row.

On a GPU these are CUDA graphs of compiled kernels in bfloat16, compared bit for bit with the same padded steps run
eagerly. On a CPU a recording calls its function again, in float64: the same buffers, padding and order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from kernel_checks import DEVICE
from torch import Tensor

from optimized import graphs
from optimized.engine import DecodeItem, Engine, EngineOptions
from optimized.errors import NotSupportedError, PlanError, PoolError
from optimized.graphs import BUCKETS, Recorder, Shape, bucket, shape_of
from optimized.plan_spans import StepLimits
from optimized.weights import text_places
from parity.engine_check import OPTIONS as CHECK_OPTIONS
from parity.engine_check import check_optimized
from parity.sweep import boundary_workloads
from reference.checkpoint import synthetic_tensors
from reference.config import tiny
from reference.errors import CacheError
from reference.generate import generate
from reference.probe import Override, Rows, listening
from reference.probe import Recorder as ProbeRecorder
from reference.sampling import Sampling, choose
from reference.session import DraftItem, StepItem

CONFIG = tiny()
IS_CUDA = DEVICE == "cuda"
DTYPE = torch.bfloat16 if IS_CUDA else torch.float64
WEIGHTS = {
    name: tensor.to(torch.promote_types(DTYPE, torch.float32) if name.endswith("correction_bias") else DTYPE)
    for name, tensor in synthetic_tensors(CONFIG)
}
# Padding rows are of token 0, which no request here has.
OPTIONS = EngineOptions(
    pages=256, page_size=4, requests=8, limits=StepLimits(512, 2**26, 2**22), graphs=True, poison=True,
    disjoint_numbers=True,
)  # fmt: skip
SAMPLINGS = (Sampling(), Sampling(0.8, 1.0, 7), Sampling(1.3, 0.6, 8), Sampling(2.0, 1.0, 2**63 + 5))


def engine(options: EngineOptions = OPTIONS, weights: dict[str, Tensor] = WEIGHTS) -> Engine:
    return Engine.from_state(CONFIG.text, weights, DTYPE, DEVICE, "triton" if IS_CUDA else "torch", options)


def padded_engine() -> Engine:
    """The same padded steps without recordings."""
    one = engine()
    assert one.runner.recorder is not None
    one.runner.recorder = Recorder(one.runner.uploader, ())
    one.runner.recorder._is_cuda = False
    return one


def filled(one: Engine, lengths: dict[str, int]) -> Engine:
    for number, (name, length) in enumerate(lengths.items()):
        one.step([StepItem(name, tuple(10 + (7 * number + 3 * i) % 200 for i in range(length)), "prefill")])
    return one


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_buckets_hold_what_they_should() -> None:
    assert list(BUCKETS) == sorted(set(BUCKETS))
    assert [bucket(n) for n in (1, 3, 17, 64, 65, 512, 513)] == [1, 4, 24, 64, 80, 512, None]
    for requests in range(1, 200):
        shape = shape_of([1] * requests, 512)
        assert shape is not None
        assert requests <= shape.rows == shape.requests <= max(16, requests * 3 // 2)
    assert shape_of([4] * 3, 512) == shape_of([4] * 4, 512)
    assert shape_of([3] * 5, 512) == Shape(24, 8)
    assert shape_of([3, 3, 3, 3, 2], 512) == Shape(16, 8)
    assert shape_of([1] * 9, 15) is None
    assert shape_of([5] * 200, 9999) is None


@pytest.mark.skipif(IS_CUDA, reason="in bfloat16 padding may choose another token")
def test_more_requests_than_the_largest_bucket_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "BUCKETS", (1, 2))
    lengths = {"a": 5, "b": 9, "c": 14}
    one, expected = (filled(engine(), lengths), filled(engine(dataclasses.replace(OPTIONS, graphs=False)), lengths))
    assert one.runner.recorder is not None
    for names in ("abc", "ab"):
        assert not one.runner.recorder.recordings
        items = [DecodeItem(name, 20, SAMPLINGS[1]) for name in names]
        assert one.decode(items, 3) == expected.decode(items, 3)
        drafts = [DraftItem(name, 5, 2) for name in names]
        for name, logits in expected.drafts(drafts).items():
            torch.testing.assert_close(one.drafts(drafts)[name], logits, rtol=0, atol=1e-12)
    assert one.runner.recorder.recordings


@pytest.mark.parametrize("level", ["bfloat16", "float32"] if IS_CUDA else ["exact"])
def test_the_sweep_agrees_with_every_probe_shown_by_recordings(level: str) -> None:
    options = dataclasses.replace(CHECK_OPTIONS, graphs=True)
    workloads = boundary_workloads(CONFIG.text)
    report = check_optimized(CONFIG, dict(synthetic_tensors(CONFIG)), workloads, (level,), DEVICE, options=options)
    assert report.compared
    assert report.first_different is None, report.first_different.comparison.first


def test_c38_one_recording_follows_lengths_across_page_window_and_topk() -> None:
    """From 6 tokens to 38: pages of 4, a window of 7, a top-k of 13. Host buffers are spoilt behind every launch."""
    recorded, eager = (filled(one, {"a": 6}) for one in (engine(), padded_engine()))
    for token in range(20, 52):
        items = [StepItem("a", (token,), "decode")]
        assert same(recorded.step(items), eager.step(items)), recorded.length("a")
        if IS_CUDA:
            torch.cuda.synchronize()
        for buffer in recorded.runner.uploader.host_buffers:
            buffer.fill_(0x5A)
    assert recorded.runner.recorder is not None
    # One for each power of two of pages.
    assert len(recorded.runner.recorder.recordings) == 4


def test_recorded_steps_are_as_good_as_unpadded_ones() -> None:
    recorded = filled(engine(), {"a": 5, "b": 20, "c": 1})
    eager = filled(engine(dataclasses.replace(OPTIONS, graphs=False)), {"a": 5, "b": 20, "c": 1})
    tolerance = 0.05 if IS_CUDA else 1e-12
    for token in range(20, 30):
        items = [StepItem(name, (token + i,) * (1 + i), "verify") for i, name in enumerate("abc")]
        found, expected = recorded.step(items), eager.step(items)
        for name in "abc":
            torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


def test_a_smaller_batch_behind_a_larger_one_sees_nothing_of_it() -> None:
    lengths = {name: 3 + 5 * i for i, name in enumerate("abcd")}
    recorded, eager = (filled(one, lengths) for one in (engine(), padded_engine()))
    for names in ("abcd", "abc", "b", "dcb", "abcd", "ca"):
        items = [StepItem(name, (30 + i,), "decode") for i, name in enumerate(names)]
        assert same(recorded.step(items), eager.step(items)), names


def test_what_was_returned_outlives_the_recording_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay overwrites what the last one of its shape has returned; here that is spoilt before every run."""
    lengths = {"a": 6, "b": 11}
    one, expected = filled(engine(), lengths), filled(padded_engine(), lengths)
    recorder, returned = one.runner.recorder, {}
    assert recorder is not None
    run = recorder.run

    def spoiling_run(key, plan, function):
        for tensor in returned.get(key, ()):
            tensor.fill_(float("nan"))
        step, probes, output = run(key, plan, function)
        fields = (getattr(output, field.name) for field in dataclasses.fields(output))
        returned[key] = [tensor for tensor in fields if tensor is not None and tensor.is_floating_point()]
        return step, probes, output

    monkeypatch.setattr(recorder, "run", spoiling_run)
    results: list[list[dict[str, Tensor]]] = [[], []]
    for engine_, found in zip((one, expected), results, strict=True):
        for turn in range(3):
            for last_only in (False, True):
                items = [StepItem(name, (20 + turn, 30), "verify") for name in lengths]
                found.append(engine_.step(items, last_only))
                found.append(engine_.step([StepItem(name, (40 + turn,), "decode") for name in lengths], last_only))
        engine_.decode([DecodeItem(name, 5) for name in lengths], 3)
        found.append(engine_.drafts([DraftItem("a", 5, 4), DraftItem("b", 5, 4)]))
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)


def test_padding_rows_of_nan_reach_no_other_row() -> None:
    clean = filled(engine(), {"a": 6, "b": 11, "c": 30})
    spoilt = engine()
    spoilt.text.weights.embeddings_WD[0] = float("nan")
    spoilt = filled(spoilt, {"a": 6, "b": 11, "c": 30})
    for token in range(40, 46):
        items = [StepItem(name, (token, token + 1), "verify") for name in "abc"]
        found = spoilt.step(items)
        assert all(rows.isfinite().all() for rows in found.values())
        for name, expected in clean.step(items).items():
            # A library's product over other rows may sum in another order.
            torch.testing.assert_close(found[name], expected, rtol=0, atol=0 if IS_CUDA else 1e-12)


def test_buffers_never_move() -> None:
    one = filled(engine(), {"a": 6, "b": 11})
    runner = one.runner
    assert runner.recorder is not None

    def addresses() -> list[int]:
        assert runner.recorder is not None
        recordings = runner.recorder.recordings
        assert runner._hidden_RD is not None
        tensors = [runner.chosen_R, runner.drafted_R, runner._hidden_RD]
        return [t.data_ptr() for r in recordings for t in (r.metadata, r.step.positions_T)] + [
            t.data_ptr() for t in tensors
        ]

    def run() -> None:
        one.step([StepItem("a", (20,), "decode"), StepItem("b", (21,), "decode")])
        one.drafts([DraftItem("a", 5, 2), DraftItem("b", 5, 3)])
        one.truncate("a", 6)
        one.truncate("b", 11)

    run()
    run()
    before = addresses()
    for _ in range(5):
        run()
    assert addresses() == before


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "hot", "nucleus", "hottest"])
def test_decode_is_step_and_choose(sampling: Sampling) -> None:
    lengths = {"a": 4, "b": 17, "c": 9}
    chained, stepped = (filled(engine(), lengths) for _ in range(2))
    items = [DecodeItem(name, 20 + i, sampling if name != "b" else Sampling()) for i, name in enumerate(lengths)]
    found = chained.decode(items, 9)
    tokens: dict[str, list[int]] = {item.request: [item.next_token] for item in items}
    for _ in range(9):
        logits = stepped.step([StepItem(item.request, (tokens[item.request][-1],), "decode") for item in items])
        for item in items:
            place = stepped.length(item.request)
            tokens[item.request] += choose(logits[item.request], [place], item.sampling)
    assert found == {name: chosen[1:] for name, chosen in tokens.items()}
    for name in lengths:
        assert chained.tokens(name) == stepped.tokens(name)
    more = [DraftItem(name, 5, 3) for name in lengths]
    assert same(chained.drafts(more), stepped.drafts(more))


def test_decode_without_recordings_is_the_same() -> None:
    lengths = {"a": 4, "b": 17, "c": 9}
    recorded, eager = filled(engine(), lengths), filled(padded_engine(), lengths)
    items = [DecodeItem(name, 20, SAMPLINGS[i]) for i, name in enumerate(lengths)]
    assert recorded.decode(items, 12) == eager.decode(items, 12)


def test_what_cannot_be_decoded_changes_nothing() -> None:
    one = filled(engine(dataclasses.replace(OPTIONS, pages=8)), {"a": 20})
    expected = one.tokens("a")
    with pytest.raises(PoolError, match="pages"):
        one.decode([DecodeItem("a", 5)], 40)
    for items, count in (([], 1), ([DecodeItem("a", 5)] * 2, 1), ([DecodeItem("a", 5)], 0), ([DecodeItem("b", 5)], 1)):
        with pytest.raises(CacheError):
            one.decode(items, count)
    assert one.tokens("a") == expected
    assert one.pools.slots("a").length == 20


def test_a_decode_whose_last_scores_do_not_fit_is_refused_before_a_ring_is_overwritten() -> None:
    one = filled(engine(dataclasses.replace(OPTIONS, limits=StepLimits(64, 2**26, 150))), {"a": 6})
    expected = one.pools.rings.clone()
    with pytest.raises(PlanError, match="'a' with 46 tokens: the index scores"):
        one.decode([DecodeItem("a", 5)], 40)
    assert (one.requests, one.length("a")) == (("a",), 6)
    assert torch.equal(one.pools.rings.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=["greedy", "hot", "nucleus"])
def test_drafts_accepted_in_part_by_each_row(sampling: Sampling) -> None:
    """The same text with graphs and without, drafts or none; rows of one recording keep different numbers of drafts."""
    prompts = {"a": tuple(range(40, 52)), "b": (9,), "c": tuple(range(100, 105))}
    recorded, eager = engine(), padded_engine()
    texts = [generate(one, prompts, 14, 3, sampling=sampling) for one in (recorded, eager)]
    assert texts[0] == texts[1]
    if not IS_CUDA:
        plain = generate(engine(dataclasses.replace(OPTIONS, graphs=False)), prompts, 14, sampling=sampling)
        assert texts[0].tokens == plain.tokens


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(6.0, 1.0, 3)], ids=str)
def test_decoding_with_drafts_is_the_same_from_recordings(sampling: Sampling) -> None:
    """Fed with drafts on the device; shapes shrink as requests end."""
    lengths = {"a": 12, "b": 1, "c": 25}
    recorded, eager = (filled(one, lengths) for one in (engine(), padded_engine()))
    for count in (2, 11):
        items = [DecodeItem(name, 20 + count, sampling) for name in lengths]
        found = recorded.decode_with_drafts(items, count, 3)
        assert found == eager.decode_with_drafts(items, count, 3)
    # When it is hot the noise of a position decides, which draft and model share.
    kept = {number for text in found.values() for number in text.kept}
    assert len(kept) > 2 or sampling.temperature < 6


def test_accepted_numbers_differ_by_row() -> None:
    lengths = {name: 4 + 6 * i for i, name in enumerate("abcd")}
    recorded, eager = (filled(one, lengths) for one in (engine(), padded_engine()))
    for turn in range(8):
        for one in (recorded, eager):
            for request in lengths:
                one.draft(request, 20 + turn, 3)
        items = [StepItem(name, (20 + turn, 50, 60 + i, 70), "verify") for i, name in enumerate(lengths)]
        assert same(recorded.step(items), eager.step(items))
        for i, name in enumerate(lengths):
            for one in (recorded, eager):
                one.truncate(name, one.length(name) - (i + turn) % 4)


def test_what_prefills_runs_apart_from_what_decodes() -> None:
    one = filled(engine(), {"a": 6, "b": 11})
    alone = filled(engine(), {"a": 6, "b": 11})
    mixed = one.step([StepItem("c", tuple(range(30, 50)), "prefill"), StepItem("a", (5,), "decode")])
    assert torch.equal(mixed["a"], alone.step([StepItem("a", (5,), "decode")])["a"])
    assert torch.equal(mixed["c"], alone.step([StepItem("c", tuple(range(30, 50)), "prefill")])["c"])


def test_a_recording_copies_nothing_for_nobody() -> None:
    one, copies = filled(engine(), {"a": 6}), []
    one.step([StepItem("a", (5,), "decode")])
    assert one.runner.recorder is not None
    for recording in one.runner.recorder.recordings:
        recording.probes.show([])
        copies += recording.probes._copies
    assert not copies


def test_probes_are_shown_under_the_step_that_ran_and_cannot_be_replaced() -> None:
    one, recorder = filled(engine(), {"a": 6, "b": 11}), ProbeRecorder(("layers.1.output", "mtp.*.normed"))
    for names in ("ab", "ba"):
        with listening(recorder):
            one.step([StepItem(name, (5,), "decode") for name in names])
            one.drafts([DraftItem(name, 7, 2) for name in names])
    shown = [
        (seen.name, seen.rows.request, seen.rows.positions.tolist(), seen.rows.kind)
        for seen in recorder.observations
        if seen.rows and seen.name.startswith("layers")
    ]
    assert shown == [
        ("layers.1.output", name, [position], "decode") for name, position in (("a", 6), ("b", 11), ("b", 12), ("a", 7))
    ]
    assert {seen.name for seen in recorder.observations} >= {"mtp.0.normed", "mtp.1.normed"}
    replaced = Override("layers.1.output", lambda value, rows: value + 1)
    with listening(replaced), pytest.raises(NotSupportedError, match=r"layers\.1\.output.*graphs=False"):
        one.step([StepItem("a", (5,), "decode")])
    assert one.length("a") == 8


def test_uneven_batches_keep_a_few_recordings_those_that_ran_last() -> None:
    """Batches of many shapes: what was forgotten is recorded again, and every result is as without recordings."""
    # All with block tables of 16 pages.
    lengths = {name: 36 + i for i, name in enumerate("abc")}
    one, eager = filled(engine(dataclasses.replace(OPTIONS, recordings=3)), lengths), filled(padded_engine(), lengths)
    recorder = one.runner.recorder
    assert recorder is not None
    small, one_row, others = (1, 1, 1), (1,), [(3, 2, 1), (5, 1, 3), (2, 2)]
    batches = [small, others[0], one_row, small, others[1], others[2], small, one_row]
    kept: list[list[int]] = [[]]
    for turn, counts in enumerate(batches):
        items = [StepItem(name, (20 + turn,) * count, "verify") for name, count in zip("abc", counts, strict=False)]
        assert same(one.step(items), eager.step(items)), counts
        kept.append([id(recording) for recording in recorder.recordings])
        assert kept[-1] == [*(other for other in kept[-2] if other != kept[-1][-1]), kept[-1][-1]][-3:]
    assert [len(recordings) for recordings in kept] == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    # The small one ran again before others came, and stayed.
    assert kept[1][-1] == kept[4][-1] == kept[7][-1]
    assert same(one.drafts(drafts := [DraftItem(name, 7, 3) for name in "abc"]), eager.drafts(drafts))
    assert len(recorder.recordings) == 3


def test_a_recorder_that_may_keep_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="recordings: expected 1 or more to be kept, found 0"):
        engine(dataclasses.replace(OPTIONS, recordings=0))


def test_listeners_come_and_go_between_steps() -> None:
    one, recorder = filled(engine(), {"a": 6, "b": 11}), ProbeRecorder(("layers.1.output", "mtp.*.logits"))
    shown = []
    for is_heard in (False, True, False, True):
        recorder.observations.clear()
        with listening(recorder) if is_heard else nullcontext():
            one.step([StepItem("a", (5,), "decode")])
            drafted = one.draft("a", 7, 3)
        shown.append([seen.name for seen in recorder.observations])
        one.truncate("a", 6)
        if is_heard:
            last = [seen.value[-1] for seen in recorder.observations if seen.name.startswith("mtp")]
            assert torch.equal(torch.stack(last), drafted)
    assert shown == [[], ["layers.1.output", "mtp.0.logits", "mtp.1.logits", "mtp.2.logits"]] * 2


@pytest.mark.parametrize("is_recorded", [False, True])
def test_decode_shows_what_its_steps_show(is_recorded: bool) -> None:
    shown = []
    for is_chained in (True, False):
        one = filled(engine(dataclasses.replace(OPTIONS, graphs=is_recorded)), {"a": 6, "b": 11})
        recorder = ProbeRecorder(("cache.*", "layers.*.output", "logits"))
        with listening(recorder):
            if is_chained:
                tokens = one.decode([DecodeItem("a", 20), DecodeItem("b", 21)], 3)
            else:
                for fed in zip((20, *tokens["a"][:-1]), (21, *tokens["b"][:-1]), strict=True):
                    one.step([StepItem(name, (token,), "decode") for name, token in zip("ab", fed, strict=True)])
        shown.append(recorder.observations)
    assert len(shown[0]) == len(shown[1])
    for ours, expected in zip(*shown, strict=True):
        assert ours.rows is not None
        assert expected.rows is not None
        assert (ours.name, ours.rows.request, ours.rows.kind) == (
            expected.name,
            expected.rows.request,
            expected.rows.kind,
        )
        assert torch.equal(ours.rows.positions, expected.rows.positions)
        assert torch.equal(ours.value, expected.value)


def test_c24_c25_weights_that_are_replaced_in_place_are_those_of_the_next_replay() -> None:
    one = filled(engine(), {"a": 6})
    items = [StepItem("a", (5,), "decode")]
    first = one.step(items)["a"]
    one.truncate("a", 6)
    other = {name: tensor * 1.25 for name, tensor in WEIGHTS.items()}
    # The cached rows stay those of the old weights, so only what is computed from them is compared.
    for weights, change in ((WEIGHTS, False), (other, True), (WEIGHTS, False)):
        loaded_into_engine(one, weights)
        assert torch.equal(one.step(items)["a"], first) != change
        one.truncate("a", 6)


def loaded_into_engine(one: Engine, weights: dict[str, Tensor]) -> None:
    for name, place in text_places(one.text.weights).items():
        for piece, values in zip(place.pieces, weights[name].chunk(len(place.pieces), place.dim), strict=True):
            piece.copy_(values)


class Stream:
    """Stands for a stream and for an event: keeps what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def wait_event(self, event: Stream) -> None:
        assert event is self
        self.asked.append("wait")

    def record(self) -> None:
        self.asked.append("done")


@pytest.mark.skipif(IS_CUDA, reason="streams are feigned")
def test_every_call_waits_for_the_one_before_it_until_its_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    one, stream = engine(dataclasses.replace(OPTIONS, poison=False)), Stream()
    one._turns._done = stream  # type: ignore[assignment]
    recorder, clone = one.runner.recorder, Tensor.clone
    assert recorder is not None
    run = recorder.run
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(Tensor, "clone", lambda tensor: stream.asked.append("copy") or clone(tensor))
    monkeypatch.setattr(recorder, "run", lambda *arguments: stream.asked.append("run") or run(*arguments))

    def asked(call: Callable[[], object]) -> list[str]:
        stream.asked.clear()
        call()
        return stream.asked[:1] + sorted(set(stream.asked[1:-1])) + stream.asked[-1:]

    assert asked(lambda: one.step([StepItem("a", (5,), "decode")])) == ["wait", "copy", "run", "done"]
    assert asked(lambda: one.decode([DecodeItem("a", 5)], 3)) == ["wait", "copy", "run", "done"]
    assert asked(lambda: one.drafts([DraftItem("a", 5, 2)])) == ["wait", "copy", "run", "done"]
    assert asked(lambda: one.decode_with_drafts([DecodeItem("a", 5)], 3, 2)) == ["wait", "copy", "run", "done"]
    assert asked(lambda: one.fork("a", "b")) == ["wait", "done"]
    with pytest.raises(CacheError), listening(Override("layers.0.output", refused)):
        one.step([StepItem("a", (5,), "decode")])
    assert stream.asked[-1] == "done"


def refused(value: Tensor, rows: Rows | None) -> Tensor:
    raise CacheError("refused")


@pytest.mark.skipif(not IS_CUDA, reason="streams are CUDA's")
def test_replays_on_several_streams_are_ordered() -> None:
    recorded, eager = (filled(one, {"a": 5, "b": 9}) for one in (engine(), padded_engine()))
    recorded.step([StepItem("a", (5,), "decode"), StepItem("b", (6,), "decode")])
    eager.step([StepItem("a", (5,), "decode"), StepItem("b", (6,), "decode")])
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for turn in range(12):
        items = [StepItem("a", (20 + turn,), "decode"), StepItem("b", (40 + turn,), "decode")]
        with torch.cuda.stream(streams[turn % 3]):
            torch.cuda._sleep(2_000_000 * (turn % 2))
            found.append(recorded.step(items))
    torch.cuda.synchronize()
    for turn, logits in enumerate(found):
        items = [StepItem("a", (20 + turn,), "decode"), StepItem("b", (40 + turn,), "decode")]
        assert same(logits, eager.step(items)), turn


@pytest.mark.skipif(not IS_CUDA, reason="waiting is for a GPU")
def test_replaying_and_decoding_wait_for_nothing() -> None:
    # What is taken back is spoilt on purpose in the other tests, which waits.
    one = filled(engine(dataclasses.replace(OPTIONS, poison=False)), {"a": 5, "b": 9})
    steps = [StepItem("a", (5,), "decode"), StepItem("b", (6,), "decode")]
    drafts = [DraftItem("a", 7, 2), DraftItem("b", 7, 3, sampling=SAMPLINGS[1])]

    def run() -> None:
        one.step(steps)
        one.drafts(drafts)

    run()
    run()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(before)
