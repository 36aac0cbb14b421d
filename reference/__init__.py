"""Dots3 NOTE as a definition: pure PyTorch, eager, one idea a file.

Reading order: `config`, `numerics`, `probe`, `layers/norm`, `layers/rope`, `layers/indexer`, `layers/mla`,
`layers/mlp`, `layers/moe`, `cache`, `text`, `session`; then `checkpoint/`.
"""

from types import ModuleType

from reference.errors import ShadowedPackageError

DISTRIBUTION = "note-parity"


def check_origin(package: ModuleType) -> None:
    """Refuse a foreign package that has one of our three import names.

    The names `reference`, `optimized` and `parity` are common words: a folder of that name in the working directory
    wins over the installed package when Python is started with `-m` or from a script beside it.
    Raises: ShadowedPackageError, with the path that was found.
    """
    if getattr(package, "DISTRIBUTION", None) != DISTRIBUTION:
        where = getattr(package, "__file__", None) or next(iter(getattr(package, "__path__", ["unknown"])))
        raise ShadowedPackageError(
            f"package {package.__name__!r} was imported from {where}, which is not part of {DISTRIBUTION}: "
            f"a folder or file of that name shadows it; run from another directory or rename it"
        )
