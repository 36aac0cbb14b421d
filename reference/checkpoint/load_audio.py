"""Fills a speech encoder from a checkpoint folder. Source: audio specification, section 10."""

import os

import torch

from reference.audio import AudioEncoder
from reference.checkpoint.folder import CheckpointFolder
from reference.checkpoint.load import load_into
from reference.config import AudioConfig
from reference.errors import CheckpointError
from reference.numerics import Numerics

PREFIX = "audio_encoder."


def empty_audio_encoder(config: AudioConfig, numerics: Numerics | None = None) -> AudioEncoder:
    """An encoder without weights, on the meta device: the released one has 1.8 GB of them."""
    with torch.device("meta"):
        return AudioEncoder(config, numerics)


def load_audio_encoder(
    path: str | os.PathLike[str],
    numerics: Numerics | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    device: str | torch.device = "cpu",
    scan_non_finite: bool = False,
) -> AudioEncoder:
    """Open a folder and build its speech encoder and adapter; the other parts are verified and left alone.

    `dtype` is what the weights are converted to (None: as stored).
    Raises: ConfigError, CheckpointError, also for a folder whose config has no audio tower.
    """
    # Which lanes of an index head are rotated matters to the text model alone.
    folder = CheckpointFolder.open(path, Numerics(missing_indexer_rope_layout="leading"), ("audio",))
    if folder.config.audio is None:
        raise CheckpointError(f"{folder.path}: has no audio tower: its config.json lacks audio_config")
    encoder = empty_audio_encoder(folder.config.audio, numerics)
    load_into(encoder, folder, PREFIX, dtype, device, scan_non_finite)
    return encoder
