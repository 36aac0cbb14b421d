"""All faults, by section of the fault specification."""

from difflib import get_close_matches

from parity.faults.attention import ATTENTION_FAULTS
from parity.faults.audio import AUDIO_FAULTS
from parity.faults.configuration import CONFIGURATION_FAULTS
from parity.faults.draft import DRAFT_FAULTS
from parity.faults.fault import Fault
from parity.faults.indexer import INDEXER_FAULTS
from parity.faults.loading import LOADING_FAULTS
from parity.faults.low_rank import LOW_RANK_FAULTS
from parity.faults.media import MEDIA_FAULTS
from parity.faults.moe import MOE_FAULTS
from parity.faults.norms import NORM_FAULTS
from parity.faults.residual import RESIDUAL_FAULTS
from parity.faults.rope import ROPE_FAULTS
from parity.faults.selection import SELECTION_FAULTS
from parity.faults.vision import VISION_FAULTS
from parity.faults.window import WINDOW_FAULTS
from reference.errors import NoteError

SECTIONS: dict[str, tuple[Fault, ...]] = {
    "A": CONFIGURATION_FAULTS,
    "B": NORM_FAULTS,
    "C": LOW_RANK_FAULTS,
    "D": ROPE_FAULTS,
    "E": INDEXER_FAULTS + SELECTION_FAULTS,
    "F": WINDOW_FAULTS,
    "G": ATTENTION_FAULTS,
    "H": MOE_FAULTS,
    "I": RESIDUAL_FAULTS,
    "J": DRAFT_FAULTS,
    "K": LOADING_FAULTS,
}
SECTION_TITLES = {
    "A": "configuration",
    "B": "norms",
    "C": "low-rank path",
    "D": "rotary embedding",
    "E": "indexer and sparse selection",
    "F": "window and caches",
    "G": "attention core, gate, projection",
    "H": "experts and dense layer",
    "I": "residuals and final layers",
    "J": "draft layer",
    "K": "loading",
}
# Faults of the towers and of what feeds them: listed and explained here, verified in their own tests.
TOWER_SECTIONS: dict[str, tuple[Fault, ...]] = {"V": VISION_FAULTS, "W": AUDIO_FAULTS, "X": MEDIA_FAULTS}
TOWER_TITLES = {"V": "vision tower", "W": "audio, file to embeddings", "X": "images and video, file to pixels"}
# Of the text model: what the sweep verifies and a diagnosis tries.
CATALOGUE: dict[str, Fault] = {fault.id: fault for faults in SECTIONS.values() for fault in faults}


class UnknownFaultError(NoteError):
    """A fault id that the catalogue does not have."""


def fault_named(fault_id: str) -> Fault:
    """Raises: UnknownFaultError, with the ids that are spelled alike."""
    every = CATALOGUE | {fault.id: fault for faults in TOWER_SECTIONS.values() for fault in faults}
    if fault_id not in every:
        alike = [other for other in every if fault_id in other or other in fault_id]
        alike = alike or get_close_matches(fault_id, every)
        hint = f"did you mean {', '.join(alike)}?" if alike else "`note-parity faults` lists them"
        raise UnknownFaultError(f"no fault {fault_id!r}; {hint}")
    return every[fault_id]
