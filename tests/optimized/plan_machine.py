"""Carries plans out on pools whose rows are numbers that say which token they belong to.

The machine does what the layers do with a plan (write, gather, look up, keep), on poisoned pools whose numbers never
coincide, with the host buffers overwritten after each upload, and checks every row that a query would see. What has
been overwritten, freed or never written is NaN, and equals nothing.
"""

import dataclasses
from itertools import pairwise

import numpy as np
import torch

from optimized.cache import CachePools
from optimized.plan_spans import StepLimits
from optimized.planning import plan_draft, plan_step, split_draft, split_step
from optimized.step import DeviceStep, FullGroup, KeyGroup, PlanItem, RingRows, StepPlan, Uploader, map_arrays
from reference.config import TextConfig, tiny

WINDOW, TOPK = 5, 8
ROOMY = StepLimits(max_tokens=10_000, expanded_bytes=2**30, score_bytes=2**30)


def small() -> TextConfig:
    kinds = ("full_attention", "sliding_attention", "full_attention")
    changes = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window_size": WINDOW, "index_topk": TOPK}
    return dataclasses.replace(tiny().text, **changes)


def pools_of(config: TextConfig | None = None, **changes) -> CachePools:
    options = {"pages": 64, "page_size": 4, "rings": 4, "max_draft_tokens": 2, "dtype": torch.float32, "device": "cpu"}
    tests = {"poison": True, "disjoint_numbers": True}
    return CachePools(config or small(), **{**options, **tests, **changes})


def item(request: str, count: int, token_id: int = 5) -> PlanItem:
    return PlanItem(request, (token_id,) * count, "prefill" if count > 1 else "decode")


def opened(pools: CachePools, **lengths: int) -> CachePools:
    for request, length in lengths.items():
        pools.open(request)
        pools.grow(request, length)
    return pools


class Machine:
    """Requests whose rows hold one number for each token ever appended, so that a row says which token wrote it."""

    def __init__(self, pools: CachePools, limits: StepLimits):
        self.pools, self.limits = pools, limits
        self.uploader = Uploader("cpu", buffers=2)
        self.tokens: dict[str, list[float]] = {}
        self.drafts: dict[str, list[float]] = {}
        self.counter = 0

    def open(self, request: str) -> None:
        self.pools.open(request)
        self.tokens[request], self.drafts[request] = [], []

    def step(self, *items: PlanItem) -> None:
        for part in split_step(items, self.pools, self.limits):
            self.run(plan_step(part, self.pools, self.limits))

    def draft(self, *items: PlanItem) -> None:
        for part in split_draft(items, self.pools, self.limits):
            plan = plan_draft(part, self.pools, self.limits)
            step, codes_T = self._upload(plan, self.drafts)
            assert step.pages is None
            self._ring_layers(step, step.ring, codes_T, self.pools.draft_rings, self.drafts)
            for each in step.items:
                oldest = self.pools.slots(each.request).draft_oldest
                self._check_held(each.request, self.pools.config.num_hidden_layers, oldest, self.drafts)

    def run(self, plan: StepPlan) -> None:
        step, codes_T = self._upload(plan, self.tokens)
        self._full_layers(step, codes_T)
        self._ring_layers(step, step.ring, codes_T, self.pools.rings, self.tokens)
        for each in step.items:
            for layer, oldest in ((0, 0), (1, self.pools.slots(each.request).oldest)):
                self._check_held(each.request, layer, oldest, self.tokens)

    def _check_held(self, request: str, layer: int, oldest: int, histories: dict[str, list[float]]) -> None:
        """Every position that a later truncation may bring back is there."""
        rows = self.pools.latent_rows(request, layer, range(oldest, len(histories[request])))
        assert rows[:, 0].tolist() == histories[request][oldest:]

    def truncate(self, request: str, length: int) -> None:
        self.pools.truncate(request, length)
        del self.tokens[request][length:]
        del self.drafts[request][max(0, length - 1) :]

    def truncate_draft(self, request: str, length: int) -> None:
        self.pools.truncate_draft(request, length)
        del self.drafts[request][length:]

    def fork(self, request: str, new: str) -> None:
        self.pools.fork(request, new)
        self.tokens[new], self.drafts[new] = self.tokens[request][:], self.drafts[request][:]

    def free(self, request: str) -> None:
        self.pools.free(request)
        del self.tokens[request], self.drafts[request]

    def _upload(self, plan: StepPlan, histories: dict[str, list[float]]) -> tuple[DeviceStep, torch.Tensor]:
        """The step on the device, and a new number for each row (NaN for padding), appended to the histories."""
        step = self.uploader.upload(plan)
        for buffer in self.uploader.host_buffers:
            buffer.fill_(0xAB)
        map_arrays(plan, lambda array: array.fill(-77))
        codes_T = torch.full((len(step.token_ids_T),), float("nan"))
        live = step.row_starts[-1]
        codes_T[:live] = torch.arange(self.counter + 1, self.counter + 1 + live)
        self.counter += live
        assert step.query_start_B1[: len(step.row_starts)].tolist() == list(step.row_starts)
        for number, each in enumerate(step.items):
            rows = slice(step.row_starts[number], step.row_starts[number + 1])
            history = histories[each.request]
            assert step.token_ids_T[rows].tolist() == list(each.token_ids)
            assert step.positions_T[rows].tolist() == [*range(len(history), len(history) + len(each.token_ids))]
            assert step.request_T[rows].unique().tolist() == [number]
            history += codes_T[rows].tolist()
            assert int(step.length_B[number]) == len(history)
        for padding, value in ((step.positions_T, -1), (step.request_T, 0), (step.token_ids_T, 0)):
            assert (padding[live:] == value).all()
        return step, codes_T

    def _full_layers(self, step: DeviceStep, codes_T: torch.Tensor) -> None:
        pages, size, T = step.pages, self.pools.page_size, len(codes_T)
        stacks = [
            stack.view(stack.shape[0], -1, stack.shape[3]) for stack in (self.pools.latents, self.pools.index_keys)
        ]
        is_live = pages.page_slot_T >= 0
        assert is_live.sum() == step.row_starts[-1]
        assert len(pages.page_slot_T[is_live].unique()) == is_live.sum()
        for stack in stacks:
            stack[:, pages.page_slot_T[is_live]] = codes_T[is_live, None]
        width = pages.block_table_BP.shape[1]
        assert width & (width - 1) == 0
        for number, each in enumerate(step.items):
            expected = torch.tensor(self.tokens[each.request])
            s_S = torch.arange(len(expected))
            places = pages.block_table_BP[number, s_S // size].long() * size + s_S % size
            for stack in stacks:
                assert (stack[:, places] == expected[:, None]).all()
        groups = [group for group in (pages.decode, *pages.prefill) if group]
        edges = [(group.start, group.stop) for group in groups]
        assert [first for first, _ in edges] + [T] == [0, *(last for _, last in edges)]
        for group in groups:
            self._full_group(step, group, stacks[0])

    def _full_group(self, step: DeviceStep, group: FullGroup, rows: torch.Tensor) -> None:
        longest = int(step.positions_T[group.start : group.stop].max()) + 1
        assert group.keys >= longest
        assert group.selects == (group.keys > TOPK)
        edges = [(block.start, block.stop) for block in group.blocks]
        assert [first for first, _ in edges] + [group.stop] == [group.start, *(last for _, last in edges)]
        geometry = self.pools.config.full
        absorbed_bytes = geometry.num_attention_heads * (geometry.latent_row + geometry.kv_lora_rank) * 4
        for block in group.blocks:
            if group.selects:
                assert (block.stop - block.start) * group.keys * 4 <= self.limits.score_bytes
            if group.expanded is None:
                assert (block.stop - block.start) * absorbed_bytes <= self.limits.expanded_bytes
            starts = block.query_start_B1.tolist()
            runs = [step.request_T[block.start + a : block.start + b] for a, b in pairwise(starts)]
            # One run for each item of the group, in order, also of no rows; then one for each padding request.
            items = step.request_T[group.start : min(group.stop, step.row_starts[-1])].unique().tolist()
            padding = len(step.length_B) - len(items) if group is step.pages.decode and not step.pages.prefill else 0
            assert len(runs) == len(items) + padding
            assert all(run.unique().tolist() in ([], [number]) for run, number in zip(runs, items, strict=False))
            assert not any(map(len, runs[len(items) :]))
            assert block.max_queries == max(map(len, runs), default=0)
            assert starts[-1] == min(block.stop, max(block.start, step.row_starts[-1])) - block.start
        if group.expanded is not None:
            assert (group.expanded.start, group.expanded.stop) == (group.start, group.stop)
            assert (group.expanded.source_S >= 0).all()
            keys = self._gathered(step, group.expanded, rows, self.tokens)
            assert all(first == 0 for first, _ in keys)
            lanes = geometry.num_attention_heads * (geometry.qk_nope_head_dim + geometry.v_head_dim)
            assert group.expanded.key_rows * (lanes + geometry.latent_row) * 4 <= self.limits.expanded_bytes

    def _ring_layers(
        self,
        step: DeviceStep,
        ring: RingRows,
        codes_T: torch.Tensor,
        rings: torch.Tensor,
        histories: dict[str, list[float]],
    ) -> None:
        size, flat = rings.shape[2], rings.view(rings.shape[0], -1, rings.shape[3])
        before, after = ring.ring_slot_T >= 0, ring.kept_slot_T >= 0
        assert not (before & after).any()
        assert int(before.sum()) == min(step.decode_rows, step.row_starts[-1])
        flat[:, ring.ring_slot_T[before]] = codes_T[before, None]
        for row in range(min(step.decode_rows, step.row_starts[-1])):
            t, history = int(step.positions_T[row]), histories[step.items[int(step.request_T[row])].request]
            s_S = torch.arange(max(0, t - WINDOW + 1), t + 1)
            seen = rings[:, int(ring.ring_T[row]), s_S % size]
            assert (seen == torch.tensor(history)[s_S][:, None]).all()
        edges = [(group.start, group.stop) for group in ring.prefill]
        assert [first for first, _ in edges] + [len(codes_T)] == [step.decode_rows, *(last for _, last in edges)]
        geometry = self.pools.config.sliding
        lanes = geometry.num_attention_heads * (geometry.qk_nope_head_dim + geometry.v_head_dim)
        for group in ring.prefill:
            assert group.key_rows * (lanes + geometry.latent_row) * 4 <= self.limits.expanded_bytes
            for number, (first, count) in enumerate(self._gathered(step, group, flat, histories, codes_T)):
                queries = int(group.query_start_B1[number + 1] - group.query_start_B1[number])
                length = int(step.length_B[int(step.request_T[group.start + int(group.query_start_B1[number])])])
                assert count == min(length, queries + WINDOW - 1)
                assert first == length - count
        assert len(ring.kept_slot_T[after].unique()) == after.sum()
        flat[:, ring.kept_slot_T[after]] = codes_T[after, None]

    def _gathered(
        self,
        step: DeviceStep,
        group: KeyGroup,
        flat: torch.Tensor,
        histories: dict[str, list[float]],
        codes_T: torch.Tensor | None = None,
    ) -> list[tuple[int, int]]:
        """First position and number of the keys of each item, after comparing them with its history."""
        source_S = group.source_S
        rows_S = flat[0, source_S.clamp(min=0), 0].clone()
        if codes_T is not None:
            rows_S = torch.where(source_S < 0, codes_T[(-source_S - 1).clamp(min=0)], rows_S)
        queries, keys = group.query_start_B1.tolist(), group.key_start_B1.tolist()
        assert (queries[-1], keys[-1]) == (group.stop - group.start, group.key_rows)
        assert group.max_queries == max(np.diff(queries))
        found = []
        for number, first in enumerate(group.first_key_B.tolist()):
            history = histories[step.items[int(step.request_T[group.start + queries[number]])].request]
            part = rows_S[keys[number] : keys[number + 1]]
            assert part.tolist() == history[first:]
            found.append((first, len(part)))
        return found
