"""Index scores and selection at released sizes: 64 heads of 128 lanes, top-k 2048; 64-bit offsets; graph capture."""

import pytest
import torch
from kernel_checks import DTYPES, check_against_twin
from torch import Tensor

from optimized.attention.index_scores import index_scores_torch, index_scores_triton
from optimized.attention.selection import (
    select_bits_torch,
    select_bits_triton,
    select_keys_torch,
    select_keys_triton,
)

# T query tokens  S key tokens  I index heads  J index head dim  B requests  P pages of a request

HEADS, DIM, PAGE, TOPK = 64, 128, 64, 2048
NAN = float("nan")


def step(
    spans: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """Inputs of index_scores before `out`, and query_start: one request for each (computed, new)."""
    generator = torch.Generator("cuda").manual_seed(0)
    pages = [-(-(computed + new) // PAGE) for computed, new in spans]
    pool = torch.randn(sum(pages) + 1, PAGE, DIM, device="cuda", generator=generator).to(dtype)
    table_BP = torch.full((len(spans), max(pages) + 1), 2**31 - 1, dtype=torch.int32, device="cuda")
    free = torch.randperm(sum(pages), device="cuda", generator=generator).int() + 1
    pool[0] = NAN
    for request, ((computed, new), count) in enumerate(zip(spans, pages, strict=True)):
        table_BP[request, :count], free = free[:count], free[count:]
        if used := (computed + new) % PAGE:
            pool[table_BP[request, count - 1], used:] = NAN
    counts = torch.tensor([new for _, new in spans])
    T = int(counts.sum())
    inputs = [
        torch.randn(T, HEADS, DIM, device="cuda", generator=generator).to(dtype),
        torch.randn(T, HEADS, device="cuda", generator=generator) * HEADS**-0.5,
        pool,
        table_BP,
        torch.repeat_interleave(torch.arange(len(spans)), counts).int().cuda(),
        torch.cat([torch.arange(computed, computed + new) for computed, new in spans]).int().cuda(),
    ]
    return inputs, torch.cat((torch.zeros(1), counts.cumsum(0))).int().cuda()


def fresh(index_scores, S: int, **runs: object):
    return lambda *inputs: index_scores(
        *inputs, torch.full((len(inputs[0]), S), NAN, dtype=inputs[1].dtype, device="cuda"), **runs
    )


def check(spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
    inputs, query_start_B1 = step(spans, dtype)
    S = max(computed + new for computed, new in spans) + 7
    runs = {"query_start_B1": query_start_B1, "max_queries": max(new for _, new in spans)}
    for options in ({}, runs):
        check_against_twin(fresh(index_scores_triton, S, **options), fresh(index_scores_torch, S), *inputs)
    scores_TS = fresh(index_scores_triton, S, **runs)(*inputs)
    # As the model does it: rows that take every key that they see are not scored.
    needed_TS = fresh(index_scores_triton, S, unscored=TOPK, **runs)(*inputs)
    assert needed_TS[inputs[-1] < TOPK].isnan().all()
    for kernel, twin in ((select_keys_triton, select_keys_torch), (select_bits_triton, select_bits_torch)):
        expected = twin(scores_TS, inputs[-1], TOPK)
        assert torch.equal(kernel(scores_TS, inputs[-1], TOPK), expected)
        assert torch.equal(kernel(needed_TS, inputs[-1], TOPK), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B", [1, 16, 64])
def test_decode(B, dtype):
    check([(2049 + 37 * request % 2048, 1) for request in range(B)], dtype)


@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_verification_of_drafts(drafts):
    check([(3000, 1 + drafts), (17, 1 + drafts), (2046, 1 + drafts)], torch.bfloat16)


@pytest.mark.parametrize("spans", [[(0, 300)], [(1900, 300), (4000, 1), (0, 513)], [(0, 2200)]], ids=str)
def test_prefill(spans):
    check(spans, torch.bfloat16)


@pytest.mark.parametrize("S", [2048, 2049, 4096, 16384, 32768, 32769, 131072, 524288])
def test_selection_at_every_length(S):
    """Random, coarse (many ties), constant, heavy-tailed and clustered rows; full, cut and padding ones; NaN behind."""
    generator = torch.Generator("cuda").manual_seed(S)
    scores_TS = torch.randn(10, S, device="cuda", generator=generator)
    scores_TS[2:4] = (scores_TS[2:4] * 8).round() / 8
    scores_TS[4] = 0.0
    scores_TS[7] = (9 * scores_TS[7]).exp()
    scores_TS[8] = scores_TS[8] * 1e-6 + torch.where(scores_TS[8] > 1.2, 1e6, -1e6)
    scores_TS[9, 5] = 1e30
    positions = [S - 1, S // 2, S - 1, S - 70, S - 1, 2047, -1, S - 1, S - 1, S - 1]
    positions_T = torch.tensor(positions, dtype=torch.int32, device="cuda")
    scores_TS.masked_fill_(torch.arange(S, device="cuda") > positions_T[:, None], NAN)
    for kernel, twin in ((select_keys_triton, select_keys_torch), (select_bits_triton, select_bits_torch)):
        out = kernel(scores_TS, positions_T, TOPK)
        assert torch.equal(out, twin(scores_TS, positions_T, TOPK))
        assert torch.equal(out, kernel(scores_TS, positions_T, TOPK))


def test_offsets_beyond_32_bits():
    """Rows of scores and pages of keys 2^31 elements apart: the last row is right, and nothing between changes."""
    far = 2**31
    inputs, _ = step([(2500, 1), (100, 1)])
    S = 2600
    pages = inputs[2].shape[0]
    keys = torch.zeros(far + pages * PAGE * DIM, dtype=torch.bfloat16, device="cuda")
    # Page 1 of the view begins 2^31 elements after page 0; both requests are moved onto it in turn.
    view = keys.as_strided((2, PAGE, DIM), (far, DIM, 1))
    view[1] = inputs[2][inputs[3][1, 0].long()]
    moved = [*inputs[:2], view, torch.ones_like(inputs[3]), inputs[4], torch.full_like(inputs[5], PAGE - 1)]
    buffer = torch.full((far + S,), NAN, device="cuda")
    out_TS = buffer.as_strided((2, S), (far, 1))
    expected_TS = fresh(index_scores_torch, S)(*moved)
    index_scores_triton(*moved, out_TS)
    torch.testing.assert_close(out_TS, expected_TS, equal_nan=True)
    assert int(buffer.isfinite().sum()) == 2 * PAGE
    out_TS.copy_(torch.randn(2, S, device="cuda"))
    positions_T = torch.tensor([2300, S - 1], dtype=torch.int32, device="cuda")
    dense_TS = out_TS.contiguous()
    assert torch.equal(select_keys_triton(out_TS, positions_T, TOPK), select_keys_torch(dense_TS, positions_T, TOPK))
    assert torch.equal(select_bits_triton(out_TS, positions_T, TOPK), select_bits_torch(dense_TS, positions_T, TOPK))


@pytest.mark.parametrize("S", [4096, 40000])
def test_a_captured_graph_follows_positions_and_block_tables(S):
    """Replays with other lengths, pages and live rows equal eager calls; S is the bound of the graph's bucket."""
    lengths = ([2500, 90, 4095, 0], [-1, 3000, -1, 2048], [-1, -1, -1, -1])
    inputs, _ = step([(4095, 1)] * 4)
    static = [x.clone() for x in inputs]
    out_TS = torch.full((4, S), NAN, device="cuda")

    def compute() -> tuple[Tensor, Tensor]:
        index_scores_triton(*static, out_TS)
        return select_keys_triton(out_TS, static[5], TOPK), select_bits_triton(out_TS, static[5], TOPK)

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected_TK, words_TW = compute()
    for shift, positions in enumerate(lengths):
        static[3].copy_(inputs[3].roll(shift, dims=0))
        static[5].copy_(torch.tensor(positions))
        out_TS.fill_(NAN)
        graph.replay()
        scores_TS = fresh(index_scores_torch, S)(*static)
        assert torch.equal(out_TS.isnan(), scores_TS.isnan())
        assert torch.equal(selected_TK, select_keys_torch(out_TS, static[5], TOPK))
        assert torch.equal(words_TW, select_bits_torch(out_TS, static[5], TOPK))
