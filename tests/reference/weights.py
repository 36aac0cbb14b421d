"""A text model with the formula's random weights, the ways in which the tests run one, and how they compare rows.

The weights are float32 numbers, so the same seed gives the same model at every dtype that holds float32.
"""

import dataclasses
from collections.abc import Sequence

import torch
from formula import random_weights
from torch import Tensor

from reference.config import TextConfig, tiny
from reference.numerics import Numerics
from reference.probe import Recorder, listening
from reference.session import Session, StepItem
from reference.text import TextModel

# The float64 runs of these tests add up to a few thousand terms: 1e-12 is far above their rounding, and far below
# what any other choice of key, expert or angle would change.
FLOAT64_BOUND = 1e-12


def random_model(
    config: TextConfig, seed: int = 0, dtype: torch.dtype = torch.float64, numerics: Numerics | None = None, **kwargs
) -> TextModel:
    """A TextModel of `config` in `dtype` with the weights of that seed; `kwargs` go to its constructor."""
    model = TextModel(config, numerics, **kwargs)
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in random_weights(config, seed).items()})
    return model.to(dtype)


def one_layer(kind: str, **changes) -> TextConfig:
    """`tiny()` cut to one dense layer of `kind` ("full" or "sliding"), with `changes` to its fields."""
    fields = {"num_hidden_layers": 1, "layer_types": (f"{kind}_attention",), **changes}
    return dataclasses.replace(tiny().text, **fields)


def small(**changes) -> TextConfig:
    """`tiny()` cut to a full dense layer, a sliding and a full layer with experts, with `changes` to its fields."""
    kinds = ("full_attention", "sliding_attention", "full_attention")
    fields = {"num_hidden_layers": len(kinds), "layer_types": kinds, **changes}
    return dataclasses.replace(tiny().text, **fields)


def drawn_ids(config: TextConfig, count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(config.vocab_size, (count,), generator=generator).tolist())


def one_shot(model: TextModel, token_ids: Sequence[int]) -> Tensor:
    """Logits [T, W] of all rows in one prefill."""
    with torch.no_grad():
        return model(torch.tensor(token_ids))


def in_chunks(model: TextModel, token_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Logits [T, W] of the same rows, in steps of these lengths, which must add up to all tokens."""
    assert sum(lengths) == len(token_ids)
    session, rows, start = Session(model), [], 0
    with torch.no_grad():
        for length in lengths:
            item = StepItem("a", tuple(token_ids[start : start + length]), "prefill" if length > 1 else "decode")
            rows.append(session.step([item])["a"])
            start += length
    return torch.cat(rows)


def probes(model: TextModel, token_ids: Sequence[int]) -> dict[str, Tensor]:
    """Every named value of one prefill, in the order of computation."""
    recorder = Recorder()
    with listening(recorder):
        one_shot(model, token_ids)
    return {observation.name: observation.value for observation in recorder.observations}


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value; NaN or a shape that differs is infinite."""
    if actual.shape != expected.shape or actual.isnan().any() or expected.isnan().any():
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def first_difference(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float = FLOAT64_BOUND) -> str:
    """The first probe that differs by more than `bound`, in the order of computation; "" for none."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        if not _is_close(actual[name], value, bound):
            return name
    return ""


def _is_close(actual: Tensor, expected: Tensor, bound: float) -> bool:
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    finite = expected.isfinite()
    return torch.equal(actual.isfinite(), finite) and error(actual[finite], expected[finite]) <= bound
