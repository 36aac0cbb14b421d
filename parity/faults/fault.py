"""What a fault is: a known mistake, written as the smallest patch of the reference that commits it.

Applied to the reference it must be detected (this tests the harness); applied on top of a foreign run it is a
hypothesis about that port (this is the diagnosis).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from reference.config import NoteConfig
from reference.numerics import Numerics
from reference.probe import Listener

Weights = dict[str, Tensor]
Visibility = Literal["V", "L", "C", "M", "N", "I", "R"]
VISIBILITIES: dict[Visibility, str] = {
    "V": "visible in any forward pass",
    "L": "visible past a length",
    "C": "visible with a cache, over several steps",
    "M": "visible in the draft layer only",
    "N": "below bfloat16 noise, visible in float32",
    "I": "never visible, in exact arithmetic",
    "R": "never visible on the released configuration",
}


@dataclass(frozen=True)
class Patch:
    """Replace `owner.attribute` by `make(original)` while the faulty model is built and run."""

    owner: Any
    attribute: str
    make: Callable[[Any], Any]


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue.

    `says`: one sentence, what is done wrong. `first`: patterns of the probes (schema patterns) at which it can first
    show. `visible_when`: the smallest shape at which it shows. `source`: who reported it. `hides_in`: patterns of
    intermediate probes that a fault of class I or R may change although nothing behind them does. The rest is the
    patch; any part may be absent. `numerics` is for mistakes of precision.
    """

    id: str
    says: str
    visibility: Visibility
    first: tuple[str, ...]
    visible_when: str
    source: str
    config: Callable[[NoteConfig], NoteConfig] | None = None
    weights: Callable[[Weights, NoteConfig], Weights] | None = None
    numerics: Callable[[Numerics], Numerics] | None = None
    patches: tuple[Patch, ...] = ()
    listener: Callable[[NoteConfig], Listener] | None = None
    hides_in: tuple[str, ...] = ()

    def edited_config(self, config: NoteConfig) -> NoteConfig:
        return self.config(config) if self.config else config

    def edited_weights(self, weights: Mapping[str, Tensor], config: NoteConfig) -> Weights:
        """A new dict; the tensors of `weights` are not written to. `config` is the right one."""
        return self.weights(dict(weights), config) if self.weights else dict(weights)


@contextmanager
def applied(faults: Sequence[Fault]) -> Iterator[None]:
    """Inside, the reference's code has the patches of `faults`, in this order."""
    with applied_patches([patch for fault in faults for patch in fault.patches]):
        yield


@contextmanager
def applied_patches(patches: Sequence[Patch]) -> Iterator[None]:
    """Inside, each patch's attribute is replaced; later patches see what earlier ones put there."""
    undo = []
    try:
        for patch in patches:
            # The class's own entry, so that a method is restored as it was and not as a bound copy.
            original = vars(patch.owner)[patch.attribute]
            undo.append((patch.owner, patch.attribute, original))
            setattr(patch.owner, patch.attribute, patch.make(original))
        yield
    finally:
        for owner, attribute, original in reversed(undo):
            setattr(owner, attribute, original)


def after_construction(owner: type, edit: Callable[..., None]) -> Patch:
    """A patch that calls `edit(instance, *constructor_arguments)` when an `owner` has been built."""

    def make(constructor: Callable[..., None]) -> Callable[..., None]:
        def construct(instance: Any, *args: Any, **kwargs: Any) -> None:
            constructor(instance, *args, **kwargs)
            edit(instance, *args, **kwargs)

        return construct

    return Patch(owner, "__init__", make)


def text_edit(**changes: Any) -> Callable[[NoteConfig], NoteConfig]:
    """A config edit that replaces fields of the text config."""
    return lambda config: replace(config, text=replace(config.text, **changes))


def geometry_edit(kind: Literal["full", "sliding"], **changes: Any) -> Callable[[NoteConfig], NoteConfig]:
    """A config edit that replaces fields of one attention geometry."""

    def edit(config: NoteConfig) -> NoteConfig:
        geometry = replace(getattr(config.text, kind), **changes)
        return replace(config, text=replace(config.text, **{kind: geometry}))

    return edit


def scaled(pattern: str, factor: float) -> Callable[[Weights, NoteConfig], Weights]:
    """A weight edit: every tensor whose name contains `pattern`, times `factor`."""

    def edit(weights: Weights, config: NoteConfig) -> Weights:
        return {name: tensor * factor if pattern in name else tensor for name, tensor in weights.items()}

    return edit
