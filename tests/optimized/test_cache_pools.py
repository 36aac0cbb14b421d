"""The pools and who owns what in them: sizes, growing and giving back, forks, rings, poison, export and import.

Rows are written here through the places that a request owns, as a step would. What steps do with the pools is tested
with the planning. Source: text_model specification, section 13; cases C17 to C19, C30, C34 and C35.
"""

import dataclasses

import pytest
import torch

from optimized.cache import CachePools
from optimized.cache_export import export_request, import_request
from optimized.errors import PoolError
from reference.cache import RequestCache, SlidingCache
from reference.config import TextConfig, released, tiny
from reference.errors import CacheError

TINY = tiny().text
BFLOAT16_BYTES = 2


def small(window: int = 5) -> TextConfig:
    """A full, a sliding and a full layer, and the draft layer."""
    kinds = ("full_attention", "sliding_attention", "full_attention")
    return dataclasses.replace(TINY, num_hidden_layers=3, layer_types=kinds, sliding_window_size=window)


def pools_of(config: TextConfig | None = None, **changes) -> CachePools:
    options = {"pages": 8, "page_size": 4, "rings": 3, "max_draft_tokens": 2, "dtype": torch.float32, "device": "cpu"}
    return CachePools(config or small(), **{**options, "poison": True, **changes})


def write(pools: CachePools, request: str, first: int, value: float) -> None:
    """Put value + position into every lane of the rows from `first` on, in all layers, as a step does."""
    slots = pools.slots(request)
    positions = torch.arange(first, slots.length)
    rows = (value + positions)[:, None]
    places = pools.page_places(slots, positions.tolist())
    for stack in (pools.latents, pools.index_keys):
        stack.view(stack.shape[0], -1, stack.shape[3])[:, places] = rows
    kept = positions[-pools.ring_rows :]
    pools.rings[:, slots.ring, kept % pools.ring_rows] = rows[-pools.ring_rows :]


def append(pools: CachePools, request: str, count: int, value: float) -> None:
    first = pools.slots(request).length
    pools.grow(request, count)
    write(pools, request, first, value)


def state(pools: CachePools) -> tuple:
    """All bookkeeping and all bytes."""
    slots = {name: dataclasses.asdict(pools.slots(name)) for name in pools.requests}
    tensors = [stack.nan_to_num(1e9).clone() for stack in (pools.latents, pools.index_keys, pools.rings)]
    return str(slots), pools.free_pages, tuple(pools._page_users), torch.cat([t.flatten() for t in tensors]).tolist()


@pytest.mark.parametrize("tokens", [1024, 32768, 524288])
def test_c17_sliding_layers_stop_growing_and_full_layers_pay_for_every_token(tokens):
    options = {"rings": 1, "max_draft_tokens": 3, "dtype": torch.bfloat16, "device": "meta", "poison": False}
    pools = pools_of(released().text, pages=tokens // 64, page_size=64, **options)
    assert pools.bytes_per_token() == 13 * (576 + 128) * BFLOAT16_BYTES
    size = pools.bytes()
    assert size["full latents"] + size["index keys"] == tokens * pools.bytes_per_token()
    assert size["sliding rings"] == 33 * (513 + 3) * 1088 * BFLOAT16_BYTES
    assert size["draft ring"] == (513 + 2 * 3) * 1088 * BFLOAT16_BYTES
    assert size == pools.bytes(tokens)
    stacks = (pools.latents, pools.index_keys, pools.rings, pools.draft_rings)
    assert list(size.values()) == [stack.numel() * stack.element_size() for stack in stacks]


def test_c17_bytes_can_be_printed_before_a_request_exists():
    pools = pools_of(released().text, pages=1, page_size=64, dtype=torch.bfloat16, device="meta", poison=False)
    text = pools.summary(32768)
    assert "full latents   13 layers x    32,768 rows x 1,152 B = 490,733,568 B" in text
    assert "sliding rings  33 layers x       515 rows x 2,176 B = 36,981,120 B" in text
    assert pools.bytes(1)["index keys"] == 13 * 64 * 128 * BFLOAT16_BYTES


@pytest.mark.parametrize(("max_length", "drafts"), [(4, 0), (None, 0), (None, 3), (6, 3), (4, 3)])
def test_c18_rings_are_as_long_as_those_of_the_reference(max_length, drafts):
    expected = RequestCache(small(), drafts, max_length)
    pools = pools_of(max_draft_tokens=drafts, max_length=max_length)
    (sliding,) = [layer for layer in expected.layers if isinstance(layer, SlidingCache)]
    assert (pools.ring_rows, pools.draft_ring_rows) == (sliding.size, expected.draft.size)
    assert pools.ring_pool(1).shape == (3, sliding.size, TINY.sliding.latent_row)
    assert pools.ring_pool(3).shape == (3, expected.draft.size, TINY.sliding.latent_row)


def test_pools_have_the_widths_of_their_layers():
    pools = pools_of()
    for layer in (0, 2):
        assert pools.latent_pool(layer).shape == (8, 4, TINY.full.latent_row)
        assert pools.index_pool(layer).shape == (8, 4, TINY.index_head_dim)
    assert pools.latent_pool(0).data_ptr() != pools.latent_pool(2).data_ptr()


def test_production_pools_are_zero_and_test_pools_are_nan():
    for poison, expected in ((False, lambda t: t == 0), (True, torch.isnan)):
        pools = pools_of(poison=poison)
        for stack in (pools.latents, pools.index_keys, pools.rings, pools.draft_rings):
            assert expected(stack).all()


def test_a_request_grows_page_by_page():
    pools = pools_of()
    slots = pools.open("a")
    for count, pages in ((0, 0), (1, 1), (3, 1), (1, 2), (7, 3)):
        pools.grow("a", count)
        assert len(slots.pages) == pages
    assert list(slots.pages) == [0, 1, 2]
    assert (slots.length, pools.free_pages) == (12, 5)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_rows_come_back_as_written(page_size):
    pools = pools_of(pages=12, page_size=page_size)
    pools.open("a")
    append(pools, "a", 12, 100.0)
    for layer in (0, 2):
        assert torch.equal(pools.latent_rows("a", layer, range(3, 9))[:, 0], 100.0 + torch.arange(3, 9))
        assert torch.equal(pools.index_key_rows("a", layer, range(12))[:, -1], 100.0 + torch.arange(12))
    assert torch.equal(pools.latent_rows("a", 1, range(5, 12))[:, 0], 100.0 + torch.arange(5, 12))
    for layer, positions in ((0, range(3, 13)), (1, range(4, 12)), (3, range(1))):
        with pytest.raises(CacheError, match="not all held"):
            pools.latent_rows("a", layer, positions)


def test_growing_beyond_the_pool_is_refused_by_name_and_changes_nothing():
    pools = pools_of(pages=3)
    for request, count in (("a", 4), ("b", 3)):
        pools.open(request)
        append(pools, request, count, 1.0)
    before = state(pools)
    with pytest.raises(PoolError) as refusal:
        pools.grow_all({"a": 2, "b": 2})
    assert state(pools) == before
    for part in ("need 2 pages of 4 tokens", "1 of 3 are free", "'a'", "at least 4 pages", "free or truncate"):
        assert part in str(refusal.value)
    pools.free("b")
    pools.grow("a", 2)


def test_growing_past_max_length_is_refused_by_name_and_changes_nothing():
    pools = pools_of(max_length=6)
    pools.open("a")
    append(pools, "a", 5, 1.0)
    before = state(pools)
    with pytest.raises(CacheError, match="'a': 2 tokens behind 5 exceed max_length = 6"):
        pools.grow("a", 2)
    assert state(pools) == before


def test_requests_that_are_not_open_or_open_already_are_refused_by_name():
    pools = pools_of(rings=2)
    pools.open("a")
    pools.open("b")
    with pytest.raises(PoolError, match="'a' is open already"):
        pools.open("a")
    with pytest.raises(PoolError, match="none of 2 is free"):
        pools.open("c")
    with pytest.raises(PoolError, match="none of 2 is free"):
        pools.fork("a", "c")
    pools.free("a")
    for call in (pools.slots, pools.free, lambda name: pools.grow(name, 1), lambda name: pools.truncate(name, 0)):
        with pytest.raises(PoolError, match=r"'a' was freed or never opened; open are \['b'\]"):
            call("a")


@pytest.mark.parametrize("sizes", [{"pages": 0}, {"page_size": 0}, {"rings": 0}, {"max_length": 0}, {"row_lanes": 53}])
def test_pools_that_hold_nothing_are_refused(sizes):
    with pytest.raises(PoolError, match=next(iter(sizes))):
        pools_of(**sizes)


def test_truncation_frees_pages_and_poisons_what_is_taken_back():
    pools = pools_of()
    slots = pools.open("a")
    append(pools, "a", 11, 0.0)
    pools.truncate("a", 9)
    assert (len(slots.pages), pools.free_pages) == (3, 5)
    assert pools.latents[:, slots.pages[2]].isnan().any(-1).tolist() == [[False, True, True, True]] * 2
    ring = pools.rings[0, slots.ring]
    assert sorted(ring[~ring.isnan().any(-1), 0].tolist()) == [4, 5, 6, 7, 8]
    append(pools, "a", 2, 0.0)
    pools.truncate("a", 9)
    pools.truncate("a", 9)
    assert torch.equal(pools.latent_rows("a", 0, range(9))[:, 0], torch.arange(9.0))


def test_truncation_refuses_what_the_ring_has_overwritten_as_the_reference_does():
    """Same lengths, same verdicts, same positions in the message; nothing changes."""
    pools, reference = pools_of(), SlidingCache(5, 7)
    pools.open("a")
    append(pools, "a", 20, 0.0)
    reference.append(torch.zeros(20, 1), torch.zeros(20, 1))
    before = state(pools)
    for length in range(16, -1, -1):
        with pytest.raises(CacheError) as ours:
            pools.truncate("a", length)
        with pytest.raises(CacheError) as theirs:
            reference.truncate(length)
        assert str(ours.value).partition("cannot")[2] == str(theirs.value).partition("cannot")[2]
    assert state(pools) == before
    pools.truncate("a", 18)
    append(pools, "a", 1, 0.0)
    with pytest.raises(CacheError, match="below 13 are overwritten"):
        pools.truncate("a", 16)


@pytest.mark.parametrize("length", [-1, 4])
def test_a_length_that_the_request_never_had_is_refused(length):
    pools = pools_of()
    pools.open("a")
    append(pools, "a", 3, 0.0)
    with pytest.raises(CacheError, match=f"'a' has 3 tokens and cannot be truncated to {length}"):
        pools.truncate("a", length)


def test_drafts_run_ahead_of_the_tokens_by_max_draft_tokens_and_are_taken_back():
    pools = pools_of()
    slots = pools.open("a")
    append(pools, "a", 6, 0.0)
    with pytest.raises(CacheError, match="8 rows behind 0 of the draft layer exceed 7"):
        pools.grow_draft("a", 8)
    pools.grow_draft("a", 7)
    pools.truncate_draft("a", 5)
    pools.truncate("a", 4)
    assert (slots.length, slots.draft_length) == (4, 3)
    with pytest.raises(CacheError, match="'a' has 3 draft rows, not 4"):
        pools.truncate_draft("a", 4)


def test_c19_pages_given_back_leave_the_request_and_hold_poison():
    """Request a gives pages back, b is admitted into them; neither names a page of the other, and both keep theirs."""
    pools = pools_of(pages=8, page_size=2, rings=2)
    pools.open("a")
    append(pools, "a", 16, 100.0)
    pools.truncate("a", 14)
    given_back = set(range(8)) - set(pools.slots("a").pages)
    pools.open("b")
    pools.grow("b", 2)
    assert set(pools.slots("b").pages) == given_back
    assert pools.latents[:, list(given_back)].isnan().all()
    write(pools, "b", 0, 900.0)
    assert torch.equal(pools.latent_rows("a", 2, range(14))[:, 0], 100.0 + torch.arange(14))
    pools.free("a")
    assert pools.latents[:, [page for page in range(8) if page not in given_back]].isnan().all()
    assert torch.equal(pools.latent_rows("b", 2, range(2))[:, 0], 900.0 + torch.arange(2))


def test_a_freed_ring_holds_poison():
    pools = pools_of()
    ring = pools.open("a").ring
    append(pools, "a", 9, 0.0)
    pools.free("a")
    assert pools.rings[:, ring].isnan().all()


def test_a_fork_shares_pages_until_one_appends():
    pools = pools_of()
    slots = pools.open("a")
    append(pools, "a", 6, 0.0)
    pools.fork("a", "b")
    forked = pools.slots("b")
    assert list(forked.pages) == list(slots.pages)
    assert (pools.free_pages, forked.ring != slots.ring) == (6, True)
    append(pools, "b", 1, 500.0)
    assert forked.pages[0] == slots.pages[0]
    assert forked.pages[1] != slots.pages[1]
    append(pools, "a", 1, 700.0)
    assert pools.free_pages == 5
    for request, last in (("a", 706.0), ("b", 506.0)):
        for layer in range(3):
            expected = [*map(float, range(2, 6)), last]
            assert pools.latent_rows(request, layer, range(2, 7))[:, 0].tolist() == expected
    pools.free("a")
    assert pools.latent_rows("b", 0, range(7))[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 506]
    pools.free("b")
    assert pools.free_pages == 8
    assert pools.latents.isnan().all()


def test_a_fork_at_the_end_of_a_page_copies_nothing():
    pools = pools_of()
    pools.open("a")
    append(pools, "a", 8, 0.0)
    pools.fork("a", "b")
    append(pools, "b", 1, 0.0)
    assert pools.free_pages == 5


def test_truncating_one_fork_leaves_the_rows_of_the_other():
    pools = pools_of(max_draft_tokens=4)
    pools.open("a")
    append(pools, "a", 7, 0.0)
    pools.fork("a", "b")
    pools.truncate("a", 5)
    append(pools, "a", 1, 300.0)
    assert pools.latent_rows("b", 0, range(7))[:, 0].tolist() == [*map(float, range(7))]
    assert pools.latent_rows("b", 1, range(7))[:, 0].tolist() == [*map(float, range(7))]
    assert pools.latent_rows("a", 0, range(6))[:, 0].tolist() == [0, 1, 2, 3, 4, 305]


def test_a_fork_counts_the_page_that_it_will_copy():
    pools = pools_of(pages=2)
    pools.open("a")
    append(pools, "a", 5, 0.0)
    pools.fork("a", "b")
    before = state(pools)
    with pytest.raises(PoolError, match="need 1 pages"):
        pools.grow("b", 1)
    assert state(pools) == before


def test_c30_no_two_pools_share_numbers():
    """A number of the wrong kind lies within every pool, and there nothing is ever written."""
    pools = pools_of(disjoint_numbers=True)
    for request in "ab":
        pools.open(request)
        append(pools, request, 13, 0.0)
    slots = [pools.slots(request) for request in "ab"]
    pages = {page for each in slots for page in each.pages}
    rings, drafts = {each.ring for each in slots}, {each.draft_ring for each in slots}
    assert len(pages | rings | drafts) == len(pages) + len(rings) + len(drafts)
    for stack, wrong in ((pools.latents, rings | drafts), (pools.rings, pages | drafts), (pools.draft_rings, pages)):
        assert stack[:, sorted(wrong)].isnan().all()
    pools.free("a")
    pools.open("c")
    assert pools.slots("c").ring in rings


def test_c34_a_prefix_is_not_reused_and_the_summary_says_so():
    pools = pools_of()
    for request in "ab":
        pools.open(request)
        append(pools, request, 8, 0.0)
    assert not set(pools.slots("a").pages) & set(pools.slots("b").pages)
    assert "prefix reuse: none" in pools.summary()


@pytest.mark.parametrize("length", [0, 3, 11, 20])
def test_c35_a_request_moves_between_pools_of_other_pages_and_padding(length):
    """Logical rows only: the pad lanes keep their poison on both sides, and all other lanes of the rows are filled."""
    source = pools_of(row_lanes=60)
    source.open("other")
    source.open("a")
    append(source, "other", 5, 900.0)
    append(source, "a", length, 100.0)
    exported = export_request(source, "a")
    target = pools_of(pages=30, page_size=3, row_lanes=55)
    target.open("first")
    append(target, "first", 4, 700.0)
    import_request(target, "moved", exported)
    slots = target.slots("moved")
    assert (slots.length, slots.oldest) == (length, source.slots("a").oldest)
    for layer in range(3):
        first = slots.oldest if layer == 1 else 0
        rows = target.latent_rows("moved", layer, range(first, length))
        assert torch.equal(rows, source.latent_rows("a", layer, range(first, length)))
        assert not rows.isnan().any()
    for pools in (source, target):
        for stack in (pools.latents, pools.rings, pools.draft_rings):
            lanes = stack.stride(2)
            physical = stack.as_strided((*stack.shape[:3], lanes), stack.stride())
            assert physical[..., stack.shape[3] :].isnan().all()
    source.truncate("other", 4)
    assert target.latent_rows("first", 0, range(4))[:, 0].tolist() == [700, 701, 702, 703]


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_model_of_one_kind_of_layer_exports_what_it_has(kind):
    config = dataclasses.replace(small(), layer_types=(kind,) * 3)
    source, target = pools_of(config), pools_of(config, page_size=1, pages=30)
    source.open("a")
    source.grow("a", 9)
    source.latents.fill_(3.0)
    source.rings.fill_(4.0)
    import_request(target, "a", export_request(source, "a"))
    assert (target.latents[:, :9] == 3.0).all()
    assert (target.rings[:, target.slots("a").ring] == 4.0).all()


def test_an_imported_request_cannot_go_back_further_than_the_exported_one():
    source, target = pools_of(), pools_of(max_draft_tokens=6)
    source.open("a")
    append(source, "a", 20, 0.0)
    source.grow_draft("a", 21)
    import_request(target, "a", export_request(source, "a"))
    slots = target.slots("a")
    assert (slots.oldest, slots.draft_oldest) == (13, 12)
    target.truncate("a", 18)
    with pytest.raises(CacheError, match="below 13 are overwritten"):
        target.truncate("a", 16)


def test_imports_that_do_not_fit_are_refused_and_change_nothing():
    source = pools_of()
    source.open("a")
    append(source, "a", 20, 0.0)
    exported = export_request(source, "a")
    for changes, message in (
        ({"pages": 4}, "need 5 pages"),
        ({"max_draft_tokens": 0}, "these rings hold 5 and 5"),
        ({"dtype": torch.bfloat16}, "torch.bfloat16"),
        ({"config": dataclasses.replace(small(), index_head_dim=24)}, "index_key_ZSJ"),
        ({"max_length": 19}, "max_length = 19"),
    ):
        target = pools_of(**changes)
        before = state(target)
        with pytest.raises((PoolError, CacheError), match=message):
            import_request(target, "b", exported)
        assert state(target) == before
