"""Attention kernels at released shapes on the GPU: against the twins, byte for byte repeatable, within CUDA graphs."""

import pytest
import torch
from kernel_checks import DEVICE, assert_as_good_as_eager, check_against_twin, float64
from poison import poisoned
from torch import Tensor

from optimized.attention.absorbed import (
    ring_attention_torch,
    ring_attention_triton,
    sparse_attention_torch,
    sparse_attention_triton,
)
from optimized.attention.expanded import expanded_attention_torch, expanded_attention_triton
from optimized.attention.one_pass import has_hopper_kernels, takes_pages, takes_ring
from optimized.attention.two_pass import attend_in_two_passes

# Released geometry: full layers 128 heads, C 512, N 128; sliding layers 64 heads, C 1024, N 192; R 64, V 128.
WINDOW, TOPK, PAGE = 513, 2048, 64
FULL_SCALE, SLIDING_SCALE = 192**-0.5, 256**-0.5


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)


def int32(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def sparse_arguments(B: int, context: int) -> tuple:
    """B requests at ends that differ, pages dealt out at random, unwritten rows and unused pages NaN."""
    generator = torch.Generator(DEVICE).manual_seed(B)
    pages_each = -(-context // PAGE)
    pool = torch.full((B * pages_each + 1, PAGE, 576), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    order = torch.randperm(B * pages_each, generator=generator, device=DEVICE).int()
    table = order.view(B, pages_each).clone()
    ends = torch.randint(1, context + 1, (B,), generator=generator, device=DEVICE)
    ends[0] = context
    scores = torch.rand(B, context, generator=generator, device=DEVICE)
    scores.masked_fill_(torch.arange(context, device=DEVICE) >= ends[:, None], -1.0)
    values, selected = scores.topk(min(TOPK, context), dim=-1)
    selected = torch.where(values >= 0, selected, -1).int()
    if context < TOPK:
        selected = torch.nn.functional.pad(selected, (0, TOPK - context), value=-1)
    written = torch.arange(context, device=DEVICE) < ends[:, None]
    page = table.long().repeat_interleave(PAGE, dim=1)[:, :context][written]
    row = (torch.arange(context, device=DEVICE) % PAGE).expand(B, -1)[written]
    pool[page, row] = normal(len(page), 576, seed=B + 1)
    return normal(B, 128, 576), pool, selected, table, int32(range(B)), FULL_SCALE, 512


def ring_arguments(B: int) -> tuple:
    generator = torch.Generator(DEVICE).manual_seed(B)
    positions = torch.randint(0, 4096, (B,), generator=generator, device=DEVICE).int()
    positions[0] = 40_000
    pool = torch.full((B + 1, WINDOW + 3, 1088), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    key = positions[:, None] - torch.arange(WINDOW, device=DEVICE)
    ring = torch.arange(B, device=DEVICE).flip(0)[:, None].expand(-1, WINDOW)
    pool[ring[key >= 0], key[key >= 0] % (WINDOW + 3)] = normal(int((key >= 0).sum()), 1088, seed=B + 1)
    return normal(B, 64, 1088), pool, ring[:, 0].int(), positions, WINDOW, SLIDING_SCALE, 1024


def prefill_arguments(lengths: list[int], history: int, H: int, N: int, window: int | None, topk: int | None) -> tuple:
    """Requests of these new lengths; the first one has `history` earlier positions. Rope keys lie in latent rows."""
    generator = torch.Generator(DEVICE).manual_seed(sum(lengths))
    before = [history] + [0] * (len(lengths) - 1)
    kept = [n if window is None else min(n, window - 1) for n in before]
    keys = [k + n for k, n in zip(kept, lengths, strict=True)]
    positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, lengths, strict=True)])
    T, S = sum(lengths), sum(keys)
    selection = None
    if topk is not None:
        words = -(-(history + max(lengths)) // 32)
        scores = torch.rand(T, words * 32, generator=generator, device=DEVICE)
        is_future = torch.arange(words * 32, device=DEVICE) > positions.to(DEVICE)[:, None]
        scores.masked_fill_(is_future, -1.0)
        best = scores.topk(min(topk, words * 32), dim=-1).indices
        chosen = torch.zeros_like(is_future).scatter_(1, best, True) & ~is_future
        bits = chosen.view(T, words, 32).long() << torch.arange(32, device=DEVICE)
        selection = bits.sum(-1).int()
    return (
        normal(T, H, N + 64),
        normal(S, H, N + 128, seed=1),
        normal(S, 1088, seed=2)[:, -64:],
        int32([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        int32([0, *torch.tensor(keys).cumsum(0).tolist()]),
        int32(positions),
        int32([b - k for b, k in zip(before, kept, strict=True)]),
        window,
        selection,
        (N + 64) ** -0.5,
        N,
        max(lengths),
    )


needs_hopper = pytest.mark.skipif(not has_hopper_kernels(torch.device(DEVICE)), reason="needs a Hopper GPU and Gluon")


@pytest.mark.parametrize(("B", "context"), [(1, 4096), (16, 4096), (64, 2560), (3, 1500)])
def test_sparse_attention(B: int, context: int) -> None:
    arguments = sparse_arguments(B, context)
    check_against_twin(sparse_attention_triton, sparse_attention_torch, *arguments)
    assert torch.equal(sparse_attention_triton(*arguments), sparse_attention_triton(*arguments))


@pytest.mark.parametrize("B", [1, 16, 32, 64, 70])
def test_ring_attention(B: int) -> None:
    arguments = ring_arguments(B)
    check_against_twin(ring_attention_triton, ring_attention_torch, *arguments)
    assert torch.equal(ring_attention_triton(*arguments), ring_attention_triton(*arguments))


@needs_hopper
@pytest.mark.parametrize("splits", [1, 2, 7, 32])
def test_sentinels_anywhere_in_one_pass(splits: int) -> None:
    """Lists with holes, one that ends early, an empty one, and one of a single key; NaN where nothing may be read."""
    q, pool, selected, table, request, scale, C = sparse_arguments(5, 4096)
    assert takes_pages(q, pool, C)
    selected[0, ::3] = -1
    selected[1, 700:] = -1
    selected[2] = -1
    selected[3, 1:] = -1
    request[2] = 2**31 - 1
    pool[-1] = float("nan")
    arguments = (q, pool, selected, table, request, scale, C, splits)
    check_against_twin(poisoned(sparse_attention_triton), sparse_attention_torch, *arguments)
    assert not sparse_attention_triton(*arguments)[2].any()


@needs_hopper
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_short_and_padded_rows_of_rings_in_one_pass(splits: int) -> None:
    q, pool, ring, positions, *rest = ring_arguments(9)
    assert takes_ring(q, pool, rest[-1], splits)
    for token, last in enumerate((-1, 0, 1, 63, 64, 65, 511)):
        positions[token] = last
        pool[ring[token].long(), last + 1 :] = float("nan")
        pool[ring[token].long(), : last + 1] = normal(last + 1, 1088, seed=last + 2)
    ring[0] = 2**31 - 1
    arguments = (q, pool, ring, positions, *rest, splits)
    check_against_twin(poisoned(ring_attention_triton), ring_attention_torch, *arguments)
    assert not ring_attention_triton(*arguments)[0].any()


@needs_hopper
def test_outliers_in_one_pass() -> None:
    """Scores of +-1000s, so that tiles differ by more than the range of float32's exponent."""
    q, pool, *rest = sparse_arguments(2, 2560)
    check_against_twin(sparse_attention_triton, sparse_attention_torch, q * 30, pool * 30, *rest)
    q, pool, *rest = ring_arguments(2)
    check_against_twin(ring_attention_triton, ring_attention_torch, q * 30, pool * 30, *rest)


@needs_hopper
def test_a_row_is_the_same_alone_and_in_company() -> None:
    """With the same number of parts: tiles do not depend on the batch."""
    q, pool, ring, positions, *rest = ring_arguments(64)
    for splits in (1, 4):
        together = ring_attention_triton(q, pool, ring, positions, *rest, splits=splits)
        alone = ring_attention_triton(q[5:6], pool, ring[5:6], positions[5:6], *rest, splits=splits)
        assert torch.equal(together[5:6], alone)

    q, pool, selected, table, request, *rest = sparse_arguments(64, 2560)
    for splits in (1, 4):
        together = sparse_attention_triton(q, pool, selected, table, request, *rest, splits=splits)
        alone = sparse_attention_triton(q[5:6], pool, selected[5:6], table, request[5:6], *rest, splits=splits)
        assert torch.equal(together[5:6], alone)


@pytest.mark.parametrize("B", [1, 64])
def test_two_passes(B: int) -> None:
    """What other GPUs and geometries take, at released geometry."""

    def sparse(q, pool, selected, table, request, scale, C):
        out = torch.empty(*q.shape[:2], C, dtype=q.dtype, device=q.device)
        attend_in_two_passes(q, pool, selected, table, request, out, selected.shape[1], scale, None)
        return out

    def ring(q, pool, ring, positions, window, scale, C):
        out = torch.empty(*q.shape[:2], C, dtype=q.dtype, device=q.device)
        attend_in_two_passes(q, pool, positions, None, ring, out, window, scale, None)
        return out

    for kernel, twin, arguments in (
        (sparse, sparse_attention_torch, sparse_arguments(B, 2560)),
        (ring, ring_attention_torch, ring_arguments(B)),
    ):
        eager, truth = twin(*arguments), twin(*float64(*arguments))
        assert_as_good_as_eager(kernel(*arguments), eager, truth)


@pytest.mark.parametrize(
    ("lengths", "history", "H", "N", "window", "topk"),
    [
        pytest.param([1024], 0, 4, 192, WINDOW, None, id="sliding"),
        pytest.param([300, 1, 700, 129], 900, 4, 192, WINDOW, None, id="sliding-ragged-chunk"),
        pytest.param([1024], 0, 4, 128, None, None, id="full-dense"),
        pytest.param([700, 3, 513], 1500, 4, 128, None, 600, id="full-ragged-selection"),
    ],
)
def test_expanded_attention(
    lengths: list[int], history: int, H: int, N: int, window: int | None, topk: int | None
) -> None:
    arguments = prefill_arguments(lengths, history, H, N, window, topk)
    check_against_twin(expanded_attention_triton, expanded_attention_torch, *arguments)
    assert torch.equal(expanded_attention_triton(*arguments), expanded_attention_triton(*arguments))


@pytest.mark.parametrize(("H", "N", "window", "topk"), [(64, 192, WINDOW, None), (128, 128, None, TOPK)])
def test_expanded_attention_of_4096_tokens(H: int, N: int, window: int | None, topk: int | None) -> None:
    """All queries run; every 61st is compared, since the twin takes the whole square."""
    arguments = prefill_arguments([4096], 0, H, N, window, topk)
    q, kv, k_rope, _, key_start, positions, first_key, _, selection, scale, _, _ = arguments
    out = expanded_attention_triton(*arguments)
    rows = torch.arange(0, 4096, 61, device=DEVICE)
    few = (
        q[rows],
        kv,
        k_rope,
        int32([0, len(rows)]),
        key_start,
        positions[rows],
        first_key,
        window,
        None if selection is None else selection[rows],
        scale,
        N,
        len(rows),
    )
    assert_as_good_as_eager(out[rows], expanded_attention_torch(*few), expanded_attention_torch(*float64(*few)))


def captured(function, *arguments: object) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The call in a CUDA graph, after a warm-up that compiles; and the buffer of its output."""
    function(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*arguments)
    return graph, out


def test_decode_cores_follow_their_buffers_in_a_cuda_graph() -> None:
    q, pool, selected, table, request, scale, C = sparse_arguments(4, 4096)
    graph, out = captured(sparse_attention_triton, q, pool, selected, table, request, scale, C)
    selected[:, 1::2] = -1
    graph.replay()
    assert torch.equal(out, sparse_attention_triton(q, pool, selected, table, request, scale, C))

    q, pool, ring, positions, *rest = ring_arguments(4)
    graph, out = captured(ring_attention_triton, q, pool, ring, positions, *rest)
    positions[0], positions[1] = 100, -1
    pool.nan_to_num_(0.25)
    graph.replay()
    assert torch.equal(out, ring_attention_triton(q, pool, ring, positions, *rest))
    assert not out[1].any()
