"""What an implementation has to offer to be run and observed: the `Runner` protocol.

A runner is driven by steps over requests, as the reference's session is, and shows its intermediates only through
`reference.probe`: it calls `probe(name, value)` with the schema's names and canonical layouts inside
`probe.rows(request, positions, kind)`. So one recorder serves every implementation.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from parity.origin import check_origin

# Before the first import from it: a foreign one would fail with an error that explains nothing.
check_origin("reference")

from reference.config import NoteConfig  # noqa: E402
from reference.errors import NoteError  # noqa: E402
from reference.session import StepItem  # noqa: E402


class RunnerUnavailable(NoteError):  # noqa: N818 - a state of this machine, not a mistake
    """The implementation cannot run here: its package is missing or of another version."""


class NotSupportedHere(NoteError):  # noqa: N818 - the implementation's limit, not a mistake
    """The implementation cannot do what was asked, or not the same way as the model's definition."""


class Runner(Protocol):
    """`dtype` is the dtype of weights and activations; `name` says which implementation this is, in reports."""

    config: NoteConfig
    dtype: torch.dtype
    name: str

    def step(self, items: Sequence[StepItem]) -> dict[str, Tensor]:
        """Append each item's tokens to its request. Returns logits [T, vocab] of the new rows for each request."""

    def draft(self, request: str, next_token: int, depth: int, forced: Sequence[int] = ()) -> Tensor:
        """Draft behind `next_token` with the draft layer. Returns logits [depth, vocab]; see `Session.draft`."""

    def truncate(self, request: str, length: int) -> None:
        """Keep the first `length` tokens of the request."""

    def fork(self, request: str, new: str) -> None:
        """Start `new` as a copy of `request`."""

    def free(self, request: str) -> None:
        """Forget the request."""
