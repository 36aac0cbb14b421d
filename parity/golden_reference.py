"""The reference of a golden: its config and numerics, with the weights it was made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.errors import GoldenError
from parity.faults.fault import Fault
from parity.golden_file import Golden, sha256_of
from parity.runners.reference import ReferenceRunner
from reference.checkpoint import load_text_model, synthetic_tensors
from reference.checkpoint.index import INDEX_FILE
from reference.config import NoteConfig
from reference.numerics import Numerics


@dataclass(frozen=True)
class GoldenReference:
    """Builds the reference in a dtype, with faults."""

    config: NoteConfig
    weights: Mapping[str, Tensor]
    numerics: Numerics
    indexer_rope_layout: Any

    def __call__(self, dtype: torch.dtype, faults: Sequence[Fault] = ()) -> ReferenceRunner:
        return ReferenceRunner(
            self.config,
            self.weights,
            dtype,
            self.numerics,
            indexer_rope_layout=self.indexer_rope_layout,
            faults=faults,
        )


def numerics_of(golden: Golden) -> Numerics:
    """Raises: GoldenError for a choice that does not exist in this version; ConfigError for a value that does not."""
    known = {field.name for field in dataclasses.fields(Numerics)}
    unknown = sorted(set(golden.record.numerics) - known)
    if unknown:
        raise GoldenError(
            f"{golden.folder}: numerics {', '.join(unknown)}: expected some of {', '.join(sorted(known))}"
        )
    return Numerics(**golden.record.numerics)  # type: ignore[arg-type] # checked by Numerics


def reference_of(golden: Golden, checkpoint: Path | None = None) -> GoldenReference:
    """Synthetic weights are made again from their seed; others are read from `checkpoint`.

    Raises: GoldenError without weights, or for a checkpoint that is not the one the golden was made from.
    """
    record = golden.record
    config, numerics = NoteConfig.from_json(record.config), numerics_of(golden)
    if checkpoint is not None:
        index = checkpoint / INDEX_FILE
        if not index.is_file():
            raise GoldenError(f"{checkpoint}: has no {INDEX_FILE}; name the checkpoint that the golden was made from")
        found = sha256_of(index)
        if found != record.weights.index_sha256:
            raise GoldenError(
                f"{checkpoint}: its index has sha256 {found}, the golden was made from one with "
                f"{record.weights.index_sha256}"
            )
        weights = load_text_model(checkpoint, numerics, dtype=None).state_dict()
    elif record.weights.synthetic_seed is not None:
        weights = dict(synthetic_tensors(config, record.weights.synthetic_seed))
    else:
        raise GoldenError(
            "the golden holds no weights and they are not synthetic: name its checkpoint with --checkpoint"
        )
    return GoldenReference(config, weights, numerics, record.indexer_rope_layout)
