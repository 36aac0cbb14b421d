"""Runs the text model and its draft layer over many requests at once: chunked prefill, decode, draft and verify.

`step([StepItem(request, token_ids, kind), …])` appends tokens to requests and returns logits of the new rows, as the
reference's session does; `draft` and `drafts` drive the draft layer behind them; `truncate` takes tokens back. What a
step may take is bounded by `EngineOptions.limits`; longer items are cut into several steps.

`decode` and `decode_with_drafts` go on with requests by themselves, their tokens on the device from step to step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral

import torch
from torch import Tensor

from optimized.cache import CachePools
from optimized.device import Backend, choose
from optimized.draft_rounds import DraftedText, Verification, Writing
from optimized.drafting import Drafting, Drafts, RequestState, draft_shape
from optimized.draws import choose_in_nucleus, plan_draws
from optimized.errors import PlanError
from optimized.given_rows import GivenRows
from optimized.graphs import MOST_RECORDINGS, Shape, Turns, one_shape, shape_of
from optimized.hidden_rows import HiddenRows
from optimized.items import DecodeItem, check_decode
from optimized.plan_pages import PagePlanner
from optimized.plan_spans import StepLimits
from optimized.planning import check_growth, plan_step, split_step
from optimized.runner import Runner, StepOutput
from optimized.step import PlanItem, row_spans
from optimized.text import Text
from optimized.weights import PackedText, pack_text
from reference.config import TextConfig
from reference.errors import CacheError
from reference.layers.indexer import RopeLayout
from reference.numerics import Numerics
from reference.probe import is_observed, probe, rows, scope
from reference.sampling import GREEDY, Sampling
from reference.session import DraftItem, StepItem, check_ids, check_step

# T new tokens  W vocabulary  D model  B requests  N chosen tokens  X drafts of a round  R rows of a buffer

DEFAULT_LIMITS = StepLimits(max_tokens=8192, expanded_bytes=2**31, score_bytes=2**29)


@dataclass(frozen=True)
class EngineOptions:
    """`pages` pages of `page_size` tokens for all requests together; `requests` may be open at a time.

    `max_draft_tokens`: the deepest draft, and how many tokens can always be taken back; 0 for no drafts, else a model
    with a draft layer keeps the hidden states of what a request has appended since it last drafted.
    `max_length` bounds a request in tokens; None: only the pages do. `limits` bounds what runs at once.
    `graphs`: steps that run from the caches alone (decode, verification, drafts) are padded to a few shapes, each
    recorded when it first occurs and replayed from then on; prefill runs eagerly, apart from them. The `recordings`
    that ran last are kept.
    `batch_invariant`: a request's bytes are the same alone and in company. All steps that run from the caches take one
    shape, the largest, and every prompt and draft history runs by itself: slower by what that pads and does not share.
    `packages`: optional ones that work here do what they are faster at (`optimized.packages`): on a GPU, where no
    backend is asked for, and not with `batch_invariant`. False refuses them.
    `poison` and `disjoint_numbers` are for tests: see `CachePools`.
    """

    pages: int = 1024
    page_size: int = 64
    requests: int = 16
    max_draft_tokens: int = 4
    max_length: int | None = None
    limits: StepLimits = DEFAULT_LIMITS
    graphs: bool = False
    batch_invariant: bool = False
    packages: bool = True
    recordings: int = MOST_RECORDINGS
    poison: bool = False
    disjoint_numbers: bool = False


class Engine:
    """One model on one device and its requests.

    Raises, everywhere before anything has changed: TokenIdError for an id outside the vocabulary, PlanError for what
    the limits cannot hold, PoolError for a lack of pages or rings, CacheError for what the contract forbids.

    A run that breaks off (no memory, a listener that replaces what it may not) is taken back. Where it has overwritten
    rows of a ring that are needed for that, the request is freed, or, if it was drafting, cannot draft any more.
    Calls may come from several streams: each waits on the device for the call before it.
    """

    def __init__(self, text: Text, options: EngineOptions):
        self.text, self.options, self.config = text, options, text.config
        self.pools = text.pools
        self.runner = Runner(text, options.graphs, options.limits.max_tokens, options.recordings)
        self._turns = Turns(self.pools.device)
        self._most_decoded = 1 + self.pools.max_draft_tokens
        self._keeps_hidden = bool(self.config.num_nextn_predict_layers and options.max_draft_tokens)
        self._shape: Shape | None = None
        self._draft_shape: Shape | None = None
        if options.batch_invariant:
            room = options.pages * options.page_size
            tokens = min(room, options.max_length or room)
            PagePlanner(self.pools, options.limits, tokens).check_scores("any", tokens)
            self._shape = one_shape(options.requests, self._most_decoded, options.limits.max_tokens, tokens)
            self._draft_shape = draft_shape(self.pools, options.limits) if self._keeps_hidden else None
        self._requests: dict[str, RequestState] = {}

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

        Raises: NotSupportedError for a config, numerics, layout, device or backend that this code does not implement;
        what `from_packed` raises.
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

        Raises: NotSupportedError for a backend that cannot run here, PoolError for pools that hold nothing; with
        `graphs`, PlanError for `recordings` below 1; with `batch_invariant`, NotSupportedError or PlanError if the one
        shape of all steps exceeds the limits.
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
        ops = choose(device, backend, packages=options.packages and not options.batch_invariant)
        return cls(Text(config, weights, pools, ops), options)

    @torch.no_grad()
    def step(self, items: Sequence[StepItem], last_only: bool = False) -> dict[str, Tensor]:
        """Append each item's tokens to its request. Returns logits [T, W] of its new rows, or [1, W] of the last one.

        New requests are opened. Raises: see the class; CacheError for two items of one request, one without tokens, or
        embeddings of another shape or dtype.
        """
        check_step(items, self.config.vocab_size)
        given = GivenRows(items, self.text.weights.embeddings_WD)
        lengths = {item.request: self.length(item.request) for item in items if item.request in self._requests}
        logits: dict[str, list[Tensor]] = {item.request: [] for item in items}
        with self._turns.next():
            try:
                for request in logits:
                    if request not in lengths:
                        self.pools.open(request)
                        self._requests[request] = RequestState()
                for part in self._parts([given.planned(item) for item in items]):
                    for request, logits_TW in self._run(part, last_only, given).items():
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

    @torch.no_grad()
    def decode(self, items: Sequence[DecodeItem], count: int) -> dict[str, list[int]]:
        """Step `count` times, each request with its next token, then with the token just chosen for it.

        Returns the `count` tokens chosen for each request, the last of which is not stepped. Tokens pass from step to
        step on the device: the host plans ahead and waits once, at the end; with a nucleus (top_p below 1) in each
        step.
        Raises: see the class; CacheError for a request that is not there or given twice, or a count below 1.
        """
        items = tuple(items)
        count = check_decode(items, count, self.config.vocab_size)
        lengths = {item.request: self.length(item.request) for item in items}
        check_growth(dict.fromkeys(lengths, count), self.pools, self.options.limits)
        with self._turns.next():
            try:
                chosen = []
                for number in range(count):
                    sources = [-1] * len(items) if number == 0 else list(range(len(items)))
                    positions = [length + number + 1 for length in lengths.values()]
                    samplings = [item.sampling for item in items]
                    planned = [PlanItem(item.request, (item.next_token,), "decode") for item in items]
                    output = self._forward(planned, (samplings, positions, sources))
                    choose_in_nucleus(output.logits_TW, samplings, positions, self.runner.chosen_R)
                    chosen.append(self.runner.chosen_R[: len(items)].clone())
                    self._keep_hidden({item.request: slice(row, row + 1) for row, item in enumerate(items)}, output)
                    if is_observed():
                        self._show_cache(planned)
                tokens_BN = torch.stack(chosen, dim=1).tolist()
            except BaseException:
                for request, length in lengths.items():
                    self._take_back(request, length)
                raise
        found = {item.request: tokens for item, tokens in zip(items, tokens_BN, strict=True)}
        for item in items:
            self._requests[item.request].token_ids += [item.next_token, *found[item.request][:-1]]
        return found

    @torch.no_grad()
    def decode_with_drafts(self, items: Sequence[DecodeItem], count: int, depth: int) -> dict[str, DraftedText]:
        """The text of `decode`, in rounds of up to `depth` drafts, which are verified in one step: see `draft_rounds`.

        Verified rows are rounded otherwise than decoded ones, so at a near tie another token may be chosen. The host
        waits once a round; with a nucleus in each step.
        Raises: as `decode`; CacheError as `drafts`, with a count of 1 too; PlanError for a round beyond `max_tokens`.
        """
        items = tuple(items)
        count = check_decode(items, count, self.config.vocab_size)
        for item in items:
            self._check_draft(DraftItem(item.request, item.next_token, depth))
        depth = int(depth)
        lengths = {item.request: self.length(item.request) for item in items}
        check_growth(dict.fromkeys(lengths, count), self.pools, self.options.limits)
        writing = [Writing(item.request, item.sampling, item.next_token, count) for item in items]
        rows, most = sum(1 + one.depth(depth) for one in writing), self.options.limits.max_tokens
        if rows > most:
            raise PlanError(
                f"a round of {len(items)} requests verifies {rows} tokens, and max_tokens = {most}; raise it"
            )
        with self._turns.next():
            try:
                while live := [one for one in writing if one.left]:
                    self._draft_and_verify(live, depth)
            except BaseException:
                for request, length in lengths.items():
                    self._take_back(request, length)
                raise
        return {one.request: one.text for one in writing}

    def _draft_and_verify(self, live: Sequence[Writing], most: int) -> None:
        depths, chosen_R = [one.depth(most) for one in live], self.runner.chosen_R
        asked = [
            DraftItem(one.request, one.newest, depth, (), one.sampling)
            for one, depth in zip(live, depths, strict=True)
            if depth
        ]
        drafted_X = torch.cat([drafts.tokens_S for drafts in self._drafted(asked).values()] or [chosen_R[:0]])
        # The next step is fed from here, and writes its own choices here.
        chosen_R[: len(drafted_X)].copy_(drafted_X)
        verified = Verification.of(live, [self.length(one.request) for one in live], depths)
        output = self._forward(verified.items, (verified.samplings, verified.positions, verified.sources))
        choose_in_nucleus(output.logits_TW, verified.samplings, verified.positions, chosen_R)
        self._keep_hidden(row_spans(verified.items), output)
        if is_observed():
            self._show_cache(verified.items)
        tokens = torch.cat((drafted_X, chosen_R[: len(verified.sources)])).tolist()
        drafted, chosen = tokens[: len(drafted_X)], tokens[len(drafted_X) :]
        for one, (drafts, choices) in zip(live, verified.split(drafted, chosen), strict=True):
            state = self._requests[one.request]
            length = len(state.token_ids) + 1
            state.token_ids += [one.newest, *drafts]
            self.truncate(one.request, length + one.take(drafts, choices))

    def adopt(self, request: str, token_ids: Sequence[int]) -> None:
        """Go on with a request whose rows the pools hold already, imported or written otherwise.

        It cannot draft, for the hidden states of these tokens are not there. Raises: CacheError unless the pools hold
        exactly these tokens, PoolError if they have no such request.
        """
        slots = self.pools.slots(request)
        if request in self._requests or slots.length != len(token_ids):
            raise CacheError(
                f"cannot adopt {request!r}: the pools hold {slots.length} of its tokens, {len(token_ids)} are given"
                + (", and the engine has a request of that name" if request in self._requests else "")
            )
        check_ids(request, token_ids, self.config.vocab_size)
        self._requests[request] = RequestState(list(token_ids), HiddenRows(slots.length))

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
        a request given twice, or one whose draft layer lacks hidden states.
        """
        names = [item.request for item in items]
        if len(set(names)) < len(names):
            raise CacheError(f"drafts takes each request once; found {names}")
        for item in items:
            self._check_draft(item)
        with self._turns.next():
            return {request: found.logits_SW for request, found in self._drafted(items).items()}

    def _drafted(self, items: Sequence[DraftItem]) -> dict[str, Drafts]:
        if not items:
            return {}
        kept = {item.request: self.pools.slots(item.request).draft_length for item in items}
        try:
            drafts = Drafting(items, self._requests, self.runner, self.options.limits, self._draft_shape).run()
            # The row of the newest token was run with `next_token`, which is not committed; it runs again then.
            kept = {request: self.length(request) - 1 for request in drafts}
        finally:
            for request, rows_ in kept.items():
                self._keep_draft_rows(request, rows_)
        return drafts

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
        with self._turns.next():
            self.pools.fork(request, new)
        self._requests[new] = RequestState(list(state.token_ids), state.hidden)

    def free(self, request: str) -> None:
        """Forget a request; its pages and rings serve others. Raises: CacheError if it is not there."""
        self._request(request)
        self.pools.free(request)
        del self._requests[request]

    @property
    def requests(self) -> tuple[str, ...]:
        return tuple(self._requests)

    def length(self, request: str) -> int:
        return len(self._request(request).token_ids)

    def tokens(self, request: str) -> tuple[int, ...]:
        return tuple(self._request(request).token_ids)

    def _parts(self, items: Sequence[PlanItem]) -> list[Sequence[PlanItem]]:
        """Consecutive steps. With graphs, what decodes and what prefills are steps of their own.

        Batch-invariant, each prompt is also cut as if it were alone. All is refused before anything runs.
        """
        limits = self.options.limits
        parts: list[Sequence[PlanItem]] = [*split_step(items, self.pools, limits)]
        if not self.options.graphs and self._shape is None:
            return parts
        apart: list[Sequence[PlanItem]] = []
        for part in parts:
            decoding = [item for item in part if len(item.token_ids) <= self._most_decoded]
            prefilling = [item for item in part if len(item.token_ids) > self._most_decoded]
            apart += [some for some in (decoding, prefilling) if some]
        if self._shape is None:
            return apart
        decoding = [item for item in items if len(item.token_ids) <= self._most_decoded]
        alone = [[item] for item in items if len(item.token_ids) > self._most_decoded]
        return [part for group in (decoding, *alone) if group for part in split_step(group, self.pools, limits)]

    def _run(self, items: Sequence[PlanItem], last_only: bool, given: GivenRows) -> dict[str, Tensor]:
        # The order of a plan's rows: what decodes, then what prefills.
        items = sorted(items, key=lambda item: len(item.token_ids) > self._most_decoded)
        output = self._forward(items, last_only=last_only, embeddings_TD=given.next(items))
        spans = row_spans(items)
        self._keep_hidden(spans, output)
        for item in items:
            self._requests[item.request].token_ids += item.token_ids
        if len(output.logits_TW) == len(items) and last_only:
            return {item.request: output.logits_TW[b : b + 1] for b, item in enumerate(items)}
        return {request: output.logits_TW[span] for request, span in spans.items()}

    def _forward(
        self,
        items: Sequence[PlanItem],
        draws: tuple[Sequence[Sampling], Sequence[int], Sequence[int]] | None = None,
        last_only: bool = False,
        embeddings_TD: Tensor | None = None,
    ) -> StepOutput:
        """One step of items in row order, from a recording where there is one for their shape; nothing is padded.

        With `embeddings_TD` in place of the table's rows it runs eagerly.
        """
        counts, limits = [len(item.token_ids) for item in items], self.options.limits
        shape, is_recorded = None, self.options.graphs and embeddings_TD is None
        if max(counts) <= self._most_decoded:
            shape = self._shape or (shape_of(counts, limits.max_tokens) if is_recorded else None)
        if shape is None:
            plan = plan_step(items, self.pools, limits)
            plan = dataclasses.replace(plan, draws=draws and plan_draws(*draws))
            return self.runner.step(plan, last_only, embeddings_TD)
        plan = plan_step(items, self.pools, limits, shape.rows, shape.requests, shape.tokens)
        plan = dataclasses.replace(plan, draws=draws and plan_draws(*draws, shape.rows, shape.rows))
        output = self.runner.recorded_step(plan) if is_recorded else self.runner.step(plan, False, embeddings_TD)
        rows = sum(counts)
        normed_TD, logits_TW = output.normed_TD[:rows], output.logits_TW[:rows]
        if last_only and rows > len(items):
            logits_TW = torch.stack([logits_TW[end - 1] for end in accumulate(counts)])
        elif draws is None:
            logits_TW = logits_TW.clone()
        return StepOutput(normed_TD.clone() if self._keeps_hidden else normed_TD, logits_TW, output.chosen_T)

    def _keep_hidden(self, spans: Mapping[str, slice], output: StepOutput) -> None:
        if self._keeps_hidden:
            for request, span in spans.items():
                state = self._requests[request]
                state.hidden = state.hidden.appended(output.normed_TD[span])
                self._forget_hidden(request)

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
            self.pools.truncate_draft(request, min(committed - 1, self.pools.slots(request).draft_length))
            self._requests[request].hidden = HiddenRows(committed)
        self._forget_hidden(request)

    def _forget_hidden(self, request: str) -> None:
        """Keep what the draft layer still needs, also after as many tokens are taken back as can be."""
        state = self._requests[request]
        state.hidden = state.hidden.between(self.pools.first_draft_row(request), state.hidden.stop)

    def _show_cache(self, items: Sequence[StepItem] | Sequence[PlanItem]) -> None:
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

    def _request(self, request: str) -> RequestState:
        if request not in self._requests:
            raise CacheError(f"no request {request!r}; there are {sorted(self._requests)}")
        return self._requests[request]

    def _check_draft(self, item: DraftItem) -> None:
        length, most = self.length(item.request), self.options.max_draft_tokens
        is_depth = isinstance(item.depth, Integral) and 1 <= item.depth <= most
        if not self._keeps_hidden or not length or not is_depth:
            raise CacheError(
                f"cannot draft {item.depth!r} tokens for {item.request!r} with {length} tokens: needs a model with a "
                f"draft layer, a token to start from, and a depth of 1 to max_draft_tokens = {most}"
            )
        first, hidden = self.pools.slots(item.request).draft_length, self._requests[item.request].hidden
        if hidden.first > first:
            raise CacheError(
                f"cannot draft for {item.request!r}: its draft layer goes on at row {first} and has hidden states from "
                f"row {hidden.first} on; a request that was adopted, or whose draft broke off, is to be prefilled anew"
            )
        check_ids(item.request, (item.next_token, *item.forced), self.config.vocab_size)
