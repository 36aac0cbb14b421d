"""Runs a workload through a checkpoint that is larger than the memory: layer by layer, all runs side by side.

A stage is one layer, or what follows the last. Its weights are read once for the truth (float64) and once for the draws
(the storage dtype); every run goes through all steps of the workload with caches of its own; what is kept are the
hidden states that leave the stage. The draws replay the truth's choices, so their errors are rounding and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.replay import ChoiceReplay
from parity.rounding import RoundingDraw
from parity.run import run_workload
from parity.streamed_modules import (
    StreamedHead,
    StreamedTable,
    UpToExperts,
    WaitingSteps,
    layer_without_experts,
    loaded_expert,
)
from parity.trace import Trace, TraceRecorder
from parity.workload import Draft, Workload
from reference.cache import LayerCache
from reference.checkpoint import CheckpointFolder, load_into
from reference.numerics import Numerics
from reference.probe import listening
from reference.session import Session
from reference.text import TextModel

HEAD_NAMES = ("final_norm", "logits", "mtp.*")


class _Passing(nn.Module):
    """In place of a layer of another stage: counts the tokens, as a cache must, and changes nothing."""

    def forward(self, hidden_TD: Tensor, cache: LayerCache) -> Tensor:
        cache.length += len(hidden_TD)
        return hidden_TD


class _NoHead(nn.Module):
    """In place of the head, in a layer's stage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0)

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD[:, :0]


class _Fed(nn.Module):
    """Gives a layer the inputs that an earlier stage left (None: what comes), step by step, and keeps its outputs."""

    def __init__(self, layer: nn.Module, inputs: Sequence[Tensor] | None):
        super().__init__()
        self._layer, self._inputs = layer, inputs
        self.outputs: list[Tensor] = []

    def forward(self, hidden_TD: Tensor, cache: LayerCache) -> Tensor:
        given = hidden_TD if self._inputs is None else self._inputs[len(self.outputs)]
        self.outputs.append(self._layer(given, cache))
        return self.outputs[-1]


class _StageSession(Session):
    """A session that is a runner."""

    name = "reference"

    def __init__(self, model: TextModel, folder: CheckpointFolder, dtype: torch.dtype, max_draft_tokens: int):
        super().__init__(model, max_draft_tokens)
        self.config, self.dtype = folder.config, dtype


class Run:
    """The truth (`draw` None), or one draw in the storage dtype, of which draw 0 is the plain run.

    `hidden` are the states after the last stage, one tensor a step; None before the first stage.
    """

    def __init__(self, dtype: torch.dtype, draw: int | None):
        self.dtype, self.draw = dtype, draw
        self.hidden: list[Tensor] | None = None
        self._drawing: RoundingDraw | None = None

    @property
    def title(self) -> str:
        return "truth" if self.draw is None else f"draw {self.draw}"

    def start_stage(self, stage: int, runs: int) -> None:
        """Another draw for each stage: the same again would round the same elements of the stream the same way."""
        self._drawing = RoundingDraw(stage * runs + self.draw) if self.draw else None

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Inside, operations are rounded as in this run."""
        with torch.no_grad(), self._drawing.drawing() if self._drawing else nullcontext():
            yield


@dataclass(frozen=True)
class StageTraces:
    truth: Trace
    draws: tuple[Trace, ...]


class StreamedRun:
    """All runs of one workload on one folder. Call `layer` for every layer in order, then `head`.

    `max_draft_tokens` bounds how many tokens the workload drafts and takes back. Raises: CheckpointError.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        workload: Workload,
        dtype: torch.dtype,
        draws: int,
        numerics: Numerics,
        max_draft_tokens: int = 4,
    ):
        self._folder, self._numerics, self._max_draft_tokens = folder, numerics, max_draft_tokens
        self._text = folder.config.text
        self._workload = workload
        undrafted = tuple(action for action in workload.actions if not isinstance(action, Draft))
        self._without_drafts = dataclasses.replace(workload, actions=undrafted)
        self.runs = [Run(torch.float64, None), *(Run(dtype, draw) for draw in range(draws))]

    def layer(self, index: int, progress: Callable[[str], None] = lambda line: None) -> StageTraces:
        """One layer, of all runs. Its experts, if it has any, are read one by one."""
        names = (f"layers.{index}.*", f"cache.{index}.*", *(("embeddings",) if index == 0 else ()))
        recorders = [TraceRecorder(names) for _ in self.runs]
        # Truth first: the draws replay its choices. Then its weights make room for those in the other dtype.
        waiting = [
            *self._up_to_experts(index, self.runs[:1], recorders[:1], recorders[0], progress),
            *self._up_to_experts(index, self.runs[1:], recorders[1:], recorders[0], progress),
        ]
        if self._text.is_moe(index):
            self._run_experts(index, waiting, progress)
            for run, steps, recorder in zip(self.runs, waiting, recorders, strict=True):
                with run.rounding(), listening(recorder):
                    run.hidden = list(steps.outputs())
        return _traces(recorders)

    def head(self) -> StageTraces:
        """Final norm, logits and all drafts, of all runs."""
        recorders = [TraceRecorder(HEAD_NAMES) for _ in self.runs]
        last = self._text.num_hidden_layers - 1
        for run, recorder in zip(self.runs, recorders, strict=True):
            model = self._skeleton(run.dtype)
            model.model.layers[last] = _Fed(_Passing(), run.hidden)
            self._fill_head(model, run.dtype)
            run.start_stage(last + 1, len(self.runs))
            self._run(model, self._workload, run, recorder, recorders[0])
        return _traces(recorders)

    def _up_to_experts(
        self,
        index: int,
        runs: Sequence[Run],
        recorders: Sequence[TraceRecorder],
        truth: TraceRecorder,
        progress: Callable[[str], None],
    ) -> Iterator[WaitingSteps]:
        """Runs of one dtype through a layer; a dense one is complete then."""
        layer = layer_without_experts(self._folder, self._numerics, index, runs[0].dtype)
        for run, recorder in zip(runs, recorders, strict=True):
            progress(f"layer {index}: {run.title}")
            waiting = WaitingSteps(f"layers.{index}")
            stage = UpToExperts(layer, waiting) if self._text.is_moe(index) else layer
            fed = _Fed(stage, run.hidden)
            model = self._skeleton(run.dtype)
            model.model.layers[index] = fed
            model.model.add_module("norm", nn.Identity())
            model.add_module("lm_head", _NoHead())
            run.start_stage(index, len(self.runs))
            with listening(*([stage] if isinstance(stage, UpToExperts) else [])):
                self._run(model, self._without_drafts, run, recorder, truth)
            run.hidden = fed.outputs
            yield waiting

    def _run_experts(self, index: int, waiting: Sequence[WaitingSteps], progress: Callable[[str], None]) -> None:
        experts = self._text.n_routed_experts
        for expert_id in range(experts):
            if not any(steps.use(expert_id) for steps in waiting):
                continue
            progress(f"layer {index}: expert {expert_id + 1} of {experts}")
            expert, dtype = None, None
            for run, steps in zip(self.runs, waiting, strict=True):
                if run.dtype != dtype:
                    expert, dtype = loaded_expert(self._folder, self._numerics, index, expert_id, run.dtype), run.dtype
                assert expert is not None
                with run.rounding():
                    steps.add(expert_id, expert)

    def _run(
        self, model: TextModel, workload: Workload, run: Run, recorder: TraceRecorder, truth: TraceRecorder
    ) -> None:
        session = _StageSession(model, self._folder, run.dtype, self._max_draft_tokens)
        replay = [] if run.draw is None else [ChoiceReplay(truth.trace())]
        with run.rounding():
            run_workload(session, workload, recorder, before=replay)

    def _skeleton(self, dtype: torch.dtype) -> TextModel:
        """A model in which only the embedding works. Norm, head and draft layer have no weights yet."""
        text = self._text
        without_experts = dataclasses.replace(text, first_k_dense_replace=text.num_hidden_layers)
        with torch.device("meta"):
            model = TextModel(without_experts, self._numerics, self._folder.indexer_rope_layout)
        for index in range(text.num_hidden_layers):
            model.model.layers[index] = _Passing()
        model.model.add_module("embed_tokens", StreamedTable(self._folder, "model.embed_tokens.weight", dtype))
        return model

    def _fill_head(self, model: TextModel, dtype: torch.dtype) -> None:
        load_into(model.model.norm, self._folder, "model.norm.", dtype)
        model.add_module("lm_head", StreamedHead(self._folder, dtype))
        if self._text.num_nextn_predict_layers:
            number = self._text.num_hidden_layers
            load_into(model.model.layers[number], self._folder, f"model.layers.{number}.", dtype)
            table = StreamedTable(self._folder, "model.mtp.embed_tokens.weight", dtype)
            model.model.mtp.add_module("embed_tokens", table)


def _traces(recorders: Sequence[TraceRecorder]) -> StageTraces:
    truth, *draws = (recorder.trace() for recorder in recorders)
    return StageTraces(truth, tuple(draws))
