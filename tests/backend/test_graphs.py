"""Whole programs as CUDA graphs, on a driver that is not there and with kernels that Triton's interpreter runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onepass import compilation
from onepass.backend import watch_compilations
from onepass.runtime.executable import Executable
from onepass.runtime.graphs import Graphs

from ..runtime.graph_fake import FakeDriver, install, interpreted

D = 16


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = install(monkeypatch)

    def as_graph(executable: Executable, record: Any, graph: Any, mode: str) -> Callable[[list[Any]], Any]:
        kernels = [interpreted(fake, k) for k in executable.kernels]
        return Graphs(Executable(executable.host, kernels), lambda _device: fake, mode, record).call

    monkeypatch.setattr(compilation, "_as_graph", as_graph)
    return fake


def compiled(function: Callable[..., Any], graphs: str = "on", dynamic: bool | None = None, **options: Any) -> Any:
    settings = {"strict": True, "target": "triton-interpret", "graphs": graphs, **options}
    return torch.compile(function, backend="onepass", options=settings, dynamic=dynamic)


@contextmanager
def one_launch() -> Iterator[None]:
    with watch_compilations() as found:
        yield
    how = [c.record.graph for c in found]
    assert how and all(h.startswith("one launch") for h in how), how


def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x + F.gelu(F.layer_norm(x, (D,)) @ w) @ v


def test_products_and_kernels(driver: FakeDriver) -> None:
    run, w, v = compiled(block, fuse=False), torch.randn(D, D), torch.randn(D, D)
    with one_launch():
        kept = [(x, run(x, w, v)) for x in (torch.randn(5, D) for _ in range(6))]
    for x, y in kept:
        torch.testing.assert_close(y, block(x, w, v))
    assert driver.log.count("launch") == 4


def test_two_forwards_before_a_backward(driver: FakeDriver) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return block(x, w, v).square().mean()

    run, w, v = compiled(loss), torch.randn(D, D, requires_grad=True), torch.randn(D, D, requires_grad=True)

    def gradients(function: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        w.grad = v.grad = None
        first, second = function(x, w, v), function(y, w, v)
        first.backward()
        second.backward()
        return [first.detach(), second.detach(), w.grad, v.grad]

    with one_launch():
        for _ in range(5):
            x, y = torch.randn(5, D), torch.randn(5, D)
            for ours, eager in zip(gradients(run, x, y), gradients(loss, x, y), strict=True):
                torch.testing.assert_close(ours, eager)
    assert driver.log.count("launch") > 8


def test_dropout_is_as_without_graphs(driver: FakeDriver) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout((x @ w).relu(), 0.5) @ w

    x, w = torch.randn(8, D), torch.randn(D, D)
    series = {}
    for mode in ("off", "on"):
        torch._dynamo.reset()
        run = compiled(function, mode, fuse=False)
        torch.manual_seed(3)
        series[mode] = [run(x, w) for _ in range(6)]
    for ours, without in zip(series["on"], series["off"], strict=True):
        torch.testing.assert_close(ours, without)
    assert driver.log.count("launch") == 4 and not torch.equal(series["on"][4], series["on"][5])


def test_sizes_change(driver: FakeDriver) -> None:
    run, w, v = compiled(block, dynamic=True, fuse=False), torch.randn(D, D), torch.randn(D, D)
    with one_launch():
        for rows in [5, 7, 9] * 4:
            x = torch.randn(rows, D)
            torch.testing.assert_close(run(x, w, v), block(x, w, v))
    assert len(driver.graphs) == 3


def test_overwritten_inputs(driver: FakeDriver) -> None:
    def step(p: torch.Tensor, m: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        m.mul_(0.9).add_(p * 0.1)
        p.sub_(m * 0.01)
        return (x @ p).relu() @ m

    run = compiled(step)
    ours = [torch.randn(D, D), torch.randn(D, D)]
    eager = [t.clone() for t in ours]
    with one_launch():
        for _ in range(7):
            x = torch.randn(4, D)
            torch.testing.assert_close(run(*ours, x), step(*eager, x))
    torch.testing.assert_close(ours, eager)


def test_many_tensors(driver: FakeDriver) -> None:
    shapes = [(17, 5), (9,), (3, 7, 2), (6,), (33, 2), (4, 4), (5,), (11,)]

    def update(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
        total = torch.stack([(g * g).sum() for g in gradients]).sum()
        for p, g in zip(parameters, gradients, strict=True):
            p.sub_(g * torch.rsqrt(total + 1))
        return total

    run = compiled(update)
    ours = [torch.randn(s) for s in shapes]
    eager = [t.clone() for t in ours]
    with one_launch():
        for _ in range(6):
            gradients = [torch.randn(s) for s in shapes]
            torch.testing.assert_close(run(ours, gradients), update(eager, gradients))
    torch.testing.assert_close(ours, eager)
