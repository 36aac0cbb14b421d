"""What follows from another choice cannot be judged by a stored truth: which rows those are.

In the same layer what comes later in the same row, in later layers every row that can see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parity.findings import ChoiceResult, Place
from parity.schema import dataflow_key, layer_of
from parity.workload import Fork, Workload

# Groups of names that come after all layers; the cache is filled inside of its layer.
_BEHIND_LAYERS = ("final_norm", "logits", "mtp.")


@dataclass(frozen=True)
class Cause:
    """A choice that is, or may be, another one than the truth's."""

    name: str
    request: str
    position: int
    occurrence: int
    verdict: str

    @classmethod
    def of(cls, choice: ChoiceResult) -> Cause:
        exchange = choice.exchange
        return cls(exchange.name, exchange.request, exchange.position, exchange.occurrence, choice.verdict)

    def __str__(self) -> str:
        again = f", run {self.occurrence + 1}" if self.occurrence else ""
        return f"{self.verdict} of {self.name}, request {self.request}, position {self.position}{again}"

    def reaches(self, name: str, place: Place, families: Mapping[str, set[str]]) -> bool:
        """In the same layer: what comes later in the same row. In later layers: rows at or behind its position.

        That is more than attention can see where a window is short, or where the row was taken back before.
        """
        layer = layer_of(self.name)
        assert layer is not None
        if layer_of(name) == layer:
            own = (self.request, self.position, self.occurrence)
            is_same_row = own == (place.request, place.position, place.occurrence)
            return is_same_row and dataflow_key(name) > dataflow_key(self.name)
        is_later = (layer_of(name) or 0) > layer or name.startswith(_BEHIND_LAYERS)
        is_later |= name.startswith("cache.") and int(name.split(".")[1]) > layer
        return (
            is_later and place.request in families.get(self.request, {self.request}) and place.position >= self.position
        )


def families_of(workload: Workload) -> dict[str, set[str]]:
    """Each request with those that were forked from it, directly or not."""
    family: dict[str, set[str]] = {request: {request} for request in workload.requests}
    for action in reversed(workload.actions):
        if isinstance(action, Fork):
            family[action.request] |= family[action.new]
    return family
