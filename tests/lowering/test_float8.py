"""float8 is moved and converted by kernels, bit for bit as eager does; what computes with it runs as eager would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.chips import CHIPS
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
TARGETS = ["cpu", "triton-interpret"]


def compiled(function: Callable[..., object], target: str) -> Callable[..., object]:
    if target != "cpu":
        pytest.importorskip("triton")
    return torch.compile(function, backend="onepass", options={"target": target, "strict": True})


def numbers(kind: torch.dtype) -> torch.Tensor:
    """All numbers of the type, what lies halfway and just beside it, and what does not fit."""
    exact = torch.arange(256, dtype=torch.uint8).view(kind).float()
    ordered = exact[exact.isfinite()].sort().values
    middle = (ordered[1:] + ordered[:-1]) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    beyond = [448.1, 463.9, 464.0, 464.1, 480.0, 500.0, 61439.0, 61440.0, 61441.0, 65536.0, 1e30, torch.inf, torch.nan]
    beyond += [1e-3, 2.0**-10, 2.0**-11, 2.0**-17, 1e-40, 0.0]
    extra = torch.tensor([*beyond, *(-x for x in beyond)])
    found = torch.cat([exact, middle, middle.nextafter(up), middle.nextafter(down), extra, torch.randn(1000) * 100])
    return found[: found.numel() // 2 * 2]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but for those of a NaN."""
    nan = b.float().isnan()
    return a.dtype == b.dtype and bool((torch.equal(a.float().isnan(), nan)) and (a.float() == b.float())[~nan].all())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", TYPES)
def test_conversions(kind: torch.dtype, source: torch.dtype, target: str) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * 1).to(kind)
        return y, y.view(2, -1).t().contiguous(), y.to(torch.float32) + 1, y.to(source)

    x = numbers(kind).to(source)
    for a, b in zip(compiled(function, target)(x), function(x), strict=True):  # type: ignore[call-overload]
        assert a.stride() == b.stride() and same(a, b)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", TYPES)
def test_inputs(kind: torch.dtype, target: str) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(kind).view(16, 16)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.to(torch.float32) * 2, x[2:, ::3].t().contiguous(), x.to(torch.bfloat16), (x.float() > 1).int()

    for a, b in zip(compiled(function, target)(x), function(x), strict=True):  # type: ignore[call-overload]
        assert same(a, b)


def test_what_computes_with_it_is_left_to_eager() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.to(torch.float8_e4m3fn)
        return torch.cat([y, y]), torch.zeros_like(y), y.view(torch.uint8) + 1

    x = torch.randn(32, 16)
    explanation = onepass.explain(function, x, options={"strict": True})
    assert any("float8" in e.why for e in explanation.externs)
    for a, b in zip(compiled(function, "cpu")(x), function(x), strict=True):  # type: ignore[call-overload]
        assert same(a, b)


@pytest.mark.parametrize("chip", CHIPS)
def test_scales_along_both_axes_are_one_kernel(chip: str) -> None:
    pytest.importorskip("triton")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = x.view(4096, 128, 32).float(), x.view(128, 32, 4096).float()
        by_row, by_column = rows.abs().amax(-1, keepdim=True) / 448, columns.abs().amax(1, keepdim=True) / 448
        first = (rows / by_row).to(torch.float8_e4m3fn).view(4096, 4096)
        second = (columns / by_column).to(torch.float8_e4m3fn).view(4096, 4096).t().contiguous()
        return first, by_row, second, by_column

    with FakeTensorMode():
        x = torch.empty(4096, 4096, dtype=torch.bfloat16)
        explanation = onepass.explain(function, x, target=chip, options={"cache": False, "strict": True})
    (kernel,) = explanation.kernels
    assert kernel.registers and not kernel.spilled_bytes and not explanation.externs
    assert explanation.bytes_moved <= 1.01 * explanation.bytes_minimum
