"""Which layers and experts of a checkpoint to take, and where each tensor of the smaller model comes from.

Layers are renumbered from 0; their kind follows `layer_types`, never the number. One list of experts is applied to all
four places that know them: router rows, correction biases, and the expert tensors, which are renumbered. The draft
layer follows the last layer kept.
Source: checkpoint specification, section 9.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from reference.config import NoteConfig, slice_of
from reference.errors import ConfigError

_LAYERS = "model.layers."
# The tensors with one row for each expert.
_PER_EXPERT_ROWS = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, or with `rows` those of its first dim in that order."""

    name: str
    rows: tuple[int, ...] | None = None


class Selection:
    """`config` is that of the smaller model. Without arguments it is the whole model, unchanged.

    Raises: ConfigError for layers or experts that do not exist or are named twice, for fewer experts than a token
    chooses, or for a dense layer behind an expert layer.
    """

    def __init__(
        self,
        config: NoteConfig,
        layers: Sequence[int] | None = None,
        experts: Sequence[int] | None = None,
        with_mtp: bool = True,
        with_towers: bool = True,
    ):
        text = config.text
        self.layers = tuple(range(text.num_hidden_layers) if layers is None else layers)
        self.experts = tuple(range(text.n_routed_experts) if experts is None else experts)
        for expert in self.experts:
            if not 0 <= expert < text.n_routed_experts:
                raise ConfigError(f"slice: expert {expert} does not exist; there are 0 to {text.n_routed_experts - 1}")
        if len(set(self.experts)) < len(self.experts):
            raise ConfigError(f"slice: experts must be distinct, found {list(self.experts)}")
        if len(self.experts) < text.n_routed_experts and text.n_group > 1:
            raise ConfigError(f"slice: experts cannot be left out of a router with n_group = {text.n_group} groups")
        self.config = slice_of(config, self.layers, len(self.experts))
        if not with_mtp:
            self.config = dataclasses.replace(
                self.config, text=dataclasses.replace(self.config.text, num_nextn_predict_layers=0)
            )
        if not with_towers:
            self.config = dataclasses.replace(self.config, vision=None, audio=None)
        self._takes_all_experts = self.experts == tuple(range(text.n_routed_experts))
        # The draft layer's number before and after.
        self._layer_numbers = (*self.layers, text.num_hidden_layers)

    def source(self, name: str) -> Source:
        """Where the smaller model's tensor `name` comes from."""
        if not name.startswith(_LAYERS):
            return Source(name)
        number, _, rest = name.removeprefix(_LAYERS).partition(".")
        prefix = f"{_LAYERS}{self._layer_numbers[int(number)]}."
        if rest in _PER_EXPERT_ROWS:
            return Source(prefix + rest, None if self._takes_all_experts else self.experts)
        if rest.startswith("mlp.experts."):
            expert, _, projection = rest.removeprefix("mlp.experts.").partition(".")
            return Source(f"{prefix}mlp.experts.{self.experts[int(expert)]}.{projection}")
        return Source(prefix + rest)
