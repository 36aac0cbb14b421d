"""Sampling: its distribution, its nucleus, and noise that is a function of seed, position and token alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.errors import ConfigError
from reference.sampling import GREEDY, Sampling, choose, gumbel, nucleus

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
DRAWS = 20_000


def counts(sampling: Sampling) -> torch.Tensor:
    ids = choose(LOGITS.expand(DRAWS, -1), range(DRAWS), sampling)
    return torch.bincount(torch.tensor(ids), minlength=len(LOGITS)).double()


def chi_square(found: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * found.sum()
    return float(((found - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, -5, 2**64 + 3])
def test_draws_follow_the_softmax(temperature: float, seed: int) -> None:
    found = counts(Sampling(temperature, seed=seed))
    # 4 degrees of freedom: above 33.4 once in a million.
    assert chi_square(found, (LOGITS.double() / temperature).softmax(0)) < 33.4


def test_draws_stay_in_the_nucleus_and_keep_its_proportions() -> None:
    found = counts(Sampling(1.0, top_p=0.8, seed=3))
    kept = nucleus(LOGITS.double().softmax(0)[None], 0.8)[0]
    assert kept.tolist() == [True, True, False, False, True]
    assert found[~kept].sum() == 0
    probabilities = LOGITS.double().softmax(0)[kept]
    assert chi_square(found[kept], probabilities / probabilities.sum()) < 27.7


def test_the_nucleus_holds_the_best_token_and_equal_ones_by_id() -> None:
    equal = torch.full((1, 4), 0.25)
    assert nucleus(equal, 1e-9).tolist() == [[True, False, False, False]]
    assert nucleus(equal, 0.5).tolist() == [[True, True, False, False]]
    assert nucleus(equal, 1.0).tolist() == [[True] * 4]


@given(seed=st.integers(-(2**70), 2**70), position=st.integers(0, 2**20), other=st.integers(0, 2**20))
def test_noise_belongs_to_a_position_not_to_a_batch(seed: int, position: int, other: int) -> None:
    together = gumbel(seed, torch.tensor([other, position, 0]), 50)
    assert torch.equal(together[1:2], gumbel(seed, torch.tensor([position]), 50))
    assert together.isfinite().all()
    assert torch.equal(gumbel(seed, torch.tensor([position]), 60)[:, :50], together[1:2])
    if position != other:
        assert not torch.equal(together[0], together[1])


def test_noise_is_this_noise() -> None:
    """Pinned: other numbers here are other texts for the same seeds."""
    expected = [
        [0.05192817185272295, 1.0836314034140386, 1.9374830725025888],
        [-0.08966534352075368, -0.41578935768565184, -0.3531908114765205],
    ]
    found = gumbel(42, torch.tensor([0, 7]), 3)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    assert math.isclose(float(gumbel(0, torch.arange(4000), 25).mean()), 0.5772156649, abs_tol=0.02)


def test_temperature_zero_is_greedy_and_ties_go_to_the_lower_id() -> None:
    assert choose(torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, 1.0]]), [5, 6], GREEDY) == [1, 0]


@pytest.mark.parametrize(
    ("values", "named"), [({"temperature": -1.0}, "temperature"), ({"temperature": math.nan}, "temperature"),
                          ({"temperature": "1"}, "temperature"), ({"temperature": 10**400}, "temperature"),
                          ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"top_p": None}, "top_p"),
                          ({"seed": 3.0}, "seed"), ({"seed": "x"}, "seed")]
)  # fmt: skip
def test_what_is_no_sampling_is_refused(values: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Sampling(**values)
