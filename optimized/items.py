"""What the engine is asked for, beside the items of `reference.session`, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from reference.errors import CacheError, TokenIdError
from reference.sampling import GREEDY, Sampling
from reference.session import StepItem


@dataclass(frozen=True)
class DecodeItem:
    """Go on with a request behind `next_token`, its chosen but not yet stepped token."""

    request: str
    next_token: int
    sampling: Sampling = GREEDY


def check_step(items: Sequence[StepItem], vocab_size: int) -> None:
    """Raises: CacheError, TokenIdError."""
    seen: set[str] = set()
    for item in items:
        if item.request in seen or not item.token_ids:
            raise CacheError(
                f"request {item.request!r}: a step takes one item with at least one token for each request"
            )
        seen.add(item.request)
        if item.embeddings_TD is None:
            check_ids(item.request, item.token_ids, vocab_size)


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


def check_ids(request: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises: TokenIdError."""
    for token_id in token_ids:
        # A number with a fraction would be cut off, or fail far from here.
        if not isinstance(token_id, Integral) or not 0 <= token_id < vocab_size:
            raise TokenIdError(
                f"request {request!r}: token id {token_id!r} is outside the vocabulary (0 to {vocab_size - 1})"
            )
