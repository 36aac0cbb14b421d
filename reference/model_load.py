"""Fills the whole model from a checkpoint folder, towers included or left out.

Every tensor of the folder is either put into the model or deferred with its bucket; of a tower that is left out no byte
is read. Source: multimodal prompt specification, section 5; checkpoint specification, section 8.
"""

import dataclasses
import os
from collections.abc import Collection

import torch

from reference.checkpoint.folder import CheckpointFolder
from reference.checkpoint.load import load_into
from reference.model import NoteModel, Tower, checked_towers
from reference.numerics import Numerics
from reference.vision_numerics import VisionNumerics


def load_note_model(
    path: str | os.PathLike[str],
    towers: Collection[Tower] | None = None,
    numerics: Numerics | None = None,
    vision_numerics: VisionNumerics | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    device: str | torch.device = "cpu",
    scan_non_finite: bool = False,
) -> NoteModel:
    """Open a folder and build its model, draft layer included.

    `towers`: those to load; None for all that the folder has, () for text only. `dtype` is what weights are converted
    to (None: as stored); router biases stay at least float32.
    Raises: ConfigError, also for a tower that the folder's config lacks; CheckpointError.
    """
    folder = CheckpointFolder.open(path, numerics)
    wanted = checked_towers(folder.config, towers)
    folder = dataclasses.replace(folder, buckets=("language", "mtp", *wanted))
    with torch.device("meta"):
        model = NoteModel(folder.config, numerics, vision_numerics, wanted, folder.indexer_rope_layout)
    load_into(model, folder, "", dtype, device, scan_non_finite)
    return model
