"""Rows too long to be held: swept in steps of several tiles, few at once; and what the chip's cache is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass

pytest.importorskip("triton")
INTERPRETED = {"target": "triton-interpret", "strict": True}


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x * 3, -1)


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x / x.abs().amax(-1, keepdim=True)


def kernel_of(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> tuple[str, str]:
    """Schedule and source of the one kernel on sm_90, for bfloat16 tensors of these shapes."""
    with FakeTensorMode():
        arguments = [torch.empty(s, dtype=torch.bfloat16) for s in shapes]
        explanation = onepass.explain(function, *arguments, target="sm_90")
    (kernel,) = explanation.kernels
    return kernel.schedule, kernel.source


@pytest.mark.parametrize("function", [softmax, log_softmax, logsumexp, norm, scaled])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((8, 30001), torch.float32),
        ((3, 65536), torch.bfloat16),
        ((2, 50257), torch.float16),
        ((4, 40960), torch.bfloat16),  # a number of whole tiles, not of whole steps
        ((3, 36864), torch.float32),
    ],
)
def test_values(function: Callable[..., torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    ours = torch.compile(function, backend="onepass", options=INTERPRETED)(x)
    eager, exact = function(x), function(x.double())
    assert ours.dtype == eager.dtype
    error, allowed = (ours.double() - exact).abs(), 2 * (eager.double() - exact).abs()
    assert (error <= allowed + 2 * torch.finfo(dtype).eps * (exact.abs() + exact.abs().mean())).all()


def test_special_rows() -> None:
    x = torch.randn(6, 30001)
    inf = float("inf")
    x[0] = -inf  # fully masked: NaN, as eager
    x[1, :29000] = -inf  # whole steps are masked
    x[2, 7] = inf
    x[3, 100] = float("nan")
    x[4] *= 1e4
    x[5, ::2] = -inf  # every other lane has nothing at all
    ours = torch.compile(softmax, backend="onepass", options=INTERPRETED)(x)
    torch.testing.assert_close(ours.double(), softmax(x.double()), rtol=1e-4, atol=1e-7, equal_nan=True)


def test_rows_swept_again_stay_in_the_cache() -> None:
    schedule, source = kernel_of(softmax, (2048, 131072))
    assert "swept by 4 x 8192; 32 warps" in schedule
    first, second = (line for line in source.splitlines() if "tl.load" in line)
    assert "evict_last" in first and "evict_first" in second


def test_rows_that_would_not_fit_the_cache_are_not_forced() -> None:
    schedule, _ = kernel_of(softmax, (2048, 1 << 20))
    assert "32 warps" not in schedule


def test_few_rows_get_many_threads() -> None:
    schedule, _ = kernel_of(norm, (100, 40000))
    assert "32 warps" in schedule
    schedule, _ = kernel_of(norm, (20000, 20000))
    assert "32 warps" not in schedule


def test_what_is_read_once_is_left_to_the_cache() -> None:
    schedule, source = kernel_of(lambda x, b: F.gelu(x + b), (16384, 4096), (4096,))
    assert "grid x tile 8; " in schedule and "grid x tile 256" in schedule  # the rows of a tile share the bias
    assert "evict" not in source
    _, source = kernel_of(lambda x: x[:, 2:] + x[:, 1:-1] + x[:, :-2], (8192, 8192))
    assert "evict" not in source
    _, source = kernel_of(softmax, (80, 65536))  # small enough to stay by itself
    assert "evict" not in source
