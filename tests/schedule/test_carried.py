"""Rows reduced and columns summed over rows in one pass: each program carries the columns' states from row to row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.checking import compiled

import onepass

TARGETS = ["cpu", "triton-interpret"]


def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def root_mean_square(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w + b


def biased_softmax(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * w + b, -1)


def compile_for(target: str, function: Callable[..., object], **settings: object) -> Callable[..., object]:
    if target != "cpu":
        pytest.importorskip("triton")
    return torch.compile(function, backend="onepass", options={"target": target, "strict": True}, **settings)


def close(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> None:
    for a, b, c in zip(ours, eager, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        limit = 2 * (b.double() - c).abs().max() + 16 * torch.finfo(a.dtype).eps * c.abs().max()
        assert (a.double() - c).abs().max() <= limit


def step(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients for a gradient that is the last tensor."""
    leaves = [t.clone().requires_grad_() for t in tensors[:-1]]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, tensors[-1])]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("function", [norm, root_mean_square, biased_softmax])
@pytest.mark.parametrize("shape", [(512, 256), (137, 301), (3, 50, 260), (4000, 9), (65, 2050)])
def test_training_steps(function: Callable[..., torch.Tensor], shape: tuple[int, ...], target: str) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    n = shape[-1:]
    tensors = [torch.randn(s, generator=generator) + 0.5 for s in (shape, n, n, shape)]
    ours = step(compile_for(target, function), *tensors)  # type: ignore[arg-type]
    close(ours, step(function, *tensors), step(function, *(t.double() for t in tensors)))


@pytest.mark.parametrize("target", TARGETS)
def test_every_kind_of_state(target: str) -> None:
    """Sums, maxima, value and index, variances and products over columns beside a softmax of every row."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.softmax(x, -1)
        return [y, y.sum(0), x.amax(0), x.var(0), (x > 1).any(0), (1 + y / 64).prod(0), x.argmax(0)]

    x = torch.randn(520, 70, generator=torch.Generator().manual_seed(1))
    ours, eager, exact = compile_for(target, function)(x), function(x), function(x.double())
    assert torch.equal(ours[4], eager[4]) and torch.equal(ours[6], eager[6])  # type: ignore[index]
    floats = [0, 1, 2, 3, 5]
    close([ours[k] for k in floats], [eager[k] for k in floats], [exact[k] for k in floats])  # type: ignore[index]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types(dtype: torch.dtype, target: str) -> None:
    tensors = [torch.randn(s).to(dtype) for s in ((300, 130), (130,), (130,), (300, 130))]
    ours = step(compile_for(target, norm), *tensors)  # type: ignore[arg-type]
    close(ours, step(norm, *tensors), step(norm, *(t.double() for t in tensors)))


@pytest.mark.parametrize("target", TARGETS)
def test_rows_known_only_at_run_time(target: str) -> None:
    run = compile_for(target, norm, dynamic=True)
    for rows in (600, 77, 2, 1100) if target == "cpu" else (300, 77, 2):  # the interpreter is slow
        tensors = [torch.randn(s) for s in ((rows, 96), (96,), (96,), (rows, 96))]
        for t in tensors[1:3]:
            torch._dynamo.mark_static(t)
        ours = step(run, *tensors)  # type: ignore[arg-type]
        close(ours, step(norm, *tensors), step(norm, *(t.double() for t in tensors)))


def backward_kernels(function: Callable[..., torch.Tensor], rows: int, columns: int, target: str) -> list[str]:
    x, w, b = (torch.randn(s, requires_grad=True) for s in ((rows, columns), (columns,), (columns,)))
    explained = onepass.explain(function, x, w, b, target=target)
    return [k.schedule for g in explained.graphs if g.direction == "backward" for k in g.kernels]


@pytest.mark.parametrize("function", [norm, root_mean_square, biased_softmax])
def test_the_backward_is_one_pass_and_a_finish(function: Callable[..., torch.Tensor]) -> None:
    schedules = backward_kernels(function, 4096, 1024, "cpu")
    assert len(schedules) == 2 and "split over c0" in schedules[0]


def test_too_few_rows_or_too_many_states_stay_apart() -> None:
    assert not any("chunk" in s and "c1[131072]: swept" in s for s in backward_kernels(norm, 64, 131072, "cpu"))
    (launch,) = backward_kernels(norm, 12, 8192, "cpu")
    assert " | " in launch and "split" not in launch  # rows and columns, side by side


def test_a_call_gives_the_same_bits_every_time() -> None:
    tensors = [torch.randn(s) for s in ((3000, 257), (257,), (257,), (3000, 257))]
    run = compiled(norm)
    first = step(run, *tensors)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(run, *tensors), strict=True))
