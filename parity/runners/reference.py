"""The reference, driven through the runner protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from parity.exact import exact
from parity.faults.fault import Fault, applied
from reference.config import NoteConfig
from reference.layers.indexer import RopeLayout
from reference.numerics import Numerics
from reference.probe import listening
from reference.session import Session, StepItem
from reference.text import TextModel


class ReferenceRunner:
    """One reference model and its requests.

    With `exact_mode`, every rounding is promoted to float64. With `faults`, the reference is built and run with those
    mistakes: a port that makes them.
    """

    name = "reference"

    def __init__(
        self,
        config: NoteConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.bfloat16,
        numerics: Numerics | None = None,
        exact_mode: bool = False,
        indexer_rope_layout: RopeLayout = "leading",
        max_draft_tokens: int = 4,
        device: str = "cpu",
        faults: Sequence[Fault] = (),
    ):
        self.dtype = torch.float64 if exact_mode else dtype
        self.config, self._exact, self._faults = config, exact_mode, tuple(faults)
        numerics = numerics or Numerics()
        for fault in self._faults:
            weights = fault.edited_weights(weights, self.config)
            self.config = fault.edited_config(self.config)
            numerics = fault.numerics(numerics) if fault.numerics else numerics
        self._listeners = [fault.listener(config) for fault in self._faults if fault.listener]
        with self._context():
            model = TextModel(self.config.text, numerics, indexer_rope_layout)
            model.load_state_dict(dict(weights))
            self.model = model.to(device=device, dtype=self.dtype).requires_grad_(False)
        self.session = Session(self.model, max_draft_tokens)

    def _context(self) -> ExitStack:
        stack = ExitStack()
        if self._exact:
            stack.enter_context(exact())
        stack.enter_context(applied(self._faults))
        stack.enter_context(torch.no_grad())
        return stack

    def _run_context(self) -> ExitStack:
        stack = self._context()
        # A fault's listeners come first: recorders see what a faulty port would show.
        stack.enter_context(listening(*self._listeners, first=True))
        return stack

    def step(self, items: Sequence[StepItem]) -> dict[str, Tensor]:
        with self._run_context():
            return self.session.step(items)

    def draft(self, request: str, next_token: int, depth: int, forced: Sequence[int] = ()) -> Tensor:
        with self._run_context():
            return self.session.draft(request, next_token, depth, forced)

    def truncate(self, request: str, length: int) -> None:
        with self._run_context():
            self.session.truncate(request, length)

    def length(self, request: str) -> int:
        return self.session.length(request)

    def fork(self, request: str, new: str) -> None:
        self.session.fork(request, new)

    def free(self, request: str) -> None:
        self.session.free(request)
