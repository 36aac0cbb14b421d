"""All faults, by section of the fault specification."""

from parity.faults.fault import Fault
from parity.faults.window import WINDOW_FAULTS
from reference.errors import NoteError

CATALOGUE: dict[str, Fault] = {fault.id: fault for fault in WINDOW_FAULTS}


class UnknownFaultError(NoteError):
    """A fault id that the catalogue does not have."""


def fault_named(fault_id: str) -> Fault:
    """Raises: UnknownFaultError, with the ids that are spelled alike."""
    if fault_id not in CATALOGUE:
        alike = [other for other in CATALOGUE if fault_id in other or other in fault_id]
        raise UnknownFaultError(
            f"no fault {fault_id!r}; {'did you mean ' + ', '.join(alike) if alike else 'see `faults`'}"
        )
    return CATALOGUE[fault_id]
