"""Rows joined of equal parts are stored part by part: elements that the parts share are read once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.checking import near_as_eager
from tests.unbuilt import unbuilt
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.ir.record import KernelRecord

INTERPRETED = {"target": "triton-interpret", "cache": False}


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Quarters of a row change places."""
    a, b, c, d = x.chunk(4, -1)
    return x * cosine + torch.cat([d, c, b, a], -1) * sine


def unequal(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    third = x.shape[-1] // 3
    return x * cosine + torch.cat([x[..., third:], x[..., :third]], -1) * sine


def joined(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The parts read nothing in common."""
    first, second = x.chunk(2, -1)
    return torch.cat([first.exp() * cosine[..., :64], second * sine[..., 64:]], -1)


def planned(function: Callable[..., Tensor], width: int = 128) -> KernelRecord:
    with FakeTensorMode(), unbuilt(), torch.no_grad():
        inputs = [torch.empty(s, dtype=torch.bfloat16) for s in ((8, 16, 1024, width), (1024, width), (1024, width))]
        report = onepass.explain(function, *inputs, target="sm_90", options={"tune": "off", "cache": False})
    (kernel,) = report.kernels
    return kernel


@pytest.mark.parametrize(("function", "parts"), [(rotated, 2), (turned, 4)])
def test_every_element_is_read_once(function: Callable[..., Tensor], parts: int) -> None:
    source = planned(function).source
    assert source.count("tl.store(") == parts and source.count("tl.load(in") == 3 * parts
    assert "mask=" not in source


@pytest.mark.parametrize(("function", "width"), [(unequal, 128), (joined, 128), (rotated, 32)])
def test_other_rows_are_as_they_were(function: Callable[..., Tensor], width: int) -> None:
    """Parts that are unequal, read nothing in common or are shorter than a line."""
    assert planned(function, width).source.count("tl.store(") == 1


def test_the_predicted_time_is_that_of_the_bytes() -> None:
    """Two places that follow each other without a gap are read together."""
    kernel = planned(rotated, 64)
    assert kernel.predicted_us < 1.7 * (kernel.bytes_read + kernel.bytes_written) / 4.2e6


@pytest.mark.rotating
@pytest.mark.parametrize("function", [rotated, turned, unequal])
@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(function: Callable[..., Tensor], rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    near_as_eager(function, [torch.randn(s).to(dtype) for s in ((2, 3, rows, 128), (rows, 128), (rows, 128))], 1e-5)


def test_a_row_that_is_written_over_itself() -> None:
    """Every part reads the whole row: nothing is overwritten before it was read."""

    def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> None:
        x.copy_(rotated(x, cosine, sine))

    torch.manual_seed(0)
    x, cosine, sine = torch.randn(5, 7, 128), torch.randn(7, 128), torch.randn(7, 128)
    torch._dynamo.reset()
    own, eager = x.clone(), x.clone()
    torch.compile(turn, backend="onepass", options=INTERPRETED)(own, cosine, sine)
    turn(eager, cosine, sine)
    torch.testing.assert_close(own, eager)
