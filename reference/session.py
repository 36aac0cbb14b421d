"""The protocol through which every implementation is driven: steps over requests.

`step` appends tokens to requests and returns the logits of the new rows; `truncate` takes rejected drafts back;
`fork` and `free` manage requests. Prefill, chunked prefill, decode and draft verification are the same call with
other lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from reference.cache import RequestCache, SlidingCache
from reference.errors import CacheError, TokenIdError
from reference.probe import is_observed, probe, rows, scope
from reference.sampling import GREEDY, Sampling, choose
from reference.text import TextModel

StepKind = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True)
class StepItem:
    """New tokens of one request. They take the next positions of the request, which starts to exist with its first.

    `embeddings_TD`, of a prompt with media, stand for what the embedding table has for the ids; these are then only
    read by the draft layer, and may lie beyond the vocabulary.
    """

    request: str
    token_ids: tuple[int, ...]
    kind: StepKind
    embeddings_TD: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class DraftItem:
    """Draft `depth` tokens behind `next_token`, the chosen but not yet stepped token of a request.

    A draft is what `sampling` chooses from the draft step before it, or taken from `forced` (teacher forcing).
    """

    request: str
    next_token: int
    depth: int
    forced: tuple[int, ...] = ()
    sampling: Sampling = GREEDY


@dataclass
class _Request:
    cache: RequestCache
    token_ids: list[int]
    # Hidden states after the final norm, one row a token: what the draft layer reads. Kept only if there is one.
    hidden_TD: Tensor | None


class Session:
    """Runs the reference over many requests, one after the other.

    `max_draft_tokens` is how deep a draft may go and how many tokens `truncate` can take back. With `max_length` a
    request holds at most that many tokens.
    """

    def __init__(self, model: TextModel, max_draft_tokens: int = 4, max_length: int | None = None):
        self.model = model
        self.max_draft_tokens = max_draft_tokens
        self.max_length = max_length
        self._requests: dict[str, _Request] = {}

    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict[str, Tensor]:
        """Append each item's tokens to its request. Returns logits [T, vocab] of its new rows, or [1, vocab].

        `last_only` asks for the last row alone.

        Raises: CacheError for two items of one request, a request that grows past `max_length` or embeddings of another
        shape or dtype, TokenIdError for an id outside the vocabulary; both before anything has run.
        """
        self._check(items)
        logits = {item.request: self._run(item) for item in items}
        return {request: logits_TW[-1:] for request, logits_TW in logits.items()} if last_only else logits

    def drafts(self, items: Sequence[DraftItem]) -> dict[str, Tensor]:
        """`draft` for several requests."""
        return {
            item.request: self.draft(item.request, item.next_token, item.depth, item.forced, item.sampling)
            for item in items
        }

    def draft(
        self, request: str, next_token: int, depth: int, forced: Sequence[int] = (), sampling: Sampling = GREEDY
    ) -> Tensor:
        """Draft `depth` tokens behind `next_token`, the sampled but not yet stepped token of the request.

        First every row that the draft layer has not seen runs with the target's hidden states and the tokens shifted by
        one, then the layer is driven on its own output. A draft is what `sampling` chooses from the step before it, or
        taken from `forced` (teacher forcing). The draft cache is left with rows of committed tokens only.
        Returns logits [depth, vocab]; row s is for the token s + 1 places behind `next_token`.
        """
        state = self.request(request)
        if state.hidden_TD is None or not state.token_ids or not 1 <= depth <= self.max_draft_tokens:
            raise CacheError(
                f"cannot draft {depth} tokens for {request!r} with {len(state.token_ids)} tokens: needs a model with a "
                f"draft layer, a token to start from, and a depth of 1 to max_draft_tokens = {self.max_draft_tokens}"
            )
        check_ids(request, (next_token, *forced), self.model.config.vocab_size)
        cache, device = state.cache, state.hidden_TD.device
        committed = len(state.token_ids)
        first = cache.draft.length
        # Media placeholders beyond the vocabulary: no table has a row for them, the draft layer reads its last.
        last = self.model.config.vocab_size - 1
        next_ids = [*(min(token_id, last) for token_id in state.token_ids[first + 1 :]), next_token]
        next_ids_T = torch.tensor(next_ids, device=device)
        hidden_TD = state.hidden_TD[first:]
        logits = []
        for step in range(depth):
            positions_T = cache.draft.next_positions(len(next_ids_T), device)
            with rows(request, positions_T, "draft"):
                hidden_TD, logits_TW = self.model.draft_step(step, next_ids_T, hidden_TD, cache)
            hidden_TD = hidden_TD[-1:]
            logits.append(logits_TW[-1])
            next_id = (
                forced[step] if step < len(forced) else choose(logits_TW[-1:], [committed + 1 + step], sampling)[0]
            )
            next_ids_T = torch.tensor([next_id], device=device)
        # The row of the newest token was run with `next_token`, which is not committed; it runs again then.
        cache.draft.truncate(committed - 1)
        return torch.stack(logits)

    def truncate(self, request: str, length: int) -> None:
        """Keep the first `length` tokens.

        Always possible down to `max_draft_tokens` below the longest length the request has had: further back a ring may
        have overwritten what the next token sees. Raises: CacheError then, with the request as it was.
        """
        state = self.request(request)
        if not 0 <= length <= len(state.token_ids):
            raise CacheError(
                f"request {request!r} has {len(state.token_ids)} tokens and cannot be truncated to {length}"
            )
        state.cache.truncate(length)
        del state.token_ids[length:]
        if state.hidden_TD is not None:
            state.hidden_TD = state.hidden_TD[:length]

    def fork(self, request: str, new: str) -> None:
        """Start `new` as a copy of `request`; they share storage until they differ."""
        state = self.request(request)
        if new in self._requests:
            raise CacheError(f"cannot fork to {new!r}: a request of that name exists")
        self._requests[new] = _Request(state.cache.fork(), list(state.token_ids), state.hidden_TD)

    def free(self, request: str) -> None:
        self.request(request)
        del self._requests[request]

    def request(self, request: str) -> _Request:
        if request not in self._requests:
            raise CacheError(f"no request {request!r}; there are {sorted(self._requests)}")
        return self._requests[request]

    def length(self, request: str) -> int:
        return len(self.request(request).token_ids)

    def _check(self, items: Sequence[StepItem]) -> None:
        check_step(items, self.model.config.vocab_size)
        for item in items:
            length = len(item.token_ids) + (self.length(item.request) if item.request in self._requests else 0)
            if self.max_length is not None and length > self.max_length:
                raise CacheError(
                    f"request {item.request!r} would hold {length} tokens; max_length is {self.max_length}"
                )
            if item.embeddings_TD is not None:
                self._check_embeddings(item, item.embeddings_TD)

    def _check_embeddings(self, item: StepItem, embeddings_TD: Tensor) -> None:
        dtype = self.model.lm_head.weight.dtype
        shape = (len(item.token_ids), self.model.config.hidden_size)
        if tuple(embeddings_TD.shape) != shape or embeddings_TD.dtype != dtype:
            raise CacheError(
                f"request {item.request!r}: embeddings must be {shape} in {dtype}, found {tuple(embeddings_TD.shape)} "
                f"in {embeddings_TD.dtype}"
            )
        if min(item.token_ids) < 0:
            raise TokenIdError(f"request {item.request!r}: token id {min(item.token_ids)} is negative")

    def _run(self, item: StepItem) -> Tensor:
        model = self.model
        if item.request not in self._requests:
            cache = model.new_cache(self.max_draft_tokens, self.max_length)
            self._requests[item.request] = _Request(cache, [], None)
        state = self._requests[item.request]
        device = model.lm_head.weight.device
        embeddings_TD = item.embeddings_TD
        if embeddings_TD is None:
            embeddings_TD = model.embed(torch.tensor(item.token_ids, device=device))
        positions_T = state.cache.layers[0].next_positions(len(embeddings_TD), device)
        with rows(item.request, positions_T, item.kind):
            normed_TD = model.hidden(embeddings_TD, state.cache)
            logits_TW = model.logits(normed_TD)
        if is_observed():
            _observe_cache(item, positions_T, state.cache)
        state.token_ids += item.token_ids
        if model.config.num_nextn_predict_layers:
            state.hidden_TD = normed_TD if state.hidden_TD is None else torch.cat((state.hidden_TD, normed_TD))
        return logits_TW


def _observe_cache(item: StepItem, positions_T: Tensor, cache: RequestCache) -> None:
    """Show the rows of this step as the cache gives them back; a ring has kept only the last of a long chunk."""
    for index, layer in enumerate(cache.layers):
        oldest = layer.oldest if isinstance(layer, SlidingCache) else 0
        kept_T = positions_T[positions_T >= oldest]
        with rows(item.request, kept_T, item.kind), scope(f"cache.{index}"):
            for name, stored in layer.rows(kept_T).items():
                probe(name, stored)


def check_step(items: Sequence[StepItem], vocab_size: int) -> None:
    """Raises: CacheError for an item without tokens or two of one request, TokenIdError for ids without embeddings."""
    seen: set[str] = set()
    for item in items:
        if item.request in seen or not item.token_ids:
            raise CacheError(
                f"request {item.request!r}: a step takes one item with at least one token for each request"
            )
        seen.add(item.request)
        if item.embeddings_TD is None:
            check_ids(item.request, item.token_ids, vocab_size)


def check_ids(request: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises: TokenIdError for an id that is no integer or outside the vocabulary."""
    for token_id in token_ids:
        # A number with a fraction would be cut off, or fail far from here.
        if not isinstance(token_id, Integral) or not 0 <= token_id < vocab_size:
            raise TokenIdError(
                f"request {request!r}: token id {token_id!r} is outside the vocabulary (0 to {vocab_size - 1})"
            )
