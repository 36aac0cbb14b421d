"""What a request stores, how much of it, and that nothing is read that was not written.

Sizes of the released model come from tensors on the meta device. Source: text_model specification, section 13.
"""

import pytest
import torch
from torch import Tensor
from weights import FLOAT64_BOUND, drawn_ids, error, in_chunks, one_shot, random_model, small

from reference.cache import FullCache, RequestCache, SlidingCache
from reference.config import TextConfig, released, tiny
from reference.errors import CacheError
from reference.session import Session, StepItem

RELEASED = released().text
BFLOAT16_BYTES = 2
WINDOW = 5
NAN = float("nan")


def filled(config: TextConfig, tokens: int, max_draft_tokens: int) -> RequestCache:
    """The cache of a request with `tokens` bfloat16 tokens, without any memory behind it."""
    cache = RequestCache(config, max_draft_tokens)
    for layer, kind in enumerate((*cache.layers, cache.draft)):
        geometry = config.geometry(layer)
        widths = [geometry.kv_lora_rank, geometry.qk_rope_head_dim]
        widths += [config.index_head_dim] if isinstance(kind, FullCache) else []
        kind.append(*(torch.empty(tokens, width, dtype=torch.bfloat16, device="meta") for width in widths))
    return cache


def state(session: Session, request: str) -> list[Tensor | int]:
    """Everything a request consists of, as a flat list."""
    record = session.request(request)
    flat: list[Tensor | int] = [*record.token_ids, record.hidden_TD]
    for layer in (*record.cache.layers, record.cache.draft):
        flat += [layer.length, *layer.tensors().values()]
    return flat


def is_same(before: list[Tensor | int], after: list[Tensor | int]) -> bool:
    """Byte for byte, NaN equal to NaN."""
    return len(before) == len(after) and all(
        torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)) if isinstance(a, Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("tokens", [1024, 32768, 524288])
def test_c17_sliding_layers_stop_growing_and_full_layers_pay_for_every_token(tokens):
    drafts = 3
    cache = filled(RELEASED, tokens, drafts)
    full = [layer for layer in cache.layers if isinstance(layer, FullCache)]
    sliding = [layer for layer in cache.layers if isinstance(layer, SlidingCache)]
    assert (len(full), len(sliding)) == (13, 33)
    assert sum(layer.bytes for layer in full) == tokens * 13 * (576 + 128) * BFLOAT16_BYTES
    assert sum(layer.bytes for layer in sliding) == 33 * (513 + drafts) * 1088 * BFLOAT16_BYTES
    assert cache.draft.bytes == (513 + 2 * drafts) * 1088 * BFLOAT16_BYTES
    assert cache.bytes == sum(layer.bytes for layer in (*full, *sliding, cache.draft))


def test_c17_sizes_of_the_specification_at_524288_tokens():
    cache = filled(RELEASED, 524288, max_draft_tokens=0)
    full = [layer for layer in cache.layers if isinstance(layer, FullCache)]
    latents = sum(layer.bytes - layer.tensors()["index_key"].nbytes for layer in full)
    sliding = sum(layer.bytes for layer in cache.layers if isinstance(layer, SlidingCache))
    assert latents / 2**30 == 7.3125
    assert round(sliding / 2**20, 1) == 35.1


def test_rows_of_a_real_run_have_the_widths_of_the_config():
    config = tiny().text
    session = Session(random_model(config, dtype=torch.bfloat16), max_draft_tokens=2)
    with torch.no_grad():
        session.step([StepItem("a", drawn_ids(config, 20), "prefill")])
    cache = session.request("a").cache
    for layer, kind in enumerate(cache.layers):
        rows = 20 if config.is_full(layer) else config.sliding_window_size + 2
        widths = {"kv_latent": config.geometry(layer).kv_lora_rank, "k_rope": config.geometry(layer).qk_rope_head_dim}
        if config.is_full(layer):
            widths["index_key"] = config.index_head_dim
        assert {name: tuple(tensor.shape) for name, tensor in kind.tensors().items()} == {
            name: (rows, width) for name, width in widths.items()
        }
        assert all(tensor.dtype == torch.bfloat16 for tensor in kind.tensors().values())


@pytest.mark.parametrize(("max_length", "drafts", "rows"), [(4, 0, 4), (None, 0, 5), (None, 3, 8), (6, 3, 6)])
def test_c18_a_ring_has_as_many_rows_as_a_request_can_need(max_length, drafts, rows):
    cache = RequestCache(small(sliding_window_size=WINDOW), drafts, max_length)
    assert [layer.size for layer in cache.layers if isinstance(layer, SlidingCache)] == [rows]


def test_c18_the_draft_ring_is_bounded_by_the_request_and_the_drafts_ahead_of_it():
    assert RequestCache(small(sliding_window_size=WINDOW), 3, max_length=4).draft.size <= 4 + 3


def test_c18_a_request_shorter_than_the_window_equals_an_unbounded_one():
    """Owes bytes."""
    model = random_model(small(sliding_window_size=WINDOW))
    ids = drawn_ids(model.config, 4)
    bounded, unbounded = Session(model, max_length=4), Session(model)
    with torch.no_grad():
        for token_id in ids:
            item = StepItem("a", (token_id,), "decode")
            assert torch.equal(bounded.step([item])["a"], unbounded.step([item])["a"])


def test_c18_a_cache_refuses_more_tokens_than_its_max_length():
    model = random_model(small(sliding_window_size=WINDOW))
    cache = model.new_cache(max_length=3)
    ids = torch.tensor(drawn_ids(model.config, 4))
    with torch.no_grad():
        model(ids[:3], cache)
        with pytest.raises(CacheError, match="3"):
            model(ids[3:], cache)


@pytest.mark.parametrize("start", [0, 3, 9])
def test_c18_a_chunk_longer_than_the_ring_is_exact(start):
    """Owes a bound. Older keys are read before the chunk overwrites them."""
    model = random_model(small(sliding_window_size=WINDOW))
    ids = drawn_ids(model.config, start + 12 + 2)
    split = [length for length in (start, 12, 2) if length]
    assert error(in_chunks(model, ids, split), one_shot(model, ids)) <= FLOAT64_BOUND


def test_c18_drafts_in_flight_fit_into_the_ring():
    """Owes bytes. Three drafts at every length: verified, taken back, and the request as if they had never been."""
    model = random_model(small(sliding_window_size=WINDOW))
    drafting, plain = Session(model, max_draft_tokens=3), Session(model, max_draft_tokens=3)
    with torch.no_grad():
        for length, token_id in enumerate(drawn_ids(model.config, 16)):
            if length:
                drafting.step([StepItem("a", (9, 8, 7), "verify")])
                drafting.truncate("a", length)
            item = StepItem("a", (token_id,), "decode")
            assert torch.equal(drafting.step([item])["a"], plain.step([item])["a"])


def poison(layer: SlidingCache, first_needed: int) -> int:
    """Put NaN into every stored row but those of positions `first_needed` to the newest. Returns how many."""
    needed = {position % layer.size for position in range(max(0, first_needed), layer.length)}
    rows = torch.tensor([row for row in range(layer.size) if row not in needed], dtype=torch.long)
    for name, ring in layer.tensors().items():
        layer.tensors()[name] = ring.index_fill(0, rows, NAN)
    return len(rows)


def test_rows_outside_of_the_window_are_never_read():
    """Owes bytes: every ring row that the next token cannot see holds NaN, and no output changes."""
    model = random_model(small(sliding_window_size=WINDOW))
    poisoned, clean = Session(model, max_draft_tokens=3), Session(model, max_draft_tokens=3)
    count = 0
    with torch.no_grad():
        for step, token_id in enumerate(drawn_ids(model.config, 20)):
            chunk = (token_id,) * (1 + step % 3)
            rows = poisoned.step([StepItem("a", chunk, "prefill")])["a"]
            assert torch.equal(rows, clean.step([StepItem("a", chunk, "prefill")])["a"])
            assert torch.equal(poisoned.draft("a", token_id, 3), clean.draft("a", token_id, 3))
            cache = poisoned.request("a").cache
            for layer in (*cache.layers, cache.draft):
                if isinstance(layer, SlidingCache):
                    count += poison(layer, layer.length - (WINDOW - 1))
    assert count > 0


def test_rows_taken_back_are_never_read():
    """Owes bytes: after a truncation the rows of the tokens taken back hold NaN."""
    model = random_model(small(sliding_window_size=WINDOW))
    poisoned, clean = Session(model, max_draft_tokens=3), Session(model, max_draft_tokens=3)
    with torch.no_grad():
        for session in (poisoned, clean):
            session.step([StepItem("a", drawn_ids(model.config, 13), "prefill")])
            session.truncate("a", 10)
        for layer in poisoned.request("a").cache.layers:
            if isinstance(layer, SlidingCache):
                assert poison(layer, layer.length - (WINDOW - 1)) >= 3
        item = StepItem("a", (1, 2, 3), "prefill")
        assert torch.equal(poisoned.step([item])["a"], clean.step([item])["a"])


def test_rows_never_written_hold_nan():
    model = random_model(small(sliding_window_size=WINDOW))
    session = Session(model, max_draft_tokens=3)
    with torch.no_grad():
        session.step([StepItem("a", (1, 2), "prefill")])
    (ring,) = [layer for layer in session.request("a").cache.layers if isinstance(layer, SlidingCache)]
    for tensor in ring.tensors().values():
        assert tensor.isnan().all(-1).tolist() == [False] * 2 + [True] * 6


def test_a_fork_shares_storage_until_one_of_the_two_moves_on():
    """Owes bytes against two requests that never met, after the ring has wrapped."""
    model = random_model(small(sliding_window_size=WINDOW))
    prompt, session = drawn_ids(model.config, 11), Session(model)
    alone = Session(model)
    with torch.no_grad():
        session.step([StepItem("a", prompt, "prefill")])
        session.fork("a", "b")
        for ours, theirs in zip(*(session.request(name).cache.layers for name in "ab"), strict=True):
            for name, tensor in ours.tensors().items():
                assert tensor.data_ptr() == theirs.tensors()[name].data_ptr()
        untouched = state(session, "b")
        for name in "ab":
            alone.step([StepItem(name, prompt, "prefill")])
        ours, expected = (each.step([StepItem("a", (5,), "decode")])["a"] for each in (session, alone))
        assert torch.equal(ours, expected)
        assert is_same(untouched, state(session, "b"))
        session.truncate("a", 10)
        session.free("a")
        ours, expected = (each.step([StepItem("b", (7, 7), "verify")])["b"] for each in (session, alone))
        assert torch.equal(ours, expected)
        assert torch.equal(session.draft("b", 3, 2), alone.draft("b", 3, 2))


def test_going_back_too_far_is_refused_by_name_and_changes_nothing():
    """The message gives both lengths, what is gone, and how far back the ring goes. Full layers stay as they were."""
    model = random_model(small(sliding_window_size=WINDOW))
    session, plain = Session(model, max_draft_tokens=1), Session(model, max_draft_tokens=1)
    with torch.no_grad():
        for each in (session, plain):
            each.step([StepItem("a", drawn_ids(model.config, 20), "prefill")])
            each.draft("a", 4, 1)
        before = state(session, "a")
        with pytest.raises(CacheError) as refusal:
            session.truncate("a", 12)
        assert is_same(before, state(session, "a"))
        for part in ("from 20 to 12", "starts at position 8", "below 14", "ring of 6 rows", "at most 2"):
            assert part in str(refusal.value)
        session.truncate("a", 19)
        plain.truncate("a", 19)
        item = StepItem("a", (1,), "decode")
        assert torch.equal(session.step([item])["a"], plain.step([item])["a"])


def test_a_ring_remembers_what_was_overwritten_before_it_went_back():
    """Twenty tokens in a ring of 8 overwrite positions 0 to 11; going back and on again brings none of them back."""
    model = random_model(small(sliding_window_size=WINDOW))
    session = Session(model, max_draft_tokens=3)
    with torch.no_grad():
        session.step([StepItem("a", drawn_ids(model.config, 20), "prefill")])
        session.truncate("a", 16)
        session.step([StepItem("a", (1,), "decode")])
    with pytest.raises(CacheError, match="starts at position 11, but positions below 12 are overwritten"):
        session.truncate("a", 15)
    session.truncate("a", 16)


@pytest.mark.parametrize("length", [-1, 4])
def test_a_length_that_the_request_never_had_is_refused_by_name(length):
    model = random_model(small())
    session = Session(model)
    with torch.no_grad():
        session.step([StepItem("a", (1, 2, 3), "prefill")])
    before = state(session, "a")
    with pytest.raises(CacheError, match=rf"'a' has 3 tokens and cannot be truncated to {length}"):
        session.truncate("a", length)
    assert is_same(before, state(session, "a"))


def test_a_request_emptied_and_filled_again_equals_a_new_one():
    """Owes bytes."""
    model = random_model(small(sliding_window_size=WINDOW))
    session, ids = Session(model, max_draft_tokens=3), drawn_ids(model.config, 9)
    with torch.no_grad():
        session.step([StepItem("a", (1, 2, 3), "prefill")])
        session.truncate("a", 0)
        rows = session.step([StepItem("a", ids, "prefill")])["a"]
    assert torch.equal(rows, one_shot(model, ids))
