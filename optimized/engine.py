"""Runs the text model and its draft layer over many requests at once: chunked prefill, decode, draft and verify.

`step([StepItem(request, token_ids, kind), …])` appends tokens to requests and returns logits of the new rows, as the
reference's session does; `draft` and `drafts` drive the draft layer behind them; `truncate` takes tokens back. What a
step may take is bounded by `EngineOptions.limits`; longer items are cut into several steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimized.cache import CachePools
from optimized.device import Backend, choose
from optimized.errors import NotSupportedError
from optimized.hidden_rows import HiddenRows
from optimized.mtp import draft_step
from optimized.observe import BatchObserver, Segment
from optimized.plan_spans import StepLimits
from optimized.planning import plan_draft, plan_step, split_draft, split_step
from optimized.step import DeviceStep, PlanItem, Uploader
from optimized.text import Text
from optimized.weights import PackedText, pack_text
from reference.config import TextConfig
from reference.errors import CacheError, TokenIdError
from reference.layers.indexer import RopeLayout
from reference.numerics import Numerics
from reference.probe import is_observed, probe, rows, scope
from reference.sampling import GREEDY, Sampling
from reference.sampling import choose as choose_token
from reference.session import DraftItem, StepItem

# T new tokens  W vocabulary  D model  B requests

DEFAULT_LIMITS = StepLimits(max_tokens=8192, expanded_bytes=2**31, score_bytes=2**29)


@dataclass(frozen=True)
class EngineOptions:
    """`pages` pages of `page_size` tokens for all requests together; `requests` may be open at a time.

    `max_draft_tokens`: the deepest draft, and how many tokens can always be taken back; 0 for no drafts, else a model
    with a draft layer keeps the hidden states of what a request has appended since it last drafted.
    `max_length` bounds a request in tokens; None: only the pages do. `limits` bounds what runs at once.
    `poison` and `disjoint_numbers` are for tests: see `CachePools`.
    """

    pages: int = 1024
    page_size: int = 64
    requests: int = 16
    max_draft_tokens: int = 4
    max_length: int | None = None
    limits: StepLimits = DEFAULT_LIMITS
    poison: bool = False
    disjoint_numbers: bool = False


@dataclass
class _Request:
    token_ids: list[int] = field(default_factory=list)
    hidden: HiddenRows = field(default_factory=HiddenRows)


class Engine:
    """One model on one device and its requests.

    Raises, everywhere before anything has changed: TokenIdError for an id outside the vocabulary, PlanError for what
    the limits cannot hold, PoolError for a lack of pages or rings, CacheError for what the contract forbids.

    A run that breaks off (no memory, a listener that replaces what it may not) is taken back. Where it has overwritten
    rows of a ring that are needed for that, the request is freed, or, if it was drafting, cannot draft any more.
    """

    def __init__(self, text: Text, options: EngineOptions):
        self.text, self.options, self.config = text, options, text.config
        self.pools = text.pools
        self._uploader = Uploader(self.pools.device)
        self._requests: dict[str, _Request] = {}
        self._keeps_hidden = bool(self.config.num_nextn_predict_layers and options.max_draft_tokens)

    @classmethod
    def from_state(
        cls,
        config: TextConfig,
        state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        backend: Backend | None = None,
        options: EngineOptions | None = None,
        numerics: Numerics | None = None,
        indexer_rope_layout: RopeLayout = "leading",
    ) -> Engine:
        """Pack the reference's state dict (or its tensors one by one; none is cast) and make pools.

        Raises: NotSupportedError for a config, numerics, layout, device or backend that this code does not implement.
        """
        weights = pack_text(state, config, device, dtype, numerics, indexer_rope_layout)
        return cls.from_packed(config, weights, dtype, device, backend, options)

    @classmethod
    def from_packed(
        cls,
        config: TextConfig,
        weights: PackedText,
        dtype: torch.dtype,
        device: torch.device | str,
        backend: Backend | None = None,
        options: EngineOptions | None = None,
    ) -> Engine:
        """Make pools beside weights that are packed already, in their dtype and on their device.

        Raises: NotSupportedError for a backend that cannot run here, PoolError for pools that hold nothing.
        """
        options = options or EngineOptions()
        pools = CachePools(
            config,
            pages=options.pages,
            page_size=options.page_size,
            rings=options.requests,
            max_draft_tokens=options.max_draft_tokens,
            dtype=dtype,
            device=device,
            poison=options.poison,
            max_length=options.max_length,
            disjoint_numbers=options.disjoint_numbers,
        )
        return cls(Text(config, weights, pools, choose(device, backend)), options)

    @torch.no_grad()
    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict[str, Tensor]:
        """Append each item's tokens to its request. Returns logits [T, W] of its new rows, or [1, W] of the last one.

        New requests are opened. Raises: see the class; CacheError for two items of one request or one without tokens.
        """
        self._check(items)
        lengths = {item.request: self.length(item.request) for item in items if item.request in self._requests}
        logits: dict[str, list[Tensor]] = {item.request: [] for item in items}
        try:
            for request in logits:
                if request not in lengths:
                    self.pools.open(request)
                    self._requests[request] = _Request()
            planned = [PlanItem(item.request, tuple(item.token_ids), item.kind) for item in items]
            for part in split_step(planned, self.pools, self.options.limits):
                for request, logits_TW in self._run(part, last_only).items():
                    logits[request].append(logits_TW)
            if is_observed():
                self._show_cache(items)
        except BaseException:
            for request in logits:
                self._take_back(request, lengths.get(request))
            raise
        return {
            request: found[-1] if last_only or len(found) == 1 else torch.cat(found)
            for request, found in logits.items()
        }

    def adopt(self, request: str, token_ids: Sequence[int]) -> None:
        """Go on with a request whose rows the pools hold already, imported or written otherwise.

        It cannot draft, for the hidden states of these tokens are not there. Raises: CacheError unless the pools hold
        exactly these tokens.
        """
        slots = self.pools.slots(request)
        if request in self._requests or slots.length != len(token_ids):
            raise CacheError(
                f"cannot adopt {request!r}: the pools hold {slots.length} of its tokens, {len(token_ids)} are given"
                + (", and the engine has a request of that name" if request in self._requests else "")
            )
        self._check_ids(request, token_ids)
        self._requests[request] = _Request(list(token_ids), HiddenRows(slots.length))

    def draft(
        self, request: str, next_token: int, depth: int, forced: Sequence[int] = (), sampling: Sampling = GREEDY
    ) -> Tensor:
        """As `drafts`, for one request."""
        return self.drafts([DraftItem(request, next_token, depth, tuple(forced), sampling)])[request]

    @torch.no_grad()
    def drafts(self, items: Sequence[DraftItem]) -> dict[str, Tensor]:
        """Draft for several requests. Returns logits [depth, W] of each; row s is for the token s + 1 places behind.

        First every row that the draft layer has not seen runs with the target's hidden states and the tokens shifted by
        one, then the layer is driven on its own output. It is left with rows of committed tokens only.
        Raises: see the class; CacheError for a model without a draft layer, another depth than 1 to max_draft_tokens,
        or a request whose draft layer lacks hidden states.
        """
        for item in items:
            self._check_draft(item)
        if not items:
            return {}
        logits: dict[str, list[Tensor]] = {item.request: [] for item in items}
        kept = {request: self.pools.slots(request).draft_length for request in logits}
        try:
            live = list(items)
            hidden_BD, logits_BW, order = self._draft_history(items)
            for number in range(max(item.depth for item in items)):
                if number:
                    hidden_BD, logits_BW, order = self._draft_further(number, live, hidden_BD, logits_BW, order)
                for row, request in enumerate(order):
                    logits[request].append(logits_BW[row])
                live = [item for item in live if item.depth > number + 1]
            # The row of the newest token was run with `next_token`, which is not committed; it runs again then.
            kept = {request: self.length(request) - 1 for request in logits}
        finally:
            for request, rows_ in kept.items():
                self._keep_draft_rows(request, rows_)
        return {request: torch.stack(found) for request, found in logits.items()}

    def truncate(self, request: str, length: int) -> None:
        """Keep the first `length` tokens; always possible down to `max_draft_tokens` below the longest length so far.

        Raises: CacheError where a ring has overwritten what the next token sees, with the request as it was.
        """
        state = self._request(request)
        self.pools.truncate(request, length)
        del state.token_ids[length:]
        state.hidden = state.hidden.between(state.hidden.first, length)

    def fork(self, request: str, new: str) -> None:
        """Start `new` as a copy of `request`; they share pages until they differ.

        Raises: CacheError for a request that is not there or a name that is; PoolError if no ring is free.
        """
        state = self._request(request)
        if new in self._requests:
            raise CacheError(f"cannot fork to {new!r}: a request of that name exists")
        self.pools.fork(request, new)
        self._requests[new] = _Request(list(state.token_ids), state.hidden)

    def free(self, request: str) -> None:
        """Forget a request; its pages and rings serve others. Raises: CacheError if it is not there."""
        self._request(request)
        self.pools.free(request)
        del self._requests[request]

    def length(self, request: str) -> int:
        return len(self._request(request).token_ids)

    def tokens(self, request: str) -> tuple[int, ...]:
        return tuple(self._request(request).token_ids)

    def _run(self, items: Sequence[PlanItem], last_only: bool) -> dict[str, Tensor]:
        step = self._uploader.upload(plan_step(items, self.pools, self.options.limits))
        see = _observer(step)
        normed_TD = self.text.hidden(step, see)
        spans = {item.request: slice(*step.row_starts[b : b + 2]) for b, item in enumerate(step.items)}
        if last_only and not is_observed():
            logits_BW = self.text.logits(normed_TD[_last_rows(step)])
            logits = {request: logits_BW[b : b + 1] for b, request in enumerate(spans)}
        else:
            logits_TW = see("logits", self.text.logits(normed_TD))
            logits = {
                request: logits_TW[span.stop - 1 if last_only else span.start : span.stop]
                for request, span in spans.items()
            }
        for item in step.items:
            state = self._requests[item.request]
            state.token_ids += item.token_ids
            if self._keeps_hidden:
                state.hidden = state.hidden.appended(normed_TD[spans[item.request]])
                self._forget_hidden(item.request)
        return logits

    def _draft_history(self, items: Sequence[DraftItem]) -> tuple[Tensor, Tensor, list[str]]:
        """Draft step 0: the rows that the draft layer has not seen. Returns their last rows and the requests' order."""
        planned = []
        for item in items:
            first, state = self.pools.slots(item.request).draft_length, self._requests[item.request]
            planned.append(PlanItem(item.request, (*state.token_ids[first + 1 :], item.next_token), "decode"))
        found: dict[str, tuple[Tensor, Tensor]] = {}
        parts = split_draft(planned, self.pools, self.options.limits)
        for part in parts:
            firsts = {item.request: self.pools.slots(item.request).draft_length for item in part}
            step = self._uploader.upload(plan_draft(part, self.pools, self.options.limits))
            hidden = [
                self._requests[item.request].hidden.between(
                    firsts[item.request], firsts[item.request] + len(item.token_ids)
                )
                for item in step.items
            ]
            hidden_TD = torch.cat([rows_.joined() for rows_ in hidden])
            last = draft_step(0, self.text, hidden_TD, step, _last_rows(step), _observer(step, "draft"))
            if len(parts) == 1:
                return *last, [item.request for item in step.items]
            # Of a request that is cut, the last part has the row that counts.
            found |= {item.request: (last[0][b], last[1][b]) for b, item in enumerate(step.items)}
        hidden_BD, logits_BW = (torch.stack(tensors) for tensors in zip(*found.values(), strict=True))
        return hidden_BD, logits_BW, list(found)

    def _draft_further(
        self, number: int, live: Sequence[DraftItem], hidden_BD: Tensor, logits_BW: Tensor, order: list[str]
    ) -> tuple[Tensor, Tensor, list[str]]:
        """Drive the layer on its own output, one row a request. Greedy tokens stay on the device."""
        by_request = {item.request: item for item in live}
        chosen_B = self._chosen(number, by_request, logits_BW, order)
        rows_B = [row for row, request in enumerate(order) if request in by_request]
        found = []
        for first in range(0, len(rows_B), self.options.limits.max_tokens):
            part_B = rows_B[first : first + self.options.limits.max_tokens]
            planned = []
            for row in part_B:
                forced = by_request[order[row]].forced[number - 1 : number]
                planned.append(PlanItem(order[row], forced or (0,), "decode"))
            step = self._uploader.upload(plan_draft(planned, self.pools, self.options.limits))
            is_forced = [len(by_request[order[row]].forced) >= number for row in part_B]
            if not any(is_forced):
                step = dataclasses.replace(step, token_ids_T=_rows_of(chosen_B, part_B))
            elif not all(is_forced):
                ids = [
                    step.token_ids_T[i] if is_ else chosen_B[row]
                    for i, (row, is_) in enumerate(zip(part_B, is_forced, strict=True))
                ]
                step = dataclasses.replace(step, token_ids_T=torch.stack(ids))
            see = _observer(step, "draft")
            rows_BD = _rows_of(hidden_BD, part_B)
            found.append(draft_step(number, self.text, rows_BD, step, _last_rows(step), see))
        hidden, logits = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        return hidden, logits, [order[row] for row in rows_B]

    def _chosen(self, number: int, live: Mapping[str, DraftItem], logits_BW: Tensor, order: list[str]) -> Tensor:
        """The token of each row, int64 [B]; draft step `number` places it number places behind the next token."""
        if all(item.sampling.temperature == 0.0 for item in live.values()):
            return logits_BW.argmax(dim=-1)
        chosen = []
        for row, request in enumerate(order):
            sampling = live[request].sampling if request in live else GREEDY
            chosen += choose_token(logits_BW[row : row + 1], [self.length(request) + number], sampling)
        return torch.tensor(chosen, device=logits_BW.device)

    def _take_back(self, request: str, length: int | None) -> None:
        """After a step that broke off: the request as long as before; None: it was not there, and it may not be yet."""
        if request not in self._requests:
            return
        try:
            self.truncate(request, length or 0)
        except CacheError:
            length = None
        if length is None:
            self.free(request)

    def _keep_draft_rows(self, request: str, length: int) -> None:
        try:
            self.pools.truncate_draft(request, length)
        except CacheError:
            # Only after a run that broke off. Without its hidden states the draft layer is refused from here on.
            committed = self.length(request)
            self.pools.truncate_draft(request, committed - 1)
            self._requests[request].hidden = HiddenRows(committed)
        self._forget_hidden(request)

    def _forget_hidden(self, request: str) -> None:
        """Keep what the draft layer still needs, also after as many tokens are taken back as can be."""
        state = self._requests[request]
        state.hidden = state.hidden.between(self.pools.first_draft_row(request), state.hidden.stop)

    def _show_cache(self, items: Sequence[StepItem]) -> None:
        """The items' rows as the caches give them back; a ring has kept only the last of a long item."""
        for item in items:
            slots = self.pools.slots(item.request)
            start = slots.length - len(item.token_ids)
            for layer in range(self.config.num_hidden_layers):
                is_full, C = self.config.is_full(layer), self.config.geometry(layer).kv_lora_rank
                kept = range(start if is_full else max(start, slots.oldest), slots.length)
                positions = torch.tensor(kept, device=self.pools.device)
                with rows(item.request, positions, item.kind), scope(f"cache.{layer}"):
                    latent_SL = self.pools.latent_rows(item.request, layer, kept)
                    probe("kv_latent", latent_SL[:, :C])
                    probe("k_rope", latent_SL[:, C:])
                    if is_full:
                        probe("index_key", self.pools.index_key_rows(item.request, layer, kept))

    def _request(self, request: str) -> _Request:
        if request not in self._requests:
            raise CacheError(f"no request {request!r}; there are {sorted(self._requests)}")
        return self._requests[request]

    def _check(self, items: Sequence[StepItem]) -> None:
        seen: set[str] = set()
        for item in items:
            if item.request in seen or not item.token_ids:
                raise CacheError(
                    f"request {item.request!r}: a step takes one item with at least one token for each request"
                )
            seen.add(item.request)
            if item.embeddings_TD is not None:
                raise NotSupportedError(
                    f"request {item.request!r} brings embeddings of its own, which this engine does not take yet: step "
                    f"token ids alone, or use the reference's session"
                )
            self._check_ids(item.request, item.token_ids)

    def _check_draft(self, item: DraftItem) -> None:
        length, most = self.length(item.request), self.options.max_draft_tokens
        if not self._keeps_hidden or not length or not 1 <= item.depth <= most:
            raise CacheError(
                f"cannot draft {item.depth} tokens for {item.request!r} with {length} tokens: needs a model with a "
                f"draft layer, a token to start from, and a depth of 1 to max_draft_tokens = {most}"
            )
        first, hidden = self.pools.slots(item.request).draft_length, self._requests[item.request].hidden
        if hidden.first > first:
            raise CacheError(
                f"cannot draft for {item.request!r}: its draft layer goes on at row {first} and has hidden states from "
                f"row {hidden.first} on; a request that was adopted, or whose draft broke off, is to be prefilled anew"
            )
        self._check_ids(item.request, (item.next_token, *item.forced))

    def _check_ids(self, request: str, token_ids: Sequence[int]) -> None:
        last = self.config.vocab_size - 1
        for token_id in token_ids:
            if not 0 <= token_id <= last:
                raise TokenIdError(f"request {request!r}: token id {token_id} is outside the vocabulary (0 to {last})")


def _rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, ascending: the tensor itself if they are all. Not by an index, which would wait for the device."""
    return tensor if len(rows) == len(tensor) else torch.stack([tensor[row] for row in rows])


def _last_rows(step: DeviceStep) -> Tensor:
    """The last row of each request, int64 [B], from tensors that are on the device already."""
    return step.query_start_B1[1 : len(step.items) + 1].long() - 1


def _observer(step: DeviceStep, kind: str | None = None) -> BatchObserver:
    if not is_observed():
        return BatchObserver(())
    return BatchObserver(
        [
            Segment(item.request, kind or item.kind, start, stop, step.positions_T[start:stop].long())
            for item, start, stop in zip(step.items, step.row_starts, step.row_starts[1:], strict=False)
        ]
    )
