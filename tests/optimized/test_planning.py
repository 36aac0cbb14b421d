"""Plans of ragged steps: what they hold, what they refuse, and that every query sees its own history.

Source: text_model specification, sections 13 to 17; cases C10, C12, C14, C18, C19, C38 and C39.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_machine import ROOMY, TOPK, WINDOW, Machine, item, opened, pools_of, small

from optimized.cache import CachePools
from optimized.errors import PlanError, PoolError
from optimized.plan_pages import is_expansion_cheaper
from optimized.plan_spans import StepLimits
from optimized.planning import plan_draft, plan_step, split_step
from optimized.step import DeviceStep, PlanItem, Uploader, map_arrays, upload_bytes
from reference.config import released

RELEASED = released().text


def released_pools(**changes) -> CachePools:
    options = {"pages": 1024, "page_size": 64, "dtype": torch.bfloat16, "device": "meta", "max_draft_tokens": 3}
    return pools_of(RELEASED, **{**options, "disjoint_numbers": False, **changes})


OPERATIONS = ("step", "step", "step", "verify", "draft", "fork", "free")


def carry_out(machine: Machine, request: str, operation: str, size: int, name: str) -> None:
    """One operation of a workload, cut down to what `request` can do."""
    pools, length = machine.pools, len(machine.tokens[request])
    drafts = pools.max_draft_tokens
    if operation == "step":
        counts = {request: size, **{other: 1 for other in machine.tokens if other != request}}
        if pools.max_length is not None:
            counts = {each: min(n, pools.max_length - len(machine.tokens[each])) for each, n in counts.items()}
        machine.step(*(item(each, n) for each, n in counts.items() if n))
    elif operation == "verify" and (pools.max_length is None or length + drafts < pools.max_length):
        machine.step(item(request, 1 + drafts))
        machine.truncate(request, length + 1 + drafts - size % (drafts + 1))
    elif operation == "draft" and drafts and length:
        machine.draft(item(request, length - len(machine.drafts[request])))
        for _ in range(size % drafts):
            machine.draft(item(request, 1))
        machine.truncate_draft(request, length - 1)
    elif operation == "fork" and len(machine.tokens) < 4:
        machine.fork(request, name)
    elif operation == "free":
        machine.free(request)


@given(
    operations=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3), st.integers(1, 3) | st.integers(1, 30)), max_size=40
    ),
    page_size=st.sampled_from([1, 3, 4, 64]),
    drafts=st.integers(0, 3),
    limits=st.builds(StepLimits, st.integers(9, 40), st.sampled_from([9_000, 20_000, 10**6]), st.just(3_000)),
    max_length=st.none() | st.just(12),
)
def test_whatever_the_workload_a_query_sees_its_own_history(operations, page_size, drafts, limits, max_length):
    """Owes bytes: prefill, chunks, decode, drafts taken back, forks and joins, in steps of up to four requests."""
    options = {"page_size": page_size, "max_draft_tokens": drafts, "max_length": max_length}
    machine = Machine(pools_of(**options, pages=max(4, 200 // page_size)), limits)
    for number, (operation, which, size) in enumerate(operations):
        if not machine.tokens:
            machine.open(f"open {number}")
        request = list(machine.tokens)[which % len(machine.tokens)]
        length = len(machine.tokens[request])
        try:
            carry_out(machine, request, operation, size, f"fork {number}")
        except PoolError:
            assert machine.pools.slots(request).length == length
            machine.free(request)


@pytest.mark.parametrize("length", [TOPK - 1, TOPK, TOPK + 1, WINDOW, WINDOW + 1, 40])
@pytest.mark.parametrize("chunk", [3, 4, 7, 100])
def test_c10_c12_c18_chunks_at_the_borders_see_every_key(length, chunk):
    machine = Machine(pools_of(), ROOMY)
    machine.open("a")
    for start in range(0, length, chunk):
        machine.step(item("a", min(chunk, length - start)))
    machine.step(item("a", 1))


def test_c19_two_long_requests_share_the_pool_that_one_gives_back():
    machine = Machine(pools_of(pages=8, page_size=2, rings=2), ROOMY)
    machine.open("a")
    machine.step(item("a", 13))
    for _ in range(3):
        machine.step(item("a", 2))
        machine.truncate("a", 14)
    machine.open("b")
    machine.step(item("b", 1))
    with pytest.raises(PoolError, match="0 of 8 are free"):
        machine.step(item("b", 2))
    machine.free("a")
    machine.step(item("b", 14))


def test_decode_items_come_first_and_keep_their_order():
    pools = opened(pools_of(), a=9, b=0, c=1, d=6)
    plan = plan_step([item("b", 7), item("a", 1), item("d", 4), item("c", 3)], pools, ROOMY)
    assert [each.request for each in plan.items] == ["a", "c", "b", "d"]
    assert (plan.row_starts, plan.decode_rows) == ((0, 1, 4, 11, 15), 4)
    assert plan.positions_T.tolist() == [9, 1, 2, 3, *range(7), 6, 7, 8, 9]
    assert plan.length_B.tolist() == [10, 4, 7, 10]


def test_keys_of_a_sliding_chunk_are_those_of_the_specification():
    """kv_len = min(L, q_len + 512); no value test could see one key too many."""
    for start, count, keys in ((0, 4, 4), (0, 4000, 4000), (100, 4000, 4100), (512, 10, 522), (4096, 2000, 2512)):
        plan = plan_step([item("a", max(count, 5))], opened(released_pools(), a=start), ROOMY)
        (group,) = plan.ring.prefill
        assert group.key_rows == keys + max(count, 5) - count
        assert group.first_key_B.tolist() == [max(0, start - 512)]


def test_the_form_of_a_full_layer_is_the_one_with_fewer_products():
    """The crossover of whole prompts at released size lies near 13 k tokens; late and short chunks are absorbed."""
    whole = [length for length in range(1000, 20000, 10) if is_expansion_cheaper(RELEASED, 0, length)]
    assert whole == [*range(1000, 12820, 10)]
    assert is_expansion_cheaper(RELEASED, 2048, 6144)
    assert not is_expansion_cheaper(RELEASED, 8192, 12288)
    assert not is_expansion_cheaper(RELEASED, 5000, 5064)


@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 20), (3, 9), (7, 8), (8, 9), (5, 40), (30, 33), (0, 60)])
def test_products_are_those_of_a_loop_over_queries_and_keys(start, length):
    config = small()
    full, cheaper = config.full, is_expansion_cheaper(config, start, length)
    N, R, C, V = full.qk_nope_head_dim, full.qk_rope_head_dim, full.kv_lora_rank, full.v_head_dim
    expanded = sum(C * N + C * V for _ in range(length))
    absorbed = sum(C * N + C * V for _ in range(start, length))
    for position in range(start, length):
        for key in range(position + 1):
            expanded += N + R + V
            absorbed += (C + R + C) * (key < TOPK)
    assert cheaper == (expanded < absorbed)


def test_the_crossover_counts_pruned_and_unpruned_queries():
    """Chunks that start below the top-k and end above it: exact at every length and start, by the loop's sums."""
    full = RELEASED.full
    per_key, pair = full.kv_lora_rank * (128 + 128), 128 + 64 + 128
    for start in (0, 1000, 2000, 2047, 2048, 3000):
        for length in range(start + 1, 9000, 97):
            positions = np.arange(start, length, dtype=np.int64)
            expanded = length * per_key + int((positions + 1).sum()) * pair
            absorbed = len(positions) * per_key + int(np.minimum(positions + 1, 2048).sum()) * 1088
            assert is_expansion_cheaper(RELEASED, start, length) == (expanded < absorbed)


def test_groups_are_filled_to_the_last_byte_and_no_further():
    """Chunks of 8 tokens need 8 keys of 632 bytes: two groups of two when 16 keys fit, else four of one."""
    for keys, sizes in ((16, [16, 16]), (15, [8, 8, 8, 8]), (17, [16, 16]), (31, [24, 8])):
        pools = opened(pools_of(), a=0, b=0, c=0, d=0)
        items = [item(request, 8) for request in "abcd"]
        plan = plan_step(items, pools, StepLimits(99, keys * 632, 2**20))
        assert [group.key_rows for group in plan.ring.prefill] == sizes


@pytest.mark.parametrize(("expanded_bytes", "is_expanded"), [(2**30, True), (2**28, False)])
def test_expanded_keys_that_do_not_fit_leave_the_absorbed_form_in_blocks(expanded_bytes, is_expanded):
    limits = StepLimits(8192, expanded_bytes, 2**24)
    parts = split_step([item("a", 8192)], opened(released_pools(), a=0), limits)
    pools = opened(released_pools(), a=0)
    for part in parts:
        plan = plan_step(part, pools, limits)
        (group,) = plan.pages.prefill
        assert all((block.stop - block.start) * group.keys * 4 <= 2**24 for block in group.blocks)
    assert (group.expanded is not None) == is_expanded
    assert pools.slots("a").length == 8192


def test_blocks_that_cut_a_group_keep_a_run_for_every_item():
    """Scores of 200 keys: 4 rows of 12 keys at once. Three items of 9 to 12 rows in blocks that cut them anywhere."""
    machine = Machine(pools_of(), StepLimits(99, 2**20, 200))
    for request in "abc":
        machine.open(request)
    machine.run(plan_step([item("a", 9), item("b", 12), item("c", 10)], machine.pools, machine.limits))


def test_items_that_need_no_selection_are_grouped_apart_from_those_that_do():
    pools = opened(pools_of(), a=0, b=0, c=0, d=0)
    plan = plan_step([item("a", 8), item("b", 7), item("c", 9), item("d", 12)], pools, ROOMY)
    groups = [(group.start, group.stop, group.keys, group.selects) for group in plan.pages.prefill]
    assert groups == [(0, 15, 8, False), (15, 36, 12, True)]


def test_split_cuts_prefill_into_chunks_and_decode_not_at_all():
    pools = opened(pools_of(), a=0, b=6, c=4)
    items = [item("a", 23), item("b", 3), item("c", 3)]
    steps = split_step(items, pools, StepLimits(8, 2**20, 2**20))
    assert [[(each.request, len(each.token_ids)) for each in step] for step in steps] == [
        [("b", 3), ("c", 3), ("a", 2)],
        [("a", 8)],
        [("a", 8)],
        [("a", 5)],
    ]
    assert all(each.kind == "prefill" for step in steps for each in step)
    assert pools.slots("a").length == 0


def test_split_does_not_cut_what_decodes():
    pools = opened(pools_of(), a=0, b=6, c=4)
    steps = split_step([item("a", 3), item("b", 3), item("c", 3)], pools, StepLimits(8, 2**20, 2**20))
    assert [[(each.request, len(each.token_ids)) for each in step] for step in steps] == [
        [("a", 3), ("b", 3)],
        [("c", 3)],
    ]


def test_split_keeps_the_order_of_the_tokens():
    tokens = tuple(range(50, 80))
    pools = opened(pools_of(), a=0)
    steps = split_step([PlanItem("a", tokens, "prefill")], pools, StepLimits(11, 2**20, 2**20))
    assert tuple(token for step in steps for each in step for token in each.token_ids) == tokens
    assert split_step([], pools, ROOMY) == ()


def test_split_makes_chunks_whose_window_fits():
    """632 bytes a key: 30 of them are 26 tokens behind a window's 4 older keys."""
    pools = opened(pools_of(), a=0)
    steps = split_step([item("a", 80)], pools, StepLimits(1000, 30 * 632, 2**20))
    assert [len(step[0].token_ids) for step in steps] == [30, 26, 24]


NAN_SAFE = StepLimits(12, 20_000, 2_000)


@pytest.mark.parametrize(
    ("limits", "items", "parts"),
    [
        (NAN_SAFE, [item("a", 9), item("b", 4)], ("13 tokens", "max_tokens = 12", "9 tokens of 'a'", "split_step")),
        (StepLimits(99, 9_000, 2**20), [item("a", 11)], ("'a'", "15 keys", "9480 bytes", "expanded_bytes = 9000")),
        (StepLimits(99, 20_000, 100), [item("a", 40)], ("'a' with 52 tokens", "256 bytes", "score_bytes = 100")),
        (StepLimits(99, 959, 2**20), [item("a", 1)], ("960 bytes", "expanded_bytes = 959", "to at least that")),
        (ROOMY, [item("a", 1), item("a", 2)], ("'a'", "one item")),
        (ROOMY, [item("a", 0)], ("'a'", "at least one token")),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(limits, items, parts):
    pools = opened(pools_of(), a=12, b=0)
    with pytest.raises(PlanError) as refusal:
        plan_step(items, pools, limits)
    for part in parts:
        assert part in str(refusal.value)
    assert (pools.slots("a").length, pools.slots("b").length, pools.free_pages) == (12, 0, 61)


@pytest.mark.parametrize(
    ("limits", "parts"),
    [
        (StepLimits(2, 2**20, 2**20), ("max_tokens = 2", "3 rows")),
        (StepLimits(99, 4_000, 2**20), ("'a', 40 tokens", "4 tokens", "4 keys", "expanded_bytes = 4000", "5056")),
        (StepLimits(99, 20_000, 100), ("'a' with 52 tokens", "score_bytes = 100")),
    ],
)
def test_what_no_cutting_makes_fit_is_refused_before_anything_runs(limits, parts):
    pools = opened(pools_of(), a=12)
    with pytest.raises(PlanError) as refusal:
        split_step([item("a", 40)], pools, limits)
    for part in parts:
        assert part in str(refusal.value)


def test_a_split_whose_last_step_has_no_pages_is_refused_before_the_first():
    pools = opened(pools_of(pages=8), a=12)
    with pytest.raises(PoolError, match="need 6 pages"):
        split_step([item("a", 21)], pools, StepLimits(8, 2**20, 2**20))


def test_drafts_beyond_what_the_ring_takes_back_are_refused_and_no_request_has_grown():
    pools = opened(pools_of(), a=6, b=6)
    with pytest.raises(Exception, match="exceed 7"):
        plan_draft([item("a", 2), item("b", 8)], pools, ROOMY)
    assert [pools.slots(request).draft_length for request in "ab"] == [0, 0]


def test_c39_padding_rows_have_no_position_no_slot_and_no_keys():
    """Four requests of three rows: one is live, or none."""
    for live in (["a"], []):
        pools = opened(pools_of(), a=9)
        plan = plan_step([item(request, 3) for request in live], pools, ROOMY, rows=12, requests=4)
        rows = 3 * len(live)
        assert plan.positions_T.tolist() == [9, 10, 11][:rows] + [-1] * (12 - rows)
        assert plan.length_B.tolist() == [12][: len(live)] + [0] * (4 - len(live))
        assert plan.query_start_B1.tolist() == [0, *[rows] * 4]
        assert plan.pages.block_table_BP.shape[0] == 4
        for slots in (plan.pages.page_slot_T, plan.ring.ring_slot_T, plan.ring.kept_slot_T):
            assert (slots[rows:] == -1).all()
        assert (plan.decode_rows, plan.pages.decode.stop, plan.pages.decode.blocks[0].query_start_B1[-1]) == (
            12,
            12,
            rows,
        )
        assert plan.row_starts[-1] == rows


def test_a_padded_step_runs_as_an_unpadded_one():
    machine = Machine(pools_of(), ROOMY)
    for request in "ab":
        machine.open(request)
    for _ in range(20):
        machine.run(plan_step([item("a", 1), item("b", 3)], machine.pools, ROOMY, rows=12, requests=4))


def test_a_padded_step_holds_no_prefill():
    with pytest.raises(PlanError, match="'a', 4 tokens, is prefill"):
        plan_step([item("a", 4)], opened(pools_of(), a=0), ROOMY, rows=12)


def test_a_step_as_wide_as_for_more_tokens_has_scores_for_them_or_is_refused():
    pools, limits = opened(pools_of(), a=3), StepLimits(99, 20_000, 300)
    plan = plan_step([item("a", 1)], pools, limits, 4, 2, 60)
    assert plan.pages.decode.keys == pools.page_size * plan.pages.block_table_BP.shape[1] == 64
    with pytest.raises(PlanError, match="the index scores of one query take 512 bytes"):
        plan_step([item("a", 1)], pools, limits, 4, 2, 65)
    assert pools.slots("a").length == 4


def test_a_plan_depends_on_lengths_only():
    plans = []
    for token_id in (3, 9):
        pools = opened(pools_of(), a=9, b=0)
        plans.append(plan_step([item("a", 1, token_id), item("b", 12, token_id)], pools, ROOMY))
    arrays: list[list[np.ndarray]] = [[], []]
    for plan, found in zip(plans, arrays, strict=True):
        map_arrays(dataclasses.replace(plan, token_ids_T=np.zeros(1)), found.append)
    assert len(arrays[0]) > 15
    assert all(np.array_equal(a, b) for a, b in zip(*arrays, strict=True))


def test_c38_plans_of_one_bucket_have_one_shape():
    """What a captured graph was made for holds while lengths cross page, window and top-k."""
    shapes = set()
    pools = opened(pools_of(page_size=16, pages=8), a=1)
    for _ in range(15):
        plan = plan_step([item("a", 1)], pools, ROOMY, rows=4, requests=4)
        found: list[tuple[int, ...]] = []
        map_arrays(plan, lambda array, found=found: found.append(array.shape))
        shapes.add((*found, plan.pages.decode.keys, plan.pages.decode.selects, len(plan.pages.decode.blocks)))
    assert len(shapes) == 1


def test_c14_slots_beyond_31_bits():
    pools = pools_of(pages=4, page_size=2**30, device="meta", disjoint_numbers=False)
    opened(pools, a=2**30, b=2**30, c=2**30, d=5)
    plan = plan_step([item("d", 1)], pools, StepLimits(9, 2**20, 2**40))
    assert plan.pages.page_slot_T.tolist() == [3 * 2**30 + 5]
    assert plan.pages.page_slot_T.dtype == np.int64


DTYPES = {"token_ids_T", "page_slot_T", "ring_slot_T", "kept_slot_T", "source_S"}


def test_arrays_have_the_dtypes_that_kernels_take_and_views_are_aligned():
    pools = opened(pools_of(), a=9, b=0)
    plan = plan_step([item("a", 1), item("b", 12)], pools, ROOMY)
    step = Uploader("cpu").upload(plan)

    def check(part) -> None:
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, torch.Tensor):
                assert value.dtype == (torch.int64 if field.name in DTYPES else torch.int32), field.name
                assert value.data_ptr() % 16 == 0
            elif not isinstance(value, PlanItem):
                for each in value if isinstance(value, tuple) else (value,):
                    if dataclasses.is_dataclass(each) and not isinstance(each, PlanItem):
                        check(each)

    check(step)


def test_one_copy_brings_a_plan_and_nothing_waits_for_the_device(monkeypatch):
    pools = opened(pools_of(), a=9, b=0, c=6)
    pools.fork("a", "d")
    uploader = Uploader("cpu")

    def forbidden(*_, **__):
        raise AssertionError("waits for the device")

    copies, copy_ = [], torch.Tensor.copy_
    with monkeypatch.context() as patched:
        for name in ("item", "cpu", "tolist", "to", "nonzero", "__bool__", "__int__", "__float__"):
            patched.setattr(torch.Tensor, name, forbidden)
        patched.setattr(torch.cuda, "synchronize", forbidden)
        items = [item("a", 1), item("b", 20), item("d", 2), item("c", 2)]
        plan = plan_step(items, pools, ROOMY)
        patched.setattr(torch.Tensor, "copy_", lambda self, *a, **k: copies.append(k) or copy_(self, *a, **k))
        step = uploader.upload(plan)
    assert copies == [{"non_blocking": True}]
    found: list[np.ndarray] = []
    map_arrays(plan, found.append)
    sent: list[torch.Tensor] = []
    map_arrays(step, sent.append)
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(found, sent, strict=True))


def test_a_host_buffer_is_used_again_only_after_the_copy_out_of_it():
    class Copied:
        def __init__(self, number: int):
            self.number = number

        def synchronize(self) -> None:
            waited.append(self.number)

    waited: list[int] = []
    uploader = Uploader("cpu", buffers=3)
    uploader._copied = [Copied(number) for number in range(3)]
    for _ in range(5):
        uploader.upload(plan_step([item("a", 1)], opened(pools_of(), a=3), ROOMY))
    assert waited == [0, 1, 2, 0, 1]


def test_plans_of_equal_shapes_land_at_equal_addresses():
    uploader, pools = Uploader("cpu"), opened(pools_of(), a=1)
    out = torch.empty(10_000, dtype=torch.uint8)

    def addresses(step: DeviceStep) -> Sequence[int]:
        found: list[int] = []
        map_arrays(step, lambda tensor: found.append(tensor.data_ptr()))
        return found

    steps = [uploader.upload(plan_step([item("a", 1)], pools, ROOMY), out) for _ in range(2)]
    assert addresses(steps[0]) == addresses(steps[1])
    assert int(steps[0].positions_T) == 2
    plan = plan_step([item("a", 1)], pools, ROOMY)
    with pytest.raises(PlanError, match=f"takes {upload_bytes(plan)} bytes; the buffer passed in has 16"):
        uploader.upload(plan, out[:16])
