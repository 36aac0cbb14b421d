"""Errors of the parts of `parity` that work without `reference`: traces, workloads, goldens, the gate.

The command treats `ParityError` as it treats `reference.errors.NoteError`: one message, exit code 2.
"""


class ParityError(Exception):
    """Base class of the refusals that are raised here; says what is wrong, where, and what would be right."""


class GoldenError(ParityError):
    """A golden folder is incomplete, damaged or something else, or a candidate does not fit it."""
