"""The observation point: silent without a listener, also when compiled; clones, replacements, scopes, rows."""

import pytest
import torch
from torch import Tensor

from reference.probe import (
    Observation,
    Override,
    Recorder,
    Rows,
    concatenated,
    is_observed,
    listening,
    narrowed_rows,
    probe,
    rows,
    scope,
)


def observed_block(x_TD: Tensor) -> Tensor:
    """A function as the model's are: two scopes, two probes."""
    with scope("layers.3"):
        with scope("attn"):
            x_TD = probe("core", x_TD * 2.0)
        return probe("output", x_TD + 1.0)


def test_with_nobody_listening_the_same_object_comes_back():
    x = torch.ones(3)
    with scope("layers.0"):
        assert probe("input", x) is x
    assert not is_observed()


def test_compiles_into_one_graph_with_nobody_listening():
    compiled = torch.compile(observed_block, fullgraph=True, backend="eager")
    x_TD = torch.randn(4, 3)
    assert torch.equal(compiled(x_TD), observed_block(x_TD))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache")
def test_a_compiled_function_is_observed_after_all():
    """A listener that arrives later must not be missed by a graph that was made without it."""
    compiled = torch.compile(observed_block, backend="eager")
    x_TD, recorder = torch.ones(2, 3), Recorder()
    compiled(x_TD)
    with listening(recorder):
        compiled(x_TD)
    assert recorder.names() == ["layers.3.attn.core", "layers.3.output"]


def test_names_are_joined_from_the_scopes_around_them():
    recorder = Recorder()
    with listening(recorder):
        observed_block(torch.ones(2, 3))
        probe("logits", torch.ones(2))
    assert recorder.names() == ["layers.3.attn.core", "layers.3.output", "logits"]


def test_a_recorder_keeps_clones():
    recorder, buffer = Recorder(), torch.ones(2, requires_grad=True)
    with listening(recorder):
        assert probe("input", buffer) is buffer
    with torch.no_grad():
        buffer.fill_(7.0)
    (value,) = recorder.values("input")
    assert value.tolist() == [1.0, 1.0]
    assert not value.requires_grad


def test_a_recorder_keeps_what_its_patterns_match():
    recorder = Recorder(["layers.*.output", "logits"])
    with listening(recorder):
        observed_block(torch.ones(2, 3))
        probe("logits", torch.ones(2))
        probe("final_norm", torch.ones(2))
    assert recorder.names() == ["layers.3.output", "logits"]
    assert recorder.values("final_norm") == []


def test_an_override_replaces_and_counts():
    override = Override("*.core", lambda value, _: torch.zeros_like(value))
    with listening(override):
        y_TD = observed_block(torch.ones(2, 3))
    assert torch.equal(y_TD, torch.ones(2, 3))
    assert override.count == 1


def test_listeners_observe_in_order():
    """A recorder behind an override sees what the override put there; one that goes first sees the original."""
    behind, before = Recorder(), Recorder()
    override = Override("x", lambda value, _: value + 1.0)
    with listening(override, behind), listening(before, first=True):
        probe("x", torch.zeros(1))
    assert behind.values("x")[0].item() == 1.0
    assert before.values("x")[0].item() == 0.0


def test_overrides_add_up():
    add, double = Override("x", lambda value, _: value + 1.0), Override("x", lambda value, _: value * 2.0)
    with listening(add), listening(double):
        assert probe("x", torch.ones(1)).item() == 4.0
    with listening(double), listening(add):
        assert probe("x", torch.ones(1)).item() == 3.0


def test_the_state_is_as_before_after_an_exception():
    recorder = Recorder()
    with listening(recorder):
        with pytest.raises(ZeroDivisionError), scope("layers.1"), rows("a", torch.arange(2), "prefill"):
            raise ZeroDivisionError
        probe("input", torch.ones(1))
    with pytest.raises(ZeroDivisionError), listening(Recorder()):
        raise ZeroDivisionError
    assert not is_observed()
    (observation,) = recorder.observations
    assert (observation.name, observation.rows) == ("input", None)


def test_rows_say_what_a_tensor_holds():
    recorder = Recorder()
    with listening(recorder), rows("a", torch.arange(5, 9), "decode"):
        probe("whole", torch.ones(4, 2))
        with narrowed_rows(slice(1, 3)):
            probe("block", torch.ones(2, 2))
        with rows("b", torch.arange(2), "prefill"):
            probe("other", torch.ones(2, 2))
        probe("again", torch.ones(4, 2))
    found = {o.name: (o.rows.request, o.rows.positions.tolist(), o.rows.kind) for o in recorder.observations if o.rows}
    assert found == {
        "whole": ("a", [5, 6, 7, 8], "decode"),
        "block": ("a", [6, 7], "decode"),
        "other": ("b", [0, 1], "prefill"),
        "again": ("a", [5, 6, 7, 8], "decode"),
    }


def test_narrowing_no_rows_gives_no_rows():
    recorder = Recorder()
    with listening(recorder), narrowed_rows(slice(0, 1)):
        probe("block", torch.ones(1))
    assert recorder.observations[0].rows is None


def test_an_override_knows_the_rows():
    def spoil_position_6(value: Tensor, where: Rows | None) -> Tensor:
        assert where is not None
        return torch.where(where.positions == 6, -1.0, value)

    with listening(Override("x", spoil_position_6)), rows("a", torch.arange(5, 8), "verify"):
        assert probe("x", torch.zeros(3)).tolist() == [0.0, -1.0, 0.0]


def test_concatenated_joins_the_pieces_of_a_name():
    first, second, other = torch.ones(2, 3), torch.zeros(1, 3), torch.ones(1)
    pieces = [Observation("a", first, None), Observation("b", other, None), Observation("a", second, None)]
    joined = concatenated(pieces)
    assert list(joined) == ["a", "b"]
    assert joined["a"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]


def test_gradients_flow_through_a_recorded_value():
    x = torch.ones(2, 3, requires_grad=True)
    with listening(Recorder()):
        observed_block(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0] * 3] * 2
