"""Mappings: a file that says how foreign names, layouts and rows become the schema's, and one that is found (C67)."""

import json
from pathlib import Path

import pytest
import torch
from dumps import CONFIG, edited, recorded, same, split_lanes
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parity.apply_mapping import Mapped, apply_mapping
from parity.foreign.dump import ForeignDump, ForeignTensor, from_trace
from parity.manifest import DumpError
from parity.mapping import Mapping, mapping_json, read_mapping, ready_mappings
from parity.propose import propose_mapping
from parity.trace import InMemory, Trace
from parity.transforms import Context
from parity.workload import Workload

TEXT = CONFIG.text
ROPE = TEXT.full.qk_rope_head_dim


def mapping(*rules: dict, **fields: object) -> Mapping:
    document = {"mapping_version": 1, "title": "test", "rules": list(rules), **fields}
    return Mapping.model_validate_json(json.dumps(document))


def rule(source: str | list[str], to: str, *transforms: dict, **fields: object) -> dict:
    return {"from": source, "to": to, "transforms": list(transforms), **fields}


def forward(number: int, **tensors: Tensor) -> list[ForeignTensor]:
    """What an engine shows of one forward pass; a double underscore in a name stands for a dot."""
    return [
        ForeignTensor(name.replace("__", "."), number, tuple(value.shape), value.dtype, InMemory(value))
        for name, value in tensors.items()
    ]


def applied(tensors: list[ForeignTensor], how: Mapping, workload: Workload | None = None) -> Mapped:
    return apply_mapping(how, ForeignDump("engine", "", tuple(tensors)), TEXT, workload)


def transformed(x: Tensor, transform: dict, sizes: dict | None = None, positions: tuple[int, ...] = ()) -> Tensor:
    how = mapping(rule("x", "embeddings", transform)).rules[0].transforms[0]
    return how.apply(x, Context(sizes or {}, positions))


# Transforms


def test_lanes_go_back_to_pairs() -> None:
    x = torch.arange(20.0).reshape(2, 10)
    whole = {"op": "deinterleaved_to_interleaved"}
    assert torch.equal(transformed(split_lanes(x), whole), x)
    assert torch.equal(transformed(split_lanes(x, 6), {**whole, "stop": "R"}, {"R": 6}), x)
    tail = torch.cat((x[:, :4], split_lanes(x[:, 4:])), dim=-1)
    assert torch.equal(transformed(tail, {**whole, "start": "N", "stop": "N+R"}, {"N": 4, "R": 6}), x)
    with pytest.raises(DumpError, match="even number"):
        transformed(x, {**whole, "stop": 3})
    with pytest.raises(DumpError, match="the last dim has 10"):
        transformed(x, {**whole, "stop": 12})
    with pytest.raises(DumpError, match="R is not known here"):
        transformed(x, {**whole, "stop": "R"})


def test_rearrange() -> None:
    x = torch.randn(1, 3, 5, 2)
    assert torch.equal(transformed(x, {"op": "rearrange", "dims": "1 H T N -> T H N"}), x[0].transpose(0, 1))
    assert torch.equal(
        transformed(x, {"op": "rearrange", "dims": "1 H T N -> T (H N)"}), x[0].transpose(0, 1).flatten(1)
    )
    y = torch.randn(5, 6)
    split = {"op": "rearrange", "dims": "T (H N) -> T H N"}
    assert torch.equal(transformed(y, split, {"H": 3}), y.reshape(5, 3, 2))
    assert torch.equal(transformed(y, {**split, "sizes": {"H": 2}}, {"H": 3}), y.reshape(5, 2, 3))
    assert torch.equal(transformed(y, {"op": "rearrange", "dims": "T D -> T 1 D"}), y[:, None])
    for wrong, message in (({"H": 4}, "cannot split a dim of 6"), ({}, "at most one size may be left open")):
        with pytest.raises(DumpError, match=message):
            transformed(y, split, wrong)
    with pytest.raises(DumpError, match="found 2 dims"):
        transformed(y, {"op": "rearrange", "dims": "1 T D -> T D"})
    with pytest.raises(DumpError, match="where 1 is expected"):
        transformed(y, {"op": "rearrange", "dims": "1 D -> D"})


def test_index_lists_lose_what_is_not_visible() -> None:
    found = torch.tensor([[3, 0, 1], [9, 1, 0], [2, -1, 1]], dtype=torch.int32)
    expected = torch.tensor([[0, -1, -1], [0, 1, -1], [1, 2, -1]])
    assert torch.equal(transformed(found, {"op": "drop_future"}, positions=(0, 1, 2)), expected)
    with pytest.raises(DumpError, match="a row for each"):
        transformed(found, {"op": "drop_future"}, positions=(0, 1))


def test_scale_sigmoid_rows_and_lanes() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(transformed(x, {"op": "scale", "by": 2.0, "size": "I", "power": -0.5}, {"I": 16}), x * 0.5)
    assert torch.equal(transformed(x, {"op": "sigmoid"}), x.sigmoid())
    assert transformed(x.bfloat16(), {"op": "sigmoid"}).dtype == torch.bfloat16
    assert torch.equal(transformed(x, {"op": "lanes", "start": "N"}, {"N": 2}), x[:, 2:])
    assert torch.equal(transformed(x, {"op": "keep_rows", "side": "last"}, positions=(7, 8)), x[2:])
    assert torch.equal(transformed(x, {"op": "keep_rows", "side": "first"}, positions=(7, 8)), x[:2])
    with pytest.raises(DumpError, match="floating dtype"):
        transformed(x.long(), {"op": "scale", "by": 2.0})


# Names


def test_two_residual_streams_shift_and_fallback() -> None:
    hidden, residual, first = torch.randn(3, 2, 96).unbind()
    tensors = forward(0, block__1__hidden=first, block__2__hidden=hidden, block__2__residual=residual, other=first)
    how = mapping(
        rule(["block.{i}.hidden", "block.{i}.residual"], "layers.{i}.input"),
        rule("block.{i}.hidden", "layers.{i}.input", layers=[1]),
        layer_shift=-1,
        strip=["model."],
    )
    mapped = applied(tensors, how)
    assert mapped.trace.names() == ["layers.0.input", "layers.1.input"]
    assert torch.equal(mapped.trace.table("layers.0.input", "a").values, first)
    assert torch.equal(mapped.trace.table("layers.1.input", "a").values, hidden + residual)
    assert mapped.unmapped == ("other",)


def test_what_cannot_be_translated_is_listed_with_its_reason() -> None:
    how = mapping(
        rule("x", "embeddings"), cannot=[{"from": "layers.{i}.kv_b_proj", "because": "expanded keys and values"}]
    )
    mapped = applied(forward(0, x=torch.zeros(2, 96), layers__3__kv_b_proj=torch.zeros(2, 9)), how)
    assert mapped.refused == (("layers.3.kv_b_proj", "expanded keys and values"),)
    assert mapped.unmapped == ()


@pytest.mark.parametrize(
    ("tensors", "how", "message"),
    [
        (
            forward(0, a__1__x=torch.zeros(2, 96), b__1__x=torch.zeros(2, 96)),
            mapping(rule("*.{i}.x", "layers.{i}.input")),
            r"both a\.1\.x and b\.1\.x fit",
        ),
        (forward(0, x=torch.zeros(2, 95)), mapping(rule("x", "embeddings")), r"\[2, 95\] after its transforms.*D=96"),
        (forward(0, x=torch.zeros(2, 96).long()), mapping(rule("x", "embeddings")), "expected a floating dtype"),
        (forward(0, x=torch.zeros(6)), mapping(rule("x", "embeddings")), "at least one dim behind"),
        (
            forward(0, x=torch.zeros(2, 96), y=torch.zeros(3, 96)),
            mapping(rule(["x", "y"], "embeddings")),
            "expected one shape",
        ),
        (
            [*forward(0, x=torch.zeros(2, 96)), *forward(0, x=torch.zeros(2, 96))],
            mapping(rule("x", "embeddings")),
            "twice in forward pass 0",
        ),
    ],
    ids=["ambiguous", "size", "dtype", "dims", "sum", "twice"],
)
def test_what_does_not_fit_is_refused_before_a_value_is_read(
    tensors: list[ForeignTensor], how: Mapping, message: str
) -> None:
    with pytest.raises(DumpError, match=message):
        applied(tensors, how)


# Rows


def rows(trace: Trace) -> dict[str, list[float]]:
    """First lane of the embeddings of every request."""
    return {request: trace.table("embeddings", request).values[:, 0].tolist() for request in "ab"}


def lanes(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 96)


PACKED = {"a": [0.0, 1.0, 2.0, 3.0], "b": [10.0, 11.0, 12.0]}


@pytest.mark.parametrize(
    ("packing", "first", "second"),
    [
        ({"lengths": [[3, 2], [1, 1]]}, lanes(0, 1, 2, 10, 11), lanes(3, 12)),
        ({"cu_seqlens": "cu"}, lanes(0, 1, 2, 10, 11), lanes(3, 12)),
        ({"cu_seqlens": "cu", "layout": "packed_padded"}, lanes(0, 1, 2, 10, 11, -1, -1), lanes(3, 12, -1)),
        ({"cu_seqlens": "cu", "layout": "padded_right"}, lanes(0, 1, 2, -1, 10, 11, -1, -1), lanes(3, 12)),
        ({"cu_seqlens": "cu", "layout": "padded_left"}, lanes(-1, 0, 1, 2, -1, -1, 10, 11), lanes(3, 12)),
        ({}, lanes(0, 1, 2, 10, 11), lanes(3, 12)),
    ],
    ids=["lengths", "cu_seqlens", "packed_padded", "padded_right", "padded_left", "workload"],
)
def test_packed_rows_are_split(packing: dict, first: Tensor, second: Tensor) -> None:
    tensors = [
        *forward(0, x=first, cu=torch.tensor([0, 3, 5])),
        *forward(1, x=second, cu=torch.tensor([0, 1, 2])),
    ]
    how = mapping(rule("x", "embeddings"), packing=packing)
    mapped = applied(tensors, how, None if packing else Workload.parse("p:a3+b2 d:a+b"))
    assert rows(mapped.trace) == PACKED
    assert mapped.trace.keys("embeddings", "a") == ((0, 0), (1, 0), (2, 0), (3, 0))
    assert mapped.unmapped == (() if packing.get("cu_seqlens") else ("cu",))


def test_one_request_continues_and_positions_may_be_given() -> None:
    tensors = [
        *forward(0, x=torch.zeros(3, 96), at=torch.tensor([0, 1, 2])),
        *forward(1, x=torch.zeros(1, 96), at=torch.tensor([7])),
    ]
    assert applied(tensors, mapping(rule("x", "embeddings"))).trace.keys("embeddings", "a")[-1] == (3, 0)
    given_positions = mapping(rule("x", "embeddings"), packing={"positions": "at"})
    assert applied(tensors, given_positions).trace.keys("embeddings", "a")[-1] == (7, 0)


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ({"lengths": [[2]]}, "packed_padded"),
        ({"lengths": [[2], [1]]}, "did the run stop half-way"),
        ({"lengths": [[4]]}, "3 rows, expected 4 for 4 of a"),
        ({"lengths": [[1, 1]], "layout": "padded_right"}, "expected 2 times at least 1"),
        ({"lengths": [[2, 1]], "requests": ["only"]}, "2 requests"),
        ({"cu_seqlens": "cu"}, "has no tensor 'cu'"),
        ({"cu_seqlens": "x"}, "expected a list of integers"),
        ({"cu_seqlens": "down"}, "ascending"),
        ({"positions": "down"}, "positions: found"),
    ],
)
def test_rows_that_do_not_add_up_are_refused(packing: dict, message: str) -> None:
    tensors = forward(0, x=torch.zeros(3, 96), down=torch.tensor([3, 1]))
    with pytest.raises(DumpError, match=message):
        applied(tensors, mapping(rule("x", "embeddings"), packing=packing))


def test_a_workload_of_other_length_is_refused() -> None:
    with pytest.raises(DumpError, match="has 2 steps; did the run stop half-way"):
        applied(forward(0, x=torch.zeros(3, 96)), mapping(rule("x", "embeddings")), Workload.parse("p:a3 d:a"))


# Files


def test_ready_mappings_are_valid_and_survive_writing(tmp_path: Path) -> None:
    assert ready_mappings() == ["llama_cpp", "msprobe", "sglang", "transformers"]
    for name in ready_mappings():
        how = read_mapping(name)
        (tmp_path / name).write_text(mapping_json(how))
        assert read_mapping(tmp_path / name) == how


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mapping_version": 2}, "mapping_version"),
        ({"rules": [rule("x", "layers.{i}.nothing")]}, "name of the schema"),
        ({"rules": [rule("{i}.{i}", "layers.{i}.input")]}, "once"),
        ({"rules": [rule("x", "embeddings", {"op": "run", "code": "x"})]}, "does not match any of the expected tags"),
        ({"rules": [rule("x", "embeddings", {"op": "rearrange", "dims": "T D -> T"})]}, "each letter once"),
        ({"rules": [rule("x", "embeddings", {"op": "rearrange", "dims": "T D"})]}, "on both sides"),
        ({"rules": [rule("x", "embeddings", {"op": "lanes", "stop": "N*2"})]}, "pattern"),
        ({"surprise": 1}, "not permitted"),
    ],
)
def test_a_wrong_mapping_is_refused_with_what_would_be_right(tmp_path: Path, change: dict, message: str) -> None:
    document = {"mapping_version": 1, "title": "x", "rules": [], **change}
    (tmp_path / "m.json").write_text(json.dumps(document))
    with pytest.raises(DumpError) as caught:
        read_mapping(tmp_path / "m.json")
    assert message in str(caught.value)


def test_a_missing_mapping_names_the_ready_ones() -> None:
    with pytest.raises(DumpError, match="ready mappings are llama_cpp, msprobe"):
        read_mapping("nothing")


SIZES = st.sampled_from([0, 1, 2, 5, 96, "N", "N+R", "Z", 2**30])
TRANSFORMS = st.one_of(
    st.builds(lambda a, b: {"op": "lanes", "start": a, "stop": b}, SIZES, SIZES),
    st.builds(lambda a, b: {"op": "deinterleaved_to_interleaved", "start": a, "stop": b}, SIZES, SIZES),
    st.sampled_from(["T D -> D T", "T (H N) -> T H N", "1 T D -> T D", "T D -> T (D)", "T D -> 1 T D"]).map(
        lambda dims: {"op": "rearrange", "dims": dims}
    ),
    st.sampled_from([{"op": "sigmoid"}, {"op": "drop_future"}, {"op": "keep_rows", "side": "last"}]),
    st.builds(lambda by, size: {"op": "scale", "by": by, "size": size}, st.floats(-4, 4), SIZES),
)


@given(
    transforms=st.lists(TRANSFORMS, max_size=3),
    shape=st.lists(st.sampled_from([0, 1, 2, 96, 3]), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    to=st.sampled_from(["embeddings", "layers.{i}.attn.q_nope", "layers.{i}.attn.index.selected"]),
    layer=st.sampled_from([0, 5, 99]),
)
def test_any_mapping_of_any_tensor_works_or_is_a_dump_error(
    transforms: list[dict], shape: list[int], dtype: torch.dtype, to: str, layer: int
) -> None:
    tensors = [ForeignTensor(f"b.{layer}", 0, tuple(shape), dtype, InMemory(torch.zeros(shape, dtype=dtype)))]
    try:
        mapped = applied(tensors, mapping(rule("b.{i}", to, *transforms)))
        for name in mapped.trace.names():
            table = mapped.trace.table(name, "a")
            assert len(table.keys) == len(table.values)
    except DumpError:
        pass


# Proposals (C67)


def engine(name: str, value: Tensor) -> dict[str, Tensor]:
    """An engine that counts layers from 1, keeps two residual streams, splits rope lanes and flattens heads."""
    group, _, rest = name.partition(".")
    if group != "layers":
        return {} if group in ("mtp", "cache") else {name: value}
    number, _, local = rest.partition(".")
    layer = f"layers.{int(number) + 1}"
    if local == "output":
        hidden = torch.randn(value.shape, generator=torch.Generator().manual_seed(int(number)))
        return {f"{layer}.hidden": hidden, f"{layer}.residual": value - hidden}
    if local in ("attn.q_rope", "attn.k_rope", "attn.k_rope_unrotated"):
        value = split_lanes(value)
    if local in ("attn.index.query", "attn.index.key"):
        value = split_lanes(value, ROPE)
    if local in ("attn.q_rope", "attn.q_nope"):
        value = value.flatten(1)
    return {f"{layer}.{'input_layernorm' if local == 'attn.input' else local}": value}


def test_the_mapping_of_a_foreign_trace_is_found() -> None:
    line = "p:a16 d:a"
    foreign = edited(recorded(line), engine)
    proposal = propose_mapping(recorded(line), foreign)
    assert proposal.mapping is not None
    assert proposal.mapping.layer_shift == -1
    by_name = {evidence.to: evidence for evidence in proposal.evidence}
    output = by_name["layers.{i}.output"]
    assert output.sources == ("layers.{i}.hidden", "layers.{i}.residual")
    assert output.before == 1.0 > 1e-5 > output.after
    assert by_name["layers.{i}.attn.k_rope"].transforms == ("deinterleaved_to_interleaved",)
    assert by_name["layers.{i}.attn.input"].sources == ("layers.{i}.input_layernorm",)

    again = Mapping.model_validate_json(mapping_json(proposal.mapping))
    mapped = apply_mapping(again, from_trace(foreign), TEXT)
    assert mapped.unmapped == ()
    # The cached rows are the layers' own, and are found there.
    assert {rule.sources for rule in proposal.mapping.rules if rule.to == "cache.{i}.k_rope"} == {
        ("layers.{i}.attn.k_rope",)
    }
    outputs = [f"layers.{layer}.output" for layer in range(TEXT.num_hidden_layers)]
    wanted = edited(recorded(line), lambda n, v: {} if n.startswith(("mtp.", "cache.")) else {n: v})
    assert all(
        torch.allclose(mapped.trace.table(n, "a").values, wanted.table(n, "a").values, atol=1e-5) for n in outputs
    )
    # A sum of two rounds; the rest is the same bytes.
    exact = [name for name in wanted.names() if name not in outputs]
    left, right = (
        edited(trace, lambda name, value: {name: value} if name in exact else {}) for trace in (mapped.trace, wanted)
    )
    assert same(left, right)


def test_the_mapping_is_found_through_bfloat16_rounding() -> None:
    line = "p:a16"
    foreign = edited(recorded(line, torch.bfloat16), lambda name, value: engine(name, value.float()))
    proposal = propose_mapping(recorded(line), foreign)
    assert proposal.mapping is not None
    assert proposal.mapping.layer_shift == -1
    rules = {rule.to: rule for rule in proposal.mapping.rules}
    assert rules["layers.{i}.output"].sources == ("layers.{i}.hidden", "layers.{i}.residual")
    assert [transform.op for transform in rules["layers.{i}.attn.q_rope"].transforms] == [
        "rearrange",
        "deinterleaved_to_interleaved",
    ]
    assert {rule.layer_shift for rule in rules.values()} == {None}


@pytest.mark.parametrize("others", [0, 1])
def test_a_name_that_is_not_the_schema_s_is_no_prefix(others: int) -> None:
    """Also where it is the only one, or one of two."""
    renamed = {"logits": "lm_head", "final_norm": "norm"}
    kept = [*renamed][: 1 + others]
    foreign = edited(recorded("p:a16"), lambda name, value: {renamed[name]: value} if name in kept else {})
    proposal = propose_mapping(recorded("p:a16"), foreign)
    assert proposal.prefix == ""
    assert proposal.mapping is not None
    assert {(rule.sources, rule.to) for rule in proposal.mapping.rules} == {((renamed[name],), name) for name in kept}


def test_nothing_is_proposed_where_nothing_helps_or_nothing_is_wrong() -> None:
    assert propose_mapping(recorded(), recorded()).mapping is None
    assert propose_mapping(recorded("p:a16"), recorded("p:a16", torch.bfloat16)).mapping is None
    noise = edited(recorded("p:a16"), lambda name, value: {name: torch.randn(value.shape)})
    proposal = propose_mapping(recorded("p:a16"), noise)
    assert proposal.mapping is None
    assert "layers.{i}.output" in proposal.unexplained


def test_a_native_dump_with_foreign_names_keeps_its_rows() -> None:
    renamed = edited(recorded(), lambda name, value: {f"x.{name}": value} if name == "logits" else {})
    mapped = apply_mapping(mapping(rule("x.logits", "logits")), from_trace(renamed), TEXT)
    assert same(mapped.trace, edited(recorded(), lambda name, value: {name: value} if name == "logits" else {}))
