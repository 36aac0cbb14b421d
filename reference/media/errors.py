"""Named refusals of the preprocessing."""

from reference.errors import NoteError


class MediaError(NoteError):
    """A file, an array or an option cannot become model input."""


class ImageError(MediaError):
    """An image is unreadable, of an impossible size, or not an image."""


class VideoError(MediaError):
    """A video is unreadable, has impossible dimensions, or cannot be planned as asked."""
