"""Short reductions become point-wise work where that computes nothing twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.backend import FallbackWarning


def repeated(k: Tensor) -> Tensor:
    """The gradient of key heads that several query heads share, read at two places."""
    summed = k.sum(1)
    return torch.cat((-summed[..., 8:], summed[..., :8]), -1) * 2


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "sum of two": (repeated, (3, 2, 5, 16)),
    "product of three": (lambda x: x.prod(0) + 1, (3, 40)),
    "largest of eight": (lambda x: x.amax(1).relu(), (4, 8, 33)),
    "least over two axes": (lambda x: x.amin((0, 1)), (2, 3, 50)),
    "softmax over two": (lambda x: F.softmax(x, 0), (2, 70)),
    "nine are swept": (lambda x: x.sum(0), (9, 70)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", ["cpu", "triton-interpret"])
@pytest.mark.filterwarnings(f"error::{FallbackWarning.__module__}.{FallbackWarning.__name__}")
def test_values(name: str, target: str) -> None:
    function, shape = CASES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x.view(-1)[7] = torch.nan
    torch._dynamo.reset()
    ours = torch.compile(function, backend="onepass", options={"target": target, "strict": True})(x)
    torch.testing.assert_close(ours, function(x), equal_nan=True, rtol=1e-5, atol=1e-6)


def sweeps(name: str) -> list[str]:
    function, shape = CASES[name]
    schedules = [k.schedule for k in onepass.explain(function, torch.empty(shape), options={"cache": False}).kernels]
    return [s for s in schedules if "swept" in s]


def test_a_rotated_sum_is_one_kernel() -> None:
    function, shape = CASES["sum of two"]
    assert len(onepass.explain(function, torch.empty(shape), options={"cache": False}).kernels) == 1


@pytest.mark.parametrize("name", ["softmax over two", "nine are swept"])
def test_what_stays_a_reduction(name: str) -> None:
    assert len(sweeps(name)) == 1


def test_few_elements_are_no_sweep() -> None:
    assert not sweeps("product of three")
