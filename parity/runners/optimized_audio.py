"""The optimized audio tower as an audio side: samples to features and embeddings on one device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optimized.audio import AudioOptions, AudioTower
from optimized.device import Backend
from optimized.errors import NotSupportedError
from parity.audio_clips import Heard
from parity.runners import RunnerUnavailable
from reference.checkpoint.load_audio import PREFIX
from reference.config import NoteConfig
from reference.errors import ConfigError


class OptimizedAudio:
    """`weights` by released names; those of other parts are left alone. Features are float64 where `dtype` is, else
    float32.

    Raises: ConfigError for a config without an audio tower; RunnerUnavailable if the device or the backend that is
    asked for is not there.
    """

    name = "optimized"

    def __init__(
        self,
        config: NoteConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        backend: Backend | None = None,
        options: AudioOptions | None = None,
    ):
        if config.audio is None:
            raise ConfigError("the config has no audio tower (audio_config)")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise RunnerUnavailable("the optimized audio tower on CUDA: torch finds no CUDA device here")
        self.config = config.audio
        own = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items() if name.startswith(PREFIX)}
        try:
            self.tower = AudioTower.from_state(
                self.config, {name: tensor.to(dtype) for name, tensor in own.items()}, dtype, device, backend, options
            )
        except NotSupportedError as obstacle:
            raise RunnerUnavailable(str(obstacle)) from obstacle

    def embed(self, clip: Heard) -> Tensor:
        """[tokens, O] in `dtype`."""
        return self.tower.embed_sound([clip.waveform(self.config.sampling_rate)], [clip.name])[0]
