"""How far approximations are from the truth, in units in the last place, over all 16-bit inputs.

Through the interpreter, or on the GPU with ONEPASS_TEST_DEVICE=cuda.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import onepass  # noqa: F401  (registers the backend)
from tests.checking import DEVICE

pytest.importorskip("triton")
OPTIONS = {"strict": True} | ({"target": "triton-interpret"} if DEVICE == "cpu" else {})


def every_value(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


def units(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The distance in units of the last place that the type has at the exact value."""
    kind = torch.finfo(ours.dtype)
    exponent = torch.frexp(exact.abs().clamp(min=kind.tiny))[1] - 1
    return (ours.double() - exact).abs() / (kind.eps * 2.0 ** exponent.double())


def normal(x: torch.Tensor) -> torch.Tensor:
    """The normal distribution; torch's own loses the tail."""
    return 0.5 * torch.erfc(-x * 0.5**0.5)


def run(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    compiled = torch.compile(function, backend="onepass", options=OPTIONS)
    result: torch.Tensor = compiled(x.to(DEVICE))
    return result.cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu(dtype: torch.dtype) -> None:
    """Half a unit is the rounding itself; what float32 loses in the far tail of bfloat16 is float32's."""
    x = every_value(dtype).cpu()
    exact = x.double() * normal(x.double())
    seen = exact.abs() > (torch.finfo(dtype).tiny if dtype is torch.float16 else 1e-30)
    seen &= exact.abs() < torch.finfo(dtype).max
    off = units(run(F.gelu, x), exact)[seen]
    assert off.max() < 0.53, off.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_the_cpu(dtype: torch.dtype) -> None:
    """There 1 + erf is float32's: right to the last place where it is not tiny, close to eager everywhere."""
    x = every_value(dtype).cpu()
    ours = torch.compile(F.gelu, backend="onepass", options={"strict": True, "target": "cpu"})(x)
    exact = x.double() * normal(x.double())
    seen = (exact.abs() > 1e-3) & (exact.abs() < torch.finfo(dtype).max)
    assert units(ours, exact)[seen].max() < 0.56
    assert (ours.double() - exact)[exact.abs() <= 1e-3].abs().max() < 2.5e-6  # half a unit of 1e-3 is 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_backward(dtype: torch.dtype) -> None:
    x = every_value(dtype).cpu()
    x = x[x.abs() < 12]

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.gelu_backward(torch.ones_like(x), x)

    wide = x.double()
    density = torch.exp(-0.5 * wide * wide) * 0.3989422804014327
    exact = normal(wide) + wide * density
    # The two terms cancel on the left: what is 1e-5 of one of them may be 64e-5 of this measure.
    off = (run(slope, x).double() - exact).abs() / torch.maximum(
        exact.abs(), (wide * density).abs() / 64 + torch.finfo(dtype).tiny
    )
    assert off.max() < 0.52 * torch.finfo(dtype).eps + 64e-5, off.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tanh(dtype: torch.dtype) -> None:
    """bfloat16 gets NVIDIA's own instruction, within a quarter of a unit; float16 the library's function."""
    x = every_value(dtype).cpu()
    exact = torch.tanh(x.double())
    off = units(run(torch.tanh, x), exact)[exact.abs() > torch.finfo(dtype).tiny]
    assert off.max() < (0.76 if dtype is torch.bfloat16 else 0.51), off.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gelu_by_tanh(dtype: torch.dtype) -> None:
    """A logistic function keeps its digits in the tail, where 1 + tanh has none; float32 loses the exponent's."""
    x = every_value(dtype).cpu() if dtype is not torch.float32 else torch.linspace(-9, 9, 100_001).cpu()
    wide = x.double()
    exact = wide / (1 + torch.exp(-2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
    seen = (x.abs() < 9) & (exact.abs() > torch.finfo(dtype).tiny)
    off = units(run(lambda x: F.gelu(x, approximate="tanh"), x), exact)[seen]
    assert off.max() < (0.53 if dtype is not torch.float32 else 256), off.max()


def test_exp() -> None:
    """float32: a multiplication rounded before the hardware's exp2, so an error that grows with the argument."""
    x = torch.linspace(-87, 88, 200_001).cpu()
    exact = torch.exp(x.double())
    relative = ((run(torch.exp, x).double() - exact) / exact).abs()
    assert (relative / (1 + x.abs().double())).max() < 1.5e-7


def test_maximum_of_nan_and_of_zeros() -> None:
    nan, inf = float("nan"), float("inf")
    a = torch.tensor([nan, 1.0, nan, inf, -inf, 2.0, -3.0])
    b = torch.tensor([1.0, nan, nan, -inf, inf, 2.0, -4.0])
    for function in (torch.maximum, torch.minimum):
        ours = run(lambda x, f=function: torch.stack([f(x[0], x[1]), f(x[1], x[0])]), torch.stack([a, b]))
        torch.testing.assert_close(ours[0], function(a.cpu(), b.cpu()), equal_nan=True)
        torch.testing.assert_close(ours[1], function(b.cpu(), a.cpu()), equal_nan=True)


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3, 0.999999, 1e-9])
def test_a_draw_below_a_limit_is_the_same_as_the_word_below_it(p: float) -> None:
    """The comparison of words is exact: the mask of the written-out comparison."""

    def masks(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return torch.rand_like(x)

    x = torch.empty(100_001)
    options = {"strict": True} if DEVICE != "cpu" else {**OPTIONS, "target": "cpu"}
    drawn = torch.compile(masks, backend="onepass", options=options)(x.to(DEVICE)).cpu()
    below = run(lambda x: masks(x) < p, x)
    assert torch.equal(below, drawn < torch.tensor(p, device="cpu"))
