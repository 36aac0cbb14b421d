"""The lists of selected tiles against their definition: which keys a query sees, and where the bit of each key lies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE
from poison import poisoned
from torch import Tensor

from optimized.attention.expanded import NO_WINDOW
from optimized.attention.selected_tiles import list_selected_tiles

# T query tokens  B requests  W words of 32 selection bits  S key positions


def int32(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def seen_keys(selection_TW: Tensor, position: int, query: int, first_key: int, keys: int, window: int) -> set[int]:
    words = selection_TW[query].tolist()
    return {
        s
        for s in range(max(first_key, position - window + 1), min(first_key + keys, position + 1))
        if words[s >> 5] >> (s & 31) & 1
    }


def check(requests: list[tuple[int, int, int]], selection_TW: Tensor, window: int, block_T: int, block_S: int) -> None:
    """`requests`: (position of the first new token, new tokens, position of the first key)."""
    counts = [new for _, new, _ in requests]
    keys = [start + new - first for start, new, first in requests]
    positions = [p for start, new, _ in requests for p in range(start, start + new)]
    starts, first_keys = [0, *torch.tensor(counts).cumsum(0).tolist()], [first for *_, first in requests]
    query_tiles = -(-max(counts) // block_T)
    whole, part, dealt, number = poisoned(list_selected_tiles)(
        selection_TW,
        int32(positions),
        int32(starts),
        int32([0, *torch.tensor(keys).cumsum(0).tolist()]),
        int32(first_keys),
        window,
        query_tiles,
        block_T,
        block_S,
    )
    for b, first_key in enumerate(first_keys):
        for line in range(query_tiles):
            queries = range(starts[b], starts[b + 1])[line * block_T : (line + 1) * block_T]
            if not queries:
                continue
            seen = [seen_keys(selection_TW, positions[q], q, first_key, keys[b], window) for q in queries]
            row, tiles = b * query_tiles + line, range(-(-selection_TW.shape[1] * 32 // block_S))
            every = [set(range(tile * block_S, (tile + 1) * block_S)) for tile in tiles]
            wholes = [tile for tile in tiles if all(every[tile] <= keys_of for keys_of in seen)]
            parts = [tile for tile in tiles if tile not in wholes and any(every[tile] & keys_of for keys_of in seen)]
            assert number[row].tolist() == [len(wholes), len(parts)]
            assert whole[row, : len(wholes)].tolist() == wholes
            assert part[row, : len(parts)].tolist() == parts
            for place, tile in enumerate(parts):
                words = dealt[row, place].tolist()
                for lane, keys_of in enumerate(seen):
                    found = {
                        tile * block_S + s
                        for s in range(block_S)
                        if words[(s >> 1) & 3][lane] >> ((s >> 3) * 2 + (s & 1)) & 1
                    }
                    assert found == every[tile] & keys_of


@pytest.mark.parametrize("block_S", [32, 64, 128])
def test_whole_partly_selected_and_empty_tiles(block_S):
    selection_TW = torch.full((40, 9), -1, dtype=torch.int32, device=DEVICE)
    selection_TW[5:, 2:4] = 0
    selection_TW[:, 7] = int32([1 << (t % 32) if t % 32 < 31 else -(2**31) for t in range(40)])
    selection_TW[:, 8] = 0
    for window in (NO_WINDOW, 70):
        check([(200, 40, 0)], selection_TW, window, 16, block_S)


@settings(max_examples=8 if DEVICE == "cpu" else 3)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 34), st.integers(0, 40)), min_size=1, max_size=3),
    st.sampled_from([NO_WINDOW, 1, 33, 64]),
    st.sampled_from([32, 64]),
    st.integers(0, 99),
)
def test_sweep(requests, window, block_S, seed):
    """Few words of random bits, the others empty or full."""
    requests = [(start, new, min(first, start)) for start, new, first in requests]
    requests.append((3, 2, 0))
    T = sum(new for _, new, _ in requests)
    words = -(-max(start + new for start, new, _ in requests) // 32)
    generator = torch.Generator().manual_seed(seed)
    bits_TW = torch.randint(-(2**31), 2**31, (T, words), generator=generator)
    kind_W = torch.randint(0, 3, (words,), generator=generator)
    bits_TW = torch.where(kind_W == 0, bits_TW, torch.where(kind_W == 1, 0, -1))
    check(requests, bits_TW.to(DEVICE, torch.int32), window, 16, block_S)
