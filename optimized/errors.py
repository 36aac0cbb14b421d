"""What the production code refuses, by name."""

from reference.errors import NoteError


class NotSupportedError(NoteError):
    """A config, a `Numerics` or a device that this code does not implement; the reference may."""


class KernelInputError(NoteError):
    """A tensor of the wrong shape, dtype, device or stride, found before a kernel is launched."""


class PlanError(NoteError):
    """A step that cannot be planned: it does not fit the workspace, or asks for what no layer can do."""


class PoolError(NoteError):
    """A cache pool without room, or a request used after it was freed."""
