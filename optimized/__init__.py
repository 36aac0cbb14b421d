"""Dots3 NOTE as production code. Nothing here yet."""

import reference

DISTRIBUTION = "note-parity"
reference.check_origin(reference)
