"""The packages that read image and video files, imported when first needed.

They are the extra `media`; what is computed without a decoder (sizes, budgets, time stamps) needs none of them.
"""

from types import ModuleType

from reference.errors import MissingPackageError


def pillow_image() -> ModuleType:
    """Pillow's `PIL.Image`. Raises: MissingPackageError."""
    try:
        from PIL import Image
    except ImportError as error:
        raise _missing("Pillow", "images and video frames") from error
    return Image


def pyav() -> ModuleType:
    """PyAV, FFmpeg's decoders. Raises: MissingPackageError."""
    try:
        import av
    except ImportError as error:
        raise _missing("PyAV", "video files") from error
    return av


def _missing(package: str, what: str) -> MissingPackageError:
    return MissingPackageError(f"{package} is needed to read {what}: install note-parity[media]")
