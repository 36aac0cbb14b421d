"""Index scores: kernel against twin, and what must be neither read nor written."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, check_against_twin
from torch import Tensor

from optimized.attention.index_scores import index_scores_torch, index_scores_triton
from optimized.attention.selection import select_keys_torch
from optimized.errors import KernelInputError

# T query tokens  S key tokens  I index heads  J index head dim  B requests  P pages of a request

NO_PAGE = 2**31 - 1
NAN = float("nan")


@dataclass(frozen=True)
class Rows:
    """Arguments of index_scores; in the pool and in `out`, what no row may touch is NaN."""

    query_TIJ: Tensor
    head_weights_TI: Tensor
    index_pool: Tensor
    block_table_BP: Tensor
    request_T: Tensor
    positions_T: Tensor
    out_TS: Tensor
    query_start_B1: Tensor
    max_queries: int

    def check(self) -> None:
        """Every row on its own, then in runs; each call writes into its own copy of `out`."""
        alone = (self.query_TIJ, self.head_weights_TI, self.index_pool, self.block_table_BP, self.request_T)
        for runs in ({}, {"query_start_B1": self.query_start_B1, "max_queries": self.max_queries}):
            check_against_twin(scored(index_scores_triton), scored(index_scores_torch), *alone, self.positions_T,
                               self.out_TS, **runs)  # fmt: skip


def scored(index_scores):
    def run(*arguments: object, **runs: object) -> Tensor:
        *inputs, out_TS = arguments
        view_TS = torch.full((len(out_TS), out_TS.shape[1] + 3), NAN, dtype=out_TS.dtype, device=DEVICE)
        assert index_scores(*inputs, view_TS[:, :-3], **runs) is not None
        assert view_TS[:, -3:].isnan().all()
        return view_TS[:, :-3]

    return run


def rows(
    spans: list[tuple[int, int]],
    heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    spare: int = 0,
) -> Rows:
    """One request for each (computed, new): its new rows have the positions computed .. computed + new - 1."""
    generator = torch.Generator().manual_seed(seed)
    totals = [computed + new for computed, new in spans]
    pages = [-(-total // page_size) for total in totals]
    S, T = max([*totals, 1]) + spare, sum(new for _, new in spans)
    pool = torch.full((sum(pages) + 2, page_size, dim + 5), NAN)
    table_BP = torch.full((len(spans), max([*pages, 1]) + 1), NO_PAGE, dtype=torch.int32)
    free = torch.randperm(sum(pages) + 2, generator=generator).int()
    for request, (total, count) in enumerate(zip(totals, pages, strict=True)):
        table_BP[request, :count], free = free[:count], free[count:]
        s_S = torch.arange(total)
        page_S = table_BP[request, s_S // page_size].long()
        pool[page_S, s_S % page_size, :dim] = torch.randn(total, dim, generator=generator)
    positions = [computed + row for computed, new in spans for row in range(new)]
    starts = torch.tensor([0] + [new for _, new in spans]).cumsum(0)
    # Views into wider rows, as they come out of packed projections.
    query_TIJ = torch.randn(T, heads, dim + 3, generator=generator)[..., :dim]
    weights_TI = torch.randn(T, heads + 2, generator=generator)[:, :heads]
    return Rows(
        query_TIJ.to(DEVICE, dtype),
        weights_TI.to(DEVICE),
        pool.to(DEVICE, dtype)[..., :dim],
        table_BP.to(DEVICE),
        torch.repeat_interleave(torch.arange(len(spans)), torch.tensor([new for _, new in spans])).int().to(DEVICE),
        torch.tensor(positions, dtype=torch.int32, device=DEVICE),
        torch.full((T, S), NAN, device=DEVICE),
        starts.int().to(DEVICE),
        max([new for _, new in spans] + [1]),
    )


DECODE = [(0, 1), (6, 1), (30, 1), (31, 1), (32, 1), (62, 1), (63, 1), (64, 1), (127, 1)]
CHUNKS = [(0, 5), (7, 1), (60, 7), (0, 0), (20, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("spans", [DECODE, CHUNKS], ids=["decode", "chunks"])
def test_as_good_as_eager(spans, page_size, dtype):
    rows(spans, 9, 22, page_size, dtype, spare=2).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (16, 16), (17, 33), (64, 128)])
def test_sizes_of_heads(heads, dim, dtype):
    rows([(0, 3), (34, 1)], heads, dim, 16, dtype).check()


@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 6)), min_size=1, max_size=4),
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(1, 70),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_sweep(spans, heads, dim, page_size, dtype, seed):
    rows(spans, heads, dim, page_size, dtype, seed, spare=1).check()


def test_the_last_column_may_be_the_last_position_and_equal_calls_give_equal_bytes():
    case = rows([(64, 3)], 9, 22, 4, torch.bfloat16)
    outputs = [
        index_scores_triton(case.query_TIJ, case.head_weights_TI, case.index_pool, case.block_table_BP, case.request_T,
                            case.positions_T, case.out_TS.clone(), case.query_start_B1, 3)
        for _ in range(2)
    ]  # fmt: skip
    assert outputs[0][-1].isfinite().all()
    assert torch.equal(outputs[0].nan_to_num(7.0), outputs[1].nan_to_num(7.0))


def test_padding_rows_and_no_rows_write_nothing():
    case = rows([(5, 1), (9, 1)], 9, 22, 4, torch.float32)
    inputs = (case.query_TIJ, case.head_weights_TI, case.index_pool, case.block_table_BP, case.request_T)
    positions_T = torch.tensor([-1, 9], dtype=torch.int32, device=DEVICE)
    scores_TS = scored(index_scores_triton)(*inputs, positions_T, case.out_TS)
    assert scores_TS[0].isnan().all()
    assert scores_TS[1].isfinite().all()
    none = index_scores_triton(*(x[:0] if len(x) == 2 and x is not case.block_table_BP else x for x in inputs),
                               positions_T[:0], case.out_TS[:0])  # fmt: skip
    assert none.shape == (0, 10)


@pytest.mark.parametrize("unscored", [1, 8, 60, 99])
def test_rows_that_take_every_key_have_no_scores(unscored):
    """Nothing of them is written, and the others are as they are without the option."""
    case = rows(CHUNKS, 9, 22, 4, torch.bfloat16)
    inputs = (case.query_TIJ, case.head_weights_TI, case.index_pool, case.block_table_BP, case.request_T)
    is_scored_T = case.positions_T >= unscored
    for runs in ({}, {"query_start_B1": case.query_start_B1, "max_queries": case.max_queries}):
        all_TS = scored(index_scores_triton)(*inputs, case.positions_T, case.out_TS, **runs)
        for index_scores in (index_scores_torch, index_scores_triton):
            scores_TS = scored(index_scores)(*inputs, case.positions_T, case.out_TS, unscored=unscored, **runs)
            assert scores_TS[~is_scored_T].isnan().all()
            torch.testing.assert_close(scores_TS[is_scored_T], all_TS[is_scored_T], equal_nan=True)


def test_keys_that_no_head_likes_score_exactly_zero_and_equal_keys_tie():
    case = rows([(11, 1)], 9, 22, 3, torch.bfloat16)
    query_TIJ = case.query_TIJ.abs()
    key_SJ = torch.full((12, 22), -1.0, dtype=torch.bfloat16, device=DEVICE)
    key_SJ[4], key_SJ[9] = 1.0, 1.0
    pool = key_SJ.view(4, 3, 22)
    table_BP = torch.arange(4, dtype=torch.int32, device=DEVICE)[None]
    scores_TS = index_scores_triton(query_TIJ, case.head_weights_TI.abs(), pool, table_BP, case.request_T,
                                    case.positions_T, case.out_TS)  # fmt: skip
    zero_S = scores_TS[0] == 0
    assert zero_S.sum() == 10
    assert scores_TS[0, 4] == scores_TS[0, 9]
    assert select_keys_torch(scores_TS, case.positions_T, 4).tolist() == [[0, 1, 4, 9]]


@pytest.mark.parametrize("chunks", [(12,), (8, 4), (4, 4, 4), (11, 1)])
def test_every_split_of_a_prompt_selects_the_same_keys(chunks):
    """Causal ends come from absolute positions, not from the place in the chunk."""
    whole = rows([(0, 12), (3, 2)], 9, 22, 5, torch.float32)
    expected_TS = index_scores_torch(whole.query_TIJ, whole.head_weights_TI, whole.index_pool, whole.block_table_BP,
                                     whole.request_T, whole.positions_T, whole.out_TS.clone())  # fmt: skip
    expected_TK = select_keys_torch(expected_TS, whole.positions_T, 4)
    start = 0
    for size in chunks:
        # The chunk in one batch with the second request.
        t_T = torch.tensor([*range(start, start + size), 12, 13], device=DEVICE)
        starts = torch.tensor([0, size, size + 2], dtype=torch.int32, device=DEVICE)
        scores_TS = index_scores_triton(
            whole.query_TIJ[t_T], whole.head_weights_TI[t_T], whole.index_pool, whole.block_table_BP,
            whole.request_T[t_T], whole.positions_T[t_T], whole.out_TS[t_T], starts, max(size, 2),
        )  # fmt: skip
        assert torch.equal(select_keys_torch(scores_TS, whole.positions_T[t_T], 4), expected_TK[t_T])
        start += size


def test_refusals_name_what_is_wrong():
    case = rows([(5, 1), (9, 1)], 9, 22, 4, torch.float32)
    inputs = [case.query_TIJ, case.head_weights_TI, case.index_pool, case.block_table_BP, case.request_T,
              case.positions_T, case.out_TS]  # fmt: skip
    for place, wrong, message in (
        (0, case.query_TIJ.double(), "query in torch.float32"),
        (1, case.head_weights_TI[:, :-1], r"head_weights \(2, 9\)"),
        (2, case.index_pool.bfloat16(), "index_pool in torch.float32"),
        (3, case.block_table_BP.long(), "block_table in torch.int32"),
        (6, case.out_TS[:1], r"out \(2, any\)"),
    ):
        with pytest.raises(KernelInputError, match=message):
            index_scores_triton(*inputs[:place], wrong, *inputs[place + 1 :])
    with pytest.raises(KernelInputError, match="max_queries=2 needs query_start_B1"):
        index_scores_triton(*inputs, max_queries=2)
