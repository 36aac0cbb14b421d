"""The prefill core for Hopper, emulated in numpy at small sizes: indices, masks, the order of copies and products."""

import pytest
import torch
from gluon_emulator import Rows, emulated, pointer
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, float64
from test_expanded import masked, prefill
from torch import Tensor

from optimized.attention.expanded import LOG2_E, NO_WINDOW, expanded_attention_torch
from optimized.attention.selected_tiles import NO_TILES, list_selected_tiles

hopper_expanded = pytest.importorskip("optimized.attention.hopper_expanded")
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu/test_pipelined_gpu.py runs the kernel itself")

# H heads, N nope, R rope and V value lanes; N as one block of 16, or as 16 and 8.
FULL, SLIDING = (2, 16, 8, 16), (1, 24, 8, 16)
BLOCK_N, BLOCK_T = 16, 16


def attend(
    q: Tensor, kv: Tensor, k_rope: Tensor, query_start: Tensor, key_start: Tensor, positions: Tensor, first_key: Tensor,
    window: int | None, selection: Tensor | None, scale: float, N: int, max_queries: int, block_S: int,
) -> Tensor:  # fmt: skip
    """As `expanded_attention_torch`, in float64, with tiles of `block_S` keys."""
    T, H, X = q.shape
    S, _, Y = kv.shape
    R, V, rest = X - N, Y - N, N - BLOCK_N
    query_tiles = -(-max_queries // BLOCK_T)
    farthest = NO_WINDOW if window is None else window
    ragged = (query_start, key_start, positions, first_key)
    lists, most = NO_TILES, 0
    if selection is not None:
        selected = list_selected_tiles(
            selection, positions, query_start, key_start, first_key, farthest, query_tiles, BLOCK_T, block_S
        )
        lists, most = tuple(map(pointer, selected)), selected.whole.shape[1]
    shape = (S, (H - 1) * kv.stride(1) + Y)
    n_rows, v_rows = (Rows(kv, shape, kv.stride(0), (block_S, lanes)) for lanes in (BLOCK_N, V))
    r_rows = Rows(k_rope, (S, R), k_rope.stride(0), (block_S, R))
    e_rows = Rows(kv, shape, kv.stride(0), (block_S, rest)) if rest else r_rows
    core = torch.full((T, H, V), float("nan"), dtype=torch.float64)
    emulated(hopper_expanded, "hopper_expanded_kernel", (query_tiles, H, len(first_key)))(
        pointer(q), n_rows, e_rows, r_rows, v_rows, pointer(core), *map(pointer, ragged), *lists, scale * LOG2_E,
        farthest, H, most, q.stride(0), q.stride(1), kv.stride(1),
        N=BLOCK_N, E=rest, R=R, V=V, BLOCK_T=BLOCK_T, BLOCK_S=block_S, HAS_SELECTION=selection is not None,
    )  # fmt: skip
    return core


def check(arguments: tuple, block_S: int) -> None:
    arguments = tuple(float64(*arguments))
    expected = expanded_attention_torch(*arguments)
    torch.testing.assert_close(attend(*arguments, block_S=block_S), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block_S", [32, 64, 128])
@pytest.mark.parametrize(("window", "selection"), [(None, False), (None, True), (7, False), (40, False)])
def test_ragged_requests(window: int | None, selection: bool, block_S: int) -> None:
    """A prompt, a request without tokens, a chunk behind 60 positions, one token alone; NaN around the rows."""
    sizes = FULL if window is None else SLIDING
    check(prefill([37, 0, 5, 1], [0, 0, 60, 33], window, torch.float32, sizes, selection), block_S)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 96, 97, 130])
def test_one_tile_two_tiles_and_more(length: int) -> None:
    """Where copies ahead begin and end."""
    for window, sizes, selection in ((None, FULL, False), (None, FULL, True), (20, SLIDING, False)):
        check(prefill([length], [0], window, torch.float32, sizes, selection), 32)


def test_whole_tiles_empty_tiles_and_queries_that_select_nothing() -> None:
    arguments = prefill([40], [90], None, torch.float32, FULL)
    selection = torch.zeros(40, 5, dtype=torch.int32)
    selection[:, 1] = -1
    selection[3], selection[17], selection[39] = masked(0, words=5), masked(95, words=5), masked(64, 129, words=5)
    selection[20:36] = 0
    check((*arguments[:8], selection, *arguments[9:]), 32)
    check((*arguments[:8], torch.full_like(selection, -1), *arguments[9:]), 64)


@settings(max_examples=8)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.none() | st.integers(1, 50),
    st.booleans(),
    st.integers(0, 70),
)
def test_sweep(lengths: list[int], window: int | None, selection: bool, history: int) -> None:
    sizes = FULL if window is None else SLIDING
    if max(lengths):
        before = [history] * len(lengths)
        check(prefill(lengths, before, window, torch.float32, sizes, selection, seed=history), 32)
