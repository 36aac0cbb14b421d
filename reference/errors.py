"""Every error this project raises on purpose.

A message says what is wrong, where, and what would be right. Nothing else is raised for bad input, so a caller
who catches `NoteError` has caught every refusal and no bug.
"""


class NoteError(Exception):
    """Base class of all refusals."""


class ConfigError(NoteError):
    """A configuration lacks a key, has a value of the wrong type, or asks for a model that does not exist."""


class CheckpointError(NoteError):
    """A checkpoint folder does not hold what its configuration and index promise. Lists every problem found."""


class MissingPackageError(NoteError):
    """A package of one of the extras is needed for this, and not installed."""


class TokenIdError(NoteError):
    """A token id lies outside the vocabulary."""


class CacheError(NoteError):
    """A cache was asked for rows it does not hold, or a request is unknown or already exists."""
