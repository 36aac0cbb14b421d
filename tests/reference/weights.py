"""A text model with every mechanism alive, and the two ways in which the tests run one.

Weights are drawn in float32 and then converted, so the same seed gives the same model at every dtype that holds
float32. Norm weights lie between 0.3 and 2 and are all different: a norm that is left out, or a RoPE pair that is
swapped before it, shows. The router's correction bias is large enough to change which experts are chosen.
"""

import dataclasses
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from reference.config import MlaGeometry, TextConfig, tiny
from reference.numerics import Numerics
from reference.probe import Recorder, listening
from reference.session import Session, StepItem
from reference.text import TextModel

# A second thread costs far more than it saves on products this small (measured: 75 s against 7 s for one test file).
torch.set_num_threads(1)

# The float64 runs of these tests add up to a few thousand terms: 1e-12 is far above their rounding, and far below
# what any other choice of key, expert or angle would change.
FLOAT64_BOUND = 1e-12


def random_model(
    config: TextConfig, seed: int = 0, dtype: torch.dtype = torch.float64, numerics: Numerics | None = None, **kwargs
) -> TextModel:
    """A TextModel of `config` in `dtype`; `kwargs` go to its constructor."""
    model = TextModel(config, numerics, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = _random_weight(name, parameter, generator)
    return model.to(dtype)


def _random_weight(name: str, parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.rand(parameter.shape, generator=generator) * 1.7 + 0.3
    normal = torch.randn(parameter.shape, generator=generator)
    if name.endswith("bias"):
        return normal * 0.3
    return normal if "embed_tokens" in name else normal * parameter.shape[1] ** -0.5


def one_layer(kind: str, **changes) -> TextConfig:
    """`tiny()` cut to one dense layer of `kind` ("full" or "sliding"), with `changes` to its fields."""
    fields = {"num_hidden_layers": 1, "layer_types": (f"{kind}_attention",), **changes}
    return dataclasses.replace(tiny().text, **fields)


def small(**changes) -> TextConfig:
    """`tiny()` cut to a full dense layer, a sliding and a full layer with experts, with `changes` to its fields."""
    kinds = ("full_attention", "sliding_attention", "full_attention")
    fields = {"num_hidden_layers": len(kinds), "layer_types": kinds, **changes}
    return dataclasses.replace(tiny().text, **fields)


@st.composite
def small_configs(draw: st.DrawFn, min_layers: int = 1) -> TextConfig:
    """Configs whose window and top-k are crossed by some twenty tokens; simpler ones first."""
    kinds = draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=min_layers, max_size=3))
    gate = draw(st.sampled_from(["headwise", "elementwise"]))
    heads = draw(st.integers(1, 5))
    return small(
        num_hidden_layers=len(kinds),
        layer_types=tuple(kinds),
        first_k_dense_replace=draw(st.integers(0, len(kinds))),
        sliding_window_size=draw(st.integers(1, 9)),
        index_topk=draw(st.integers(1, 11)),
        index_n_heads=draw(st.sampled_from([8, 11])),
        num_experts_per_tok=draw(st.integers(1, 4)),
        full=MlaGeometry(heads + 1, 32, 16, 12, 8, 10, 2.0e4, gate),
        sliding=MlaGeometry(heads, 24, 48, 15, 6, 11, 2.0e2, gate),
    )


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
