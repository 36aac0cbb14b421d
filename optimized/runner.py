"""Runs planned steps: the backbone's and the draft layer's, eagerly or recorded.

`step`   hidden states and logits of all rows, or of each request's last one, and the chosen tokens if the plan draws
`draft`  the same of the draft layer, of each request's last row

Chosen tokens stay on the device, in one buffer for either model, where the next run finds those that it is fed with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.graphs import BUCKETS, MOST_RECORDINGS, Recorder
from optimized.mtp import draft_step
from optimized.observe import BatchObserver, Segment
from optimized.step import DeviceStep, Draws, StepPlan, Uploader
from optimized.text import Text
from reference.probe import is_observed

# T rows  D model  W vocabulary  B requests  R rows of a buffer


@dataclass(frozen=True)
class StepOutput:
    """normed_TD: after the final norm. Logits of all rows, or [B, W] of the last ones. chosen_T: int64, a view."""

    normed_TD: Tensor
    logits_TW: Tensor
    chosen_T: Tensor | None


@dataclass(frozen=True)
class DraftOutput:
    """Of each request's last row: the hidden state for a further draft step, logits, the chosen token."""

    hidden_BD: Tensor
    logits_BW: Tensor
    chosen_B: Tensor | None


class Runner:
    """One model and its buffers. `graphs`: padded steps are recorded; what they return is good until the next run.

    `recordings`: how many are kept, as in `Recorder`.
    """

    def __init__(self, text: Text, graphs: bool, most_rows: int, recordings: int = MOST_RECORDINGS):
        self.text, device = text, text.pools.device
        self.uploader = Uploader(device)
        rows = max(BUCKETS[-1], most_rows)
        self.chosen_R, self.drafted_R = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self._fill = text.pools.fill
        self._hidden_RD: Tensor | None = None
        self.recorder: Recorder[StepOutput | DraftOutput] | None = (
            Recorder(self.uploader, (self.chosen_R, self.drafted_R), recordings) if graphs else None
        )

    def step(self, plan: StepPlan, last_only: bool = False, embeddings_TD: Tensor | None = None) -> StepOutput:
        """Eagerly; of a plan that is padded the padding rows' results mean nothing.

        `embeddings_TD`, of all rows but padding, stand for what the table has for their ids.
        """
        step = self.uploader.upload(plan)
        return self.forward(step, observer(step), last_only, embeddings_TD)

    def recorded_step(self, plan: StepPlan) -> StepOutput:
        """The same of a padded plan from its recording, all rows. Listeners are shown the copies that it keeps."""
        assert self.recorder is not None
        assert plan.pages is not None
        key = ("step", len(plan.positions_T), plan.pages.block_table_BP.shape, plan.draws is None, is_observed())
        step, probes, output = self.recorder.run(key, plan, lambda step, see: self.forward(step, see))
        assert isinstance(output, StepOutput)
        if is_observed():
            probes.show(segments(plan_rows(plan, step)))
        return output

    def draft(self, number: int, plan: StepPlan, hidden_TD: Tensor) -> DraftOutput:
        """Draft step `number` on rows whose hidden states are given; eagerly. Padding rows get some."""
        step = self.uploader.upload(plan)
        if len(plan.positions_T) > len(hidden_TD):
            hidden_TD = self._buffered(len(plan.positions_T), hidden_TD)
        return self._draft(number, step, hidden_TD, observer(step, "draft"))

    def recorded_draft(self, number: int, plan: StepPlan, hidden_TD: Tensor) -> DraftOutput:
        """The same from its recording: the hidden states are copied to a buffer that it reads."""
        assert self.recorder is not None
        rows = len(plan.positions_T)
        buffer_TD = self._buffered(rows, hidden_TD)
        # Names differ by the number, which only a listener sees.
        seen = number if is_observed() else None
        key = ("draft", rows, plan.length_B.shape, plan.draws is None, seen)
        step, probes, output = self.recorder.run(key, plan, lambda step, see: self._draft(number, step, buffer_TD, see))
        assert isinstance(output, DraftOutput)
        if seen is not None:
            probes.show(segments(plan_rows(plan, step), "draft"))
        return output

    def _buffered(self, rows: int, hidden_TD: Tensor) -> Tensor:
        """The rows at the start of a buffer that never moves, and has room for every padded shape."""
        if self._hidden_RD is None:
            self._hidden_RD = hidden_TD.new_empty(BUCKETS[-1], self.text.config.hidden_size)
        buffer_TD = self._hidden_RD[:rows]
        buffer_TD[len(hidden_TD) :].fill_(self._fill)
        buffer_TD[: len(hidden_TD)].copy_(hidden_TD)
        return buffer_TD

    def forward(
        self, step: DeviceStep, see: BatchObserver, last_only: bool = False, embeddings_TD: Tensor | None = None
    ) -> StepOutput:
        """The backbone over a step on the device: from its tokens, or those it is fed with, to the chosen ones."""
        step = self._fed(step, self.chosen_R)
        normed_TD = self.text.hidden(step, see, embeddings_TD)
        if last_only and not is_observed():
            logits_TW = self.text.logits(normed_TD[last_rows(step)])
        else:
            logits_TW = see("logits", self.text.logits(normed_TD))
            if last_only:
                logits_TW = logits_TW[last_rows(step)]
        return StepOutput(normed_TD, logits_TW, self._choose(logits_TW, step.draws, self.chosen_R))

    def _draft(self, number: int, step: DeviceStep, hidden_TD: Tensor, see: BatchObserver) -> DraftOutput:
        step = self._fed(step, self.drafted_R)
        hidden_BD, logits_BW = draft_step(number, self.text, hidden_TD, step, last_rows(step), see)
        return DraftOutput(hidden_BD, logits_BW, self._choose(logits_BW, step.draws, self.drafted_R))

    def _fed(self, step: DeviceStep, chosen_R: Tensor) -> DeviceStep:
        if step.draws is None:
            return step
        ids_T = self.text.ops.feed_tokens(step.token_ids_T, step.draws.source_T, chosen_R)
        return dataclasses.replace(step, token_ids_T=ids_T)

    def _choose(self, logits_TW: Tensor, draws: Draws[Tensor] | None, chosen_R: Tensor) -> Tensor | None:
        if draws is None:
            return None
        chosen_T = chosen_R[: len(logits_TW)]
        temperature_T = draws.temperature_T.view(torch.float64)
        self.text.ops.choose_tokens(logits_TW, draws.position_T, draws.seed_T, temperature_T, chosen_T)
        return chosen_T


def last_rows(step: DeviceStep) -> Tensor:
    """The last row of each request, padding requests too, int64 [B]; from tensors that are on the device already."""
    return step.query_start_B1[1:].long() - 1


def plan_rows(plan: StepPlan, step: DeviceStep) -> DeviceStep:
    """The tensors of a recording with the items and rows of the plan that it has just run."""
    return dataclasses.replace(step, items=plan.items, row_starts=plan.row_starts)


def observer(step: DeviceStep, kind: str | None = None) -> BatchObserver:
    return BatchObserver(segments(step, kind) if is_observed() else ())


def segments(step: DeviceStep, kind: str | None = None) -> list[Segment]:
    return [
        Segment(item.request, kind or item.kind, start, stop, step.positions_T[start:stop].long())
        for item, start, stop in zip(step.items, step.row_starts, step.row_starts[1:], strict=False)
    ]
