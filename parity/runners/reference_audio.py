"""The reference's audio side: a clip through decoding rules, features, encoder and adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from parity.audio_clips import Heard
from parity.exact import exact
from parity.faults.fault import Fault, applied
from reference.audio import AudioEncoder
from reference.checkpoint.load_audio import PREFIX
from reference.config import NoteConfig
from reference.errors import ConfigError
from reference.media import mel
from reference.numerics import Numerics
from reference.probe import listening


class ReferenceAudio:
    """`weights` by released names; those of other parts are left alone. Features are float64 where `dtype` is, else
    float32. With `faults`, it is built and run with those mistakes.

    Raises: ConfigError for a config without an audio tower.
    """

    name = "reference"

    def __init__(
        self,
        config: NoteConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.bfloat16,
        numerics: Numerics | None = None,
        exact_mode: bool = False,
        faults: Sequence[Fault] = (),
    ):
        self.dtype = torch.float64 if exact_mode else dtype
        self._exact, self._faults = exact_mode, tuple(faults)
        self._listeners = [fault.listener(config) for fault in self._faults if fault.listener]
        numerics = numerics or Numerics()
        for fault in self._faults:
            weights = fault.edited_weights(weights, config)
            config = fault.edited_config(config)
            numerics = fault.numerics(numerics) if fault.numerics else numerics
        if config.audio is None:
            raise ConfigError("the config has no audio tower (audio_config)")
        self.config = config.audio
        own = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items() if name.startswith(PREFIX)}
        with self._context():
            encoder = AudioEncoder(self.config, numerics)
            encoder.load_state_dict(own)
            self.encoder = encoder.to(self.dtype).requires_grad_(False)

    def embed(self, clip: Heard) -> Tensor:
        """[tokens, O] in `dtype`."""
        wide = torch.promote_types(self.dtype, torch.float32)
        with applied(self._faults):
            # Outside of exact mode: float32 samples are what is given.
            waveform_S = clip.waveform(self.config.sampling_rate)
        with self._context(), listening(*self._listeners, first=True):
            return self.encoder(mel.features(waveform_S, self.config, wide), clip.name)

    def _context(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(applied(self._faults))
        if self._exact:
            stack.enter_context(exact())
        return stack
