"""Random operators by distribution: moments, range and independence on a quarter of a million draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.checking import compiled

SHAPE = (512, 512)

# name, function, mean, standard deviation, smallest, largest
DISTRIBUTIONS = [
    ("rand", lambda x: torch.rand_like(x), 0.5, 12**-0.5, 0.0, 1.0),
    ("randn", lambda x: torch.randn_like(x), 0.0, 1.0, -8.0, 8.0),
    ("rand size", lambda x: torch.rand(SHAPE), 0.5, 12**-0.5, 0.0, 1.0),
    ("randn size", lambda x: torch.randn(SHAPE), 0.0, 1.0, -8.0, 8.0),
    ("bernoulli p", lambda x: torch.bernoulli(x, 0.3), 0.3, (0.3 * 0.7) ** 0.5, 0.0, 1.0),
    ("bernoulli", lambda x: torch.bernoulli(torch.full_like(x, 0.8)), 0.8, 0.4, 0.0, 1.0),
    ("dropout", lambda x: F.dropout(torch.ones_like(x), 0.25), 1.0, (1 / 3) ** 0.5, 0.0, 1.34),
    ("uniform_", lambda x: x.clone().uniform_(-2, 6), 2.0, 8 * 12**-0.5, -2.0, 6.0),
    ("normal_", lambda x: x.clone().normal_(3, 0.5), 3.0, 0.5, -1.0, 7.0),
    ("exponential_", lambda x: x.clone().exponential_(2.0), 0.5, 0.5, 0.0, 20.0),
    ("randint", lambda x: torch.randint(0, 11, SHAPE), 5.0, 10**0.5, 0, 10),
    ("randint_like", lambda x: torch.randint_like(x, 3, 8), 5.0, 2**0.5, 3, 7),
]


@pytest.mark.parametrize(
    ("name", "function", "mean", "deviation", "low", "high"), DISTRIBUTIONS, ids=[d[0] for d in DISTRIBUTIONS]
)
def test_distribution(
    name: str, function: Callable[..., torch.Tensor], mean: float, deviation: float, low: float, high: float
) -> None:
    run = compiled(function)
    x = torch.zeros(SHAPE)
    torch.manual_seed(11)
    first, second = run(x), run(x)
    torch.manual_seed(11)
    again = run(x)
    assert torch.equal(first, again), "the same seed gives the same numbers"
    assert not torch.equal(first, second), "the next call gives others"
    assert first.dtype == function(x).dtype
    values = first.double()
    count = values.numel()
    assert values.min() >= low and values.max() <= high
    assert abs(values.mean() - mean) < 5 * deviation / count**0.5
    assert abs(values.std() - deviation) < 0.01 * deviation
    # Neighbours along both axes and in the next call are independent.
    for left, right in [(values[1:], values[:-1]), (values[:, 1:], values[:, :-1]), (values, second.double())]:
        assert abs(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]) < 5 / count**0.5


def test_two_draws_of_one_call_differ() -> None:
    first, second = compiled(lambda x: (torch.rand_like(x), torch.rand_like(x)))(torch.zeros(SHAPE))
    assert not torch.equal(first, second)
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.02


def test_uniform_never_reaches_its_end() -> None:
    values = compiled(lambda x: torch.rand_like(x))(torch.zeros(4, 1024, 1024))
    assert values.min() >= 0 and values.max() < 1


def test_users_generator_is_used() -> None:
    generator = torch.Generator().manual_seed(5)
    expected = torch.rand(64, generator=generator)
    generator.manual_seed(5)
    assert torch.equal(compiled(lambda: torch.rand(64, generator=generator))(), expected)
