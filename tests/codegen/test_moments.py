"""Mean and variance from sums about the first element: as good as float64 allows, wherever the elements lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.checking import compiled

Function = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.var_mean(x, -1, correction=0)


def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.var_mean(x.reshape(x.shape[0], -1, 1, 5), (1, 3))


def whole(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.var_mean(x)


def gathered(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first element is found through an index."""
    return torch.var_mean(x[torch.tensor([2, 0, 2, 1])] * 2, -1)


def close(function: Function, x: torch.Tensor) -> None:
    for ours, exact in zip(compiled(function)(x), function(x.double()), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2.5e-7, atol=1e-12)


@pytest.mark.parametrize("function", [rows, several, whole, gathered])
@pytest.mark.parametrize("origin", ["near", "far away", "an outlier first", "an outlier last", "constant"])
def test_wherever_the_elements_lie(function: Function, origin: str) -> None:
    x = torch.randn(6, 1235, generator=torch.Generator().manual_seed(1))
    if origin == "far away":
        x += 3e4
    if origin.startswith("an outlier"):
        x[:, 0 if origin.endswith("first") else -1] = 1e5
    if origin == "constant":
        x[:] = 1 / 3
    close(function, x)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 4097])
def test_any_length(length: int) -> None:
    close(rows, 100 + torch.randn(3, length, generator=torch.Generator().manual_seed(2)))


def test_a_dropped_first_element() -> None:
    """The draw of the first element is the one the sums see."""

    def dropped(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.dropout(x, 0.5)
        return (y, *torch.var_mean(y, -1))

    torch.manual_seed(3)
    y, var, mean = compiled(dropped)(torch.randn(50, 77) + 5)
    exact = torch.var_mean(y.double(), -1)
    assert (y[:, 0] == 0).any() and (y[:, 0] != 0).any()
    torch.testing.assert_close(var.double(), exact[0], rtol=2.5e-7, atol=0)
    torch.testing.assert_close(mean.double(), exact[1], rtol=2.5e-7, atol=0)


def test_infinity_and_nan_as_eager() -> None:
    x = torch.randn(4, 500)
    x[0, 0], x[1, 7], x[2, 3] = float("inf"), float("-inf"), float("nan")
    for ours, eager in zip(compiled(rows)(x), rows(x), strict=True):
        torch.testing.assert_close(ours, eager, equal_nan=True)
