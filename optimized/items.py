"""What the engine is asked for beside the items of `reference.session`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from reference.errors import CacheError
from reference.sampling import GREEDY, Sampling
from reference.session import check_ids


@dataclass(frozen=True)
class DecodeItem:
    """Go on with a request behind `next_token`, its chosen but not yet stepped token."""

    request: str
    next_token: int
    sampling: Sampling = GREEDY


def check_decode(items: Sequence[DecodeItem], count: int, vocab_size: int) -> int:
    """The count as a plain integer. Raises: CacheError, TokenIdError."""
    names = [item.request for item in items]
    if not isinstance(count, Integral) or count < 1 or not names or len(set(names)) < len(names):
        raise CacheError(
            f"decoding takes a count of at least 1 and at least one item, a request once; found {count!r} and {names}"
        )
    for item in items:
        check_ids(item.request, (item.next_token,), vocab_size)
    return int(count)
