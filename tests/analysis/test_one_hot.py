"""Sums with one term: the values of the sum, and no sweep to find them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.checking import compiled

import onepass

POSITIONS = torch.tensor([3, 0, 699, -1, 700, 12345, 5])  # inside and outside of 700


def masked(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    here = torch.arange(700) == k[:, None]
    return torch.where(here, v[:, None], 0.0).sum(1)


def scaled(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    here = (torch.where(k[:, None] == torch.arange(700), 2.0, 0.0) * v[:, None] / 3).half().float()
    return here.sum(1)


def two_axes(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    here = torch.arange(700)[None, :, None] == k[:, None, None]
    return torch.where(here, v[:, None, None] * torch.ones(1, 1, 9), 0.0).sum((1, 2))


@pytest.mark.parametrize("function", [masked, scaled, two_axes])
def test_the_term_is_found_without_a_sweep(function: Callable[..., torch.Tensor]) -> None:
    v = torch.randn(7)
    torch.testing.assert_close(compiled(function)(POSITIONS, v), function(POSITIONS, v))
    (kernel,) = onepass.explain(function, POSITIONS, v).kernels
    assert "[700]" not in kernel.schedule


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 0.0])
def test_zero_times_what_is_not_finite_is_not_zero(factor: float) -> None:
    """The terms that are zero count where they are NaN: as eager's, whether the position is inside or not."""
    v = torch.full((7,), factor)
    for function in (scaled, lambda k, v: (torch.where(k[:, None] == torch.arange(700), 2.0, 0.0) / v[:, None]).sum(1)):
        torch.testing.assert_close(compiled(function)(POSITIONS, v), function(POSITIONS, v), equal_nan=True)


def not_zero_elsewhere(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(700) == k[:, None], v[:, None], 1.0).sum(1)


def varying(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(700) == k[:, None], torch.arange(700) * v[:, None], 0.0).sum(1)


def largest(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(700) == k[:, None], v[:, None], 0.0).amax(1)


@pytest.mark.parametrize("function", [not_zero_elsewhere, varying, largest])
def test_what_only_looks_alike_is_swept(function: Callable[..., torch.Tensor]) -> None:
    v = torch.randn(7)
    torch.testing.assert_close(compiled(function)(POSITIONS, v), function(POSITIONS, v))
    (kernel,) = onepass.explain(function, POSITIONS, v).kernels
    assert "[700]" in kernel.schedule


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_backward(smoothing: float, dtype: torch.dtype) -> None:
    """Where labels are not smoothed the backward has no reduction at all."""
    x = torch.randn(64, 700, dtype=dtype, requires_grad=True)
    t = torch.randint(0, 700, (64,))
    t[5] = -100

    def loss(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, t, label_smoothing=smoothing)

    (ours,) = torch.autograd.grad(compiled(loss)(x, t), x)
    (exact,) = torch.autograd.grad(loss(x.double(), t), x)
    limit = 2 * (torch.autograd.grad(loss(x, t), x)[0] - exact).abs().max() + torch.finfo(dtype).eps
    assert (ours - exact).abs().max() <= limit
    explained = onepass.explain(loss, x, t)
    sources = [k.source for g in explained.graphs if g.direction == "backward" for k in g.kernels]
    assert any("_acc" in s for s in sources) == bool(smoothing)
