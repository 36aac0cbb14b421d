"""C13: one full layer at 32,768 tokens within a stated memory budget, and the same result for every budget.

The small runs cover the equality; the long one, marked slow, runs in a process of its own and measures its peak
memory. Blocks and head groups are as small as one query and one head when the budget is smaller than either needs.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import text_configs
from weights import FLOAT64_BOUND, drawn_ids, error, one_layer, one_shot, probes, random_model, small

from reference.config import MlaGeometry
from reference.layers.indexer import mask_of
from reference.numerics import Numerics
from reference.probe import Recorder, listening

GIB = 2**30
LONG = 32768
WORKSPACE = GIB
# C13 allows 8 GiB beyond what the process held before.
LIMIT = 8 * GIB


def long_layer_model(workspace_bytes: int):
    """One full layer with the released head count of the indexer and top-k; every other width is small."""
    config = one_layer(
        "full",
        hidden_size=32,
        vocab_size=64,
        intermediate_size=16,
        full=MlaGeometry(2, 8, 8, 4, 2, 4, 8.0e7, "headwise"),
        index_n_heads=64,
        index_head_dim=4,
        index_topk=2048,
        num_nextn_predict_layers=0,
        max_position_embeddings=LONG,
    )
    return random_model(config, dtype=torch.float32, workspace_bytes=workspace_bytes)


@given(
    config=text_configs(), length=st.integers(1, 30), workspace_bytes=st.sampled_from([1, 500, 4_000, 20_000, 100_000])
)
def test_c13_every_workspace_gives_the_same(config, length, workspace_bytes):
    """Owes a bound."""
    ids = drawn_ids(config, length)
    expected = one_shot(random_model(config), ids)
    assert error(one_shot(random_model(config, workspace_bytes=workspace_bytes), ids), expected) <= FLOAT64_BOUND


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("workspace_bytes", [1, 3_000, 10_000, 50_000])
def test_c13_selections_and_values_are_the_same_in_blocks_of_any_size(workspace_bytes, form):
    """Selections are exact and come with the positions of their block; the attention core owes a bound."""
    config, numerics = small(index_topk=6), Numerics(attention_form=form)
    ids = drawn_ids(config, 40)
    expected = probes(random_model(config, numerics=numerics), ids)
    recorder = Recorder(("layers.0.attn.index.selected", "layers.0.attn.core"))
    with listening(recorder):
        one_shot(random_model(config, numerics=numerics, workspace_bytes=workspace_bytes), ids)
    selected_TK = torch.cat(recorder.values("layers.0.attn.index.selected"))
    assert torch.equal(selected_TK, expected["layers.0.attn.index.selected"])
    (core_THV,) = recorder.values("layers.0.attn.core")
    assert error(core_THV, expected["layers.0.attn.core"]) <= FLOAT64_BOUND
    blocks = [o for o in recorder.observations if o.name.endswith("selected")]
    assert workspace_bytes > 10_000 or len(blocks) > 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_c13_a_full_layer_at_32768_tokens_stays_below_eight_gib():
    """Rows at the end agree with a run of their own that sees the same cache in blocks of another size."""
    source = f"import sys; sys.path[:0] = {sys.path!r}; import test_long_context; test_long_context.run_long_layer()"
    done = subprocess.run([sys.executable, "-c", source], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    print(f"peak above the model: {measured['extra_bytes'] / GIB:.2f} GiB in {measured['seconds']:.0f} s")
    assert measured["selected"] == 2048
    assert measured["sets_equal"]
    # Both runs are float32; the sums of 2048 terms differ in their order only.
    assert measured["error"] <= 1e-4
    assert measured["extra_bytes"] < LIMIT


def run_long_layer() -> None:
    """Print, as JSON, what the long run took and how its last rows compare with a chunk of their own."""
    import resource
    import time

    torch.set_num_threads(1)
    ids = torch.tensor(drawn_ids(long_layer_model(WORKSPACE).config, LONG))
    before, start = _peak_bytes(resource), time.monotonic()
    chunk = 8
    whole, chunked = Recorder(("layers.0.attn.index.selected",)), Recorder(("layers.0.attn.index.selected",))
    with torch.no_grad():
        model = long_layer_model(WORKSPACE)
        cache = model.new_cache()
        with listening(whole):
            rows = model(ids, cache)[-chunk:]
        extra, seconds = _peak_bytes(resource) - before, time.monotonic() - start
        other = long_layer_model(WORKSPACE // 16)
        cache.truncate(LONG - chunk)
        with listening(chunked):
            expected = other(ids[-chunk:], cache)
    last = whole.observations[-1].value[-chunk:]
    report = {
        "extra_bytes": extra,
        "seconds": seconds,
        "selected": int((last[-1] >= 0).sum()),
        "sets_equal": torch.equal(mask_of(last, LONG), mask_of(chunked.observations[-1].value[-chunk:], LONG)),
        "error": error(rows, expected),
    }
    print(json.dumps(report))


def _peak_bytes(resource) -> int:
    """Largest resident size so far; Linux reports it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
