"""Refuses a foreign package of one of our names, before anything is imported from it.

The names `reference`, `optimized` and `parity` are common words: a folder of that name in the working directory wins
over the installed package when Python is started with `-m` or from a script beside it.
"""

from importlib.util import find_spec
from pathlib import Path

import parity
from parity.errors import ParityError


class ShadowedPackageError(ParityError):
    """`reference` or `optimized` would be imported from somewhere else than this distribution.

    It cannot be a class of either of them: where it is raised, theirs cannot be trusted to be ours.
    """


def check_origin(name: str) -> None:
    """Our packages lie side by side. Raises: ShadowedPackageError, with the path that was found."""
    spec = find_spec(name)
    if spec is None:
        raise ShadowedPackageError(f"package {name!r} is not installed; {parity.DISTRIBUTION} brings it")
    where = Path(spec.origin or next(iter(spec.submodule_search_locations or ["unknown"])))
    if where != Path(parity.__file__).parents[1] / name / "__init__.py":
        raise ShadowedPackageError(
            f"package {name!r} would be imported from {where}, which is not part of {parity.DISTRIBUTION}: "
            f"a folder or file of that name shadows it; run from another directory or rename it"
        )
