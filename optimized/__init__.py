"""Dots3 NOTE as production code. Nothing here yet."""

import reference

DISTRIBUTION = "note-parity"


class ShadowedPackageError(ImportError):
    """`reference` was imported from somewhere else than this distribution.

    It cannot be a class of `reference.errors`, which is what is missing then, nor of `parity`, which stands above.
    """


if getattr(reference, "DISTRIBUTION", None) != DISTRIBUTION:
    raise ShadowedPackageError(
        f"package 'reference' was imported from {reference.__file__ or list(reference.__path__)}, which is not part of "
        f"{DISTRIBUTION}: a folder or file of that name shadows it; run from another directory or rename it"
    )
