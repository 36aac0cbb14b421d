"""The prefill core for Hopper against the twin: ragged requests, windows, selections, NaN around the written rows."""

import pytest
import torch
from kernel_checks import check_against_twin
from poison import assert_same_bytes, poisoned
from torch import Tensor

from optimized.attention.expanded import expanded_attention_torch, expanded_attention_triton
from optimized.attention.pipelined import takes_pipelined

# Released geometry of both layer kinds but for the number of heads.
FULL, SLIDING = (2, 128), (2, 192)
ROPE, VALUE = 64, 128
NAN = float("nan")

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for Hopper"
)
pytestmark = needs_hopper


def int32(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def prefill(
    lengths: list[int], before: list[int], window: int | None, sizes: tuple[int, int], dropped: int = 0
) -> tuple:
    """Requests with new tokens and earlier ones, of which the first `dropped` or those before a window are not there.

    NaN lies before, behind and between the key rows of requests, beside the heads and before the rope lanes.
    """
    generator = torch.Generator("cuda").manual_seed(sum(lengths))
    H, N = sizes
    first = [min(b, dropped) if window is None else max(0, b - window + 1) for b in before]
    keys = [b + n - f for b, n, f in zip(before, lengths, first, strict=True)]
    T, S = sum(lengths), sum(keys)
    kv = torch.full((S + 5, H + 1, N + VALUE + 8), NAN, dtype=torch.bfloat16, device="cuda")[:, :H, : N + VALUE]
    k_rope = torch.full((S + 5, 3 * ROPE), NAN, dtype=torch.bfloat16, device="cuda")[:, -ROPE:]
    kv[3 : S + 3].normal_(generator=generator)
    k_rope[3 : S + 3].normal_(generator=generator)
    q = torch.empty(T, H, N + ROPE, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    positions = [p for b, n in zip(before, lengths, strict=True) for p in range(b, b + n)]
    arguments = (
        q,
        kv,
        k_rope,
        int32([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        int32([3, *(torch.tensor(keys).cumsum(0) + 3).tolist()]),
        int32(positions),
        int32(first),
        window,
        None,
        (N + ROPE) ** -0.5,
        N,
        max(lengths),
    )
    assert takes_pipelined(q, kv, k_rope, N, max(lengths))
    return arguments


def selecting(arguments: tuple, share: float, block: int = 1, seed: int = 0) -> tuple:
    """The same with a random selection in runs of `block` keys; bits of later keys are set as well."""
    T, longest = len(arguments[0]), int(arguments[5].max()) + 1
    words = -(-longest // 32)
    generator = torch.Generator("cuda").manual_seed(seed)
    runs = torch.rand(T, words * 32 // block, generator=generator, device="cuda") < share
    is_set = runs.repeat_interleave(block, dim=1).view(T, words, 32).long()
    bits_TW = (is_set << torch.arange(32, device="cuda")).sum(-1).to(torch.int32)
    return (*arguments[:8], bits_TW, *arguments[9:])


CASES = {
    "full": ([1024], [0], None, FULL, 0),
    "full-ragged-chunk": ([300, 1, 700, 129], [900, 33, 0, 5], None, FULL, 0),
    "full-unaligned-first-key": ([257, 70], [400, 300], None, FULL, 77),
    "full-ends-of-tiles": ([64, 127, 128, 129, 255, 256, 257], [0] * 7, None, FULL, 0),
    "sliding": ([1024], [0], 513, SLIDING, 0),
    "sliding-ragged-chunk": ([300, 1, 0, 700, 129], [900, 700, 0, 0, 513], 513, SLIDING, 0),
    "sliding-narrow": ([200, 65], [100, 0], 7, SLIDING, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_all_keys(name: str) -> None:
    arguments = prefill(*CASES[name])
    check_against_twin(poisoned(expanded_attention_triton), expanded_attention_torch, *arguments)
    assert_same_bytes(expanded_attention_triton(*arguments), expanded_attention_triton(*arguments))


@pytest.mark.parametrize(("share", "block"), [(0.5, 1), (0.02, 1), (0.001, 1), (0.3, 32)])
@pytest.mark.parametrize("name", ["full", "full-ragged-chunk", "full-unaligned-first-key", "full-ends-of-tiles"])
def test_selected_keys(name: str, share: float, block: int) -> None:
    arguments = selecting(prefill(*CASES[name]), share, block)
    check_against_twin(poisoned(expanded_attention_triton), expanded_attention_torch, *arguments)
    assert_same_bytes(expanded_attention_triton(*arguments), expanded_attention_triton(*arguments))


@pytest.mark.parametrize("name", ["full", "full-ragged-chunk"])
def test_a_selection_of_all_keys_is_dense(name: str) -> None:
    arguments = prefill(*CASES[name])
    dense = expanded_attention_triton(*arguments)
    assert_same_bytes(expanded_attention_triton(*selecting(arguments, 1.1)), dense)


def test_queries_that_select_nothing_are_zeros() -> None:
    arguments = selecting(prefill([256, 200], [64, 0], None, FULL), 0.3, 32)
    arguments[8][10:20] = 0
    arguments[8][128:300] = 0
    out = poisoned(expanded_attention_triton)(*arguments)
    assert not out[10:20].any()
    assert not out[128:300].any()
    check_against_twin(expanded_attention_triton, expanded_attention_torch, *arguments)


@pytest.mark.parametrize("share", [None, 0.5])
def test_another_requests_nan_stays_there(share: float | None) -> None:
    """Tiles of keys reach over into the rows of the next request and of the one before."""
    arguments = prefill([100, 150, 129], [33, 0, 7], None, FULL, 5)
    if share is not None:
        arguments = selecting(arguments, share)
    out = expanded_attention_triton(*arguments)
    query_start, key_start = arguments[3].tolist(), arguments[4].tolist()
    for b in range(3):
        kv, k_rope = arguments[1].clone(), arguments[2].clone()
        is_other = torch.ones(len(kv), dtype=torch.bool, device="cuda")
        is_other[key_start[b] : key_start[b + 1]] = False
        kv[is_other], k_rope[is_other] = NAN, NAN
        rows = slice(query_start[b], query_start[b + 1])
        assert_same_bytes(expanded_attention_triton(arguments[0], kv, k_rope, *arguments[3:])[rows], out[rows])
