"""The indexer: scores of all visible keys, the exact best of them, and both together, in decode and in prefill.

Scores past a row's own position are never read. The fp8 peer is another function than the bfloat16 indexer of the
model: its scores are held to a wider limit, and it shows what half the bytes would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optimized.bench.case import AbsentPeer, Case, Inputs, Peer, Problem, Sizes, checked_rows, triples
from optimized.bench.floors import Work, causal_pairs
from optimized.bench.judge import Triple
from optimized.bench.paged import PagedRows, paged_rows
from optimized.bench.peers import deep_gemm_paged_scores, deep_gemm_scores
from optimized.bench.text_floors import index_scores
from reference.config import TextConfig

# T query tokens  S key positions  I index heads  J index head dim  K selected keys


def indexer_cases(config: TextConfig, sizes: Sizes) -> Iterator[Case]:
    for B in sizes.batches:
        for context in sizes.contexts:
            shape, keys = f"B={B} {context} keys", B * context
            scores, selection = index_scores(config, keys, keys), Work(4 * keys, 0)
            yield _decode("index_scores", shape, B, context, scores, sizes, ("index_scores",))
            if context > config.index_topk:
                yield _decode("select_keys", shape, B, context, selection, sizes, ("select_keys",))
                both = Work(scores.bytes + selection.bytes, scores.flops)
                yield _decode("indexer", shape, B, context, both, sizes, ("index_scores", "select_keys"))
    for T in sizes.prompts:
        pairs = causal_pairs(T)
        work = index_scores(config, pairs, T)
        yield Case("index_scores.prefill", f"T={T}", T, work, "events", _prefill_scores(T, sizes), ("index_scores",))
        if config.index_topk < T:
            yield Case(
                "select_bits.prefill",
                f"T={T}",
                T,
                Work(4 * pairs, 0),
                "events",
                _prefill_selection(T),
                ("select_bits",),
            )


@dataclass(frozen=True)
class _Step:
    """One query for each of B requests, at the last of `context` positions."""

    query_TIJ: Tensor
    weights_TI: Tensor
    keys: PagedRows
    request_T: Tensor
    positions_T: Tensor
    scores_TS: Tensor

    def arguments(self, rows: list[int] | None = None) -> tuple[Any, ...]:
        """Of `index_scores`; of some rows only, with scores of their own."""
        if rows is None:
            pages = (self.keys.pool, self.keys.block_table_BP)
            return (self.query_TIJ, self.weights_TI, *pages, self.request_T, self.positions_T, self.scores_TS)
        few = self.keys.of_requests(rows)
        return (
            self.query_TIJ[rows],
            self.weights_TI[rows],
            few.pool,
            few.block_table_BP,
            torch.arange(len(rows), device=few.pool.device, dtype=torch.int32),
            self.positions_T[rows],
            torch.zeros_like(self.scores_TS[rows]),
        )


def _step(given: Inputs, B: int, context: int, page_size: int) -> _Step:
    I, J = given.config.index_n_heads, given.config.index_head_dim  # noqa: E741 - the legend's letter
    request_T = torch.arange(B, device=given.device, dtype=torch.int32)
    return _Step(
        given.randn(B, I, J),
        given.randn(B, I, scale=I**-0.5, dtype=torch.float32),
        paged_rows(given, B, context, J, page_size),
        request_T,
        torch.full_like(request_T, context - 1),
        torch.empty(B, context, dtype=torch.float32, device=given.device),
    )


def _decode(op: str, shape: str, B: int, context: int, work: Work, sizes: Sizes, uses: tuple[str, ...]) -> Case:
    build = {"index_scores": _scores, "select_keys": _selection, "indexer": _both}[op]
    return Case(op, shape, B, work, sizes.timing(B), build(B, context, sizes.page_size), uses)


def _scores(B: int, context: int, page_size: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        step = _step(given, B, context, page_size)
        scores, rows = given.op("index_scores"), checked_rows(B, 2)

        def of_rows(out_TS: Tensor) -> Tensor:
            return out_TS[rows]

        return Problem(
            lambda: scores(*step.arguments()),
            lambda out_TS: triples(out_TS[rows], given.twin("index_scores"), *step.arguments(rows)),
            [
                Peer("torch bmm", _plain_scores(given, step), of_rows),
                deep_gemm_paged_scores(
                    step.query_TIJ,
                    step.weights_TI,
                    step.keys.pool,
                    step.keys.block_table_BP,
                    step.positions_T,
                    context,
                    lambda out_TS: out_TS[:, :context][rows],
                ),
            ],
        )

    return build


def _plain_scores(given: Inputs, step: _Step) -> Callable[[], Tensor]:
    """Two batched products on keys without pages; bfloat16 between them, as a port would have it."""
    key_BSJ = step.keys.by_position(step.scores_TS.shape[1])
    weights_B1I = (step.weights_TI * given.config.index_head_dim**-0.5).to(given.dtype)[:, None]

    def run() -> Tensor:
        dots_BIS = torch.bmm(step.query_TIJ, key_BSJ.mT).relu_()
        return torch.bmm(weights_B1I, dots_BIS)[:, 0].float()

    return run


def _selection(B: int, context: int, page_size: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        K = given.config.index_topk
        scores_TS = given.randn(B, context, dtype=torch.float32)
        positions_T = torch.full((B,), context - 1, dtype=torch.int32, device=given.device)
        select, rows = given.op("select_keys"), checked_rows(B)
        return Problem(
            lambda: select(scores_TS, positions_T, K),
            lambda out_TK: _selection_check(given, out_TK, scores_TS, positions_T, rows, "select_keys"),
            # Its order and its ties are its own: what is compared is the score of each chosen key, sorted.
            [Peer("torch.topk", lambda: scores_TS.topk(K, dim=-1), lambda out: _ascending(out.values[rows]))],
        )

    return build


def _selection_check(
    given: Inputs, out: Tensor, scores_TS: Tensor, positions_T: Tensor, rows: list[int], op: str
) -> list[Triple]:
    """The same keys, exactly; before that their scores, for peers that list them in another order."""
    K, scores_TS = given.config.index_topk, scores_TS[rows]
    wanted = given.twin(op)(scores_TS, positions_T[rows], K)
    is_bits = op == "select_bits"
    chosen, expected = (_chosen(scores_TS, keys, K, is_bits) for keys in (out[rows], wanted))
    return [Triple(chosen, expected, expected.double()), Triple(out[rows], wanted, wanted)]


def _chosen(scores_TS: Tensor, selection: Tensor, K: int, is_bits: bool) -> Tensor:
    """Scores of the selected keys, ascending; 0 for the places of a row that selects fewer than K."""
    S = scores_TS.shape[1]
    if is_bits:
        bit_32 = torch.arange(32, device=selection.device, dtype=torch.int32)
        is_chosen_TS = (selection[..., None] >> bit_32 & 1).bool().flatten(1)[:, :S]
    else:
        with_none = torch.zeros(len(scores_TS), S + 1, dtype=torch.bool, device=scores_TS.device)
        is_chosen_TS = with_none.scatter_(-1, torch.where(selection < 0, S, selection).long(), True)[:, :S]
    return _best(scores_TS.masked_fill(~is_chosen_TS, float("-inf")), K)


def _best(scores_TS: Tensor, K: int) -> Tensor:
    return _ascending(scores_TS.topk(K, dim=-1).values)


def _ascending(scores_TK: Tensor) -> Tensor:
    ascending_TK = scores_TK.sort(dim=-1).values
    return ascending_TK.masked_fill(ascending_TK == float("-inf"), 0)


def _both(B: int, context: int, page_size: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        K = given.config.index_topk
        step = _step(given, B, context, page_size)
        scores, select, rows = given.op("index_scores"), given.op("select_keys"), checked_rows(B, 2)
        plain = _plain_scores(given, step)

        def ours() -> tuple[Tensor, Tensor]:
            scores_TS = scores(*step.arguments())
            return scores_TS, select(scores_TS, step.positions_T, K)

        def check(out: tuple[Tensor, Tensor]) -> list[Triple]:
            scores_TS, selected_TK = out
            judged = triples(scores_TS[rows], given.twin("index_scores"), *step.arguments(rows))
            chosen = _selection_check(given, selected_TK, scores_TS, step.positions_T, rows, "select_keys")
            eager, truth = (_best(scores_TS, K) for scores_TS in (judged[0].eager, judged[0].truth))
            return [Triple(chosen[0].out, eager, truth), *judged, *chosen]

        peer = Peer("torch bmm, topk", lambda: plain().topk(K, dim=-1), lambda out: _ascending(out.values[rows]))
        return Problem(ours, check, [peer])

    return build


def _prefill_scores(T: int, sizes: Sizes) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        I, J = given.config.index_n_heads, given.config.index_head_dim  # noqa: E741 - the legend's letter
        query_TIJ = given.randn(T, I, J)
        weights_TI = given.randn(T, I, scale=I**-0.5, dtype=torch.float32)
        keys = paged_rows(given, 1, T, J, sizes.page_size)
        positions_T = torch.arange(T, device=given.device, dtype=torch.int32)
        request_T, start_B1 = torch.zeros_like(positions_T), positions_T.new_tensor([0, T])
        scores_TS = torch.empty(T, T, dtype=torch.float32, device=given.device)
        scores, rows = given.op("index_scores"), checked_rows(T)
        visible_TS = torch.arange(T, device=given.device) <= positions_T[rows, None]

        def ours() -> Tensor:
            pages = (keys.pool, keys.block_table_BP)
            return scores(query_TIJ, weights_TI, *pages, request_T, positions_T, scores_TS, start_B1, T)

        def of_rows(out_TS: Tensor) -> Tensor:
            return torch.where(visible_TS, out_TS[rows][:, :T], 0)

        def check(out_TS: Tensor) -> list[Triple]:
            few = (query_TIJ[rows], weights_TI[rows], keys.pool, keys.block_table_BP, request_T[rows])
            blank_TS = torch.zeros(len(rows), T, dtype=torch.float32, device=given.device)
            return triples(of_rows(out_TS), given.twin("index_scores"), *few, positions_T[rows], blank_TS)

        key_SJ = keys.by_position(T)[0]
        peers: list[Peer | AbsentPeer] = [deep_gemm_scores(query_TIJ, weights_TI, key_SJ, positions_T, of_rows)]
        return Problem(ours, check, peers)

    return build


def _prefill_selection(T: int) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        K = given.config.index_topk
        scores_TS = given.randn(T, T, dtype=torch.float32)
        positions_T = torch.arange(T, device=given.device, dtype=torch.int32)
        select, rows = given.op("select_bits"), checked_rows(T)
        is_hidden_TS = torch.arange(T, device=given.device) > positions_T[:, None]
        # torch.topk has no causal ends: what a query must not see is masked beforehand, outside of its time.
        masked_TS = scores_TS.masked_fill(is_hidden_TS, float("-inf"))
        return Problem(
            lambda: select(scores_TS, positions_T, K),
            lambda out_TW: _selection_check(given, out_TW, scores_TS, positions_T, rows, "select_bits"),
            [Peer("torch.topk", lambda: masked_TS.topk(K, dim=-1), lambda out: _ascending(out.values[rows]))],
        )

    return build
