"""What scales weights leaves a sum of products only where the weights stay within their type: large, small and shifted
scores in every spelling of softmax."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.contractions.judging import explained, interpreted

pytest.importorskip("triton")


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).float() * 0.25


def by_logsumexp(s: Tensor, v: Tensor) -> Tensor:
    return torch.exp(s - torch.logsumexp(s, -1, keepdim=True)).to(v.dtype) @ v


def by_log_softmax(s: Tensor, v: Tensor) -> Tensor:
    return F.log_softmax(s, -1).exp().to(v.dtype) @ v


def by_exponentials(s: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(s)
    return (e / e.sum(-1, keepdim=True)).to(v.dtype) @ v


def by_squares(s: Tensor, v: Tensor) -> Tensor:
    e = torch.relu(s) ** 2
    return (e / (e.sum(-1, keepdim=True) + 1e-30)).to(v.dtype) @ v


def right(function: Callable[..., Tensor], *tensors: Tensor) -> None:
    torch._dynamo.reset()
    exact = function(*(t.double() for t in tensors))
    eager = (function(*tensors).double() - exact).abs().max()
    ours = interpreted(function)(*tensors).double()
    bar = 1e-4 if tensors[0].dtype is torch.float32 else 3e-3
    assert (ours - exact).abs().max() <= 2 * eager + bar * exact.abs().max()


@pytest.mark.parametrize("shift", [-200.0, -12.0, 20.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("softmax", [by_logsumexp, by_log_softmax])
def test_scores_with_a_number_added(softmax: Callable[..., Tensor], dtype: torch.dtype, shift: float) -> None:
    q, k, v = (torch.randn(1, 1, 70, 16).to(dtype) for _ in range(3))
    right(lambda q, k, v: softmax(scores(q, k) + shift, v), q, k, v)


@pytest.mark.parametrize("softmax", [by_logsumexp, by_log_softmax])
def test_scores_with_a_row_added(softmax: Callable[..., Tensor]) -> None:
    q, k, v = (torch.randn(1, 1, 70, 16, dtype=torch.float16) for _ in range(3))
    right(lambda q, k, v, b: softmax(scores(q, k) + b - 3 * b.abs(), v), q, k, v, 100 * torch.randn(70, 1))


def test_distances() -> None:
    x, c = 2 * torch.randn(100, 16), 2 * torch.randn(80, 16)
    right(lambda x, c: by_log_softmax(2 * x @ c.t() - (x * x).sum(-1, keepdim=True) - (c * c).sum(-1), c), x, c)


@pytest.mark.parametrize("factor", [1e-4, 1.0, 30.0])
@pytest.mark.parametrize("weights", [by_exponentials, by_squares])
def test_weights_without_a_maximum(weights: Callable[..., Tensor], factor: float) -> None:
    q, k, v = (torch.randn(1, 1, 70, 16, dtype=torch.float16) for _ in range(3))
    factor = min(factor, 6.0) if weights is by_exponentials else factor
    right(lambda q, k, v: weights(scores(q, k), v), q * factor, k, v)


@pytest.mark.parametrize(("size", "scale"), [(1e6, 1e-3), (1e-8, 1e6)])
def test_an_operand_that_only_its_scale_brings_into_range(size: float, scale: float) -> None:
    right(lambda x, w: torch.relu((x * scale).to(w.dtype) @ w), size * torch.randn(40, 64), torch.randn(64, 48).half())


def by_the_largest_that_is_seen(s: Tensor, v: Tensor) -> Tensor:
    """The others may be larger."""
    rows, columns = (torch.arange(n, device=s.device) for n in s.shape[-2:])
    later = columns[None, :] > rows[:, None]
    e = torch.exp(s - s.masked_fill(later, -torch.inf).amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(v.dtype) @ v


def by_exponentials_times(number: float) -> Callable[[Tensor, Tensor], Tensor]:
    def weights(s: Tensor, v: Tensor) -> Tensor:
        e = torch.exp(s - s.amax(-1, keepdim=True) + number)
        return (e / e.sum(-1, keepdim=True)).to(v.dtype) @ v

    return weights


def without_the_first(s: Tensor, v: Tensor) -> Tensor:
    """What is left is small until it is divided by its own sum."""
    others = torch.arange(s.shape[-1], device=s.device) > 0
    p = torch.where(others, (s + 20 * ~others).softmax(-1), 0.0)
    return (p / p.sum(-1, keepdim=True)).to(v.dtype) @ v


def with_a_sink(s: Tensor, v: Tensor) -> Tensor:
    """Most of the weight is nobody's."""
    top = s.amax(-1, keepdim=True).clamp(min=12.0)
    e = torch.exp(s - top)
    return (e / (e.sum(-1, keepdim=True) + torch.exp(12.0 - top))).to(v.dtype) @ (v * 1000)


def with_a_sink_left_out(s: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(s - s.amax(-1, keepdim=True).clamp(min=30.0))
    return (e / e.sum(-1, keepdim=True)).to(v.dtype) @ v


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "weights",
    [
        by_the_largest_that_is_seen,
        by_exponentials_times(20.0),
        by_exponentials_times(-30.0),
        without_the_first,
        with_a_sink,
        with_a_sink_left_out,
    ],
)
def test_weights_that_only_their_sum_brings_into_range(weights: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """The largest exponential is 1 only where the maximum is of these scores, and of all of them."""
    q, k, v = (torch.randn(1, 2, 70, 16).to(dtype) for _ in range(3))
    right(lambda q, k, v: weights(scores(q, k) * 6, v), q, k, v)


def test_softmax_itself_is_one_sweep() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(4, 16, 256, 64, dtype=torch.float16) for _ in range(3))
        e = explained(lambda q, k, v: by_logsumexp(torch.tanh(scores(q, k)) * 1.0713, v), q, k, v)
    assert len(e.kernels) == 1 and e.kernels[0].source.count(" in tl.range(") <= 2
