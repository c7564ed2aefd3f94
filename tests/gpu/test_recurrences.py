"""Loops over time steps on a real GPU: values, gradients, and the time of each kernel beside its bytes and its price.

`pytest -s tests/gpu/test_recurrences.py` prints the times; 2048 steps take a minute or two to trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.lowering.recurrences import recurrence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gated(x: Tensor, z: Tensor, h: Tensor) -> Tensor:
    ys = []
    for t in range(x.shape[1]):
        h = torch.sigmoid(z[:, t]) * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)


def selective(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor) -> Tensor:
    """Mamba's S6. x, dt, z: [batch, time, channels], a: [channels, n], b, c: [batch, time, n]."""
    h, ys = x.new_zeros((x.shape[0], x.shape[2], a.shape[1]), dtype=torch.float32), []
    for t in range(x.shape[1]):
        step = dt[:, t].float()
        h = torch.exp(step[..., None] * a) * h + (step * x[:, t])[..., None] * b[:, t, None]
        ys.append((h * c[:, t, None]).sum(-1) + d * x[:, t])
    return torch.stack(ys, 1).to(x.dtype) * F.silu(z)


def sequences(batch: int, steps: int, channels: int) -> list[Tensor]:
    whole = (batch, steps, channels)
    return [torch.randn(s, device="cuda", requires_grad=True) for s in (whole, whole, (batch, channels))]


def states(batch: int, steps: int, channels: int, n: int) -> list[Tensor]:
    def half(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, z, dt = (half(batch, steps, channels) for _ in range(3))
    rate, weight = -4 * torch.rand(channels, n, device="cuda"), torch.randn(channels, device="cuda")
    given = [x, F.softplus(dt), rate, half(batch, steps, n), half(batch, steps, n), weight, z]
    return [t.requires_grad_() for t in given]


def check(function: Callable[..., Tensor], given: list[Tensor], slack: float) -> None:
    torch._dynamo.reset()
    ours = torch.compile(function, backend="onepass", options={"strict": True})(*given)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = function(*exact)
    tangent = torch.randn_like(ours)
    found = (ours, *torch.autograd.grad(ours, given, tangent))
    wanted = (expected, *torch.autograd.grad(expected, exact, tangent.double()))
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.double() - theirs).abs().max().item() <= slack * (1 + theirs.abs().max().item())


@pytest.mark.parametrize("steps", [5, 32, 200])
def test_values_and_gradients(steps: int) -> None:
    check(gated, sequences(3, steps, 70), 1e-5)
    check(selective, states(2, steps, 70, 16), 4e-2)


def test_chunks() -> None:
    a, b = torch.rand(300_001, 2, device="cuda"), torch.randn(300_001, 2, device="cuda")
    for reverse in (False, True):
        ours = torch.compile(lambda a, b, r=reverse: recurrence(a, b, None, r) + 1, backend="onepass")(a, b)
        exact = recurrence(a.double().cpu(), b.double().cpu(), None, reverse) + 1
        torch.testing.assert_close(ours.double().cpu(), exact, rtol=1e-5, atol=1e-5)


TIMED: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]]]] = {
    "32 steps": (gated, lambda: sequences(64, 32, 2048)),
    "512 steps": (gated, lambda: sequences(64, 512, 2048)),
    "selective": (selective, lambda: states(8, 2048, 2048, 16)),
}


@pytest.mark.parametrize("name", TIMED)
def test_times(name: str) -> None:
    """Prints what each kernel moves, its predicted and its measured time."""
    function, make = TIMED[name]
    torch._dynamo.reset()
    print(f"\n{name}\n{onepass.profile(function, *make())}")
