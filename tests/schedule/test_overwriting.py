"""Rows that take the place of what their kernel reads in several sweeps: which may, and their values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import onepass

Function = Callable[[torch.Tensor, torch.Tensor], object]


def softmax(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_(torch.softmax(x, -1))


def centred(x: torch.Tensor, y: torch.Tensor) -> None:
    x.sub_(x.mean(-1, keepdim=True))


def one_of_each_row_as_well(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What is read at an index from data has to be read before it is overwritten."""
    found = x.gather(1, y[:, None]) * 2
    x.copy_(torch.softmax(x, -1))
    return found


def sum_of_what_was_there(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = x.square().sum()
    x.mul_(2)
    return total


def reversed_rows(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_(torch.softmax(x, -1).flip(1))


def by_columns(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_(torch.softmax(x, 0))


def neighbouring_rows(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_(torch.softmax(x, -1) + x.roll(1, 0))


def later_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A sum over rows that no program has as a whole."""
    found = (x * 3).sum(0)
    x.copy_(torch.softmax(x, -1))
    return found


@pytest.mark.parametrize("target", ["auto", "triton-interpret"])
@pytest.mark.parametrize("shape", [(37, 129), (5, 4099)], ids=str)
@pytest.mark.parametrize(
    "function",
    [softmax, centred, one_of_each_row_as_well, sum_of_what_was_there, reversed_rows, by_columns, neighbouring_rows,
     later_sum],
)  # fmt: skip
def test_values(function: Function, shape: tuple[int, int], target: str) -> None:
    torch.manual_seed(0)
    given, y = torch.randn(shape), torch.randint(0, shape[1], shape[:1])
    results = []
    for run in (torch.compile(function, backend="onepass", options={"strict": True, "target": target}), function):
        x = given.clone()
        results.append((run(x, y), x))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize(
    ("function", "place"),
    [(softmax, True), (centred, True), (one_of_each_row_as_well, True), (neighbouring_rows, False)],
)
def test_which_rows_are_overwritten(function: Function, place: bool, target: str) -> None:
    x, y = torch.randn(64, 4096), torch.randint(0, 4096, (64,))
    e = onepass.explain(function, x, y, options={"strict": True, "cache": False, "target": target})
    assert [d.accepted for d in e.decisions if d.kind == "in-place"] == [place]
    if place and target == "sm_90" and len(e.kernels) == 1 and function is one_of_each_row_as_well:
        text = e.kernels[0].source
        assert text.index("check_index") < text.index("tl.debug_barrier()") < text.rindex("tl.store")


def test_a_number_is_updated() -> None:
    def step(x: torch.Tensor, n: torch.Tensor) -> None:
        n.add_(x.sum() * n)

    results = []
    for run in (torch.compile(step, backend="onepass", options={"strict": True}), step):
        x, n = torch.ones(100), torch.tensor(2.0)
        run(x, n)
        results.append(n)
    torch.testing.assert_close(*results)
