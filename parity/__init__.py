"""Proves that two implementations of Dots3 NOTE agree, and finds the first place where they do not."""

import reference

DISTRIBUTION = "note-parity"
reference.check_origin(reference)
