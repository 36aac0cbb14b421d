"""The reference's vision tower, run on cases; and what any tower must offer to be run so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch
from torch import Tensor

from parity.exact import exact
from parity.faults.fault import Fault, applied
from parity.runners import NotSupportedHere
from parity.vision_case import VisionCase
from reference.checkpoint.expected_towers import VISION
from reference.config import NoteConfig, VisionConfig
from reference.layers.vision_grid import Grid
from reference.probe import Listener, Recorder, concatenated, listening
from reference.vision import VisionTower
from reference.vision_numerics import VisionNumerics

# Every named tensor of a call, rows first, in the order of the call's rows.
Values = dict[str, Tensor]


class VisionRunner(Protocol):
    """`dtype` is that of weights and activations. Intermediates are shown through `reference.probe` under the names of
    `parity.schema_vision`, inside `probe.rows` that give the rows of the call (merged rows: of the output)."""

    name: str
    dtype: torch.dtype

    def embed(self, pixels_NX: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Output rows [N / m², O] of all items, in their order."""


def run_case(
    runner: VisionRunner,
    vision: VisionConfig,
    case: VisionCase,
    *after: Listener,
    before: Sequence[Listener] = (),
) -> Values:
    """One run. A tensor goes through the listeners `before`, is recorded, and goes through those `after`."""
    recorder = Recorder()
    pixels_NX, grids = case.inputs(vision)
    with listening(*before, recorder, *after):
        runner.embed(pixels_NX, grids)
    return concatenated(recorder.observations)


class VisionReferenceRunner:
    """One reference tower. `weights` have their full names, as in the checkpoint; others than the tower's are ignored.

    With `exact_mode`, every rounding is promoted to float64. With `faults`, the reference is built and run with those
    mistakes: a port that makes them.
    Raises: NotSupportedHere for a config without a vision tower.
    """

    name = "reference"

    def __init__(
        self,
        config: NoteConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.bfloat16,
        numerics: VisionNumerics | None = None,
        exact_mode: bool = False,
        faults: Sequence[Fault] = (),
    ):
        self.dtype = torch.float64 if exact_mode else dtype
        self._exact, self._faults = exact_mode, tuple(faults)
        self._listeners = [fault.listener(config) for fault in self._faults if fault.listener]
        for fault in self._faults:
            weights = fault.edited_weights(weights, config)
            config = fault.edited_config(config)
        if config.vision is None:
            raise NotSupportedHere("the config has no vision tower: vision_config is missing")
        self.vision = config.vision
        own = {name.removeprefix(VISION): tensor for name, tensor in weights.items() if name.startswith(VISION)}
        with self._context():
            tower = VisionTower(self.vision, numerics)
            tower.load_state_dict(own)
            self.tower = tower.to(self.dtype).requires_grad_(False)

    def embed(self, pixels_NX: Tensor, grids: Sequence[Grid]) -> Tensor:
        # A fault's listeners come first: recorders see what a faulty port would show.
        with self._context(), listening(*self._listeners, first=True):
            # In exact mode no value may come in that a cast could round.
            return self.tower(pixels_NX.to(torch.promote_types(torch.float32, self.dtype)), grids)

    def _context(self) -> ExitStack:
        stack = ExitStack()
        if self._exact:
            stack.enter_context(exact())
        stack.enter_context(applied(self._faults))
        stack.enter_context(torch.no_grad())
        return stack
